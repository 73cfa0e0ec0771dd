"""What Python calls to run an env's compiled code: each function takes its address first, so these are compiled once.

An env's entry points (cpu_loops.py) take int64 only. Here arrays become addresses, and an exception of the env passes through.
build.py loads it from a copy in the cache folder, so that Numba's disk cache never returns code of another version.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from hurtle.native.compile_lock import compile_once
from hurtle.native.intrinsics import call_env


def entry(function: Any) -> Any:
    """Compile a function that Python calls, and keep it in the disk cache."""
    return compile_once(njit(nogil=True, error_model="numpy", cache=True, no_cfunc_wrapper=True)(function))


@entry
def reset_envs(address, handle, chosen, lo, hi):
    """Begin a new episode in the chosen envs of [lo, hi)."""
    call_env(address, (handle.ctypes.data, chosen.ctypes.data, lo, hi))


@entry
def first_illegal(address, actions, lo, hi):
    """The first env of [lo, hi) whose action is illegal; -1 if there is none."""
    return call_env(address, (actions.ctypes.data, lo, hi))


@entry
def step_envs(address, handle, actions, same_step, lo, hi):
    """Step envs [lo, hi); returns the number of episodes that ended."""
    return call_env(address, (handle.ctypes.data, actions.ctypes.data, np.int64(same_step), lo, hi))


@entry
def play_envs(address, handle, actions, seeds, first_step, num_steps, lo, hi):
    """Take `num_steps` uniformly random actions in envs [lo, hi); returns the number of episodes that ended."""
    pointers = handle.ctypes.data, actions.ctypes.data, seeds.ctypes.data
    return call_env(address, (*pointers, first_step, num_steps, lo, hi))
