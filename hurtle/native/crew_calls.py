"""The compiled side of `Crew` (threads.py): a leading thread and its helpers, which wait here between calls, without the GIL.

`control` is their shared memory, int64: a pair of cache lines for all, then one for each helper. build.py loads this file from
a copy in the cache folder, as it does env_calls.py.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from hurtle.native.atomics import SPINS, add, load, sleep_while, store, wake
from hurtle.native.compile_lock import compile_once
from hurtle.native.intrinsics import call_env

LINE = 32  # words from one pair of lines to the next
PENDING, WAITING, FUNCTION, ARGUMENTS, THREADS = 0, 1, 16, 17, 18  # helpers at work, whether the leader sleeps; the call
CALLS, SLEEPING, RESULT = 0, 1, 2  # in the lines of a helper: its calls so far, whether it sleeps, what the last one returned


def _options(**options: Any) -> Any:
    return njit(nogil=True, no_cfunc_wrapper=True, **options)


def entry(function: Any) -> Any:
    """Compile a function that Python calls, and keep it in the disk cache."""
    return compile_once(_options(cache=True)(function))


@entry
def lead(control, function, arguments, threads):
    """Call `function(arguments, k, threads)` on every thread k, on this one for k = 0; returns its result when all are done."""
    control[FUNCTION], control[ARGUMENTS], control[THREADS] = function, arguments, threads
    store(control, PENDING, threads - 1)
    for k in range(1, threads):
        _call(control, k * LINE)
    result = call_env(function, (arguments, 0, threads))
    join(control)
    return result


@entry
def join(control):
    """Wait for the helpers that are at work."""
    looks = 0
    while load(control, PENDING) > 0:
        looks += 1
        if looks > SPINS:
            store(control, WAITING, 1)
            left = load(control, PENDING)
            if left > 0:
                sleep_while(control, PENDING, left)
            store(control, WAITING, 0)


@entry
def follow(control, k, calls):
    """Be helper k: take part in every call after the first `calls` ones, until dismissed."""
    own = k * LINE
    while True:
        looks = 0
        while load(control, own + CALLS) == calls:
            looks += 1
            if looks > SPINS:
                store(control, own + SLEEPING, 1)
                sleep_while(control, own + CALLS, calls)
                store(control, own + SLEEPING, 0)
        calls += 1
        if control[FUNCTION] == 0:
            return
        control[own + RESULT] = call_env(control[FUNCTION], (control[ARGUMENTS], k, control[THREADS]))
        arrive(control)


@entry
def arrive(control):
    """Report a helper's part as done."""
    if add(control, PENDING, -1) == 1 and load(control, WAITING) > 0:
        wake(control, PENDING)


@entry
def dismiss(control, threads):
    """End the helpers, whatever they wait for."""
    control[FUNCTION] = 0
    for k in range(1, threads):
        _call(control, k * LINE)


@_options()
def _call(control, own):
    add(control, own + CALLS, 1)
    if load(control, own + SLEEPING) > 0:
        wake(control, own + CALLS)
