"""`ReturnScale`: what to divide rewards by, so that returns fit a fixed range of values, as distributional critics need.

rollout → running discounted returns of each row → their standard deviation and the largest one → scale. Knows no learner.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hurtle.collect.rewards import RewardRule
from hurtle.kernels.returns import running_returns
from hurtle.kernels.row_kernels import RowKernels
from hurtle.policies.normalizers import RewardNormalizer, merge_moments


class ReturnScale:
    """The larger of the returns' standard deviation and of the largest return, in magnitude, over `bound`.

    Returns are discounted and add up from the start of an episode. Rewards stay as they are: scale those that
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
        >>> scale = ReturnScale(num_rows=1, gamma=0.5, bound=1.0)
        >>> rewards, no = torch.full((2, 1), 10.0), torch.zeros(2, 1, dtype=torch.bool)
        >>> scale.update(rewards, ended=no, valid=~no)
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
    def update(self, rewards: Tensor, ended: Tensor, valid: Tensor, rows: np.ndarray | None = None) -> None:
        """Merge the returns of a rollout. Does not synchronize.

        Args:
            rewards: [T, N]
            ended: bool [T, N]; the return restarts after such a step.
            valid: bool [T, N]; other steps are ignored.
            rows: The row of each column, int [N]; None: column n is row n.
        """
        moments, count = self._moments, rewards.shape[1]
        rewards, ended, valid = (part.contiguous() for part in (rewards, ended, valid))
        if rows is None and len(moments.returns) != count:
            moments.returns = moments.returns.new_zeros(count)
        after = torch.empty_like(rewards, dtype=torch.float64)
        if self.device.type == "cuda":
            self._kernels("return_rows", count, rewards, ended, valid, moments.gamma, moments.returns, after)
        else:
            given = (rewards.numpy(), ended.numpy(), valid.numpy(), rows)
            running_returns(*given, moments.gamma, moments.returns.numpy(), after.numpy())
        known = valid & after.isfinite()
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
