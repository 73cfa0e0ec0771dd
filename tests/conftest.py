"""Fixtures that several test files share."""

import gc
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
gc.disable()  # until everything is collected
if not Path("/dev/nvidia0").exists():  # before any test file imports triton: without a GPU, its kernels are interpreted
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: tiny networks, and two test processes share the cores
_data = tempfile.TemporaryDirectory(prefix="hurtle-tests-")
os.environ["HURTLE_DATA_DIR"] = _data.name  # runs are signed with a key of the tests' own, not with the user's
_numbers = itertools.count()
TOGETHER = (
    (  # the whole zoo
        "tests/native/test_engine.py",
        "tests/native/test_cuda_sim.py",
        "tests/envs/test_zoo.py",
        "tests/envs/test_ocean.py",
        "tests/vector/test_native_state.py",
    ),
    ("tests/collect/test_native_collector.py", "tests/algorithms/test_native_update.py", "tests/deploy/test_compiled.py"),
    (  # shared exports
        "tests/deploy/test_card.py",
        "tests/deploy/test_exported.py",
        "tests/deploy/test_exporting.py",
        "tests/deploy/test_export_failures.py",
        "tests/deploy/test_export_matrix.py",
        "tests/deploy/test_onnx_file.py",
        "tests/deploy/test_policy_file.py",
        "tests/deploy/test_pt2_file.py",
        "tests/deploy/test_without_hurtle.py",
        "tests/serving/backends/test_policy_backends.py",
    ),
    (  # few tests that take long: files with fewer tests begin later, and the last of them would be waited for
        "tests/vector/test_ray.py",
        "tests/runners/test_ray_runner.py",
        "tests/kernels/test_kernel_loader.py",
        "tests/kernels/test_simulated.py",
        "tests/kernels/triton_kernels/test_replay_sampling.py",
        "tests/envs/test_minatar_seaquest.py",
    ),
)
"""Files that one process takes; most compile or export the same: none of them waits for another or does it again."""


def pytest_collection_finish():
    """Keep all that was imported and collected out of garbage collections, which would go through it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 100)  # tests that look for what was left behind collect it themselves


@pytest.fixture(scope="module", autouse=True)
def earlier_files_are_frozen():
    """Keep what earlier files imported and compiled out of garbage collections too, of this process and of its forks."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With several processes, those files go to the same one, as the tests of each file do."""
    from xdist.scheduler import LoadFileScheduling

    first = {file: files[0] for files in TOGETHER for file in files}

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return first.get(file, file)

    return Together(config, log)


@pytest.fixture(scope="session", autouse=True)
def no_curve():
    """Runs end without a plot, which takes longer than they do; tests/tracking/test_curves.py checks the plots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hurtle.runners.reporting.plot_run", lambda folder: None)
        yield


@pytest.fixture
def with_curve(monkeypatch):
    """Runs end with a plot."""
    from hurtle.tracking.curves import plot_run

    monkeypatch.setattr("hurtle.runners.reporting.plot_run", plot_run)


@pytest.fixture
def all_threads(monkeypatch):
    """Every call runs on as many threads as it may, also where fewer would be faster or there are fewer cores."""
    monkeypatch.setattr("hurtle.native.threads.free_cores", lambda: 8)
    monkeypatch.setattr("hurtle.native.thread_tuner.ladder", lambda most: [most])
    monkeypatch.setattr("hurtle.native.batch.TRIALS", 0)


@pytest.fixture
def other_number_each_call(monkeypatch):
    """A function that replaces a tuner, given its owner and name, by one that takes another number of threads for each call."""
    from hurtle.native.thread_tuner import ThreadTuner

    monkeypatch.setattr("hurtle.native.threads.free_cores", lambda: 4)

    class Other(ThreadTuner):
        numbers = itertools.cycle((3, 2, 4, 1, 1, 2))

        def took(self, work, seconds):
            self.count = next(self.numbers)

    def replace(owner, name):
        tuner = Other(getattr(owner, name).most)
        assert tuner.most == 4
        setattr(owner, name, tuner)
        return tuner

    return replace


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """A function that puts source text into a file of its own, imports it and returns the module."""

    def write(source):
        name = f"written_{os.getpid()}_{next(_numbers)}"
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        found = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(found)
        monkeypatch.setitem(sys.modules, name, module)
        found.loader.exec_module(module)
        return module

    return write


@pytest.fixture(scope="session")
def run_python():
    """A function that runs Python code in a process of its own, with extra environment variables, and returns what it did."""

    def run(code, *arguments, **variables):
        paths = [str(REPO), str(REPO / "tests"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}
        result = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=environment,
            cwd=REPO,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert result.returncode == 0, result.stderr
        return result

    return run


@pytest.fixture(scope="session")
def run_simulated(run_python):
    """The same with CUDA kernels in Numba's simulator."""

    def run(code, *arguments):
        return run_python(f"import quick_simulator\n{code}", *arguments, NUMBA_ENABLE_CUDASIM="1", PYTHONWARNINGS="ignore")

    return run
