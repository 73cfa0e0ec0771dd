"""Sweeps: winners, failures, kills and resumes, the command line. Most trials train nothing: see made_sweeps.py."""

import collections
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from made_sweeps import COMMAND, SPACE
from rich.console import Console

import hurtle
from hurtle.cli import main
from hurtle.errors import HurtleError
from hurtle.experiments import run_processes
from hurtle.experiments.sweeps import loop
from hurtle.experiments.sweeps.display import PlainSweep, Running, State, draw
from hurtle.experiments.sweeps.plan import SweepPlan, seconds, size
from hurtle.experiments.sweeps.sweep import find_sweep
from hurtle.experiments.sweeps.trials import Journal, Trial
from hurtle.runners.settings import make_settings

REPO = Path(__file__).parents[2]


@pytest.fixture
def workers(monkeypatch, tmp_path):
    """Replaces training; a function that sets what some trials do: crash, hang, grow, die, nan or wait."""
    monkeypatch.setattr(run_processes, "COMMAND", COMMAND)
    monkeypatch.setattr("hurtle.experiments.sweeps.page.write_sweep_page", lambda found, file: None)
    monkeypatch.setenv("BEHAVIOUR", "{}")
    monkeypatch.chdir(tmp_path)
    Path("space.toml").write_text(SPACE)
    names = lambda behaviour: {f"trial-{int(name[1:]):04}": does for name, does in behaviour.items()}  # noqa: E731
    return lambda **behaviour: monkeypatch.setenv("BEHAVIOUR", json.dumps(names(behaviour)))


def sweep(trials=10, **words):
    given = {"budget": "inf", "space": "space.toml", "parallel": 2, "progress": "quiet", "check_seeds": 2, **words}
    return hurtle.sweep("cartpole", trials=trials, **given)


def starts(found):
    return collections.Counter((found.path / "starts").read_text().split())


def test_the_winner_is_near_the_best_settings_and_is_checked_with_fresh_seeds(workers):
    found = sweep(trials=40, name="mine", total_steps=100_000)
    assert found.path == Path("runs/mine")
    assert {trial.state for trial in found.trials} == {"finished"}
    assert 0.001 < found.best.values["learning_rate"] < 0.009
    assert found.best.score > 98
    assert found.trials[0].origin == "baseline"
    assert found.trials[0].values["learning_rate"] == 1e-3
    checks = [trial for trial in found.trials if trial.is_check]
    assert found.best.number in found.checks
    assert 0 in found.checks  # the baseline, too
    assert len({trial.seed for trial in checks}) == 2
    assert not {trial.seed for trial in checks} & {trial.seed for trial in found.searched}
    assert len({trial.seed for trial in found.searched}) == 40
    assert found.checks[found.best.number].estimate.value >= found.checks[0].estimate.value
    assert (found.policy / "checkpoints").is_dir()
    assert [trial.seconds for trial in found.front] == sorted(trial.seconds for trial in found.front)
    summary = json.loads((found.path / "summary.json").read_text())
    assert summary["best"]["number"] == found.best.number
    assert summary["states"] == {"finished": 40}
    assert next(iter(found.importance)) == "learning_rate"
    assert len(list(found.path.glob("trial-*/checkpoints"))) == loop.KEPT


def test_best_toml_is_a_config_of_the_winner(workers):
    found = sweep(trials=3, check_seeds=0, hidden_sizes=(32, 32))
    text = (found.path / "best.toml").read_text()
    assert "of one seed, not checked" in text
    settings = make_settings(None, {}, found.path / "best.toml")
    assert settings.algorithm.learning_rate == found.best.values["learning_rate"]
    assert settings.train.total_steps == found.best.values["total_steps"]
    assert settings.policy.hidden_sizes == (32, 32)
    assert settings.algorithm.num_epochs == 20  # the preset of cartpole, written out
    assert (settings.train.env, settings.train.preset) == ("cartpole", False)


def test_failures_of_every_kind_fail_their_trial_only(workers, capsys):
    workers(t1="crash", t2="hang", t3="nan", t4="grow", t5="die")
    found = sweep(trials=9, trial_seconds=1.5, trial_memory="200M", prune=False)
    failed = {trial.number: trial.error for trial in found.trials if trial.state == "failed"}
    assert set(failed) == {1, 2, 3, 4, 5}
    assert "ValueError: it broke" in failed[1]
    assert failed[2].startswith("it ran longer than its limit of 1.5 s (--trial-seconds")
    assert failed[3] == "It has no return: no episode has ended, or its return is not finite."
    assert "more than its limit of 200.0 MiB" in failed[4]
    assert failed[5].startswith("killed by SIGKILL")
    assert sum(trial.state == "finished" for trial in found.searched) == 4
    assert found.best.has_score
    assert "trial-0001 failed: exit status 1" in capsys.readouterr().err


def test_a_sweep_in_which_everything_fails_says_why(workers):
    workers(**{f"t{k}": "crash" for k in range(20)})
    with pytest.raises(
        HurtleError, match=r"(?s)No trial was trained to its end; see runs/.*trial-0000: exit status 1.*it broke"
    ):
        sweep(trials=20)
    (folder,) = Path("runs").iterdir()
    assert len(list(folder.glob("trial-*/config.toml"))) < 10


def test_trials_that_learn_worse_are_given_up(workers, monkeypatch):
    monkeypatch.setenv("TRIAL_SECONDS", "0.3")
    monkeypatch.setattr(loop, "LOOK_SECONDS", 0.02)
    Path("space.toml").write_text(SPACE.splitlines()[2])  # the same number of steps for all
    found = sweep(trials=24, total_steps=10_000, method="random", check_seeds=0)
    pruned = [trial for trial in found.trials if trial.state == "pruned"]
    finished = [trial for trial in found.trials if trial.state == "finished"]
    assert len(pruned) >= 3
    assert all(10_000 / 4 <= trial.steps < 10_000 for trial in pruned)
    far = [abs(math.log(trial.values["learning_rate"] / 0.003)) for trial in pruned]
    near = sorted(abs(math.log(trial.values["learning_rate"] / 0.003)) for trial in finished)
    assert min(far) > near[2]
    assert sweep(trials=12, total_steps=10_000, prune=False, check_seeds=0).searched[-1].state == "finished"


def test_the_budget_ends_the_search_and_leaves_time_for_checks(workers, monkeypatch):
    monkeypatch.setenv("TRIAL_SECONDS", "0.2")
    began = time.monotonic()
    found = sweep(trials=0, budget=8, check_seeds=3)
    assert time.monotonic() - began < 30
    assert len(found.searched) >= 3
    assert {trial.state for trial in found.searched} <= {"finished", "pruned", "cut"}
    assert any(trial.is_check and trial.state == "finished" for trial in found.trials)


@pytest.mark.parametrize("method", ["random", "optuna_tpe", "optuna_gp"])
def test_other_methods_search_the_same_space(workers, method):
    if method != "random":
        pytest.importorskip("optuna")
    found = sweep(trials=12, method=method, check_seeds=0, seed=7)
    for trial in found.searched[1:]:
        assert 2000 <= trial.values["total_steps"] <= 100_000
        assert 1e-5 <= trial.values["learning_rate"] <= 1.0
    assert len({trial.values["learning_rate"] for trial in found.searched}) == 12
    more = hurtle.sweep(resume=found, trials=15)
    assert len({trial.values["learning_rate"] for trial in more.searched}) == 15


def test_the_metric_may_be_another_one_and_may_be_minimized(workers):
    found = sweep(trials=6, metric="seconds", minimize=True, check_seeds=1)
    fastest = min(found.searched, key=lambda trial: trial.seconds)
    assert found.shown(fastest.score) == pytest.approx(fastest.seconds)
    assert found.best.seconds <= sorted(trial.seconds for trial in found.searched)[2]
    assert json.loads((found.path / "summary.json").read_text())["best"]["score"] > 0
    with pytest.raises(HurtleError, match=r"(?s)No trial was trained to its end.*No metric 'entropi' in .*trial-0000"):
        sweep(metric="entropi")


DRIVER = """
import os, sys
sys.path[:0] = [{tests!r}]
from made_sweeps import COMMAND
from hurtle.experiments import run_processes
run_processes.COMMAND = COMMAND
import hurtle.experiments.sweeps.page
hurtle.experiments.sweeps.page.write_sweep_page = lambda found, file: None
import hurtle
hurtle.sweep(**{words!r})
"""


def start(**words):
    given = {"budget": "inf", "progress": "quiet", **words}
    return subprocess.Popen([sys.executable, "-c", DRIVER.format(tests=str(Path(__file__).parent), words=given)])


def killed_and_resumed(kills, longest, seed=0, **words):
    """Kill a sweep at random moments, resume it until it is done; returns what it found."""
    rng, left = random.Random(seed), kills
    first = {"env": "cartpole", "space": "space.toml", "name": "killed", "parallel": 2, **words}
    while True:
        process = start(resume="runs/killed") if Path("runs/killed/space.toml").exists() else start(**first)
        try:
            process.wait(timeout=rng.uniform(0.8, longest) if left else 300)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            left -= 1
            continue
        assert process.returncode == 0
        assert left == 0
        return find_sweep("runs/killed")


def true_score(values):
    """What made_sweeps.py gives these settings, without the part that depends on the seed."""
    far = math.log(values["learning_rate"] / 0.003) ** 2 + 10 * (values["gamma"] - 0.98) ** 2
    return 100.0 - 10.0 * far - 20.0 * math.exp(-values["total_steps"] / 20_000)


def check_nothing_was_lost_or_done_twice(found, trials):
    events = [json.loads(line) for line in (found.path / "trials.jsonl").read_text().splitlines() if line.strip()]
    ends = collections.Counter(event["number"] for event in events if event["event"] == "end")
    assert set(ends.values()) == {1}  # no trial ended twice
    assert set(ends) == {trial.number for trial in found.trials}
    assert len(found.searched) == trials
    begins = collections.Counter(event["number"] for event in events if event["event"] == "begin")
    trained = starts(found)
    for trial in found.trials:
        assert trained[trial.name] <= begins[trial.number]  # trained again only if it was running when the sweep was killed
        order = [event["event"] for event in events if event["number"] == trial.number]
        assert order == ["begin"] * begins[trial.number] + ["end"]


def test_a_sweep_that_is_killed_and_resumed_loses_only_running_trials(workers, monkeypatch):
    monkeypatch.setenv("TRIAL_SECONDS", "0.4")
    workers(t2="crash", t6="nan")
    found = killed_and_resumed(kills=3, longest=2.0, trials=16, check_seeds=2)
    check_nothing_was_lost_or_done_twice(found, 16)
    assert {trial.number for trial in found.searched if trial.state == "failed"} == {2, 6}


@pytest.mark.slow
def test_forty_trials_with_failures_of_every_kind_killed_at_twenty_random_moments(workers, monkeypatch):
    monkeypatch.setenv("TRIAL_SECONDS", "1.0")
    workers(t3="crash", t7="hang", t11="nan", t15="grow", t19="die", t23="crash", t31="nan")
    found = killed_and_resumed(
        kills=20, longest=4.0, trials=40, check_seeds=3, trial_seconds=4.0, trial_memory="250M", total_steps=100_000
    )
    check_nothing_was_lost_or_done_twice(found, 40)
    assert {trial.number for trial in found.searched if trial.state == "failed"} == {3, 7, 11, 15, 19, 23, 31}
    scores = {trial.number: true_score(trial.values) for trial in found.searched if trial.state == "finished"}
    assert scores[found.best.number] >= max(scores.values()) - 1.0  # the right winner: seeds differ by up to 1
    assert found.checks[found.best.number].estimate.value == pytest.approx(scores[found.best.number], abs=0.5)


def test_ctrl_c_saves_and_a_resume_goes_on(workers):
    workers(t3="wait", t4="wait")

    def interrupt():
        until = time.monotonic() + 30
        while not list(Path("runs").glob("*/trial-0003/waits")) and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    found = sweep(trials=8)
    assert found.stopped_by == "Ctrl-C"
    assert found.trials[3].state == "running"
    workers()
    more = hurtle.sweep(resume=found)
    assert more.stopped_by == ""
    assert {trial.state for trial in more.trials} == {"finished"}
    assert len(more.searched) == 8
    assert starts(more)["trial-0003"] == 2
    assert starts(more)["trial-0000"] == 1


def test_a_trial_that_ended_while_the_sweep_was_being_killed_is_not_trained_again(workers):
    found = sweep(trials=4, check_seeds=0)
    file = found.path / "trials.jsonl"
    lines = file.read_text().splitlines()
    ends = [line for line in lines if '"end"' in line and '"number": 2' in line]
    kept = [line for line in lines if line not in ends]
    file.write_text("\n".join(kept) + "\n" + ends[0][:40])  # the kill cut its line off
    more = hurtle.sweep(resume=found)
    assert starts(more)["trial-0002"] == 1
    assert more.trials[2].score == found.trials[2].score
    assert more.trials[2].state == "finished"


def test_checks_that_were_cut_are_done_when_there_is_more_time(workers):
    found = sweep(trials=4, check_seeds=2)
    file = found.path / "trials.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["number"] == 5 and line["event"] == "end":
            line |= {"state": "cut", "score": None}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = found.trials[5]
    more = hurtle.sweep(resume=found)
    assert [(trial.checks, trial.seed, trial.state) for trial in more.trials if trial.checks == before.checks][-1] == (
        before.checks, before.seed, "finished",
    )  # fmt: skip
    assert {check.seeds for check in more.checks.values()} == {2}


def test_a_run_that_is_whole_counts_even_if_its_process_was_ended(workers, monkeypatch):
    found = sweep(trials=2, check_seeds=0)
    plan, settings = found.plan, dict(found.settings)
    journal = Journal(found.path / "trials.jsonl")
    ours = loop.SweepLoop(found.path, settings, plan, found.space, None, journal, run_processes.RunProcesses([], 1))
    ours._ends_as[1] = "pruned"
    trial = journal.trials[1]
    assert ours._outcome(trial, found.path / trial.name, "exit status 130").state == "finished"
    summary = found.path / trial.name / "summary.json"
    summary.write_text(summary.read_text().replace("total_steps", "SIGTERM"))
    stopped = ours._outcome(trial, found.path / trial.name, "")
    assert (stopped.state, stopped.error) == ("failed", "It ended before it was done, without an error.")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"env": "/tmp/stranger.py:Env"}, "has env='/tmp/stranger.py:Env', which is not searched"),
        ({"gamma": "stranger.py:Net"}, "has gamma='stranger.py:Net', which is not searched"),
        (None, "has total_steps=None, which is not searched|has .*None, which is not searched"),
    ],
)
def test_a_journal_cannot_name_code(workers, values, message):
    found = sweep(trials=2, check_seeds=0)
    good = dict(found.trials[1].values)
    event = {"event": "begin", "elapsed": 1, "number": 7, "values": {} if values is None else good | values, "state": "running"}
    with (found.path / "trials.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
        file.write(json.dumps(event | {"number": "../../home", "values": good}) + "\n")  # no number: ignored
    with pytest.raises(HurtleError, match=message):
        hurtle.sweep(resume=found, trials=3)


def test_a_file_does_not_lead_to_a_cluster(workers):
    found = sweep(trials=2, check_seeds=0)
    file = found.path / "sweep.toml"
    file.write_text(file.read_text().replace('ray = ""', 'ray = "ray://stranger:10001"'))
    with pytest.raises(HurtleError, match="give the address again, --ray ray://stranger:10001"):
        hurtle.sweep(resume=found, trials=3)


def test_a_broken_page_does_not_end_a_sweep(workers, monkeypatch):
    def broken(found, file):
        raise TypeError("no place")

    monkeypatch.setattr("hurtle.experiments.sweeps.page.write_sweep_page", broken)
    found = sweep(trials=2, check_seeds=0)
    assert "TypeError('no place')" in (found.path / "sweep.html").read_text()


def test_a_full_disk_ends_the_sweep_and_says_nothing_of_the_settings(workers):
    workers(t1="full")
    with pytest.raises(HurtleError, match="The disk is full, and trial-0001 could not go on"):
        sweep(trials=4, check_seeds=0, name="full")
    workers()
    more = hurtle.sweep(resume="full")
    assert [trial.state for trial in more.searched] == ["finished"] * 4


def test_a_baseline_that_is_refused_ends_the_sweep_at_once(workers):
    workers(t0="refuse", t1="wait")
    began = time.monotonic()
    with pytest.raises(
        HurtleError, match="The baseline, which a run would be without a sweep, does not train: gamma does not fit"
    ):
        sweep(trials=8)
    assert time.monotonic() - began < 30
    assert len(list(Path("runs").glob("*/trial-*/config.toml"))) <= 2


def test_what_is_given_is_not_searched(workers):
    found = hurtle.sweep("cartpole", trials=3, budget="inf", progress="quiet", check_seeds=0, gamma=0.5, total_steps=40_000)
    assert "gamma" not in found.space.names
    assert {trial.values["total_steps"] <= 40_000 for trial in found.trials} == {True}
    assert "gamma = 0.5" in (found.path / "best.toml").read_text()


def test_bad_input(workers):
    for words, message in (
        ({"budget": "soon"}, "budget must be an amount of time such as 90s, 10m or 2h, got 'soon'"),
        ({"trials": 0}, "A sweep needs an end"),
        ({"trials": -1}, "trials must be a whole number of at least 0"),
        ({"method": "optuna"}, "No method 'optuna' of search.*Did you mean"),
        ({"trial_memory": "much"}, "trial_memory must be a size such as 500M or 2G"),
        ({"clip_rage": 1}, "Did you mean clip_range"),
        ({"minibatch_size": 7}, "minibatch_size=7 does not divide"),
        ({"space": "nowhere.toml"}, "space nowhere.toml could not be read"),
    ):
        with pytest.raises(HurtleError, match=message):
            sweep(**words)
    with pytest.raises(HurtleError, match="Each trial has its own process, which cannot find this env"):
        hurtle.sweep(lambda: None)
    with pytest.raises(HurtleError, match="not the folder of a sweep"):
        hurtle.sweep(resume="nowhere")
    for words in ({"metric": "length"}, {"check_seeds": 2}, {"prune": False}, {"trial_seconds": 3}):
        with pytest.raises(HurtleError, match="only budget, trials, parallel and ray may change"):
            hurtle.sweep(resume="nowhere", **words)
    with pytest.raises(HurtleError, match="only budget, trials, parallel and ray may change"):
        hurtle.sweep("cartpole", resume="nowhere")
    assert not Path("runs").exists()
    assert (seconds("2h"), seconds("1.5m"), size("1GiB")) == (7200, 90, 2**30)


def test_the_command_line(workers, capsys):
    arguments = ["sweep", "cartpole", "--budget", "inf", "--trials", "5", "--space", "space.toml", "--check-seeds=1"]
    assert main([*arguments, "--name", "mine", "--parallel", "2", "--progress", "plain", "--gae-lambda", "0.9"]) == 0
    out = capsys.readouterr().out
    assert "cartpole · ppo · sweep" in out
    assert out.count("trial-000") >= 5
    assert "next        hurtle train cartpole --config runs/mine/best.toml" in out
    assert "gae_lambda = 0.9" in (Path("runs/mine/best.toml")).read_text()
    assert main(["sweep", "--resume", "latest", "--trials", "6"]) == 0
    assert len(Journal(Path("runs/mine/trials.jsonl")).trials) > 6
    assert main(["sweep", "cartpole", "--show-space", "--num-steps", "64"]) == 0
    shown = capsys.readouterr().out
    assert 'num_envs       = { low = 2, high = 32, scale = "power_of_two" }' in shown
    assert "num_steps" not in shown  # given, and so not searched
    assert main(["sweep", "--help"]) == 0
    assert "--trial-seconds" in capsys.readouterr().out
    for wrong, message in (
        (["--budget"], "--budget needs a value"),
        (["--minimize=yes"], "--minimize is a switch"),
        (["--trials", "many"], "--trials must be a whole number"),
        (["--resume", "runs/mine", "--metric", "speed"], "leave out --metric"),
        (["--bugdet", "3m"], "No setting --bugdet"),
        (["--seeds", "3"], "--seeds is for `hurtle train`; a sweep has --check-seeds"),
        (["--space", "space.toml", "--trials", "2", "--gamma", "0.9"], "gamma: searched, and given a value"),
    ):
        assert main(["sweep", *([] if "--resume" in wrong else ["cartpole"]), *wrong]) == 2
        assert message in capsys.readouterr().err


def test_the_dashboard(workers):
    trials = tuple(
        Trial(k, {"learning_rate": 0.001 * (k + 1)}, origin="search" if k else "baseline", state="finished", score=10.0 * k,
              seconds=1.0 + k) for k in range(5)
    )  # fmt: skip
    running = Trial(5, {"learning_rate": 0.5})
    failed = Trial(6, state="failed", error="it broke")
    state = State((*trials, running, failed), (Running(running, 0.5, 12.3),), 75.0, 600.0, 0, False)
    console = Console(width=100, height=30, record=True, file=io.StringIO())
    console.print(draw(state, "cartpole · ppo · sweep", "runs/mine", 100, 30))
    text = console.export_text()
    assert "best 40.00 in 5.0 s   baseline 0 in 1.0 s" in text
    assert "7 trials   5 finished   1 failed   elapsed 1:15 of 10:00" in text
    assert "50 %  return   12.30  learning_rate=0.5" in text
    assert "trial-0004    40.00     5.0 s  learning_rate=0.005" in text
    for height in (4, 8):
        console.print(draw(state, "t", "a", 60, height))
    lines = Console(width=200, record=True, file=io.StringIO())
    plain = PlainSweep("title", "about", lines)
    plain.show(state)
    plain.show(state)
    printed = lines.export_text().splitlines()
    assert len(printed) == 7
    assert "best" in printed[2]


def test_a_page_of_a_sweep(workers, monkeypatch):
    monkeypatch.undo()
    trials = [Trial(0, {"learning_rate": 1e-3, "gamma": 0.99}, origin="baseline", state="finished", score=50.0, seconds=3.0)]
    rng = random.Random(0)
    for k in range(1, 30):
        values = {"learning_rate": 10 ** rng.uniform(-4, -2), "gamma": rng.choice([0.9, 0.99])}
        score = 100 - 40 * abs(math.log10(values["learning_rate"]) + 3)
        trials.append(Trial(k, values, k, "search", state="finished", score=score, seconds=rng.uniform(1, 9)))
    trials += [Trial(30 + k, trials[1].values, 10**6 + k, "check", 1, "finished", 90.0, 2.0) for k in range(2)]
    trials[0].values.update(gamma=0.98)  # the baseline's is none of the choices
    from hurtle.experiments.space import Dimension, Space
    from hurtle.experiments.sweeps.page import sweep_page
    from hurtle.experiments.sweeps.result import SweepRun
    from hurtle.runners.settings import settings_to_dict

    space = Space((Dimension("learning_rate", 1e-4, 1e-2, "log"), Dimension("gamma", choices=(0.9, 0.99))))
    settings = settings_to_dict(make_settings("cartpole", {}))
    found = SweepRun(Path("runs/mine"), settings, SweepPlan(), space, tuple(trials))
    text = sweep_page(found)
    assert text.count("<svg") == 4
    assert "trial-0001 (winner)" in text
    assert "http" not in text.replace("http://www.w3.org", "")
    assert text.count("<tr>") > 30
    assert "trial-0000 (baseline)" in text


@pytest.mark.slow
def test_real_trials_with_real_failures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = hurtle.sweep(
        "bandit", trials=4, budget="inf", total_steps=4_000, check_seeds=1, progress="quiet", parallel=2, learning_rate=1e-3
    )
    assert sum(trial.state == "finished" for trial in found.searched) >= 3
    run = hurtle.train(config=found.path / "best.toml", progress="quiet", trackers=(), eval_episodes=10)
    assert run.steps >= found.best.values["total_steps"] * 0.9
    assert hurtle.load(found.path / found.best.name).act is not None
