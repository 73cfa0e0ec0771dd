"""`Fleet`: the worker processes of one vector env, their pipes and shared memory; who has news, and how they end."""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Sequence

from hurtle.vector.rows import shared_file
from hurtle.vector.worker_process import WorkerProcess

_PATIENCE = 3.0  # seconds that close() gives the envs to close
_PATIENCE_AFTER_FAULT = 0.3  # the same when a fault ends the vector, and its error must not wait


class Fleet:
    """Workers and descriptors; outlives its vector env just long enough to end them.

    Args:
        shares: The envs of each worker.

    Attributes:
        workers: In order of their envs.
        done: Descriptor from which done messages are read.
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
        """Start a worker, in place of one that was forgotten."""
        worker = WorkerProcess(index, self.shares[index], self._done_end, self.memory)
        if index < len(self.workers):
            self.workers[index] = worker
        else:
            self.workers.append(worker)
        for fd in worker.watched:
            self._by_fd[fd] = worker
            self._poll.register(fd, select.POLLIN)
        return worker

    def forget(self, worker: WorkerProcess) -> None:
        """End a worker at once."""
        for fd in worker.watched:
            if self._by_fd.pop(fd, None) is not None:
                self._poll.unregister(fd)
        worker.kill()

    def news(self, milliseconds: float | None) -> tuple[bool, list[WorkerProcess]]:
        """Wait for something to read: whether there are done messages, and which workers wrote frames or died."""
        events = self._poll.poll(milliseconds)
        if len(events) == 1 and events[0][0] == self.done:  # the common case
            return True, []
        fds = {fd for fd, _ in events}
        return self.done in fds, list({id(self._by_fd[fd]): self._by_fd[fd] for fd in fds if fd in self._by_fd}.values())

    def has_done(self) -> bool:
        """Whether there are done messages."""
        return bool(select.select([self.done], [], [], 0)[0])

    def stop(self) -> None:
        """End all workers: let them close their envs, kill those that take too long."""
        if os.getpid() != self._owner:  # a forked copy must not end its parent's workers
            return
        workers, self.workers = self.workers, []
        try:
            WorkerProcess.stop(workers, self._patience)
        finally:
            self.let_go()

    def hurry(self) -> None:
        """An error is waiting: do not give the envs long."""
        self._patience = _PATIENCE_AFTER_FAULT

    def let_go(self) -> None:
        """Close this process's descriptors."""
        fds, self.done, self._done_end, self.memory = (self.done, self._done_end, self.memory), -1, -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


_FLEETS: weakref.WeakSet[Fleet] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Workers end when the learner does; a child that it forked must not keep their pipes open."""
    for fleet in _FLEETS:
        for worker in fleet.workers:
            worker.let_go()
        fleet.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)
