"""Sampling for off-policy actors: ε-greedy choices, and tanh actions with noise; `log_probs` only tell whether all is finite.

outputs, uniforms → raw actions. `EpsilonGreedy` and `ExploringTanh` of policies/distributions.py are the references;
tests/kernels/test_exploring.py compares them.
"""

from __future__ import annotations

import math

import numpy as np

from .choosing import _best
from .host import f4, jit

RANDOM, OWN_NOISE, LOW, HIGH, STDS = range(5)
"""Indices into the numbers of `sample_tanh`: whether actions are random, whether the outputs give log_std, its bounds, and else
the standard deviation of each dimension."""
_EDGE = 1.0 - 1e-6


@jit
def sample_greedy(count, outputs, stride, rows, epsilon, uniforms, masks, has_masks, actions, log_probs):
    """With probability ε any legal action, else the best one, from one uniform per row."""
    none = masks[:0]
    for q in range(rows):
        legal, options = masks[q * count : (q + 1) * count] if has_masks else none, 0
        for k in range(len(legal)):
            options += legal[k]
        every = options == 0  # no masks, or nothing is legal
        options = count if every else options
        best = _best(outputs, q * stride, count, none if every else legal, 0)
        drawn, sum_, chosen, finite = uniforms[q], f4(0.0), best, f4(0.0)
        for k in range(count):
            finite += outputs[q * stride + k] * f4(0.0)
        for k in range(count):
            share = f4(0.0) if not every and not legal[k] else epsilon / f4(options)
            share += f4(1.0) - epsilon if k == best else f4(0.0)
            sum_ += share
            if share > f4(0.0) and sum_ > drawn:
                chosen = k
                break
        actions[q] = chosen
        log_probs[q] = finite


@jit
def sample_tanh(size, outputs, stride, rows, numbers, uniforms, actions, log_probs):
    """Noise before the tanh (with log_std from the outputs) or after it, or uniform actions; two uniforms per dimension."""
    for q in range(rows):
        finite = f4(0.0)
        for d in range(size):
            mean, first = outputs[q * stride + d], np.float64(uniforms[2 * (q * size + d)])
            normal = math.sqrt(-2.0 * math.log(1.0 - first)) * math.cos(2.0 * math.pi * uniforms[2 * (q * size + d) + 1])
            if numbers[OWN_NOISE] > f4(0.0):
                raw = math.tanh(outputs[q * stride + size + d])
                log_std = numbers[LOW] + 0.5 * (numbers[HIGH] - numbers[LOW]) * (raw + 1.0)
                action = mean + math.exp(log_std) * normal
            else:
                action = math.tanh(mean) + numbers[STDS + d] * normal
                action = math.atanh(max(-_EDGE, min(_EDGE, action)))
            if numbers[RANDOM] > f4(0.0):
                action = math.atanh((2.0 * first - 1.0) * _EDGE)
            actions[q * size + d] = f4(action)
            finite += (mean + f4(action)) * f4(0.0)
        log_probs[q] = finite
