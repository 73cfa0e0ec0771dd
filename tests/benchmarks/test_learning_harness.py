"""The grid of benchmarks/learning.py on fake results: what is run, what is kept, what is made of it. One slow test trains."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts import each other as neighbours

import learning
import learning_jobs
from learning import Grid, Speeds, duration, outdated, plan, unfinished
from learning_jobs import Curve, Job, run_job, settings_of
from learning_report import BEGIN, END, Places, Score, load_results, report, summary_table, write_between_markers
from learning_sb3 import sb3_words
from learning_tasks import TASKS, Goal, MaskedCartPole

import hurtle
from hurtle.errors import HurtleError

MACHINE = {"cpu": "a CPU", "cores": 2, "system": "Linux", "python": "3.11", "versions": {"torch": "2"}, "commit": "abc"}


STEPS = {Job("bandit", "hurtle", seed): 1000 for seed in range(5)}


def fake_result(job: Job, mean: float, low: float | None = None, high: float | None = None, curve: list | None = None) -> dict:
    spread = {"low": mean - 1 if low is None else low, "high": mean + 1 if high is None else high}
    evaluation = {"mean": mean, "std": 1.0, "iqm": mean, "episodes": 100, "deterministic": True, **spread}
    filled = {"steps": 1000, "seconds": 10.0, "curve": curve or [], "evaluation": evaluation}
    return {**job._asdict(), **filled, "settings": {}, "machine": MACHINE}


def keep(folder: Path, job: Job, *values, **named) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / job.file).write_text(json.dumps(fake_result(job, *values, **named)))


# What is run ----------------------------------------------------------------------------------------------------------


def test_every_task_has_its_first_seed_before_any_has_its_second():
    jobs = plan(["cartpole_100k", "snake"], 2, ("hurtle", "sb3"))
    assert jobs == [
        Job("snake", "random", 0),  # what its goal is a multiple of
        Job("cartpole_100k", "hurtle", 0),
        Job("cartpole_100k", "sb3", 0),
        Job("snake", "hurtle", 0),  # SB3 has no such task
        Job("cartpole_100k", "hurtle", 1),
        Job("cartpole_100k", "sb3", 1),
        Job("snake", "hurtle", 1),
    ]


def writes(folder: Path, seconds: float = 0.0):
    """A command that takes note of being called and writes a job's file; seed 1 fails."""

    def command(job: Job) -> list[str]:
        with (folder / "calls.txt").open("a") as calls:
            calls.write(f"{job}\n")
        text = json.dumps(fake_result(job, 7.0))
        program = f"import time, pathlib; time.sleep({seconds}); pathlib.Path({str(folder / job.file)!r}).write_text({text!r})"
        return [sys.executable, "-c", "raise SystemExit('no such luck')" if job.seed == 1 else program]

    return command


def test_a_rerun_does_only_what_is_missing(tmp_path, capsys):
    jobs = [Job("bandit", "hurtle", seed) for seed in range(3)]
    grid = Grid(unfinished(jobs, tmp_path), 2, writes(tmp_path), tmp_path, STEPS)
    grid.run()
    assert grid.failed == [jobs[1]]
    assert "no such luck" in capsys.readouterr().out
    assert unfinished(jobs, tmp_path) == [jobs[1]]
    Grid(unfinished(jobs, tmp_path), 2, writes(tmp_path), tmp_path, STEPS).run()
    assert (tmp_path / "calls.txt").read_text().split("\n") == [*map(str, jobs), str(jobs[1]), ""]


def test_ctrl_c_ends_what_runs_and_keeps_what_is_finished(tmp_path):
    done, slow, interrupts = (Job("bandit", "hurtle", seed) for seed in (0, 2, 3))
    keep(tmp_path, done, 1.0)
    started = writes(tmp_path, seconds=3600)

    def command(job: Job) -> list[str]:
        if job == interrupts:
            raise KeyboardInterrupt
        return started(job)

    grid, began = Grid([slow, interrupts], 2, command, tmp_path, STEPS), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        grid.run()
    assert time.monotonic() - began < 300  # it did not wait for the slow one
    assert unfinished([done, slow, interrupts], tmp_path) == [slow, interrupts]


def test_results_of_other_settings_are_named(tmp_path):
    job = Job("cartpole_100k", "hurtle", 0)
    keep(tmp_path, job, 500.0)
    assert outdated([job], tmp_path) == [job]
    (tmp_path / job.file).write_text(json.dumps({**fake_result(job, 500.0), "settings": settings_of(job)}))
    assert outdated([job], tmp_path) == []
    assert settings_of(job)["num_epochs"] == 20  # the preset's
    assert "runs" not in settings_of(job)


def test_a_job_writes_all_there_is_to_know(tmp_path, monkeypatch):
    def fake_training(task, seed, curve, quick):
        curve.add(256, float("nan"))
        curve.add(512, 20.0)
        return 512, 3.0, learning_jobs.evaluated(np.array([1.0, 3.0]), deterministic=True)

    monkeypatch.setattr(learning_jobs, "train_hurtle", fake_training)
    job = Job("cartpole_100k", "hurtle", 4)
    run_job(job, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cartpole_100k-hurtle-4.json"]  # and no temporary file
    result = json.loads((tmp_path / job.file).read_text())
    assert result["curve"] == [[512, 20.0]]
    assert result["evaluation"]["mean"] == 2.0
    assert result["evaluation"]["episodes"] == 2
    assert (result["seed"], result["steps"], result["settings"]["seed"]) == (4, 512, 4)
    assert result["machine"]["commit"]


def test_a_stopped_training_leaves_no_file(tmp_path, monkeypatch):
    def stopped(*_):
        raise InterruptedError

    monkeypatch.setattr(learning_jobs, "train_hurtle", stopped)
    with pytest.raises(InterruptedError):
        run_job(Job("cartpole_100k", "hurtle", 0), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_curve_keeps_its_ends():
    curve = Curve()
    for steps in range(1, 1001):
        curve.add(steps, 2.0 * steps)
    points = curve.points(most=50)
    assert len(points) == 50
    assert (points[0], points[-1]) == ([1, 2.0], [1000, 2000.0])


def test_the_estimate_takes_the_best_knowledge_there_is():
    speeds = Speeds({"bandit": {"hurtle": [fake_result(Job("bandit", "hurtle", 0), 1.0)]}})  # 100 steps/s
    assert speeds.seconds(Job("bandit", "hurtle", 1), 500) == 5
    assert speeds.seconds(Job("memory", "hurtle", 0), 500) == 5  # nothing better is known
    speeds.guess(Job("memory", "hurtle", 0), 10.0)
    assert speeds.seconds(Job("memory", "hurtle", 1), 500) == 50
    assert speeds.seconds(Job("cartpole_100k", "sb3", 0), 500) is None
    assert [duration(s) for s in (45, 700, 12_000)] == ["45 s", "12 min", "3 h 20 min"]


# What is made of it ---------------------------------------------------------------------------------------------------


def test_each_seed_counts_once_and_outliers_do_not_move_the_score():
    score = Score.of([fake_result(Job("bandit", "hurtle", seed), mean) for seed, mean in enumerate((0, 480, 490, 500, 500))])
    assert score.iqm == 490  # of the middle three
    assert score.low < 490 <= score.high <= 500


def row_of(folder: Path, task: str) -> list[str]:
    text = summary_table(load_results(folder), Places.under(folder.parent))
    return next([cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n") if TASKS[task].about in line)


def test_the_table_says_who_reached_the_goal(tmp_path):
    folder = tmp_path / "results"
    for seed, mean in enumerate((500.0, 500.0, 400.0, 500.0, 500.0)):
        keep(folder, Job("cartpole_100k", "hurtle", seed), mean)
        keep(folder, Job("cartpole_masked_mlp", "hurtle", seed), mean - 300)
    keep(folder, Job("cartpole_100k", "sb3", 0), 480.0)
    keep(folder, Job("seaquest", "hurtle", 0), 30.0)
    cartpole = row_of(folder, "cartpole_100k")
    assert cartpole[1:] == [
        "≥ 495",
        cartpole[2],
        "400.0",
        "4 of 5",
        "yes",
        "480.0 [480.0, 480.0]",
        "500 ± 0 (100K)",
        "490 ± 6 (500K)",
    ]
    assert cartpole[2].startswith("500.0 [")
    assert row_of(folder, "cartpole_masked_mlp")[3:6] == ["200.0", "5 of 5", "yes"]  # worst: the one nearest to solving it
    assert row_of(folder, "seaquest")[1:6] == ["–", "30.0 [30.0, 30.0]", "30.0", "– of 1", "–"]


def test_goals_that_need_a_random_policy_wait_for_it(tmp_path):
    folder = tmp_path / "results"
    for seed, mean in enumerate((2.5, 2.6, 1.0)):
        keep(folder, Job("snake", "hurtle", seed), mean)
    assert row_of(folder, "snake")[1] == "≥ 5 × random"
    assert row_of(folder, "snake")[5] == "–"
    keep(folder, Job("snake", "random", 0), 0.5)
    assert row_of(folder, "snake")[1] == "≥ 5 × random: 2.50"
    assert row_of(folder, "snake")[4:6] == ["2 of 3", "**no**"]  # (2.5 + 2.6 + 1) / 3 is too little


def test_above_random_means_that_the_intervals_do_not_overlap():
    goal, random = Goal("above random"), {"mean": -25.0, "low": -26.0, "high": -24.0}
    assert goal.is_met(-20.0, -23.9, random) is True
    assert goal.is_met(-20.0, -24.1, random) is False
    assert goal.is_met(-20.0, -23.9) is None


def test_the_page_changes_between_its_markers_only(tmp_path):
    page = tmp_path / "learning.md"
    page.write_text(f"# Title\n\nbefore\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    write_between_markers(page, "| new |")
    expected = f"# Title\n\nbefore\n\n{BEGIN}\n\n| new |\n\n{END}\n\nafter\n"
    assert page.read_text() == expected
    write_between_markers(page, "| new |")
    assert page.read_text() == expected
    page.write_text("# No markers\n")
    with pytest.raises(SystemExit, match="learning:begin"):
        write_between_markers(page, "| new |")
    assert page.read_text() == "# No markers\n"


def test_the_report_draws_and_writes(tmp_path):
    pytest.importorskip("matplotlib")
    places = Places.under(tmp_path)
    assert report(places) == "Nothing is finished yet."
    for seed in range(2):
        keep(places.results, Job("cartpole_100k", "hurtle", seed), 500.0, curve=[[100, 20.0 + seed], [1000, 500.0]])
    text = report(places)
    assert "[CartPole, 100K steps](images/learning/cartpole_100k.png)" in text
    assert "a CPU, 2 cores" in text
    assert (tmp_path / "images" / "learning" / "cartpole_100k.png").stat().st_size > 1000
    assert text in places.page.read_text()


@pytest.mark.slow
def test_seeds_side_by_side_are_saved_go_on_and_write_their_files(tmp_path):
    pytest.importorskip("mujoco")
    command = [
        sys.executable,
        Path(learning.__file__).with_name("learning_seeds.py"),
        "sac_hopper",
        "--device",
        "cpu",
        "--seeds",
        "2",
    ]
    places = ["--folder", tmp_path / "unfinished", "--results", tmp_path / "results"]
    for limit, last in ((["--seconds", "0"], "to be continued"), ([], "64 steps in")):
        done = subprocess.run([*command, "--steps", "64", *limit, *places], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert last in done.stdout
    results = load_results(tmp_path / "results")["sac_hopper"]["hurtle"]
    assert [result["seed"] for result in results] == [0, 1]
    assert all(result["steps"] == 64 and result["settings"]["algorithm"] == "sac" for result in results)
    assert results[0]["evaluation"]["mean"] != results[1]["evaluation"]["mean"]


# The tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_batches_of_every_task_fit(name):
    settings, agents = TASKS[name].settings(), {"snake": 4, "simple_spread": 3}.get(name, 1)
    settings.algorithm.check(settings.train.num_envs * agents, settings.policy.recurrent != "none")


def test_the_ocean_envs_have_one_configuration():
    found = [settings_of(Job(name, "hurtle", 0)) for name in ("bandit", "memory", "password", "squared", "stochastic")]
    assert all(words["entropy_coef"] == 0.01 for words in found)
    assert [words["recurrent"] for words in found] == ["none", "lstm", "none", "none", "none"]
    others = [{word: value for word, value in words.items() if word not in ("env", "recurrent")} for words in found]
    assert all(words == others[0] for words in others)


def test_sb3_gets_the_same_hyperparameters():
    words = sb3_words(TASKS["cartpole_100k"].settings())
    assert (words["n_steps"], words["batch_size"], words["n_epochs"], words["gamma"]) == (32, 256, 20, 0.98)
    assert words["learning_rate"](0.5) == pytest.approx(5e-4)  # annealed
    assert words["clip_range_vf"] is None
    assert words["vf_coef"] == 0.25  # SB3's value loss lacks the factor 1/2
    assert words["policy_kwargs"]["net_arch"] == {"pi": [64, 64], "vf": [64, 64]}
    with pytest.raises(HurtleError, match="recurrent"):
        sb3_words(TASKS["cartpole_masked_lstm"].settings())


def test_masked_cartpole_hides_the_velocities():
    whole, masked = (hurtle.make(env, debug=True) for env in ("cartpole", MaskedCartPole))
    np.testing.assert_array_equal(masked.reset(seed=3)[0], whole.reset(seed=3)[0][::2])
    for action in (1, 0, 1):
        obs, reward, *_ = masked.step(action)
        np.testing.assert_array_equal(obs, whole.step(action)[0][::2])
        assert reward == 1
    assert masked.observation_space.shape == (2,)


def test_the_list_shows_what_is_finished(tmp_path):
    keep(tmp_path, Job("cartpole_100k", "hurtle", 3), 500.0)
    line = next(line for line in learning.listing(tmp_path).split("\n") if "cartpole_100k" in line)
    assert "≥ 495" in line
    assert "hurtle 3" in line
