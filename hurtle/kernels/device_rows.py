"""The device gear's work on one row: uniforms, sampling, the outcome of a step, shuffling, running returns.

Each function is the work of one thread on a GPU (see cuda/rows.py) and of one loop iteration on the CPU, so they agree.
They call no other compiled function, since that would be compiled for only one of the two.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from hurtle.kernels.error_codes import FINAL_OBSERVATION, KINDS, NO_ERROR_INT32, OBSERVATION, POLICY, REWARD

f4, f8, i8, u8 = np.float32, np.float64, np.int64, np.uint64
GAMMA, MIX_1, MIX_2 = u8(0x9E3779B97F4A7C15), u8(0xBF58476D1CE4E5B9), u8(0x94D049BB133111EB)  # as in rng.py
TO_UNIT, TWO_PI, HALF_LOG_2PI = f4(2.0**-24), f4(2.0 * math.pi), f4(0.5 * math.log(2.0 * math.pi))
ROUNDS = 6
"""Rounds of the Feistel network that shuffles; four already turn pseudo-random functions into a pseudo-random permutation."""

Array = Any


class Draw(NamedTuple):
    """The source of random numbers.

    `streams` holds the rows' uint64 streams as int64 [N]; `clock` [1] counts the steps before this rollout.
    """

    streams: Array
    clock: Array


class Step(NamedTuple):
    """The envs' results of a step, see native/batch_arrays.py; [envs, agents] or [envs, …]."""

    reward: Array
    terminated: Array
    truncated: Array
    ended: Array
    episode_ended: Array
    episode_return: Array
    episode_length: Array
    episode_metrics: Array
    final_obs: Array
    numbers: Array  # the next observations if they are floats, [envs, D], else [envs, 0]
    final_numbers: Array  # the final ones, likewise


class Outcome(NamedTuple):
    """The fields of a rollout that steps fill, [T, N], and the state carried from step to step, [N]."""

    rewards: Array
    terminated: Array
    truncated: Array
    starts: Array
    valid: Array
    beginning: Array  # whether the row's next step begins an episode
    cuts: Array  # truncations so far in this rollout
    final_steps: Array  # [slots, N]: the step of each truncation, or -1
    final_obs: Array  # [slots, N, D]
    log_probs: Array
    error: Array  # [N]: the code of the first error, see error_codes.py


class Episodes(NamedTuple):
    """Sums over the episodes that ended in this rollout, by row [N]; metrics by env [N, M]."""

    count: Array
    returns: Array
    best_return: Array
    lengths: Array
    best_length: Array
    metrics: Array


@njit(cache=True, nogil=True)
def uniform_row(n, t, draw, out):
    """The uniforms of row n at step t of this rollout, equal to those of `uniforms.uniforms`. out [N, count]."""
    count = out.shape[1]
    z = u8(draw.streams[n]) + u8((draw.clock[0] + t) * count) * GAMMA
    for k in range(count):
        z += GAMMA
        x = (z ^ (z >> u8(30))) * MIX_1
        x = (x ^ (x >> u8(27))) * MIX_2
        x = x ^ (x >> u8(31))
        out[n, k] = f4(x >> u8(40)) * TO_UNIT


@njit(cache=True, nogil=True)
def choose_row(n, t, draw, logits, mask, has_mask, nvec, start, actions, log_probs, env_actions):
    """Sample row n's choices from logits [N, sum(nvec)], as (Multi)Categorical does; actions [T, N, k], env_actions [N, k]."""
    count = len(nvec)
    z = u8(draw.streams[n]) + u8((draw.clock[0] + t) * count) * GAMMA
    first, total = 0, f4(0.0)
    for k in range(count):
        z += GAMMA
        x = (z ^ (z >> u8(30))) * MIX_1
        x = (x ^ (x >> u8(27))) * MIX_2
        x = x ^ (x >> u8(31))
        uniform = f4(x >> u8(40)) * TO_UNIT
        last = first + nvec[k]
        legal = 0
        if has_mask:
            for j in range(first, last):
                if mask[n, j]:
                    legal += 1
        masks = legal > 0
        highest = f4(-np.inf)
        for j in range(first, last):
            if not masks or mask[n, j]:
                highest = max(highest, f4(logits[n, j]))
        everything = has_mask and not masks  # no action is legal: all are equally likely
        mass = f4(0.0)
        for j in range(first, last):
            if not masks or mask[n, j]:
                mass += f4(1.0) if everything else math.exp(f4(logits[n, j]) - highest)
        level, reached, chosen = uniform * mass, f4(0.0), -1
        for j in range(first, last):
            if not masks or mask[n, j]:
                part = f4(1.0) if everything else math.exp(f4(logits[n, j]) - highest)
                reached += part
                if part > f4(0.0) and (chosen < 0 or level >= reached - part):
                    chosen = j
        if chosen < 0:  # the logits are not finite: take any action; its log-probability is not finite either
            chosen = first
        own = f4(0.0) if everything else f4(logits[n, chosen]) - highest
        total += own - math.log(mass)
        actions[t, n, k] = chosen - first
        env_actions[n, k] = chosen - first + start[k]
        first = last
    log_probs[t, n] = total


@njit(cache=True, nogil=True)
def gauss_row(n, t, draw, mean, log_std, low, high, actions, log_probs, env_actions):
    """Sample row n's numbers from independent normals, as Gaussian does; actions [T, N, D], clipped for the env [N, D]."""
    size = mean.shape[1]
    z = u8(draw.streams[n]) + u8((draw.clock[0] + t) * 2 * size) * GAMMA
    total = f4(0.0)
    for d in range(size):
        z += GAMMA
        x = (z ^ (z >> u8(30))) * MIX_1
        x = (x ^ (x >> u8(27))) * MIX_2
        x = x ^ (x >> u8(31))
        radius = math.sqrt(f4(-2.0) * math.log(f4(1.0) - f4(x >> u8(40)) * TO_UNIT))
        z += GAMMA
        x = (z ^ (z >> u8(30))) * MIX_1
        x = (x ^ (x >> u8(27))) * MIX_2
        x = x ^ (x >> u8(31))
        normal = radius * math.cos(TWO_PI * (f4(x >> u8(40)) * TO_UNIT))
        action = f4(mean[n, d]) + math.exp(log_std[d]) * normal
        actions[t, n, d] = action
        env_actions[n, d] = min(max(action, low[d]), high[d])
        deviation = (action - f4(mean[n, d])) * math.exp(-log_std[d])
        total += f4(-0.5) * deviation * deviation - log_std[d] - HALF_LOG_2PI
    log_probs[t, n] = total


@njit(cache=True, nogil=True)
def outcome_row(n, t, agents, step, out, episodes):
    """Record the outcome of step t for row n, as GeneralCollector defines it; the next observation is not read or written."""
    i, a = n // agents, n % agents
    acting, over = out.valid[t, n], step.ended[i]
    terminated = acting and step.terminated[i, a]
    truncated = acting and step.truncated[i, a]
    out.rewards[t, n] = step.reward[i, a] if acting else f4(0.0)
    out.terminated[t, n] = terminated
    out.truncated[t, n] = truncated
    if over and not acting and not out.beginning[n]:
        # It left without a flag and the env ended before it returned: its last step ended its episode.
        before = t - 1
        while before >= 0 and not out.valid[before, n]:
            before -= 1
        if before >= 0:
            out.terminated[before, n] = True
    begins = terminated or truncated or over or (out.beginning[n] and not acting)
    out.beginning[n] = begins
    if t + 1 < out.starts.shape[0]:
        out.starts[t + 1, n] = begins
    if truncated and not terminated:
        slot = out.cuts[n]
        out.cuts[n] = slot + 1
        if slot < out.final_steps.shape[0]:
            out.final_steps[slot, n] = t
            size = out.final_obs.shape[2]
            for d in range(size):
                out.final_obs[slot, n, d] = step.final_obs[i, a * size + d]
    size = step.numbers.shape[1] // agents
    check = f4(0.0)  # not finite if a number is not; without branches, so that all are loaded at once
    for d in range(a * size, (a + 1) * size):
        check += f4(0.0) * f4(step.numbers[i, d])
    code = NO_ERROR_INT32
    if not math.isfinite(check):
        code = t * KINDS + OBSERVATION
    if truncated:
        for d in range(a * size, (a + 1) * size):
            if not math.isfinite(step.final_numbers[i, d]):
                code = t * KINDS + FINAL_OBSERVATION
    if not math.isfinite(step.reward[i, a]):
        code = t * KINDS + REWARD
    if acting and not math.isfinite(out.log_probs[t, n]):
        code = t * KINDS + POLICY
    if code != NO_ERROR_INT32 and out.error[n] == NO_ERROR_INT32:
        out.error[n] = code
    if step.episode_ended[i, a]:
        episodes.count[n] += 1
        episodes.returns[n] += step.episode_return[i, a]
        episodes.best_return[n] = max(episodes.best_return[n], step.episode_return[i, a])
        episodes.lengths[n] += step.episode_length[i, a]
        episodes.best_length[n] = max(episodes.best_length[n], step.episode_length[i, a])
    if over and a == 0:
        for m in range(episodes.metrics.shape[1] - 1):
            episodes.metrics[i, m] += step.episode_metrics[i, m]
        episodes.metrics[i, episodes.metrics.shape[1] - 1] += f4(1.0)


@njit(cache=True, nogil=True)
def keep_row(n, t, final_steps, state, out):
    """Save row n's memory [N, F] if step t truncated its episode, for V of the final observation. out [slots, N, F]."""
    for slot in range(final_steps.shape[0]):
        if final_steps[slot, n] == t:
            for f in range(state.shape[1]):
                out[slot, n, f] = state[n, f]


@njit(cache=True, nogil=True)
def shuffle_row(n, size, key, out):
    """The index of n % size in a random permutation: a Feistel network on the next power of two, iterated until below size.

    The permutation depends only on its key, of which there is one for each `size` rows. key [G] and out [G * size]: int64.
    """
    bits = 6  # with fewer, the permutations of small sizes would not be equally likely
    while (1 << bits) < size:
        bits += 1
    low_bits = bits // 2
    high_bits = bits - low_bits
    low_mask, high_mask = (u8(1) << u8(low_bits)) - u8(1), (u8(1) << u8(high_bits)) - u8(1)
    seed = u8(key[n // size])
    seed = (seed ^ (seed >> u8(30))) * MIX_1  # similar keys must not share rounds
    seed = (seed ^ (seed >> u8(27))) * MIX_2
    seed = seed ^ (seed >> u8(31))
    x = u8(n % size)
    while True:
        left, right = x >> u8(low_bits), x & low_mask
        for r in range(ROUNDS):
            if r % 2 == 0:
                z = (right + seed + u8(r + 1) * GAMMA) * MIX_1
                z = (z ^ (z >> u8(29))) * MIX_2
                left = left ^ ((z >> u8(32)) & high_mask)
            else:
                z = (left + seed + u8(r + 1) * GAMMA) * MIX_1
                z = (z ^ (z >> u8(29))) * MIX_2
                right = right ^ ((z >> u8(32)) & low_mask)
        x = (left << u8(low_bits)) | right
        if x < u8(size):
            break
    out[n] = i8(x)


@njit(cache=True, nogil=True)
def return_row(n, rewards, ended, valid, gamma, returns, out):
    """Row n's discounted return after each step, equal to that of `returns.running_returns`. out [T, N] float64."""
    running = returns[n]
    for t in range(rewards.shape[0]):
        if valid[t, n]:
            running = gamma * running + f8(rewards[t, n])
        out[t, n] = running
        if valid[t, n] and ended[t, n]:
            running = 0.0
    returns[n] = running


# Loops over rows, for the CPU.


@njit(cache=True, nogil=True)
def uniform_rows(count, t, draw, out):
    """`uniform_row` of all rows."""
    for n in range(count):
        uniform_row(n, t, draw, out)


@njit(cache=True, nogil=True)
def choose_rows(count, t, draw, logits, mask, has_mask, nvec, start, actions, log_probs, env_actions):
    """`choose_row` of all rows."""
    for n in range(count):
        choose_row(n, t, draw, logits, mask, has_mask, nvec, start, actions, log_probs, env_actions)


@njit(cache=True, nogil=True)
def gauss_rows(count, t, draw, mean, log_std, low, high, actions, log_probs, env_actions):
    """`gauss_row` of all rows."""
    for n in range(count):
        gauss_row(n, t, draw, mean, log_std, low, high, actions, log_probs, env_actions)


@njit(cache=True, nogil=True)
def outcome_rows(count, t, agents, step, out, episodes):
    """`outcome_row` of all rows."""
    for n in range(count):
        outcome_row(n, t, agents, step, out, episodes)


@njit(cache=True, nogil=True)
def keep_rows(count, t, final_steps, state, out):
    """`keep_row` of all rows."""
    for n in range(count):
        keep_row(n, t, final_steps, state, out)


@njit(cache=True, nogil=True)
def shuffle_rows(count, size, key, out):
    """`shuffle_row` of all rows."""
    for n in range(count):
        shuffle_row(n, size, key, out)


@njit(cache=True, nogil=True)
def return_rows(count, rewards, ended, valid, gamma, returns, out):
    """`return_row` of all rows."""
    for n in range(count):
        return_row(n, rewards, ended, valid, gamma, returns, out)
