"""Several agents per env: rows that come and go, in rollouts of both collectors."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from sample_envs import SNAKES
from scripted_envs import collector_of, sharp_policy

import hurtle
from hurtle.algorithms.ppo import PPO, evaluate_actions
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.native import Box, Discrete, Env, float32, int32

SAME, NEXT = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP


class Lights(Env):
    """Two agents; agent 1 leaves at step 2 (its episode ends) and returns at step 4; the env is over at step 7."""

    num_agents = 2
    action_space = Discrete(3)
    observation_space = Box(-100, 100, (2,), float32)

    class State:
        now: int32

    def reset(self, state, rng):
        state.now = 0

    def step(self, state, action, reward, terminated, rng):
        state.now += 1
        for a in range(2):
            reward[a] = float32(state.now) + float32(10 * a) + float32(0.1) * float32(action[a])
        if state.now == 2:
            terminated[1] = True
        return state.now == 7

    def present(self, state, present):
        present[0] = True
        present[1] = state.now < 2 or state.now >= 4

    def observe(self, state, obs):
        for a in range(2):
            obs[a, 0] = state.now
            obs[a, 1] = a


class Restless(Env):
    """Two agents; agent 1's episode ends with every second step, and the next begins at once. The env is over after 6 steps."""

    num_agents = 2
    action_space = Discrete(2)
    observation_space = Box(-100, 100, (2,), float32)

    class State:
        now: int32

    def reset(self, state, rng):
        state.now = 0

    def step(self, state, action, reward, terminated, rng):
        state.now += 1
        reward[0] = reward[1] = float32(state.now)
        terminated[1] = state.now % 2 == 0
        return state.now == 6

    def observe(self, state, obs):
        for a in range(2):
            obs[a, 0] = state.now
            obs[a, 1] = a


def policy_for(vec, recurrent="none"):
    return sharp_policy(vec.agent_observation_space, vec.agent_action_space, recurrent)


def column(rollout, name, row):
    return getattr(rollout, name)[:, row].tolist()


@pytest.mark.parametrize("pool", [False, True])
def test_a_native_agent_goes_and_comes_back(pool):
    vec = hurtle.make_vec(Lights, 2, batch_size=1 if pool else None, debug=True)  # as when compiled, which takes seconds
    policy = policy_for(vec, "gru")
    collector, rollout = collector_of(vec, policy, 14)
    stats = collector.collect(rollout)
    for env in range(2):
        steady, coming = 2 * env, 2 * env + 1
        T, F = True, False
        assert column(rollout, "valid", steady) == [T] * 14
        assert column(rollout, "starts", steady) == [T, F, F, F, F, F, F] * 2
        assert column(rollout, "terminated", steady) == [F, F, F, F, F, F, T] * 2
        assert column(rollout, "valid", coming) == [T, T, F, F, T, T, T] * 2
        assert [column(rollout, "starts", coming)[t] for t in (0, 1, 4, 5, 6, 7, 8, 11, 12, 13)] == [
            T,
            F,
            T,
            F,
            F,
            T,
            F,
            T,
            F,
            F,
        ]
        assert column(rollout, "terminated", coming) == [F, T, F, F, F, F, T] * 2
        assert [row[0] for row in column(rollout, "obs", steady)] == [0, 1, 2, 3, 4, 5, 6] * 2
        expected = np.array([1, 2, 3, 4, 5, 6, 7] * 2) + 0.1 * rollout.actions[:, steady].numpy()
        np.testing.assert_allclose(rollout.rewards[:, steady], expected, rtol=1e-6)
        expected = np.array([11, 12, 0, 0, 15, 16, 17] * 2) + 0.1 * (rollout.actions * rollout.valid)[:, coming].numpy()
        np.testing.assert_allclose(rollout.rewards[:, coming], expected, rtol=1e-6)
    assert not rollout.all_valid
    assert rollout.num_valid == 2 * (14 + 10)
    assert sorted(stats.lengths.tolist()) == [2] * 4 + [3] * 4 + [7] * 4
    log_probs, _, _ = evaluate_actions(policy, batch := rollout.segments(torch.arange(4)))
    torch.testing.assert_close(log_probs, batch.log_probs, rtol=0, atol=1e-5)
    collector.close()


@pytest.mark.parametrize("mode", [SAME, NEXT])
def test_an_agent_whose_next_episode_begins_at_once(mode):
    """With NEXT_STEP, only the end of the env for all agents makes the next step a reset."""
    vec = hurtle.make_vec(Restless, 1, autoreset_mode=mode, debug=True)  # as when compiled, which takes seconds
    collector, rollout = collector_of(vec, policy_for(vec), 14)
    collector.collect(rollout)
    T, F = True, False
    if mode is SAME:
        assert column(rollout, "valid", 1) == [T] * 14
        assert column(rollout, "starts", 1) == [T, F] * 7
        assert column(rollout, "starts", 0) == [T, F, F, F, F, F] * 2 + [T, F]
    else:
        assert column(rollout, "valid", 1) == [T, T, T, T, T, T, F] * 2
        assert column(rollout, "valid", 0) == [T, T, T, T, T, T, F] * 2
        assert [s for s, v in zip(column(rollout, "starts", 1), column(rollout, "valid", 1), strict=True) if v] == [T, F] * 6
        assert column(rollout, "starts", 0) == [T, F, F, F, F, F, F] * 2
    collector.close()


@pytest.mark.parametrize("mode", [SAME, NEXT])
def test_snakes(mode):
    """A snake's steps are valid while it is present; its next life starts with its first step, without memory."""
    vec = hurtle.make_vec("snake", 2, autoreset_mode=mode, **SNAKES)
    policy = policy_for(vec, "gru")
    collector, rollout = collector_of(vec, policy, 40)
    for _ in range(2):
        collector.collect(rollout)
        valid, starts = rollout.valid.numpy(), rollout.starts.numpy()
        ended = (rollout.terminated | rollout.truncated).numpy()
        assert 0.3 < valid.mean() < 1.0
        assert not (ended & ~valid).any()
        assert (rollout.rewards.numpy()[~valid] == 0).all()
        for n in range(6):
            present = np.flatnonzero(valid[:, n])
            for before, now in pairwise(present):
                assert starts[now, n] == ended[before, n], (before, now, n)
        log_probs, _, _ = evaluate_actions(policy, batch := rollout.segments(torch.arange(6)))
        torch.testing.assert_close(log_probs, batch.log_probs, rtol=0, atol=1e-5)
        PPO(policy, PPOConfig(minibatch_size=40 * 3, num_epochs=1, learning_rate=0.0)).update(rollout)
    collector.close()


pytest.importorskip("pettingzoo", reason='needs "hurtle[pettingzoo]"')

from emulation_envs import Crowd  # noqa: E402

# a_1 dies at time 3 and a_2 is cut off at time 2 while the env continues; a_2 returns at 4, and the env is over at 6.
SCRIPT = [["a_1", "a_2"], ["a_1", "a_2"], ["a_1"], ["a_3"], ["a_2", "a_3"], ["a_2", "a_3"]]
ENDS = {(2, "a_2"): "truncated", (6, "a_3"): "truncated"}


@pytest.mark.parametrize("mode", [SAME, NEXT])
@pytest.mark.parametrize("pool", [False, True])
def test_a_crowd(pool, mode):
    more = {"batch_size": 1} if pool else {}
    vec = hurtle.make_vec(partial(Crowd, SCRIPT, ENDS), 2, backend="serial", autoreset_mode=mode, **more)
    assert vec.num_agents == 3
    policy = policy_for(vec)
    collector, rollout = collector_of(vec, policy, 14)
    stats = collector.collect(rollout)
    T, F = True, False
    gap = [F] if mode is NEXT else []  # the step that is the reset
    length = 6 + len(gap)
    for env in range(2):
        a1, a2, a3 = range(3 * env, 3 * env + 3)
        expected = {
            a1: ([T, T, T, F, F, F], [F, F, T, F, F, F], [F] * 6, [0]),
            a2: ([T, T, F, F, T, T], [F, F, F, F, F, T], [F, T, F, F, F, F], [0, 4]),
            a3: ([F, F, F, T, T, T], [F] * 6, [F, F, F, F, F, T], [3]),
        }
        for row, (valid, terminated, truncated, begins) in expected.items():
            assert column(rollout, "valid", row) == ((valid + gap) * 3)[:14], row
            assert column(rollout, "terminated", row) == ((terminated + gap) * 3)[:14], row
            assert column(rollout, "truncated", row) == ((truncated + gap) * 3)[:14], row
            for t in np.flatnonzero(rollout.valid[:, row]):
                assert bool(rollout.starts[t, row]) == (t % length in begins), (t, row)
        with torch.no_grad():
            for row, when, number in ((a2, 1, 2), (a3, 5, 3)):  # the last observations of the two that were cut off
                final = policy.value(torch.tensor([[float(when + 1), float(number)]]))
                torch.testing.assert_close(rollout.final_values[when, row], final[0], rtol=0, atol=1e-5)
        cut = rollout.truncated & ~rollout.terminated
        assert bool((rollout.final_values[~cut] == 0).all())
    in_third = 1 if mode is SAME else 0  # the third episode's first end is in step 13
    assert len(stats.returns) == 2 * (4 * 2 + in_third)
    collector.close()


@pytest.mark.parametrize("pool", [False, True])
def test_an_agent_that_vanished_for_good_does_not_bootstrap_from_the_next_episode(pool):
    """a_2 leaves without a flag and does not return before the env is over: its last step was its episode's end."""
    script = [["a_1", "a_2"], ["a_1", "a_2"], ["a_1"], ["a_1"]]
    more = {"batch_size": 1} if pool else {}
    vec = hurtle.make_vec(partial(Crowd, script, {(2, "a_2"): None}), 2, backend="serial", **more)
    collector, rollout = collector_of(vec, policy_for(vec), 8)
    collector.collect(rollout)
    T, F = True, False
    for row in (1, 3):
        assert column(rollout, "valid", row) == [T, T, F, F] * 2
        assert column(rollout, "terminated", row) == [F, T, F, F] * 2
        assert [column(rollout, "starts", row)[t] for t in (0, 1, 4, 5)] == [T, F, T, F]
    collector.close()


def test_an_agent_that_is_away_for_a_while_goes_on():
    """a_2 leaves without a flag and returns: one episode, whose steps are joined."""
    script = [["a_1", "a_2"], ["a_1"], ["a_1", "a_2"], ["a_1", "a_2"]]
    vec = hurtle.make_vec(partial(Crowd, script, {(1, "a_2"): None}), 1, backend="serial")
    collector, rollout = collector_of(vec, policy_for(vec), 8)
    collector.collect(rollout)
    T, F = True, False
    assert column(rollout, "valid", 1) == [T, F, T, T] * 2
    assert column(rollout, "terminated", 1) == [F, F, F, T] * 2
    assert [column(rollout, "starts", 1)[t] for t in (0, 2, 3, 4, 6)] == [T, F, F, T, F]
    collector.close()


@pytest.mark.parametrize("pool", [False, True])
def test_a_lone_agent_has_an_axis_too(pool):
    more = {"batch_size": 1} if pool else {}
    vec = hurtle.make_vec(partial(Crowd, [["a_1"]] * 3), 2, backend="serial", **more)
    policy = policy_for(vec)
    collector, rollout = collector_of(vec, policy, 6)
    stats = collector.collect(rollout)
    for row in range(2):
        assert [obs[0] for obs in column(rollout, "obs", row)] == [0, 1, 2] * 2
        assert column(rollout, "terminated", row) == [False, False, True] * 2
    assert stats.lengths.tolist() == [3] * 4
    collector.close()
