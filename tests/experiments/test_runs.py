"""`hurtle runs`, and what the folder of a run tells."""

import json
import math
from pathlib import Path

import pytest
from made_runs import append, make_run

from hurtle.cli import main
from hurtle.errors import HurtleError
from hurtle.experiments.records import RunRecord, find_runs
from hurtle.tracking.run_state import hold


@pytest.fixture
def some(tmp_path, monkeypatch):
    """Four runs and a folder of two seeds, in ./runs."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    make_run(runs, name="done", evaluation=9.5)
    make_run(runs, name="stopped", algorithm="a2c", stopped_by="Ctrl-C", points=4)
    make_run(runs, name="crashed", env="pendulum", stopped_by=None, points=3, slope=-7.0)
    make_run(runs, name="empty", stopped_by=None, points=0)
    for seed in (2, 10):
        make_run(runs / "many", seed=seed, name=f"seed-{seed}", evaluation=100.0 + seed)
    (runs / "many" / "seeds.toml").write_text("seeds = [2, 10]\n")
    return runs


def listed(capsys, *arguments):
    assert main(["runs", *arguments]) == 0
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]


def test_a_record_tells_what_is_known(some):
    done = RunRecord.read(some / "done")
    assert (done.env, done.algorithm, done.seed, done.state) == ("cartpole", "ppo", 0, "finished")
    assert (done.steps, done.total_steps, done.seconds, done.steps_per_second) == (1000, 1000, 5.0, 200.0)
    assert (done.training_return, done.evaluation, done.final_return) == (10.0, 9.5, 9.5)
    crashed = RunRecord.read(some / "crashed")
    assert (crashed.state, crashed.steps, crashed.seconds, crashed.steps_per_second) == ("crashed", 200, 1.0, 200.0)
    assert (crashed.training_return, crashed.final_return) == (-14.0, -14.0)
    assert math.isnan(crashed.evaluation)
    append(some / "crashed", {"step": 200, "steps": 200, "eval_return": 3.0})
    append(some / "crashed", '{"step": 300, "ste')  # being written
    assert RunRecord.read(some / "crashed").final_return == 3.0
    empty = RunRecord.read(some / "empty")
    assert (empty.state, empty.steps) == ("crashed", 0)
    assert math.isnan(empty.seconds)


def test_places_that_mean_runs(some):
    many = [some / "many" / "seed-2", some / "many" / "seed-10"]
    relative = [Path("runs/many/seed-2"), Path("runs/many/seed-10")]
    assert find_runs(some / "many") == many  # 2 before 10
    assert find_runs("many") == relative
    assert find_runs("runs/many/seed-2") == relative[:1]
    assert find_runs("runs/*/seed-*") == sorted(relative)
    assert find_runs("runs/m*") == relative
    assert len(find_runs("runs")) == 6
    (some / "done" / "config.toml").write_text((some / "done" / "config.toml").read_text())
    assert find_runs("latest") == [Path("runs/done")]
    for place, message in {
        "nowhere": "There is no run nowhere. Known: crashed, done",
        "runs/don": "There is no run runs/don. Did you mean done?",
        "runs/x*": "No run folder matches 'runs/x.'",
        "runs/done/checkpoints": "There is no run in runs/done/checkpoints",
    }.items():
        with pytest.raises(HurtleError, match=message):
            find_runs(place)
    with pytest.raises(HurtleError, match="There is no run in none yet"):
        find_runs("latest", "none")


def test_the_list(some, capsys):
    assert main(["runs", "--sort", "name"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "env", "algorithm", "seed", "steps", "return", "seconds", "state", "age"]
    rows = {line.split()[0]: line.split()[1:-2] for line in lines[1:]}
    assert list(rows) == [f"runs/{name}" for name in ("crashed", "done", "empty", "many/seed-10", "many/seed-2", "stopped")]
    assert rows["runs/done"] == ["cartpole", "ppo", "0", "1.00K", "9.500", "5.0", "finished"]
    assert rows["runs/crashed"] == ["pendulum", "ppo", "0", "200/1.00K", "-14.00", "1.0", "crashed"]
    assert rows["runs/empty"] == ["cartpole", "ppo", "0", "0/1.00K", "-", "-", "crashed"]
    with hold(some / "empty"):
        assert listed(capsys, "--state", "running") == ["runs/empty"]


def test_filters_and_orders(some, capsys):
    assert listed(capsys, "--env", "pendulum") == ["runs/crashed"]
    assert listed(capsys, "--algorithm", "a2c", "--env", "cartpole") == ["runs/stopped"]
    assert set(listed(capsys, "--state", "crashed")) == {"runs/crashed", "runs/empty"}
    by_return = listed(capsys, "--sort", "return")
    assert by_return[:3] == ["runs/many/seed-10", "runs/many/seed-2", "runs/done"]
    assert by_return[-1] == "runs/empty"  # unknown comes last
    assert listed(capsys, "runs/many", "--sort", "seed") == ["runs/many/seed-2", "runs/many/seed-10"]
    assert listed(capsys, "runs/many", "--sort", "seed", "--reverse") == ["runs/many/seed-10", "runs/many/seed-2"]
    assert listed(capsys, "runs/done", "runs/stopped", "--sort", "env") == ["runs/done", "runs/stopped"]


def test_json(some, capsys):
    assert main(["runs", "--json", "--sort", "steps", "--reverse"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    assert len(found) == 6
    assert found[0] == {**found[0], "path": "runs/empty", "steps": 0, "return": None, "state": "crashed"}
    assert found[0]["age"] >= 0


def test_mistakes(some, capsys):
    for line, message in {
        "runs --state finishd": "--state finishd: Did you mean finished?",
        "runs --sort steeps": "--sort steeps: Did you mean steps?",
        "runs --env cartpol": "No run has the env cartpol. Did you mean cartpole?",
        "runs nowhere": "There is no run nowhere",
    }.items():
        assert main(line.split()) == 2
        assert message in capsys.readouterr().err
    (some / "empty" / "config.toml").write_text("env = ")
    assert main(["runs"]) == 0
    assert "empty/config.toml is not valid TOML" in capsys.readouterr().err
    assert main(["runs", "runs/done", "--state", "crashed"]) == 0
    assert "No run matches" in capsys.readouterr().out


def test_removing_asks_and_never_takes_a_running_one(some, capsys, monkeypatch):
    answers = []
    monkeypatch.setattr("builtins.input", lambda question: (print(question), answers.pop())[1])
    answers.append("n")
    assert main(["runs", "--state", "crashed", "--remove"]) == 1
    out = capsys.readouterr().out
    assert "Remove these 2 runs for good? [y/N]" in out
    assert "Nothing was removed." in out
    answers.append("y")
    with hold(some / "empty"):
        assert main(["runs", "runs/empty", "runs/crashed", "--remove"]) == 0
    told = capsys.readouterr()
    assert "runs/empty is running and stays" in told.err
    assert "Removed 1 run." in told.out
    assert (some / "empty").exists()
    assert not (some / "crashed").exists()


def test_removing_without_asking_takes_an_empty_folder_of_seeds_along(some, capsys, monkeypatch):
    assert main(["runs", "runs/many/seed-2", "--remove", "--yes"]) == 0
    assert (some / "many" / "seeds.toml").exists()
    assert main(["runs", "runs/many", "--remove", "--yes"]) == 0
    assert not (some / "many").exists()
    assert (some / "done").exists()

    def nobody(question):
        raise EOFError

    monkeypatch.setattr("builtins.input", nobody)
    assert main(["runs", "runs/done", "--remove"]) == 2
    assert "there is nobody to ask. --yes removes without asking" in capsys.readouterr().err
    assert (some / "done").exists()
