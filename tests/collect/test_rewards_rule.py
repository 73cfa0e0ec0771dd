"""Scaled rewards and normalized observations: what learners and policies see of the env's outputs."""

import numpy as np
import pytest
import torch
from env_replay import Replay
from gymnasium.vector import AutoresetMode
from scripted_envs import Script, collector_of, sharp_policy

import hurtle
from hurtle.collect.rewards import RewardRule
from hurtle.errors import UnknownNameError

NUM_ENVS = 4


def collected(mode, autoreset=AutoresetMode.SAME_STEP, rollouts=3, steps=6, clip=10.0, gamma=0.9):
    """Rollouts with the rule, and the same ones without it."""
    found = []
    for rule in (mode, "raw"):
        vec = hurtle.make_vec(Script, NUM_ENVS, backend="serial", autoreset_mode=autoreset)
        policy = sharp_policy(vec.single_observation_space, vec.single_action_space)
        collector, rollout = collector_of(vec, policy, steps, rule, gamma=gamma, clip=clip)
        parts = []
        for _ in range(rollouts):
            stats = collector.collect(rollout)
            names = ("rewards", "scaled_rewards", "terminated", "truncated", "valid")
            parts.append({name: getattr(rollout, name).numpy().copy() for name in names})
            parts[-1]["stats"] = stats
        collector.close()
        found.append(parts)
    return found


def test_raw_rewards_are_the_envs():
    with_rule, without = collected("raw")
    for one, other in zip(with_rule, without, strict=True):
        np.testing.assert_array_equal(one["rewards"], other["rewards"])
        np.testing.assert_array_equal(one["scaled_rewards"], one["rewards"])


def test_signs():
    rule = RewardRule("sign")
    rewards, never = np.array([[-3.0, 0.0, 0.5]], np.float32), np.zeros((1, 3), bool)
    rollout = FakeRollout(rewards, never, ~never)
    rule.apply(rollout)
    assert rollout.scaled_rewards.tolist() == [[-1, 0, 1]]
    assert rollout.rewards.tolist() == rewards.tolist()


@pytest.mark.parametrize("autoreset", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
@pytest.mark.parametrize("clip", [10.0, 0.3])
def test_rewards_over_the_std_of_returns(autoreset, clip):
    """By the statistics of all rollouts before this one; running returns continue from rollout to rollout."""
    with_rule, without = collected("normalize", autoreset, clip=clip)
    running, returns = np.zeros(NUM_ENVS), []
    for scaled, raw in zip(with_rule, without, strict=True):
        std = np.sqrt(np.var(returns) + 1e-8) if returns else 1.0
        expected = np.clip(raw["rewards"] / std, -clip, clip)
        np.testing.assert_allclose(scaled["scaled_rewards"], expected, rtol=1e-5)
        np.testing.assert_array_equal(scaled["rewards"], raw["rewards"])
        for t in range(len(expected)):
            for n in range(NUM_ENVS):
                if raw["valid"][t, n]:
                    running[n] = 0.9 * running[n] + raw["rewards"][t, n]
                    returns.append(running[n])
                    if raw["terminated"][t, n] or raw["truncated"][t, n]:
                        running[n] = 0.0
        np.testing.assert_array_equal(scaled["stats"].returns, raw["stats"].returns)  # the env's own returns
    assert without[-1]["valid"].all() == (autoreset is AutoresetMode.SAME_STEP)


class FakeRollout:
    """The fields that a rule reads."""

    def __init__(self, rewards, ended, valid, columns=None):
        self.rewards, self.terminated, self.valid = (torch.from_numpy(part.copy()) for part in (rewards, ended, valid))
        self.truncated, self.columns = torch.zeros_like(self.terminated), columns
        self.scaled_rewards = self.rewards


def test_segments_of_a_pool_give_what_their_rows_would():
    """Row 1 fills three segments of a rollout, row 2 none, and the next rollout continues from there."""
    rng = np.random.default_rng(0)
    steps, orders = 4, [[1, 0, 1, 1], [2, 1, 0, 2]]
    lives = {row: [rng.normal(size=20).astype(np.float32), rng.random(20) < 0.3, rng.random(20) < 0.8] for row in range(3)}
    at = dict.fromkeys(lives, 0)
    pool, returns, running = RewardRule("normalize", 3, gamma=0.9), [], np.zeros(3)
    for rows in orders:
        columns = []
        for row in rows:
            columns.append([part[at[row] : at[row] + steps] for part in lives[row]])
            at[row] += steps
        rewards, ended, valid = (np.stack(part, 1) for part in zip(*columns, strict=True))
        rollout = FakeRollout(rewards, ended, valid, np.array(rows))
        std = np.sqrt(np.var(returns) + 1e-8) if returns else 1.0
        pool.apply(rollout)
        np.testing.assert_allclose(rollout.scaled_rewards, np.clip(rewards / std, -10, 10), rtol=1e-5)
        for (segment, ends, real), row in zip(columns, rows, strict=True):  # in order, so that each row's segments are too
            for reward, end, counts in zip(segment, ends, real, strict=True):
                if counts:
                    running[row] = 0.9 * running[row] + reward
                    returns.append(running[row])
                    running[row] = 0.0 if end else running[row]
        np.testing.assert_allclose(pool.normalizer.returns, running, rtol=1e-6)


def test_statistics_are_saved_and_fit_another_number_of_rows():
    rng = np.random.default_rng(0)
    never, always = np.zeros((5, 3), bool), np.ones((5, 3), bool)
    rule = RewardRule("normalize", 3, gamma=0.9)
    rule.apply(FakeRollout(rng.normal(size=(5, 3)).astype(np.float32), never, always))
    same, fewer = RewardRule("normalize", 3, gamma=0.9), RewardRule("normalize", 2, gamma=0.9)
    for other in (same, fewer):
        other.load_state_dict({name: value.clone() for name, value in rule.state_dict().items()})
        assert torch.equal(other.normalizer.m2, rule.normalizer.m2)
    assert torch.equal(same.normalizer.returns, rule.normalizer.returns)
    assert fewer.normalizer.returns.tolist() == [0, 0]


def test_unknown_modes():
    with pytest.raises(UnknownNameError, match="Did you mean normalize"):
        RewardRule("normalise")


# Observations.


@pytest.mark.parametrize("autoreset", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_observations_are_normalized_by_the_rollouts_before(autoreset):
    """Statistics are frozen in a rollout, and its valid observations, which are stored raw, are merged after it."""
    vec = hurtle.make_vec(Script, NUM_ENVS, backend="serial", autoreset_mode=autoreset)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space, "gru", normalize=True)
    collector, rollout = collector_of(vec, policy, 6, seed=1)
    next_step = autoreset is AutoresetMode.NEXT_STEP
    replays = [Replay(Script(), 1 + n, policy, next_step) for n in range(NUM_ENVS)]
    seen = []
    for _ in range(3):
        frozen = {name: buffer.clone() for name, buffer in policy.normalizer.state_dict().items()}
        collector.collect(rollout)
        after = {name: buffer.clone() for name, buffer in policy.normalizer.state_dict().items()}
        policy.normalizer.load_state_dict(frozen)  # the policy that acted
        for n, replay in enumerate(replays):
            for t in range(6):
                if not replay.resetting:
                    seen.append(np.array(replay.obs))
                replay.check_step(rollout, t, n)
            assert float(rollout.last_values[n]) == pytest.approx(
                replay.value(replay.obs, replay.state, replay.start), abs=1e-5
            )
        policy.normalizer.load_state_dict(after)
        assert float(policy.normalizer.count) == len(seen)
        np.testing.assert_allclose(policy.normalizer.mean, np.mean(seen, 0), atol=1e-12)
        np.testing.assert_allclose(policy.normalizer.variance, np.var(seen, 0), atol=1e-12)
    collector.close()
