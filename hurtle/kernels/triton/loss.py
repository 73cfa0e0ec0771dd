"""The losses of PPO and A2C: gradients with respect to log-probs, entropies, values, in two launches; what fused losses share.

log-probs, entropies, values [B], old and new → advantages' moments → gradients [B], metrics. `ppo_loss` or
`a2c_loss` with autograd is the reference. `Steps`, `LossSettings`, `Moments`, `add_metrics` are for mlp.py and grid_cnn.py too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hurtle.errors import HurtleError
from hurtle.kernels.triton.heads import moments_of, normalized, policy_terms, value_terms

MOST_SUMS = 256
"""Maximum programs that sum moments: each program of the loss reads all of their sums."""
BLOCK = 256
"""Steps that a program processes at a time."""
METRICS, KL = tl.constexpr(5), tl.constexpr(3)
"""The number of metrics, and which of them is the KL."""


class Gradients(NamedTuple):
    """The gradients of one minibatch, for `torch.autograd.backward` of the policy's log-probs, entropies and values."""

    log_probs: Tensor
    """[B]."""
    entropies: Tensor
    """[B]."""
    values: Tensor
    """[B]."""
    metrics: Tensor
    """Policy loss, value loss, entropy, approximate KL and the fraction of clipped ratios. [5]"""


@triton.jit
def _moments_kernel(
    advantages, order, stride, valid, size, moments, turns: tl.constexpr, padded: tl.constexpr, block: tl.constexpr
):
    """Number, sum and sum of squares of the valid advantages, per program: [3, padded]. In float64, so one pass is enough.

    The second axis of the grid are seeds.
    """
    seed = tl.program_id(1)
    number, total, squares = tl.zeros([block], tl.float64), tl.zeros([block], tl.float64), tl.zeros([block], tl.float64)
    for turn in range(turns):
        at = (turn * tl.num_programs(0) + tl.program_id(0)) * block + tl.arange(0, block)
        there = at < size
        if order is not None:
            at = tl.load(order + seed * stride + at, mask=there, other=0)
        if valid is not None:
            there &= tl.load(valid + at, mask=there, other=0) != 0
        advantage = tl.load(advantages + at, mask=there, other=0.0).to(tl.float64)
        number += there.to(tl.float64)
        total += advantage
        squares += advantage * advantage
    own = moments + seed * 3 * padded + tl.program_id(0)
    tl.store(own, tl.sum(number, 0))
    tl.store(own + padded, tl.sum(total, 0))
    tl.store(own + 2 * padded, tl.sum(squares, 0))


@triton.jit
def _loss_kernel(
    log_probs, entropies, values, old_log_probs, old_values, advantages, returns, weights, valid, size,
    clip_range, value_coef, entropy_coef, moments, num_moments, d_log_probs, d_entropies, d_values, metrics,
    clips: tl.constexpr, clips_values: tl.constexpr, normalizes: tl.constexpr, padded: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of steps, and its part of the metrics: [5, programs]."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    there = at < size
    if valid is not None:
        there &= tl.load(valid + at, mask=there, other=0) != 0
    clip = tl.load(clip_range)
    mean, scale, part, _ = moments_of(moments, num_moments, padded, size, normalizes)
    advantage = tl.load(advantages + at, mask=there, other=0.0)
    if normalizes:
        advantage = normalized(advantage, mean, scale)
    if weights is not None:
        advantage *= tl.load(weights + at, mask=there, other=0.0)
    log_prob = tl.load(log_probs + at, mask=there, other=0.0)
    old_log_prob = tl.load(old_log_probs + at, mask=there, other=0.0)
    objective, slope, kl, was_clipped = policy_terms(log_prob, old_log_prob, advantage, clip, clips)
    value, target = tl.load(values + at, mask=there, other=0.0), tl.load(returns + at, mask=there, other=0.0)
    square, d_value = value_terms(value, tl.load(old_values + at, mask=there, other=0.0), target, clip, clips_values)
    entropy = tl.load(entropies + at, mask=there, other=0.0)
    tl.store(d_log_probs + at, tl.where(there, -part * slope, 0.0), mask=at < size)
    tl.store(d_entropies + at, tl.where(there, -part * entropy_coef, 0.0), mask=at < size)
    tl.store(d_values + at, tl.where(there, part * value_coef * d_value, 0.0), mask=at < size)
    own, programs = metrics + tl.program_id(0), tl.num_programs(0)
    tl.store(own, -part * tl.sum(tl.where(there, objective, 0.0), 0))
    tl.store(own + programs, 0.5 * part * tl.sum(square, 0))
    tl.store(own + 2 * programs, part * tl.sum(entropy, 0))
    tl.store(own + 3 * programs, part * tl.sum(kl, 0))
    tl.store(own + 4 * programs, part * tl.sum(was_clipped, 0))


class Steps(NamedTuple):
    """A rollout for the fused kernels, flat over steps and rows [S]."""

    obs: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    masks: Tensor | None = None
    """Legal choices, bool [S, A]."""
    valid: Tensor | None = None
    """False for steps to ignore, whatever they contain. bool [S]"""


class LossSettings(NamedTuple):
    """Constants of the loss, see `PPOConfig`."""

    value_coef: float
    entropy_coef: float
    clip_values: bool
    normalize_advantages: bool
    clips: bool = True
    """Whether ratios are clipped: PPO's loss, otherwise A2C's."""


class Moments(NamedTuple):
    """Partial sums from which kernels compute mean and standard deviation of a minibatch's advantages; see `moments_of`."""

    sums: Tensor | None
    """Numbers, sums and sums of squares, [3, padded] or [seeds, 3, padded] float64; None if nothing is normalized and all steps
    count."""
    used: int
    """How many of them are used."""
    padded: int


def advantage_moments(advantages: Tensor, order: Tensor | None, valid: Tensor | None, normalizes: bool) -> Moments:
    """The moments of a minibatch, without synchronizing.

    Args:
        advantages: [S].
        order: The minibatch's indices among the S steps, int64 [B], or [seeds, B] of several; None: all in order.
        valid: False for steps that do not count. bool [S]
        normalizes: Whether advantages are normalized.
    """
    if not normalizes and valid is None:
        return Moments(None, 0, 1)
    size = len(advantages) if order is None else order.shape[-1]
    lead, stride = ((), 0) if order is None else (order.shape[:-1], order.stride(0))
    blocks = triton.cdiv(size, BLOCK)
    count = min(blocks, MOST_SUMS)
    padded = triton.next_power_of_2(count)
    sums = torch.empty(*lead, 3, padded, dtype=torch.float64, device=advantages.device)
    grid = (count, math.prod(lead))
    _moments_kernel[grid](advantages, order, stride, valid, size, sums, triton.cdiv(blocks, count), padded, BLOCK)
    return Moments(sums, count, padded)


@triton.jit
def _metrics_kernel(
    stats, programs, moments, num_moments, norm, sums, epoch_kl, goes_on, padded: tl.constexpr, block: tl.constexpr
):
    """Add a minibatch's means, the norm of its gradient and a 1 to a seed's sums, unless it learns from no step."""
    seed, metric_size = tl.program_id(0), programs * tl.num_programs(0)
    stats, norm, epoch_kl = stats + seed * programs, norm + seed, epoch_kl + 2 * seed
    sums += seed * (METRICS + 2)
    if moments is not None:
        moments += seed * 3 * padded
    _, _, _, nothing = moments_of(moments, num_moments, padded, 1, False)
    count = tl.where(nothing == 0.0, 1.0, 0.0)
    if goes_on is not None:
        count = tl.where(tl.load(goes_on + seed) != 0, count, 0.0)
    metric = tl.arange(0, 8)
    totals = tl.zeros([8, block], tl.float32)
    for first in range(0, programs, block):
        at = first + tl.arange(0, block)
        there = (metric < METRICS)[:, None] & (at < programs)[None, :]
        totals += tl.load(stats + metric[:, None] * metric_size + at[None, :], mask=there, other=0.0)
    means = tl.where(count > 0.0, tl.sum(totals, 1), 0.0)
    tl.store(sums + metric, tl.load(sums + metric, mask=metric < METRICS, other=0.0) + means, mask=metric < METRICS)
    tl.store(epoch_kl, tl.load(epoch_kl) + tl.sum(tl.where(metric == KL, means, 0.0), 0))
    own_norm = tl.where(count > 0.0, tl.load(norm), 0.0)
    tl.store(sums + METRICS, tl.load(sums + METRICS) + own_norm)
    tl.store(sums + METRICS + 1, tl.load(sums + METRICS + 1) + count)
    tl.store(epoch_kl + 1, tl.load(epoch_kl + 1) + count)


def add_metrics(
    stats: Tensor, moments: Moments, norm: Tensor, sums: Tensor, epoch_kl: Tensor, goes_on: Tensor | None = None
) -> None:
    """Add a minibatch to the metrics of an update, unless none of its steps is valid.

    Args:
        stats: Its metrics, to be summed over programs. [5, programs], or [5, seeds, programs]: all others have an axis of seeds
            first then.
        moments: Of its advantages.
        norm: Of its gradient. []
        sums: Sums of the five metrics and of the norm, and their number. [7]
        epoch_kl: Sum of the KL, and its number. [2]
        goes_on: Seeds that learned from it; None: all. bool [seeds]
    """
    _metrics_kernel[(math.prod(stats.shape[1:-1]),)](
        stats, stats.shape[-1], moments.sums, moments.used, norm, sums, epoch_kl, goes_on, moments.padded, 256, num_warps=4
    )


def loss_gradients(
    log_probs: Tensor,
    entropies: Tensor,
    values: Tensor,
    old_log_probs: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    clip_range: Tensor,
    settings: LossSettings,
    weights: Tensor | None = None,
    valid: Tensor | None = None,
) -> Gradients:
    """The gradients and metrics of `ppo_loss`, or of `a2c_loss`, for one minibatch. It can be captured in a CUDA graph.

    `torch.autograd.backward([log_probs, entropies, values], gradients[:3])` continues through the policy.

    Args:
        log_probs: Log-probs of the actions under the current policy; float32, like all others. [B]
        entropies: Entropies under the current policy. [B]
        values: Values under the current policy. [B]
        old_log_probs: Log-probs when the policy acted. [B]
        old_values: Values when the policy acted. [B]
        advantages: [B].
        returns: [B].
        clip_range: A tensor on the device. [1]
        settings: The loss's constants.
        weights: Importance weights of the steps. [B]
        valid: False for steps to ignore, whatever they contain; if all are ignored, all results are 0. bool [B]

    Returns:
        The gradients of the loss with respect to the first three, and the metrics.

    Raises:
        HurtleError: Shapes do not match, or a tensor is not contiguous.
    """
    size = len(log_probs)
    if not size:
        raise HurtleError("A minibatch needs at least one step.")
    for column in (log_probs, entropies, values, old_log_probs, old_values, advantages, returns, weights, valid):
        if column is not None and (column.shape != (size,) or not column.is_contiguous()):
            raise HurtleError(f"All tensors must be contiguous and of shape ({size},); one has {tuple(column.shape)}.")
    moments = advantage_moments(advantages, None, valid, settings.normalize_advantages)
    blocks = triton.cdiv(size, BLOCK)
    d_log_probs, d_entropies, d_values = torch.empty(3, size, device=values.device).unbind()
    metrics = torch.empty(METRICS.value, blocks, device=values.device)
    _loss_kernel[(blocks,)](
        log_probs, entropies, values, old_log_probs, old_values, advantages, returns, weights, valid, size,
        clip_range, settings.value_coef, settings.entropy_coef, moments.sums, moments.used, d_log_probs, d_entropies, d_values,
        metrics, settings.clips, settings.clip_values, settings.normalize_advantages, moments.padded, BLOCK,
    )  # fmt: skip
    return Gradients(d_log_probs, d_entropies, d_values, metrics.sum(1))
