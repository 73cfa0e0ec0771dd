"""What Python calls to run an env's compiled code: functions that take its addresses first, so they are compiled once.

An env's entry points (cpu_loops.py) take int64 only. Here arrays become addresses, and an exception of the env passes through.
build.py loads it from a copy in the cache folder, so that Numba's disk cache never returns code of another version.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from hurtle.native.compile_lock import compile_once
from hurtle.native.cpu_loops import NEXT_STEP, PLAY, RESET, SAME_STEP
from hurtle.native.intrinsics import call_env


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
def first_illegal(check, actions, lo, hi):
    """The first env of [lo, hi) whose action is illegal; -1 if there is none."""
    return call_env(check, (actions.ctypes.data, lo, hi))
