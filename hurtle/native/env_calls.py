"""What Python calls to run an env's compiled code: functions that take its addresses first, so they are compiled once.

An env's entry points (cpu_loops.py) take int64 only. Here arrays become addresses, and an exception of the env passes through.
build.py loads it from a copy in the cache folder, so that Numba's disk cache never returns code of another version.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from hurtle.native.compile_lock import compile_once
from hurtle.native.cpu_loops import NEXT_STEP, PLAY, RESET, SAME_STEP
from hurtle.native.intrinsics import array_at, call_env


def entry(function: Any) -> Any:
    """Compile a function that Python calls, and keep it in the disk cache."""
    return compile_once(njit(nogil=True, error_model="numpy", cache=True, no_cfunc_wrapper=True)(function))


@entry
def reset_envs(run, handle, chosen, lo, hi):
    """Begin a new episode in the chosen envs of [lo, hi)."""
    call_env(run, (RESET, handle.ctypes.data, chosen.ctypes.data, 0, 0, 1, lo, hi))


@entry
def step_envs(run, handle, actions, same_step, lo, hi):
    """Step envs [lo, hi); returns the number of episodes that ended."""
    return call_env(run, (SAME_STEP if same_step else NEXT_STEP, handle.ctypes.data, actions.ctypes.data, 0, 0, 1, lo, hi))


@entry
def play_envs(run, handle, actions, seeds, first_step, num_steps, lo, hi):
    """Take `num_steps` uniformly random actions in envs [lo, hi); returns the number of episodes that ended."""
    arrays = handle.ctypes.data, actions.ctypes.data, seeds.ctypes.data
    return call_env(run, (PLAY, *arrays, first_step, first_step + num_steps, lo, hi))


@entry
def run_shard(call, thread, threads):
    """A thread's share of a step or of random play, for `Crew`.

    `call` is the address of: the entry point, its arguments before the range of envs, and the edges of the threads' ranges.
    """
    words = array_at(call, (8 + threads,), np.int64)
    arguments = words[1], words[2], words[3], words[4], words[5], words[6], words[7 + thread], words[8 + thread]
    return call_env(words[0], arguments)


@entry
def first_illegal(check, actions, lo, hi):
    """The first env of [lo, hi) whose action is illegal; -1 if there is none."""
    return call_env(check, (actions.ctypes.data, lo, hi))
