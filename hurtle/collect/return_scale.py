"""`ReturnScale`: what to divide rewards by, so that returns fit a fixed range of values, as distributional critics need.

rollout → running discounted returns of each row → their standard deviation and the largest one → scale. Knows no learner.
"""

from __future__ import annotations

from typing import Any

import torch

from hurtle.buffers.rollout import Rollout
from hurtle.collect.rewards import RewardRule
from hurtle.kernels.returns import running_returns
from hurtle.kernels.row_kernels import RowKernels
from hurtle.policies.normalizers import RewardNormalizer, merge_moments


class ReturnScale:
    """The larger of the returns' standard deviation and of the largest return, in magnitude, over `bound`.

    Returns are discounted and add up from the start of an episode. The rollout's rewards stay as they are: scale those that
    are drawn from a replay buffer, since the scale changes.

    Args:
        num_rows: Envs times agents.
        gamma: Discount.
        bound: The largest value that a critic can express.
        device: Of the rollouts.

    Attributes:
        value: The scale, on the device; 1 at first. float32 []
        largest: The largest magnitude of a return so far. float64 []

    Example:
        >>> from gymnasium import spaces
        >>> from hurtle.policies.build import PolicyConfig, build_policy
        >>> policy = build_policy(PolicyConfig(), spaces.Box(-1, 1, (4,)), spaces.Discrete(2))
        >>> rollout = Rollout(policy, num_steps=2, num_rows=1)
        >>> rollout.rewards.fill_(10.0)
        tensor([[10.],
                [10.]])
        >>> scale = ReturnScale(num_rows=1, gamma=0.5, bound=1.0)
        >>> scale.update(rollout)
        >>> float(scale.value)
        15.0
    """

    def __init__(self, num_rows: int, gamma: float, bound: float, device: torch.device | str = "cpu"):
        self.bound, self.device = bound, torch.device(device)
        self._rule = RewardRule("normalize", num_rows, gamma).to(self.device)
        self.value = torch.ones((), device=self.device)
        self.largest = torch.zeros((), dtype=torch.float64, device=self.device)
        self._kernels = RowKernels(self.device)

    @property
    def _moments(self) -> RewardNormalizer:
        assert self._rule.normalizer is not None
        return self._rule.normalizer

    @torch.no_grad()
    def update(self, rollout: Rollout) -> None:
        """Merge the returns of a rollout. Does not synchronize."""
        moments, rewards = self._moments, rollout.rewards
        if rollout.columns is None and len(moments.returns) != rollout.num_rows:
            moments.returns = moments.returns.new_zeros(rollout.num_rows)
        ended, after = rollout.terminated | rollout.truncated, torch.empty_like(rewards, dtype=torch.float64)
        if self.device.type == "cuda":
            fields = (rewards, ended, rollout.valid, moments.gamma, moments.returns, after)
            self._kernels("return_rows", rollout.num_rows, *fields)
        else:
            given = (rewards.numpy(), ended.numpy(), rollout.valid.numpy(), rollout.columns)
            running_returns(*given, moments.gamma, moments.returns.numpy(), after.numpy())
        known = rollout.valid & after.isfinite()
        merge_moments(moments, after, known)
        torch.maximum(self.largest, torch.where(known, after.abs(), 0.0).max(), out=self.largest)
        std = (moments.variance + moments.eps).sqrt()
        self.value.copy_(torch.maximum(std, self.largest / self.bound).squeeze())

    def state_dict(self) -> dict[str, Any]:
        """The statistics."""
        return {"moments": self._rule.state_dict(), "largest": self.largest, "value": self.value}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with saved statistics; if the number of rows differs, running returns start at 0."""
        self._rule.load_state_dict(saved["moments"])
        self.largest.copy_(saved["largest"])
        self.value.copy_(saved["value"])
