"""Small MLPs in single kernels: acting (forward, sampling, log-prob), values, and PPO's loss with its full backward pass.

observations, weights → actions, log-probs, values; minibatch → gradients. Two hidden layers of one width, separate actor
and critic; weights are read once per program and kept in registers. Knows no env and no optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hurtle.kernels.mlp_shape import MLPShape

PROGRAMS_PER_UNIT = 4
"""Persistent programs of the gradient kernel per multiprocessor of the GPU."""
STATS = tl.constexpr(5)
"""Sums that each program of the gradient kernel returns: policy loss, value loss, entropy, KL, number of clipped ratios."""
PRECISIONS = {"float32": 0, "tf32": 1, "bf16": 2}


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _activation(x, RELU: tl.constexpr, FAST: tl.constexpr):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) if RELU else _tanh(x, FAST)


@triton.jit
def _slope(y, RELU: tl.constexpr):
    """The slope of the activation, from its result."""
    return tl.where(y > 0.0, 1.0, 0.0) if RELU else 1.0 - y * y


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if PRECISION == 2:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    if PRECISION == 1:
        return tl.dot(a, b, input_precision="tf32")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _operand(x, PRECISION: tl.constexpr):
    """An operand of a matrix product. TF32 units truncate; numbers that are rounded first have errors that cancel."""
    if PRECISION == 1:
        rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)  # a GPU's NaN, 0x7fffffff, would become 0
    return x


@triton.jit
def _uniform(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 40).to(tl.float32) * 5.9604644775390625e-08


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
    obs, weights, streams, clock, seen, actions, log_probs, env_actions, start, low, high, mean, std, clip, t, N,
    W1: tl.constexpr, B1: tl.constexpr, W2: tl.constexpr, B2: tl.constexpr, W3: tl.constexpr, B3: tl.constexpr,
    LOG_STD: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, H: tl.constexpr, A: tl.constexpr, AP: tl.constexpr,
    B: tl.constexpr, RELU: tl.constexpr, GAUSSIAN: tl.constexpr, NORMALIZED: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * B + tl.arange(0, B)
    ok = row < N
    rd, rh, ra = tl.arange(0, DP), tl.arange(0, H), tl.arange(0, AP)
    inside = ok[:, None] & (rd[None, :] < D)
    x = tl.load(obs + row[:, None] * D + rd[None, :], mask=inside, other=0.0)
    if NORMALIZED:
        middle = tl.load(mean + rd, mask=rd < D, other=0.0)
        spread = tl.load(std + rd, mask=rd < D, other=1.0)
        z = (x.to(tl.float64) - middle[None, :]) / spread[None, :]
        z = tl.maximum(z, -clip, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(z, clip, propagate_nan=tl.PropagateNan.ALL).to(tl.float32)
        x = tl.where(inside, x, 0.0)
    tl.store(seen + row[:, None] * D + rd[None, :], x, mask=inside)
    h = _hidden(x, weights, W1, B1, W2, B2, D, DP, H, RELU, FAST, PRECISION)
    w3 = _operand(tl.load(weights + W3 + ra[None, :] * H + rh[:, None], mask=ra[None, :] < A, other=0.0), PRECISION)
    out = _dot(h, w3, PRECISION) + tl.load(weights + B3 + ra, mask=ra < A, other=0.0)[None, :]
    stream = tl.load(streams + row, mask=ok, other=0).to(tl.uint64)
    drawn = (tl.load(clock) + t).to(tl.uint64)
    gamma = 0x9E3779B97F4A7C15
    real = ra[None, :] < A
    if GAUSSIAN:
        k = ra.to(tl.uint64)
        first = stream[:, None] + (drawn * (2 * A) + 2 * k + 1)[None, :] * gamma
        radius = tl.sqrt(-2.0 * tl.log(1.0 - _uniform(first)))
        normal = radius * tl.cos(6.283185307179586 * _uniform(first + gamma))
        log_std = tl.load(weights + LOG_STD + ra, mask=ra < A, other=0.0)
        action = out + tl.exp(log_std)[None, :] * normal
        off = (action - out) * tl.exp(-log_std)[None, :]
        log_prob = tl.sum(tl.where(real, -0.5 * off * off - log_std[None, :] - 0.9189385332046727, 0.0), 1)
        place = row[:, None] * A + ra[None, :]
        bounded = tl.maximum(action, tl.load(low + ra, mask=ra < A, other=0.0)[None, :])
        bounded = tl.minimum(bounded, tl.load(high + ra, mask=ra < A, other=0.0)[None, :])
        tl.store(actions + place, action, mask=ok[:, None] & real)
        tl.store(env_actions + place, bounded, mask=ok[:, None] & real)
    else:
        uniform = _uniform(stream + (drawn + 1) * gamma)
        logits = tl.where(real, out, -float("inf"))
        highest = tl.max(logits, 1)
        parts = tl.exp(logits - highest[:, None])
        mass = tl.sum(parts, 1)
        reached = tl.cumsum(parts, 1)
        level = uniform * mass
        # The last possible choice whose start is below the level: up to rounding, the first whose end is above it.
        begun = (reached - parts <= level[:, None]) & (parts > 0.0) & real
        chosen = tl.max(tl.where(begun, ra[None, :], 0), 1)
        own = tl.sum(tl.where(ra[None, :] == chosen[:, None], logits - highest[:, None], 0.0), 1)
        log_prob = own - tl.log(mass)
        tl.store(actions + row, chosen.to(tl.int64), mask=ok)
        tl.store(env_actions + row, (chosen + tl.load(start)).to(env_actions.dtype.element_ty), mask=ok)
    tl.store(log_probs + row, log_prob, mask=ok)


@triton.jit
def _value_kernel(
    obs, weights, values, N,
    W1: tl.constexpr, B1: tl.constexpr, W2: tl.constexpr, B2: tl.constexpr, W3: tl.constexpr, B3: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, H: tl.constexpr, B: tl.constexpr, RELU: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    rd, rh, rk, rb = tl.arange(0, DP), tl.arange(0, H), tl.arange(0, H), tl.arange(0, B)
    w1 = _operand(tl.load(weights + W1 + rh[None, :] * D + rd[:, None], mask=rd[:, None] < D, other=0.0), PRECISION)
    w2 = _operand(tl.load(weights + W2 + rh[None, :] * H + rk[:, None]), PRECISION)
    b1, b2 = tl.load(weights + B1 + rh), tl.load(weights + B2 + rh)
    w3, b3 = tl.load(weights + W3 + rh), tl.load(weights + B3)
    for block in range(tl.program_id(0), tl.cdiv(N, B), tl.num_programs(0)):
        row = block * B + rb.to(tl.int64)
        ok = row < N
        x = tl.load(obs + row[:, None] * D + rd[None, :], mask=ok[:, None] & (rd[None, :] < D), other=0.0)
        h1 = _activation(_dot(_operand(x, PRECISION), w1, PRECISION) + b1[None, :], RELU, FAST)
        h2 = _activation(_dot(_operand(h1, PRECISION), w2, PRECISION) + b2[None, :], RELU, FAST)
        tl.store(values + row, tl.sum(h2 * w3[None, :], 1) + b3, mask=ok)


@triton.jit
def _gradient_kernel(
    obs, order, actions, old_log_probs, old_values, advantages, returns, weights, moments, clip_range,
    partials, stats, N, SIZE,
    AW1: tl.constexpr, AB1: tl.constexpr, AW2: tl.constexpr, AB2: tl.constexpr, AW3: tl.constexpr, AB3: tl.constexpr,
    CW1: tl.constexpr, CB1: tl.constexpr, CW2: tl.constexpr, CB2: tl.constexpr, CW3: tl.constexpr, CB3: tl.constexpr,
    LOG_STD: tl.constexpr, VALUE_COEF: tl.constexpr, ENTROPY_COEF: tl.constexpr, CLIP_VALUES: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, H: tl.constexpr, A: tl.constexpr, AP: tl.constexpr, B: tl.constexpr,
    RELU: tl.constexpr, GAUSSIAN: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    p, P, is_critic = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    rd, rh, rk, ra, rb = tl.arange(0, DP), tl.arange(0, H), tl.arange(0, H), tl.arange(0, AP), tl.arange(0, B)
    W1, B1 = AW1 + is_critic * (CW1 - AW1), AB1 + is_critic * (CB1 - AB1)
    W2, B2 = AW2 + is_critic * (CW2 - AW2), AB2 + is_critic * (CB2 - AB2)
    W3, B3 = AW3 + is_critic * (CW3 - AW3), AB3 + is_critic * (CB3 - AB3)
    real = ra < A + is_critic * (1 - A)
    w1 = _operand(tl.load(weights + W1 + rh[None, :] * D + rd[:, None], mask=rd[:, None] < D, other=0.0), PRECISION)
    w2 = _operand(tl.load(weights + W2 + rh[None, :] * H + rk[:, None]), PRECISION)
    w3 = _operand(tl.load(weights + W3 + ra[None, :] * H + rh[:, None], mask=real[None, :], other=0.0), PRECISION)
    b1, b2 = tl.load(weights + B1 + rh), tl.load(weights + B2 + rh)
    b3 = tl.load(weights + B3 + ra, mask=real, other=0.0)
    w2t, w3t = tl.trans(w2), tl.trans(w3)
    dw1, dw2, dw3 = tl.zeros((DP, H), tl.float32), tl.zeros((H, H), tl.float32), tl.zeros((H, AP), tl.float32)
    db1, db2, db3 = tl.zeros((H,), tl.float32), tl.zeros((H,), tl.float32), tl.zeros((AP,), tl.float32)
    d_log_std = tl.zeros((AP,), tl.float32)
    loss, entropies = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
    kls, clipped = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
    shift, scale = tl.load(moments), tl.load(moments + 1)
    clip = tl.load(clip_range)
    inverse = 1.0 / N
    log_std = tl.load(weights + LOG_STD + ra, mask=ra < A, other=0.0) if GAUSSIAN else tl.zeros((AP,), tl.float32)
    for block in range(p, tl.cdiv(N, B), P):
        place = block * B + rb
        ok = place < N
        row = tl.load(order + place, mask=ok, other=0)
        x = tl.load(obs + row[:, None] * D + rd[None, :], mask=ok[:, None] & (rd[None, :] < D), other=0.0)
        x = _operand(x, PRECISION)
        h1 = _operand(_activation(_dot(x, w1, PRECISION) + b1[None, :], RELU, FAST), PRECISION)
        h2 = _operand(_activation(_dot(h1, w2, PRECISION) + b2[None, :], RELU, FAST), PRECISION)
        out = _dot(h2, w3, PRECISION) + b3[None, :]
        if is_critic == 1:
            value = tl.sum(tl.where(ra[None, :] == 0, out, 0.0), 1)
            target = tl.load(returns + row, mask=ok, other=0.0)
            error = value - target
            square, slope = error * error, error
            if CLIP_VALUES:
                old = tl.load(old_values + row, mask=ok, other=0.0)
                moved = value - old
                near = old + tl.minimum(tl.maximum(moved, -clip), clip) - target
                is_inside = tl.abs(moved) <= clip
                bound = near * near
                inner = tl.where(is_inside, near, 0.0)
                slope = tl.where(bound > square, inner, tl.where(bound == square, 0.5 * (error + inner), error))
                square = tl.maximum(square, bound, propagate_nan=tl.PropagateNan.ALL)
            loss += tl.where(ok, 0.5 * square, 0.0)
            d3 = tl.where(ok[:, None] & (ra[None, :] == 0), (VALUE_COEF * inverse * slope)[:, None], 0.0)
        else:
            advantage = (tl.load(advantages + row, mask=ok, other=0.0) - shift) * scale
            old_log_prob = tl.load(old_log_probs + row, mask=ok, other=0.0)
            if GAUSSIAN:
                action = tl.load(actions + row[:, None] * A + ra[None, :], mask=ok[:, None] & real[None, :], other=0.0)
                off = (action - out) * tl.exp(-log_std)[None, :]
                log_prob = tl.sum(tl.where(real[None, :], -0.5 * off * off - log_std[None, :] - 0.9189385332046727, 0.0), 1)
                entropy = tl.zeros((B,), tl.float32) + tl.sum(tl.where(real, log_std + 1.4189385332046727, 0.0), 0)
            else:
                action = tl.load(actions + row, mask=ok, other=0)
                logits = tl.where(real[None, :], out, -1e30)
                highest = tl.max(logits, 1)
                parts = tl.exp(logits - highest[:, None])
                mass = tl.sum(parts, 1)
                probs = parts / mass[:, None]
                logs = logits - highest[:, None] - tl.log(mass)[:, None]
                is_chosen = ra[None, :] == action[:, None]
                log_prob = tl.sum(tl.where(is_chosen, logs, 0.0), 1)
                kept_logs = tl.where(probs > 0.0, logs, 0.0)
                entropy = -tl.sum(probs * kept_logs, 1)
            log_ratio = log_prob - old_log_prob
            ratio = tl.exp(log_ratio)
            held = tl.minimum(tl.maximum(ratio, 1.0 - clip), 1.0 + clip)
            free, bounded = advantage * ratio, advantage * held
            slope = tl.where(bounded < free, 0.0, -free) * inverse
            loss += tl.where(ok, -tl.minimum(free, bounded, propagate_nan=tl.PropagateNan.ALL), 0.0)
            entropies += tl.where(ok, entropy, 0.0)
            kls += tl.where(ok, ratio - 1.0 - log_ratio, 0.0)
            clipped += tl.where(ok & (tl.abs(ratio - 1.0) > clip), 1.0, 0.0)
            if GAUSSIAN:
                d3 = slope[:, None] * off * tl.exp(-log_std)[None, :]
                by_std = slope[:, None] * (off * off - 1.0) - ENTROPY_COEF * inverse
                d_log_std += tl.sum(tl.where(ok[:, None] & real[None, :], by_std, 0.0), 0)
            else:
                d3 = slope[:, None] * (tl.where(is_chosen, 1.0, 0.0) - probs)
                d3 += ENTROPY_COEF * inverse * probs * (kept_logs + entropy[:, None])
            d3 = tl.where(ok[:, None] & real[None, :], d3, 0.0)
        d3 = _operand(d3, PRECISION)
        dw3 += _dot(tl.trans(h2), d3, PRECISION)
        db3 += tl.sum(d3, 0)
        d2 = _operand(_dot(d3, w3t, PRECISION) * _slope(h2, RELU), PRECISION)
        dw2 += _dot(tl.trans(h1), d2, PRECISION)
        db2 += tl.sum(d2, 0)
        d1 = _operand(_dot(d2, w2t, PRECISION) * _slope(h1, RELU), PRECISION)
        dw1 += _dot(tl.trans(x), d1, PRECISION)
        db1 += tl.sum(d1, 0)
    own = partials + p * SIZE
    tl.store(own + W1 + rh[None, :] * D + rd[:, None], dw1, mask=rd[:, None] < D)
    tl.store(own + W2 + rh[None, :] * H + rk[:, None], dw2)
    tl.store(own + W3 + ra[None, :] * H + rh[:, None], dw3, mask=real[None, :])
    tl.store(own + B1 + rh, db1)
    tl.store(own + B2 + rh, db2)
    tl.store(own + B3 + ra, db3, mask=real)
    if is_critic == 1:
        tl.store(stats + p * STATS + 1, tl.sum(loss, 0))
    else:
        if GAUSSIAN:
            tl.store(own + LOG_STD + ra, d_log_std, mask=real)
        tl.store(stats + p * STATS, tl.sum(loss, 0))
        tl.store(stats + p * STATS + 2, tl.sum(entropies, 0))
        tl.store(stats + p * STATS + 3, tl.sum(kls, 0))
        tl.store(stats + p * STATS + 4, tl.sum(clipped, 0))


class FusedMLP:
    """The kernels of one policy.

    Args:
        shape: The shape of the policy.
        weights: All its parameters, flat, as in `FlatParameters`.
        precision: Precision of the matrix products: "float32", "tf32" or "bf16"; sums are float32. With bf16, tanh is the GPU's
            own, accurate to 2^-11.
    """

    def __init__(self, shape: MLPShape, weights: Tensor, precision: str = "float32"):
        self.shape, self.weights = shape, weights
        self._precision = PRECISIONS[precision]
        self._common: dict[str, Any] = {
            "D": shape.inputs,
            "DP": max(16, triton.next_power_of_2(shape.inputs)),
            "H": shape.hidden,
            "RELU": shape.relu,
            "FAST": precision == "bf16" and weights.is_cuda,
            "PRECISION": self._precision,
        }
        units = torch.cuda.get_device_properties(weights.device).multi_processor_count if weights.is_cuda else 1
        wide = self._precision == 2 and shape.hidden <= 64
        self._block = 64 if wide else 32
        self.programs = (2 if wide else PROGRAMS_PER_UNIT) * units
        self._value_programs = 8 * units
        self._actor = dict(zip(("W1", "B1", "W2", "B2", "W3", "B3"), shape.offsets[:6], strict=True))
        self._critic = dict(zip(("W1", "B1", "W2", "B2", "W3", "B3"), shape.offsets[6:12], strict=True))
        self.partials = torch.zeros(self.programs, shape.size, device=weights.device)
        self._stats = torch.zeros(self.programs, STATS.value, device=weights.device)
        self._none = torch.zeros(1, device=weights.device)

    def act(
        self,
        obs: Tensor,
        streams: Tensor,
        clock: Tensor,
        t: int,
        seen: Tensor,
        actions: Tensor,
        log_probs: Tensor,
        env_actions: Tensor,
        bounds: tuple[Tensor, ...],
        normalizer: tuple[Tensor, Tensor, float] | None = None,
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
            env_actions: Output: the envs' actions. [N] or [N, A]
            bounds: The first action (int64 [1]), or lower and upper bounds (float32 [A] each).
            normalizer: Mean, standard deviation (float64 [D] each) and bound of normalized observations.
        """
        shape, rows = self.shape, len(log_probs)
        start = low = high = self._none
        if shape.gaussian:
            low, high = bounds
        else:
            (start,) = bounds
        mean, std, clip = normalizer or (self._none, self._none, 0.0)
        block = 64 if shape.hidden <= 64 else 32
        _act_kernel[(triton.cdiv(rows, block),)](
            obs, self.weights, streams, clock, seen, actions, log_probs, env_actions, start, low, high, mean, std, clip, t,
            rows, **self._actor, LOG_STD=shape.offsets[12], A=shape.outputs, AP=16, B=block, GAUSSIAN=shape.gaussian,
            NORMALIZED=normalizer is not None, num_warps=4, **self._common,
        )  # fmt: skip

    def values(self, seen: Tensor, out: Tensor) -> None:
        """Values of observations as the policy sees them, [N, …] → [N]."""
        rows, block = out.numel(), 64 if self.shape.hidden <= 64 else 32
        programs = min(triton.cdiv(rows, block), self._value_programs)
        _value_kernel[(programs,)](seen, self.weights, out, rows, **self._critic, B=block, num_warps=4, **self._common)

    def gradients(
        self,
        obs: Tensor,
        order: Tensor,
        actions: Tensor,
        log_probs: Tensor,
        values: Tensor,
        advantages: Tensor,
        returns: Tensor,
        moments: Tensor,
        clip_range: Tensor,
        value_coef: float,
        entropy_coef: float,
        clip_values: bool,
    ) -> Tensor:
        """Compute the gradients of PPO's loss of one minibatch into `partials`, to be summed over its first axis.

        Args:
            obs: Observations as the policy saw them, flat over steps and rows. [S, …]
            order: The minibatch's indices among the S steps. int64 [M]
            actions: Raw actions. [S] or [S, A]
            log_probs: Log-probs when the policy acted. [S]
            values: Values when the policy acted. [S]
            advantages: [S]
            returns: [S]
            moments: Offset subtracted from advantages, and the factor they are then multiplied by. [2]
            clip_range: [1]
            value_coef: Weight of the value loss.
            entropy_coef: Weight of the entropy bonus.
            clip_values: Also clip changes of the values by clip_range.

        Returns:
            Policy loss, value loss, entropy, KL, fraction of clipped ratios. [5]
        """
        shape, count = self.shape, len(order)
        names = ("W1", "B1", "W2", "B2", "W3", "B3")
        places = {f"A{name}": at for name, at in zip(names, shape.offsets[:6], strict=True)}
        places |= {f"C{name}": at for name, at in zip(names, shape.offsets[6:12], strict=True)}
        _gradient_kernel[(self.programs, 2)](
            obs, order, actions, log_probs, values, advantages, returns, self.weights, moments, clip_range,
            self.partials, self._stats, count, shape.size, **places, LOG_STD=shape.offsets[12],
            VALUE_COEF=value_coef, ENTROPY_COEF=entropy_coef, CLIP_VALUES=clip_values, A=shape.outputs, AP=16, B=self._block,
            GAUSSIAN=shape.gaussian, num_warps=4, num_stages=1, **self._common,
        )  # fmt: skip
        return self._stats.sum(0) / count
