"""The compiled side of `Physics` (physics.py): calls MuJoCo's C functions for many envs, without the GIL and without Python.

build.py loads it from a copy in the cache folder, as it does crew_calls.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from hurtle.native.atomics import add
from hurtle.native.compile_lock import compile_once
from hurtle.native.intrinsics import array_at, call_c

# The words of a job: addresses of C functions and of the model, numbers, addresses of arrays.
MJ_STEP, MJ_AFTER_STEP, MJ_RESET, MJ_FORWARD, MODEL = 0, 1, 2, 3, 4  # MJ_AFTER_STEP: 0 if nothing is called
RESETS, FRAME_SKIP, NUM_ENVS, COUNT, NQ, NV, NU, NUM_FIELDS = 5, 6, 7, 8, 9, 10, 11, 12
ENVS, FIELDS, ORDER, ACTIONS, STARTS, COUNTERS = 13, 14, 15, 16, 17, 18
WORDS = 19
DATA, CTRL, QPOS, QVEL, OWN = 0, 1, 2, 3, 4  # the columns of ENVS, addresses in one env's mjData; its fields from OWN on
LINE = 32  # words from one counter to the next, a pair of cache lines


def entry(function: Any) -> Any:
    """Compile a function that Python calls, and keep it in the disk cache."""
    return compile_once(njit(nogil=True, cache=True, no_cfunc_wrapper=True)(function))


@entry
def run_physics(job, thread, threads):
    """A thread's share of a step or reset of the first COUNT envs of ORDER: its own part first, then what others have left.

    Returns the number of envs.
    """
    words = array_at(job, (WORDS,), np.int64)
    num_envs, num_fields, count, done = words[NUM_ENVS], words[NUM_FIELDS], words[COUNT], 0
    envs = array_at(words[ENVS], (num_envs, OWN + num_fields), np.int64)
    fields = array_at(words[FIELDS], (num_fields, 2), np.int64)  # where all envs' rows go, and the size of a row
    order = array_at(words[ORDER], (num_envs,), np.int64)
    counters = array_at(words[COUNTERS], (threads * LINE,), np.int64)
    for other in range(threads):
        part = (thread + other) % threads
        last = count * (part + 1) // threads
        while True:
            place = add(counters, part * LINE, 1)
            if place >= last:
                break
            env = order[place]
            own = envs[env]
            if words[RESETS]:
                _reset(words, own, env)
            else:
                _step(words, own, env)
            for k in range(num_fields):
                size = fields[k, 1]
                source = array_at(own[OWN + k], (size,), np.float64)
                target = array_at(fields[k, 0] + 8 * size * env, (size,), np.float64)
                for j in range(size):
                    target[j] = source[j]
            done += 1
    return done


@njit(nogil=True)
def _step(words, own, env):
    nu = words[NU]
    action = array_at(words[ACTIONS] + 4 * nu * env, (nu,), np.float32)
    ctrl = array_at(own[CTRL], (nu,), np.float64)
    for j in range(nu):
        ctrl[j] = action[j]
    for _ in range(words[FRAME_SKIP]):
        call_c(words[MJ_STEP], (words[MODEL], own[DATA]))
    if words[MJ_AFTER_STEP]:
        call_c(words[MJ_AFTER_STEP], (words[MODEL], own[DATA]))


@njit(nogil=True)
def _reset(words, own, env):
    call_c(words[MJ_RESET], (words[MODEL], own[DATA]))
    nq, nv = words[NQ], words[NV]
    start = array_at(words[STARTS] + 8 * (nq + nv) * env, (nq + nv,), np.float64)
    qpos, qvel = array_at(own[QPOS], (nq,), np.float64), array_at(own[QVEL], (nv,), np.float64)
    for j in range(nq):
        qpos[j] = start[j]
    for j in range(nv):
        qvel[j] = start[nq + j]
    call_c(words[MJ_FORWARD], (words[MODEL], own[DATA]))
