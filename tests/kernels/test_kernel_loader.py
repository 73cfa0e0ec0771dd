"""The kernels run from a copy that is named by its content."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hurtle.kernels import loader as kernel_loader


def test_the_copy_is_what_runs_and_is_loaded_once():
    kernels = kernel_loader.load_kernels()
    assert kernel_loader.load_kernels() is kernels
    copies = {Path(file).name for file in Path(kernels.__path__[0]).glob("*.py")}
    assert copies == {file.name for file in kernel_loader.SOURCE.glob("*.py")}
    assert Path(kernels.gemm.__file__).parent != kernel_loader.SOURCE


def test_another_text_another_width_or_mode_is_another_folder(tmp_path, monkeypatch):
    source = tmp_path / "kernels"
    shutil.copytree(kernel_loader.SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    files = sorted(source.glob("*.py"))
    before = kernel_loader._digest(files)
    (source / "gemm.py").write_text((source / "gemm.py").read_text() + "\n# changed\n")
    assert kernel_loader._digest(files) != before


def test_another_kind_of_policy_says_once_that_it_compiles(monkeypatch, capsys):
    monkeypatch.setattr(kernel_loader, "_NEW", set())
    marker = Path(kernel_loader.load_kernels().__file__).parent / "policy-11111.compiled"
    try:
        for said in (True, False):
            kernel_loader.say_if_new(*[True] * 5)
            assert ("compiling the kernels of this kind of policy (first run only)" in capsys.readouterr().err) == said
    finally:
        marker.unlink()


@pytest.mark.slow
def test_two_processes_that_start_together_both_find_it(tmp_path):
    code = "from hurtle.kernels.loader import load_kernels; print(load_kernels().__name__)"
    env = {**os.environ, "HURTLE_CACHE_DIR": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    names = {process.communicate(timeout=600)[0].strip() for process in both}
    assert len(names) == 1
    (name,) = names
    assert {path.name for path in tmp_path.iterdir()} == {name, f"{name}.used", ".lock"}  # nothing half-made is left


COMPILES = """
import sys
from numba.core import event
from hurtle.kernels.loader import load_kernels

class Names(event.Listener):
    def on_start(self, found):
        print(found.data["dispatcher"].py_func.__name__)

    def on_end(self, found):
        pass

event.register("numba:compile", Names())
import numpy as np
numbers = np.zeros(16, np.float32)
print("ready", flush=True)
sys.stdin.readline()
load_kernels().sparse.list_rows(numbers, 1, 4, numbers, numbers, numbers, np.zeros(16, np.int32), np.zeros(1, np.int32), 4)
"""


def test_of_two_processes_that_want_the_same_function_one_compiles_it(tmp_path):
    env = {**os.environ, "HURTLE_CACHE_DIR": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", COMPILES], env=env, **pipes) for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    compiled = [process.communicate(timeout=600)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted("list_rows" in names for names in compiled) == [False, True]


VARIANTS = """
import ctypes, sys
import numpy as np
from hurtle.kernels.loader import load_kernels
from hurtle.native.build import address_of_entry
kernels = load_kernels()
for dtype in sys.argv[1:]:
    listing = np.zeros(1, kernels.sparse.LISTING)
    obs, values, lists = np.arange(16).astype(dtype), np.zeros(32, np.float32), np.zeros(64, np.int32)
    listing["obs"], listing["rows"], listing["inputs"], listing["length"] = obs.ctypes.data, 1, 16, 16
    listing["values"], listing["lists"] = values.ctypes.data, lists.ctypes.data
    function = kernels.sparse.list_observations_of(obs.dtype)
    word = ctypes.c_int64
    called = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(word), ctypes.POINTER(word), word)(address_of_entry(function))
    result, error = word(), word()  # Numba's calling convention
    assert called(ctypes.byref(result), ctypes.byref(error), listing.ctypes.data) == 0
    print(dtype, values[:15].tolist() == list(range(1, 16)))
"""


def test_variants_that_different_processes_compiled_are_not_taken_for_each_other(tmp_path):
    env = {**os.environ, "HURTLE_CACHE_DIR": str(tmp_path)}
    outcomes = []
    for dtypes in (["float32"], ["uint8"], ["float32", "uint8", "float32"]):  # the first two count the same functions
        command = [sys.executable, "-c", VARIANTS, *dtypes]
        done = subprocess.run(command, env=env, text=True, capture_output=True, check=True, timeout=600)
        outcomes += done.stdout.split()
    assert outcomes == ["float32", "True", "uint8", "True", "float32", "True", "uint8", "True", "float32", "True"]
