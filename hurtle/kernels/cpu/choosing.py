"""From the outputs of an MLP to the most likely action, as the env expects it: start, squashing, bounds, rounding, dtype."""

from __future__ import annotations

import math

import numpy as np

from .host import f4, jit
from .memory import ANY, doubles_at, floats_at, ints_at, places_at
from .observing import i1_at, i2_at
from .policy_table import (
    ACTION_DTYPE,
    ACTION_SIZE,
    BETA,
    BOUNDS_AT,
    CATEGORICAL,
    F4,
    F8,
    HEAD_KIND,
    I2,
    I4,
    I8,
    MULTI_CATEGORICAL,
    NUM_OUTPUTS,
    NVEC_AT,
    SQUASHED_GAUSSIAN,
    START_AT,
    U2,
    U4,
)

_EDGE = f4(1e-6)
_FAR_EDGE = f4(1.0 - 1e-6)


@jit
def _best(y, at, count, mask, mask_at):
    """Index of the largest legal logit; the first legal one if any is NaN or infinite, 0 if none is legal."""
    first, best, largest = -1, 0, f4(0.0)
    is_masked = mask.shape[0] > 0
    for j in range(count):
        logit = y[at + j]
        if is_masked and not mask[mask_at + j]:
            continue
        if first < 0:
            first = best = j
            largest = logit
        if not logit < f4(np.inf):
            return first
        if logit > largest:
            best, largest = j, logit
    return best


@jit
def _put_integer(address, k, dtype, number):
    if dtype == I8:
        ints_at(address, ANY)[k] = number
    elif dtype in (I4, U4):
        places_at(address, ANY)[k] = np.int32(number)
    elif dtype in (I2, U2):
        i2_at(address, ANY)[k] = np.int16(number)
    else:
        i1_at(address, ANY)[k] = np.int8(number)


@jit
def _softplus_plus_one(x):
    x64 = np.float64(x)
    return f4(1.0) + (x if x > f4(20.0) else f4(math.log1p(math.exp(x64))))


@jit
def _beta_mean(a, b):
    alpha, beta = _softplus_plus_one(a), _softplus_plus_one(b)
    mean = alpha / (alpha + beta)
    mean = _EDGE if mean < _EDGE else mean
    return _FAR_EDGE if mean > _FAR_EDGE else mean


@jit
def _box_action(t, y, at, d, bounds):
    """Element d of a Box's action, before rounding to its dtype."""
    size, kind = t[ACTION_SIZE], t[HEAD_KIND]
    if kind == SQUASHED_GAUSSIAN:
        return bounds[d] + (math.tanh(np.float64(y[at + d])) + 1.0) / 2.0 * bounds[size + d]
    if kind == BETA:
        return bounds[d] + np.float64(_beta_mean(y[at + d], y[at + size + d])) * bounds[size + d]
    return np.float64(y[at + d])


@jit
def write_action(t, y, at, mask, mask_at, out):
    """Write the action for a row of outputs to the address `out`, unless that is 0; returns it if it is one number."""
    kind, size, dtype = t[HEAD_KIND], t[ACTION_SIZE], t[ACTION_DTYPE]
    if kind == CATEGORICAL:
        action = _best(y, at, t[NUM_OUTPUTS], mask, mask_at) + ints_at(t[START_AT], 1)[0]
        if out != 0:
            _put_integer(out, 0, dtype, action)
        return action
    if kind == MULTI_CATEGORICAL:
        nvec, start, first = ints_at(t[NVEC_AT], size), ints_at(t[START_AT], size), 0
        for d in range(size):
            _put_integer(out, d, dtype, _best(y, at + first, nvec[d], mask, mask_at + first) + start[d])
            first += nvec[d]
        return 0
    bounds = doubles_at(t[BOUNDS_AT], 4 * size)
    for d in range(size):
        number = _box_action(t, y, at, d, bounds)
        if dtype == F4:
            number = np.float64(f4(number))
        elif dtype != F8:
            number = np.rint(number)
        number = bounds[2 * size + d] if number < bounds[2 * size + d] else number
        number = bounds[3 * size + d] if number > bounds[3 * size + d] else number
        if dtype == F4:
            floats_at(out, size)[d] = f4(number)
        elif dtype == F8:
            doubles_at(out, size)[d] = number
        else:
            _put_integer(out, d, dtype, np.int64(number))
    return 0
