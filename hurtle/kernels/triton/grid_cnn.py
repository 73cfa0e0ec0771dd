"""A small CNN for grids in single kernels: acting, values, and the loss of PPO or A2C with its backward pass, in bfloat16.

observations [H, W, C], weights → actions, log-probs, values; minibatch → gradients. One 3x3 convolution, one linear layer, both
with ReLU, then actor and critic. Features never leave the chip. Knows no env and no optimizer.
"""
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hurtle.kernels.grid_shape import GridCNNShape
from hurtle.kernels.triton.heads import (
    GAMMA,
    choice_logits,
    choice_terms,
    d_choice,
    moments_of,
    normalized,
    policy_terms,
    sample_choice,
    uniform,
    value_terms,
)
from hurtle.kernels.triton.loss import METRICS, LossSettings, Moments, Steps, advantage_moments

PIECE = tl.constexpr(128)
"""Inputs multiplied at a time."""
OUTPUTS = tl.constexpr(16)
"""Logits and the value, padded."""
SPLITS = 16
"""Enough for large minibatches to fill a GPU."""
FORWARD: dict[int, dict[str, Any]] = {
    1: {"B": 128, "num_warps": 8, "num_stages": 3},
    2: {"B": 128, "num_warps": 8, "num_stages": 2},
    3: {"B": 64, "num_warps": 4, "num_stages": 2},
}
"""By the number of pieces, what fits into shared memory: steps of a program, its warps, and weights that are loaded ahead."""
BACKWARD: dict[int, dict[str, Any]] = {
    1: {"B": 128, "num_warps": 8, "num_stages": 2},
    2: {"B": 128, "num_warps": 8, "num_stages": 1},
    3: {"B": 64, "num_warps": 8, "num_stages": 1},
}
FEW_ROWS = 16_384
"""With at most this many rows, blocks of 128 do not fill the GPU."""


@triton.jit
def _cast(x, WIDE: tl.constexpr):
    """An operand of a product: bfloat16, or float32 where there are no products of bfloat16."""
    return x.to(tl.float32) if WIDE else x.to(tl.bfloat16)


@triton.jit
def _pack_kernel(
    weights, bands, linear,
    CONV: tl.constexpr, LINEAR: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    XP: tl.constexpr, N: tl.constexpr, HIDDEN: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The weights as matrices: of the convolution for a row of outputs, [INPUTS, N], and of the linear layer, [H-2, N, HIDDEN].

    Output n = k * XP + x is filter k at column x. The inputs of a row of outputs are three rows of the observation.
    """
    n, own = tl.arange(0, N)[None, :], tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    k, x = n // XP, n % XP
    exists = (k < K) & (x < W - 2)
    if tl.program_id(0) < INPUTS // ROWS:
        ky, column, c = own // (W * C), own // C % W, own % C
        used = exists & (ky < 3) & (column >= x) & (column < x + 3)
        number = tl.load(weights + CONV + (k * C + c) * 9 + ky * 3 + column - x, mask=used, other=0.0)
        tl.store(bands + own * N + n, number.to(bands.dtype.element_ty))
    else:
        y, h = (own - INPUTS) // HIDDEN, (own - INPUTS) % HIDDEN
        feature = (k * (H - 2) + y) * (W - 2) + x
        weight = tl.load(weights + LINEAR + h * (K * (H - 2) * (W - 2)) + feature, mask=exists, other=0.0)
        tl.store(linear + (y * N + n) * HIDDEN + h, weight.to(linear.dtype.element_ty))


@triton.jit
def _inputs(obs, first, ok, y, piece: tl.constexpr, W: tl.constexpr, C: tl.constexpr, INPUTS: tl.constexpr, WIDE: tl.constexpr):
    """A piece of the inputs of the outputs in row y, then a column of ones: [B, PIECE]."""
    j = tl.arange(0, PIECE) + piece * PIECE
    x = tl.load(obs + first[:, None] + (y * (W * C) + j)[None, :], mask=ok[:, None] & (j < 3 * W * C)[None, :], other=0)
    return _cast(tl.where((j == 3 * W * C)[None, :], 1.0, x.to(tl.float32)), WIDE)


@triton.jit
def _band(bands, piece: tl.constexpr, N: tl.constexpr):
    return tl.load(bands + (tl.arange(0, PIECE) + piece * PIECE)[:, None] * N + tl.arange(0, N)[None, :])


@triton.jit
def _forward(
    obs, first, ok, weights, bands, linear,
    CONV_BIAS: tl.constexpr, LINEAR_BIAS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    XP: tl.constexpr, N: tl.constexpr, HIDDEN: tl.constexpr, INPUTS: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The hidden layer of the observations that begin at `first`: [B, HIDDEN]."""
    n, h = tl.arange(0, N), tl.arange(0, HIDDEN)
    b = tl.load(weights + CONV_BIAS + n // XP, mask=n // XP < K, other=0.0)
    matrices = ()
    for piece in tl.static_range(INPUTS // PIECE):
        matrices += (_band(bands, piece, N),)
    sums = tl.zeros((B, HIDDEN), tl.float32)
    for y in range(H - 2):
        z = tl.zeros((B, N), tl.float32)
        for piece in tl.static_range(INPUTS // PIECE):
            z = tl.dot(_inputs(obs, first, ok, y, piece, W, C, INPUTS, WIDE), matrices[piece], z)
        z = tl.maximum(z + b[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)
        w = tl.load(linear + (y * N + n)[:, None] * HIDDEN + h[None, :])
        sums = tl.dot(_cast(z, WIDE), w, sums)
    return tl.maximum(sums + tl.load(weights + LINEAR_BIAS + h)[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _heads(
    weights, ACTOR: tl.constexpr, ACTOR_BIAS: tl.constexpr, CRITIC: tl.constexpr, CRITIC_BIAS: tl.constexpr,
    A: tl.constexpr, HIDDEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Weights [HIDDEN, OUTPUTS] and biases [OUTPUTS] of the logits and, after them, the value."""
    a, h = tl.arange(0, OUTPUTS), tl.arange(0, HIDDEN)
    at = tl.where(a < A, ACTOR + a * HIDDEN, CRITIC)
    w = tl.load(weights + at[None, :] + h[:, None], mask=(a <= A)[None, :], other=0.0)
    b = tl.load(weights + tl.where(a < A, ACTOR_BIAS + a, CRITIC_BIAS), mask=a <= A, other=0.0)
    return _cast(w, WIDE), b


@triton.jit(do_not_specialize=["t"])
def _act_kernel(
    obs, masks, weights, bands, linear, streams, clock, seen, actions, log_probs, values, env_actions, start, t, ROWS,
    CONV_BIAS: tl.constexpr, LINEAR_BIAS: tl.constexpr, ACTOR: tl.constexpr, ACTOR_BIAS: tl.constexpr, CRITIC: tl.constexpr,
    CRITIC_BIAS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, K: tl.constexpr, A: tl.constexpr,
    XP: tl.constexpr, N: tl.constexpr, HIDDEN: tl.constexpr, INPUTS: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute values; choose actions, or take those given if there are no streams, and compute their log-probs."""
    row = tl.program_id(0) * B + tl.arange(0, B)
    ok = row < ROWS
    first = row.to(tl.int64) * (H * W * C)
    if seen is not None:
        for begin in range(0, H * W * C, PIECE):
            j = begin + tl.arange(0, PIECE)
            place, inside = first[:, None] + j[None, :], ok[:, None] & (j < H * W * C)[None, :]
            tl.store(seen + place, tl.load(obs + place, mask=inside, other=0), mask=inside)
    hidden = _forward(
        obs, first, ok, weights, bands, linear, CONV_BIAS, LINEAR_BIAS, H, W, C, K, XP, N, HIDDEN, INPUTS, B, WIDE
    )
    w, b = _heads(weights, ACTOR, ACTOR_BIAS, CRITIC, CRITIC_BIAS, A, HIDDEN, WIDE)
    out = tl.dot(_cast(hidden, WIDE), w) + b[None, :]
    a = tl.arange(0, OUTPUTS)[None, :]
    tl.store(values + row, tl.sum(tl.where(a == A, out, 0.0), 1), mask=ok)
    if actions is not None:
        legal = None
        if masks is not None:
            legal = tl.load(masks + row[:, None] * A + a, mask=ok[:, None] & (a < A), other=0) != 0
        logits = choice_logits(out, a, A, legal, 1)
        if streams is None:
            log_prob, _, _, _, _ = choice_terms(logits, a, tl.load(actions + row, mask=ok, other=0).to(tl.int32), 1)
        else:
            stream = tl.load(streams + row, mask=ok, other=0).to(tl.uint64)
            drawn = uniform(stream + ((tl.load(clock) + t).to(tl.uint64) + 1) * GAMMA)
            chosen, log_prob = sample_choice(logits, a, drawn, 1)
            tl.store(actions + row, chosen.to(tl.int64), mask=ok)
            tl.store(env_actions + row, (chosen + tl.load(start)).to(env_actions.dtype.element_ty), mask=ok)
        tl.store(log_probs + row, log_prob, mask=ok)


@triton.jit
def _loss_kernel(
    obs, order, actions, old_log_probs, old_values, advantages, returns, masks, valid, step_weights, weights, bands, linear,
    moments, num_moments, clip_range, d_hidden, head_partials, stats, COUNT,
    CONV_BIAS: tl.constexpr, LINEAR_BIAS: tl.constexpr, ACTOR: tl.constexpr, ACTOR_BIAS: tl.constexpr, CRITIC: tl.constexpr,
    CRITIC_BIAS: tl.constexpr, VALUE_COEF: tl.constexpr, ENTROPY_COEF: tl.constexpr, CLIPS: tl.constexpr,
    CLIP_VALUES: tl.constexpr, NORMALIZES: tl.constexpr, PADDED: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, K: tl.constexpr, A: tl.constexpr,
    XP: tl.constexpr, N: tl.constexpr, HIDDEN: tl.constexpr, INPUTS: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Forward and loss of a block of steps: gradients of the hidden layer before its ReLU, of the heads, and metrics."""
    place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = place < COUNT
    row = tl.load(order + place, mask=inside, other=0)
    ok = inside
    if valid is not None:
        ok &= tl.load(valid + row, mask=ok, other=0) != 0
    hidden = _forward(
        obs, row * (H * W * C), ok, weights, bands, linear, CONV_BIAS, LINEAR_BIAS, H, W, C, K, XP, N, HIDDEN, INPUTS, B, WIDE
    )
    h = tl.arange(0, HIDDEN)
    w, b = _heads(weights, ACTOR, ACTOR_BIAS, CRITIC, CRITIC_BIAS, A, HIDDEN, WIDE)
    out = tl.dot(_cast(hidden, WIDE), w) + b[None, :]
    a = tl.arange(0, OUTPUTS)[None, :]
    clip = tl.load(clip_range)
    mean, scale, part, nothing = moments_of(moments, num_moments, PADDED, COUNT, NORMALIZES)

    advantage = tl.load(advantages + row, mask=ok, other=0.0)
    if NORMALIZES:
        advantage = normalized(advantage, mean, scale)
    if step_weights is not None:
        advantage *= tl.load(step_weights + place, mask=ok, other=0.0)
    legal = None
    kept = a < A
    if masks is not None:
        legal = tl.load(masks + row[:, None] * A + a, mask=ok[:, None] & (a < A), other=0) != 0
        kept = kept & legal
    logits = choice_logits(out, a, A, legal, 1)
    action = tl.load(actions + row, mask=ok, other=0).to(tl.int32)
    log_prob, entropy, probs, logs, is_action = choice_terms(logits, a, action, 1)
    old_log_prob = tl.load(old_log_probs + row, mask=ok, other=0.0)
    objective, slope, kl, was_clipped = policy_terms(log_prob, old_log_prob, advantage, clip, CLIPS)
    d_entropy = tl.zeros((B,), tl.float32) - ENTROPY_COEF * part
    d = tl.where(kept, d_choice(-part * slope, d_entropy, entropy, probs, logs, is_action, 1), 0.0)
    value, target = tl.sum(tl.where(a == A, out, 0.0), 1), tl.load(returns + row, mask=ok, other=0.0)
    old_value = tl.load(old_values + row, mask=ok, other=0.0) if CLIP_VALUES else target
    square, slope = value_terms(value, old_value, target, clip, CLIP_VALUES)
    d = tl.where(a == A, (VALUE_COEF * part * slope)[:, None], d)
    d = tl.where(ok[:, None], d, 0.0)

    d_h = tl.where(hidden > 0.0, tl.dot(_cast(d, WIDE), tl.trans(w)), 0.0)
    tl.store(d_hidden + place[:, None] * HIDDEN + h[None, :], d_h.to(d_hidden.dtype.element_ty), mask=inside[:, None])
    own = head_partials + tl.program_id(0) * ((HIDDEN + 1) * OUTPUTS + HIDDEN)
    d_w = tl.dot(tl.trans(_cast(hidden, WIDE)), _cast(d, WIDE))
    tl.store(own + h[:, None] * OUTPUTS + a, d_w)
    tl.store(own + HIDDEN * OUTPUTS + tl.arange(0, OUTPUTS), tl.sum(d, 0) + nothing)
    tl.store(own + (HIDDEN + 1) * OUTPUTS + h, tl.sum(d_h, 0))
    programs = tl.num_programs(0)
    own = stats + tl.program_id(0)
    tl.store(own, -part * tl.sum(tl.where(ok, objective, 0.0), 0))
    tl.store(own + programs, 0.5 * part * tl.sum(tl.where(ok, square, 0.0), 0))
    tl.store(own + 2 * programs, part * tl.sum(tl.where(ok, entropy, 0.0), 0))
    tl.store(own + 3 * programs, part * tl.sum(tl.where(ok, kl, 0.0), 0))
    tl.store(own + 4 * programs, part * tl.sum(tl.where(ok, was_clipped, 0.0), 0))


@triton.jit
def _backward_kernel(
    obs, order, valid, weights, bands, linear, d_hidden, partials, band_partials, COUNT, SIZE,
    CONV_BIAS: tl.constexpr, LINEAR: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    XP: tl.constexpr, N: tl.constexpr, HIDDEN: tl.constexpr, INPUTS: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of the linear layer's weights for the features of row y, and of the convolution's for a piece of its inputs."""
    s, y, own_piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, h = tl.arange(0, N), tl.arange(0, HIDDEN)
    b = tl.load(weights + CONV_BIAS + n // XP, mask=n // XP < K, other=0.0)
    w = tl.load(linear + (y * N + n)[:, None] * HIDDEN + h[None, :])
    matrices = ()
    for piece in tl.static_range(INPUTS // PIECE):
        matrices += (_band(bands, piece, N),)
    d_w, d_band = tl.zeros((N, HIDDEN), tl.float32), tl.zeros((PIECE, N), tl.float32)
    for block in range(s, tl.cdiv(COUNT, B), tl.num_programs(0)):
        place = block * B + tl.arange(0, B).to(tl.int64)
        ok = place < COUNT
        row = tl.load(order + place, mask=ok, other=0)
        d = tl.load(d_hidden + place[:, None] * HIDDEN + h[None, :], mask=ok[:, None], other=0.0)
        if valid is not None:
            ok &= tl.load(valid + row, mask=ok, other=0) != 0
        z = tl.zeros((B, N), tl.float32)
        own = _inputs(obs, row * (H * W * C), ok, y, 0, W, C, INPUTS, WIDE)
        z = tl.dot(own, matrices[0], z)
        for piece in tl.static_range(1, INPUTS // PIECE):
            x = _inputs(obs, row * (H * W * C), ok, y, piece, W, C, INPUTS, WIDE)
            z = tl.dot(x, matrices[piece], z)
            own = x if own_piece == piece else own
        z = z + b[None, :]
        d_w = tl.dot(tl.trans(_cast(tl.maximum(z, 0.0), WIDE)), d, d_w)
        d_z = tl.where(z > 0.0, tl.dot(d, tl.trans(w)), 0.0)
        d_band = tl.dot(tl.trans(own), _cast(d_z, WIDE), d_band)
    k, x = n // XP, n % XP
    at = LINEAR + h[None, :] * (K * (H - 2) * (W - 2)) + ((k * (H - 2) + y) * (W - 2) + x)[:, None]
    mine = (k < K) & (x < W - 2) & (own_piece == 0)
    tl.store(partials + s * SIZE + at, d_w, mask=mine[:, None])
    j = tl.arange(0, PIECE) + own_piece * PIECE
    own = band_partials + ((s * (H - 2) + y) * INPUTS + j)[:, None] * N
    tl.store(own + n[None, :], d_band)


@triton.jit
def _reduce_kernel(
    band_partials, num_bands, head_partials, num_heads, partials,
    CONV: tl.constexpr, CONV_BIAS: tl.constexpr, LINEAR_BIAS: tl.constexpr, ACTOR: tl.constexpr, ACTOR_BIAS: tl.constexpr,
    CRITIC: tl.constexpr, CRITIC_BIAS: tl.constexpr, W: tl.constexpr, C: tl.constexpr, K: tl.constexpr, A: tl.constexpr,
    XP: tl.constexpr, N: tl.constexpr, HIDDEN: tl.constexpr, INPUTS: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Sums over programs: one weight of all filters, their biases, or a block of the heads' numbers, by program."""
    p, n, turn = tl.program_id(0), tl.arange(0, N), tl.arange(0, TURN)
    k, x = n // XP, n % XP
    if p <= 9 * C:
        c, ky, kx = p % C, p // C // 3, p // C % 3
        j = tl.where(p < 9 * C, ky * (W * C) + (x + kx) * C + c, 3 * W * C)
        exists = (k < K) & (x < W - 2)
        total = tl.zeros((TURN, N), tl.float32)
        for first in range(0, num_bands, TURN):
            band = first + turn
            there = (band < num_bands)[:, None] & exists[None, :]
            total += tl.load(band_partials + (band[:, None] * INPUTS + j[None, :]) * N + n[None, :], mask=there, other=0.0)
        found = tl.sum(tl.reshape(tl.sum(total, 0), (N // XP, XP)), 1)
        own = tl.arange(0, N // XP)
        at = tl.where(p < 9 * C, CONV + (own * C + c) * 9 + ky * 3 + kx, CONV_BIAS + own)
        tl.store(partials + at, found, mask=own < K)
    else:
        SIZE: tl.constexpr = (HIDDEN + 1) * OUTPUTS + HIDDEN
        i = (p - 9 * C - 1) * N + n
        sums = tl.zeros((TURN, N), tl.float32)
        for first in range(0, num_heads, TURN):
            head = first + turn
            there = (head < num_heads)[:, None] & (i < SIZE)[None, :]
            sums += tl.load(head_partials + head[:, None] * SIZE + i[None, :], mask=there, other=0.0)
        a, h = i % OUTPUTS, i // OUTPUTS
        weight = tl.where(a < A, ACTOR + a * HIDDEN + h, CRITIC + h)
        bias = tl.where(a < A, ACTOR_BIAS + a, CRITIC_BIAS)
        hidden_bias = LINEAR_BIAS + i - (HIDDEN + 1) * OUTPUTS
        place = tl.where(h < HIDDEN, weight, tl.where(i < (HIDDEN + 1) * OUTPUTS, bias, hidden_bias))
        tl.store(partials + place, tl.sum(sums, 0), mask=(i < SIZE) & ((i >= (HIDDEN + 1) * OUTPUTS) | (a <= A)))


class FusedGridCNN:
    """The kernels of one policy; the interface is that of `FusedMLP`.

    Args:
        shape: The shape of the policy.
        weights: All its parameters, flat, as in `FlatParameters`.
        splits: Parts of a minibatch whose gradients are summed separately.
    """

    acts_with_values, precision = True, "bf16"

    def __init__(self, shape: GridCNNShape, weights: Tensor, splits: int = SPLITS):
        self.shape, self.weights, self._splits = shape, weights, splits
        wide = triton.knobs.runtime.interpret  # Triton's interpreter cannot multiply bfloat16
        dtype, device = torch.float32 if wide else torch.bfloat16, weights.device
        depth, across = shape.height - 2, triton.next_power_of_2(shape.columns - 2)
        outputs = across * max(16, triton.next_power_of_2(shape.filters))
        pieces = triton.cdiv(3 * shape.columns * shape.channels + 1, PIECE.value)
        inputs = pieces * PIECE.value
        self._sizes = {
            "H": shape.height, "W": shape.columns, "C": shape.channels, "K": shape.filters, "XP": across, "N": outputs,
            "HIDDEN": shape.hidden, "INPUTS": inputs,
        }  # fmt: skip
        names = ("CONV", "CONV_BIAS", "LINEAR", "LINEAR_BIAS", "ACTOR", "ACTOR_BIAS", "CRITIC", "CRITIC_BIAS")
        self._at = dict(zip(names, shape.offsets, strict=True))
        self._forward: dict[str, Any] = {k: v for k, v in self._at.items() if k not in ("CONV", "LINEAR")}
        self._forward |= {**self._sizes, "A": shape.outputs, "WIDE": wide}
        self._forward_block, self._backward = FORWARD[pieces], {**BACKWARD[pieces], "WIDE": wide}
        self._bands = torch.zeros(inputs, outputs, dtype=dtype, device=device)
        self._linear = torch.zeros(depth, outputs, shape.hidden, dtype=dtype, device=device)
        self.partials = torch.zeros(splits, shape.size, device=device)
        self._band_partials = torch.zeros(splits * depth, inputs, outputs, device=device)

    def refresh(self) -> None:
        """Take over the weights; `act` and `values` use those of the last time."""
        rows, at = 16, {name: self._at[name] for name in ("CONV", "LINEAR")}
        programs = (len(self._bands) + self.shape.hidden * len(self._linear)) // rows
        _pack_kernel[(programs,)](self.weights, self._bands, self._linear, **at, **self._sizes, ROWS=rows)

    def act(
        self,
        obs: Tensor,
        streams: Tensor,
        clock: Tensor,
        t: int,
        seen: Tensor,
        actions: Tensor,
        log_probs: Tensor,
        values: Tensor,
        env_actions: Tensor,
        bounds: tuple[Tensor, ...],
        normalizer: None = None,
        masks: Tensor | None = None,
    ) -> None:
        """Choose actions for all rows; see `FusedMLP.act`. Also computes their values."""
        self._run(obs, values, masks, streams, clock, seen.view_as(obs), actions, log_probs, env_actions, bounds[0], t)

    def values(self, seen: Tensor, out: Tensor) -> None:
        """Values of observations, [N, …] → [N]."""
        self._run(seen, out)

    def judge(self, seen: Tensor, actions: Tensor, masks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-probs of given actions and values, with the newest weights; see `FusedMLP.judge`."""
        self.refresh()
        log_probs, values = torch.empty(2, len(seen), device=self.weights.device).unbind()
        self._run(seen, values, masks, actions=actions, log_probs=log_probs)
        return log_probs, values

    def _run(
        self,
        obs: Tensor,
        values: Tensor,
        masks: Tensor | None = None,
        streams: Tensor | None = None,
        clock: Tensor | None = None,
        seen: Tensor | None = None,
        actions: Tensor | None = None,
        log_probs: Tensor | None = None,
        env_actions: Tensor | None = None,
        start: Tensor | None = None,
        t: int = 0,
    ) -> None:
        rows, block = values.numel(), self._forward_block
        if rows <= FEW_ROWS:
            block = FORWARD[max(FORWARD)]
        _act_kernel[(triton.cdiv(rows, block["B"]),)](
            _bytes(obs), masks, self.weights, self._bands, self._linear, streams, clock, None if seen is None else _bytes(seen),
            actions, log_probs, values, env_actions, start, t, rows, **self._forward, **block,
        )  # fmt: skip

    def begin(self, steps: Steps, settings: LossSettings) -> None:
        """Take over a rollout, flat; minibatches are drawn from it until the next call."""
        self._steps, self._settings = steps, settings

    def gradients(self, order: Tensor, clip_range: Tensor, step_weights: Tensor | None = None) -> tuple[Tensor, Moments]:
        """Compute the gradients of one minibatch into `partials`; see `FusedMLP.gradients`."""
        steps, settings, sizes, count = self._steps, self._settings, self._sizes, len(order)
        device, block = self.weights.device, self._forward_block
        self.refresh()
        moments = advantage_moments(steps.advantages, order, steps.valid, settings.normalize_advantages)
        blocks, width = triton.cdiv(count, block["B"]), (self.shape.hidden + 1) * OUTPUTS.value + self.shape.hidden
        d_hidden = torch.empty(count, self.shape.hidden, dtype=self._linear.dtype, device=device)
        heads, stats = torch.empty(blocks, width, device=device), torch.empty(METRICS.value, blocks, device=device)
        obs = _bytes(steps.obs)
        _loss_kernel[(blocks,)](
            obs, order, steps.actions, steps.log_probs, steps.values, steps.advantages, steps.returns, steps.masks, steps.valid,
            step_weights, self.weights, self._bands, self._linear, moments.sums, moments.used, clip_range, d_hidden, heads,
            stats, count, VALUE_COEF=settings.value_coef, ENTROPY_COEF=settings.entropy_coef,
            CLIPS=settings.clips, CLIP_VALUES=settings.clip_values, NORMALIZES=settings.normalize_advantages,
            PADDED=moments.padded,
            **self._forward, **block,
        )  # fmt: skip
        _backward_kernel[(self._splits, len(self._linear), len(self._bands) // PIECE.value)](
            obs, order, steps.valid, self.weights, self._bands, self._linear, d_hidden, self.partials, self._band_partials,
            count, self.shape.size, CONV_BIAS=self._at["CONV_BIAS"], LINEAR=self._at["LINEAR"], **sizes, **self._backward,
        )  # fmt: skip
        programs = 9 * self.shape.channels + 1 + triton.cdiv(width, sizes["N"])
        _reduce_kernel[(programs,)](
            self._band_partials, len(self._band_partials), heads, blocks, self.partials,
            **{name: at for name, at in self._at.items() if name != "LINEAR"},
            **{name: size for name, size in sizes.items() if name != "H"}, A=self.shape.outputs, TURN=32,
        )  # fmt: skip
        return stats, moments


def _bytes(tensor: Tensor) -> Tensor:
    """Bools as bytes, since kernels do not multiply bools; anything else unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
