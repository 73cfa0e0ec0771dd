"""Many seeds in one process: the plan, what the process tells, its end, the command line. One slow test trains."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import hurtle
from hurtle.cli import main
from hurtle.errors import HurtleError
from hurtle.experiments import together_process
from hurtle.experiments.records import RunRecord
from hurtle.experiments.run_processes import RunProcesses, Task
from hurtle.experiments.seeds import choose, plan
from hurtle.experiments.together_process import TogetherProcess
from hurtle.experiments.together_worker import teller
from hurtle.runners.settings import make_settings
from hurtle.tracking.run_state import is_running

WORKER = """
import json, os, pathlib, signal, sys, time
task = json.loads(sys.stdin.readline())
does = json.loads(os.environ["BEHAVIOUR"])
def tell(*event):
    print(json.dumps(event), flush=True)
runs = [pathlib.Path(run["resume"] or pathlib.Path(run["settings"]["runs"], run["settings"]["name"])) for run in task["runs"]]
seeds = [int(path.name[5:]) for path in runs]
with open(os.environ["TASKS"], "a") as file:
    file.write(json.dumps([seeds, [run["resume"] for run in task["runs"]], task["most"], len(task["runs"][0]["settings"])]))
    file.write(chr(10))
if does == "refuse":
    print("hurtle: error: capacity is too large", file=sys.stderr)
    sys.exit(2)
most = task["most"] or 3
for seed in seeds[most:]:
    tell("left", seed, "")
def write(path, seed, by):
    path.mkdir(exist_ok=True)
    (path / "checkpoints").mkdir(exist_ok=True)
    (path / "checkpoints" / "step-000000001000.pt").write_text("")
    line = {"step": 1000, "steps": 1000, "seconds": 1.0, "episode_return": float(seed)}
    (path / "metrics.jsonl").write_text(json.dumps(line) + chr(10))
    texts = [f'{name} = {json.dumps(value)}' for name, value in
             {"env": "pendulum", "algorithm": "sac", "seed": seed, "total_steps": 1000}.items()]
    (path / "config.toml").write_text(chr(10).join(texts))
    summary = {"steps": 1000, "seconds": 1.0, "steps_per_second": 1.0, "mean_return": float(seed), "stopped_by": by}
    if by:
        (path / "summary.json").write_text(json.dumps(summary))
paths = dict(zip(seeds, runs))
if does == "wait":
    def end(*_):
        for seed in seeds:
            write(paths[seed], seed, "Ctrl-C")
            tell("ended", seed, "")
        sys.exit(0)
    signal.signal(signal.SIGINT, end)
    pathlib.Path(os.environ["TASKS"] + "-waits").touch()
    time.sleep(60)
for seed in seeds[:most]:
    if does == "diverge" and seed == 1:
        write(paths[seed], seed, "")
        tell("failed", seed, "value_loss is not finite")
    elif does == "die" and seed == 1:
        print("Traceback: out of memory", file=sys.stderr, flush=True)
        for other in seeds[:most]:
            write(paths[other], other, "total_steps" if other < 1 else "")
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        write(paths[seed], seed, "total_steps")
        tell("ended", seed, "")
"""


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """Replaces the process; sets what it does, and returns a function that reads which tasks it got."""
    monkeypatch.setattr(together_process, "COMMAND", (sys.executable, "-I", "-S", "-c", WORKER))
    monkeypatch.setattr("hurtle.experiments.seeds._plot", lambda folder, display: None)
    monkeypatch.setenv("BEHAVIOUR", '"finish"')
    monkeypatch.setenv("TASKS", str(tmp_path / "tasks"))
    monkeypatch.chdir(tmp_path)
    return lambda: [json.loads(line) for line in (tmp_path / "tasks").read_text().splitlines()]


def train(seeds=3, **words):
    how = {"algorithm": "sac", "total_steps": 1000, "side_by_side": True, "name": "mine", "progress": "quiet"}
    return hurtle.train_seeds("pendulum", **{"seeds": seeds, **how, **words})


def test_all_seeds_are_one_task_and_what_does_not_fit_is_another(worker):
    found = train(seeds=5)
    assert [task[:2] for task in worker()] == [[[0, 1, 2, 3, 4], [""] * 5], [[3, 4], [""] * 2]]
    assert [(run.seed, run.state) for run in found.runs] == [(seed, "finished") for seed in range(5)]
    assert not list(found.path.glob("*.log"))
    assert not found.failed
    assert (found.path / "seeds.toml").read_text().startswith("seeds = [0, 1, 2, 3, 4]\nside_by_side = true\n")
    train(seeds=4, parallel=2, name="other")
    assert [task[::2] for task in worker()[2:]] == [[[0, 1, 2, 3], 2], [[2, 3], 2]]


def test_a_seed_that_diverged_has_failed_alone(worker, monkeypatch, capsys):
    monkeypatch.setenv("BEHAVIOUR", '"diverge"')
    found = train()
    assert found.failed == {1: "value_loss is not finite"}
    assert [run.state for run in found.runs] == ["finished", "crashed", "finished"]
    assert "seed 1 crashed: value_loss is not finite" in capsys.readouterr().err
    assert "value_loss" in (found.path / "seed-1.log").read_text()
    monkeypatch.setenv("BEHAVIOUR", '"finish"')
    again = hurtle.train_seeds(resume=found, progress="quiet")
    assert worker()[1][:2] == [[1], [str(found.path / "seed-1")]]
    assert worker()[1][3] == worker()[0][3], "all settings"
    assert [run.state for run in again.runs] == ["finished"] * 3


def test_a_crash_of_the_process_is_that_of_its_seeds(worker, monkeypatch, capsys):
    monkeypatch.setenv("BEHAVIOUR", '"die"')
    found = train(seeds=5)
    assert set(found.failed) == {1, 2}
    assert [run.state for run in found.runs] == ["finished", "crashed", "crashed", "finished", "finished"]
    said = capsys.readouterr().err
    assert said.count("killed by SIGKILL") == 1
    assert "seeds 1, 2 crashed" in said
    assert "out of memory" in (found.path / "seed-0-to-4.log").read_text()


def test_settings_that_do_not_fit_are_tried_once(worker, monkeypatch):
    monkeypatch.setenv("BEHAVIOUR", '"refuse"')
    with pytest.raises(HurtleError, match=r"Every seed failed; see runs/mine. Seed 0: capacity is too large"):
        train(seeds=5)
    assert len(worker()) == 1


def test_ctrl_c_saves_all(worker, monkeypatch, tmp_path):
    monkeypatch.setenv("BEHAVIOUR", '"wait"')
    interrupt_when(Path(f"{tmp_path}/tasks-waits").exists)
    found = train(seeds=3)
    assert found.stopped_by == "Ctrl-C"
    assert [run.state for run in found.runs] == ["stopped"] * 3


def interrupt_when(is_time):
    def interrupt():
        until = time.monotonic() + 60
        while not is_time() and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def test_seeds_are_saved_though_the_parent_is_gone():
    reader, writer = os.pipe()
    tell = teller(writer)
    tell("failed", 3, "why")
    assert json.loads(os.read(reader, 100)) == ["failed", 3, "why"]
    os.close(reader)
    tell("ended", 4, "")
    os.close(writer)


def test_the_plan(tmp_path):
    tasks = [Task(seed, tmp_path, {}) for seed in range(3)]

    def planned(device, side_by_side=None, algorithm="sac", seeds=3):
        return plan(make_settings("pendulum", {"algorithm": algorithm, "device": device}), tasks[:seeds], None, side_by_side)

    assert isinstance(planned("cuda"), TogetherProcess)
    assert isinstance(planned("cuda:1", algorithm="td3"), TogetherProcess)
    assert isinstance(planned("cpu", True), TogetherProcess)
    assert isinstance(planned("cuda", algorithm="ppo"), TogetherProcess)
    for other in (planned("cpu"), planned("cuda", False), planned("cuda", algorithm="impala"), planned("cuda", seeds=1)):
        assert isinstance(other, RunProcesses)
    with pytest.raises(HurtleError, match="cannot train side by side: impala has no version for many seeds"):
        planned("cuda", True, algorithm="impala")


def test_the_user_is_told_why():
    def said(algorithm, device="cuda", **how):
        return choose(make_settings("cartpole", {"algorithm": algorithm, "device": device}), 4, **how).message

    assert said("dqn") == "dqn: 4 seeds side by side, as one learner"
    assert said("ppo") == "ppo: 4 seeds side by side, as one learner"
    assert said("impala") == "impala: one seed after the other on each GPU; impala has no version for many seeds"
    assert said("dqn", side_by_side=False) == "dqn: one seed after the other on each GPU; as asked for"
    assert not said("ppo", device="cpu")


def test_the_command_line(worker, capsys):
    how = ["--algorithm", "sac", "--total-steps", "1000", "--name", "mine", "--progress", "plain"]
    assert main(["train", "pendulum", "--seeds", "3", "--side-by-side", *how]) == 0
    out = capsys.readouterr().out
    assert "sac: 3 seeds side by side, as one learner" in out
    assert "3 of 3 seeds finished" in out
    for line, message in {
        "train pendulum --side-by-side": "--side-by-side is for many seeds: add --seeds 5",
        "train Pendulum-v1 --seeds 2 --side-by-side": "these step on the CPU",
        "train --resume mine --total-steps 2e3 --side-by-side --seeds 2": "and as many runs: leave out --seeds",
    }.items():
        assert main(line.split()) == 2
        assert message in capsys.readouterr().err, line
    assert len(list(Path("runs").iterdir())) == 1


@pytest.mark.slow
def test_training_in_a_process_of_its_own(tmp_path, monkeypatch):
    """Stopped when it has learned, and resumed."""
    monkeypatch.setattr("hurtle.experiments.seeds._plot", lambda folder, display: None)
    monkeypatch.chdir(tmp_path)
    small = {
        "num_envs": 2, "hidden_sizes": (8,), "learning_starts": 16, "batch_size": 8, "capacity": 4_000, "replay_ratio": 0.05,
        "eval_episodes": 2, "trackers": (), "total_steps": 100_000, "curve": False,
    }  # fmt: skip
    interrupt_when(lambda: Path("runs/mine/seed-1/metrics.jsonl").is_file() and has_learned(Path("runs/mine/seed-1")))
    found = train(2, **small)
    assert (found.stopped_by, found.failed) == ("Ctrl-C", {})
    assert [run.state for run in found.runs] == ["stopped"] * 2
    steps = found.runs[0].steps
    assert 100 <= steps < 100_000
    assert {run.steps for run in found.runs} == {steps}
    again = hurtle.train_seeds(resume=found, total_steps=steps + 20, progress="quiet", eval_episodes=2)
    assert [(run.state, run.steps) for run in again.runs] == [("finished", steps + 20)] * 2
    assert again.is_evaluated
    assert not is_running(found.path / "seed-0")
    assert RunRecord.read(found.path / "seed-1").settings["total_steps"] == steps + 20
    assert hurtle.load(found.path / "seed-1").act([[0.0, 0.0, 0.0]]).shape == (1, 1)


def has_learned(folder):
    text = (folder / "metrics.jsonl").read_text()
    return '"value_loss"' in text and text.count("\n") > 1
