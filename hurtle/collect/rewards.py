"""`RewardRule`: what becomes of rewards before they are learned from: nothing, their sign, or division by the returns' std."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hurtle.buffers.rollout import Rollout
from hurtle.errors import UnknownNameError, did_you_mean
from hurtle.policies.normalizers import RewardNormalizer, merge_moments

MODES = ("raw", "sign", "normalize")


class RewardRule:
    """Applied to a whole rollout after it was collected; episode statistics always show the env's own rewards.

    Args:
        mode: "raw", "sign" (−1, 0 or 1) or "normalize" (divided by the standard deviation of discounted returns).
        num_rows: Envs times agents.
        gamma: Discount of those returns.
        clip: Bound of normalized rewards.
    """

    def __init__(self, mode: str = "raw", num_rows: int = 1, gamma: float = 0.99, clip: float = 10.0):
        if mode not in MODES:
            raise UnknownNameError(f"reward_mode is one of {', '.join(MODES)}, got {mode!r}. {did_you_mean(mode, MODES)}")
        self.mode = mode
        self.normalizer = RewardNormalizer(num_rows, gamma, clip) if mode == "normalize" else None

    def apply(self, rollout: Rollout, rows: np.ndarray | None = None) -> None:
        """Change the rollout's rewards in place.

        Args:
            rollout: Just collected.
            rows: Whose steps each column holds, int `[N]`, those of one row in their order; None: column n is row n's.
        """
        if self.mode == "sign":
            torch.sign(rollout.rewards, out=rollout.rewards)
        elif self.normalizer is not None:
            ended = rollout.terminated | rollout.truncated
            rollout.rewards.copy_(self.normalizer.scale(rollout.rewards, ended, rollout.valid, rows))

    def to(self, device: torch.device) -> RewardRule:
        """The same rule, its statistics on a device; for `apply_on_device`."""
        if self.normalizer is not None:
            self.normalizer.to(device)
        return self

    def apply_on_device(self, rollout: Rollout, kernels: Callable[..., None], good: Tensor) -> None:
        """`apply` without a word to the host.

        Args:
            rollout: Just collected.
            kernels: Runs functions of device_rows.py on the device.
            good: Whether the statistics may learn from it. []
        """
        if self.mode == "sign":
            rollout.rewards.sign_()
        elif self.normalizer is not None:
            normalizer, returns = self.normalizer, torch.empty_like(rollout.rewards, dtype=torch.float64)
            scale = (normalizer.variance + normalizer.eps).sqrt()
            ended = rollout.terminated | rollout.truncated
            fields = (rollout.rewards, ended, rollout.valid, normalizer.gamma, normalizer.returns, returns)
            before = normalizer.returns.clone()
            kernels("return_rows", rollout.num_rows, *fields)
            normalizer.returns.copy_(torch.where(good, normalizer.returns, before))
            rollout.rewards.copy_((rollout.rewards.double() / scale).clamp(-normalizer.clip, normalizer.clip))
            merge_moments(normalizer, returns, None if rollout.all_valid else rollout.valid, good)

    def state_dict(self) -> dict[str, Any]:
        """The normalizer's statistics."""
        return {} if self.normalizer is None else dict(self.normalizer.state_dict())

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with saved statistics; with another number of rows, their running returns begin anew."""
        if self.normalizer is not None and saved:
            own = self.normalizer.returns
            returns = saved["returns"] if saved["returns"].shape == own.shape else torch.zeros_like(own)
            self.normalizer.load_state_dict({**saved, "returns": returns})
