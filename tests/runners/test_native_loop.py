"""Several updates in one call: the same bits as one by one, in weights, states, metrics and errors; and when it is used."""

import json
from itertools import cycle, pairwise

import numpy as np
import pytest
import torch
from sample_envs import SHORT_CARTPOLE, SHORT_PENDULUM, SNAKES, Walk

import hurtle
from hurtle.errors import EnvIndexError, NonFiniteError
from hurtle.native import Box, Discrete, Env, float32, int32
from hurtle.runners.assembly import assemble
from hurtle.runners.native_loop import NativeLoop
from hurtle.runners.settings import make_settings
from hurtle.tracking.checkpoints import load_checkpoint

SMALL = {
    "progress": "quiet",
    "trackers": (),
    "eval_episodes": 4,
    "eval_sampled": True,
    "preset": False,
    "num_envs": 20,
    "num_steps": 12,
    "hidden_sizes": (32,),
}
PPO = {**SMALL, "minibatch_size": 60, "num_epochs": 2}
A2C = {**SMALL, "algorithm": "a2c", "num_steps": 5}
ANNEALED = {"anneal_learning_rate": True, "anneal_clip_range": True, "clip_values": True}


class Breaking(Env):
    """After 30 steps the reward is not finite (what 1), or the code indexes out of bounds (what 2)."""

    observation_space = Box(-100, 100, (2,))
    action_space = Discrete(2)
    max_steps = 100
    what: int = 0

    class State:
        now: int32
        seen: float32[3]

    def reset(self, state, rng):
        state.seen[0] = rng.random()

    def step(self, state, action, rng):
        state.now += 1
        place = state.now % 3
        if state.now == 30 and self.what == 2:
            place = state.now
        state.seen[place] = 1.0
        reward = float32(1.0)
        if state.now == 30 and self.what == 1:
            reward = float32(1e38) * float32(1e38)
        return reward, False

    def observe(self, state, obs):
        obs[0] = state.now


class Filling(Env):
    """Bits, all of them zero until step 30."""

    observation_space = Box(0, 1, (80,), np.uint8)
    action_space = Discrete(2)
    max_steps = 50

    class State:
        now: int32

    def reset(self, state, rng):
        state.now = rng.integers(0, 3)

    def step(self, state, action, rng):
        state.now += 1
        return float32(action), False

    def observe(self, state, obs):
        obs[state.now % 80] = 1
        if state.now >= 30:
            for k in range(80):
                obs[k] = 1


@pytest.fixture
def calls(monkeypatch):
    """Every second call is of three updates, whatever they take; returns the numbers of updates of the calls made."""
    made, run = [], NativeLoop.run

    turns = cycle([1, 3])

    def fitting(self, rollout):
        return next(turns)

    def counted(self, rollout, progresses):
        made.append(len(progresses))
        return run(self, rollout, progresses)

    monkeypatch.setattr(NativeLoop, "fitting", fitting)
    monkeypatch.setattr(NativeLoop, "run", counted)
    return made


def trained(tmp_path, env, together, **settings):
    """A run, its last checkpoint and its metrics; callbacks need every update to be single."""
    callbacks = () if together else (lambda trainer: None,)
    run = hurtle.train(env, runs=tmp_path / f"together-{together}", callbacks=callbacks, **settings)
    newest = max((run.path / "checkpoints").glob("step-*.pt"))
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return run, load_checkpoint(newest), lines


def equal(one, other):
    """Whether nested states are equal, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return np.array_equal(np.asarray(one), np.asarray(other), equal_nan=np.asarray(one).dtype.kind == "f")
    return one == other or (one != one and other != other)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("cartpole", {**PPO, **ANNEALED, "env_parameters": SHORT_CARTPOLE}),
        ("pendulum", {**PPO, "env_parameters": SHORT_PENDULUM}),
        (Walk, PPO),
        ("breakout", {**PPO, "policy": "grid_cnn"}),
        ("cartpole", {**A2C, "anneal_learning_rate": True}),
    ],
    ids=["ppo, annealed", "gaussian", "metrics of the env", "lists", "a2c"],
)
@pytest.mark.usefixtures("all_threads")
def test_many_updates_equal_single_ones(env, settings, threads, calls, tmp_path):
    steps = 22 * settings["num_envs"] * settings["num_steps"]
    settings = {**settings, "num_workers": threads, "total_steps": steps, "eval_every": steps // 2}
    one, saved, lines = trained(tmp_path, env, True, **settings)
    assert sum(calls) > 12
    assert 2 in calls  # shortened by the evaluation or the end
    calls.clear()
    other, expected, rows = trained(tmp_path, env, False, **settings)
    assert not calls
    assert (one.steps, one.evaluation.mean) == (other.steps, other.evaluation.mean)
    for part in ("policy", "learner", "collector"):
        assert equal(saved[part], expected[part]), part
    assert equal(saved["progress"] | {"seconds": 0}, expected["progress"] | {"seconds": 0})
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        timed = {name for name in line if name.startswith(("time/", "threads/"))} | {"seconds", "steps_per_second"}
        assert line.keys() == row.keys()
        for name in line.keys() - timed:
            assert line[name] == row[name], name
    assert all(a["seconds"] < b["seconds"] for a, b in pairwise(lines) if "eval_return" not in {*a, *b})


@pytest.mark.parametrize(
    ("what", "kind", "words"), [(1, NonFiniteError, "reward of env 0 at its step 30"), (2, EnvIndexError, "30")]
)
@pytest.mark.usefixtures("all_threads")
def test_an_error_of_an_env_ends_the_run_as_it_would_in_single_updates(what, kind, words, calls, tmp_path):
    seen = []
    for together in (True, False):
        with pytest.raises(kind, match=words) as caught:
            trained(tmp_path, Breaking, together, total_steps=10_000, env_parameters={"what": what}, num_workers=2, **PPO)
        (run,) = (tmp_path / f"together-{together}").iterdir()
        (saved,) = [load_checkpoint(file) for file in (run / "checkpoints").glob("step-*.pt")]
        seen.append((str(caught.value).split(" Last")[0].split("\nLast")[0], saved))
    assert calls
    (message, saved), (expected_message, expected) = seen
    assert message == expected_message
    assert (saved["progress"]["steps"], saved["progress"]["updates"]) == (480, 2)
    assert equal(saved["progress"] | {"seconds": 0}, expected["progress"] | {"seconds": 0})
    for part in ("policy", "learner", "collector"):
        assert equal(saved[part], expected[part]), part


def test_a_gradient_that_is_not_finite_ends_the_run(calls, tmp_path):
    messages = []
    for together in (True, False):
        with pytest.raises(NonFiniteError, match="not finite") as caught:
            trained(tmp_path, "pendulum", together, total_steps=10_000, learning_rate=1e12, max_grad_norm=1e30, **A2C)
        messages.append(str(caught.value).split(" Last")[0])
    assert calls
    assert messages[0] == messages[1]


def test_checkpoints_are_where_they_would_be(calls, tmp_path):
    run, _, _ = trained(tmp_path, "cartpole", True, total_steps=240 * 13, checkpoint_every=240 * 4, keep_checkpoints=9, **PPO)
    assert calls
    saved = sorted(int(file.stem.removeprefix("step-")) for file in (run.path / "checkpoints").glob("step-*.pt"))
    assert saved == [240 * k for k in (4, 8, 12, 13)]


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("cartpole", {"target_kl": 0.1}),
        ("cartpole", {"vtrace": True}),
        ("cartpole", {"normalize_observations": True}),
        ("cartpole", {"reward_mode": "sign"}),
        ("cartpole", {"recurrent": "lstm"}),
        ("CartPole-v1", {}),
        ("snake", {"env_parameters": SNAKES}),
        ("cartpole", {"gear": "general"}),
    ],
    ids=str,
)
def test_runs_that_need_python_between_rollout_and_update(env, settings):
    settings = make_settings(env, {**PPO, "num_envs": 4, "minibatch_size": 24, **settings})
    parts = assemble(settings, env)
    parts.close()
    assert parts.gear.loop is None


def test_how_many_updates_fit_into_a_call():
    parts = assemble(make_settings("cartpole", {**PPO, "num_workers": 1}), "cartpole")
    try:
        loop = parts.gear.loop
        assert loop.fitting(parts.rollout) == 1  # nothing is known yet
        parts.collector.load_weights(parts.learner.weights())
        for _ in range(3):
            parts.collector.collect(parts.rollout)
            parts.learner.update(parts.rollout)
        collecting, learning = parts.collector.tuner, parts.learner.native.tuner
        collecting.took(1.0, 0.001)  # 12 ms a rollout
        learning.took(480.0, 1e-5)
        assert loop.fitting(parts.rollout) == 8
        for expected in (4, 1):
            learning.took(480.0, 0.012 if expected == 4 else 10.0)
            assert loop.fitting(parts.rollout) == expected
        found = loop.run(parts.rollout, [0.0, 0.5])
        assert len(found.done) == 2
        assert all(seconds > 0 for seconds in found.seconds.values())
        assert sum(found.seconds.values()) < 10.0
    finally:
        parts.close()


def test_observations_that_become_too_dense_for_lists(calls, tmp_path):
    """Python learns from such a rollout, and from those that follow."""
    steps = 6 * PPO["num_envs"] * PPO["num_steps"]
    _, saved, _ = trained(tmp_path, Filling, True, total_steps=steps, **PPO)
    assert calls
    _, expected, _ = trained(tmp_path, Filling, False, total_steps=steps, **PPO)
    for part in ("policy", "learner", "collector"):
        assert equal(saved[part], expected[part]), part


def test_a_loop_waits_after_observations_that_were_too_dense():
    parts = assemble(make_settings(Filling, {**PPO, "num_workers": 1, "num_steps": 40, "minibatch_size": 200}), Filling)
    try:
        loop = parts.gear.loop
        assert len(loop.run(parts.rollout, [0.0, 0.5, 0.9]).done) == 1
        assert [loop.fitting(parts.rollout) for _ in range(64)] == [1] * 64
        parts.collector.tuner.took(1.0, 1e-5)
        parts.learner.native.tuner.took(1600.0, 1e-3)
        assert loop.fitting(parts.rollout) > 1
    finally:
        parts.close()


def test_runs_that_must_look_at_every_update(calls, tmp_path):
    hurtle.train("cartpole", total_steps=240 * 12, stop_at_return=1e9, runs=tmp_path, **PPO)
    assert not calls
