"""A barrier for threads that run compiled code in parallel: spins briefly, then sleeps; leaves on an abort."""

from __future__ import annotations

import numpy as np

from hurtle.native.atomics import SPINS, add, load, sleep_while, store, wake

from .host import entry, jit

_ARRIVED, _GENERATION, _SLEEPING, ABORTED = 0, 16, 32, 48  # a pair of cache lines apart; a 1 at ABORTED makes all threads leave


def new_barrier() -> np.ndarray:
    """The state of a barrier, shared by its threads."""
    return np.zeros(64, np.int64)


@jit
def wait_for_all(barrier, threads):
    """Wait for all threads; False if one has aborted, and this thread must also return."""
    if threads > 1:
        generation = load(barrier, _GENERATION)
        if add(barrier, _ARRIVED, 1) == threads - 1:
            store(barrier, _ARRIVED, 0)
            _open(barrier)
        else:
            looks = 0
            while load(barrier, _GENERATION) == generation and load(barrier, ABORTED) == 0:
                looks += 1
                if looks > SPINS:
                    add(barrier, _SLEEPING, 1)
                    sleep_while(barrier, _GENERATION, generation)
                    add(barrier, _SLEEPING, -1)
    return load(barrier, ABORTED) == 0


@jit
def _open(barrier):
    add(barrier, _GENERATION, 1)
    if load(barrier, _SLEEPING) > 0:
        wake(barrier, _GENERATION)


@entry
def abort(barrier):
    """Make every thread leave, also those that sleep."""
    store(barrier, ABORTED, 1)
    _open(barrier)
