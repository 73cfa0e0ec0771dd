"""The scripts that look into the native gear run, and keep nothing when they are only tried."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("gemm.py", "| 1 × 64 "),
        pytest.param("where.py", "| learn: backward", marks=pytest.mark.slow),
        pytest.param("gears.py", "native / general", marks=pytest.mark.slow),
    ],
)
def test_it_prints_its_table(script, said):
    before = {path: path.stat().st_mtime_ns for path in (BENCHMARKS / "results").iterdir()}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--quick"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert {path: path.stat().st_mtime_ns for path in (BENCHMARKS / "results").iterdir()} == before
