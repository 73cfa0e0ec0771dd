"""The CUDA entry points of a generated module: one thread per env, launched on torch's stream and ready for graph capture.

If each thread wrote its own row of 400 bytes, its warp would touch 32 memory sectors for every byte. Instead the envs of a
block take turns writing observations to shared memory, and the whole block copies them to global memory word by word.
Its text is pasted into every generated CUDA module (see generate.py).
"""

from numba import cuda

from hurtle.native.core import clear_outcome, publish, reset_env
from hurtle.native.pasted import (
    OBS_BYTES,
    OBS_DTYPE,
    OBS_IS_ZEROED,
    OBS_SIZE,
    ROWS,
    THREADS,
    WORD,
    action_is_legal,
    advance_env,
    entry,
    jit,
    sample_action,
    zero_obs,
)


@jit
def publish_block(i, arrays):
    """Publish all envs of the block, `ROWS` at a time through shared memory; directly if their rows are too long for it."""
    if ROWS == 0:
        if i < arrays.envs.shape[0]:
            zero_obs(arrays.obs[i])
            publish(i, arrays.envs[i], arrays.obs[i], arrays)
        return
    staged = cuda.shared.array(0, OBS_DTYPE)
    words = cuda.shared.array(0, WORD)
    thread = cuda.threadIdx.x
    first_env = i - thread
    row = thread % max(ROWS, 1)
    for turn in range(THREADS // max(ROWS, 1)):
        if OBS_IS_ZEROED:
            for k in range(thread, (ROWS * OBS_BYTES + 3) // 4, THREADS):
                words[k] = 0
            cuda.syncthreads()
        if thread // max(ROWS, 1) == turn and i < arrays.envs.shape[0]:
            publish(i, arrays.envs[i], staged[row * OBS_SIZE : (row + 1) * OBS_SIZE], arrays)
        cuda.syncthreads()
        first_row = first_env + turn * ROWS
        rows = min(ROWS, arrays.envs.shape[0] - first_row)
        for k in range(thread, (rows * OBS_BYTES + 3) // 4, THREADS):
            arrays.obs_words[first_row * OBS_BYTES // 4 + k] = words[k]
        cuda.syncthreads()


@entry
def reset_kernel(arrays, chosen):
    """Begin a new episode in the chosen envs."""
    i = cuda.grid(1)
    if i < chosen.shape[0] and chosen[i]:
        reset_env(i, arrays.envs[i], arrays)
    publish_block(i, arrays)


@entry
def step_kernel(arrays, actions, same_step, illegal):
    """Step every env; illegal actions are counted in `illegal[0]`, and their envs are not stepped."""
    i = cuda.grid(1)
    if i < actions.shape[0]:
        if action_is_legal(actions[i]):
            advance_env(i, arrays.envs[i], actions[i], same_step, arrays)
        else:
            cuda.atomic.add(illegal, 0, 1)
            clear_outcome(i, arrays)
    publish_block(i, arrays)


@entry
def play_kernel(arrays, actions, seeds, clock, offset):
    """One uniformly random step of every env: step `clock[0] + offset` of its action stream."""
    i = cuda.grid(1)
    if i < actions.shape[0]:
        sample_action(seeds[i], clock[0] + offset, actions, i)
        advance_env(i, arrays.envs[i], actions[i], True, arrays)
    publish_block(i, arrays)


@entry
def tick_kernel(clock, count):
    """Advance the clock of `play_kernel`, so that every replay of a graph takes new actions."""
    clock[0] += count
