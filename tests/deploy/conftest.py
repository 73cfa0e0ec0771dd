"""Good policy files, made once."""

import pytest
from export_helpers import hand_made

import hurtle


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    """The bytes of good files, by their ending."""
    folder = tmp_path_factory.mktemp("good")
    run = hand_made(folder)
    for suffix in (".onnx", ".pt2"):
        hurtle.export(run, folder / f"policy{suffix}", outputs=("action", "logits"))
    return {suffix: (folder / f"policy{suffix}").read_bytes() for suffix in (".onnx", ".pt2")}


@pytest.fixture
def put(tmp_path):
    """A function that writes bytes to a file of some name."""

    def write(content, suffix):
        path = tmp_path / f"policy{suffix}"
        path.write_bytes(content)
        return path

    return write
