"""GAE and V-trace over the rows of a rollout, from the last step to the first.

arrays [T, N] → advantages [T, N], in the same order of operations for every column. Knows no rollout and no policy.
Inner loops write one or two arrays and use `select` instead of `if`: LLVM vectorizes no others. Their order was measured.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from .host import f4
from .vector_math import exp

_FLOATS = types.Array(types.float32, 2, "C")
_FLAGS = types.Array(types.bool_, 2, "C")
_COLUMNS = (_FLOATS, _FLOATS, _FLAGS, _FLAGS, _FLOATS, types.Array(types.float32, 1, "C"))  # rewards … last_values
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}  # no contraction: every operation is rounded on its own


@cache
def compiled_gae(masked: bool) -> Any:
    """`gae` below for exactly the dtypes and layouts it supports (others raise TypeError); `valid` is None if not masked."""
    numbers = [types.float64] * 2
    signature = types.bool_(*_COLUMNS, *numbers, _FLAGS if masked else types.none, _FLOATS)
    return njit(signature, cache=True, **_OPTIONS)(gae)


@cache
def compiled_vtrace(masked: bool) -> Any:
    """`vtrace` below, likewise."""
    numbers = [types.float64] * 4
    signature = types.bool_(_FLOATS, *_COLUMNS, *numbers, _FLAGS if masked else types.none, _FLOATS, _FLOATS)
    return njit(signature, cache=True, **_OPTIONS)(vtrace)


def gae(rewards, values, terminated, truncated, final_values, last_values, gamma, decay, valid, out):
    """See `hurtle.kernels.gae`; `decay` is gamma times lambda. False: shapes do not match, nothing was written."""
    fit = _fit(rewards, values, terminated, truncated, final_values, last_values, valid)
    if not fit or out.shape != rewards.shape:
        return False
    gamma, decay, zero = f4(gamma), f4(decay), f4(0.0)
    steps, columns = rewards.shape
    next_value, advantage = last_values.copy(), np.zeros(columns, np.float32)
    for i in range(steps):
        t = steps - 1 - i
        for n in range(columns):
            terminates, truncates = terminated[t, n], truncated[t, n]
            after = select(terminates, zero, select(truncates, final_values[t, n], next_value[n]))
            carried = select(terminates | truncates, zero, advantage[n])
            found = rewards[t, n] + gamma * after - values[t, n] + decay * carried
            advantage[n] = select(_learns(valid, t, n), found, advantage[n])
        for n in range(columns):
            learns = _learns(valid, t, n)
            next_value[n] = select(learns, values[t, n], next_value[n])
            out[t, n] = select(learns, advantage[n], zero)
    return True


def vtrace(
    log_ratios, rewards, values, terminated, truncated, final_values, last_values,
    gamma, decay, rho_clip, c_clip, valid, targets, advantages,
):  # fmt: skip
    """See `hurtle.kernels.vtrace`; `decay` is gamma times lambda. False: shapes do not match, nothing was written."""
    fit, shape = _fit(rewards, values, terminated, truncated, final_values, last_values, valid), rewards.shape
    if not fit or log_ratios.shape != shape or targets.shape != shape or advantages.shape != shape:
        return False
    gamma, decay, rho_clip, c_clip, zero = f4(gamma), f4(decay), f4(rho_clip), f4(c_clip), f4(0.0)
    steps, columns = shape
    next_value, excess = last_values.copy(), np.zeros(columns, np.float32)  # excess: target - value of the step after
    ratio, after, carried = np.empty((3, columns), np.float32)
    for i in range(steps):
        t = steps - 1 - i
        for n in range(columns):
            ratio[n] = exp(log_ratios[t, n])
        for n in range(columns):
            after[n] = select(terminated[t, n], zero, select(truncated[t, n], final_values[t, n], next_value[n]))
        for n in range(columns):
            carried[n] = select(terminated[t, n] | truncated[t, n], zero, excess[n])
        for n in range(columns):
            delta = rewards[t, n] + gamma * after[n] - values[t, n]
            found = _clipped(ratio[n], rho_clip) * delta + decay * _clipped(ratio[n], c_clip) * carried[n]
            excess[n] = select(_learns(valid, t, n), found, excess[n])
        for n in range(columns):
            targets[t, n] = select(_learns(valid, t, n), values[t, n] + excess[n], values[t, n])
        for n in range(columns):
            surprise = rewards[t, n] + gamma * (after[n] + carried[n]) - values[t, n]
            advantages[t, n] = select(_learns(valid, t, n), _clipped(ratio[n], rho_clip) * surprise, zero)
        for n in range(columns):
            next_value[n] = select(_learns(valid, t, n), values[t, n], next_value[n])
    return True


@njit
def _fit(rewards, values, terminated, truncated, final_values, last_values, valid):
    shape = rewards.shape
    if valid is not None and valid.shape != shape:
        return False
    flags_fit = terminated.shape == shape and truncated.shape == shape
    return flags_fit and values.shape == shape and final_values.shape == shape and last_values.size == shape[1]


def _select(typing_context: Any, condition: Any, one: Any, other: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(*arguments)

    return types.float32(types.boolean, types.float32, types.float32), codegen


select: Any = intrinsic(_select)
"""`one if condition else other` without a branch: both are computed."""


@njit(forceinline=True, **_OPTIONS)
def _learns(valid, t, n):
    return True if valid is None else valid[t, n]


@njit(forceinline=True, **_OPTIONS)
def _clipped(ratio, limit):
    """The ratio, capped at `limit`; NaN stays NaN, so that it is noticed."""
    return select(ratio > limit, limit, ratio)
