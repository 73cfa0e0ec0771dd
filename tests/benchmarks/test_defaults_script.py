"""benchmarks/defaults.py: which cells there are, what becomes of their files, and CleanRL's algorithms, stopped and resumed."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts import each other as neighbours

import defaults
import defaults_jobs
from defaults_cleanrl import ALGORITHMS, Moments
from defaults_jobs import TASKS, Job, make_vec

from hurtle.runners.kinds import kind_of


def test_six_tasks_have_numbers_as_actions_and_six_have_choices():
    assert sorted(task.is_continuous for task in TASKS.values()) == [False] * 6 + [True] * 6
    for name in ("pusher", "pendulum", "taxi", "acrobot", "asterix"):
        task = TASKS[name]
        assert (kind_of(task.env, task.parameters) == "continuous") is task.is_continuous, name


def test_every_cell_is_there_once_and_first_seeds_come_first():
    jobs = defaults.plan(["pusher", "taxi"], ["ppo", "sac", "dqn"], ["hurtle", "sb3"], 1000, 2)
    assert len({job.file for job in jobs}) == len(jobs) == 2 * 2 * 4
    assert {job.task for job in jobs} == {f"{name}-1000" for name in ("pusher-ppo", "pusher-sac", "taxi-ppo", "taxi-dqn")}
    assert [job.seed for job in jobs] == [0] * 8 + [1] * 8
    assert jobs[0].parts == (TASKS["pusher"], "sac", 1000)


def keep(folder, task, library, seed, mean):
    job = Job(task, library, seed)
    (folder / job.file).write_text(json.dumps({**job._asdict(), "evaluation": {"mean": mean}}))


def test_the_report_compares_where_all_have_run(tmp_path):
    assert defaults.report(tmp_path) == "Nothing is finished yet."
    for seed in range(3):
        keep(tmp_path, "pusher-ppo-1000", "hurtle", seed, 10.0)
        keep(tmp_path, "pusher-ppo-1000", "sb3", seed, 4.0)
        keep(tmp_path, "taxi-ppo-1000", "hurtle", seed, 1.0)  # nobody to compare with
    text = defaults.report(tmp_path)
    assert "## ppo, 1,000 steps" in text
    assert "| taxi" in text
    (better,) = [line for line in text.split("\n") if line.startswith("| hurtle is better")]
    assert better.split("|")[2].strip() == "–"
    assert better.split("|")[3].strip().startswith("1.000 [1.000")
    assert "| all 1 task," in text


def test_running_moments_are_those_of_all_rows():
    rows, moments = np.random.default_rng(0).normal(3.0, 2.0, (100, 3)), Moments((3,))
    for part in np.split(rows, [1, 30, 31]):
        moments.add(part)
    np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-4)
    np.testing.assert_allclose(moments.var, rows.var(0), rtol=1e-4)


@pytest.mark.parametrize(
    ("algorithm", "task", "small"),
    [
        ("ppo", "pendulum", {"num_steps": 64, "minibatches": 4, "epochs": 2}),
        ("ppo", "acrobot", {"num_steps": 32, "epochs": 2}),
        ("sac", "pendulum", {"starts": 100, "batch": 16}),
        ("dqn", "acrobot", {"starts": 100, "batch": 16}),
    ],
)
def test_what_was_stopped_goes_on(algorithm, task, small, tmp_path):
    pytest.importorskip("stable_baselines3")
    job, total, told = Job.of(task, algorithm, 512, "cleanrl", 0), 512, []

    def model():
        made = ALGORITHMS[algorithm](make_vec(job, 2, seed=0), total, seed=0)
        vars(made).update(small)
        return made

    first = model()
    assert not first.learn(lambda steps, _: steps < 200)
    first.save(tmp_path / "model")
    second = model()
    second.load(tmp_path / "model")
    assert second.steps == first.steps < total
    obs = np.zeros((2, *second.vec.observation_space.shape), np.float32)
    np.testing.assert_array_equal(second.predict(obs)[0], first.predict(obs)[0])
    assert second.learn(lambda steps, _: told.append(steps) is None)
    assert second.steps == total
    assert min(told) > first.steps
    actions, _ = second.predict(obs)
    assert all(second.vec.action_space.contains(action) for action in actions)
    assert any(not np.array_equal(a, b) for a, b in zip(first_weights(first), first_weights(second), strict=True))
    for each in (first, second):
        each.vec.close()


def first_weights(model):
    network = getattr(model, "actor", None) or model.network
    return [parameter.detach().numpy() for parameter in network.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("library", defaults_jobs.LIBRARIES)
def test_a_cell_writes_its_file_and_leaves_nothing_behind(library, tmp_path, monkeypatch):
    pytest.importorskip("stable_baselines3")
    monkeypatch.setattr(defaults_jobs.signal, "signal", lambda *_: None)
    job = Job.of("acrobot", "ppo", 4096, library, 3)
    defaults_jobs.run_job(job, tmp_path)
    result = json.loads((tmp_path / job.file).read_text())
    assert (result["steps"], result["seed"], result["evaluation"]["episodes"]) == (4096, 3, defaults_jobs.EPISODES)
    assert sorted(path.name for path in tmp_path.iterdir()) == [job.file, "unfinished"]
    assert not list((tmp_path / "unfinished").iterdir())
