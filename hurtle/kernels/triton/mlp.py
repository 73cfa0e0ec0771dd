"""Small MLPs in single kernels: acting (forward, sampling, log-prob), values, and the loss of PPO or A2C with its gradients.

observations, weights → actions, log-probs, values; minibatch → gradients. Two hidden layers of one width, separate actor
and critic; weights are read once per program and kept in registers. The last axis of a grid are seeds, each with weights and
rows of its own. Knows no env and no optimizer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hurtle.kernels.mlp_shape import MLPShape
from hurtle.kernels.triton.functions import tanh
from hurtle.kernels.triton.heads import (
    GAMMA,
    HALF_LOG_2PI,
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

PROGRAMS_PER_UNIT = 4
"""Persistent programs of the gradient kernel per multiprocessor of the GPU."""
RECORD = 8
"""Records are padded to a multiple of this many numbers: memory moves 32 bytes at a time."""
PRECISIONS = {"float32": 0, "tf32": 1, "bf16": 2}


@triton.jit
def _activation(x, RELU: tl.constexpr, FAST: tl.constexpr):
    if RELU:
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif FAST:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tanh(x)
    return y


@triton.jit
def _slope(y, RELU: tl.constexpr):
    """The slope of the activation, from its result."""
    return tl.where(y > 0.0, 1.0, 0.0) if RELU else 1.0 - y * y


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if PRECISION == 2:
        product = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif PRECISION == 1:
        product = tl.dot(a, b, input_precision="tf32")
    else:
        product = tl.dot(a, b, input_precision="ieee")
    return product


@triton.jit
def _operand(x, PRECISION: tl.constexpr):
    """An operand of a matrix product. TF32 units truncate; numbers that are rounded first have errors that cancel."""
    if PRECISION == 1:
        rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)  # a GPU's NaN, 0x7fffffff, would become 0
    return x


@triton.jit
def _hidden(
    x, weights, W1, B1, W2, B2,
    D: tl.constexpr, DP: tl.constexpr, H: tl.constexpr, RELU: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both hidden layers; weights are in torch's layout [outputs, inputs]."""
    rd, rh, rk = tl.arange(0, DP), tl.arange(0, H), tl.arange(0, H)
    w1 = _operand(tl.load(weights + W1 + rh[None, :] * D + rd[:, None], mask=rd[:, None] < D, other=0.0), PRECISION)
    z1 = _dot(_operand(x, PRECISION), w1, PRECISION) + tl.load(weights + B1 + rh)[None, :]
    h1 = _operand(_activation(z1, RELU, FAST), PRECISION)
    w2 = _operand(tl.load(weights + W2 + rh[None, :] * H + rk[:, None]), PRECISION)
    z2 = _dot(h1, w2, PRECISION) + tl.load(weights + B2 + rh)[None, :]
    return _operand(_activation(z2, RELU, FAST), PRECISION)


@triton.jit(do_not_specialize=["t"])
def _act_kernel(
    obs, masks, weights, streams, clock, seen, actions, log_probs, env_actions, start, low, high, mean, std, clip, t, N, SIZE,
    W1: tl.constexpr, B1: tl.constexpr, W2: tl.constexpr, B2: tl.constexpr, W3: tl.constexpr, B3: tl.constexpr,
    LOG_STD: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, H: tl.constexpr, A: tl.constexpr, AP: tl.constexpr,
    B: tl.constexpr, RELU: tl.constexpr, GAUSSIAN: tl.constexpr, NORMALIZED: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Choose actions, or take those given if there are no streams, and compute their log-probs."""
    row, seed = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1)
    if streams is None:
        row = row.to(tl.int64)  # of a minibatch, which may be large
    ok = row < N
    row, weights = row + seed * N, weights + seed * SIZE
    rd, rh, ra = tl.arange(0, DP), tl.arange(0, H), tl.arange(0, AP)
    inside = ok[:, None] & (rd[None, :] < D)
    x = tl.load(obs + row[:, None] * D + rd[None, :], mask=inside, other=0.0)
    if NORMALIZED:
        middle = tl.load(mean + seed * D + rd, mask=rd < D, other=0.0)
        spread = tl.load(std + seed * D + rd, mask=rd < D, other=1.0)
        z = (x.to(tl.float64) - middle[None, :]) / spread[None, :]
        z = tl.maximum(z, -clip, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(z, clip, propagate_nan=tl.PropagateNan.ALL).to(tl.float32)
        x = tl.where(inside, x, 0.0)
    if seen is not None:
        tl.store(seen + row[:, None] * D + rd[None, :], x, mask=inside)
    h = _hidden(x, weights, W1, B1, W2, B2, D, DP, H, RELU, FAST, PRECISION)
    w3 = _operand(tl.load(weights + W3 + ra[None, :] * H + rh[:, None], mask=ra[None, :] < A, other=0.0), PRECISION)
    out = _dot(h, w3, PRECISION) + tl.load(weights + B3 + ra, mask=ra < A, other=0.0)[None, :]
    if streams is not None:
        stream = tl.load(streams + row, mask=ok, other=0).to(tl.uint64)
        drawn = (tl.load(clock) + t).to(tl.uint64)
    real = ra[None, :] < A
    if GAUSSIAN:
        log_std = tl.load(weights + LOG_STD + ra, mask=ra < A, other=0.0)
        place = row[:, None] * A + ra[None, :]
        if streams is None:
            action = tl.load(actions + place, mask=ok[:, None] & real, other=0.0)
        else:
            k = ra.to(tl.uint64)
            first = stream[:, None] + (drawn * (2 * A) + 2 * k + 1)[None, :] * GAMMA
            radius = tl.sqrt(-2.0 * tl.log(1.0 - uniform(first)))
            normal = radius * tl.cos(6.283185307179586 * uniform(first + GAMMA))
            action = out + tl.exp(log_std)[None, :] * normal
            bounded = tl.maximum(action, tl.load(low + ra, mask=ra < A, other=0.0)[None, :])
            bounded = tl.minimum(bounded, tl.load(high + ra, mask=ra < A, other=0.0)[None, :])
            tl.store(actions + place, action, mask=ok[:, None] & real)
            tl.store(env_actions + place, bounded, mask=ok[:, None] & real)
        off = (action - out) * tl.exp(-log_std)[None, :]
        log_prob = tl.sum(tl.where(real, -0.5 * off * off - log_std[None, :] - HALF_LOG_2PI, 0.0), 1)
    else:
        legal = None
        if masks is not None:
            legal = tl.load(masks + row[:, None] * A + ra[None, :], mask=ok[:, None] & real, other=0) != 0
        logits = choice_logits(out, ra[None, :], A, legal, 1)
        if streams is None:
            chosen = tl.load(actions + row, mask=ok, other=0).to(tl.int32)
            log_prob, _, _, _, _ = choice_terms(logits, ra[None, :], chosen, 1)
        else:
            chosen, log_prob = sample_choice(logits, ra[None, :], uniform(stream + (drawn + 1) * GAMMA), 1)
            tl.store(actions + row, chosen.to(tl.int64), mask=ok)
            tl.store(env_actions + row, (chosen + tl.load(start)).to(env_actions.dtype.element_ty), mask=ok)
    tl.store(log_probs + row, log_prob, mask=ok)


@triton.jit
def _value_kernel(
    obs, weights, values, N, EACH, SIZE,
    W1: tl.constexpr, B1: tl.constexpr, W2: tl.constexpr, B2: tl.constexpr, W3: tl.constexpr, B3: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, H: tl.constexpr, B: tl.constexpr, RELU: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Values of N observations of each seed, EACH of which follow each other before the next seed's."""
    rd, rh, rk, rb = tl.arange(0, DP), tl.arange(0, H), tl.arange(0, H), tl.arange(0, B)
    seed, seeds = tl.program_id(1), tl.num_programs(1)
    weights += seed * SIZE
    w1 = _operand(tl.load(weights + W1 + rh[None, :] * D + rd[:, None], mask=rd[:, None] < D, other=0.0), PRECISION)
    w2 = _operand(tl.load(weights + W2 + rh[None, :] * H + rk[:, None]), PRECISION)
    b1, b2 = tl.load(weights + B1 + rh), tl.load(weights + B2 + rh)
    w3, b3 = tl.load(weights + W3 + rh), tl.load(weights + B3)
    for block in range(tl.program_id(0), tl.cdiv(N, B), tl.num_programs(0)):
        row = block * B + rb.to(tl.int64)
        ok = row < N
        row += (row // EACH * (seeds - 1) + seed) * EACH
        x = tl.load(obs + row[:, None] * D + rd[None, :], mask=ok[:, None] & (rd[None, :] < D), other=0.0)
        h1 = _activation(_dot(_operand(x, PRECISION), w1, PRECISION) + b1[None, :], RELU, FAST)
        h2 = _activation(_dot(_operand(h1, PRECISION), w2, PRECISION) + b2[None, :], RELU, FAST)
        tl.store(values + row, tl.sum(h2 * w3[None, :], 1) + b3, mask=ok)


@triton.jit
def _record_kernel(
    obs, actions, log_probs, values, advantages, returns, records, N,
    D: tl.constexpr, A: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, B: tl.constexpr, WITH_VALUES: tl.constexpr,
):  # fmt: skip
    """All that the loss needs of a step side by side, since minibatches gather random steps: [N, R]."""
    row = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    ok, r = (row < N)[:, None], tl.arange(0, RP)[None, :]
    record = tl.load(obs + row[:, None] * D + r, mask=ok & (r < D), other=0.0)
    action = tl.load(actions + row[:, None] * A + r - (D + 3), mask=ok & (r >= D + 3) & (r < D + 3 + A), other=0)
    record = tl.where(r < D + 3, record, action.to(tl.float32))
    record = tl.where(r == D, tl.load(log_probs + row, mask=row < N, other=0.0)[:, None], record)
    record = tl.where(r == D + 1, tl.load(advantages + row, mask=row < N, other=0.0)[:, None], record)
    record = tl.where(r == D + 2, tl.load(returns + row, mask=row < N, other=0.0)[:, None], record)
    if WITH_VALUES:
        record = tl.where(r == D + 3 + A, tl.load(values + row, mask=row < N, other=0.0)[:, None], record)
    tl.store(records + row[:, None] * R + r, record, mask=ok & (r < R))


@triton.jit
def _gradient_kernel(
    records, order, masks, valid, step_weights, weights, moments, num_moments, clip_range, goes_on, partials, stats, N, STRIDE,
    SIZE, AW1: tl.constexpr, AB1: tl.constexpr, AW2: tl.constexpr, AB2: tl.constexpr, AW3: tl.constexpr, AB3: tl.constexpr,
    CW1: tl.constexpr, CB1: tl.constexpr, CW2: tl.constexpr, CB2: tl.constexpr, CW3: tl.constexpr, CB3: tl.constexpr,
    LOG_STD: tl.constexpr, VALUE_COEF: tl.constexpr, ENTROPY_COEF: tl.constexpr, CLIPS: tl.constexpr,
    CLIP_VALUES: tl.constexpr, NORMALIZES: tl.constexpr, PADDED: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, H: tl.constexpr, A: tl.constexpr, AP: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
    RELU: tl.constexpr, GAUSSIAN: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a program's steps for the actor or the critic.

    Activations are [features, steps]: every one is an operand as it comes from the product before. Gradients of biases are
    products with a row of ones below the inputs.
    """
    p, P, is_critic = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    seed, METRIC = tl.program_id(2), P * tl.num_programs(2)
    order, weights, stats = order + seed * STRIDE, weights + seed * SIZE, stats + seed * P
    if moments is not None:
        moments += seed * 3 * PADDED
    rd, rh, rk, ra, rb = tl.arange(0, DP), tl.arange(0, H), tl.arange(0, H), tl.arange(0, AP), tl.arange(0, B)
    W1, B1 = AW1 + is_critic * (CW1 - AW1), AB1 + is_critic * (CB1 - AB1)
    W2, B2 = AW2 + is_critic * (CW2 - AW2), AB2 + is_critic * (CB2 - AB2)
    W3, B3 = AW3 + is_critic * (CW3 - AW3), AB3 + is_critic * (CB3 - AB3)
    real = ra < A + is_critic * (1 - A)
    w1 = _operand(tl.load(weights + W1 + rh[:, None] * D + rd[None, :], mask=rd[None, :] < D, other=0.0), PRECISION)
    w2 = _operand(tl.load(weights + W2 + rh[:, None] * H + rk[None, :]), PRECISION)
    w3 = _operand(tl.load(weights + W3 + ra[:, None] * H + rh[None, :], mask=real[:, None], other=0.0), PRECISION)
    w2t = _operand(tl.load(weights + W2 + rk[None, :] * H + rh[:, None]), PRECISION)
    w3t = _operand(tl.load(weights + W3 + ra[None, :] * H + rh[:, None], mask=real[None, :], other=0.0), PRECISION)
    b1, b2 = tl.load(weights + B1 + rh), tl.load(weights + B2 + rh)
    b3 = tl.load(weights + B3 + ra, mask=real, other=0.0)
    dw1, dw2, dw3 = tl.zeros((H, DP), tl.float32), tl.zeros((H, H), tl.float32), tl.zeros((H, AP), tl.float32)
    db2, db3 = tl.zeros((H, DP), tl.float32), tl.zeros((AP, B), tl.float32)
    d_log_std = tl.zeros((AP, B), tl.float32)
    losses, entropies = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
    kls, clipped = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
    clip = tl.load(clip_range)
    mean, scale, part, nothing = moments_of(moments, num_moments, PADDED, N, NORMALIZES)
    if goes_on is not None:
        nothing = tl.where(tl.load(goes_on + seed) != 0, nothing, float("nan"))
    log_std = tl.load(weights + LOG_STD + ra, mask=ra < A, other=0.0) if GAUSSIAN else tl.zeros((AP,), tl.float32)
    a = ra[:, None]
    for block in range(p, tl.cdiv(N, B), P):
        place = block * B + rb
        ok = place < N
        row = tl.load(order + place, mask=ok, other=0)
        if valid is not None:
            ok &= tl.load(valid + row, mask=ok, other=0) != 0
        own = records + row * R
        x = tl.load(own[None, :] + rd[:, None], mask=ok[None, :] & (rd[:, None] < D), other=0.0)
        x = _operand(tl.where(rd[:, None] == D, 1.0, x), PRECISION)
        h1 = _operand(_activation(_dot(w1, x, PRECISION) + b1[:, None], RELU, FAST), PRECISION)
        h2 = _operand(_activation(_dot(w2, h1, PRECISION) + b2[:, None], RELU, FAST), PRECISION)
        out = _dot(w3, h2, PRECISION) + b3[:, None]
        if is_critic == 1:
            value = tl.sum(tl.where(a == 0, out, 0.0), 0)
            target = tl.load(own + D + 2, mask=ok, other=0.0)
            old_value = tl.load(own + D + 3 + (A if GAUSSIAN else 1), mask=ok, other=0.0) if CLIP_VALUES else target
            square, slope = value_terms(value, old_value, target, clip, CLIP_VALUES)
            losses += tl.where(ok, 0.5 * square, 0.0)
            d3 = tl.where(ok[None, :] & (a == 0), (VALUE_COEF * part * slope)[None, :], 0.0)
        else:
            advantage = tl.load(own + D + 1, mask=ok, other=0.0)
            if NORMALIZES:
                advantage = normalized(advantage, mean, scale)
            if step_weights is not None:
                advantage *= tl.load(step_weights + place, mask=ok, other=0.0)
            old_log_prob = tl.load(own + D, mask=ok, other=0.0)
            if GAUSSIAN:
                action = tl.load(own[None, :] + D + 3 + a, mask=ok[None, :] & real[:, None], other=0.0)
                off = (action - out) * tl.exp(-log_std)[:, None]
                log_prob = tl.sum(tl.where(real[:, None], -0.5 * off * off - log_std[:, None] - HALF_LOG_2PI, 0.0), 0)
                entropy = tl.zeros((B,), tl.float32) + tl.sum(tl.where(real, log_std + 0.5 + HALF_LOG_2PI, 0.0), 0)
            else:
                action = tl.load(own + D + 3, mask=ok, other=0.0).to(tl.int32)
                legal = None
                if masks is not None:
                    legal = tl.load(masks + row[None, :] * A + a, mask=ok[None, :] & real[:, None], other=0) != 0
                logits = choice_logits(out, a, A, legal, 0)
                log_prob, entropy, probs, logs, is_action = choice_terms(logits, a, action, 0)
            objective, slope, kl, was_clipped = policy_terms(log_prob, old_log_prob, advantage, clip, CLIPS)
            losses -= tl.where(ok, objective, 0.0)
            entropies += tl.where(ok, entropy, 0.0)
            kls += tl.where(ok, kl, 0.0)
            clipped += tl.where(ok, was_clipped, 0.0)
            slope = -part * slope
            kept = ok[None, :] & real[:, None]
            if GAUSSIAN:
                d3 = slope[None, :] * off * tl.exp(-log_std)[:, None]
                d_log_std += tl.where(kept, slope[None, :] * (off * off - 1.0) - ENTROPY_COEF * part, 0.0)
            else:
                d3 = d_choice(slope, tl.zeros((B,), tl.float32) - ENTROPY_COEF * part, entropy, probs, logs, is_action, 0)
                if masks is not None:
                    kept &= legal
            d3 = tl.where(kept, d3, 0.0)
        db3 += d3
        d3 = _operand(d3, PRECISION)
        dw3 += _dot(h2, tl.trans(d3), PRECISION)
        d2 = _operand(_dot(w3t, d3, PRECISION) * _slope(h2, RELU), PRECISION)
        db2 += _dot(d2, tl.trans(x), PRECISION)
        dw2 += _dot(d2, tl.trans(h1), PRECISION)
        d1 = _operand(_dot(w2t, d2, PRECISION) * _slope(h1, RELU), PRECISION)
        dw1 += _dot(d1, tl.trans(x), PRECISION)
    into = partials + (seed * P + p) * SIZE
    tl.store(into + W1 + rh[:, None] * D + rd[None, :], dw1, mask=rd[None, :] < D)
    tl.store(into + W2 + rh[:, None] * H + rk[None, :], dw2)
    tl.store(into + W3 + ra[None, :] * H + rh[:, None], dw3, mask=real[None, :])
    tl.store(into + B1 + rh, tl.sum(tl.where(rd[None, :] == D, dw1, 0.0), 1))
    tl.store(into + B2 + rh, tl.sum(tl.where(rd[None, :] == D, db2, 0.0), 1))
    tl.store(into + B3 + ra, tl.sum(db3, 1) + nothing, mask=real)
    if is_critic == 1:
        tl.store(stats + METRIC + p, part * tl.sum(losses, 0))
    else:
        if GAUSSIAN:
            tl.store(into + LOG_STD + ra, tl.sum(d_log_std, 1), mask=real)
        tl.store(stats + p, part * tl.sum(losses, 0))
        tl.store(stats + 2 * METRIC + p, part * tl.sum(entropies, 0))
        tl.store(stats + 3 * METRIC + p, part * tl.sum(kls, 0))
        tl.store(stats + 4 * METRIC + p, part * tl.sum(clipped, 0))


class FusedMLP:
    """The kernels of one policy, or of the policies of several seeds, which share the rows evenly, in their order.

    Args:
        shape: The shape of the policy.
        weights: All its parameters, flat, as in `FlatParameters`; or a row for each seed, as in `FlatRows`.
        precision: Precision of the matrix products: "float32", "tf32" or "bf16" (some shapes run in tf32); sums are float32.
            With bf16, tanh is the GPU's own, accurate to 2^-11.
        clips: Whether the loss is PPO's, see `LossSettings`.

    Attributes:
        precision: The precision in use.
        partials: Gradients of the last minibatch, to be summed over the programs. [P, size] or [seeds, P, size]
        acts_with_values: Whether `act` computes values as well.
    """

    acts_with_values = False

    def __init__(self, shape: MLPShape, weights: Tensor, precision: str = "float32", clips: bool = True):
        self.shape, self.weights, self._clips = shape, weights, clips
        if precision == "bf16" and (not clips or (shape.gaussian and shape.hidden > 32)):
            # Triton 3.6 compiles one of the gradient kernel's products to a WGMMA instruction that reads beyond shared memory
            # (found by compute-sanitizer on an H200, and by gradients of 1e4 or NaN; DISABLE_MMA_V3=1 mends it, too).
            precision = "tf32"
        self.precision, self._precision = precision, PRECISIONS[precision]
        self._common: dict[str, Any] = {
            "D": shape.inputs,
            "DP": max(16, triton.next_power_of_2(shape.inputs)),
            "H": shape.hidden,
            "RELU": shape.relu,
            "FAST": precision == "bf16" and weights.is_cuda,
            "PRECISION": self._precision,
        }
        self._with_ones = {**self._common, "DP": max(16, triton.next_power_of_2(shape.inputs + 1))}
        units = torch.cuda.get_device_properties(weights.device).multi_processor_count if weights.is_cuda else 1
        wide = self._precision == 2 and shape.hidden <= 64
        self._block = 64 if wide else 32
        lead = weights.shape[:-1]
        self._seeds = math.prod(lead)
        self.programs = max(1, (2 if wide else PROGRAMS_PER_UNIT) * units // self._seeds)
        self._value_programs = max(1, 8 * units // self._seeds)
        names = ("W1", "B1", "W2", "B2", "W3", "B3")
        self._actor = dict(zip(names, shape.offsets[:6], strict=True))
        self._critic = dict(zip(names, shape.offsets[6:12], strict=True))
        self._both = {f"A{name}": at for name, at in self._actor.items()} | {
            f"C{name}": at for name, at in self._critic.items()
        }
        self.partials = torch.zeros(*lead, self.programs, shape.size, device=weights.device)
        self._stats = torch.zeros(METRICS.value, *lead, self.programs, device=weights.device)
        self._records = self._none = torch.zeros(1, device=weights.device)

    def refresh(self) -> None:
        """Take over the weights; these kernels read them wherever they need them."""

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
        normalizer: tuple[Tensor, Tensor, float] | None = None,
        masks: Tensor | None = None,
    ) -> None:
        """Choose actions for all rows.

        Args:
            obs: The envs' observations, float32 [N, …].
            streams: The rows' random streams, int64 [N].
            clock: Number of steps before this rollout, int64 [1].
            t: The step of this rollout.
            seen: Output: the observations that the policy saw. [N, …]
            actions: Output: raw actions. [N] or [N, A]
            log_probs: Output. [N]
            values: Output, if these kernels act with values. [N]
            env_actions: Output: the envs' actions. [N] or [N, A]
            bounds: The first action (int64 [1]), or lower and upper bounds (float32 [A] each).
            normalizer: Mean, standard deviation (float64 [D] each, or [seeds * D]) and bound of normalized observations.
            masks: Legal choices, bool [N, A].
        """
        self._act(obs, masks, actions, log_probs, streams, clock, t, seen, env_actions, bounds, normalizer)

    def judge(self, seen: Tensor, actions: Tensor, masks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What the policy as it is now says of steps.

        Args:
            seen: Observations as the policy sees them. [N, …]
            actions: Raw actions. [N] or [N, A]
            masks: Legal choices, bool [N, A].

        Returns:
            Log-probs of the actions, and values. [N], [N]
        """
        log_probs, values = torch.empty(2, len(seen), device=self.weights.device).unbind()
        self._act(seen, masks, actions, log_probs)
        self.values(seen, values)
        return log_probs, values

    def _act(
        self,
        obs: Tensor,
        masks: Tensor | None,
        actions: Tensor,
        log_probs: Tensor,
        streams: Tensor | None = None,
        clock: Tensor | None = None,
        t: int = 0,
        seen: Tensor | None = None,
        env_actions: Tensor | None = None,
        bounds: tuple[Tensor, ...] | None = None,
        normalizer: tuple[Tensor, Tensor, float] | None = None,
    ) -> None:
        shape, rows = self.shape, len(log_probs) // self._seeds
        start = low = high = self._none
        if bounds is not None and shape.gaussian:
            low, high = bounds
        elif bounds is not None:
            (start,) = bounds
        mean, std, clip = normalizer or (self._none, self._none, 0.0)
        block = 64 if shape.hidden <= 64 else 32
        _act_kernel[(triton.cdiv(rows, block), self._seeds)](
            obs, masks, self.weights, streams, clock, seen, actions, log_probs, env_actions, start, low, high, mean, std, clip,
            t, rows, shape.size, **self._actor, LOG_STD=shape.offsets[12], A=shape.outputs, AP=16, B=block,
            GAUSSIAN=shape.gaussian, NORMALIZED=normalizer is not None, num_warps=4, **self._common,
        )  # fmt: skip

    def values(self, seen: Tensor, out: Tensor) -> None:
        """Values of observations as the policy sees them, [N, …] → [N]."""
        rows, block = out.numel() // self._seeds, 64 if self.shape.hidden <= 64 else 32
        programs, each = min(triton.cdiv(rows, block), self._value_programs), out.shape[-1] // self._seeds
        _value_kernel[(programs, self._seeds)](
            seen, self.weights, out, rows, each, self.shape.size, **self._critic, B=block, num_warps=4, **self._common
        )

    def begin(self, steps: Steps, settings: LossSettings) -> None:
        """Take over a rollout, flat; minibatches are drawn from it until the next call."""
        assert settings.clips == self._clips or self.precision != "bf16"
        shape, count = self.shape, len(steps.log_probs)
        actions = shape.outputs if shape.gaussian else 1
        width = triton.cdiv(shape.inputs + 3 + actions + settings.clip_values, RECORD) * RECORD
        if self._records.shape != (count, width):
            self._records = torch.zeros(count, width, device=self.weights.device)
        self._steps, self._settings, block = steps, settings, 128
        _record_kernel[(triton.cdiv(count, block),)](
            steps.obs, steps.actions, steps.log_probs, steps.values, steps.advantages, steps.returns, self._records, count,
            D=shape.inputs, A=actions, R=width, RP=triton.next_power_of_2(width), B=block, WITH_VALUES=settings.clip_values,
        )  # fmt: skip

    def gradients(
        self, order: Tensor, clip_range: Tensor, step_weights: Tensor | None = None, goes_on: Tensor | None = None
    ) -> tuple[Tensor, Moments]:
        """Compute the gradients of the loss of one minibatch into `partials`.

        Args:
            order: The minibatch's indices among the steps. int64 [M] or [seeds, M]
            clip_range: [1]
            step_weights: Importance weights of the minibatch's steps. [M]
            goes_on: Seeds that learn from it; the gradients of others are NaN. bool [seeds]

        Returns:
            Policy loss, value loss, entropy, KL and fraction of clipped ratios, to be summed over programs, [5, P] or
            [5, seeds, P]; and the moments of the advantages.
        """
        shape, steps, settings = self.shape, self._steps, self._settings
        moments = advantage_moments(steps.advantages, order, steps.valid, settings.normalize_advantages)
        _gradient_kernel[(self.programs, 2, self._seeds)](
            self._records, order, steps.masks, steps.valid, step_weights, self.weights, moments.sums, moments.used,
            clip_range, goes_on, self.partials, self._stats, order.shape[-1], order.stride(0), shape.size, **self._both,
            LOG_STD=shape.offsets[12], VALUE_COEF=settings.value_coef, ENTROPY_COEF=settings.entropy_coef, CLIPS=settings.clips,
            CLIP_VALUES=settings.clip_values, NORMALIZES=settings.normalize_advantages, PADDED=moments.padded,
            A=shape.outputs, AP=16, R=self._records.shape[1], B=self._block, GAUSSIAN=shape.gaussian, num_warps=4, num_stages=1,
            **self._with_ones,
        )  # fmt: skip
        return self._stats, moments
