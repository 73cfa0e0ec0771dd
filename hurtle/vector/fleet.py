"""`Fleet`: the worker processes of one vector env with their pipes and shared memory; starts, polls and ends them."""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Sequence

from hurtle.vector.env_rows import shared_file
from hurtle.vector.worker_process import WorkerProcess

_PATIENCE = 3.0  # seconds that close() gives the envs to close
_PATIENCE_AFTER_FAULT = 0.3  # the same after a fault, whose error must not be delayed


class Fleet:
    """The workers and their descriptors; outlives the vector env just long enough to end them.

    Args:
        shares: The envs of each worker.

    Attributes:
        workers: The workers, in order of their envs.
        done: Descriptor that done messages are read from.
        memory: Descriptor of the shared memory.
    """

    def __init__(self, shares: Sequence[range]):
        self.shares = shares
        self.workers: list[WorkerProcess] = []
        self.done, self._done_end = os.pipe()
        self.memory = shared_file()
        self._owner = os.getpid()
        self._patience = _PATIENCE
        self._poll = select.poll()
        self._poll.register(self.done, select.POLLIN)
        self._by_fd: dict[int, WorkerProcess] = {}
        _FLEETS.add(self)

    def start(self, index: int) -> WorkerProcess:
        """Start worker `index`, as a replacement if there was one."""
        worker = WorkerProcess(index, self.shares[index], self._done_end, self.memory)
        if index < len(self.workers):
            self.workers[index] = worker
        else:
            self.workers.append(worker)
        for fd in worker.watched:
            self._by_fd[fd] = worker
            self._poll.register(fd, select.POLLIN)
        return worker

    def discard(self, worker: WorkerProcess) -> None:
        """Kill a worker and stop polling it."""
        for fd in worker.watched:
            if self._by_fd.pop(fd, None) is not None:
                self._poll.unregister(fd)
        worker.kill()

    def poll(self, milliseconds: float | None) -> tuple[bool, list[WorkerProcess]]:
        """Wait for something to read; returns whether there are done messages, and the workers that wrote frames or died."""
        events = self._poll.poll(milliseconds)
        if len(events) == 1 and events[0][0] == self.done:  # the common case
            return True, []
        fds = {fd for fd, _ in events}
        return self.done in fds, list({id(self._by_fd[fd]): self._by_fd[fd] for fd in fds if fd in self._by_fd}.values())

    def has_done(self) -> bool:
        """Whether there are done messages."""
        return bool(select.select([self.done], [], [], 0)[0])

    def stop(self) -> None:
        """End all workers: let them close their envs, then kill those that take too long."""
        if os.getpid() != self._owner:  # a forked copy must not end its parent's workers
            return
        workers, self.workers = self.workers, []
        try:
            WorkerProcess.stop(workers, self._patience)
        finally:
            self.close_fds()

    def hurry(self) -> None:
        """Give the envs less time to close, because an error is waiting to be raised."""
        self._patience = _PATIENCE_AFTER_FAULT

    def close_fds(self) -> None:
        """Close the descriptors in this process."""
        fds, self.done, self._done_end, self.memory = (self.done, self._done_end, self.memory), -1, -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


_FLEETS: weakref.WeakSet[Fleet] = weakref.WeakSet()


def _close_fds_in_child() -> None:
    """Close the pipes in a forked child: workers end when the learner's pipes close, which a child would keep open."""
    for fleet in _FLEETS:
        for worker in fleet.workers:
            worker.close_fds()
        fleet.close_fds()


os.register_at_fork(after_in_child=_close_fds_in_child)
