"""An LSTM over sequences in bfloat16: for every step one product and one kernel, forward and backward.

what the inputs contribute to the gates [T, B, 4F], starts [T, B], state [B, F] × 2 → hidden [T, B, F], last state. The order of
the gates is torch's: input, forget, candidate, output. The torch reference is beside it. Knows nothing of what made the gates.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hurtle.errors import HurtleError
from hurtle.kernels.triton.functions import sigmoid, tanh

LANES = 256
"""Numbers of a state that a program computes."""


def lstm(gates: Tensor, starts: Tensor | None, state: tuple[Tensor, Tensor], weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All outputs of an LSTM, whose state is zero before a step that starts an episode. It can be captured in a CUDA graph.

    Gradients go to `gates`, `state` and `weight`.

    Args:
        gates: Contribution of inputs and biases, bfloat16. [T, B, 4F]
        starts: Where an episode begins, bool; None if none does. [T, B]
        state: Output and cell before the first step, float32. [B, F] each
        weight: Of the previous output, float32. [4F, F]

    Returns:
        The outputs, bfloat16 [T, B, F], and the output and cell after the last step, float32 [B, F].

    Raises:
        HurtleError: Shapes do not match.
    """
    hidden, cell = state
    size = hidden.shape[-1]
    if gates.ndim != 3 or not len(gates) or gates.shape[1:] != (len(hidden), 4 * size) or weight.shape != (4 * size, size):
        raise HurtleError(f"lstm takes gates [T, B, 4F] and a weight [4F, F], got {[*gates.shape]} and {[*weight.shape]}.")
    if starts is not None and (starts.dtype != torch.bool or starts.shape != gates.shape[:2]):
        raise HurtleError(f"starts must be bool {[*gates.shape[:2]]}, got {starts.dtype} {[*starts.shape]}.")
    begins = None if starts is None else starts.contiguous().view(torch.uint8)
    return _LSTM.apply(gates.contiguous(), begins, hidden.contiguous(), cell.contiguous(), weight)


def lstm_reference(
    gates: Tensor, starts: Tensor | None, state: tuple[Tensor, Tensor], weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference for `lstm`, in the precision of the weights."""
    hidden, cell = state
    outputs = []
    for t, own in enumerate(gates.to(weight.dtype)):
        if starts is not None:
            hidden, cell = (part.masked_fill(starts[t].unsqueeze(-1), 0.0) for part in (hidden, cell))
        take, keep, candidate, give = (own + hidden @ weight.t()).chunk(4, -1)
        cell = torch.sigmoid(keep) * cell + torch.sigmoid(take) * torch.tanh(candidate)
        hidden = torch.sigmoid(give) * torch.tanh(cell)
        outputs.append(hidden)
    return torch.stack(outputs), hidden, cell


@triton.jit
def _step_forward(
    gates, begins, cell, hidden, next_begins, next_hidden, new_cell, last_hidden, B, F: tl.constexpr, LANES: tl.constexpr
):
    """Gates → cell, output, and the output as the next step sees it."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    row, ok = lane // F, lane < B * F
    own = gates + row * (4 * F) + lane % F
    c = tl.load(cell + lane, mask=ok, other=0.0)
    if begins is not None:
        c = tl.where(tl.load(begins + row, mask=ok, other=0) != 0, 0.0, c)
    take = sigmoid(tl.load(own, mask=ok, other=0.0).to(tl.float32))
    keep = sigmoid(tl.load(own + F, mask=ok, other=0.0).to(tl.float32))
    candidate = tanh(tl.load(own + 2 * F, mask=ok, other=0.0).to(tl.float32))
    c = keep * c + take * candidate
    h = sigmoid(tl.load(own + 3 * F, mask=ok, other=0.0).to(tl.float32)) * tanh(c)
    tl.store(new_cell + lane, c, mask=ok)
    tl.store(hidden + lane, h.to(hidden.dtype.element_ty), mask=ok)
    if last_hidden is not None:
        tl.store(last_hidden + lane, h, mask=ok)
    if next_hidden is not None:
        if next_begins is not None:
            h = tl.where(tl.load(next_begins + row, mask=ok, other=0) != 0, 0.0, h)
        tl.store(next_hidden + lane, h.to(next_hidden.dtype.element_ty), mask=ok)


@triton.jit
def _step_backward(
    gates, begins, cell, new_cell, d_hidden, d_next, next_begins, d_cell, d_gates, B, F: tl.constexpr, LANES: tl.constexpr
):
    """Gradients of a step's gates, and of the cell before it, in place."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    row, ok = lane // F, lane < B * F
    own = gates + row * (4 * F) + lane % F
    begun = tl.zeros((LANES,), tl.int1)
    if begins is not None:
        begun = tl.load(begins + row, mask=ok, other=0) != 0
    c = tl.where(begun, 0.0, tl.load(cell + lane, mask=ok, other=0.0))
    take = sigmoid(tl.load(own, mask=ok, other=0.0).to(tl.float32))
    keep = sigmoid(tl.load(own + F, mask=ok, other=0.0).to(tl.float32))
    candidate = tanh(tl.load(own + 2 * F, mask=ok, other=0.0).to(tl.float32))
    give = sigmoid(tl.load(own + 3 * F, mask=ok, other=0.0).to(tl.float32))
    squashed = tanh(tl.load(new_cell + lane, mask=ok, other=0.0))
    further = tl.load(d_next + lane, mask=ok, other=0.0).to(tl.float32)
    if next_begins is not None:
        further = tl.where(tl.load(next_begins + row, mask=ok, other=0) != 0, 0.0, further)
    d_h = tl.load(d_hidden + lane, mask=ok, other=0.0).to(tl.float32) + further
    d_c = tl.load(d_cell + lane, mask=ok, other=0.0) + d_h * give * (1.0 - squashed * squashed)
    into = d_gates + row * (4 * F) + lane % F
    tl.store(into, (d_c * candidate * take * (1.0 - take)).to(d_gates.dtype.element_ty), mask=ok)
    tl.store(into + F, (d_c * c * keep * (1.0 - keep)).to(d_gates.dtype.element_ty), mask=ok)
    tl.store(into + 2 * F, (d_c * take * (1.0 - candidate * candidate)).to(d_gates.dtype.element_ty), mask=ok)
    tl.store(into + 3 * F, (d_h * squashed * give * (1.0 - give)).to(d_gates.dtype.element_ty), mask=ok)
    tl.store(d_cell + lane, tl.where(begun, 0.0, d_c * keep), mask=ok)


class _LSTM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, begins: Tensor | None, hidden: Tensor, cell: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        (length, rows, _), size, dtype = gates.shape, hidden.shape[1], gates.dtype
        half = weight.to(dtype)
        before = torch.empty(length, rows, size, dtype=dtype, device=gates.device)  # outputs as the next step sees them
        before[0].copy_(hidden if begins is None else hidden.masked_fill(begins[0].bool().unsqueeze(-1), 0.0))
        whole, outputs = torch.empty_like(gates), torch.empty_like(before)
        cells, last = torch.empty(length, rows, size, device=gates.device), torch.empty_like(hidden)
        for t in range(length):
            is_last, begin = t + 1 == length, None if begins is None else begins[t]
            torch.addmm(gates[t], before[t], half.t(), out=whole[t])
            next_begins = None if is_last or begins is None else begins[t + 1]
            with torch.cuda.device_of(gates):
                _step_forward[(triton.cdiv(rows * size, LANES),)](
                    whole[t], begin, cells[t - 1] if t else cell, outputs[t], next_begins, None if is_last else before[t + 1],
                    cells[t], last if is_last else None, rows, F=size, LANES=LANES,
                )  # fmt: skip
        ctx.save_for_backward(whole, begins, cell, cells, before, half)
        return outputs, last, cells[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, d_last: Tensor, d_cell: Tensor) -> tuple[Tensor | None, ...]:
        whole, begins, cell, cells, before, half = ctx.saved_tensors
        (length, rows, _), size = whole.shape, cell.shape[1]
        d_gates, d_outputs, d_cell, d_next = (
            torch.empty_like(whole),
            d_outputs.contiguous(),
            d_cell.clone(),
            d_last.contiguous(),
        )
        for t in range(length - 1, -1, -1):
            is_last, begin = t + 1 == length, None if begins is None else begins[t]
            next_begins = None if is_last or begins is None else begins[t + 1]
            with torch.cuda.device_of(whole):
                _step_backward[(triton.cdiv(rows * size, LANES),)](
                    whole[t], begin, cells[t - 1] if t else cell, cells[t], d_outputs[t], d_next, next_begins, d_cell,
                    d_gates[t], rows, F=size, LANES=LANES,
                )  # fmt: skip
            d_next = d_gates[t] @ half
        d_hidden = d_next.float()
        if begins is not None:
            d_hidden = d_hidden.masked_fill(begins[0].bool().unsqueeze(-1), 0.0)
        d_weight = (d_gates.flatten(0, 1).t() @ before.flatten(0, 1)).float()
        return d_gates, None, d_hidden, d_cell, d_weight
