"""A whole server against malformed requests over gRPC and REST; benchmarks/fuzz_serve.py says what is asked of it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from fuzz_clients import Unclean, judge  # noqa: E402
from fuzz_serve import make_case  # noqa: E402


@pytest.mark.parametrize("count", [150, pytest.param(4000, marks=pytest.mark.slow)])
def test_malformed_requests_are_answered_cleanly_and_leave_nothing_behind(count):
    command = [sys.executable, "benchmarks/fuzz_serve.py", "--count", str(count), "--seed", "20", "--dry"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count:,} requests" in done.stdout
    assert "Failures: none." in done.stdout


def test_a_case_is_the_same_each_time_and_cases_differ():
    assert [make_case(3, n) for n in range(50)] == [make_case(3, n) for n in range(50)]
    assert len({make_case(3, n) for n in range(1, 100, 2)}) == 50


def test_the_fuzzer_notices_answers_that_are_not_clean():
    assert judge(400, b'{"error": "no"}') == "http 400"
    for status, body in ((500, b'{"error": "x"}'), (400, b"no"), (400, b'{"error": ""}'), (404, b'{"error": "Traceback"}')):
        with pytest.raises(Unclean):
            judge(status, body)
