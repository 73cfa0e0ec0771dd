"""The rollout of native envs: policy and envs in one loop over a shard of envs, called with the GIL released.

observation → network → action → env step → rollout, for each step; then values, and advantages if requested. rollout_job.py
describes `job`. Envs are called by address, so this is compiled once for all of them, and again only for another observation
dtype: `like` is an array of that dtype. Arrays are flat, which compiles in half the time.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from hurtle.kernels.error_codes import ACTION, FINAL_OBSERVATION, KINDS, NO_ERROR, OBSERVATION, POLICY, REWARD
from hurtle.native.cpu_loops import SAME_STEP
from hurtle.native.intrinsics import call_env

from .head_calls import call_sample
from .host import TILE, WIDTH, entry, f4, strict, strict_allocating, strict_inlined, variant
from .memory import address_of, aligned, call, ints_at
from .network import STRIDE, WORK, call_forward
from .policy_table import SCALED_ACTIONS, SQUASHED_ACTIONS
from .remembering import KEEP, KEEP_FINAL, RECALL, RECALL_FINALS
from .rollout_job import J, bools, bytes_at, doubles, floats, ints, lengths, observations, tables, words
from .sparse import list_rows

i8 = np.int64
U64 = np.uint64
GAMMA = U64(0x9E3779B97F4A7C15)

CLIP, DISCOUNT, DECAY = 0, 1, 2  # indices into `constants`


@cache
def collect_envs_of(dtype: np.dtype) -> Any:
    """`collect_envs(call, thread, threads)` for envs with observations of that dtype.

    It collects steps [first, last) of a thread's envs [lo, hi). `call` is the address of first, last, and of (job, lo, hi) for
    each thread. Returns NO_ERROR, or the first error's `(step * KINDS + kind) * num_rows + row`; the thread stops after that
    step.
    """
    like = np.zeros(0, dtype)

    @entry
    @variant(dtype.name)
    def collect_envs(call, thread, threads):
        numbers, own = ints_at(call, 2 + 3 * threads), 2 + 3 * thread
        job = ints_at(numbers[own], J.size)
        exchange(job, False)
        error = collect_steps(job, like, numbers[0], numbers[1], numbers[own + 1], numbers[own + 2])
        exchange(job, True)
        return error

    return collect_envs


@strict_inlined
def exchange(job, back):
    """Copy small arrays into the thread's own memory, or back, so that threads do not share cache lines."""
    table = ints(job, J.exchanged)
    for k in range(0, len(table), 3):
        shared, own = bytes_at(table[k], table[k + 2]), bytes_at(table[k + 1], table[k + 2])
        if back:
            copy(own, shared, table[k + 2])
        else:
            copy(shared, own, table[k + 2])


@strict_allocating
def collect_steps(job, like, first, last, lo, hi):
    """`collect_envs`, after `exchange`."""
    row, end, inputs = lo * job[J.num_agents], hi * job[J.num_agents], job[J.num_inputs]
    layers, split = tables(job, J.layers), job[J.split]
    critic, zero, end_layer = i8(0) if job[J.is_shared] else split, i8(0), i8(len(layers))
    x, places = aligned(TILE * inputs), np.empty(TILE, np.int64)
    final_x, final_places, finals = aligned(TILE * inputs), np.empty(TILE, np.int64), i8(0)
    work, scratch = aligned(job[J.work_size]), aligned(job[J.scratch_size])
    uniforms, lists = aligned(TILE * job[J.num_uniforms]), new_lists(job[J.list_length])
    for t in range(first, last):
        for tile in range(row, end, TILE):
            count = min(i8(TILE), end - tile)
            store(job, like, t, tile, count, x)
            remember(job, RECALL, tile, count, work)
            infer(job, zero, split, x, count, work, lists)
            remember(job, KEEP, tile, count, work)
            choose(job, t, t - first, tile, count, work, uniforms, scratch)
        error = step_shard(job, like, t, lo, hi)
        if error != NO_ERROR:
            return error
        n = row
        while job[J.max_steps] > 0 and n < end:
            n, finals = keep_final_obs(job, like, t, n, end, final_x, final_places, finals, work)
            if finals == TILE:
                remember(job, RECALL_FINALS, zero, finals, work)
                infer(job, critic, end_layer, final_x, finals, work, lists)
                finals = write_values(job, floats(job, J.final_values), final_places, finals, work)
    remember(job, RECALL_FINALS, zero, finals, work)
    infer(job, critic, end_layer, final_x, finals, work, lists)
    write_values(job, floats(job, J.final_values), final_places, finals, work)
    steps = zero if job[J.is_shared] else (last - first) * (end - row)
    for tile in range(0, steps, TILE):
        count = min(i8(TILE), steps - tile)
        gather_steps(job, like, first, tile, count, row, end, x, places)
        infer(job, critic, end_layer, x, count, work, lists)
        write_values(job, floats(job, J.values), places, count, work)
    if last < job[J.num_steps]:
        return NO_ERROR
    for tile in range(row, end, TILE):
        count = min(i8(TILE), end - tile)
        gather_last(job, like, tile, count, x, places)
        remember(job, RECALL, tile, count, work)
        infer(job, critic, end_layer, x, count, work, lists)
        write_values(job, floats(job, J.last_values), places, count, work)
    if job[J.has_advantages]:
        write_advantages(job, row, end)
    return NO_ERROR


@strict_allocating
def new_lists(length):
    """Memory for a tile's nonzero numbers, and for their counts, followed by their indices."""
    return np.empty(TILE * length + WIDTH, np.float32), np.empty(TILE * (length + 1) + WIDTH, np.int32)


@strict
def infer(job, first, last, x, count, work, lists):
    """Run layers [first, last) of the network on a tile; mostly zero inputs are listed, so that zeros are skipped."""
    weights, layers, inputs, length = floats(job, J.weights), tables(job, J.layers), job[J.num_inputs], job[J.list_length]
    values, places = lists
    if length > 0:
        none = values[:0]
        if list_rows(x, count, inputs, none, none, values, places[TILE:], places, length):
            call_forward(job[J.forward], weights, layers, first, last, values, i8(0), length, count, work, places)
            return
    call_forward(job[J.forward], weights, layers, first, last, x, i8(0), inputs, count, work, places[:0])


@strict
def remember(job, what, first, count, work):
    """Recall or keep states of the policy's memory, if it has one: see remembering.py."""
    if job[J.remember] != 0:
        call(job[J.remember], (address_of(job, 0), i8(what), first, count, address_of(work, 0)))


@strict
def store(job, like, t, row, count, x):
    """Store the observations of rows [row, row + count), starts and masks, and prepare the network's inputs."""
    at, size = t * job[J.num_rows] + row, job[J.num_inputs]
    seen, inputs = observations(job, J.env_obs, like)[row * size :], observations(job, J.inputs, like)[at * size :]
    copy(seen, observations(job, J.obs, like)[at * size :], count * size)
    if job[J.normalizes]:
        for q in range(count):
            normalize(job, seen, q * size, inputs, q * size)
    if job[J.is_scaled]:
        for q in range(count):
            to_inputs(job, inputs, q * size, x, q * size)
    else:
        for k in range(count * size):
            x[k] = f4(inputs[k])
    copy(bools(job, J.beginning)[row:], bools(job, J.starts)[at:], count)
    if job[J.has_present]:
        copy(bools(job, J.env_present)[row:], bools(job, J.valid)[at:], count)
    if job[J.copies_masks]:
        width = job[J.mask_size]
        copy(bools(job, J.env_mask)[row * width :], bools(job, J.masks)[at * width :], count * width)


@strict_inlined
def copy(source, into, count):
    """`into[:count] = source[:count]`, but compiled in a tenth of the time."""
    for k in range(count):
        into[k] = source[k]


@strict
def normalize(job, obs, at, into, into_at):
    """Normalize an observation: subtract the mean, divide by the standard deviation, clip; rounded once."""
    mean, std, clip = doubles(job, J.mean), doubles(job, J.std), doubles(job, J.constants)[CLIP]
    for k in range(job[J.num_inputs]):
        number = (np.float64(obs[at + k]) - mean[k]) / std[k]
        number = -clip if number < -clip else number
        into[into_at + k] = f4(clip if number > clip else number)


@strict
def to_inputs(job, obs, at, x, x_at):
    """Turn an observation of the rollout into network inputs."""
    size = job[J.num_inputs]
    given, into = obs[at : at + size], x[x_at : x_at + size]
    if job[J.is_scaled]:
        low, span = floats(job, J.low), floats(job, J.range)
        for k in range(size):
            into[k] = (f4(given[k]) - low[k]) / span[k]
    else:
        for k in range(size):
            into[k] = f4(given[k])


@strict
def see(job, obs, at, x, x_at):
    """Turn an env's observation into network inputs."""
    if job[J.normalizes]:
        normalize(job, obs, at, x, x_at)
    else:
        to_inputs(job, obs, at, x, x_at)


@strict
def choose(job, t, drawn, row, count, work, uniforms, scratch):
    """Sample the actions of rows [row, row + count) in step t; `drawn` is the number of samples since the call began."""
    at, each, layers, nvec = t * job[J.num_rows] + row, job[J.num_uniforms], tables(job, J.layers), ints(job, J.nvec)
    if job[J.is_shared]:
        first, stride, values = layers[job[J.critic], WORK], layers[job[J.critic], STRIDE], floats(job, J.values)
        for q in range(count):
            values[at + q] = highest(work, first + q * stride, job[J.num_values])
    streams, steps = words(job, J.streams), ints(job, J.drawn)
    for q in range(count):
        draw(streams[row + q], steps[row + q] + drawn, uniforms, q * each, each)
    size = nvec[0] if job[J.is_box] else i8(len(nvec))
    call_sample(
        job[J.sample], job[J.head_kind], nvec, work, layers[job[J.actor], WORK], layers[job[J.actor], STRIDE], count,
        floats(job, J.weights), job[J.log_std_at], uniforms, bools(job, J.masks), at * job[J.mask_size], job[J.has_masks],
        ints(job, J.choices), at * size, floats(job, J.numbers), at * size, floats(job, J.log_probs), at, scratch,
    )  # fmt: skip
    if job[J.is_box]:
        bounds = (floats(job, J.bound_low), floats(job, J.bound_high), doubles(job, J.action_low), doubles(job, J.action_range))
        send_numbers(
            floats(job, J.numbers)[at * size :], floats(job, J.env_numbers)[row * size :], bounds, job[J.scaling], count, size
        )
    else:
        send_choices(
            ints(job, J.choices)[at * size :], ints(job, J.env_choices)[row * size :], ints(job, J.action_start), count, size
        )


@strict_inlined
def mix(z):
    """The output function of SplitMix64, as in `hurtle.native.rng`."""
    z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    return z ^ (z >> U64(31))


@strict_inlined
def draw(stream, step, uniforms, at, count):
    """The uniforms of a stream at a step; `hurtle.kernels.uniforms` is the reference."""
    z = stream + U64(step * count) * GAMMA
    for k in range(count):
        z += GAMMA
        uniforms[at + k] = f4(mix(z) >> U64(40)) * f4(2.0**-24)


@strict_inlined
def highest(work, at, count):
    """The largest of `count` adjacent numbers: a Q-network's value; other critics have one output."""
    found = work[at]
    for k in range(1, count):
        found = work[at + k] if work[at + k] > found else found
    return found


@strict_inlined
def send_choices(raw, sent, start, count, size):
    """Convert the raw choices of `count` rows to the env's actions."""
    for q in range(count):
        for d in range(size):
            sent[q * size + d] = raw[q * size + d] + start[d]


@strict_inlined
def send_numbers(raw, sent, bounds, scaling, count, size):
    """Convert the raw numbers of `count` rows to the env's actions, as `ActionTransform.apply` does; NaN stays NaN."""
    low, high, first, span = bounds
    for q in range(count):
        for d in range(size):
            number = raw[q * size + d]
            if scaling == SQUASHED_ACTIONS:
                number = f4(first[d] + (math.tanh(np.float64(number)) + 1.0) / 2.0 * span[d])
            elif scaling == SCALED_ACTIONS:
                number = f4(first[d] + np.float64(number) * span[d])
            number = low[d] if number < low[d] else number
            sent[q * size + d] = high[d] if number > high[d] else number


@strict
def step_shard(job, like, t, lo, hi):
    """Step envs [lo, hi) and record the outcome; returns the first error."""
    agents = job[J.num_agents]
    illegal = call_env(job[J.first_illegal], (job[J.actions], lo, hi))
    if illegal >= 0:
        return (t * KINDS + ACTION) * job[J.num_rows] + illegal * agents
    call_env(job[J.run_envs], (i8(SAME_STEP), job[J.handle], job[J.actions], i8(0), i8(0), i8(1), lo, hi))
    write_outcomes(job, t, lo * agents, hi * agents)
    if job[J.num_metrics] > 0:
        write_env_ends(job, t, lo, hi)
    return first_error(job, like, t, lo * agents, hi * agents)


@strict
def write_outcomes(job, t, row, end):
    """Record the outcome of a step for rows [row, end); absent agents have none."""
    reward, terminates, truncates = floats(job, J.env_reward), bools(job, J.env_terminated), bools(job, J.env_truncated)
    rewards, terminated, truncated = floats(job, J.rewards), bools(job, J.terminated), bools(job, J.truncated)
    ends, ended, final_values = bools(job, J.env_episode_ended), bools(job, J.ended), floats(job, J.final_values)
    valid, beginning, env_ended = bools(job, J.valid), bools(job, J.beginning), bools(job, J.env_ended)
    has_present, agents = job[J.has_present] != 0, job[J.num_agents]
    for n in range(row, end):
        at = t * job[J.num_rows] + n
        if not has_present:
            valid[at] = True
        acting = valid[at]
        rewards[at] = reward[n] if acting else f4(0.0)
        terminated[at] = terminates[n] and acting
        truncated[at] = truncates[n] and acting
        final_values[at] = f4(0.0)
        ended[at] = ends[n]
        if ends[n]:
            floats(job, J.episode_returns)[at] = floats(job, J.env_episode_return)[n]
            lengths(job, J.episode_lengths)[at] = lengths(job, J.env_episode_length)[n]
        begins = terminated[at] or truncated[at]
        if has_present:
            over = env_ended[n // agents]
            if over and not acting and not beginning[n]:
                end_last_step(job, n, t)
            begins = begins or over or (beginning[n] and not acting)
        beginning[n] = begins


@strict
def end_last_step(job, row, t):
    """The agent left without a flag and the env ended before it returned: its last step ended its episode."""
    for before in range(t - 1, -1, -1):
        at = before * job[J.num_rows] + row
        if bools(job, J.valid)[at]:
            bools(job, J.terminated)[at] = True
            return


@strict
def write_env_ends(job, t, lo, hi):
    """Record the metrics of envs whose episodes ended."""
    ends, metrics, into = bools(job, J.env_ended), floats(job, J.env_episode_metrics), floats(job, J.metrics)
    num_envs, size = job[J.num_rows] // job[J.num_agents], job[J.num_metrics]
    for i in range(lo, hi):
        at = t * num_envs + i
        bools(job, J.over)[at] = ends[i]
        if ends[i]:
            for m in range(size):
                into[at * size + m] = metrics[i * size + m]


@strict
def first_error(job, like, t, row, end):
    """The first non-finite number after step t: a log-probability, reward, final observation or next observation."""
    obs, final_obs = observations(job, J.env_obs, like), observations(job, J.env_final_obs, like)
    terminated, truncated = bools(job, J.terminated), bools(job, J.truncated)
    rewards, log_probs = floats(job, J.rewards), floats(job, J.log_probs)
    error, size, has_limit = NO_ERROR, job[J.num_inputs], job[J.max_steps] > 0
    all_finite = is_finite(obs, row * size, (end - row) * size)
    for n in range(row, end):
        at, kind = t * job[J.num_rows] + n, KINDS
        if not all_finite and not is_finite(obs, n * size, size):
            kind = OBSERVATION
        if has_limit and truncated[at] and not terminated[at] and not is_finite(final_obs, n * size, size):
            kind = FINAL_OBSERVATION
        if not math.isfinite(rewards[at]):
            kind = REWARD
        if not math.isfinite(log_probs[at]):
            kind = POLICY
        if kind < KINDS:
            error = min(error, (t * KINDS + kind) * job[J.num_rows] + n)
    return error


@strict_inlined
def is_finite(obs, at, size):
    """Whether the numbers at an offset are all finite."""
    bad, given = 0, obs[at : at + size]
    for k in range(size):
        bad += not abs(f4(given[k])) < f4(np.inf)
    return bad == 0


@strict
def keep_final_obs(job, like, t, row, end, x, places, count, work):
    """Collect the final observations of truncated rows in [row, end) until a tile is full.

    Returns the row to continue with, and the number of observations in the tile.
    """
    final_obs, kept = observations(job, J.env_final_obs, like), observations(job, J.final_obs, like)
    terminated, truncated = bools(job, J.terminated), bools(job, J.truncated)
    steps, cuts, size = ints(job, J.final_steps), ints(job, J.cuts), job[J.num_inputs]
    for n in range(row, end):
        at = t * job[J.num_rows] + n
        if truncated[at] and not terminated[at]:
            slot = cuts[n] * job[J.num_rows] + n
            cuts[n] += 1
            if slot < len(steps):
                steps[slot] = t
                copy(final_obs[n * size :], kept[slot * size :], size)
            remember(job, KEEP_FINAL, n, count, work)
            see(job, final_obs, n * size, x, count * size)
            places[count] = at
            count += 1
            if count == TILE:
                return n + 1, count
    return end, count


@strict
def gather_steps(job, like, first, tile, count, row, end, x, places):
    """Gather `count` observations of rows [row, end), from the `tile`-th after step `first` on; tiles span steps."""
    obs, size = observations(job, J.inputs, like), job[J.num_inputs]
    for q in range(count):
        t, n = divmod(tile + q, end - row)
        places[q] = (first + t) * job[J.num_rows] + row + n
        to_inputs(job, obs, places[q] * size, x, q * size)


@strict
def gather_last(job, like, row, count, x, places):
    """Gather the next observations of rows [row, row + count)."""
    obs, size = observations(job, J.env_obs, like), job[J.num_inputs]
    for q in range(count):
        places[q] = row + q
        see(job, obs, (row + q) * size, x, q * size)


@strict
def write_values(job, into, places, count, work):
    """Write the value of row q to `into[places[q]]`; returns 0, the number of rows left in the tile."""
    layers = tables(job, J.layers)
    at, stride = layers[job[J.critic], WORK], layers[job[J.critic], STRIDE]
    for q in range(count):
        into[places[q]] = highest(work, at + q * stride, job[J.num_values])
    return i8(0)


@strict_allocating
def write_advantages(job, row, end):
    """GAE and returns of rows [row, end); `hurtle.kernels.gae` is the reference."""
    gamma, decay, size = f4(doubles(job, J.constants)[DISCOUNT]), f4(doubles(job, J.constants)[DECAY]), end - row
    next_value, advantage = np.empty(size, np.float32), np.zeros(size, np.float32)
    copy(floats(job, J.last_values)[row:], next_value, size)
    for i in range(job[J.num_steps]):
        at = (job[J.num_steps] - 1 - i) * job[J.num_rows] + row
        rewards, values, final_values = (
            floats(job, J.rewards)[at:],
            floats(job, J.values)[at:],
            floats(job, J.final_values)[at:],
        )
        terminated, truncated, valid = bools(job, J.terminated)[at:], bools(job, J.truncated)[at:], bools(job, J.valid)[at:]
        advantages, returns = floats(job, J.advantages)[at:], floats(job, J.returns)[at:]
        for n in range(size):
            after = bootstrapped(terminated[n], truncated[n], final_values[n], next_value[n])
            carried = chosen(terminated[n] | truncated[n], f4(0.0), advantage[n])
            found = rewards[n] + gamma * after - values[n] + decay * carried
            advantage[n] = chosen(valid[n], found, advantage[n])
        for n in range(size):
            next_value[n] = chosen(valid[n], values[n], next_value[n])
        for n in range(size):
            advantages[n] = chosen(valid[n], advantage[n], f4(0.0))
        for n in range(size):
            returns[n] = advantages[n] + values[n]


@strict_inlined
def bootstrapped(terminated, truncated, final_value, next_value):
    """V of the state after a step."""
    return chosen(terminated, f4(0.0), chosen(truncated, final_value, next_value))


@strict_inlined
def chosen(condition, one, other):
    """`one if condition else other`, both already computed, so that loops are vectorized."""
    return one if condition else other
