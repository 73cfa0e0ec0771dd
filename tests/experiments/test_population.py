"""Populations: intervals, copies, kills, crashes, signals, resuming. Most tests train nothing: workers write what it writes.

A fake checkpoint holds who trained the "weights", from the start, and their value: each interval adds the learning rate.
"""

import json
import math
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
from hurtle.cli import main
from hurtle.errors import HurtleError
from hurtle.experiments import run_processes
from hurtle.experiments.populations import folders as population_folders
from hurtle.experiments.populations import loop as population_loop
from hurtle.experiments.populations import population
from hurtle.experiments.populations.folders import adopt, member_folder, saved_steps
from hurtle.experiments.populations.lineage import Entry, Lineage
from hurtle.experiments.populations.loop import Population
from hurtle.experiments.records import find_runs
from hurtle.experiments.run_processes import share_machine
from hurtle.experiments.seeds_display import draw
from hurtle.experiments.seeds_progress import Progress
from hurtle.tracking.run_state import hold, is_running

WORKER = """
import json, os, pathlib, signal, sys, time
def train(words, behaviour):
    settings, resume, until = words["settings"], words["resume"], words["until"]
    folder = pathlib.Path(resume or pathlib.Path(settings["runs"], settings["name"]))
    member = folder.name[7:]
    end = until or settings["total_steps"]
    (folder / "checkpoints").mkdir(exist_ok=True, parents=True)
    files = sorted((folder / "checkpoints").glob("step-*.pt"))
    state = json.loads(files[-1].read_text()) if files else {"value": 0.0, "trained": []}
    steps = int(files[-1].stem[5:]) if files else 0
    (folder / "summary.json").unlink(missing_ok=True)
    with open(folder / "starts", "a") as file:
        file.write(json.dumps({**words, "at": steps}) + chr(10))
    does = behaviour.get(f"{member} at {steps}", "train")
    if does == "crash":
        print("Traceback: it broke", file=sys.stderr)
        sys.exit(1)
    if does == "refuse":
        print("hurtle: error: gamma does not fit", file=sys.stderr)
        sys.exit(2)
    if does == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if not resume:
        (folder / "config.toml").write_text(chr(10).join(f"{name} = {json.dumps(settings[name])}" for name in
            ("env", "algorithm", "seed", "total_steps")))
    rate = settings["learning_rate"]
    def save(by, steps):
        score = None if does == "unknown" else state["value"]
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": steps, "steps": steps, "seconds": steps / 100, "episode_return": score}) + chr(10))
        (folder / "checkpoints" / f"step-{steps:012}.pt").write_text(json.dumps(state))
        summary = {"steps": steps, "seconds": 1.0, "mean_return": score, "stopped_by": by}
        if by == "total_steps":
            summary["evaluation"] = {"mean": 100 + state["value"]}
        (folder / "summary.json").write_text(json.dumps(summary))
    if does in ("wait", "hang"):
        (folder / "waits").touch()
        signal.signal(signal.SIGINT, lambda *_: (save("Ctrl-C", steps + 1), sys.exit(0)))
        time.sleep(60)
        sys.exit(3)
    state["value"] += rate
    state["trained"].append([int(member), steps, end, rate])
    save("stop_at_return" if does == "reach" else "total_steps" if until is None else "until", end)
    if member == behaviour.get("kills") and steps == behaviour["at"]:
        os.kill(os.getppid(), signal.SIGKILL)
while line := sys.stdin.readline():
    words, behaviour = json.loads(line), json.loads(pathlib.Path(os.environ["BEHAVIOUR"]).read_text())
    sys.stderr = open(words["log"], "a")
    train(words, behaviour)
    sys.stderr.close()
    print("done", flush=True)
"""
SEARCH = {"learning_rate": {"low": 1.0, "high": 100.0}}


@pytest.fixture
def workers(monkeypatch, tmp_path):
    """Replaces training; a function that sets what members do when they begin at some step."""
    monkeypatch.setattr(run_processes, "COMMAND", (sys.executable, "-I", "-S", "-c", WORKER))
    monkeypatch.setattr(population, "_plot", lambda *_: None)
    monkeypatch.setattr("hurtle.experiments.seeds_progress.POLL_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "behaviour.json"
    monkeypatch.setenv("BEHAVIOUR", str(file))

    def behave(**does):
        file.write_text(json.dumps({name.replace("_at_", " at ").removeprefix("m"): what for name, what in does.items()}))

    behave()
    return behave


def train(size=4, **words):
    words = {"interval": 100, "total_steps": 300, "search": SEARCH, "progress": "quiet", "parallel": 2, "name": "mine", **words}
    return hurtle.train_population("cartpole", size, **words)


def starts(folder, member):
    return [json.loads(line) for line in (folder / f"member-{member}" / "starts").read_text().splitlines()]


def weights(run):
    return json.loads(max((run / "checkpoints").glob("step-*.pt")).read_text())


def lineage_of(folder, size=4):
    return Lineage.read(folder, size).generations


def check_lineage(folder, size=4):
    """Every member's weights were trained by whom the lineage says, with its settings, from step to step."""
    lineage = Lineage.read(folder, size)
    for member in range(size):
        trained = weights(member_folder(folder, member))["trained"]
        assert [each[0] for each in trained] == lineage.ancestors(member)
        for generation, (who, begins, ends, rate) in enumerate(trained):
            entry = lineage.generations[generation][who]
            assert rate == entry.settings["learning_rate"]
            assert ends == lineage.generations[generation + 1][who].steps
            assert begins // 100 == generation
        assert sum(each[3] for each in trained) == pytest.approx(lineage.newest[member].score)


def test_the_worst_copies_the_best_after_every_interval(workers):
    found = train(seed=3)
    generations = lineage_of(found.path)
    assert [len(entries) for entries in generations] == [4] * 4
    assert [entry.steps for entry in generations[1]] == [100] * 4
    for entries in generations[1:-1]:
        scores = [entry.score for entry in entries]
        best, worst = max(scores), min(scores)
        copies = [entry for entry in entries if entry.copied_from is not None]
        assert [entry.score for entry in copies] == [worst]
        assert scores[copies[0].copied_from] == best
    assert all(entry.copied_from is None for entry in generations[-1])
    check_lineage(found.path)
    assert (found.generations, found.copies, found.failed, found.stopped_by) == (3, 2, {}, "")
    assert found.score == max(entry.score for entry in generations[-1])
    assert found.best.path == max(found.members, key=lambda run: run.training_return).path
    assert found.best.evaluation == pytest.approx(100 + found.score)
    assert [run.state for run in found.members] == ["finished"] * 4


def test_members_begin_as_new_runs_and_are_resumed_with_their_settings(workers):
    found = train(seed=3, gamma=0.5)
    first, second, third = starts(found.path, 2)
    assert (first["resume"], first["until"], second["until"], third["until"]) == ("", 100, 200, None)
    assert (first["settings"]["gamma"], first["settings"]["seed"], first["settings"]["name"]) == (0.5, 5, "member-2")
    assert first["settings"]["anneal_learning_rate"] is False  # the preset has True
    rate = lineage_of(found.path)[1][2].settings["learning_rate"]
    own = {"seed": 5, "runs": "runs/mine", "name": "member-2", "progress": "quiet", "total_steps": 300, "learning_rate": rate}
    assert (second["resume"], second["settings"]) == ("runs/mine/member-2", own)


def test_the_folder(workers):
    found = train(anneal_learning_rate=True, score="evaluation")
    names = {path.name for path in found.path.iterdir()}
    files = {"README.md", "population.toml", "lineage.jsonl", "summary.json", "schedule.toml"}
    assert names == files | {f"member-{k}" for k in range(4)}
    assert starts(found.path, 0)[0]["settings"]["anneal_learning_rate"] is True
    assert starts(found.path, 0)[0]["settings"]["eval_every"] == 100
    assert find_runs("mine") == [found.path / f"member-{k}" for k in range(4)] == find_runs("latest")
    summary = json.loads((found.path / "summary.json").read_text())
    assert (summary["best"], summary["copies"]) == (found.best.path.name, found.copies)
    assert "[[stretch]]\nfrom_step = 0\nuntil = " in (found.path / "schedule.toml").read_text()
    assert "cannot" not in (found.path / "README.md").read_text()
    assert not is_running(found.path)


def test_the_same_seed_gives_the_same_population_however_many_train_at_a_time(workers):
    one, two, other = (train(parallel=k, name=f"n{k}", seed=seed, size=6) for k, seed in ((1, 0), (3, 0), (2, 1)))
    texts = [(found.path / "lineage.jsonl").read_text() for found in (one, two, other)]
    assert texts[0] == texts[1] != texts[2]
    check_lineage(one.path, 6)


def test_a_member_that_crashes_copies_a_good_one_and_is_reported(workers, capsys):
    workers(m1_at_0="crash", m2_at_100="die", m0_at_200="refuse")
    found = train()
    generations = lineage_of(found.path)
    assert generations[1][1].copied_from is not None
    assert math.isnan(generations[1][1].score)
    assert "it broke" in generations[1][1].failed
    assert "killed by SIGKILL" in generations[2][2].failed
    assert [entry.failed for entry in generations[3]] == ["gamma does not fit", "", "", ""]
    assert set(found.failed) == {0, 1, 2}
    assert found.best.path.name != "member-0"
    assert "it broke" in (found.path / "member-1-generation-1.log").read_text()
    assert "member 1 crashed: exit status 1" in capsys.readouterr().err
    trained = weights(found.path / "member-1")["trained"]
    assert trained[0][0] == generations[1][1].copied_from
    assert [run.state for run in found.members].count("finished") == 3


def test_if_all_fail_the_error_is_that_of_the_first(workers):
    workers(**{f"m{k}_at_0": "refuse" for k in range(4)})
    with pytest.raises(HurtleError, match=r"Every member failed; see runs/mine. Member \d: gamma does not fit"):
        train()
    assert len(lineage_of(Path("runs/mine"))) == 1  # nothing was decided
    workers()
    assert hurtle.train_population(resume="runs/mine", progress="quiet").generations == 3


def test_settings_that_fit_nobody_but_the_last_are_no_reason_to_stop(workers):
    workers(m0_at_0="refuse", m1_at_0="refuse", m2_at_0="refuse")
    found = train()
    assert [entry.copied_from for entry in lineage_of(found.path)[1]] == [3, 3, 3, None]
    check_lineage(found.path)


def test_a_member_that_takes_too_long_has_failed(workers):
    workers(m3_at_100="hang")
    found = train(time_limit=0.5)
    assert "it ran longer than its limit" in found.failed[3]
    assert lineage_of(found.path)[2][3].copied_from is not None


def test_unknown_scores_copy_nothing_and_are_not_copied(workers):
    workers(**{f"m{k}_at_{at}": "unknown" for k in range(4) for at in (0, 100, 200)})
    found = train()
    assert (found.copies, found.best, found.schedule) == (0, None, ())


def test_a_member_that_reaches_the_return_asked_for_ends_the_population(workers):
    workers(m2_at_100="reach")
    found = train(stop_at_return=1.0)
    assert found.generations == 2
    assert all(entry.copied_from is None for entry in lineage_of(found.path)[-1])
    with pytest.raises(HurtleError, match="is finished"):
        hurtle.train_population(resume=found)


def interrupt_when(*files):
    def interrupt():
        until = time.monotonic() + 30
        while not all(file.exists() for file in files) and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def test_ctrl_c_saves_and_resuming_gives_what_would_have_been(workers):
    whole = train(name="whole")
    workers(m1_at_100="wait", m2_at_100="wait")
    interrupt_when(Path("runs/mine/member-1/waits"), Path("runs/mine/member-2/waits"))
    found = train()
    assert (found.stopped_by, found.generations, found.failed) == ("Ctrl-C", 1, {})
    assert {run.path.name: run.steps for run in found.members}["member-1"] == 101
    workers()
    with pytest.raises(HurtleError, match="learning_rate: this population searches it"):
        hurtle.train_population(resume=found, learning_rate=1.0)
    again = hurtle.train_population(resume=found, progress="quiet", parallel=2)
    assert [entry for entries in lineage_of(again.path)[1:] for entry in entries] == [
        entry for entries in lineage_of(whole.path)[1:] for entry in entries
    ]
    with pytest.raises(HurtleError, match=r"is finished. To continue, ask for more with --total-steps"):
        hurtle.train_population(resume=found)
    more = hurtle.train_population(resume=found, total_steps=500, progress="quiet")
    assert (more.generations, {run.steps for run in more.members}) == (5, {500})
    check_lineage(more.path)


class Killed(BaseException):
    """Ends the process that trains, in effect."""


@pytest.mark.parametrize("generation", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("point", ["stage", "staged", "append", "adopt", "adopting", "adopted"])
def test_a_kill_at_any_point_between_two_intervals_loses_nothing(workers, monkeypatch, point, generation):
    whole = train(name="whole")

    def dies(when, function):
        def call(*args):
            now = args[1][0].generation if isinstance(args[1], list) else args[1]
            if isinstance(now, int) and now != generation:
                return function(*args)
            if when == "after":
                function(*args)
            raise Killed

        return call

    with monkeypatch.context() as patch:
        if point in ("stage", "staged"):
            patch.setattr(population_loop, "stage", dies("after" if point == "staged" else "before", population_loop.stage))
        elif point == "append":
            patch.setattr(Lineage, "append", dies("before", Lineage.append))
        elif point == "adopting":  # the copy is in place, and the staged one is still there
            patch.setattr(population_folders.shutil, "rmtree", _not_at(generation, population_folders.shutil.rmtree))
        else:
            patch.setattr(population_loop, "adopt", dies("after" if point == "adopted" else "before", adopt))
        with pytest.raises(Killed):
            train()
    again = hurtle.train_population(resume="runs/mine", progress="quiet", parallel=2)
    assert (again.path / "lineage.jsonl").read_text() == (whole.path / "lineage.jsonl").read_text()
    assert [weights(run.path) for run in again.members] == [weights(run.path) for run in whole.members]
    assert not list(again.path.glob(".member-*"))
    check_lineage(again.path)


def _not_at(generation, rmtree):
    def call(path, *args, **words):
        if str(path).endswith(f"-at-{generation}") and not words and any(Path(path).iterdir()):
            raise Killed
        return rmtree(path, *args, **words)

    return call


def test_what_was_put_aside_for_a_comparison_that_was_not_written_is_dropped(workers, tmp_path):
    found = train(total_steps=100)
    staged = found.path / ".member-1-at-7"
    staged.mkdir()
    (staged / "step-000000000999.pt").write_text("{}")
    hurtle.train_population(resume=found, total_steps=200, progress="quiet")
    assert not staged.exists()
    assert saved_steps(found.path / "member-1") == 200


KILLED = """
import sys
from hurtle.experiments import run_processes
from hurtle.experiments.populations import population
import hurtle
if __name__ == "__main__":
    run_processes.COMMAND = (sys.executable, "-I", "-S", "-c", {worker!r})
    population._plot = lambda *_: None
    hurtle.train_population("cartpole", 4, interval=100, total_steps=300, search={search!r}, name="mine", progress="quiet",
        parallel=2)
"""


def test_a_real_kill_in_the_midst_of_an_interval(workers, tmp_path):
    whole = train(name="whole")
    workers(kills="2", at=100)
    script = tmp_path / "script.py"
    script.write_text(KILLED.format(worker=WORKER, search=SEARCH))
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, script], env={**os.environ, "PYTHONPATH": paths}, check=False)
    assert done.returncode == -signal.SIGKILL
    workers()
    again = hurtle.train_population(resume="mine", progress="quiet", parallel=2)
    assert (again.path / "lineage.jsonl").read_text() == (whole.path / "lineage.jsonl").read_text()
    check_lineage(again.path)


def test_bad_input(workers, monkeypatch):
    for words, message in (
        ({"size": 1}, "size must be at least 2"),
        ({"interval": 0}, "interval must be a whole number of at least 1"),
        ({"share": 0.6}, "share must be more than 0 and at most 0.5"),
        ({"score": "retrun"}, "No score 'retrun'. Did you mean return"),
        ({"time_limit": 0}, "time_limit must be a number of more than 0"),
        ({"clip_rage": 1}, "Did you mean clip_range"),
        ({"learning_rate": 0.1}, "learning_rate is searched by the population: do not give it a value"),
    ):
        with pytest.raises(HurtleError, match=message):
            train(**words)
    with pytest.raises(HurtleError, match="Each member has its own process, which cannot find this env"):
        hurtle.train_population(lambda: None)
    with pytest.raises(HurtleError, match="not a folder of a population"):
        hurtle.train_population(resume="nowhere")
    with pytest.raises(HurtleError, match="leave out env, config, seed and search"):
        hurtle.train_population(resume="nowhere", search=SEARCH)
    monkeypatch.setenv(run_processes.INSIDE, "yes")
    with pytest.raises(HurtleError, match="Members would train populations"):
        train()
    assert not Path("runs").exists()


def test_a_folder_that_is_being_trained_or_is_not_mine_is_not_resumed(workers, monkeypatch):
    workers(**{f"m{k}_at_100": "crash" for k in range(4)})
    with pytest.raises(HurtleError, match="Every member failed"):
        train()
    workers()
    monkeypatch.setattr(population, "GRACE", 0.1)
    with hold(Path("runs/mine")), pytest.raises(HurtleError, match="is being trained at this moment"):
        hurtle.train_population(resume="mine")
    with hold(Path("runs/mine/member-2")), pytest.raises(HurtleError, match="member-2 is being trained at this moment"):
        hurtle.train_population(resume="mine")
    file = Path("runs/mine/population.toml")
    file.write_text(file.read_text().replace('env = "cartpole"', 'env = "stranger.py:Env"'))
    with pytest.raises(HurtleError, match=r"names code outside the installed packages: env = 'stranger.py:Env'"):
        hurtle.train_population(resume="mine")
    file.write_text("size = 3")
    with pytest.raises(HurtleError, match=r"population.toml is damaged: KeyError"):
        hurtle.train_population(resume="mine")


def test_the_command_line(workers, capsys, tmp_path):
    Path("ranges.toml").write_text("learning_rate = { low = 1.0, high = 100.0 }\n")
    line = "train cartpole --population 4 --population-every 100 --total-steps 300 --search ranges.toml --name mine --seed 3"
    assert main([*line.split(), "--progress", "plain"]) == 0
    out = capsys.readouterr().out
    assert "cartpole · ppo · population of 4" in out
    assert "generation 2 of 3: best " in out
    assert "Done: 3 generations of 4 members" in out
    assert "next        hurtle watch runs/mine/member-" in out
    assert main(["train", "--resume", "latest", "--total-steps", "400", "--progress", "plain"]) == 0
    assert "Done: 4 generations of 4 members" in capsys.readouterr().out
    for line, message in {
        "train --resume mine --population 3": "as many runs: leave out --population",
        "train --resume mine --total-steps 400": "is finished",
        "train pendulum --resume mine": "runs/mine holds runs on cartpole: leave out 'pendulum'",
        "train cartpole --search learning_rate": "--search is for populations: add --population 8",
        "train cartpole --population 4 --seeds 3": "leave out --seeds",
        "train cartpole --population 4 --search gama": "No setting gama to search. Did you mean gamma",
    }.items():
        assert main(line.split()) == 2, line
        assert message in capsys.readouterr().err, line


def test_until_is_a_multiple_of_the_interval_whatever_rollouts_take(tmp_path):
    lineage = Lineage(tmp_path, 1)

    def at(steps, total=1000, interval=100):
        lineage.generations = [[Entry(0, 0, steps, 1.0, None, "", {})]]
        found = Population(tmp_path, {"total_steps": total}, {}, population_loop.Rules(1, interval), {}, lineage)
        return found.until, found.generations, found.is_done

    assert at(0) == (100, 10, False)
    assert at(128) == (200, 9, False)
    assert at(950) == (1000, 1, False)
    assert at(1000) == (1000, 0, True)
    assert at(0, total=250) == (100, 3, False)
    assert at(212, total=250) == (250, 1, False)


def test_the_dashboard_calls_them_members_and_shows_who_waits_for_the_others(workers, tmp_path):
    found = train(total_steps=200)
    with share_machine("cpu", [], 1, 4) as processes:
        progress = Progress(found.path, [0, 1, 2, 3], processes, 200, noun="member")
        assert [line.state for line in progress.lines()] == ["finished"] * 4
        summary = found.path / "member-2" / "summary.json"
        summary.write_text(summary.read_text().replace("total_steps", "until"))
        assert progress.lines()[2].state == "finished"  # those that have ended are read once …
        progress.forget()
        lines = progress.lines()  # … in each generation
    assert [line.state for line in lines] == ["finished", "finished", "paused", "finished"]
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(draw(lines, "cartpole · ppo · population of 4", "runs/mine", 1.0, 100, 30, "member"))
    shown = capture.get().splitlines()
    assert "IQM of 4 members" in shown[1]
    assert shown[6].startswith("│ member 2 ━━━")
    assert shown[6].split()[-2] == "paused"
    assert {len(line) for line in shown} == {100}
