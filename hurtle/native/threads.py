"""Helper threads that each run one nogil call over their shard of envs: shards → threads → results, in shard order."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError

SHARD_GRAIN = 128
"""Shards start at multiples of this, so that no two threads write to one cache line, even in arrays of one byte per env."""

Job = Callable[[int, int], Any]


def free_cores() -> int:
    """Number of cores this process may use: its CPU affinity, or less if a container's quota is lower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or no limit: "max"
        return cores


def thread_count(wanted: int | None, most: int) -> int:
    """The number of threads to use: as requested, or all free cores, but never more than cores or parts of the work.

    Raises:
        HurtleError: Not an int of at least 1.
    """
    if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1):
        raise HurtleError(f"A number of threads is an int of at least 1, or None for all free cores; got {wanted!r}.")
    return max(1, min(free_cores(), wanted or most, most))


class ShardThreads:
    """Splits `range(size)` into one shard per thread; the calling thread takes the first.

    Threads block between calls and exit when this object is closed or collected.
    """

    def __init__(self, size: int, num_threads: int):
        count = max(1, min(num_threads, size))
        grain = SHARD_GRAIN if size >= SHARD_GRAIN * count else 1
        edges = [size * k // count // grain * grain for k in range(count)] + [size]
        self.shards = list(pairwise(edges))
        self._start()

    def _start(self) -> None:
        """Start the helper threads of this process; those of a parent process do not survive a fork."""
        self._process = os.getpid()
        self._inboxes: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in self.shards[1:]]
        jobs = [(k, self.shards[k], inbox) for k, inbox in enumerate(self._inboxes, 1)]
        self._helpers = [threading.Thread(target=_work, args=job, daemon=True) for job in jobs]
        for helper in self._helpers:
            helper.start()
        self._finalizer = weakref.finalize(self, _stop, self._inboxes)

    def run(self, job: Job, on_error: Callable[[], None] | None = None) -> list[Any]:
        """Call `job(lo, hi)` for every shard, wait for all, and return the results; the first error is raised.

        No shard is still running when this returns, even after Ctrl-C. Shards that wait for each other need `on_error`: it is
        called as soon as one of them fails or cannot start, and must make the others return.
        """
        if not self._finalizer.alive:
            raise HurtleError("The envs were closed; make new ones.")
        if self._process != os.getpid():
            self._start()
        outcomes: list[Any] = [None] * len(self.shards)
        results: queue.SimpleQueue = queue.SimpleQueue()
        asked, heard = 0, 0
        error: BaseException | None = None
        try:
            for inbox in self._inboxes:
                inbox.put((job, results))
                asked += 1
            outcomes[0] = job(*self.shards[0])
        except BaseException as caught:  # still wait for the others
            error = caught
            if on_error is not None:
                on_error()
        while heard < asked:
            try:
                k, outcomes[k], failure = results.get()
            except BaseException as caught:
                error = error or caught
                continue
            heard += 1
            if failure is not None and on_error is not None:
                on_error()
            error = error or failure
        if error is not None:
            raise error
        return outcomes

    def close(self) -> None:
        """Stop the helper threads, and wait until they have ended."""
        self._finalizer()
        for helper in self._helpers:
            helper.join()


def _work(k: int, shard: tuple[int, int], inbox: queue.SimpleQueue) -> None:
    while (order := inbox.get()) is not None:
        job, results = order
        try:
            results.put((k, job(*shard), None))
        except BaseException as error:
            results.put((k, None, error))
        del order, job, results


def _stop(inboxes: list[queue.SimpleQueue]) -> None:
    for inbox in inboxes:
        inbox.put(None)
