"""Checks a rollout by stepping one env at a time with the actions recorded in it."""

import numpy as np
import pytest
import torch
from scripted_envs import assert_finals_of_truncations, finals_of


class Replay:
    """One env, followed across rollouts.

    Args:
        env: A fresh env.
        seed: Its first seed.
        policy: The policy that acted.
        next_step: Whether the vector resets in the step after an end.
    """

    def __init__(self, env, seed, policy, next_step=False):
        self.env, self.policy, self.next_step = env, policy, next_step
        self.obs, self.info = env.reset(seed=seed)
        self.start, self.resetting = True, False
        self.state = policy.initial_state(1)
        self.returns, self.length = 0.0, 0
        self.episodes = []  # (return, length) of ended episodes

    def see(self, obs):
        raw = torch.from_numpy(np.asarray(obs))[None]
        return raw.float() if self.policy.normalizer is None else self.policy.normalizer.normalize(raw)

    @torch.no_grad()
    def value(self, obs, state, start):
        return float(self.policy.value(self.see(obs), state, torch.tensor([start])))

    @torch.no_grad()
    def check(self, rollout, n):
        """Check column n of a rollout, field by field."""
        for part, memory in zip(rollout.initial_state, self.state, strict=True):
            torch.testing.assert_close(part[n], memory[0], rtol=0, atol=1e-5)
        for t in range(rollout.num_steps):
            self.check_step(rollout, t, n)
        np.testing.assert_allclose(rollout.last_obs[n], self.obs, rtol=1e-6)
        assert bool(rollout.last_starts[n]) == self.start
        for part, memory in zip(rollout.last_state, self.state, strict=True):
            torch.testing.assert_close(part[n], memory[0], rtol=0, atol=1e-5)
        assert_finals_of_truncations(rollout)
        assert float(rollout.last_values[n]) == close(self.value(self.obs, self.state, self.start))

    @torch.no_grad()
    def check_step(self, rollout, t, n):
        at = f"step {t} of row {n}"
        np.testing.assert_allclose(rollout.obs[t, n], self.obs, rtol=1e-6, err_msg=at)
        np.testing.assert_allclose(rollout.inputs[t, n], self.see(self.obs)[0], rtol=1e-6, atol=1e-7, err_msg=at)
        assert bool(rollout.starts[t, n]) == self.start, at
        assert bool(rollout.valid[t, n]) == (not self.resetting), at
        mask = self.info.get("action_mask")
        if mask is not None:
            assert rollout.masks[t, n].tolist() == mask.astype(bool).tolist(), at
        distribution, value, self.state = self.policy(
            self.see(self.obs),
            self.state,
            None if mask is None else torch.tensor(mask).bool()[None],
            torch.tensor([self.start]),
        )
        action = rollout.actions[t, n]
        assert float(rollout.values[t, n]) == close(float(value)), at
        assert float(rollout.log_probs[t, n]) == close(float(distribution.log_prob(action[None]))), at
        if self.resetting:
            self.obs, self.info = self.env.reset()
            reward, terminated, truncated, over = 0.0, False, False, False
        else:
            taken = self.policy.head.env_actions(action[None].numpy())[0]
            self.obs, reward, terminated, truncated, self.info = self.env.step(taken)
            over = terminated or truncated
            self.returns, self.length = self.returns + reward, self.length + 1
        assert float(rollout.rewards[t, n]) == close(float(reward)), at
        assert bool(rollout.terminated[t, n]) == terminated, at
        assert bool(rollout.truncated[t, n]) == truncated, at
        cut_off = truncated and not terminated
        assert float(rollout.final_values[t, n]) == close(self.value(self.obs, self.state, False) if cut_off else 0.0), at
        if cut_off:
            np.testing.assert_allclose(finals_of(rollout)[t, n], self.obs, rtol=1e-6, err_msg=at)
        if over:
            self.episodes.append((self.returns, self.length))
            self.returns, self.length = 0.0, 0
        if self.next_step:
            self.start, self.resetting = self.resetting, over
        else:
            self.start = over
            if over:
                self.obs, self.info = self.env.reset()


def close(value):
    """Equal up to float32 arithmetic in a different order."""
    return pytest.approx(value, rel=1e-5, abs=1e-5)


def check_statistics(stats, replays):
    """The reported episodes are exactly those that ended, in any order."""
    found = sorted(
        (length, round(float(value), 3)) for stat in stats for value, length in zip(stat.returns, stat.lengths, strict=True)
    )
    expected = sorted((length, round(float(value), 3)) for replay in replays for value, length in replay.episodes)
    assert len(found) == len(expected)
    np.testing.assert_allclose(found, expected, atol=2e-3)
