"""A gradient step of DQN, SAC or TD3 in several calls, between which learners that train together average their gradients.

batch → gradient and sums of losses → their mean over the learners, which Python asks for → step of the network.
"""

from __future__ import annotations

import math

import numpy as np

from . import network
from .host import TILE, entry, f4, jit
from .memory import ANY, doubles_at, floats_at, ints_at, table_at
from .off_policy import (
    adapt,
    add_actor_tile,
    add_critic_tile,
    add_q_tile,
    begin_shard,
    jobs_at,
    move_target,
    nets_at,
    norm_of,
    step_net,
    sum_gradients,
    sum_stats,
)
from .sync import wait_for_all
from .update import sum_of_squares

GRADIENT, STEP, ACTOR_GRADIENT, ACTOR_STEP = range(4)
"""The phases; the last two are for SAC and TD3, whose first two are the critics'."""


@entry
def dqn_phase(job, thread, threads):
    """A phase of `dqn_step`; returns whether all is finite and no thread aborted."""
    j = jobs_at(job, 1)[0]
    net, results = nets_at(j.actor, 1)[0], doubles_at(j.results, 4)
    shards = (j.count + j.shard_rows - 1) // j.shard_rows
    if j.phase == GRADIENT:
        memory = np.int64(j.memory) + 4 * thread * j.memory_size
        for s in range(thread, shards, threads):
            stats, gradients = begin_shard(j, net, s)
            for low in range(s * j.shard_rows, min(j.count, (s + 1) * j.shard_rows), TILE):
                add_q_tile(j, net, memory, low, min(TILE, j.count - low), gradients, stats)
        return _add_up(j, net, shards, thread, threads)
    if not _find_norms(j, net, thread, threads):
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
def actor_critic_phase(job, thread, threads):
    """A phase of `actor_critic_step`; returns whether all is finite and no thread aborted."""
    j = jobs_at(job, 1)[0]
    actor, critics = nets_at(j.actor, 1)[0], nets_at(j.critics, 1)[0]
    results, temperature = doubles_at(j.results, 6), floats_at(j.temperature, 3)
    memory, shards = np.int64(j.memory) + 4 * thread * j.memory_size, (j.count + j.shard_rows - 1) // j.shard_rows
    alpha = f4(math.exp(temperature[0])) if j.is_sac else f4(0.0)
    if j.phase == GRADIENT:
        for s in range(thread, shards, threads):
            stats, gradients = begin_shard(j, critics, s)
            for low in range(s * j.shard_rows, min(j.count, (s + 1) * j.shard_rows), TILE):
                add_critic_tile(j, actor, critics, memory, alpha, low, min(TILE, j.count - low), gradients, stats)
        return _add_up(j, critics, shards, thread, threads)
    if j.phase == ACTOR_GRADIENT:
        for s in range(thread, shards, threads):
            stats, gradients = begin_shard(j, actor, s)
            for low in range(s * j.shard_rows, min(j.count, (s + 1) * j.shard_rows), TILE):
                add_actor_tile(j, actor, critics, memory, alpha, low, min(TILE, j.count - low), gradients, stats)
        return _add_up(j, actor, shards, thread, threads)
    net = critics if j.phase == STEP else actor
    if not _find_norms(j, net, thread, threads):
        return 0
    norm, loss = norm_of(net), sum_stats(j, shards, 0)
    entropy = sum_stats(j, shards, 1) / j.count
    if thread == 0 and j.phase == STEP:
        results[0], results[1] = loss, sum_stats(j, shards, 1) / (j.count * critics.count)
        results[2] = sum_stats(j, shards, 2) / j.count
    elif thread == 0:
        results[3], results[4], results[5] = loss / j.count, entropy, alpha
    if not math.isfinite(norm + loss):
        return 0
    if j.phase == STEP:
        step_net(j, critics, j.critic_rate, norm, j.critic_steps, thread, threads)
    else:
        step_net(j, actor, j.learning_rate, norm, j.actor_steps, thread, threads)
        if j.adapts and thread == 0:
            adapt(j, temperature, entropy - j.target_entropy)
    if j.phase == ACTOR_STEP or not j.improves:
        move_target(j, critics, thread, threads)
        if not j.is_sac:
            move_target(j, actor, thread, threads)
    return 1


@jit
def _add_up(j, net, shards, thread, threads):
    if not wait_for_all(ints_at(j.barrier, ANY), threads):
        return 0
    sum_gradients(net, shards, thread, threads)
    return 1


@jit
def _find_norms(j, net, thread, threads):
    """The squares of the gradient of all learners, by block; then wait, so that all threads see them."""
    size, blocks = net.count * net.trained_size, table_at(net.blocks, net.num_blocks, network.BLOCK_COLUMNS)
    total, norms = floats_at(net.total, size), floats_at(net.norms, ANY)
    for b in range(thread, net.count * net.num_blocks, threads):
        e, k = b // net.num_blocks, b % net.num_blocks
        at = e * net.trained_size + blocks[k, 0]
        norms[b] = sum_of_squares(total[at : at + blocks[k, 1]])
    return wait_for_all(ints_at(j.barrier, ANY), threads)
