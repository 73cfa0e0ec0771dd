"""A linear layer with its activation in bfloat16; beside the products, its backward pass takes two kernels.

x [B, K], weight [N, K] → activation(x @ weight.T + bias) [B, N]. In torch, slopes and sums are kernels of their own; the sums
for biases alone took 18 % of the time of a MinGRU's training on an H200. The torch reference is beside it. Knows no network.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from hurtle.errors import HurtleError

ACTIVATIONS = ("none", "tanh", "relu")
ROWS, COLUMNS = 32, 64
"""Gradients that a program processes at a time."""
MOST_SUMS = 528
"""Maximum programs that sum gradients of biases: four for each multiprocessor of a large GPU."""
SUMMED, SUMMED_COLUMNS = 64, 16
"""Partial sums that a program adds at a time."""


def dense(x: Tensor, weight: Tensor, bias: Tensor, activation: str = "none", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A linear layer and its activation. It can be captured in a CUDA graph.

    Args:
        x: float32 or bfloat16. [..., K]
        weight: float32. [N, K]
        bias: float32. [N]
        activation: "none", "tanh" or "relu".
        dtype: Of the products and of the result.

    Returns:
        [..., N].

    Raises:
        HurtleError: Shapes or dtypes are not supported.

    Example:
        features = dense(obs, layer.weight, layer.bias, "tanh")
    """
    if activation not in ACTIVATIONS:
        raise HurtleError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
    if not x.is_floating_point() or weight.dtype != torch.float32 or bias.dtype != torch.float32:
        raise HurtleError(f"dense does not take x of {x.dtype}, a weight of {weight.dtype} and a bias of {bias.dtype}.")
    if weight.ndim != 2 or x.shape[-1:] != weight.shape[1:] or bias.shape != weight.shape[:1]:
        raise HurtleError(f"The shapes {[*x.shape]}, {[*weight.shape]} and {[*bias.shape]} do not fit: [..., K], [N, K], [N].")
    flat = _Dense.apply(x.reshape(-1, x.shape[-1]), weight, bias, activation, dtype)
    return flat.reshape(*x.shape[:-1], len(weight))


def dense_reference(x: Tensor, weight: Tensor, bias: Tensor, activation: str = "none", dtype: Any = torch.bfloat16) -> Tensor:
    """The reference for `dense`, in the precision of the weights."""
    z = linear(x.to(weight.dtype), weight, bias)
    return {"none": z, "tanh": z.tanh(), "relu": z.relu()}[activation].to(dtype)


@triton.jit
def _backward_kernel(
    y, d_y, d_z, sums, B,
    N: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients before the activation, and their sum over a program's rows."""
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(B, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        place, inside = row[:, None] * N + n[None, :], (row < B)[:, None] & (n < N)[None, :]
        d = tl.load(d_y + place, mask=inside, other=0.0).to(tl.float32)
        if ACTIVATION == "tanh":
            value = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
            d = d * (1.0 - value * value)
        elif ACTIVATION == "relu":
            d = tl.where(tl.load(y + place, mask=inside, other=0.0).to(tl.float32) > 0.0, d, 0.0)
        if d_z is not None:
            tl.store(d_z + place, d.to(d_z.dtype.element_ty), mask=inside)
        total += d
    tl.store(sums + tl.program_id(0) * N + n, tl.sum(total, 0), mask=n < N)


@triton.jit
def _sum_kernel(sums, total, P, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Partial sums [P, N] → total [N]."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, P, ROWS):
        row = first + tl.arange(0, ROWS)
        there = (row < P)[:, None] & (n < N)[None, :]
        found += tl.load(sums + row[:, None] * N + n[None, :], mask=there, other=0.0)
    tl.store(total + n, tl.sum(found, 0), mask=n < N)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
        x, weight = x.to(dtype), weight.to(dtype)
        y = linear(x, weight, bias.to(dtype))
        if activation != "none":
            y = y.tanh_() if activation == "tanh" else y.relu_()
        ctx.save_for_backward(x, weight, y)
        ctx.activation = activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y = ctx.saved_tensors
        (rows, width), d_y = y.shape, d_y.contiguous()
        d_z = d_y if ctx.activation == "none" else torch.empty_like(d_y)
        columns = min(COLUMNS, max(16, triton.next_power_of_2(width)))
        across = triton.cdiv(width, columns)
        programs = max(1, min(triton.cdiv(rows, ROWS), MOST_SUMS // across))
        sums, d_bias = torch.empty(programs, width, device=y.device), torch.empty(width, device=y.device)
        with torch.cuda.device_of(y):
            _backward_kernel[(programs, across)](
                y, d_y, None if d_z is d_y else d_z, sums, rows, N=width, ACTIVATION=ctx.activation, ROWS=ROWS, COLUMNS=columns
            )
            _sum_kernel[(triton.cdiv(width, SUMMED_COLUMNS),)](
                sums, d_bias, programs, N=width, ROWS=SUMMED, COLUMNS=SUMMED_COLUMNS
            )
        d_x = d_z @ weight if ctx.needs_input_grad[0] else None
        return d_x, (d_z.t() @ x).float(), d_bias, None, None
