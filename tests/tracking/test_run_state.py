"""Who trains in a folder, and how runs ended."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hurtle.errors import HurtleError
from hurtle.tracking.metrics_tail import last_metrics
from hurtle.tracking.run_folder import RunFolder
from hurtle.tracking.run_state import hold, is_running, state_of

HOLDER = """
import sys, time
from pathlib import Path
from hurtle.tracking.run_state import hold
held = hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_is_exclusive_and_ends_with_its_holder(tmp_path):
    assert not is_running(tmp_path)
    with hold(tmp_path):
        assert is_running(tmp_path)
        with pytest.raises(HurtleError, match="is being trained at this moment"):
            hold(tmp_path, patience=0.05)
    assert not is_running(tmp_path)
    held = hold(tmp_path)
    del held
    assert not is_running(tmp_path)


def test_a_killed_process_leaves_nothing_locked(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    assert is_running(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not is_running(tmp_path)


def test_programs_that_are_started_do_not_inherit_the_lock(tmp_path):
    held = hold(tmp_path)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as process:
        held.close()
        assert not is_running(tmp_path)
        process.kill()


def test_where_there_are_no_locks_fresh_files_count(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError("not supported")

    monkeypatch.setattr("hurtle.tracking.run_state.fcntl.flock", no_locks)
    hold(tmp_path).close()
    assert not is_running(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert is_running(tmp_path)
    long_ago = time.time() - 1000
    os.utime(tmp_path / "metrics.jsonl", (long_ago, long_ago))
    assert not is_running(tmp_path)


@pytest.mark.parametrize(
    ("summary", "state"),
    [
        ({}, "crashed"),
        ({"stopped_by": "Ctrl-C"}, "stopped"),
        ({"stopped_by": "SIGTERM"}, "stopped"),
        ({"stopped_by": "total_steps"}, "finished"),
        ({"stopped_by": "stop_at_return"}, "finished"),
    ],
)
def test_the_state_of_a_run_that_nobody_trains(tmp_path, summary, state):
    folder = RunFolder.create(tmp_path)
    assert state_of(folder, summary) == state
    with hold(folder.path):
        assert state_of(folder, summary) == "running"


def test_the_newest_metrics_whatever_the_file_looks_like(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert last_metrics(file) == {}
    file.write_bytes(b'{"step": 1, "a": 1.5, "b": 2}\n[1]\n{"step": 2, "a": null, "c": "text"}\n\xff\n{"step": 3, "a": 7')
    assert last_metrics(file) == {"step": 2.0, "a": 1.5, "b": 2.0}
    file.write_text('{"old": 1}\n' + '{"step": 5}\n' * 10_000)
    assert last_metrics(file) == {"step": 5.0}
