"""The update of PPO and A2C on minibatches of a rollout: losses, gradients, clipping and the optimizer, on several threads.

minibatch → shards of rows → gradient of each → sum → norm → Adam, AdamW or RMSprop → weights, one minibatch after another.
Shards of rows and blocks of weights depend only on sizes, so results are the same on any number of threads.
"""

from __future__ import annotations

import math

import numpy as np

from . import network
from .head_calls import call_gradient, call_score
from .host import CACHE_LINE, TILE, allocating, entry, f4, jit, joined, reordering
from .memory import ANY, address_of, aligned, bools_at, call, floats_at, ints_at, places_at, table_at, view
from .network import call_backward, call_forward, transpose_rows
from .sync import wait_for_all
from .vector_math import exp

MAX_SHARDS = 16
MANY_WEIGHTS = 1 << 15
"""From this many weights on, summing gradients takes a significant part of the time."""
ADAM, ADAMW, RMSPROP = 0, 1, 2
NEGLIGIBLE = np.float32(1e-30)
"""Moments below this are zero: Adam's eps makes their steps 1e-20 of the weight's size, or less."""

STATS = 5
"""Policy loss, value loss, entropy, approximate KL and clip fraction: stored after the gradients and summed with them."""
RESULTS = STATS + 1
"""The same for each minibatch, and the norm of its gradient."""

NUMBERS = 9
LOG_PROB, ENTROPY, D_LOG_PROB, D_ENTROPY, OLD_LOG_PROB, OLD_VALUE, ADVANTAGE, RETURN, RATIO = range(NUMBERS)
"""Of each step of a tile."""

_ARRAYS = """
weights gradients total norms first_moments second_moments layers blocks nvec inputs ints floats masks log_probs values
advantages returns order importance bounds results barrier copies listed_values lists
segments segment_bounds segment_floats segment_words starts valid hidden cells joined
"""
_INTS = """
forward backward score gradient
rollout_size num_layers split actor critic trained_size packed_size work_size scratch_size num_blocks num_inputs head_kind
num_choices action_size mask_size has_masks has_importance log_std_at log_stds normalizes clips clips_values optimizer
steps_before minibatches first last done has_copies shard_rows num_shards list_length
add_segments num_rows memory encoded state_size segment_floats_size segment_words_size phase
"""
_FLOATS = "clip_range value_coef entropy_coef max_grad_norm learning_rate beta1 beta2 eps weight_decay"
JOB = np.dtype(
    [(name, np.uint64) for name in _ARRAYS.split()]
    + [(name, np.int64) for name in _INTS.split()]
    + [(name, np.float64) for name in _FLOATS.split()]
)
"""The arguments of an update: addresses of arrays, sizes, settings. A record, since many of them are floats.

`joined` and `phase` are for learners that train together, see joined_update.py.
"""
jobs_at = view(JOB)


def shard_rows(count: int, weights: int, lists: bool) -> int:
    """Rows per shard for minibatches of up to `count` rows: at least two tiles, at most MAX_SHARDS shards.

    Listed inputs are cheap to compute, but their gradients cost as much to sum as any: they get larger shards, unless
    hardly any shards would be left.
    """
    tiles = max(2, -(-count // (TILE * MAX_SHARDS)))
    return TILE * (max(4, tiles) if lists and weights > MANY_WEIGHTS and count >= 8 * TILE else tiles)


def shard_segments(count: int) -> int:
    """Segments per shard for minibatches of up to `count` segments: enough that rows of a step share loaded weights."""
    return min(TILE, max(min(8, -(-count // 2)), -(-count // MAX_SHARDS)))


def shard_size(trained_size: int) -> int:
    """Floats of a shard's gradients and STATS, rounded up to pairs of cache lines, which threads do not share then."""
    return -(-(trained_size + STATS) // (2 * CACHE_LINE)) * 2 * CACHE_LINE


def copy_size(packed_size: int, trained_size: int, num_blocks: int) -> int:
    """Floats in a thread's own copies, rounded up in the same way."""
    return -(-(packed_size + 3 * trained_size + STATS + num_blocks) // (2 * CACHE_LINE)) * 2 * CACHE_LINE


_shard_size, _copy_size = jit(shard_size), jit(copy_size)


@entry
def learn(job, thread, threads):
    """Learn from minibatches [first, last) of the job at that address as one of `threads` threads; returns the number done.

    It is lower if the gradient of the next minibatch is not finite (which then changed nothing), or if a thread aborted.
    Threads share the work of summing gradients and stepping weights. With `has_copies`, each does all of it on its own copy of
    the weights, with bitwise equal results: a few weights are stepped faster than sent to another core.
    """
    j = jobs_at(job, 1)[0]
    first, last = j.first, j.last
    stride, size = _shard_size(j.trained_size), j.shard_rows
    weights, moments1, moments2, total, norms = _own_arrays(j, thread)
    gradients, results = floats_at(j.gradients, ANY), floats_at(j.results, j.minibatches * RESULTS)
    layers = table_at(j.layers, j.num_layers, network.COLUMNS)
    blocks = table_at(j.blocks, j.num_blocks, network.BLOCK_COLUMNS)
    bounds, order = ints_at(j.bounds, j.minibatches + 1), ints_at(j.order, ANY)
    barrier, segment_bounds = ints_at(j.barrier, ANY), ints_at(j.segment_bounds, ANY)
    advantages = floats_at(j.advantages, j.rollout_size)
    tile = new_tile(j)
    own, step = (0, 1) if j.has_copies else (thread, threads)
    for m in range(first, last):
        low, high = bounds[m], bounds[m + 1]
        mean, scale = _advantage_scale(advantages, order, low, high) if j.normalizes else (f4(0.0), f4(1.0))
        shards = (high - low + size - 1) // size
        if j.add_segments:
            shards = (segment_bounds[m + 1] - segment_bounds[m] + size - 1) // size
        begin = j.num_shards * stride if j.has_copies and m % 2 else 0  # others may still read those of the last minibatch
        for s in range(thread, shards, threads):
            at = begin + s * stride
            gradients[at : at + stride] = f4(0.0)
            if j.add_segments:
                moments = floats_at(np.int64(j.segment_floats) + 4 * thread * j.segment_floats_size, 3)
                moments[0], moments[1], moments[2] = mean, scale, f4(1.0) / f4(high - low)
                begins = segment_bounds[m] + s * size
                ends = min(segment_bounds[m + 1], begins + size)
                call(j.add_segments, (job, address_of(weights, 0), address_of(gradients, at), begins, ends, thread))
                continue
            for q in range(low + s * size, min(high, low + (s + 1) * size), TILE):
                add_tile(j, layers, weights, q, min(TILE, high - q), high - low, mean, scale, tile, gradients, at)
        if not wait_for_all(barrier, threads):
            return m - first
        for b in range(own, j.num_blocks, step):
            norms[b] = sum_shards(gradients, begin, stride, shards, total, blocks[b, 0], blocks[b, 1])
        if own == 0:
            sum_shards(gradients, begin, stride, shards, total, j.trained_size, np.int64(STATS))
        if not j.has_copies and not wait_for_all(barrier, threads):
            return m - first
        norm = math.sqrt(total_of(norms))
        if thread == 0:
            for k in range(STATS):
                results[m * RESULTS + k] = total[j.trained_size + k]
            results[m * RESULTS + STATS] = norm
        if not math.isfinite(norm) or not math.isfinite(total_of(total[j.trained_size :])):
            return m - first
        clip = min(1.0, j.max_grad_norm / (norm + 1e-6))
        for b in range(own, j.num_blocks, step):
            step_block(j, j.steps_before + m + 1, f4(clip), weights, moments1, moments2, total, blocks[b, 0], blocks[b, 1])
            if blocks[b, 2] >= 0:
                transpose_rows(weights, layers, blocks[b, 2], blocks[b, 3], blocks[b, 4], blocks[b, 5])
        left = not j.has_copies and not wait_for_all(barrier, threads)
        if thread == 0:
            j.done = m + 1  # in case the return value does not reach Python
        if left:
            return m - first + 1
    return last - first


@jit
def _own_arrays(j, thread):
    """The weights, moments, gradients and norms that a thread works on: the job's, or its own copies.

    The first thread always works on the job's. No thread steps before all have reached the first barrier.
    """
    packed, trained, blocks = j.packed_size, j.trained_size, j.num_blocks
    weights, moments1 = floats_at(j.weights, packed), floats_at(j.first_moments, trained)
    moments2, total, norms = (
        floats_at(j.second_moments, trained),
        floats_at(j.total, trained + STATS),
        floats_at(j.norms, blocks),
    )
    if thread == 0 or not j.has_copies:
        return weights, moments1, moments2, total, norms
    size = _copy_size(packed, trained, blocks)
    own = floats_at(j.copies, ANY)[(thread - 1) * size : thread * size]
    for k in range(packed):  # slices take seconds to compile
        own[k] = weights[k]
    for k in range(trained):
        own[packed + k] = moments1[k]
        own[packed + trained + k] = moments2[k]
    summed = packed + 3 * trained + STATS
    return (
        own[:packed],
        own[packed : packed + trained],
        own[packed + trained : packed + 2 * trained],
        own[packed + 2 * trained : summed],
        own[summed : summed + blocks],
    )


@allocating
def new_tile(j):
    """A thread's memory for one tile of rows."""
    numbers = aligned(NUMBERS * TILE).reshape(NUMBERS, TILE)
    return (
        aligned(TILE * j.num_inputs),
        np.empty(TILE * (1 + j.list_length) if j.list_length else 0, np.int32),
        aligned(j.work_size),
        aligned(j.work_size),
        aligned(j.scratch_size),
        np.empty(TILE * j.action_size, np.int64),
        np.empty(TILE * j.action_size, np.float32),
        np.empty(max(1, TILE * j.mask_size * j.has_masks), np.bool_),
        numbers,
    )


@jit
def add_tile(j, layers, weights, first, rows, count, mean, scale, tile, gradients, at):
    """Add the gradient and losses of `rows` steps, from index `first` of the order on, to those of one shard."""
    x, lists, work, slopes, scratch, ints, floats, masks, numbers = tile
    last, inverse, order = j.num_layers, f4(1.0) / f4(count), ints_at(j.order, ANY)[first:]
    gather(j, order, rows, mean, scale, ints, floats, masks, numbers)
    if j.has_importance:
        importance = floats_at(j.importance, ANY)
        for q in range(rows):
            numbers[ADVANTAGE, q] *= importance[first + q]
    gather_inputs(j, order, rows, x, lists)
    stride = j.list_length if j.list_length else j.num_inputs
    shared = j.split == last
    call_forward(j.forward, weights, layers, 0, j.split, x, 0, stride, rows, work, lists)
    score(j, layers, weights, rows, inverse, work, scratch, ints, floats, masks, numbers)
    learn_policy(j, layers, weights, rows, inverse, work, slopes, scratch, ints, floats, masks, numbers, gradients, at)
    if not shared:
        call_backward(j.backward, weights, layers, 0, j.split, x, 0, stride, rows, work, slopes, gradients, at, lists)
        call_forward(j.forward, weights, layers, j.split, last, x, 0, stride, rows, work, lists)
    learn_value(j, layers, rows, inverse, work, slopes, numbers, gradients, at)
    trunk = 0 if shared else j.split
    call_backward(j.backward, weights, layers, trunk, last, x, 0, stride, rows, work, slopes, gradients, at, lists)


@jit
def score(j, layers, weights, rows, inverse, work, scratch, ints, floats, masks, numbers):
    """Log-probs and entropies of a tile's actions under the network's outputs, and the gradients of the entropies."""
    actor, stride, nvec = layers[j.actor, network.WORK], layers[j.actor, network.STRIDE], ints_at(j.nvec, j.num_choices)
    call_score(
        j.score, j.head_kind, nvec, work, actor, stride, rows, weights, j.log_std_at, masks, 0, j.has_masks,
        ints, floats, numbers[LOG_PROB], numbers[ENTROPY], scratch,
    )  # fmt: skip
    for q in range(rows):
        numbers[D_ENTROPY, q] = -f4(j.entropy_coef) * inverse


@jit
def learn_policy(j, layers, weights, rows, inverse, work, slopes, scratch, ints, floats, masks, numbers, gradients, at):
    """The policy loss of a tile, after `score`, and its gradients with respect to the network's outputs."""
    actor, stride, nvec = layers[j.actor, network.WORK], layers[j.actor, network.STRIDE], ints_at(j.nvec, j.num_choices)
    _policy_loss(j, rows, inverse, numbers, gradients[at + j.trained_size : at + j.trained_size + STATS])
    call_gradient(
        j.gradient, j.head_kind, nvec, work, actor, stride, rows, weights, j.log_std_at, masks, 0, j.has_masks,
        ints, floats, numbers[D_LOG_PROB], numbers[D_ENTROPY], scratch, slopes, actor, stride, gradients, at + j.log_std_at,
    )  # fmt: skip


@jit
def gather_inputs(j, order, rows, x, lists):
    """Copy the network's inputs for the steps of a tile, or the lists of their nonzeros."""
    size = j.num_inputs
    if not j.list_length:
        inputs = floats_at(j.inputs, j.rollout_size * size)
        for q in range(rows):
            step = order[q]
            source, into = inputs[step * size : (step + 1) * size], x[q * size : (q + 1) * size]
            for k in range(size):
                into[k] = source[k]
        return
    values, listed, length = floats_at(j.listed_values, ANY), places_at(j.lists, ANY), j.list_length
    for q in range(rows):
        step = order[q]
        source, into = step * length, q * length
        lists[q] = listed[step]
        for k in range(listed[step]):
            x[into + k] = values[source + k]
            lists[TILE + into + k] = listed[j.rollout_size + source + k]


@jit
def gather(j, order, rows, mean, scale, ints, floats, masks, numbers):
    """Gather the other fields of a tile's steps; advantages are normalized here."""
    log_probs, values = floats_at(j.log_probs, j.rollout_size), floats_at(j.values, j.rollout_size)
    advantages, returns = floats_at(j.advantages, j.rollout_size), floats_at(j.returns, j.rollout_size)
    for q in range(rows):
        step = order[q]
        numbers[OLD_LOG_PROB, q] = log_probs[step]
        numbers[OLD_VALUE, q] = values[step]
        numbers[ADVANTAGE, q] = (advantages[step] - mean) * scale
        numbers[RETURN, q] = returns[step]
    parts = j.action_size
    if j.head_kind < 2:
        chosen = ints_at(j.ints, j.rollout_size * parts)
        for q in range(rows):
            for k in range(parts):
                ints[q * parts + k] = chosen[order[q] * parts + k]
    else:
        taken = floats_at(j.floats, j.rollout_size * parts)
        for q in range(rows):
            for k in range(parts):
                floats[q * parts + k] = taken[order[q] * parts + k]
    if j.has_masks:
        legal = bools_at(j.masks, j.rollout_size * j.mask_size)
        for q in range(rows):
            for k in range(j.mask_size):
                masks[q * j.mask_size + k] = legal[order[q] * j.mask_size + k]


@jit
def _policy_loss(j, rows, inverse, numbers, stats):
    """The policy loss of a tile and its gradients with respect to log-probs: PPO's clipped surrogate, or A2C's plain one."""
    log_probs, entropies, slopes = numbers[LOG_PROB], numbers[ENTROPY], numbers[D_LOG_PROB]
    old, advantages = numbers[OLD_LOG_PROB], numbers[ADVANTAGE]
    loss = f4(0.0)
    entropy = f4(0.0)
    for q in range(rows):
        entropy += entropies[q]
    if not j.clips:
        for q in range(rows):
            slopes[q] = -advantages[q] * inverse
            loss -= advantages[q] * log_probs[q]
        stats[0] += loss * inverse
        stats[2] += entropy * inverse
        return
    clip, kl, outside = f4(j.clip_range), f4(0.0), f4(0.0)
    ratios = numbers[RATIO]
    for q in range(rows):
        ratios[q] = exp(log_probs[q] - old[q])
    for q in range(rows):
        ratio, advantage = ratios[q], advantages[q]
        clipped = f4(1.0) - clip if ratio < f4(1.0) - clip else f4(1.0) + clip if ratio > f4(1.0) + clip else ratio
        free, held = advantage * ratio, advantage * clipped
        slopes[q] = f4(0.0) if held < free else -free * inverse
        loss -= held if held < free else free
        kl += ratio - f4(1.0) - (log_probs[q] - old[q])
        outside += f4(1.0) if abs(ratio - f4(1.0)) > clip else f4(0.0)
    stats[0] += loss * inverse
    stats[2] += entropy * inverse
    stats[3] += kl * inverse
    stats[4] += outside * inverse


@jit
def learn_value(j, layers, rows, inverse, work, slopes, numbers, gradients, at):
    """The value loss of a tile and its gradients with respect to the values."""
    first, stride = layers[j.critic, network.WORK], layers[j.critic, network.STRIDE]
    old, returns, loss = numbers[OLD_VALUE], numbers[RETURN], f4(0.0)
    clip, weight = f4(j.clip_range), f4(j.value_coef) * inverse
    for q in range(rows):
        value = work[first + q * stride]
        error = value - returns[q]
        slope, squared = error, error * error
        if j.clips_values:
            change = value - old[q]
            bounded = -clip if change < -clip else clip if change > clip else change
            near = old[q] + bounded - returns[q]
            if near * near > squared:
                squared = near * near
                slope = near if change == bounded else f4(0.0)
        loss += squared
        row = slopes[first + q * stride : first + (q + 1) * stride]
        row[:] = f4(0.0)
        row[0] = weight * slope
    gradients[at + j.trained_size + 1] += f4(0.5) * loss * inverse


@allocating
def _advantage_scale(advantages, order, low, high):
    """Mean and 1 / (standard deviation + 1e-8) of a minibatch's advantages; a single one is left unchanged."""
    count = high - low
    if count < 2:
        return f4(0.0), f4(1.0)
    first, total, squares = (
        np.float64(advantages[order[low]]),
        np.zeros(4),
        np.zeros(4),
    )  # four independent sums
    for i in range(low, high - 3, 4):
        for k in range(4):
            distance = advantages[order[i + k]] - first  # relative to the first, to keep the squares small
            total[k] += distance
            squares[k] += distance * distance
    for i in range(low + count // 4 * 4, high):
        distance = advantages[order[i]] - first
        total[0] += distance
        squares[0] += distance * distance
    mean = total_of(total) / count
    variance = max(0.0, total_of(squares) - count * mean * mean) / (count - 1)
    return f4(first + mean), f4(1.0 / (math.sqrt(variance) + 1e-8))


@jit
def sum_shards(gradients, begin, size, shards, total, first, length):
    """Sum a block over the shards, in order; returns its sum of squares."""
    into = total[first : first + length]
    into[:] = f4(0.0)
    for s in range(shards):
        at = begin + s * size + first
        part = gradients[at : at + length]
        for k in range(length):
            into[k] += part[k]
    return sum_of_squares(into)


@reordering
def sum_of_squares(values):
    """The sum of the squares of a flat array."""
    total = f4(0.0)
    for k in range(values.shape[0]):
        total += values[k] * values[k]
    return total


@jit
def total_of(values):
    """The sum of a flat array, in float64 and in order."""
    total = 0.0
    for k in range(values.shape[0]):
        total += values[k]
    return total


@joined
def flushed(moment):
    """Zero for a moment that has faded away, else itself: the CPU is many times slower with numbers below 1e-38."""
    return f4(0.0) if abs(moment) < NEGLIGIBLE else moment


@jit
def step_block(j, steps, clip, weights, moments1, moments2, total, first, length):
    """Step a block of weights along its clipped gradient; `steps` counts this one."""
    w, g, v = weights[first : first + length], total[first : first + length], moments2[first : first + length]
    rate, decay, eps, beta2 = f4(j.learning_rate), f4(j.weight_decay), f4(j.eps), f4(j.beta2)
    rest2 = f4(1.0 - j.beta2)
    if j.optimizer == RMSPROP:
        for k in range(length):
            gradient = clip * g[k] + decay * w[k]
            v[k] = flushed(beta2 * v[k] + rest2 * gradient * gradient)
            w[k] -= rate * gradient / (f4(math.sqrt(v[k])) + eps)
        return
    m = moments1[first : first + length]
    beta1, rest1 = f4(j.beta1), f4(1.0 - j.beta1)
    step_size = f4(j.learning_rate / (1.0 - j.beta1**steps))
    inverse_root = f4(1.0 / math.sqrt(1.0 - j.beta2**steps))
    l2, shrink = (decay, f4(1.0)) if j.optimizer == ADAM else (f4(0.0), f4(1.0 - j.learning_rate * j.weight_decay))
    for k in range(length):
        gradient = clip * g[k] + l2 * w[k]
        m[k] = flushed(beta1 * m[k] + rest1 * gradient)
        v[k] = flushed(beta2 * v[k] + rest2 * gradient * gradient)
        w[k] = shrink * w[k] - step_size * m[k] / (f4(math.sqrt(v[k])) * inverse_root + eps)
