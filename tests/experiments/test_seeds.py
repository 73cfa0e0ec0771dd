"""Many seeds: processes, crashes, signals, resuming. Most tests train nothing: the workers only write what training writes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

import hurtle
from hurtle.algorithms.a2c import A2C
from hurtle.algorithms.a2c_config import A2CConfig
from hurtle.cli import main
from hurtle.errors import HurtleError
from hurtle.experiments import run_processes
from hurtle.experiments.records import RunRecord
from hurtle.experiments.run_processes import RunProcesses, Task
from hurtle.experiments.seeds import plan
from hurtle.experiments.seeds_display import Aggregate, Line, PlainSeeds, draw
from hurtle.runners.settings import make_settings
from hurtle.tracking.run_state import hold, is_running

REPO = Path(__file__).parents[2]
WORKER = """
import json, os, pathlib, signal, sys, time
words, behaviour = json.loads(sys.stdin.readline()), json.loads(os.environ["BEHAVIOUR"])
settings, resume = words["settings"], words["resume"]
folder = pathlib.Path(resume or pathlib.Path(settings["runs"], settings["name"]))
seed = folder.name[5:]
does = behaviour.get(seed, "finish")
folder.mkdir(exist_ok=True)
(folder / "checkpoints").mkdir(exist_ok=True)
with open(folder / "starts", "a") as file:
    file.write(json.dumps(words) + chr(10))
if does == "crash":
    print("Traceback: it broke", file=sys.stderr)
    sys.exit(1)
if does == "refuse":
    print("hurtle: error: gamma does not fit", file=sys.stderr)
    sys.exit(2)
if does == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if not resume:
    texts = [f'{name} = {json.dumps(settings[name])}' for name in ("env", "algorithm", "seed", "total_steps")]
    (folder / "config.toml").write_text(chr(10).join(texts))
steps = settings.get("total_steps", 1000)
def end(by, steps):
    with open(folder / "metrics.jsonl", "a") as file:
        for step in (steps // 2, steps):
            line = {"step": step, "steps": step, "seconds": step / 100, "episode_return": 10.0 * int(seed)}
            file.write(json.dumps(line) + chr(10))
    (folder / "checkpoints" / f"step-{steps:012}.pt").write_text("")
    summary = {"steps": steps, "seconds": 1.0, "steps_per_second": 100.0, "mean_return": 10.0 * int(seed), "stopped_by": by}
    if by == "total_steps":
        summary["evaluation"] = {"mean": 100.0 + int(seed)}
    (folder / "summary.json").write_text(json.dumps(summary))
    sys.exit(0)
if does == "wait":
    signal.signal(signal.SIGINT, lambda *_: end("Ctrl-C", 500))
    (folder / "waits").touch()
    time.sleep(60)
    sys.exit(3)
end("total_steps", steps)
"""


@pytest.fixture
def workers(monkeypatch, tmp_path):
    """Replaces training; a function that sets what the workers of some seeds do: finish, crash, refuse, die or wait."""
    monkeypatch.setattr(run_processes, "COMMAND", (sys.executable, "-I", "-S", "-c", WORKER))
    monkeypatch.setattr("hurtle.experiments.seeds._plot", lambda folder, display: None)
    monkeypatch.setenv("BEHAVIOUR", "{}")
    monkeypatch.chdir(tmp_path)
    return lambda **behaviour: monkeypatch.setenv("BEHAVIOUR", json.dumps({name[1:]: does for name, does in behaviour.items()}))


def train(seeds=3, **words):
    return hurtle.train_seeds("cartpole", **{"seeds": seeds, "total_steps": 1000, "progress": "quiet", **words})


def starts(folder, seed):
    return [json.loads(line) for line in (folder / f"seed-{seed}" / "starts").read_text().splitlines()]


def ctrl_c_when(exists):
    """Interrupts this process as soon as these files exist."""

    def interrupt():
        until = time.monotonic() + 30
        while not all(path.exists() for path in exists) and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def test_each_seed_has_its_own_folder_and_all_give_one_result(workers):
    found = train(seed=4, learning_rate=0.5, name="mine")
    assert found.path == Path("runs/mine")
    assert [(run.seed, run.state, run.evaluation) for run in found.runs] == [
        (4, "finished", 104.0),
        (5, "finished", 105.0),
        (6, "finished", 106.0),
    ]
    assert (found.returns.value, found.is_evaluated, found.failed, found.stopped_by) == (105.0, True, {}, "")
    assert found.returns.low >= 104
    (words,) = starts(found.path, 5)
    assert (words["settings"]["learning_rate"], words["settings"]["seed"], words["settings"]["env"]) == (0.5, 5, "cartpole")
    assert json.loads((found.path / "summary.json").read_text())["iqm"]["value"] == 105.0
    assert not list(found.path.glob("*.log"))  # nothing was printed
    assert not is_running(found.path)


def test_a_crash_is_reported_and_stops_no_other(workers, capsys):
    workers(s0="crash", s1="die")
    found = train(seeds=4, parallel=2)
    assert set(found.failed) == {0, 1}
    assert "exit status 1" in found.failed[0]
    assert "Traceback: it broke" in found.failed[0]
    assert "killed by SIGKILL, perhaps because the memory was full" in found.failed[1]
    assert [run.seed for run in found.runs if run.state == "finished"] == [2, 3]
    assert found.returns.value == 102.5
    assert "seed 0 crashed: exit status 1" in capsys.readouterr().err
    assert "it broke" in (found.path / "seed-0.log").read_text()


def test_if_all_fail_alike_the_error_is_theirs_and_few_are_tried(workers):
    workers(**{f"s{seed}": "refuse" for seed in range(20)})
    with pytest.raises(HurtleError, match=r"Every seed failed; see runs/.*Seed 0: gamma does not fit"):
        train(seeds=20, parallel=2)
    (folder,) = Path("runs").iterdir()
    assert len(list(folder.glob("seed-*/starts"))) <= 4


def test_ctrl_c_saves_all_and_resuming_goes_on_with_what_is_not_finished(workers):
    workers(s1="wait", s2="wait")
    ctrl_c_when([Path("runs/mine/seed-1/waits"), Path("runs/mine/seed-2/waits")])
    found = train(seeds=5, parallel=3, name="mine", gamma=0.5)
    assert found.stopped_by == "Ctrl-C"
    assert [run.state for run in found.runs if run.seed < 3] == ["finished", "stopped", "stopped"]
    assert not found.failed
    waited = {seed for seed in (3, 4) if not Path(f"runs/mine/seed-{seed}").exists()}
    workers(s1="crash")
    again = hurtle.train_seeds(resume=found, progress="quiet")
    assert set(again.failed) == {1}
    assert starts(found.path, 2)[1]["resume"] == "runs/mine/seed-2"
    assert starts(found.path, 2)[1]["settings"] == {"progress": "quiet"}
    assert len(starts(found.path, 0)) == 1
    assert all(starts(found.path, seed)[0]["settings"]["gamma"] == 0.5 for seed in waited)
    workers()
    done = hurtle.train_seeds(resume=found.path, progress="quiet")
    assert [run.state for run in done.runs] == ["finished"] * 5
    with pytest.raises(HurtleError, match=r"All 5 seeds in runs/mine are finished.*--total-steps"):
        hurtle.train_seeds(resume=found)


def test_more_steps_continue_finished_seeds(workers):
    found = train(seeds=2)
    more = hurtle.train_seeds(resume=found, total_steps=2000, progress="quiet")
    assert [run.steps for run in more.runs] == [2000, 2000]
    assert starts(found.path, 0)[1]["settings"] == {"total_steps": 2000, "progress": "quiet"}
    with pytest.raises(HurtleError, match="are finished"):
        hurtle.train_seeds(resume=found, total_steps=2000)


def test_a_second_ctrl_c_kills_the_workers(workers, tmp_path):
    ready = tmp_path / "ready"
    ignores = f"import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); open({str(ready)!r}, 'w'); time.sleep(60)"
    command = (sys.executable, "-c", ignores)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_processes, "COMMAND", command)
        with RunProcesses([Task(0, tmp_path / "seed-0", {})], 1) as processes:
            assert processes.poll()
            process = processes._workers[0].process
            _wait_for(ready.exists)
            processes.stop()
            assert processes.poll()
    assert process.returncode == -signal.SIGKILL


def test_a_folder_that_is_being_trained_is_not_resumed(workers):
    workers(s0="crash")
    found = train(seeds=2)
    with hold(found.path), pytest.raises(HurtleError, match="is being trained at this moment"):
        hurtle.train_seeds(resume=found)
    with hold(found.path / "seed-0"), pytest.raises(HurtleError, match="seed-0 is being trained at this moment"):
        hurtle.train_seeds(resume=found)


def test_a_file_that_names_code_needs_trust_to_resume(workers):
    workers(s0="crash")
    found = train(seeds=2)
    file = found.path / "seeds.toml"
    file.write_text(file.read_text().replace('env = "cartpole"', 'env = "stranger.py:Env"'))
    with pytest.raises(HurtleError, match=r"names code outside the installed packages: env = 'stranger.py:Env'"):
        hurtle.train_seeds(resume=found)


@pytest.mark.parametrize("text", ["seeds = 3", "= 3", "env = 'cartpole'"])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "seeds.toml").write_text(text)
    with pytest.raises(HurtleError, match=r"seeds.toml is damaged"):
        hurtle.train_seeds(resume=tmp_path)


def test_bad_input(workers, monkeypatch):
    for words, message in (
        ({"seeds": 0}, "seeds must be a whole number of at least 1, got 0"),
        ({"parallel": 1.5}, "parallel must be a whole number"),
        ({"clip_rage": 1}, "Did you mean clip_range"),
    ):
        with pytest.raises(HurtleError, match=message):
            train(**words)
    with pytest.raises(HurtleError, match="Each seed has its own process, which cannot find this env"):
        hurtle.train_seeds(lambda: None)

    class Mine(A2C):
        Config = A2CConfig

    with pytest.raises(HurtleError, match="which cannot find Mine: define it at the top level of a file"):
        train(algorithm=Mine)
    with pytest.raises(HurtleError, match="not a folder of many seeds"):
        hurtle.train_seeds(resume="nowhere")
    monkeypatch.setenv(run_processes.INSIDE, "0")
    with pytest.raises(HurtleError, match="Seeds would train seeds"):
        train()
    assert not Path("runs").exists()


def test_the_plan_shares_cores_on_a_cpu_and_takes_turns_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr("hurtle.experiments.run_processes.free_cores", lambda: 8)
    cpu, gpu = make_settings("cartpole", {}), make_settings("CartPole-v1", {"device": "cuda"})

    def planned(settings, seeds, parallel=None):
        found = plan(settings, [Task(seed, tmp_path, {}) for seed in range(seeds)], parallel)
        return found._at_once, found._share, found._afresh

    assert planned(cpu, 5) == (5, 1, False)
    assert planned(cpu, 3) == (3, 2, False)
    assert planned(cpu, 64) == (8, 1, False)
    assert planned(cpu, 64, 2) == (2, 4, False)
    assert planned(cpu, 64, 20) == (20, 1, False)
    assert planned(gpu, 5) == (1, 8, True)
    assert planned(gpu, 5, 3) == (3, 2, True)


REUSED = """
import json, os, pathlib, sys
for line in sys.stdin:
    words = json.loads(line)
    pathlib.Path(words["log"]).with_suffix(".pid").write_text(str(os.getpid()))
    if words["fails"]:
        sys.exit(1)
    print("done", flush=True)
"""


@pytest.mark.parametrize("afresh", [False, True])
def test_a_process_takes_task_after_task_until_one_fails(monkeypatch, tmp_path, afresh):
    monkeypatch.setattr(run_processes, "COMMAND", (sys.executable, "-I", "-S", "-c", REUSED))
    tasks = [Task(k, tmp_path / f"seed-{k}", {"fails": k == 1}) for k in range(4)]
    with RunProcesses(tasks, 1, afresh) as processes:
        _wait_for(lambda: not processes.poll())
        assert set(processes.failed) == {1}
        last = processes._workers[0].process if processes._workers else None
    pids = [(tmp_path / f"seed-{k}.pid").read_text() for k in range(4)]
    if afresh:
        assert len(set(pids)) == 4
    else:
        assert pids[0] == pids[1] != pids[2] == pids[3]
    assert last is None or last.returncode is not None


def test_no_more_run_at_once_than_fit_into_memory(workers, tmp_path, monkeypatch):
    workers(**{f"s{seed}": "wait" for seed in range(3)})
    tasks = [
        Task(k, tmp_path / f"seed-{k}", {"settings": {"runs": str(tmp_path), "name": f"seed-{k}"}, "resume": ""})
        for k in range(3)
    ]
    monkeypatch.setattr(run_processes, "available_memory", lambda: int(2.9 * run_processes.MEMORY))
    with RunProcesses(tasks, 3) as processes:
        processes.poll()
        assert set(processes.running) == {0, 1}  # 2 × MEMORY to come, less than one MEMORY would be left for a third
        assert processes.waiting == {2}


def test_the_command_line(workers, capsys, tmp_path):
    workers(s1="crash")
    assert main(["train", "cartpole", "--seeds", "2", "--total-steps", "1e3", "--name", "mine", "--progress", "plain"]) == 1
    out = capsys.readouterr().out
    assert "cartpole · ppo · 2 seeds" in out
    assert "1 of 2 seeds finished" in out
    assert "next        hurtle train --resume runs/mine" in out
    workers()
    assert main(["train", "--resume", "latest", "--progress", "plain"]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 seeds finished" in out
    assert "IQM 100.5 [100.0, 101.0] over 2 seeds" in out
    for line, message in {
        "train --resume mine --seeds 3": "and as many runs: leave out --seeds",
        "train pendulum --resume mine": "runs/mine holds runs on cartpole: leave out 'pendulum'",
        "train cartpole --parallel 2": "--parallel is for many seeds: add --seeds 5",
        "train cartpole --seeds none": "--seeds must be a whole number, got 'none'",
        "eval mine": "It holds 2 runs: seed-0, seed-1",
    }.items():
        assert main(line.split()) == 2
        assert message in capsys.readouterr().err, line


LINES = [
    Line(0, "finished", 1010, 1000, float("nan"), 500.0),
    Line(1, "training", 500, 1000, 50.0, 300.0),
    Line(2, "waiting", 0, 1000, float("nan"), float("nan")),
    Line(3, "crashed", 100, 1000, float("nan"), float("nan")),
]


def test_the_aggregate():
    found = Aggregate.of(LINES)
    assert found.share == pytest.approx((1 + 0.5 + 0 + 0.1) / 4)
    assert (found.finished, found.crashed, found.steps_per_second, found.known) == (1, 1, 50.0, 2)
    assert found.seconds_left == 1500 / 50
    assert found.returns.value == 400


def test_the_dashboard_has_a_line_for_each_seed_or_as_many_as_fit(capsys):
    console = Console(width=100, file=None, color_system=None)

    def drawn(height):
        with console.capture() as capture:
            console.print(draw(LINES, "cartpole · ppo · 4 seeds", "runs/mine", 32.0, 100, height))
        return capture.get().splitlines()

    lines = drawn(30)
    assert "return 400.0   95 % 300.0…500.0   IQM of 2 seeds" in lines[1]
    assert "1 of 4 finished, 1 crashed   50 steps/s   elapsed 0:32   ETA 0:30" in lines[2]
    assert lines[4].startswith("│ seed 0 ━━━")
    assert lines[5].split()[-8:-1] == ["50", "%", "500", "50/s", "return", "300.0", "training"]
    short = drawn(9)
    assert len(short) == 8
    assert "seed 1" in short[4]  # the one under way
    assert "and 2 more" in short[6]


def test_a_log_gets_lines():
    console = Console(width=300, color_system=None)
    with console.capture() as capture, PlainSeeds("cartpole · ppo · 4 seeds", "runs/mine", console) as display:
        display.show(LINES)
        display.show(LINES)  # too soon for another
    lines = capture.get().splitlines()
    assert lines[0] == "cartpole · ppo · 4 seeds  runs/mine"
    assert lines[1] == (
        " 40 %  1 of 4 finished, 1 crashed     50 steps/s  ETA    0:30  return 400.0 (300.0 to 500.0)  steps 1,610"
    )
    assert len(lines) == 3  # the last numbers again, at the end


@pytest.fixture
def small():
    return {
        "trackers": (), "progress": "quiet", "eval_episodes": 5, "preset": False, "num_envs": 4, "num_steps": 16,
        "minibatch_size": 32, "num_epochs": 1, "hidden_sizes": (8,), "total_steps": 256,
    }  # fmt: skip


@pytest.mark.slow  # docs/experiments.md trains seeds too
def test_seeds_train_as_they_would_alone(small, tmp_path, monkeypatch):
    monkeypatch.setattr("hurtle.experiments.seeds._plot", lambda folder, display: None)
    found = hurtle.train_seeds("bandit", seeds=2, runs=str(tmp_path), **small)
    alone = hurtle.train("bandit", seed=1, runs=str(tmp_path), **small)
    assert [run.state for run in found.runs] == ["finished", "finished"]
    own = RunRecord.read(alone.path)
    assert (found.runs[1].training_return, found.runs[1].evaluation) == (own.training_return, own.evaluation)
    assert found.runs[0].training_return != own.training_return


KILLED = """
import sys
import hurtle
if __name__ == "__main__":
    hurtle.train_seeds("cartpole", seeds=1, total_steps=10**9, runs=sys.argv[1], name="mine", trackers=(), progress="quiet")
"""


@pytest.mark.slow
def test_workers_save_and_end_if_the_parent_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    paths = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen([sys.executable, script, tmp_path / "runs"], env={**os.environ, "PYTHONPATH": paths})
    run = tmp_path / "runs" / "mine" / "seed-0"
    _wait_for(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size > 0)
    assert is_running(run)
    process.kill()
    process.wait()
    _wait_for((run / "summary.json").is_file)
    assert json.loads((run / "summary.json").read_text())["stopped_by"] == "SIGTERM"
    _wait_for(lambda: not is_running(run))
    steps = RunRecord.read(run).steps
    again = hurtle.train_seeds(resume=tmp_path / "runs" / "mine", total_steps=steps + 10_000, progress="quiet")
    assert again.runs[0].state == "finished"


@pytest.mark.slow
def test_a_seed_that_ended_during_its_last_evaluation_is_evaluated(small, tmp_path):
    found = hurtle.train_seeds("bandit", seeds=1, runs=str(tmp_path), **small)
    run = found.runs[0]
    (run.path / "summary.json").unlink()
    assert RunRecord.read(run.path).state == "crashed"
    again = hurtle.train_seeds(resume=found, progress="quiet").runs[0]
    assert (again.state, again.evaluation, again.steps) == ("finished", run.evaluation, run.steps)


def _wait_for(what):
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)
