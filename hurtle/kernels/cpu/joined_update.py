"""An update of PPO and A2C in two calls per minibatch, between which learners that train together add up their gradients.

minibatch → gradient and STATS in `total` → their sum over the learners, which Python asks for → step. The parts of a minibatch
that several learners have are normalized and weighted as the one minibatch that they are.
"""

from __future__ import annotations

import math

import numpy as np

from . import network
from .host import TILE, entry, f4, jit
from .memory import ANY, address_of, call, doubles_at, floats_at, ints_at, table_at
from .network import transpose_rows
from .sync import wait_for_all
from .update import (
    RESULTS,
    STATS,
    add_tile,
    jobs_at,
    new_tile,
    shard_size,
    step_block,
    sum_of_squares,
    sum_shards,
    total_of,
)

GRADIENT, STEP = 0, 1
"""The phases."""
JOINED = 3
"""Numbers of each minibatch at `joined`: mean of the advantages, 1 / their standard deviation, and steps of all learners."""

_shard_size = jit(shard_size)


@entry
def learn_phase(job, thread, threads):
    """One phase of minibatch `first` of the job at that address, as one of `threads` threads.

    The gradient's returns 1, or 0 if a thread aborted; the step's returns 1, or 0 if the gradient is not finite, which then
    changes nothing.
    """
    j = jobs_at(job, 1)[0]
    if j.phase == GRADIENT:
        return _add_up(j, job, thread, threads)
    return _step(j, thread, threads)


@jit
def _add_up(j, job, thread, threads):
    """The gradient of this learner's part of the minibatch, which may be empty."""
    m, stride, size = j.first, _shard_size(j.trained_size), j.shard_rows
    weights, total = floats_at(j.weights, j.packed_size), floats_at(j.total, j.trained_size + STATS)
    norms, gradients = floats_at(j.norms, j.num_blocks), floats_at(j.gradients, ANY)
    layers = table_at(j.layers, j.num_layers, network.COLUMNS)
    blocks = table_at(j.blocks, j.num_blocks, network.BLOCK_COLUMNS)
    bounds, joined = ints_at(j.bounds, j.minibatches + 1), doubles_at(j.joined, j.minibatches * JOINED)
    barrier, segment_bounds = ints_at(j.barrier, ANY), ints_at(j.segment_bounds, ANY)
    mean, scale, count = f4(joined[m * JOINED]), f4(joined[m * JOINED + 1]), np.int64(joined[m * JOINED + 2])
    low, high = bounds[m], bounds[m + 1]
    shards = (high - low + size - 1) // size
    if j.add_segments:
        shards = (segment_bounds[m + 1] - segment_bounds[m] + size - 1) // size
    tile = new_tile(j)
    for s in range(thread, shards, threads):
        at = s * stride
        gradients[at : at + stride] = f4(0.0)
        if j.add_segments:
            moments = floats_at(np.int64(j.segment_floats) + 4 * thread * j.segment_floats_size, 3)
            moments[0], moments[1], moments[2] = mean, scale, f4(1.0) / f4(count)
            begins = segment_bounds[m] + s * size
            ends = min(segment_bounds[m + 1], begins + size)
            call(j.add_segments, (job, address_of(weights, 0), address_of(gradients, at), begins, ends, thread))
            continue
        for q in range(low + s * size, min(high, low + (s + 1) * size), TILE):
            add_tile(j, layers, weights, q, min(TILE, high - q), count, mean, scale, tile, gradients, at)
    if not wait_for_all(barrier, threads):
        return 0
    for b in range(thread, j.num_blocks, threads):
        norms[b] = sum_shards(gradients, 0, stride, shards, total, blocks[b, 0], blocks[b, 1])
    if thread == 0:
        sum_shards(gradients, 0, stride, shards, total, j.trained_size, np.int64(STATS))
    return 1


@jit
def _step(j, thread, threads):
    """Clip the gradient of all learners, and step."""
    m = j.first
    weights, total = floats_at(j.weights, j.packed_size), floats_at(j.total, j.trained_size + STATS)
    moments1, moments2 = floats_at(j.first_moments, j.trained_size), floats_at(j.second_moments, j.trained_size)
    norms, results = floats_at(j.norms, j.num_blocks), floats_at(j.results, j.minibatches * RESULTS)
    layers = table_at(j.layers, j.num_layers, network.COLUMNS)
    blocks, barrier = table_at(j.blocks, j.num_blocks, network.BLOCK_COLUMNS), ints_at(j.barrier, ANY)
    for b in range(thread, j.num_blocks, threads):
        norms[b] = sum_of_squares(total[blocks[b, 0] : blocks[b, 0] + blocks[b, 1]])
    if not wait_for_all(barrier, threads):
        return 0
    norm = math.sqrt(total_of(norms))
    if thread == 0:
        for k in range(STATS):
            results[m * RESULTS + k] = total[j.trained_size + k]
        results[m * RESULTS + STATS] = norm
    if not math.isfinite(norm) or not math.isfinite(total_of(total[j.trained_size :])):
        return 0
    clip = min(1.0, j.max_grad_norm / (norm + 1e-6))
    for b in range(thread, j.num_blocks, threads):
        step_block(j, j.steps_before + m + 1, f4(clip), weights, moments1, moments2, total, blocks[b, 0], blocks[b, 1])
        if blocks[b, 2] >= 0:
            transpose_rows(weights, layers, blocks[b, 2], blocks[b, 3], blocks[b, 4], blocks[b, 5])
    if thread == 0:
        j.done = m + 1
    return 1
