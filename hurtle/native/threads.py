"""`Crew`: threads that run one compiled call together, each its part; and how many of them there may be."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hurtle.errors import HurtleError
from hurtle.native.batch_arrays import aligned_zeros
from hurtle.native.build import COMPILING, shared_module

SHARD_GRAIN = 128
"""Shards start at multiples of this, so that no two threads write to one cache line, even in arrays of one byte per env."""


def shard_edges(size: int, threads: int) -> np.ndarray:
    """Where the shards of `range(size)` begin, one for each thread, and where the last one ends."""
    grain = SHARD_GRAIN if size >= SHARD_GRAIN * threads else 1
    return np.array([*(size * k // threads // grain * grain for k in range(threads)), size], np.int64)


def free_cores() -> int:
    """Number of cores this process may use: its CPU affinity, or less if the quota of its control group is lower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_quotas(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))]))


def _quotas(root: Path, membership: Path) -> list[int]:
    """Cores that the quotas of this process's control groups allow, of both versions: a container is one."""
    found = []
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = root / controllers if controllers else root
            group = top / path.lstrip("/")
            for folder in (group, *group.parents[: len(group.parents) - len(top.parents)]):
                with contextlib.suppress(OSError, ValueError):  # no such file, or no limit: "max"
                    quota, period = (
                        ((folder / f"cpu.cfs_{word}_us").read_text() for word in ("quota", "period"))
                        if controllers
                        else (folder / "cpu.max").read_text().split()
                    )
                    if int(quota) > 0:
                        found.append(int(quota) // int(period))
    return found


def thread_count(wanted: int | None, most: int) -> int:
    """The number of threads to use: as requested, or all free cores, but never more than cores or parts of the work.

    Raises:
        HurtleError: Not an int of at least 1.
    """
    if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1):
        raise HurtleError(f"A number of threads is an int of at least 1, or None for all free cores; got {wanted!r}.")
    return max(1, min(free_cores(), wanted or most, most))


class Crew:
    """The calling thread and helpers that wait in compiled code, without the GIL, for the next call.

    Helpers end when this object is closed or collected.

    Args:
        threads: The most threads that a call may use, the calling one included.
    """

    def __init__(self, threads: int) -> None:
        self._calls, self._threads = _compiled_calls(), threads
        self._start()

    def _start(self) -> None:
        """Start the helpers."""
        self._process, threads = os.getpid(), self._threads
        self._control, self._failure = aligned_zeros((threads * self._calls.LINE,), np.int64), _Failure()
        helpers = [(self._calls, self._control, k, self._failure) for k in range(1, threads)]
        self._helpers = [threading.Thread(target=_follow, args=helper, daemon=True) for helper in helpers]
        for helper in self._helpers:
            helper.start()
        self._finalizer = weakref.finalize(self, self._calls.dismiss, self._control, threads)

    def run(self, function: int, arguments: np.ndarray, threads: int, on_error: Callable[[], None] | None = None) -> list[int]:
        """Call `function(address of arguments, k, threads)` on each thread k; returns their results, in that order.

        No thread is still at work when this returns or raises, even after Ctrl-C. The first error is raised.

        Args:
            function: Address of a compiled function of three int64 that returns an int64, see `address_of_entry`.
            arguments: What all threads read their arguments from.
            threads: Number of threads to use.
            on_error: For threads that wait for each other: called when one of them fails, to make the others return.
        """
        if self._process != os.getpid() or not self._finalizer.alive:  # after a fork helpers are missing
            self._start()
        control, failure = self._control, self._failure
        failure.error, failure.on_error = None, on_error
        try:
            first = self._calls.lead(control, function, arguments.ctypes.data, threads)
        except BaseException:
            if on_error is not None:
                on_error()
            self._calls.join(control)
            raise
        if failure.error is not None:
            raise failure.error
        line = self._calls.LINE
        return [first, *control[line + self._calls.RESULT : threads * line : line].tolist()]

    def close(self) -> None:
        """End the helpers, and wait until they have ended. A later call starts new ones."""
        self._finalizer()
        for helper in self._helpers:
            helper.join()


class _Failure:
    """The first error of a helper in a call, and what to do about one."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.on_error: Callable[[], None] | None = None


def _follow(calls: Any, control: np.ndarray, k: int, failure: _Failure) -> None:
    """The life of helper k."""
    done = 0
    while True:
        try:
            return calls.follow(control, k, done)
        except BaseException as error:
            failure.error = failure.error or error
            if failure.on_error is not None:
                failure.on_error()
            done = int(control[k * calls.LINE + calls.CALLS])  # before arriving: then the leader may call again
            calls.arrive(control)


@cache
def _compiled_calls() -> Any:
    """crew_calls.py with all of its functions compiled."""
    from numba import types

    words, number = types.int64[::1], types.int64
    with COMPILING:
        calls = shared_module("crew_calls.py")
        for name, numbers in (("join", 0), ("arrive", 0), ("dismiss", 1), ("follow", 2), ("lead", 3)):
            getattr(calls, name).compile((words, *[number] * numbers))
    return calls
