"""Several learners of one run: they give what one learner of all envs gives, end together, and resume each other's files."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import hurtle
from hurtle.algorithms.algorithm import AlgorithmConfig, algorithm_name
from hurtle.contracts import Episodes, Learner, Weights
from hurtle.errors import HurtleError, LostRankError
from hurtle.kernels.ranks import Ranks
from hurtle.runners.assembly import assemble
from hurtle.runners.rank_messages import interleaved
from hurtle.runners.settings import make_settings
from hurtle.tracking.checkpoints import Checkpoints, load_checkpoint

ROOT = Path(hurtle.__file__).parents[1]
STEPS, UPDATES = 16, 5
SETTINGS = {
    "algorithm": "ppo", "gear": "native", "preset": False, "hidden_sizes": (16, 16), "num_steps": STEPS, "num_epochs": 2,
    "normalize_observations": True, "reward_mode": "normalize", "learning_rate": 1e-2, "target_kl": 0.02, "seed": 3,
    "eval_episodes": 2, "trackers": (), "progress": "quiet",
}  # fmt: skip
"""Minibatches are whole rollouts, so that those of two learners are one learner's."""


def train(runs, learners, num_envs=4, **changes):
    total = UPDATES * STEPS * 8
    settings = {"total_steps": total, "minibatch_size": STEPS * num_envs, "runs": str(runs)} | SETTINGS | changes
    return hurtle.train("cartpole", num_envs=num_envs, num_learners=learners, **settings)


def saved(run):
    path = run if isinstance(run, Path) else run.path
    return load_checkpoint(Checkpoints(path / "checkpoints").latest())


def children():
    return [child for child in psutil.Process().children() if "rank_process" in " ".join(child.cmdline())]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two learners that nobody disturbs."""
    return train(tmp_path_factory.mktemp("whole"), 2)


def test_two_learners_train_as_one_with_all_envs(whole, tmp_path):
    one = train(tmp_path, 1, num_envs=8)
    found, expected = saved(whole), saved(one)
    for name, tensor in expected["policy"].items():  # float32 sums in another order; statistics are float64
        torch.testing.assert_close(found["policy"][name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    assert (whole.steps, whole.mean_return) == (one.steps, one.mean_return)
    names = ("steps", "updates", "episodes")
    assert [found["progress"][name] for name in names[:2]] == [expected["progress"][name] for name in names[:2]]
    assert whole.evaluation is not None
    assert json.loads((whole.path / "about.json").read_text())["learners"] == 2
    assert [path.name for path in whole.path.parent.iterdir()] == [whole.path.name]  # one folder
    assert not children()


def test_episodes_of_all_ranks_are_among_the_newest():
    parts = [Episodes.of(np.arange(4.0), np.arange(4)), Episodes(), Episodes.of([10.0, 11.0], [7, 8], {"score": [0.5]})]
    found = interleaved(parts)
    assert found.returns.tolist() == [0.0, 10.0, 1.0, 2.0, 11.0, 3.0]
    assert found.lengths.tolist() == [0, 7, 1, 2, 8, 3]
    assert found.metrics["score"].tolist() == [0.5]
    assert (found.count, found.best_return, found.best_length) == (6, 11.0, 8.0)


def test_ctrl_c_stops_all_and_resuming_is_exact(whole, tmp_path):
    def interrupt(trainer):
        if trainer.updates == 2:
            assert len(children()) == 1
            os.kill(os.getpid(), signal.SIGINT)

    hook = sys.excepthook
    run = train(tmp_path, 2, callbacks=interrupt)
    assert sys.excepthook is hook
    assert (run.stopped_by, run.steps) == ("Ctrl-C", 2 * STEPS * 8)
    assert not children()
    resumed = hurtle.train(resume=run)
    assert resumed.steps == whole.steps
    found, expected = saved(resumed), saved(whole)
    for name, tensor in expected["policy"].items():
        assert torch.equal(found["policy"][name], tensor), name
    own, same = found["ranks"][0]["collector"]["envs"], expected["ranks"][0]["collector"]["envs"]
    assert own.keys() == same.keys()
    assert str(own) == str(same)


def test_a_killed_learner_ends_the_run_and_any_number_goes_on(tmp_path):
    killed = []

    def kill(trainer):
        if trainer.updates == 2:
            (child,) = children()
            child.kill()
            killed.append((time.monotonic(), trainer.folder.path))

    with pytest.raises(
        LostRankError, match=r"learner 1 of 2 .* was killed by SIGKILL.*Last checkpoint: .*step-000000000256.pt"
    ):
        train(tmp_path, 2, callbacks=kill)
    ((when, folder),) = killed
    assert time.monotonic() - when < 60.0  # not after a timeout of hours
    assert not children()
    before = saved(folder)
    assert before["progress"]["steps"] == 2 * STEPS * 8
    more = hurtle.train(resume=folder, num_learners=3, total_steps=before["progress"]["steps"] + 12 * STEPS)
    after = saved(more)
    assert more.steps == 28 * STEPS
    assert len(after["ranks"]) == 2
    assert after["policy"]["normalizer.count"] == 28 * STEPS
    alone = hurtle.train(resume=folder, num_learners=1, total_steps=more.steps + 4 * STEPS)
    assert alone.steps == 32 * STEPS
    assert "ranks" not in saved(alone)


@pytest.mark.parametrize("learners", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_replay_buffers_of_learners_that_stay_are_kept(tmp_path, learners, capsys):
    settings = {
        "num_envs": 2,
        "num_steps": 8,
        "learning_starts": 96,
        "batch_size": 8,
        "epsilon_fraction": 0.1,
        "capacity": 1024,
    }
    settings |= {"hidden_sizes": (8,), "eval_episodes": 1, "trackers": (), "progress": "quiet", "num_learners": 3}
    run = hurtle.train("cartpole", "dqn", 960, runs=str(tmp_path), until=192, **settings)
    more = hurtle.train(resume=run, num_learners=learners, until=192 + 16 * learners)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["epsilon"] < 0.5  # uniform actions are not taken again
    assert ("value_loss" in lines[-1]) == (learners < 4)  # nobody learns before a new buffer is filled
    kept = [int(state["learner"]["replay"]["heads"].sum()) > 64 for state in saved(more).get("ranks", [])]
    assert kept == [True, True, False][: learners - 1]
    assert ("1 learner begins with an empty replay buffer" in capsys.readouterr().err) == (learners == 4)


FAILING = """
import os
import gymnasium

class Failing(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 24 and os.getpid() != PARENT:
            FAIL
        return super().step(action)
"""


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        ('raise ValueError("the simulator of another learner broke")', "failed.*the simulator of another learner broke"),
        ("raise SystemExit(0)", r"ended by itself \(exit code 0\), as if its env had called sys.exit"),
    ],
)
def test_a_learner_that_fails_ends_the_run_with_its_own_reason(tmp_path, fail, reason):
    file = tmp_path / "failing.py"
    file.write_text(FAILING.replace("PARENT", str(os.getpid())).replace("FAIL", fail))
    settings = {"backend": "serial", "num_envs": 2, "normalize_observations": False, "reward_mode": "raw"}
    with pytest.raises(LostRankError, match=rf"(?s)learner 1 of 2 .* {reason}.*step-"):
        hurtle.train(f"{file}:Failing", num_learners=2, minibatch_size=32, runs=str(tmp_path), **SETTINGS | settings)
    (folder,) = (path.parent for path in tmp_path.glob("*/config.toml"))
    assert saved(folder)["progress"]["steps"] == 4 * STEPS
    assert not children()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"curriculum": {"x": "uniform:0:1"}}, "num_learners=2: a curriculum adapts to the episodes of one learner"),
        ({"runner": "async"}, "num_learners=2: learners collect in turn with learning; set runner='local'"),
    ],
)
def test_what_learners_cannot_share_is_refused_at_once(tmp_path, settings, problem):
    with pytest.raises(HurtleError, match=problem):
        train(tmp_path, 2, **settings)


def test_a_vector_of_the_users_own_is_refused(tmp_path):
    with pytest.raises(HurtleError, match="a vector of your own belongs to one process"):
        hurtle.train(hurtle.make_vec("bandit", num_envs=2), num_learners=2, runs=str(tmp_path))


class Selfish(Learner):
    """An algorithm of a user's, which averages no gradients."""

    Config = AlgorithmConfig

    def __init__(self, policy, config, setup):
        self.policy = policy

    def update(self, experience, progress=0.0):
        return {}

    def weights(self):
        return Weights.of(self.policy)


@pytest.mark.parametrize(
    ("env", "algorithm", "problem"),
    [
        ("cartpole", Selfish, "Selfish trains with one learner only, since it does not average gradients: set num_learners=1"),
        ("pendulum", "xqc", "xqc trains with one learner only, since batch norm needs the whole batch: set num_learners=1"),
        ("cartpole", "apex", "apex trains with one learner only, since its actors collect while it learns: set num_learners=1"),
    ],
)
def test_algorithms_that_train_alone_say_so(env, algorithm, problem, tmp_path, monkeypatch):
    settings = make_settings(env, {"algorithm": algorithm_name(algorithm), "num_learners": 2})
    monkeypatch.setattr(subprocess, "Popen", None)  # no process is started for it
    with pytest.raises(HurtleError, match=problem):
        hurtle.train(env, algorithm, num_learners=2, runs=str(tmp_path))
    with pytest.raises(HurtleError, match=problem):
        assemble(settings, env, ranks=Ranks(0, 2))


def test_envs_and_actions_are_seeded_as_those_of_one_learner():
    """Rank 1 of two has the last two of four envs, of four agents each, and draws their actions."""
    settings = make_settings("snake", {"num_envs": 2, "preset": False, "num_steps": 64, "minibatch_size": 64})
    one = assemble(make_settings("snake", {"num_envs": 4, "preset": False, "num_steps": 64, "minibatch_size": 64}), "snake")
    second = assemble(settings, "snake", ranks=Ranks(1, 2))
    found, expected = second.rollout, one.rollout
    second.collector.collect(found)
    one.collector.collect(expected)
    rows = found.num_rows
    for name in ("obs", "actions", "rewards", "terminated"):
        assert torch.equal(getattr(found, name), getattr(expected, name)[:, rows:]), name
    for parts in (one, second):
        parts.close()


def test_a_number_of_learners_is_at_least_1():
    with pytest.raises(HurtleError, match="num_learners must be 1 or more"):
        hurtle.train("bandit", num_learners=0)


PARENT = """
import sys, time
import hurtle

def tell(trainer):
    if trainer.updates == 2:
        print("training", flush=True)
    time.sleep(0.05)

if __name__ == "__main__":
    hurtle.train("cartpole", total_steps=10**9, num_learners=2, runs=sys.argv[1], callbacks=tell, trackers=(), progress="quiet")
"""


@contextmanager
def training(folder):
    """A process that trains with two learners, and the other learner."""
    script = folder / "parent.py"
    script.write_text(PARENT)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command, environment = [sys.executable, str(script), str(folder)], {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as parent:
        try:
            assert parent.stdout.readline() == b"training\n"
            yield parent, next(each for each in psutil.Process(parent.pid).children() if "rank_process" in str(each.cmdline()))
        finally:
            parent.kill()


def learner_folders():
    return list(Path(tempfile.gettempdir()).glob("hurtle-learners-*"))


@pytest.mark.slow
def test_no_learner_outlives_a_parent_that_is_killed(tmp_path):
    before = set(learner_folders())
    with training(tmp_path) as (parent, other):
        parent.kill()
        _, left = psutil.wait_procs([other], timeout=10)
        assert not left
        assert not set(learner_folders()) - before


@pytest.mark.slow
def test_ctrl_c_twice_ends_a_run_that_waits_for_a_learner_that_hangs(tmp_path):
    with training(tmp_path) as (parent, other):
        other.suspend()
        parent.send_signal(signal.SIGINT)
        for line in parent.stderr:
            if b"once more" in line:
                break
        assert line == b"hurtle: Ctrl-C: waiting for the other learners; once more to end at once\n"
        parent.send_signal(signal.SIGINT)
        assert parent.wait(30)
        _, left = psutil.wait_procs([other], timeout=5)
        assert not left


@pytest.mark.slow
def test_torchrun_starts_the_learners(whole, tmp_path):
    """The same run as with num_learners, to the last bit."""
    flags = {name: value for name, value in SETTINGS.items() if name not in ("preset", "trackers", "normalize_observations")}
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", *_words(value))]
    words += ["--no-preset", "--normalize-observations", "--num-envs", "4", "--minibatch-size", str(STEPS * 4), "--no-curve"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "hurtle", "train", "cartpole"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, *words, "--total-steps", str(whole.steps), "--runs", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    found, expected = saved(folder), saved(whole)
    assert found["settings"]["num_learners"] == 2
    for name, tensor in expected["policy"].items():
        assert torch.equal(found["policy"][name], tensor), name


def _words(value):
    return [str(each) for each in value] if isinstance(value, tuple) else [str(value)]
