"""PPO's loss and its gradients with respect to log-probs, entropies and values, in two launches.

log-probs, entropies, values [B], old and new → advantages' moments → gradients [B], metrics. `algorithms.ppo.ppo_loss` with
autograd is the reference. Knows no policy, no network and no optimizer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hurtle.errors import HurtleError

MOST_SUMS = 256
"""Maximum programs that sum moments: each program of the loss reads all of their sums."""
BLOCK = 256
"""Steps that a program processes at a time."""
METRICS = 5


class PPOGradients(NamedTuple):
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
def _is_valid(valid, at, size):
    there = at < size
    if valid is not None:
        there &= tl.load(valid + at, mask=there, other=0) != 0
    return there


@triton.jit
def _moments_kernel(advantages, valid, size, moments, turns: tl.constexpr, padded: tl.constexpr, block: tl.constexpr):
    """Number, sum and sum of squares of the valid advantages, per program: [3, padded]. In float64, so one pass is enough."""
    number, total, squares = tl.zeros([block], tl.float64), tl.zeros([block], tl.float64), tl.zeros([block], tl.float64)
    for turn in range(turns):
        at = (turn * tl.num_programs(0) + tl.program_id(0)) * block + tl.arange(0, block)
        there = _is_valid(valid, at, size)
        advantage = tl.load(advantages + at, mask=there, other=0.0).to(tl.float64)
        number += there.to(tl.float64)
        total += advantage
        squares += advantage * advantage
    own = moments + tl.program_id(0)
    tl.store(own, tl.sum(number, 0))
    tl.store(own + padded, tl.sum(total, 0))
    tl.store(own + 2 * padded, tl.sum(squares, 0))


@triton.jit
def _normalized(advantage, moments, num_moments, number, padded: tl.constexpr):
    """Normalize to mean 0 and std 1 over the `number` (float64) of valid steps; a single step is left unchanged."""
    n = tl.arange(0, padded)
    mean = tl.sum(tl.load(moments + padded + n, mask=n < num_moments, other=0.0), 0) / tl.maximum(number, 1.0)
    squares = tl.sum(tl.load(moments + 2 * padded + n, mask=n < num_moments, other=0.0), 0) - number * mean * mean
    std = tl.sqrt(tl.where(squares < 0.0, 0.0, squares) / tl.maximum(number - 1.0, 1.0))
    normalized = (advantage.to(tl.float64) - mean).to(tl.float32) / (std.to(tl.float32) + 1e-8)
    return tl.where(number > 1.0, normalized, advantage)


@triton.jit
def _share_of_smaller(a, b):
    """The share of min(a, b)'s gradient that goes to a; torch gives each one half if they are equal."""
    return tl.where(a < b, 1.0, tl.where(a == b, 0.5, 0.0))


@triton.jit
def _loss_kernel(
    log_probs, entropies, values, old_log_probs, old_values, advantages, returns, weights, valid, size,
    clip_range, value_coef, entropy_coef, moments, num_moments, d_log_probs, d_entropies, d_values, metrics,
    clips_values: tl.constexpr, normalizes: tl.constexpr, padded: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of steps, and its part of the metrics: [5, programs]."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    there = _is_valid(valid, at, size)
    clip = tl.load(clip_range)
    advantage = tl.load(advantages + at, mask=there, other=0.0)
    part = 1.0 / size  # weight of one step in the means
    if moments is not None:
        n = tl.arange(0, padded)
        number = tl.sum(tl.load(moments + n, mask=n < num_moments, other=0.0), 0)
        part = (1.0 / tl.maximum(number, 1.0)).to(tl.float32)
        if normalizes:
            advantage = _normalized(advantage, moments, num_moments, number, padded)
    if weights is not None:
        advantage *= tl.load(weights + at, mask=there, other=0.0)

    log_ratio = tl.load(log_probs + at, mask=there, other=0.0) - tl.load(old_log_probs + at, mask=there, other=0.0)
    ratio = tl.exp(log_ratio)
    inside = (ratio >= 1.0 - clip) & (ratio <= 1.0 + clip)
    plain, clipped = advantage * ratio, advantage * tl.minimum(tl.maximum(ratio, 1.0 - clip), 1.0 + clip)
    share = _share_of_smaller(plain, clipped)
    slope = share + (1.0 - share) * inside.to(tl.float32)
    objective = tl.minimum(plain, clipped, propagate_nan=tl.PropagateNan.ALL)

    value, target = tl.load(values + at, mask=there, other=0.0), tl.load(returns + at, mask=there, other=0.0)
    error = value - target
    square, d_value = error * error, error
    if clips_values:
        old_value = tl.load(old_values + at, mask=there, other=0.0)
        change = value - old_value
        near_error = old_value + tl.minimum(tl.maximum(change, -clip), clip) - target
        near_square = near_error * near_error
        inside = (change >= -clip) & (change <= clip)
        share = _share_of_smaller(near_square, square)  # the larger one counts
        d_value = share * error + (1.0 - share) * inside.to(tl.float32) * near_error
        square = tl.maximum(square, near_square, propagate_nan=tl.PropagateNan.ALL)

    entropy = tl.load(entropies + at, mask=there, other=0.0)
    was_clipped = tl.abs(ratio - 1.0) > clip
    tl.store(d_log_probs + at, tl.where(there, -part * slope * plain, 0.0), mask=at < size)
    tl.store(d_entropies + at, tl.where(there, -part * entropy_coef, 0.0), mask=at < size)
    tl.store(d_values + at, tl.where(there, part * value_coef * d_value, 0.0), mask=at < size)
    own, programs = metrics + tl.program_id(0), tl.num_programs(0)
    tl.store(own, -part * tl.sum(tl.where(there, objective, 0.0), 0))
    tl.store(own + programs, 0.5 * part * tl.sum(square, 0))
    tl.store(own + 2 * programs, part * tl.sum(entropy, 0))
    tl.store(own + 3 * programs, part * tl.sum(ratio - 1.0 - log_ratio, 0))
    tl.store(own + 4 * programs, part * tl.sum(was_clipped.to(tl.float32), 0))


def ppo_gradients(
    log_probs: Tensor,
    entropies: Tensor,
    values: Tensor,
    old_log_probs: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    clip_range: Tensor,
    *,
    value_coef: float,
    entropy_coef: float,
    clip_values: bool,
    normalize_advantages: bool,
    weights: Tensor | None = None,
    valid: Tensor | None = None,
) -> PPOGradients:
    """The gradients and metrics of `ppo_loss` for one minibatch. It can be captured in a CUDA graph.

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
        value_coef: Weight of the value loss.
        entropy_coef: Weight of the entropy bonus.
        clip_values: Whether to also clip changes of the values.
        normalize_advantages: Whether to normalize them to mean 0 and std 1 first.
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
    blocks = triton.cdiv(size, BLOCK)
    sums = min(blocks, MOST_SUMS)
    padded = triton.next_power_of_2(sums)
    moments = None
    if normalize_advantages or valid is not None:
        moments = torch.empty(3, padded, dtype=torch.float64, device=values.device)
        _moments_kernel[(sums,)](advantages, valid, size, moments, triton.cdiv(blocks, sums), padded, BLOCK)
    d_log_probs, d_entropies, d_values = torch.empty(3, size, device=values.device).unbind()
    metrics = torch.empty(METRICS, blocks, device=values.device)
    _loss_kernel[(blocks,)](
        log_probs, entropies, values, old_log_probs, old_values, advantages, returns, weights, valid, size,
        clip_range, value_coef, entropy_coef, moments, sums, d_log_probs, d_entropies, d_values, metrics,
        clip_values, normalize_advantages, padded, BLOCK,
    )  # fmt: skip
    return PPOGradients(d_log_probs, d_entropies, d_values, metrics.sum(1))
