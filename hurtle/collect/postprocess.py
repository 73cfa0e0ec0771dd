"""`Postprocess`: the one stage between collecting and learning, the same for every runner and gear.

raw experience → V of what follows → scaled rewards → normalizer statistics → advantages. Every learner of rollouts calls it
first. A collector may do parts of it sooner, in compiled code or a CUDA graph, and says so in `rollout.done`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hurtle.buffers.rollout import Done, Rollout
from hurtle.collect.rewards import RewardRule
from hurtle.policies.normalizers import merge_moments
from hurtle.policies.numpy_acting import see
from hurtle.policies.policy import Policy


class Postprocess:
    """Adds to rollouts what learners need.

    Args:
        policy: Gives the values, and owns the observation normalizer, if any.
        gamma: Discount.
        gae_lambda: GAE's λ.
        rewards: Reward preprocessing; None leaves rewards as they are.
        autocast: The dtype of mixed-precision inference, or None.

    Example:
        >>> import hurtle
        >>> from hurtle.collect import NativeCollector
        >>> from hurtle.policies.policy_config import PolicyConfig
        >>> collector = NativeCollector(hurtle.make_vec("cartpole", num_envs=8), PolicyConfig())
        >>> rollout = collector.new_rollout(num_steps=32)
        >>> episodes = collector.collect(rollout)
        >>> Postprocess(collector.policy, gamma=0.99, gae_lambda=0.95)(rollout)
        >>> rollout.advantages.shape
        torch.Size([32, 8])
    """

    def __init__(
        self,
        policy: Policy,
        gamma: float,
        gae_lambda: float,
        rewards: RewardRule | None = None,
        autocast: torch.dtype | None = None,
    ):
        self.policy, self.gamma, self.gae_lambda = policy, gamma, gae_lambda
        self.rewards = rewards if rewards is not None else RewardRule()
        self._autocast = autocast

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> None:
        """Do whatever the collector has not done yet."""
        done, rollout.done = rollout.done, Done.NOTHING
        if Done.BOOTSTRAP not in done:
            self._bootstrap(rollout)
        if Done.REWARDS not in done:
            self.rewards.apply(rollout)
        if Done.STATISTICS not in done and self.policy.normalizer is not None:
            self.policy.normalizer.update(rollout.obs, rollout.valid, self.rewards.ranks)
        if Done.ADVANTAGES not in done:
            rollout.compute_advantages(self.gamma, self.gae_lambda)

    @torch.no_grad()
    def on_device(self, rollout: Rollout, kernels: Callable[..., None], good: Tensor) -> None:
        """Scale the rewards and update all statistics without synchronizing, for collectors that run inside a CUDA graph.

        Args:
            rollout: Just filled, with its values bootstrapped.
            kernels: A `RowKernels`.
            good: Whether the rollout is free of errors: statistics never learn from a bad one. bool [], or of each seed
        """
        self.rewards.apply_on_device(rollout, kernels, good)
        if self.policy.normalizer is not None:
            valid = None if rollout.all_valid else rollout.valid
            merge_moments(self.policy.normalizer, rollout.obs, valid, good, self.rewards.ranks)

    def _bootstrap(self, rollout: Rollout) -> None:
        """V of the observation after the last step, and of the last observations of truncated episodes."""
        rollout.last_values.copy_(self._values(rollout.last_obs, rollout.last_state, rollout.last_starts))
        rollout.final_values.zero_()
        steps, rows, obs, state = rollout.finals
        if len(steps):
            used = slice(None) if bool((steps >= 0).all()) else (steps >= 0).nonzero()[:, 0]
            values = self._values(obs[used], tuple(part[used] for part in state), None)
            rollout.final_values[steps[used], rows[used]] = values

    def _values(self, obs: Tensor, state: tuple[Tensor, ...], starts: Tensor | None) -> Tensor:
        with torch.autocast(obs.device.type, self._autocast, enabled=self._autocast is not None):
            return self.policy.value(see(self.policy, obs, obs.device), state, starts).float()

    def state_dict(self) -> dict[str, Any]:
        """The statistics of the rewards; those of the observations are saved with the policy."""
        return self.rewards.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with saved statistics."""
        self.rewards.load_state_dict(saved)
