"""Device functions that the fused kernels share: uniforms, one choice among several, and the terms of PPO's loss.

outputs of a network, [AP, B] or [B, AP] with the choices along AXIS → actions, log-probs; or gradients of the outputs. Padded
outputs are those from A on. Knows no layers.
"""

from __future__ import annotations

import triton
import triton.language as tl

GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
HALF_LOG_2PI = tl.constexpr(0.9189385332046727)


@triton.jit
def uniform(z):
    """A float32 in [0, 1) from a state of a random stream; as in native/rng.py."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 40).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def choice_logits(out, a, A: tl.constexpr, legal, AXIS: tl.constexpr):
    """Logits with -inf for impossible choices; if no choice is legal, all are equally likely."""
    possible = a < A
    if legal is not None:
        some = tl.max(legal.to(tl.int32), AXIS, keep_dims=True) > 0
        possible = possible & (legal | (some == 0))
        out = tl.where(some, out, 0.0)
    return tl.where(possible, out, -float("inf"))


@triton.jit
def sample_choice(logits, a, drawn, AXIS: tl.constexpr):
    """The choices at these uniforms [B], and their log-probs."""
    highest = tl.max(logits, AXIS, keep_dims=True)
    parts = tl.exp(logits - highest)
    mass = tl.sum(parts, AXIS)
    level = tl.expand_dims(drawn * mass, AXIS)
    # The last possible choice whose start is below the level: up to rounding, the first whose end is above it.
    begun = (tl.cumsum(parts, AXIS) - parts <= level) & (parts > 0.0)
    chosen = tl.max(tl.where(begun, a, 0), AXIS)
    own = tl.sum(tl.where(a == tl.expand_dims(chosen, AXIS), logits - highest, 0.0), AXIS)
    return chosen, own - tl.log(mass)


@triton.jit
def choice_terms(logits, a, action, AXIS: tl.constexpr):
    """Log-probs of the actions [B], entropies [B], probabilities, their logs, and where the choice is the action."""
    highest = tl.max(logits, AXIS, keep_dims=True)
    parts = tl.exp(logits - highest)
    mass = tl.sum(parts, AXIS, keep_dims=True)
    probs = parts / mass
    logs = logits - highest - tl.log(mass)
    is_action = a == tl.expand_dims(action, AXIS)
    log_prob = tl.sum(tl.where(is_action, logs, 0.0), AXIS)
    logs = tl.where(probs > 0.0, logs, 0.0)
    return log_prob, -tl.sum(probs * logs, AXIS), probs, logs, is_action


@triton.jit
def d_choice(d_log_prob, d_entropy, entropy, probs, logs, is_action, AXIS: tl.constexpr):
    """Gradients of the logits from those of log-probs and entropies [B]."""
    d_log_prob, d_entropy = tl.expand_dims(d_log_prob, AXIS), tl.expand_dims(d_entropy, AXIS)
    d = d_log_prob * (tl.where(is_action, 1.0, 0.0) - probs)
    return d - d_entropy * probs * (logs + tl.expand_dims(entropy, AXIS))


@triton.jit
def share_of_smaller(a, b):
    """The share of min(a, b)'s gradient that goes to a; torch gives each one half if they are equal."""
    return tl.where(a < b, 1.0, tl.where(a == b, 0.5, 0.0))


@triton.jit
def policy_terms(log_prob, old_log_prob, advantage, clip, CLIPS: tl.constexpr):
    """The objective, its slope along the log-prob, the estimate of the KL, and whether the ratio was clipped.

    The objective is PPO's with CLIPS; otherwise A2C's, the advantage times the log-prob.
    """
    log_ratio = log_prob - old_log_prob
    ratio = tl.exp(log_ratio)
    if CLIPS:
        inside = (ratio >= 1.0 - clip) & (ratio <= 1.0 + clip)
        plain, clipped = advantage * ratio, advantage * tl.minimum(tl.maximum(ratio, 1.0 - clip), 1.0 + clip)
        share = share_of_smaller(plain, clipped)
        slope = (share + (1.0 - share) * inside.to(tl.float32)) * plain
        objective = tl.minimum(plain, clipped, propagate_nan=tl.PropagateNan.ALL)
        was_clipped = (tl.abs(ratio - 1.0) > clip).to(tl.float32)
    else:
        objective, slope, was_clipped = advantage * log_prob, advantage, tl.zeros_like(ratio)
    return objective, slope, ratio - 1.0 - log_ratio, was_clipped


@triton.jit
def value_terms(value, old_value, target, clip, CLIPS: tl.constexpr):
    """Squared errors of the values and their slopes (of half of them); with CLIPS also of clipped values, the worse counts."""
    error = value - target
    square, slope = error * error, error
    if CLIPS:
        change = value - old_value
        near_error = old_value + tl.minimum(tl.maximum(change, -clip), clip) - target
        near_square = near_error * near_error
        inside = (change >= -clip) & (change <= clip)
        share = share_of_smaller(near_square, square)  # the larger one counts
        slope = share * error + (1.0 - share) * inside.to(tl.float32) * near_error
        square = tl.maximum(square, near_square, propagate_nan=tl.PropagateNan.ALL)
    return square, slope


@triton.jit
def moments_of(moments, num_moments, padded: tl.constexpr, size, NORMALIZES: tl.constexpr):
    """Mean (float64) and 1 / std of the advantages, the weight of one step in the means, and NaN if no step is valid, else 0.

    They come from partial sums [3, padded]. Without NORMALIZES, or of one step, the first two are 0 and 1; without moments all
    `size` steps count.
    """
    mean, scale, part, nothing = 0.0, 1.0, 1.0 / size, 0.0
    if moments is not None:
        n = tl.arange(0, padded)
        there = n < num_moments
        number = tl.sum(tl.load(moments + n, mask=there, other=0.0), 0)
        part = (1.0 / tl.maximum(number, 1.0)).to(tl.float32)
        nothing = tl.where(number > 0.0, 0.0, float("nan"))
        if NORMALIZES:
            total = tl.sum(tl.load(moments + padded + n, mask=there, other=0.0), 0)
            squares = tl.sum(tl.load(moments + 2 * padded + n, mask=there, other=0.0), 0)
            average = total / tl.maximum(number, 1.0)
            squares = squares - number * average * average
            std = tl.sqrt(tl.where(squares < 0.0, 0.0, squares) / tl.maximum(number - 1.0, 1.0)).to(tl.float32)
            mean = tl.where(number > 1.0, average, 0.0)
            scale = tl.where(number > 1.0, 1.0 / (std + 1e-8), 1.0)
    return mean, scale, part, nothing


@triton.jit
def normalized(advantage, mean, scale):
    """Advantages minus a float64 mean, times a scale."""
    return (advantage.to(tl.float64) - mean).to(tl.float32) * scale
