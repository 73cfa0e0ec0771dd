"""The gradient of policies with a memory: whole segments, forward through time and back.

segments → encoded, a tile of steps at a time → memory, step by step → losses → gradients, from the last tile to the first.
update.py calls it for each shard of a minibatch. It allocates nothing, since an error here would not reach Python.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from . import network
from .cells import BEFORE, CELL, CELLS, LSTM, OF_STATE
from .host import TILE, address_of_function, f4, jit
from .memory import ANY, address_of, bools_at, call, floats_at, ints_at, places_at, table_at, view
from .network import BACKWARD, FORWARD, OUTPUTS, STRIDE, WORK, call_backward, call_forward
from .update import (
    ADVANTAGE,
    D_ENTROPY,
    ENTROPY,
    LOG_PROB,
    NUMBERS,
    OLD_LOG_PROB,
    OLD_VALUE,
    RETURN,
    STATS,
    gather,
    gather_inputs,
    jobs_at,
    learn_policy,
    learn_value,
    score,
)

rows_at: Any = view(np.float32, 2)
MOMENTS = 16
"""Floats at the beginning of a thread's memory, of which update.py writes the first three; the others keep rows aligned."""


def memory_sizes(num_steps: int, segments: int, job: Any) -> tuple[int, int]:
    """Floats and int64 that a thread needs for shards of so many segments."""
    tiles = -(-num_steps // (TILE // segments))
    floats = (tiles + 1) * job["work_size"] + 2 * segments * job["state_size"] + MOMENTS + NUMBERS * TILE
    floats += TILE * (job["num_inputs"] + job["action_size"]) + job["scratch_size"]
    words = TILE * (1 + job["action_size"]) + TILE * (1 + job["list_length"]) // 2 + TILE * job["mask_size"] // 8 + 2
    return _rounded(int(floats)), _rounded(int(words))


def _rounded(count: int) -> int:
    return -(-count // 32) * 32


def _add_segments(job, weights, gradient, first, last, thread):
    j = jobs_at(job, 1)[0]
    numbers = np.int64(j.segment_floats) + 4 * thread * j.segment_floats_size
    words = np.int64(j.segment_words) + 8 * thread * j.segment_words_size
    memory, steps = floats_at(numbers, j.segment_floats_size), ints_at(words, TILE)
    ints, at = words + 8 * TILE, MOMENTS
    lists = ints + 8 * TILE * j.action_size
    masks = lists + 4 * TILE * (1 + j.list_length)
    x_at, at = at, at + TILE * j.num_inputs
    slopes_at, at = at, at + j.work_size
    scratch_at, at = at, at + j.scratch_size
    floats_first, at = at, at + TILE * j.action_size
    numbers_at, at = at, at + NUMBERS * TILE
    tile = (
        memory[x_at:slopes_at], places_at(lists, TILE * (1 + j.list_length) if j.list_length else 0),
        memory[slopes_at:scratch_at], memory[scratch_at:floats_first],
        ints_at(ints, TILE * j.action_size), memory[floats_first:numbers_at], bools_at(masks, TILE * j.mask_size),
        rows_at(numbers + 4 * numbers_at, NUMBERS, TILE),
    )  # fmt: skip
    arrays = floats_at(weights, j.packed_size), floats_at(gradient, j.trained_size + STATS), memory[at:]
    segments, importance = ints_at(j.segments, ANY)[first:last], floats_at(j.importance, ANY)[first:last]
    add_segments(j, memory[0], memory[1], memory[2], arrays, segments, importance, tile, steps)


@jit
def add_segments(j, mean, scale, inverse, arrays, segments, importance, tile, steps):
    """Add the gradient and losses of some segments (rows of the rollout)."""
    weights, gradient, memory = arrays
    count, layers = len(segments), table_at(j.layers, j.num_layers, network.COLUMNS)
    each, num_steps = TILE // count, j.rollout_size // j.num_rows  # steps per tile
    tiles = (num_steps + each - 1) // each
    last, work_size, size = j.num_layers, j.work_size, layers[j.memory, OUTPUTS]
    works, carried = memory[: tiles * work_size], memory[tiles * work_size :]  # the latter: gradients of state and cells
    for k in range(2 * count * size):
        carried[k] = f4(0.0)
    x, lists, slopes, _, ints, floats, masks, numbers = tile
    stride = j.list_length if j.list_length else j.num_inputs
    for k in range(tiles):
        work, first = works[k * work_size :], k * each
        rows = _steps_of(j, segments, first, min(each, num_steps - first), steps)
        gather_inputs(j, steps, rows, x, lists)
        call_forward(j.forward, weights, layers, 0, j.encoded, x, 0, stride, rows, work, lists)
        for row in range(0, rows, count):
            if row > 0 or k > 0:
                before, at = (work, row - count) if row > 0 else (works[(k - 1) * work_size :], (each - 1) * count)
                _recall_last(j, layers, before, at, count, steps, work, row)
            else:
                _recall_first(j, layers, segments, steps, work)
            _call_cell(layers, j.memory, weights, row, count, work)
    for k in range(tiles - 1, -1, -1):
        work, first = works[k * work_size :], k * each
        rows = _steps_of(j, segments, first, min(each, num_steps - first), steps)
        gather(j, steps, rows, mean, scale, ints, floats, masks, numbers)
        call_forward(j.forward, weights, layers, j.memory + 1, last, x, 0, stride, rows, work, lists)
        _learn_heads(j, layers, weights, rows, inverse, work, tile, steps, importance, gradient)
        call_backward(
            j.backward, weights, layers, j.memory + 1, last, x, 0, stride, rows, work, slopes, gradient, 0, lists
        )  # fmt: skip
        for row in range(rows - count, -1, -count):
            _add_carried(layers, j.memory, carried, row, count, slopes)
            _call_cell_back(layers, j.memory, weights, row, count, work, slopes)
            _carry(j, layers, steps, row, count, slopes, carried)
        gates = layers[j.memory, OF_STATE]
        if gates >= 0:
            call_backward(
                j.backward, weights, layers, gates, gates + 1, x, 0, stride, rows, work, slopes, gradient, 0, lists
            )  # fmt: skip
        gather_inputs(j, steps, rows, x, lists)
        call_backward(j.backward, weights, layers, 0, j.encoded, x, 0, stride, rows, work, slopes, gradient, 0, lists)


@jit
def _steps_of(j, segments, first, count, steps):
    """The flat indices of `count` steps of some segments, from step `first` on, time-major; returns how many there are."""
    for t in range(count):
        for s in range(len(segments)):
            steps[t * len(segments) + s] = (first + t) * j.num_rows + segments[s]
    return count * len(segments)


@jit
def _learn_heads(j, layers, weights, rows, inverse, work, tile, steps, importance, gradient):
    """Losses and gradients of the network's outputs. Steps without a decision count for nothing."""
    _, _, slopes, scratch, ints, floats, masks, numbers = tile
    valid = bools_at(j.valid, ANY)
    if j.has_importance:
        for q in range(rows):
            numbers[ADVANTAGE, q] *= importance[q % len(importance)]
    for q in range(rows):
        if not valid[steps[q]]:  # any legal action will do
            for k in range(j.action_size):
                ints[q * j.action_size + k], floats[q * j.action_size + k] = 0, f4(0.5)
            for k in range(j.mask_size * j.has_masks):
                masks[q * j.mask_size + k] = True
    score(j, layers, weights, rows, inverse, work, scratch, ints, floats, masks, numbers)
    value, stride = layers[j.critic, WORK], layers[j.critic, STRIDE]
    for q in range(rows):
        if not valid[steps[q]]:
            numbers[OLD_LOG_PROB, q], numbers[ADVANTAGE, q] = numbers[LOG_PROB, q], f4(0.0)
            numbers[ENTROPY, q], numbers[D_ENTROPY, q] = f4(0.0), f4(0.0)
            numbers[OLD_VALUE, q] = numbers[RETURN, q] = work[value + q * stride]
    learn_policy(j, layers, weights, rows, inverse, work, slopes, scratch, ints, floats, masks, numbers, gradient, 0)
    learn_value(j, layers, rows, inverse, work, slopes, numbers, gradient, 0)


@jit
def _recall_first(j, layers, segments, steps, work):
    """The state before the first step, for each segment."""
    held, size = layers[j.memory, BEFORE], layers[j.memory, OUTPUTS]
    starts, hidden, cells = bools_at(j.starts, ANY), floats_at(j.hidden, ANY), floats_at(j.cells, ANY)
    for s in range(len(segments)):
        at, is_start = s * layers[held, STRIDE], starts[steps[s]]
        for k in range(size):
            work[layers[held, WORK] + at + k] = f4(0.0) if is_start else hidden[segments[s] * size + k]
        if layers[j.memory, CELL] == LSTM:
            for k in range(size):
                work[layers[held, CELLS] + at + k] = f4(0.0) if is_start else cells[segments[s] * size + k]


@jit
def _recall_last(j, layers, before, at, count, steps, work, row):
    """The state that the last step left, from row `at` of its workspace on."""
    held, size, starts = layers[j.memory, BEFORE], layers[j.memory, OUTPUTS], bools_at(j.starts, ANY)
    for s in range(count):
        is_start = starts[steps[row + s]]
        source, into = (at + s) * layers[j.memory, STRIDE], (row + s) * layers[held, STRIDE]
        for k in range(size):
            work[layers[held, WORK] + into + k] = f4(0.0) if is_start else before[layers[j.memory, WORK] + source + k]
        if layers[j.memory, CELL] == LSTM:
            for k in range(size):
                work[layers[held, CELLS] + into + k] = f4(0.0) if is_start else before[layers[j.memory, CELLS] + source + k]


@jit
def _add_carried(layers, n, carried, row, count, slopes):
    """Add the gradients that came back from the next step."""
    size = layers[n, OUTPUTS]
    for s in range(count):
        at = (row + s) * layers[n, STRIDE]
        for k in range(size):
            slopes[layers[n, WORK] + at + k] += carried[s * size + k]
            slopes[layers[n, CELLS] + at + k] = carried[(count + s) * size + k]


@jit
def _carry(j, layers, steps, row, count, slopes, carried):
    """Keep the gradients of the state before a step; none crosses the start of an episode."""
    held, size, starts = layers[j.memory, BEFORE], layers[j.memory, OUTPUTS], bools_at(j.starts, ANY)
    for s in range(count):
        at, is_start = (row + s) * layers[held, STRIDE], starts[steps[row + s]]
        for k in range(size):
            carried[s * size + k] = f4(0.0) if is_start else slopes[layers[held, WORK] + at + k]
        if layers[j.memory, CELL] == LSTM:
            for k in range(size):
                carried[(count + s) * size + k] = f4(0.0) if is_start else slopes[layers[held, CELLS] + at + k]


@jit
def _call_cell(layers, n, weights, first, rows, work):
    none = np.int64(0)
    w, table, into = address_of(weights, 0), address_of(layers, 0), address_of(work, 0)
    call(layers[n, FORWARD], (w, table, n, none, none, first, rows, into, none, none))


@jit
def _call_cell_back(layers, n, weights, first, rows, work, slopes):
    none = np.int64(0)
    w, table, left, s = address_of(weights, 0), address_of(layers, 0), address_of(work, 0), address_of(slopes, 0)
    call(layers[n, BACKWARD], (w, table, n, none, none, first, rows, left, s, none, none, none))


@cache
def segments_address() -> int:
    """The address of `add_segments` for update.py."""
    return address_of_function(_add_segments, 6)
