"""One gradient step of DQN, or of SAC and TD3, on a batch from a replay buffer: losses, gradients, Adam, target networks.

batch → shards of rows → gradient of each → sum → norm → Adam on packed weights, on several threads. Networks are chains of
dense layers whose layer 0 is the input, see `policies/dense_chain.py`. Shards of rows and blocks of weights depend only on
sizes, so results are the same on any number of threads.
"""

from __future__ import annotations

import math

import numpy as np

from . import network
from .host import TILE, entry, f4, jit, joined, viewing
from .memory import ANY, bools_at, doubles_at, floats_at, ints_at, places_at, table_at, view
from .network import OUTPUTS, STRIDE, WORK, call_backward, call_forward, call_input_slopes, transpose_rows
from .sync import wait_for_all
from .update import flushed, sum_shards
from .vector_math import exp

MAX_SHARDS = 8
BETA1, BETA2 = 0.9, 0.999
LN2 = f4(math.log(2.0))
HALF_LOG_2PI = f4(0.5 * math.log(2.0 * math.pi))
STATS = 4
"""Sums of a shard: those of its losses and of what is reported."""

NET = np.dtype(
    [(name, np.uint64) for name in ["weights", "gradients", "total", "first", "second", "target", "layers", "blocks", "norms"]]
    + [(name, np.int64) for name in ["count", "packed_size", "trained_size", "depth", "num_blocks", "work_size"]]
)
"""A network, or `count` of one shape: [count, packed_size] weights and targets, [count, trained_size] moments and gradients."""
_ARRAYS = """
obs actions rewards next_obs discounts importance masks noise errors results stats temperature barrier memory actor critics
"""
_INTS = """
forward backward input_slopes count obs_size action_size has_masks double is_sac adapts improves critic_steps actor_steps
shard_rows memory_size phase
"""
_FLOATS = """
learning_rate critic_rate eps max_grad_norm target_rate target_entropy target_noise target_noise_clip log_std_low log_std_high
"""
JOB = np.dtype(
    [(name, np.uint64) for name in _ARRAYS.split()]
    + [(name, np.int64) for name in _INTS.split()]
    + [(name, np.float64) for name in _FLOATS.split()]
)
"""The arguments of a step. `target_rate` is 0 where targets stay; `actor` and `critics` are addresses of `NET`s; `masks`,
`noise` [2, B, D] and `temperature` (its logarithm and two moments) are read where the algorithm has them. `phase` is for
learners that train together, see joined_off_policy.py."""
jobs_at, nets_at = view(JOB), view(NET)


def shard_rows(count: int) -> int:
    """Rows per shard for batches of `count`: whole tiles, at most MAX_SHARDS shards."""
    return TILE * max(1, -(-count // (TILE * MAX_SHARDS)))


@entry
def dqn_step(job, thread, threads):
    """A step of DQN, whose network is the job's actor, as one of `threads` threads.

    Output: TD errors [B]; results: loss, mean Q, mean |TD error|, norm. Returns whether the gradient is finite; if not, or if a
    thread aborted, nothing was changed.
    """
    j = jobs_at(job, 1)[0]
    net, barrier, results = nets_at(j.actor, 1)[0], ints_at(j.barrier, ANY), doubles_at(j.results, 4)
    memory, shards = np.int64(j.memory) + 4 * thread * j.memory_size, (j.count + j.shard_rows - 1) // j.shard_rows
    for s in range(thread, shards, threads):
        stats, gradients = begin_shard(j, net, s)
        for low in range(s * j.shard_rows, min(j.count, (s + 1) * j.shard_rows), TILE):
            add_q_tile(j, net, memory, low, min(TILE, j.count - low), gradients, stats)
    if not wait_for_all(barrier, threads):
        return 0
    sum_gradients(net, shards, thread, threads)
    if not wait_for_all(barrier, threads):
        return 0
    norm, loss = norm_of(net), sum_stats(j, shards, 0)
    if thread == 0:
        results[0], results[1], results[2] = loss, sum_stats(j, shards, 1) / j.count, sum_stats(j, shards, 2) / j.count
        results[3] = norm
    if not math.isfinite(norm + loss):
        return 0
    step_net(j, net, j.learning_rate, norm, j.actor_steps, thread, threads)
    move_target(j, net, thread, threads)
    return 1


@entry
def actor_critic_step(job, thread, threads):
    """A step of SAC or TD3 with any number of critics, as one of `threads` threads.

    Output: TD errors [B]; results: value loss, mean Q, mean |TD error|, policy loss, entropy, temperature. Returns whether
    gradients are finite; if not, or if a thread aborted, what was about to be stepped is unchanged.
    """
    j = jobs_at(job, 1)[0]
    actor, critics, barrier = nets_at(j.actor, 1)[0], nets_at(j.critics, 1)[0], ints_at(j.barrier, ANY)
    results, temperature = doubles_at(j.results, 6), floats_at(j.temperature, 3)
    memory, shards = np.int64(j.memory) + 4 * thread * j.memory_size, (j.count + j.shard_rows - 1) // j.shard_rows
    alpha = f4(math.exp(temperature[0])) if j.is_sac else f4(0.0)
    for s in range(thread, shards, threads):
        stats, gradients = begin_shard(j, critics, s)
        for low in range(s * j.shard_rows, min(j.count, (s + 1) * j.shard_rows), TILE):
            add_critic_tile(j, actor, critics, memory, alpha, low, min(TILE, j.count - low), gradients, stats)
    if not wait_for_all(barrier, threads):
        return 0
    sum_gradients(critics, shards, thread, threads)
    if not wait_for_all(barrier, threads):
        return 0
    norm, loss = norm_of(critics), sum_stats(j, shards, 0)
    if thread == 0:
        results[0], results[1] = loss, sum_stats(j, shards, 1) / (j.count * critics.count)
        results[2] = sum_stats(j, shards, 2) / j.count
    if not math.isfinite(norm + loss):
        return 0
    step_net(j, critics, j.critic_rate, norm, j.critic_steps, thread, threads)
    if j.improves:
        if not wait_for_all(barrier, threads):
            return 0
        for s in range(thread, shards, threads):
            stats, gradients = begin_shard(j, actor, s)
            for low in range(s * j.shard_rows, min(j.count, (s + 1) * j.shard_rows), TILE):
                add_actor_tile(j, actor, critics, memory, alpha, low, min(TILE, j.count - low), gradients, stats)
        if not wait_for_all(barrier, threads):
            return 0
        sum_gradients(actor, shards, thread, threads)
        if not wait_for_all(barrier, threads):
            return 0
        norm, loss, entropy = norm_of(actor), sum_stats(j, shards, 0), sum_stats(j, shards, 1) / j.count
        if thread == 0:
            results[3], results[4], results[5] = loss / j.count, entropy, alpha
        if not math.isfinite(norm + loss):
            return 0
        step_net(j, actor, j.learning_rate, norm, j.actor_steps, thread, threads)
        if j.adapts and thread == 0:
            adapt(j, temperature, entropy - j.target_entropy)
    move_target(j, critics, thread, threads)
    if not j.is_sac:
        move_target(j, actor, thread, threads)
    return 1


@viewing
def begin_shard(j, net, s):
    """A shard's sums and gradients, set to zero."""
    stats = doubles_at(np.int64(j.stats) + 8 * s * STATS, STATS)
    stats[:] = 0.0
    size = net.count * net.trained_size
    gradients = floats_at(np.int64(net.gradients) + 4 * s * size, size)
    gradients[:] = f4(0.0)
    return stats, gradients


@jit
def sum_stats(j, shards, k):
    """The sum of one of STATS over the shards."""
    stats, total = doubles_at(j.stats, ANY), 0.0
    for s in range(shards):
        total += stats[s * STATS + k]
    return total


@jit
def sum_gradients(net, shards, thread, threads):
    """Sum a thread's share of the weights' gradients over the shards, and their squares by block."""
    size, blocks = net.count * net.trained_size, table_at(net.blocks, net.num_blocks, network.BLOCK_COLUMNS)
    gradients, total, norms = floats_at(net.gradients, ANY), floats_at(net.total, size), floats_at(net.norms, ANY)
    for b in range(thread, net.count * net.num_blocks, threads):
        e, k = b // net.num_blocks, b % net.num_blocks
        norms[b] = sum_shards(gradients, 0, size, shards, total, e * net.trained_size + blocks[k, 0], blocks[k, 1])


@jit
def norm_of(net):
    """The norm of a network's gradient, from the squares of its blocks."""
    norms, total = floats_at(net.norms, ANY), 0.0
    for b in range(net.count * net.num_blocks):
        total += norms[b]
    return math.sqrt(total)


@jit
def step_net(j, net, learning_rate, norm, steps, thread, threads):
    """Adam on a thread's share of the weights, then the transposed copies."""
    beta1, beta2, rest1, rest2 = f4(BETA1), f4(BETA2), f4(1.0 - BETA1), f4(1.0 - BETA2)
    step_size, inverse_root = f4(learning_rate / (1.0 - BETA1**steps)), f4(1.0 / math.sqrt(1.0 - BETA2**steps))
    eps, clip = f4(j.eps), f4(_clip_of(norm, j.max_grad_norm))
    layers, blocks = _layers_of(net), table_at(net.blocks, net.num_blocks, network.BLOCK_COLUMNS)
    for b in range(thread, net.count * net.num_blocks, threads):
        e, k = b // net.num_blocks, b % net.num_blocks
        at, length = e * net.trained_size + blocks[k, 0], blocks[k, 1]
        own = floats_at(np.int64(net.weights) + 4 * e * net.packed_size, net.packed_size)
        weights, gradients = own[blocks[k, 0] : blocks[k, 0] + length], floats_at(net.total, ANY)[at : at + length]
        first, second = floats_at(net.first, ANY)[at : at + length], floats_at(net.second, ANY)[at : at + length]
        for i in range(length):
            gradient = clip * gradients[i]
            first[i] = flushed(beta1 * first[i] + rest1 * gradient)
            second[i] = flushed(beta2 * second[i] + rest2 * gradient * gradient)
            weights[i] -= step_size * first[i] / (f4(math.sqrt(second[i])) * inverse_root + eps)
        if blocks[k, 2] >= 0:
            transpose_rows(own, layers, blocks[k, 2], blocks[k, 3], blocks[k, 4], blocks[k, 5])


@jit
def move_target(j, net, thread, threads):
    """Move a thread's share of the target's weights; only what a forward pass needs."""
    rate, blocks = f4(j.target_rate), table_at(net.blocks, net.num_blocks, network.BLOCK_COLUMNS)
    if rate == f4(0.0):
        return
    for b in range(thread, net.count * net.num_blocks, threads):
        e, k = b // net.num_blocks, b % net.num_blocks
        at, length = e * net.packed_size + blocks[k, 0], blocks[k, 1]
        weights, target = floats_at(net.weights, ANY)[at : at + length], floats_at(net.target, ANY)[at : at + length]
        for i in range(length):
            target[i] = weights[i] if rate == f4(1.0) else target[i] + rate * (weights[i] - target[i])


@jit
def adapt(j, temperature, slope):
    """Adam on the logarithm of the temperature."""
    slope *= _clip_of(abs(slope), j.max_grad_norm)
    temperature[1] = BETA1 * temperature[1] + (1.0 - BETA1) * slope
    temperature[2] = BETA2 * temperature[2] + (1.0 - BETA2) * slope * slope
    corrected = math.sqrt(temperature[2] / (1.0 - BETA2**j.actor_steps)) + j.eps
    temperature[0] -= j.learning_rate / (1.0 - BETA1**j.actor_steps) * temperature[1] / corrected


@joined
def _clip_of(norm, bound):
    return min(1.0, bound / (norm + 1e-6))


# Networks and their workspaces: in a thread's memory, the actor's outputs and slopes, those of each critic, then actions


@viewing
def _layers_of(net):
    return table_at(net.layers, net.depth, network.COLUMNS)


@viewing
def _work_of(memory, net, e):
    """The outputs of a network's layers; the slopes follow them."""
    return floats_at(memory + 8 * e * net.work_size, net.work_size)


@viewing
def _slopes_of(memory, net, e):
    return floats_at(memory + (8 * e + 4) * net.work_size, net.work_size)


@jit
def _forward(j, net, e, weights, work, rows):
    """Run network e of the array of weights at that address."""
    own = floats_at(np.int64(weights) + 4 * e * net.packed_size, net.packed_size)
    call_forward(j.forward, own, _layers_of(net), 1, net.depth, work, 0, 0, rows, work, places_at(0, 0))


@jit
def _backward(j, net, e, work, slopes, rows, gradients):
    """Add the gradient of network e."""
    own = floats_at(np.int64(net.weights) + 4 * e * net.packed_size, net.packed_size)
    at = e * net.trained_size
    call_backward(
        j.backward, own, _layers_of(net), 1, net.depth, work, 0, 0, rows, work, slopes, gradients, at, places_at(0, 0)
    )  # fmt: skip


@jit
def _fill(work, layers, source, width, first, rows, column):
    """Copy rows of a matrix of that width into the input of a network, from a column on."""
    at, stride = layers[0, WORK], layers[0, STRIDE]
    for q in range(rows):
        into = work[at + q * stride + column : at + q * stride + column + width]
        row = source[(first + q) * width : (first + q + 1) * width]
        for k in range(width):
            into[k] = row[k]


@jit
def _clear_slopes(slopes, layers, rows):
    last = layers.shape[0] - 1
    part = slopes[layers[last, WORK] : layers[last, WORK] + rows * layers[last, STRIDE]]
    for k in range(part.shape[0]):
        part[k] = f4(0.0)


# DQN


@jit
def add_q_tile(j, net, memory, low, rows, gradients, stats):
    """Add the gradient of Huber's loss on `rows` transitions, and loss, values and |TD errors|."""
    layers, work, slopes, other = (
        _layers_of(net),
        _work_of(memory, net, 0),
        _slopes_of(memory, net, 0),
        _work_of(memory, net, 1),
    )
    at, stride, choices = layers[net.depth - 1, WORK], layers[net.depth - 1, STRIDE], layers[net.depth - 1, OUTPUTS]
    obs, next_obs, actions = floats_at(j.obs, ANY), floats_at(j.next_obs, ANY), ints_at(j.actions, j.count)
    rewards, discounts = floats_at(j.rewards, j.count), floats_at(j.discounts, j.count)
    importance, errors, masks = floats_at(j.importance, j.count), floats_at(j.errors, j.count), bools_at(j.masks, ANY)
    _fill(other, layers, next_obs, j.obs_size, low, rows, 0)
    _forward(j, net, 0, net.target, other, rows)
    if j.double:
        _fill(work, layers, next_obs, j.obs_size, low, rows, 0)
        _forward(j, net, 0, net.weights, work, rows)
    for q in range(rows):
        best, highest = -1, f4(-np.inf)
        for k in range(choices):
            value = work[at + q * stride + k] if j.double else other[at + q * stride + k]
            legal = not j.has_masks or masks[(low + q) * choices + k]
            if legal and (best < 0 or value > highest):
                best, highest = k, value
        following = other[at + q * stride + max(0, best)]
        errors[low + q] = rewards[low + q] + discounts[low + q] * following
    _fill(work, layers, obs, j.obs_size, low, rows, 0)
    _forward(j, net, 0, net.weights, work, rows)
    _clear_slopes(slopes, layers, rows)
    for q in range(rows):
        place = at + q * stride + actions[low + q]
        error, share = work[place] - errors[low + q], importance[low + q] / f4(j.count)
        size = abs(error)
        slopes[place] = share * (f4(-1.0) if error < f4(-1.0) else f4(1.0) if error > f4(1.0) else error)
        stats[0] += share * (f4(0.5) * error * error if size < f4(1.0) else size - f4(0.5))
        stats[1] += work[place]
        stats[2] += size
        errors[low + q] = -error
    _backward(j, net, 0, work, slopes, rows, gradients)


# SAC and TD3


@jit
def add_critic_tile(j, actor, critics, memory, alpha, low, rows, gradients, stats):
    """Add the gradient of the critics' squared errors on `rows` transitions, and loss, values and |TD errors|."""
    layers, depth, work = _layers_of(critics), critics.depth, _work_of(memory, actor, 0)
    at, stride, own_memory = layers[depth - 1, WORK], layers[depth - 1, STRIDE], memory + 8 * actor.work_size
    obs, next_obs, actions = floats_at(j.obs, ANY), floats_at(j.next_obs, ANY), floats_at(j.actions, ANY)
    rewards, discounts = floats_at(j.rewards, j.count), floats_at(j.discounts, j.count)
    importance, errors = floats_at(j.importance, j.count), floats_at(j.errors, j.count)
    share = f4(1.0) / f4(j.count)
    chosen = floats_at(own_memory + 8 * critics.count * critics.work_size, TILE * (j.action_size + 1))
    log_probs = chosen[TILE * j.action_size :]
    _fill(work, _layers_of(actor), next_obs, j.obs_size, low, rows, 0)
    _forward(j, actor, 0, actor.weights if j.is_sac else actor.target, work, rows)
    _act(j, actor, work, floats_at(j.noise, ANY), low, rows, f4(j.target_noise), chosen, log_probs)
    for e in range(critics.count):
        own = _work_of(own_memory, critics, e)
        _fill(own, layers, next_obs, j.obs_size, low, rows, 0)
        _fill(own, layers, chosen, j.action_size, 0, rows, j.obs_size)
        _forward(j, critics, e, critics.target, own, rows)
    first = _work_of(own_memory, critics, 0)
    for q in range(rows):
        lowest = first[at + q * stride]
        for e in range(1, critics.count):
            lowest = min(lowest, first[2 * e * critics.work_size + at + q * stride])
        errors[low + q] = rewards[low + q] + discounts[low + q] * (lowest - alpha * log_probs[q])
    for e in range(critics.count):
        own, slopes = _work_of(own_memory, critics, e), _slopes_of(own_memory, critics, e)
        _fill(own, layers, obs, j.obs_size, low, rows, 0)
        _fill(own, layers, actions, j.action_size, low, rows, j.obs_size)
        _forward(j, critics, e, critics.weights, own, rows)
        _clear_slopes(slopes, layers, rows)
        for q in range(rows):
            value = own[at + q * stride]
            error, weight = value - errors[low + q], importance[low + q] * share
            slopes[at + q * stride] = f4(2.0) * weight * error
            stats[0] += weight * error * error
            stats[1] += value
        _backward(j, critics, e, own, slopes, rows, gradients)
    for q in range(rows):
        mean = f4(0.0)
        for e in range(critics.count):
            mean += first[2 * e * critics.work_size + at + q * stride]
        errors[low + q] -= mean / f4(critics.count)
        stats[2] += abs(errors[low + q])


@jit
def add_actor_tile(j, actor, critics, memory, alpha, low, rows, gradients, stats):
    """Add the actor's gradient on `rows` observations, up the lowest critic (SAC) or the first (TD3), its loss and entropy."""
    layers, own_layers, ensemble = _layers_of(critics), _layers_of(actor), critics.count if j.is_sac else 1
    at, stride = layers[critics.depth - 1, WORK], layers[critics.depth - 1, STRIDE]
    in_at, in_stride = layers[0, WORK] + j.obs_size, layers[0, STRIDE]
    own_at, own_stride = own_layers[actor.depth - 1, WORK], own_layers[actor.depth - 1, STRIDE]
    work, slopes, own_memory = _work_of(memory, actor, 0), _slopes_of(memory, actor, 0), memory + 8 * actor.work_size
    size, share, obs = j.action_size, f4(1.0) / f4(j.count), floats_at(j.obs, ANY)
    noise = floats_at(np.int64(j.noise) + 4 * j.count * size, j.count * size)
    chosen = floats_at(own_memory + 8 * critics.count * critics.work_size, TILE * (size + 1))
    log_probs = chosen[TILE * size :]
    _fill(work, own_layers, obs, j.obs_size, low, rows, 0)
    _forward(j, actor, 0, actor.weights, work, rows)
    _act(j, actor, work, noise, low, rows, f4(0.0), chosen, log_probs)
    for e in range(ensemble):
        own = _work_of(own_memory, critics, e)
        _fill(own, layers, obs, j.obs_size, low, rows, 0)
        _fill(own, layers, chosen, size, 0, rows, j.obs_size)
        _forward(j, critics, e, critics.weights, own, rows)
        _clear_slopes(_slopes_of(own_memory, critics, e), layers, rows)
    first, first_slopes, step = _work_of(own_memory, critics, 0), _slopes_of(own_memory, critics, 0), 2 * critics.work_size
    for q in range(rows):
        lowest = 0
        for e in range(1, ensemble):
            if first[e * step + at + q * stride] < first[lowest * step + at + q * stride]:
                lowest = e
        first_slopes[lowest * step + at + q * stride] = -share
        stats[0] += alpha * log_probs[q] - first[lowest * step + at + q * stride]
        stats[1] -= log_probs[q]
    for e in range(ensemble):
        weights = floats_at(np.int64(critics.weights) + 4 * e * critics.packed_size, critics.packed_size)
        call_input_slopes(
            j.input_slopes, weights, layers, rows, _work_of(own_memory, critics, e), _slopes_of(own_memory, critics, e)
        )
    _clear_slopes(slopes, own_layers, rows)
    for q in range(rows):
        row, into = work[own_at + q * own_stride :], slopes[own_at + q * own_stride :]
        for k in range(size):
            action, slope = chosen[q * size + k], f4(0.0)
            for e in range(ensemble):
                slope += first_slopes[e * step + in_at + q * in_stride + k]
            slope = slope * (f4(1.0) - action * action)
            if j.is_sac:
                slope += f4(2.0) * alpha * share * action
                flat = _tanh(row[size + k])
                of_log_std = slope * exp(_log_std(j, row[size + k])) * noise[(low + q) * size + k] - alpha * share
                into[size + k] = of_log_std * f4(0.5) * f4(j.log_std_high - j.log_std_low) * (f4(1.0) - flat * flat)
            into[k] = slope
    _backward(j, actor, 0, work, slopes, rows, gradients)


@jit
def _act(j, actor, work, noise, low, rows, std, chosen, log_probs):
    """Actions in (-1, 1) from the actor's outputs and normals, and SAC's log-probabilities of them."""
    layers, size, bound = _layers_of(actor), j.action_size, f4(j.target_noise_clip)
    at, stride = layers[actor.depth - 1, WORK], layers[actor.depth - 1, STRIDE]
    for q in range(rows):
        row, total = work[at + q * stride : at + (q + 1) * stride], f4(0.0)
        for k in range(size):
            normal = noise[(low + q) * size + k]
            if j.is_sac:
                log_std = _log_std(j, row[size + k])
                raw = row[k] + exp(log_std) * normal
                chosen[q * size + k] = _tanh(raw)
                total += f4(-0.5) * normal * normal - log_std - HALF_LOG_2PI - _log_slope(raw)
            else:
                added = max(-bound, min(bound, std * normal))
                chosen[q * size + k] = max(f4(-1.0), min(f4(1.0), _tanh(row[k]) + added))
        log_probs[q] = total


@joined
def _log_std(j, raw):
    return f4(j.log_std_low) + f4(0.5) * f4(j.log_std_high - j.log_std_low) * (_tanh(raw) + f4(1.0))


@joined
def _tanh(x):
    """For single numbers; layers have their own."""
    return f4(1.0) - f4(2.0) / (exp(f4(2.0) * x) + f4(1.0))


@joined
def _log_slope(u):
    """log(1 - tanh(u)^2)."""
    return f4(2.0) * (LN2 - u - f4(math.log1p(math.exp(-2.0 * u))) if u > f4(-15.0) else LN2 + u)
