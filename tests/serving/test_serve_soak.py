"""A short run of benchmarks/soak.py, which says what the server must do."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from soak_client import Soaker  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("minutes", ["0.05", "0.5"])
def test_mixed_load_with_reloads_cancels_and_killed_clients_is_answered_exactly_once(minutes):
    command = [sys.executable, "benchmarks/soak.py", "--minutes", minutes, "--dry"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Failures: none." in done.stdout


def test_the_soak_notices_answers_that_belong_to_another_request():
    x = np.ones((1, 4), np.float32)
    for answer, is_right in (
        (("1-1", "batch", "1", 2 * x), True),
        (("1-2", "batch", "1", 2 * x), False),
        (("1-1", "worker", "1", 2 * x), False),
        (("1-1", "batch", "1", 2 * x + 1), False),
        (("1-1", "batch", "1", 2 * x[:, :3]), False),
    ):
        soaker = Soaker(0, 0, 1)
        soaker.check("batch", "1-1", x, answer)
        assert (soaker.failures == []) is is_right
    soaker.check("scale", "1-1", x, ("1-1", "scale", "3", 2 * x + 0.375))
    assert soaker.versions == {"3"}
