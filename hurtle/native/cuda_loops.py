"""The CUDA entry points of a generated module: one thread per env, launched on torch's stream and ready for graph capture.

A thread that wrote its own row of 400 bytes would touch 32 memory sectors with its warp for every byte. So a block keeps its
envs' observations (and, where that pays, their records) in shared memory and moves them as a whole, word by word.
Its text is pasted into every generated CUDA module (see build.py), after the constants and adapters of cuda_staging.py.
"""

from numba import cuda

from hurtle.native.core import reset_env, step_env
from hurtle.native.pasted import (
    action_is_legal,
    entry,
    load_records,
    obs_row,
    observe,
    record_of,
    sample_action,
    store_obs,
    store_records,
)


@entry
def reset_kernel(arrays, chosen):
    """Begin a new episode in the chosen envs."""
    i = cuda.grid(1)
    if i < chosen.shape[0] and chosen[i]:
        reset_env(i, arrays.envs[i], arrays.obs[i], arrays)


@entry
def step_kernel(arrays, words, actions, same_step, illegal):
    """Step every env; counts illegal actions in `illegal[0]`, whose envs stay as they are."""
    i = cuda.grid(1)
    load_records(words, actions.shape[0])
    if i < actions.shape[0]:
        env = record_of(i, arrays)
        obs = obs_row(i, arrays)
        if action_is_legal(actions[i]):
            step_env(i, env, actions[i], same_step, obs, arrays)
        else:
            cuda.atomic.add(illegal, 0, 1)
            observe(env, obs)
    store_records(words, actions.shape[0])
    store_obs(words, actions.shape[0])


@entry
def play_kernel(arrays, words, actions, seeds, clock, offset):
    """One uniformly random step of every env: step `clock[0] + offset` of its action stream."""
    i = cuda.grid(1)
    load_records(words, actions.shape[0])
    if i < actions.shape[0]:
        sample_action(seeds[i], clock[0] + offset, actions, i)
        step_env(i, record_of(i, arrays), actions[i], True, obs_row(i, arrays), arrays)
    store_records(words, actions.shape[0])
    store_obs(words, actions.shape[0])


@entry
def tick_kernel(clock, count):
    """Advance the clock of `play_kernel`, so that a captured graph moves on with every replay."""
    clock[0] += count
