"""Adam, AdamW and RMSprop on flat parameters: gradients are summed and clipped and all parameters stepped in two launches.

partial gradients [P, size] → gradients, sums of squares → norm → moments, parameters; or the same for each row of [N, size].
`FlatOptimizer._step` is the reference in torch. Knows no policy and no loss.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hurtle.errors import HurtleError

MOST_SUMS = 1024
"""Maximum programs that sum squares: each program of the update reads all of their sums."""
BLOCK = 256
"""Parameters that a program processes at a time."""
MOST_ROW_SUMS, ROW_BLOCK = 64, 1024
"""The same two numbers where there are rows, which fill the device together."""
ROWS, COLUMNS = 32, 64
"""Partial gradients that a program processes at a time."""


@triton.jit
def _sum_partials_kernel(
    partials, row_stride, stride, num_partials, gradients, size, sums, counts,
    turns: tl.constexpr, row_turns: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Partial gradients → gradients and their sum of squares, per program; the second axis of the grid are rows."""
    own = tl.program_id(1).to(tl.int64)
    partials, gradients, sums = partials + own * row_stride, gradients + own * size, sums + own * tl.num_programs(0)
    _begin_step(counts + 2 * own)
    squares = tl.zeros([columns], tl.float32)
    for turn in range(turns):
        column = (turn * tl.num_programs(0) + tl.program_id(0)) * columns + tl.arange(0, columns)
        total = tl.zeros([rows, columns], tl.float32)
        for row_turn in range(row_turns):
            row = (row_turn * rows + tl.arange(0, rows)).to(tl.int64)[:, None]
            there = (row < num_partials) & (column < size)[None, :]
            total += tl.load(partials + row * stride + column[None, :], mask=there, other=0.0)
        gradient = tl.sum(total, 0)
        tl.store(gradients + column, gradient, mask=column < size)
        squares += gradient * gradient
    tl.store(sums + tl.program_id(0), tl.sum(squares, 0))


@triton.jit
def _sum_squares_kernel(gradients, size, sums, counts, turns: tl.constexpr, block: tl.constexpr):
    """The gradients' sum of squares, per program; the second axis of the grid are rows."""
    row = tl.program_id(1).to(tl.int64)
    _begin_step(counts + 2 * row)
    squares = tl.zeros([block], tl.float32)
    for turn in range(turns):
        at = (turn * tl.num_programs(0) + tl.program_id(0)) * block + tl.arange(0, block)
        gradient = tl.load(gradients + row * size + at, mask=at < size, other=0.0)
        squares += gradient * gradient
    tl.store(sums + row * tl.num_programs(0) + tl.program_id(0), tl.sum(squares, 0))


@triton.jit
def _begin_step(counts):
    """The count before this step: all programs of the update read it while one of them writes the new count."""
    if tl.program_id(0) == 0:
        tl.store(counts, tl.load(counts + 1))


@triton.jit
def _update_kernel(
    values, gradients, first, second, size, sums, num_sums, counts, learning_rate, norm_out,
    eps, weight_decay, max_grad_norm,
    name: tl.constexpr, beta1: tl.constexpr, beta2: tl.constexpr, log_beta1: tl.constexpr, log_beta2: tl.constexpr,
    padded: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Step a block of a row's parameters along their clipped gradient; if the row's norm is not finite, nothing is stored."""
    row, n = tl.program_id(1).to(tl.int64), tl.arange(0, padded)
    values, gradients, first, second = (
        values + row * size, gradients + row * size, first + row * size, second + row * size,
    )  # fmt: skip
    counts, norm_out = counts + 2 * row, norm_out + row
    norm = tl.sqrt(tl.sum(tl.load(sums + row * num_sums + n, mask=n < num_sums, other=0.0), 0))
    finite = norm < float("inf")  # false for NaN
    old_count = tl.load(counts)
    count = old_count + 1.0
    if tl.program_id(0) == 0:
        tl.store(norm_out, norm)
        tl.store(counts + 1, tl.where(finite, count, old_count))

    at = tl.program_id(0) * block + tl.arange(0, block)
    there, writes = at < size, at < tl.where(finite, size, 0)
    value = tl.load(values + at, mask=there, other=0.0)
    gradient = tl.load(gradients + at, mask=there, other=0.0) * tl.minimum(max_grad_norm / (norm + 1e-6), 1.0)
    rate = tl.load(learning_rate)
    if name == "adamw":
        value *= 1.0 - rate * weight_decay
    else:
        gradient += weight_decay * value
    v = beta2 * tl.load(second + at, mask=there, other=0.0) + (1 - beta2) * gradient * gradient
    if name == "rmsprop":
        value -= rate * gradient / (tl.sqrt(v) + eps)
    else:
        m = beta1 * tl.load(first + at, mask=there, other=0.0) + (1 - beta1) * gradient
        # In float64: 1 - beta^count would lose half of float32's digits in the first steps.
        correction1 = (1.0 - tl.exp(count.to(tl.float64) * log_beta1)).to(tl.float32)
        correction2 = (1.0 - tl.exp(count.to(tl.float64) * log_beta2)).to(tl.float32)
        value -= rate / correction1 * m / (tl.sqrt(v) / tl.sqrt(correction2) + eps)
        tl.store(first + at, m, mask=writes)
    tl.store(second + at, v, mask=writes)
    tl.store(values + at, value, mask=writes)


def optimizer_step(
    values: Tensor,
    gradients: Tensor,
    first: Tensor,
    second: Tensor,
    counts: Tensor,
    learning_rate: Tensor,
    partials: Tensor | None = None,
    *,
    name: str,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    max_grad_norm: float,
) -> Tensor:
    """One optimizer step, equal to torch's after `clip_grad_norm_`. It can be captured in a CUDA graph.

    Tensors are float32 and contiguous, on one device.

    Args:
        values: The parameters, [size]; or rows of them, [N, size], each of which has its own norm and count.
        gradients: Read, or written if there are `partials`. As `values`.
        first: The first moments; RMSprop does not use them. As `values`.
        second: The second moments. As `values`.
        counts: The number of steps before the last one, for internal use, and that of all steps. [2] or [N, 2]
        learning_rate: [1].
        partials: Summed into `gradients` first. [P, size] or [N, P, size]
        name: "adam" (weight decay is an L2 penalty), "adamw" or "rmsprop".
        betas: Decay of the moments.
        eps: Added to the denominator.
        weight_decay: See `name`.
        max_grad_norm: Bound of the global norm of the gradients.

    Returns:
        The norm before clipping, as a new tensor, [] or [N]. If it is not finite, parameters, moments and count are unchanged.

    Raises:
        HurtleError: `partials` have the wrong shape, or their rows are not contiguous.
    """
    size, norm = values.shape[-1], torch.empty(values.shape[:-1], device=values.device)
    num_rows = norm.numel()
    block, most_sums = (BLOCK, MOST_SUMS) if values.ndim == 1 else (ROW_BLOCK, MOST_ROW_SUMS)
    blocks = triton.cdiv(size, block if partials is None else COLUMNS)
    programs = min(blocks, most_sums)
    turns, sums = triton.cdiv(blocks, programs), torch.empty(num_rows * programs, device=values.device)
    if partials is None:
        _sum_squares_kernel[(programs, num_rows)](gradients, size, sums, counts, turns, block)
    else:
        if (*partials.shape[:-2], size) != (*values.shape[:-1], partials.shape[-1]) or partials.stride(-1) != 1:
            raise HurtleError(f"partials must be [P, {size}] with contiguous rows, got the shape {tuple(partials.shape)}.")
        rows, strides = partials.shape[-2], (partials.stride(0), partials.stride(-2))
        _sum_partials_kernel[(programs, num_rows)](
            partials, *strides, rows, gradients, size, sums, counts, turns, triton.cdiv(rows, ROWS), ROWS, COLUMNS
        )
    beta1, beta2 = betas
    _update_kernel[(triton.cdiv(size, block), num_rows)](
        values, gradients, first, second, size, sums, programs, counts, learning_rate, norm,
        eps, weight_decay, max_grad_norm,
        name, beta1, beta2, math.log(beta1) if beta1 else 0.0, math.log(beta2),
        triton.next_power_of_2(programs), block,
    )  # fmt: skip
    return norm
