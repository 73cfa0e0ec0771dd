"""Observations, by address, as the first layer of an MLP expects them: numbers, scaled or normalized, or indices of ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .host import TILE, f4, jit, variant
from .memory import ANY, doubles_at, floats_at, ints_at, places_at, table_at, view
from .policy_table import (
    F4,
    F8,
    FIRST_AT,
    I1,
    I2,
    I4,
    I8,
    INPUT_KIND,
    INTEGER,
    LAST_AT,
    LISTED,
    LOW_AT,
    MEAN_AT,
    NESTED,
    NORMALIZED,
    NUM_INPUTS,
    NUM_NUMBERS,
    NUM_PARTS,
    OBS_DTYPE,
    OFFSET_AT,
    ONE_HOT,
    PARTS_AT,
    SCALED,
    SPAN_AT,
    STD_AT,
    U1,
    U2,
    U4,
    U8,
)
from .sparse import list_row

u4_at, i2_at, u2_at, i1_at, u1_at = (view(dtype) for dtype in (np.uint32, np.int16, np.uint16, np.int8, np.uint8))


def _make_reader(dtype: Any) -> Any:
    view_at = view(dtype)

    @jit
    @variant(np.dtype(dtype).name)
    def read(address, count, x, at):
        numbers = view_at(address, count)
        for k in range(count):
            x[at + k] = f4(numbers[k])

    return read


def _make_normalizer(dtype: Any) -> Any:
    view_at = view(dtype)

    @jit
    @variant(np.dtype(dtype).name)
    def normalize(address, count, mean, std, x, at):
        numbers, clip = view_at(address, count), std[count]
        for k in range(count):
            scaled = (np.float64(numbers[k]) - mean[k]) / std[k]
            scaled = -clip if scaled < -clip else scaled
            x[at + k] = f4(clip if scaled > clip else scaled)

    return normalize


_read_i1, _read_u1, _read_f4, _read_f8 = (_make_reader(dtype) for dtype in (np.int8, np.uint8, np.float32, np.float64))
normalize_f4, normalize_f8 = (_make_normalizer(dtype) for dtype in (np.float32, np.float64))
"""Normalize an observation by address; `std` ends with the clip."""


@jit
def _integer_at(address, k, dtype):
    """Element k of an integer array; values beyond int64 wrap, as in torch."""
    if dtype in (I8, U8):
        return ints_at(address, ANY)[k]
    if dtype == I4:
        return np.int64(places_at(address, ANY)[k])
    if dtype == U4:
        return np.int64(u4_at(address, ANY)[k])
    if dtype == I2:
        return np.int64(i2_at(address, ANY)[k])
    if dtype == U2:
        return np.int64(u2_at(address, ANY)[k])
    if dtype == I1:
        return np.int64(i1_at(address, ANY)[k])
    return np.int64(u1_at(address, ANY)[k])


@jit
def read(t, obs, x, at):
    """Read the observation at this address as inputs of the first layer."""
    count, dtype = t[NUM_NUMBERS], t[OBS_DTYPE]
    if t[INPUT_KIND] == NORMALIZED:
        mean, std = doubles_at(t[MEAN_AT], count), doubles_at(t[STD_AT], count + 1)
        if dtype == F4:
            normalize_f4(obs, count, mean, std, x, at)
        else:
            normalize_f8(obs, count, mean, std, x, at)
        return
    if dtype == F4:
        _read_f4(obs, count, x, at)
    elif dtype == F8:
        _read_f8(obs, count, x, at)
    elif dtype == U1:
        _read_u1(obs, count, x, at)
    elif dtype == I1:
        _read_i1(obs, count, x, at)
    else:
        for k in range(count):
            x[at + k] = f4(_integer_at(obs, k, dtype))
    if t[INPUT_KIND] == SCALED:
        low, span = floats_at(t[LOW_AT], count), floats_at(t[SPAN_AT], count)
        for k in range(count):
            x[at + k] = (x[at + k] - low[k]) / span[k]


@jit
def place_of(t, k, number):
    """The index of entry k's one; a number outside the space counts as the nearest valid one."""
    index = number - ints_at(t[FIRST_AT], ANY)[k]
    return min(max(index, 0), ints_at(t[LAST_AT], ANY)[k]) + ints_at(t[OFFSET_AT], ANY)[k]


@jit
def list_ones(t, obs, values, places, value_at, place_at):
    """List the ones of the observation at this address."""
    for k in range(t[NUM_NUMBERS]):
        places[place_at + k] = place_of(t, k, _integer_at(obs, k, t[OBS_DTYPE]))
        values[value_at + k] = f4(1.0)


@jit
def holds_nan(x):
    """Whether any number is NaN."""
    found = False
    for k in range(x.shape[0]):
        found |= x[k] != x[k]
    return found


@jit
def item_size(dtype):
    """Bytes per number, by the index of its dtype in DTYPES."""
    if dtype <= U1:
        return 1
    if dtype <= U2:
        return 2
    return 4 if dtype <= U4 or dtype == F4 else 8


@jit
def read_nested(t, obs, x, at):
    """Read a nested observation, part by part; choices become ones among zeros."""
    parts = table_at(t[PARTS_AT], t[NUM_PARTS], 4)
    for n in range(t[NUM_PARTS]):
        part, source, into = ints_at(parts[n, 0], ANY), obs + parts[n, 1], at + parts[n, 2]
        if part[INPUT_KIND] == ONE_HOT or part[INPUT_KIND] == INTEGER:
            for k in range(part[NUM_INPUTS]):
                x[into + k] = f4(0.0)
            for k in range(part[NUM_NUMBERS]):
                x[into + place_of(part, k, _integer_at(source, k, part[OBS_DTYPE]))] = f4(1.0)
        else:
            read(part, source, x, into)
        if parts[n, 3]:
            for k in range(into, into + part[NUM_INPUTS]):
                x[k] = math.copysign(math.log1p(abs(x[k])), x[k])


@jit
def read_tile(t, obs, rows, x, values, lists):
    """Prepare `rows` observations for `network.forward`; returns whether they are listed."""
    inputs, numbers, length = t[NUM_INPUTS], t[NUM_NUMBERS], t[LISTED]
    row_bytes = numbers * item_size(t[OBS_DTYPE])
    if t[INPUT_KIND] == ONE_HOT or t[INPUT_KIND] == INTEGER:
        for q in range(rows):
            lists[q] = numbers
            list_ones(t, obs + q * row_bytes, values, lists, q * numbers, TILE + q * numbers)
        return True
    if t[INPUT_KIND] == NESTED:
        for q in range(rows):
            read_nested(t, obs + q * row_bytes, x, q * inputs)
        return False
    for q in range(rows):
        read(t, obs + q * row_bytes, x, q * inputs)
    if length == 0:
        return False
    for q in range(rows):
        count = list_row(x, q * inputs, inputs, x[:0], x[:0], values, lists[TILE:], q * length, length)
        if count < 0:
            return False
        lists[q] = count
    return True
