"""Running statistics in float64: observations to mean 0 and variance 1, rewards to returns of variance 1.

A rollout is normalized with the statistics from before it; they are updated afterwards, in row order, so that every gear gives
the same numbers. They are saved with the policy or the run. Knows nothing of envs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hurtle.errors import HurtleError
from hurtle.kernels.moments import merge_columns
from hurtle.kernels.ranks import ALONE, Ranks
from hurtle.kernels.returns import running_returns, scaled_rewards


class _Moments(nn.Module):
    """Count, mean and sum of squared deviations of everything merged so far."""

    count: Tensor
    mean: Tensor
    m2: Tensor

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(shape, dtype=torch.float64))

    @property
    def variance(self) -> Tensor:
        """Population variance, float64; 1 before the first update."""
        count = _like(self.count, self.m2)
        return torch.where(count > 0, self.m2 / count.clamp_min(1.0), 1.0)

    def share(self, each: Sequence[_Moments]) -> None:
        """Hold the moments of several: an axis of them first, whose rows they use as their own from now on."""
        for name in ("count", "mean", "m2"):
            together = torch.stack([getattr(one, name) for one in each])
            setattr(self, name, together)
            for one, own in zip(each, together, strict=True):
                setattr(one, name, own)

    def _merge(self, columns: np.ndarray, valid: np.ndarray | None, ranks: Ranks) -> None:
        """Merge columns [T, N, D]; those of all ranks, one rank after the other."""
        if ranks.several:
            size = self.mean.numel()
            count, mean, m2 = merge_columns(0.0, np.zeros(size), np.zeros(size), columns, valid)
            _merge_ranks(self, ranks, torch.tensor([count], dtype=torch.float64), *map(torch.from_numpy, (mean, m2)))
            return
        count, mean, m2 = merge_columns(
            float(self.count), _array(self.mean).reshape(-1), _array(self.m2).reshape(-1), columns, valid
        )
        self.count.fill_(count)
        self.mean.copy_(torch.from_numpy(mean).reshape(self.mean.shape))
        self.m2.copy_(torch.from_numpy(m2).reshape(self.m2.shape))


class ObservationNormalizer(_Moments):
    """Subtracts the mean of observations, divides by their standard deviation, and clips.

    Args:
        shape: The shape of one observation.
        clip: Largest magnitude of the result.
        eps: Added to the variance.

    Example:
        >>> normalizer = ObservationNormalizer((1,))
        >>> normalizer.update(np.array([[[1.0]], [[3.0]]], np.float32))
        >>> normalizer.normalize(torch.tensor([[2.0], [4.0], [99.0]])).tolist()
        [[0.0], [2.0], [10.0]]
    """

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0, eps: float = 1e-8):
        super().__init__(shape)
        self.clip, self.eps = clip, eps

    def normalize(self, obs: Tensor) -> Tensor:
        """Observations [..., *shape] as the policy sees them, float32; computed in float64 and rounded once."""
        return ((obs - self.mean) / (self.variance + self.eps).sqrt()).clamp(-self.clip, self.clip).float()

    def update(self, raw: Any, valid: Any = None, ranks: Ranks = ALONE) -> None:
        """Merge a rollout of raw observations [T, N, *shape]; ignores those where valid, bool [T, N], is False.

        Of several ranks each calls it with a rollout of its own, and merges those of all.
        """
        if isinstance(raw, Tensor) and raw.is_cuda:
            merge_moments(self, raw, valid, ranks=ranks)
            return
        obs = _array(raw)
        expected = tuple(self.mean.shape)
        if obs.shape[2:] != expected:
            raise HurtleError(f"Expected observations of shape [T, N, {', '.join(map(str, expected))}], got {obs.shape}.")
        self._merge(obs.reshape(*obs.shape[:2], self.mean.numel()), _mask(valid), ranks)


class RewardNormalizer(_Moments):
    """Divides rewards by the standard deviation of the discounted return and clips; the mean is kept, and so are signs.

    Args:
        rows: Number of rows, each with a running return.
        gamma: Discount.
        clip: Largest magnitude of the result.
        eps: Added to the variance.
    """

    returns: Tensor

    def __init__(self, rows: int, gamma: float, clip: float = 10.0, eps: float = 1e-8):
        super().__init__((1,))
        self.gamma, self.clip, self.eps = gamma, clip, eps
        self.register_buffer("returns", torch.zeros(rows, dtype=torch.float64))

    @classmethod
    def together(cls, each: Sequence[RewardNormalizer]) -> RewardNormalizer:
        """The statistics of several, with equally many rows, in one; they share its memory from now on."""
        first = each[0]
        made = cls(0, first.gamma, first.clip, first.eps)
        made.share(each)
        made.returns = torch.cat([one.returns for one in each])
        for one, own in zip(each, made.returns.chunk(len(each)), strict=True):
            one.returns = own
        return made

    @property
    def std(self) -> Tensor:
        """What rewards are divided by, float64: [1], or of each row."""
        std = (self.variance + self.eps).sqrt()
        return std if std.ndim == 1 else std.expand(-1, len(self.returns) // len(std)).reshape(-1)

    def scale(
        self, rewards: Any, ended: Any, valid: Any = None, rows: np.ndarray | None = None, ranks: Ranks = ALONE
    ) -> Tensor:
        """Scale the rewards of a rollout by the statistics from before it, then merge its returns.

        Args:
            rewards: [T, N].
            ended: bool [T, N]; the return restarts after such a step.
            valid: bool [T, N]; other steps are ignored.
            rows: The row that each column belongs to, int [N]; None: column n is row n. In a pool a row may have several
                columns, in order, or none.
            ranks: Those whose returns are merged.

        Returns:
            float32 [T, N], on the device of the rewards.
        """
        device = rewards.device if isinstance(rewards, Tensor) else "cpu"
        raw, over, mask = _array(rewards), _array(ended), _mask(valid)
        width = len(self.returns) if rows is None else len(rows)
        if raw.shape[1:] != (width,) or over.shape != raw.shape:
            raise HurtleError(f"Expected rewards and ends of shape [T, {width}], got {raw.shape} and {over.shape}.")
        scaled = scaled_rewards(raw, math.sqrt(float(self.variance) + self.eps), self.clip)
        returns = _array(self.returns).copy()
        columns = running_returns(raw, over, mask, rows, self.gamma, returns)
        self.returns.copy_(torch.from_numpy(returns))
        self._merge(columns[..., None], mask, ranks)
        return torch.from_numpy(scaled).to(device)


def merge_moments(
    moments: _Moments, columns: Tensor, valid: Tensor | None = None, good: Tensor | None = None, ranks: Ranks = ALONE
) -> None:
    """Merge samples on their device, without synchronizing with the host.

    Merges all samples at once, not column by column: equal to `update` up to float64 rounding.

    Args:
        moments: Changed in place; those of several (`share`) have equal shares of the columns.
        columns: [T, N, *shape].
        valid: False for samples to ignore, bool [T, N].
        good: Where False, bool [] or one for each of several, nothing is merged.
        ranks: Those whose samples are merged.
    """
    groups = moments.count.numel()

    def by_group(field: Tensor, width: int) -> Tensor:
        return field.reshape(len(field), groups, -1, width).transpose(0, 1).reshape(groups, -1, width)

    samples = by_group(columns, moments.mean.numel() // groups).double()
    if valid is None:
        size = torch.full_like(moments.count, samples.shape[1])
        mean = samples.mean(1, keepdim=True)
        m2 = (samples - mean).square().sum(1)
    else:
        counts = by_group(valid, 1)
        size = counts.sum((1, 2)).double().view_as(moments.count)
        mean = torch.where(counts, samples, 0.0).sum(1, keepdim=True) / size.clamp_min(1.0).view(groups, 1, 1)
        m2 = torch.where(counts, (samples - mean).square(), 0.0).sum(1)
    if ranks.several:
        _merge_ranks(moments, ranks, size.view(1), mean.flatten(), m2.flatten(), good)
    else:
        _merge_part(moments, size, mean, m2, good)


def _merge_part(moments: _Moments, size: Tensor, mean: Tensor, m2: Tensor, good: Tensor | None = None) -> None:
    """Merge the moments of other samples."""
    total = (moments.count + size).clamp_min(1.0)
    delta = mean.view_as(moments.mean) - moments.mean
    kept, share = _like(moments.count * size / total, delta), _like(size / total, delta)
    added = (m2.view_as(moments.m2) + delta.square() * kept, delta * share, size)
    for moment, more in zip((moments.m2, moments.mean, moments.count), added, strict=True):
        moment.add_(more if good is None else torch.where(_like(good, more), more, 0.0))


def _merge_ranks(moments: _Moments, ranks: Ranks, size: Tensor, mean: Tensor, m2: Tensor, good: Tensor | None = None) -> None:
    """Merge the moments of each rank's samples, in the order of the ranks; size is [1]."""
    own = torch.cat([size, mean, m2])
    for part in ranks.rows(own if good is None else torch.where(good, own, 0.0)):
        _merge_part(moments, part[0], *part[1:].chunk(2))


def _like(numbers: Tensor, field: Tensor) -> Tensor:
    """Numbers, one or one for each group, with the axes of a field that has those of a sample behind them."""
    return numbers.view(*numbers.shape, *(1 for _ in range(field.ndim - numbers.ndim))) if numbers.ndim else numbers


def _array(values: Any) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _mask(values: Any) -> np.ndarray | None:
    return None if values is None else _array(values).astype(np.bool_, copy=False)
