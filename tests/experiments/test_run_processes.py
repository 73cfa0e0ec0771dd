"""Processes that train runs: limits of time and memory, single stops, tasks that come later. The workers train nothing."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from hurtle.experiments import run_processes
from hurtle.experiments.run_processes import RunProcesses, Task, session_bytes

WORKER = """
import json, os, signal, subprocess, sys, time
for line in sys.stdin:
    does = json.loads(line)["does"]
    if does == "hang":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(60)
    if does == "grow":
        kept = bytearray(os.urandom(1)) * 300_000_000
        time.sleep(60)
    if does == "child grows":
        subprocess.run([sys.executable, "-I", "-S", "-c", "x = bytearray(b'1') * 300_000_000; import time; time.sleep(60)"])
    if does == "wait":
        signal.signal(signal.SIGINT, lambda *_: (print("done", flush=True), os._exit(0)))
        open(json.loads(line)["log"] + ".waits", "w").close()
        time.sleep(60)
    if does == "where":
        open(json.loads(line)["log"] + ".device", "w").write(os.environ.get("CUDA_VISIBLE_DEVICES", "-"))
        time.sleep(0.2)
    print("done", flush=True)
"""


@pytest.fixture
def task(monkeypatch, tmp_path):
    """Makes a task from its number, what its worker does, and limits."""
    monkeypatch.setattr(run_processes, "COMMAND", (sys.executable, "-I", "-S", "-c", WORKER))
    monkeypatch.setattr(run_processes, "STARTUP", 0.0)
    return lambda number, does="finish", **limits: Task(number, tmp_path / f"trial-{number}", {"does": does}, **limits)


def run(processes, until=lambda: False):
    end = time.monotonic() + 30
    while processes.poll() and not until():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("does", "limits", "message"),
    [
        ("hang", {"seconds": 0.4}, "it ran longer than its limit of 0.4 s"),
        ("grow", {"memory": 200_000_000}, r"it took \d+\.\d MiB of memory, more than its limit of 190.7 MiB"),
        ("child grows", {"memory": 200_000_000}, r"it took \d+\.\d MiB of memory, more than its limit of 190.7 MiB"),
    ],
)
def test_a_run_over_its_limit_is_killed_and_the_others_go_on(task, does, limits, message):
    with RunProcesses([task(0, does, **limits), task(1), task(2)], 1) as processes:
        run(processes)
        assert set(processes.failed) == {0}
        assert [ended.number for ended in processes.take_ended()] == [0, 1, 2]
        assert processes.take_ended() == []
    assert re.fullmatch(message, processes.failed[0])


def test_one_run_is_stopped_and_tasks_may_come_later(task, tmp_path):
    with RunProcesses([task(0, "wait"), task(1, "wait")], 2) as processes:
        processes.expects_more = True
        run(processes, lambda: all((tmp_path / f"trial-{k}.log.waits").exists() for k in (0, 1)))
        processes.stop(0)
        run(processes, lambda: 0 not in processes.running)
        assert [ended.number for ended in processes.take_ended()] == [0]
        assert set(processes.running) == {1}
        assert processes.free == 1
        processes.add(task(2))
        run(processes, lambda: 2 not in processes.running and 2 not in processes.waiting)
        assert [ended.number for ended in processes.take_ended()] == [2]
        assert processes.failed == {}


def test_a_run_that_takes_too_long_to_stop_is_killed(task):
    with RunProcesses([task(0, "hang", grace=0.2)], 1) as processes:
        run(processes, lambda: time.sleep(0.3) is None)
        processes.stop(0)
        run(processes)
        assert processes.failed[0].startswith("killed by SIGKILL")


def test_each_process_sees_the_gpu_with_the_fewest_others(task, tmp_path):
    with RunProcesses([task(k, "where") for k in range(3)], 3, afresh=True, devices=("4", "7")) as processes:
        run(processes)
    seen = [(tmp_path / f"trial-{k}.log.device").read_text() for k in range(3)]
    assert seen == ["4", "7", "4"]


def test_memory_counts_the_processes_that_a_run_has_started():
    assert session_bytes(10**9) == 0  # no such session
    code = "x = bytearray(b'1') * 100_000_000; print(1, flush=True); input()"
    inner = [sys.executable, "-I", "-S", "-c", code]
    outer = f"import subprocess; subprocess.run({json.dumps(inner)})"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        process.stdout.readline()
        size = session_bytes(process.pid)
        assert 100_000_000 < size < 150_000_000
        process.communicate(b"\n")


def test_a_stop_that_comes_too_late_does_not_end_the_next_run(monkeypatch, tmp_path):
    code = "import hurtle.experiments.run_worker as w, sys; w.train_run = lambda **words: None; sys.exit(w.main())"
    monkeypatch.setattr(run_processes, "COMMAND", (sys.executable, "-c", code))
    tasks = [Task(k, tmp_path / f"trial-{k}", {}) for k in range(2)]
    with RunProcesses(tasks[:1], 1) as processes:
        processes.expects_more = True
        run(processes)
        processes._workers[0].process.send_signal(signal.SIGINT)  # it is waiting for something to do
        time.sleep(0.2)
        processes.add(tasks[1])
        run(processes)
        assert processes.failed == {}


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [("0,2", "cuda", (2, True, ["0", "2"])), ("0,2", "cuda:1", (1, True, [])), ("-1", "auto", (8, False, [])),
     ("", "auto", (8, False, [])), ("3", "auto", (1, True, []))],
)  # fmt: skip
def test_runs_share_the_gpus_that_are_visible(monkeypatch, visible, device, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(run_processes, "free_cores", lambda: 8)
    found = run_processes.share_machine(device, [], None)
    assert (found._at_once, found._afresh, found._devices) == expected


def test_the_limit_of_time_begins_with_the_run_folder(task, tmp_path, monkeypatch):
    monkeypatch.setattr(run_processes, "STARTUP", 30.0)
    with RunProcesses([task(0, "hang", seconds=0.2)], 1) as processes:
        run(processes, lambda: time.sleep(0.5) is None)
        assert set(processes.running) == {0}  # it may still be importing torch
        (tmp_path / "trial-0").mkdir()
        run(processes)
        assert set(processes.failed) == {0}


def test_a_process_that_hangs_ends_when_its_parent_is_gone(tmp_path):
    hangs = "def hang(**words): open({file!r}, 'w').close(); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code = "import hurtle.experiments.run_worker as w, signal, sys, time\n{hangs}\nw.train_run = hang; w.main()"
    ready = tmp_path / "ready"
    command = [sys.executable, "-c", code.format(hangs=hangs.format(file=str(ready)))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdin.write(json.dumps({"log": str(tmp_path / "log"), "patience": 0.3}).encode() + b"\n")
        process.stdin.flush()
        run_until = time.monotonic() + 30
        while not ready.exists() and time.monotonic() < run_until:
            time.sleep(0.02)
        process.stdin.close()  # as when the parent is killed
        assert process.wait(timeout=20) == -signal.SIGKILL
