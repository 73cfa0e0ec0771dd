"""The scripts that look into the gears run, and keep nothing when they are only tried."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("gemm.py", "| 1 × 64 "),
        ("gpu.py --device cpu --parts rates solve", "| breakout, minGRU, 1 epoch, bf16 "),
        ("gpu.py --device cpu --parts rates learning --settings breakout-impala", "| breakout, small CNN, IMPALA, bf16 "),
        ("buffers.py", "| 17-dim observations, 6-dim actions "),
        ("off_policy.py", "| DQN, 64 × 64, batch 64 "),
        ("off_policy.py --parts seeds", "| 16 "),
        ("inference.py", "| 64×64, batch 1 "),
        ("where.py", "| learn: backward"),
        ("cores.py", "| threads | peak |"),
        ("data_parallel.py", "| 2        |"),
        ("contention.py --situations quiet --rounds 1", "| step() of 512 envs "),
        ("gears.py", "native / general"),
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
