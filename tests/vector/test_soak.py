"""The soak as a test: always a few faults, two thousand on request."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def run(faults, timeout):
    script = Path(__file__).with_name("soak.py")
    done = subprocess.run([sys.executable, script, "--faults", str(faults)], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no hang, no process, file or segment left" in done.stdout


@pytest.mark.slow
def test_a_few_faults():
    run(20, timeout=600)


@pytest.mark.slow
def test_two_thousand_faults():
    run(2000, timeout=3600)
