"""Policy files, made once: an export takes a second, and most tests only read it."""

import gc

import pytest
from export_helpers import hand_made

import hurtle


@pytest.fixture(scope="session", autouse=True)
def quick_exports():
    """Imported by the processes that export, when they do: it takes seconds."""
    import quick_export  # noqa: F401


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory):
    """A function that returns a hand-made run; the same words give the same run."""
    made = {}

    def make(**words):
        key = repr(sorted(words.items()))
        if key not in made:
            made[key] = hand_made(tmp_path_factory.mktemp("run"), **words)
        return made[key]

    return make


@pytest.fixture(scope="session")
def shared_export(tmp_path_factory, shared_run):
    """A function that exports such a run with all outputs and returns the export; the same words give the same file."""
    made = {}

    def make(suffix, stochastic=False, masked=None, **words):
        key = suffix, stochastic, masked, repr(sorted(words.items()))
        if key not in made:
            file = tmp_path_factory.mktemp("export") / "new" / f"policy{suffix}"
            outputs = ("value", "heads", "action")
            is_first = not made
            made[key] = hurtle.export(shared_run(**words), file, outputs=outputs, stochastic=stochastic, masked=masked)
            if is_first:  # it imports as much again as was there, which no garbage collection needs to go through
                gc.collect()
                gc.freeze()
        return made[key]

    return make


@pytest.fixture(scope="session")
def good(shared_export):
    """The bytes of good files, by their ending."""
    return {suffix: shared_export(suffix).path.read_bytes() for suffix in (".onnx", ".pt2")}


@pytest.fixture
def put(tmp_path):
    """A function that writes bytes to a file of some name."""

    def write(content, suffix):
        path = tmp_path / f"policy{suffix}"
        path.write_bytes(content)
        return path

    return write
