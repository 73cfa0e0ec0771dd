"""What real clients and the soak run found in the server, each as a small test."""

import signal

import numpy as np
import pytest
from test_server import infer, start

from hurtle.errors import ServingError
from hurtle.serving.tensors import from_values


def test_sigterm_ends_a_server_whose_standard_error_nobody_reads_any_more(tmp_path):
    path = tmp_path / "double.test"
    path.write_text("")
    process, port, _ = start(str(path), "--executor", "inline")
    try:
        assert infer(port)[0] == 200
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()


def test_whole_numbers_written_as_floats_are_taken_for_integers():
    assert np.array_equal(from_values("x", "INT32", (2,), [1.0, -2]), np.array([1, -2], np.int32))
    for bad in (1.5, float("nan"), float("inf"), 1e300):
        with pytest.raises(ServingError, match="'x'"):
            from_values("x", "INT32", (1,), [bad])
