"""`Crew`: threads that run one compiled call together, each its part; and how many of them there may be."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from functools import cache, partial
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
    """Number of cores this process may use: its CPU affinity, or less by its control group's quota or by $HURTLE_CORES."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = os.environ.get("HURTLE_CORES", "")
    shares = [int(share)] if share.isdecimal() else []
    return max(1, min([cores, *shares, *_quotas(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))]))


def has_share() -> bool:
    """Whether this process was given its share of the cores by another one, as $HURTLE_CORES."""
    return os.environ.get("HURTLE_CORES", "").isdecimal()


def _quotas(root: Path, membership: Path) -> list[int]:
    """Cores that the quotas of this process's control groups allow, of both versions: a container is one."""
    found = []
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = root / controllers if controllers else root
            if not top.is_dir():  # listed as "cpuacct,cpu" and mounted as "cpu,cpuacct"; "cpu" is a link to it
                top = root / "cpu"
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
        self._lock = threading.RLock()
        self._process = -1
        self._start()

    def _start(self) -> None:
        """Start the helpers; all of them or none."""
        control, threads, failure = aligned_zeros((self._threads * self._calls.LINE,), np.int64), self._threads, _Failure()
        finalizer = weakref.finalize(self, self._calls.dismiss, control, threads)
        helpers = [
            threading.Thread(target=_follow, args=(self._calls, control, k, failure), daemon=True) for k in range(1, threads)
        ]
        try:
            for helper in helpers:
                helper.start()
        except BaseException:
            finalizer()
            raise
        self._control, self._failure, self._helpers, self._finalizer = control, failure, helpers, finalizer
        self._process = os.getpid()

    def run(self, function: int, arguments: int, threads: int, on_error: Callable[[], None] | None = None) -> list[int]:
        """Call `function(arguments, k, threads)` on each thread k; returns their results, in that order.

        No thread is still at work when this returns or raises, even after Ctrl-C. The first error is raised.

        Args:
            function: Address of a compiled function of three int64 that returns an int64, see `address_of_entry`.
            arguments: Address of what the threads read their arguments from; the caller keeps it alive.
            threads: Number of threads to use.
            on_error: For threads that wait for each other: called when one of them fails, to make the others return.

        Raises:
            HurtleError: Another Python thread is inside `run`.
        """
        if not self._lock.acquire(blocking=False):
            raise HurtleError("Two threads use the same envs or learner at the same time; give each its own.")
        try:
            if self._process != os.getpid() or not self._finalizer.alive:  # after a fork, or after close()
                self._start()
            return self._run(function, arguments, threads, on_error)
        finally:
            self._lock.release()

    def _run(self, function: int, arguments: int, threads: int, on_error: Callable[[], None] | None) -> list[int]:
        control, failure = self._control, self._failure
        failure.error, failure.on_error = None, on_error
        try:
            first = self._calls.lead(control, function, arguments, threads)
        except BaseException:
            self._recover(on_error)
            raise
        finally:  # helpers hold `failure`: it must not keep the caller's objects alive
            error, failure.error, failure.on_error = failure.error, None, None
        if error is not None:
            raise error
        line = self._calls.LINE
        return [first, *control[line + self._calls.RESULT : threads * line : line].tolist()]

    def _recover(self, on_error: Callable[[], None] | None) -> None:
        """Wait for the helpers after an error, even if Ctrl-C is pressed meanwhile."""
        steps: list[Callable[[], Any]] = [on_error] if on_error is not None else []
        steps.append(partial(self._calls.join, self._control))
        while steps:
            with contextlib.suppress(KeyboardInterrupt):
                steps[0]()
                del steps[0]

    def close(self) -> None:
        """End the helpers, and wait until they have ended. A later call starts new ones."""
        with self._lock:
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
        try:
            if failure.on_error is not None:
                failure.on_error()
        finally:
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
