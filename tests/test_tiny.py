"""The contract of the whole system in one minute: write an env, run it on every target, vectorize it."""

import subprocess
import sys

import numpy as np
import pytest

import hurtle
from hurtle.native import Box, Discrete, Env, float32, int32


class Walk(Env):
    """Walk to the right end of a line in the fog."""

    observation_space = Box(-1.0, 1.0, (2,))
    action_space = Discrete(2)
    max_steps = 30
    length: int = 5
    metrics = ("distance",)

    class State:
        x: int32
        distance: float32
        fog: float32 = 0.1

    def reset(self, state, rng):
        state.x = rng.integers(self.length)

    def step(self, state, action, rng):
        state.x = max(0, state.x + 2 * action - 1)
        state.distance += 1.0
        arrived = state.x >= self.length
        return 1.0 if arrived else -0.01, arrived

    def observe(self, state, obs):
        obs[0] = float(state.x) / float(self.length)
        obs[1] = state.fog


def trajectory(num_envs, steps=100, **settings):
    vec = hurtle.make_vec(Walk, num_envs, **settings)
    actions = np.random.default_rng(0).integers(0, 2, (steps, 8))[:, :num_envs]
    seen = [vec.reset(seed=7)[0].copy()]
    for row in actions:
        obs, reward, terminated, truncated, _ = vec.step(row)
        seen.append(np.concatenate([obs, reward[:, None], terminated[:, None], truncated[:, None]], axis=1))
    vec.close()
    return seen


def test_all_ways_to_run_an_env_give_the_same_trajectory():
    expected = trajectory(8)
    for settings in ({"debug": True}, {"num_workers": 2}, {"num_workers": 1}):
        for a, b in zip(expected, trajectory(8, **settings), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str(settings))
    for a, b in zip(expected, trajectory(3), strict=True):  # env i is the same env i
        np.testing.assert_array_equal(a[:3], b)


def test_env_i_of_a_vector_is_a_single_env_with_seed_plus_i():
    vec = hurtle.make_vec(Walk, 4)
    first, _ = vec.reset(seed=11)
    for i in range(4):
        obs, _ = hurtle.make(Walk).reset(seed=11 + i)
        np.testing.assert_array_equal(obs, first[i])


def test_episode_statistics_metrics_and_final_observation():
    vec = hurtle.make_vec(Walk, 2, length=3)
    vec.reset(seed=0)
    start = vec.states["x"].copy()
    ended = set()
    for t in range(1, 4):
        obs, _, terminated, truncated, infos = vec.step(np.ones(2, np.int64))
        for i in set(np.flatnonzero(terminated).tolist()) - ended:
            ended.add(i)
            assert t == 3 - start[i]
            assert infos["episode"]["l"][i] == t == infos["episode"]["distance"][i]
            assert infos["episode"]["r"][i] == pytest.approx(1.0 - 0.01 * (t - 1))
            assert infos["final_obs"][i, 0] == 1.0
            assert obs[i, 0] < 1.0  # already the next episode
    assert ended == {0, 1}
    assert not truncated.any()


def test_truncation_is_not_termination():
    env = hurtle.make(Walk, max_steps=4)
    env.reset(seed=0)
    for _ in range(4):
        *_, terminated, truncated, info = env.step(0)
    assert truncated
    assert not terminated
    assert info["episode"]["l"] == 4


def test_options_set_runtime_parameters():
    vec = hurtle.make_vec(Walk, 2)
    obs, _ = vec.reset(seed=0, options={"fog": [0.5, 0.6]})
    np.testing.assert_allclose(obs[:, 1], [0.5, 0.6])
    obs, _ = vec.reset(options={"fog": 0.7, "reset_mask": np.array([True, False])})
    np.testing.assert_allclose(obs[:, 1], [0.7, 0.6])


def test_import_is_light():
    code = "import hurtle, sys; hurtle.make; hurtle.make_vec; print([m for m in ('torch', 'tyro', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_check_finds_nothing_to_say():
    report = hurtle.native.check(Walk, num_steps=60)
    assert len(report.passed) >= 5
    assert report.warnings == []
