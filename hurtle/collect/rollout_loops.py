"""The rollout in a generated module: policy and envs in one loop over a shard of envs, called with the GIL released.

observation → network → action → env step → rollout, for each step; then values, and advantages if requested. rollout_job.py
pastes this text into a generated module after that of the CPU target, and describes `job`: `floats(job, J.values)` is the array
of that name. Arrays are flat, which compiles in half the time.
"""

import math

import numpy as np

from hurtle.collect.pasted_rollout import (
    HAS_MASK,
    HAS_PRESENT,
    INPUTS,
    IS_BOX,
    LIST_LENGTH,
    METRICS,
    STRIDE,
    TILE,
    WIDTH,
    WORK,
    J,
    allocating,
    bools,
    bytes_at,
    call_forward,
    call_sample,
    doubles,
    floats,
    ints,
    lengths,
    list_rows,
    observations,
    tables,
    words,
)
from hurtle.kernels.error_codes import ACTION, FINAL_OBSERVATION, KINDS, NO_ERROR, OBSERVATION, POLICY, REWARD
from hurtle.native.core import publish
from hurtle.native.pasted import (
    AGENTS,
    GAMMA,
    MAX_STEPS,
    U64,
    action_is_legal,
    advance_env,
    entry,
    f4,
    i8,
    jit,
    part,
    unpack,
    zero_obs,
)
from hurtle.native.stream import mix

CLIP, DISCOUNT, DECAY = 0, 1, 2  # places in `constants`


@entry
def collect_envs(handle, job, actions, first, last, lo, hi):
    """Collect steps [first, last) of envs [lo, hi).

    Returns NO_ERROR, or the first error's `(step * KINDS + kind) * num_rows + row`; the shard stops after that step.
    """
    exchange(job, False)
    error = collect_steps(handle, job, actions, first, last, lo, hi)
    exchange(job, True)
    return error


@jit
def exchange(job, back):
    """Copy small arrays into the thread's own memory, or back, so that threads do not share cache lines."""
    table = ints(job, J.exchanged)
    for k in range(0, len(table), 3):
        shared, own = bytes_at(table[k], table[k + 2]), bytes_at(table[k + 1], table[k + 2])
        if back:
            copy(own, shared, table[k + 2])
        else:
            copy(shared, own, table[k + 2])


@allocating
def collect_steps(handle, job, actions, first, last, lo, hi):
    """`collect_envs`, after `exchange`."""
    row, end = lo * AGENTS, hi * AGENTS
    layers, split = tables(job, J.layers), job[J.split]
    critic, zero, end_layer = i8(0) if job[J.is_shared] else split, i8(0), i8(len(layers))
    x, places = aligned(TILE * INPUTS), np.empty(TILE, np.int64)
    final_x, final_places, finals = aligned(TILE * INPUTS), np.empty(TILE, np.int64), i8(0)
    work, scratch = aligned(job[J.work_size]), aligned(job[J.scratch_size])
    uniforms, lists = aligned(TILE * job[J.num_uniforms]), new_lists()
    for t in range(first, last):
        for tile in range(row, end, TILE):
            count = min(i8(TILE), end - tile)
            store(job, t, tile, count, x)
            infer(job, zero, split, x, count, work, lists)
            choose(job, t, t - first, tile, count, work, uniforms, scratch)
        error = step_shard(handle, job, actions, t, lo, hi)
        if error != NO_ERROR:
            return error
        n = row
        while MAX_STEPS > 0 and n < end:
            n, finals = keep_final_obs(job, t, n, end, final_x, final_places, finals)
            if finals == TILE:
                infer(job, critic, end_layer, final_x, finals, work, lists)
                finals = write_values(job, floats(job, J.final_values), final_places, finals, work)
    infer(job, critic, end_layer, final_x, finals, work, lists)
    write_values(job, floats(job, J.final_values), final_places, finals, work)
    steps = zero if job[J.is_shared] else (last - first) * (end - row)
    for tile in range(0, steps, TILE):
        count = min(i8(TILE), steps - tile)
        gather_steps(job, first, tile, count, row, end, x, places)
        infer(job, critic, end_layer, x, count, work, lists)
        write_values(job, floats(job, J.values), places, count, work)
    if last < job[J.num_steps]:
        return NO_ERROR
    for tile in range(row, end, TILE):
        count = min(i8(TILE), end - tile)
        gather_last(job, tile, count, x, places)
        infer(job, critic, end_layer, x, count, work, lists)
        write_values(job, floats(job, J.last_values), places, count, work)
    if job[J.has_advantages]:
        write_advantages(job, row, end)
    return NO_ERROR


@allocating
def aligned(count):
    """Floats aligned to a cache line."""
    memory = np.empty(count + 16, np.float32)
    first = -(memory.ctypes.data // 4) % 16
    return memory[first : first + count]


@allocating
def new_lists():
    """Memory for a tile's nonzero numbers, and for their counts, followed by their places."""
    return np.empty(TILE * LIST_LENGTH + WIDTH, np.float32), np.empty(TILE * (LIST_LENGTH + 1) + WIDTH, np.int32)


@part
def infer(job, first, last, x, count, work, lists):
    """Run layers [first, last) of the network on a tile; mostly zero inputs are listed, so that zeros are skipped."""
    weights, layers, inputs = floats(job, J.weights), tables(job, J.layers), i8(INPUTS)
    values, places = lists
    if LIST_LENGTH > 0:
        none = values[:0]
        if list_rows(x, count, inputs, none, none, values, places[TILE:], places, i8(LIST_LENGTH)):
            call_forward(job[J.forward], weights, layers, first, last, values, i8(0), i8(LIST_LENGTH), count, work, places)
            return
    call_forward(job[J.forward], weights, layers, first, last, x, i8(0), inputs, count, work, places[:0])


@part
def store(job, t, row, count, x):
    """Store the observations of rows [row, row + count), starts and masks, and prepare the network's inputs."""
    at = t * job[J.num_rows] + row
    seen, inputs = observations(job, J.env_obs)[row * INPUTS :], observations(job, J.inputs)[at * INPUTS :]
    copy(seen, observations(job, J.obs)[at * INPUTS :], count * INPUTS)
    if job[J.normalizes]:
        for q in range(count):
            normalize(job, seen, q * INPUTS, inputs, q * INPUTS)
    for q in range(count):
        to_inputs(job, inputs, q * INPUTS, x, q * INPUTS)
    copy(bools(job, J.beginning)[row:], bools(job, J.starts)[at:], count)
    if HAS_PRESENT:
        copy(bools(job, J.env_present)[row:], bools(job, J.valid)[at:], count)
    if HAS_MASK and job[J.has_masks]:
        size = job[J.mask_size]
        copy(bools(job, J.env_mask)[row * size :], bools(job, J.masks)[at * size :], count * size)


@jit
def copy(source, into, count):
    """`into[:count] = source[:count]`, but compiled in a tenth of the time."""
    for k in range(count):
        into[k] = source[k]


@part
def normalize(job, obs, at, into, into_at):
    """Normalize an observation: subtract the mean, divide by the standard deviation, clip; rounded once."""
    mean, std, clip = doubles(job, J.mean), doubles(job, J.std), doubles(job, J.constants)[CLIP]
    for k in range(INPUTS):
        number = (np.float64(obs[at + k]) - mean[k]) / std[k]
        number = -clip if number < -clip else number
        into[into_at + k] = f4(clip if number > clip else number)


@part
def to_inputs(job, obs, at, x, x_at):
    """Turn an observation of the rollout into network inputs."""
    given, into = obs[at : at + INPUTS], x[x_at : x_at + INPUTS]
    if job[J.is_scaled]:
        low, span = floats(job, J.low), floats(job, J.range)
        for k in range(INPUTS):
            into[k] = (f4(given[k]) - low[k]) / span[k]
    else:
        for k in range(INPUTS):
            into[k] = f4(given[k])


@part
def see(job, obs, at, x, x_at):
    """Turn an env's observation into network inputs."""
    if job[J.normalizes]:
        normalize(job, obs, at, x, x_at)
    else:
        to_inputs(job, obs, at, x, x_at)


@part
def choose(job, t, drawn, row, count, work, uniforms, scratch):
    """Sample the actions of rows [row, row + count) in step t; `drawn` is the number of samples since the call began."""
    at, each, layers, nvec = t * job[J.num_rows] + row, job[J.num_uniforms], tables(job, J.layers), ints(job, J.nvec)
    if job[J.is_shared]:
        first, stride, values = layers[job[J.critic], WORK], layers[job[J.critic], STRIDE], floats(job, J.values)
        for q in range(count):
            values[at + q] = work[first + q * stride]
    streams, steps = words(job, J.streams), ints(job, J.drawn)
    for q in range(count):
        draw(streams[row + q], steps[row + q] + drawn, uniforms, q * each, each)
    size = nvec[0] if IS_BOX else i8(len(nvec))
    call_sample(
        job[J.sample], job[J.head_kind], nvec, work, layers[job[J.actor], WORK], layers[job[J.actor], STRIDE], count,
        floats(job, J.weights), job[J.log_std_at], uniforms, bools(job, J.masks), at * job[J.mask_size], job[J.has_masks],
        ints(job, J.choices), at * size, floats(job, J.numbers), at * size, floats(job, J.log_probs), at, scratch,
    )  # fmt: skip
    if IS_BOX:
        send_numbers(job, at, row, count, size)
    else:
        send_choices(job, at, row, count, size)


@jit
def draw(stream, step, uniforms, at, count):
    """The uniforms of a stream at a step; `hurtle.kernels.uniforms` is the reference."""
    z = stream + U64(step * count) * GAMMA
    for k in range(count):
        z += GAMMA
        uniforms[at + k] = f4(mix(z) >> U64(40)) * f4(2.0**-24)


@jit
def send_choices(job, at, row, count, size):
    """Convert raw choices to the env's actions."""
    raw, sent, start = ints(job, J.choices), ints(job, J.env_choices), ints(job, J.action_start)
    for q in range(count):
        for d in range(size):
            sent[(row + q) * size + d] = raw[(at + q) * size + d] + start[d]


@jit
def send_numbers(job, at, row, count, size):
    """Convert raw numbers to the env's actions; NaN stays NaN."""
    raw, sent, low, high = (
        floats(job, J.numbers),
        floats(job, J.env_numbers),
        floats(job, J.bound_low),
        floats(job, J.bound_high),
    )
    first, span = doubles(job, J.action_low), doubles(job, J.action_range)
    for q in range(count):
        for d in range(size):
            number = raw[(at + q) * size + d]
            if job[J.is_beta]:
                number = f4(first[d] + np.float64(number) * span[d])
            number = low[d] if number < low[d] else number
            sent[(row + q) * size + d] = high[d] if number > high[d] else number


@part
def step_shard(handle, job, actions, t, lo, hi):
    """Step envs [lo, hi) and record the outcome; returns the first error."""
    arrays = unpack(handle)
    for i in range(lo, hi):
        if not action_is_legal(actions[i]):
            return (t * KINDS + ACTION) * job[J.num_rows] + i * AGENTS
    for i in range(lo, hi):
        env = arrays.envs[i]
        advance_env(i, env, actions[i], True, arrays)
        zero_obs(arrays.obs[i])
        publish(i, env, arrays.obs[i], arrays)
    write_outcomes(job, t, lo * AGENTS, hi * AGENTS)
    if METRICS > 0:
        write_env_ends(job, t, lo, hi)
    return first_error(job, t, lo * AGENTS, hi * AGENTS)


@part
def write_outcomes(job, t, row, end):
    """Record the outcome of a step for rows [row, end); absent agents have none."""
    reward, terminates, truncates = floats(job, J.env_reward), bools(job, J.env_terminated), bools(job, J.env_truncated)
    rewards, terminated, truncated = floats(job, J.rewards), bools(job, J.terminated), bools(job, J.truncated)
    ends, ended, final_values = bools(job, J.env_episode_ended), bools(job, J.ended), floats(job, J.final_values)
    valid, beginning, env_ended = bools(job, J.valid), bools(job, J.beginning), bools(job, J.env_ended)
    for n in range(row, end):
        at = t * job[J.num_rows] + n
        if not HAS_PRESENT:
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
        if HAS_PRESENT:
            over = env_ended[n // AGENTS]
            if over and not acting and not beginning[n]:
                end_last_step(job, n, t)
            begins = begins or over or (beginning[n] and not acting)
        beginning[n] = begins


@part
def end_last_step(job, row, t):
    """The agent left without a flag, and the env ended before it came back: its last step ended its episode."""
    for before in range(t - 1, -1, -1):
        at = before * job[J.num_rows] + row
        if bools(job, J.valid)[at]:
            bools(job, J.terminated)[at] = True
            return


@part
def write_env_ends(job, t, lo, hi):
    """Record the metrics of envs whose episodes ended."""
    ends, metrics, into = bools(job, J.env_ended), floats(job, J.env_episode_metrics), floats(job, J.metrics)
    for i in range(lo, hi):
        at = t * (job[J.num_rows] // AGENTS) + i
        bools(job, J.over)[at] = ends[i]
        if ends[i]:
            for m in range(METRICS):
                into[at * METRICS + m] = metrics[i * METRICS + m]


@part
def first_error(job, t, row, end):
    """The first number that is not finite after step t: a log-probability, reward, final observation or next observation."""
    obs, final_obs, rewards = observations(job, J.env_obs), observations(job, J.env_final_obs), floats(job, J.rewards)
    terminated, truncated, log_probs = bools(job, J.terminated), bools(job, J.truncated), floats(job, J.log_probs)
    error = NO_ERROR
    for n in range(row, end):
        at, kind = t * job[J.num_rows] + n, KINDS
        if not is_finite(obs, n * INPUTS):
            kind = OBSERVATION
        if MAX_STEPS > 0 and truncated[at] and not terminated[at] and not is_finite(final_obs, n * INPUTS):
            kind = FINAL_OBSERVATION
        if not math.isfinite(rewards[at]):
            kind = REWARD
        if not math.isfinite(log_probs[at]):
            kind = POLICY
        if kind < KINDS:
            error = min(error, (t * KINDS + kind) * job[J.num_rows] + n)
    return error


@jit
def is_finite(obs, at):
    """Whether the observation at an offset has neither NaN nor infinity."""
    bad = 0
    for k in range(INPUTS):
        bad += not abs(f4(obs[at + k])) < f4(np.inf)
    return bad == 0


@part
def keep_final_obs(job, t, row, end, x, places, count):
    """Collect the final observations of truncated rows in [row, end) until a tile is full.

    Returns the row to continue with, and the number of observations in the tile.
    """
    final_obs, terminated, truncated = observations(job, J.env_final_obs), bools(job, J.terminated), bools(job, J.truncated)
    kept, steps, cuts = observations(job, J.final_obs), ints(job, J.final_steps), ints(job, J.cuts)
    for n in range(row, end):
        at = t * job[J.num_rows] + n
        if truncated[at] and not terminated[at]:
            slot = cuts[n] * job[J.num_rows] + n
            cuts[n] += 1
            if slot < len(steps):
                steps[slot] = t
                copy(final_obs[n * INPUTS :], kept[slot * INPUTS :], i8(INPUTS))
            see(job, final_obs, n * INPUTS, x, count * INPUTS)
            places[count] = at
            count += 1
            if count == TILE:
                return n + 1, count
    return end, count


@part
def gather_steps(job, first, tile, count, row, end, x, places):
    """Gather `count` observations of rows [row, end), from the `tile`-th after step `first` on; tiles span steps."""
    obs = observations(job, J.inputs)
    for q in range(count):
        t, n = divmod(tile + q, end - row)
        places[q] = (first + t) * job[J.num_rows] + row + n
        to_inputs(job, obs, places[q] * INPUTS, x, q * INPUTS)


@part
def gather_last(job, row, count, x, places):
    """Gather the next observations of rows [row, row + count)."""
    obs = observations(job, J.env_obs)
    for q in range(count):
        places[q] = row + q
        see(job, obs, (row + q) * INPUTS, x, q * INPUTS)


@part
def write_values(job, into, places, count, work):
    """Write the value of row q to `into[places[q]]`; returns 0, the number of rows left in the tile."""
    layers = tables(job, J.layers)
    at, stride = layers[job[J.critic], WORK], layers[job[J.critic], STRIDE]
    for q in range(count):
        into[places[q]] = work[at + q * stride]
    return i8(0)


@allocating
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
            advantage[n] = chosen(valid[n] | (not HAS_PRESENT), found, advantage[n])
        for n in range(size):
            next_value[n] = chosen(valid[n] | (not HAS_PRESENT), values[n], next_value[n])
        for n in range(size):
            advantages[n] = chosen(valid[n] | (not HAS_PRESENT), advantage[n], f4(0.0))
        for n in range(size):
            returns[n] = advantages[n] + values[n]


@jit
def bootstrapped(terminated, truncated, final_value, next_value):
    """V of what comes after a step."""
    return chosen(terminated, f4(0.0), chosen(truncated, final_value, next_value))


@jit
def chosen(condition, one, other):
    """`one if condition else other`, both already computed, so that loops are vectorized."""
    return one if condition else other
