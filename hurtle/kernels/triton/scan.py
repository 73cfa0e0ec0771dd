"""The recurrence of MinGRU over sequences, forward and backward in one kernel each, beside its torch reference.

gates and candidates [T, B, 2F], starts [T, B], state [B, F] → hidden [T, B, F], last state. Every row and feature is
computed independently, in float32. Knows nothing of what made the gates.
"""
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hurtle.errors import HurtleError
from hurtle.kernels.triton.functions import sigmoids

LANES, WARPS = 128, 2
"""Features per program, and its warps: two lanes per thread."""
STEPS = 8
"""Steps loaded at once: the kernel is bound by memory latency."""


def min_gru(terms: Tensor, starts: Tensor | None, state: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """All h of h' = sigmoid(-gate) h + sigmoid(gate) candidate, where h is zero before a step that starts an episode.

    Gradients go to `terms` and `state`. It can be captured in a CUDA graph.

    Args:
        terms: Gates, then candidates along the last axis; float32 or a half precision. [T, B, 2F]
        starts: Where an episode begins, bool; None if none does. [T, B]
        state: h before the first step, float32. [B, F]
        dtype: Dtype of h after every step.

    Returns:
        h after every step, [T, B, F], and after the last one in float32, [B, F].

    Raises:
        HurtleError: Shapes or dtypes do not match.

    Example:
        hidden, state = min_gru(layer(features), starts, state)
    """
    _check(terms, starts, state)
    return _MinGRU.apply(terms.contiguous(), None if starts is None else starts.contiguous(), state.contiguous(), dtype)


def min_gru_reference(
    terms: Tensor, starts: Tensor | None, state: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The reference for `min_gru`."""
    hidden, outputs = state, []
    for t, (gate, candidate) in enumerate(zip(*terms.to(state.dtype).chunk(2, -1), strict=True)):
        before = hidden if starts is None else hidden.masked_fill(starts[t].unsqueeze(-1), 0.0)
        hidden = torch.sigmoid(-gate) * before + torch.sigmoid(gate) * candidate
        outputs.append(hidden)
    return torch.stack(outputs).to(dtype), hidden


@triton.jit
def _scan_forward(
    terms, starts, state, hidden, last, T, B,
    F: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    row, feature = lane // F, lane % F
    ok = row < B
    h = tl.load(state + lane, mask=ok, other=0.0)
    for first in range(0, T, STEPS):
        gates, candidates, begins = (), (), ()
        for step in tl.static_range(STEPS):
            inside = ok & (first + step < T)
            place = (first + step) * B + row
            gates += (tl.load(terms + place * (2 * F) + feature, mask=inside, other=0.0).to(tl.float32),)
            candidates += (tl.load(terms + place * (2 * F) + F + feature, mask=inside, other=0.0).to(tl.float32),)
            if HAS_STARTS:
                begins += (tl.load(starts + place, mask=inside, other=0),)
        for step in tl.static_range(STEPS):
            if HAS_STARTS:
                h = tl.where(begins[step] != 0, 0.0, h)
            take, keep = sigmoids(gates[step])
            h = tl.where(first + step < T, keep * h + take * candidates[step], h)
            place = (first + step) * B + row
            tl.store(hidden + place * F + feature, h, mask=ok & (first + step < T))
    tl.store(last + lane, h, mask=ok)


@triton.jit
def _scan_backward(
    terms, starts, state, hidden, d_hidden, d_last, d_terms, d_state, T, B,
    F: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    row, feature = lane // F, lane % F
    ok = row < B
    initial = tl.load(state + lane, mask=ok, other=0.0)
    d_h = tl.load(d_last + lane, mask=ok, other=0.0)
    for first in range(0, T, STEPS):
        gates, candidates, befores, d_outputs, begins = (), (), (), (), ()
        for step in tl.static_range(STEPS):
            t = T - 1 - first - step
            inside = ok & (t >= 0)
            place = t * B + row
            gates += (tl.load(terms + place * (2 * F) + feature, mask=inside, other=0.0).to(tl.float32),)
            candidates += (tl.load(terms + place * (2 * F) + F + feature, mask=inside, other=0.0).to(tl.float32),)
            befores += (tl.load(hidden + (place - B) * F + feature, mask=ok & (t > 0), other=0.0).to(tl.float32),)
            d_outputs += (tl.load(d_hidden + place * F + feature, mask=inside, other=0.0).to(tl.float32),)
            if HAS_STARTS:
                begins += (tl.load(starts + place, mask=inside, other=0),)
        for step in tl.static_range(STEPS):
            t = T - 1 - first - step
            before = tl.where(t > 0, befores[step], initial)
            if HAS_STARTS:
                before = tl.where(begins[step] != 0, 0.0, before)
            take, keep = sigmoids(gates[step])
            d_h += d_outputs[step]
            place = t * B + row
            d_gate = d_h * take * keep * (candidates[step] - before)
            tl.store(d_terms + place * (2 * F) + feature, d_gate, mask=ok & (t >= 0))
            tl.store(d_terms + place * (2 * F) + F + feature, d_h * take, mask=ok & (t >= 0))
            d_h = tl.where(t >= 0, d_h * keep, d_h)
            if HAS_STARTS:
                d_h = tl.where(begins[step] != 0, 0.0, d_h)
    tl.store(d_state + lane, d_h, mask=ok)


class _MinGRU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: Tensor, starts: Tensor | None, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        hidden, last = terms.new_empty((*terms.shape[:2], state.shape[1]), dtype=dtype), torch.empty_like(state)
        _launch(_scan_forward, terms, starts, state, hidden, last)
        ctx.save_for_backward(terms, starts, state, hidden)
        return hidden, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_hidden: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        terms, starts, state, hidden = ctx.saved_tensors
        d_terms, d_state = torch.empty_like(terms), torch.empty_like(state)
        others = (d_hidden.contiguous(), d_last.contiguous(), d_terms, d_state)
        _launch(_scan_backward, terms, starts, state, hidden, *others)
        return d_terms, None, d_state, None


def _launch(kernel: Any, terms: Tensor, starts: Tensor | None, state: Tensor, *others: Tensor) -> None:
    (length, rows), size = terms.shape[:2], state.shape[1]
    if not state.numel():
        return
    begins = terms if starts is None else starts.view(torch.uint8)
    steps = min(STEPS, triton.next_power_of_2(length))
    with torch.cuda.device_of(terms):
        kernel[(triton.cdiv(state.numel(), LANES),)](
            terms, begins, state, *others, length, rows,
            F=size, LANES=LANES, STEPS=steps, HAS_STARTS=starts is not None, num_warps=WARPS,
        )  # fmt: skip


def _check(terms: Tensor, starts: Tensor | None, state: Tensor) -> None:
    if state.ndim != 2 or terms.ndim != 3 or not len(terms) or terms.shape[1:] != (len(state), 2 * state.shape[1]):
        raise HurtleError(
            f"min_gru takes terms [T, B, 2F] of one step or more and a state [B, F], got {[*terms.shape]} and {[*state.shape]}."
        )
    if starts is not None and (starts.dtype != torch.bool or starts.shape != terms.shape[:2]):
        raise HurtleError(f"starts must be bool {[*terms.shape[:2]]}, got {starts.dtype} {[*starts.shape]}.")
    if terms.dtype not in (torch.float32, torch.bfloat16, torch.float16) or state.dtype != torch.float32:
        raise HurtleError(
            f"min_gru takes terms of float32, bfloat16 or float16 and a float32 state, got {terms.dtype} and {state.dtype}."
        )
