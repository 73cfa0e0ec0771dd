"""The scripts that look into the gears run, and keep nothing when they are only tried."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        pytest.param("gemm.py", "| 1 × 64 ", marks=pytest.mark.slow),
        ("gpu.py --device cpu --parts rates --settings breakout-mingru", "| breakout, minGRU, bf16 "),
        pytest.param("gpu.py --device cpu --parts rates solve", "| breakout, minGRU, bf16 ", marks=pytest.mark.slow),
        pytest.param("inference.py", "| 64×64, batch 1 ", marks=pytest.mark.slow),
        pytest.param("where.py", "| learn: backward", marks=pytest.mark.slow),
        pytest.param("gears.py", "native / general", marks=pytest.mark.slow),
    ],
)
def test_it_prints_its_table(script, said):
    before = {path: path.stat().st_mtime_ns for path in (BENCHMARKS / "results").iterdir()}
    done = subprocess.run(
        [sys.executable, *shlex.split(str(BENCHMARKS / script)), "--quick"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert {path: path.stat().st_mtime_ns for path in (BENCHMARKS / "results").iterdir()} == before
