"""`RewardRule`: reward preprocessing: none, sign, or scaling by the standard deviation of discounted returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hurtle.buffers.rollout import Rollout
from hurtle.errors import UnknownNameError, did_you_mean
from hurtle.kernels.ranks import ALONE, Ranks
from hurtle.policies.normalizers import RewardNormalizer, merge_moments

MODES = ("raw", "sign", "normalize")


class RewardRule:
    """Applied to a complete rollout; episode returns always show the env's own rewards.

    Args:
        mode: "raw", "sign" (−1, 0 or 1) or "normalize" (divided by the standard deviation of discounted returns).
        num_rows: Envs times agents.
        gamma: Discount of those returns.
        clip: Bound of normalized rewards.
        ranks: The learners whose statistics are merged.
    """

    def __init__(self, mode: str = "raw", num_rows: int = 1, gamma: float = 0.99, clip: float = 10.0, ranks: Ranks = ALONE):
        if mode not in MODES:
            raise UnknownNameError(f"reward_mode is one of {', '.join(MODES)}, got {mode!r}. {did_you_mean(mode, MODES)}")
        self.mode, self.ranks = mode, ranks
        self.normalizer = RewardNormalizer(num_rows, gamma, clip) if mode == "normalize" else None

    @classmethod
    def together(cls, rules: Sequence[RewardRule]) -> RewardRule:
        """The rules of several seeds, equal but for their statistics, as one: each has an equal share of the rows."""
        made = cls(rules[0].mode)
        normalizers = [rule.normalizer for rule in rules if rule.normalizer is not None]
        made.normalizer = RewardNormalizer.together(normalizers) if normalizers else None
        return made

    def apply(self, rollout: Rollout) -> None:
        """Fill `scaled_rewards`; the env's own `rewards` stay."""
        if self.mode == "raw":
            return
        scaled = _scaled(rollout)
        if self.normalizer is None:
            torch.sign(rollout.rewards, out=scaled)
        else:
            ended = rollout.terminated | rollout.truncated
            scaled.copy_(self.normalizer.scale(rollout.rewards, ended, rollout.valid, rollout.columns, self.ranks))

    def to(self, device: torch.device) -> RewardRule:
        """Move the statistics to a device, for `apply_on_device`."""
        if self.normalizer is not None:
            self.normalizer.to(device)
        return self

    def apply_on_device(self, rollout: Rollout, kernels: Callable[..., None], good: Tensor) -> None:
        """Like `apply`, without synchronizing with the host.

        Args:
            rollout: Just collected.
            kernels: Runs the functions of kernels/device_rows.py on the device.
            good: Whether the statistics may learn from it, bool []; for the rules of several, one for each.
        """
        if self.mode == "raw":
            return
        scaled = _scaled(rollout)
        if self.normalizer is None:
            torch.sign(rollout.rewards, out=scaled)
            return
        normalizer, returns = self.normalizer, torch.empty_like(rollout.rewards, dtype=torch.float64)
        ended = rollout.terminated | rollout.truncated
        fields = (rollout.rewards, ended, rollout.valid, normalizer.gamma, normalizer.returns, returns)
        before = normalizer.returns.clone()
        kernels("return_rows", rollout.num_rows, *fields)
        kept = good if good.ndim == 0 else good.unsqueeze(1).expand(-1, len(before) // len(good)).reshape(-1)
        normalizer.returns.copy_(torch.where(kept, normalizer.returns, before))
        scaled.copy_((rollout.rewards.double() / normalizer.std).clamp(-normalizer.clip, normalizer.clip))
        merge_moments(normalizer, returns, None if rollout.all_valid else rollout.valid, good, self.ranks)

    def state_dict(self) -> dict[str, Any]:
        """The normalizer's statistics."""
        return {} if self.normalizer is None else dict(self.normalizer.state_dict())

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with saved statistics; if the number of rows differs, running returns start at 0."""
        if self.normalizer is not None and saved:
            own = self.normalizer.returns
            returns = saved["returns"] if saved["returns"].shape == own.shape else torch.zeros_like(own)
            self.normalizer.load_state_dict({**saved, "returns": returns})


def _scaled(rollout: Rollout) -> Tensor:
    """Memory for the rewards used in training, separate from the env's."""
    if rollout.scaled_rewards is rollout.rewards:
        rollout.scaled_rewards = torch.zeros_like(rollout.rewards)
    return rollout.scaled_rewards
