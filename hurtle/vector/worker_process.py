"""`WorkerProcess`: the learner's handle on one worker: starts it, sends it commands, finds out why it died, ends it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

from hurtle.vector import wire
from hurtle.vector.env_rows import shared_file

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from hurtle.vector.worker import main; main()"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class WorkerProcess:
    """A running worker.

    Args:
        index: Index of the worker.
        envs: Its envs.
        done: Descriptor that it writes done messages to.
        memory: Descriptor of the shared memory.

    Attributes:
        busy: Its envs that are being reset or stepped.
        infos_due: Frames of infos that were announced by done messages and not yet read.
        since, seen: When it was last seen to make progress, and at which env.
        watched: Descriptors that become readable when it writes a frame or dies.
    """

    def __init__(self, index: int, envs: range, done: int, memory: int):
        self.index, self.envs = index, envs
        self.busy: set[int] = set()
        self.infos_due = 0
        self.since, self.seen = time.monotonic(), -1
        self._open: list[int] = []
        theirs: list[int] = []
        try:
            self._trace = self._keep(shared_file())
            command_end, self.commands = self._pipe(theirs, ours=1)
            frame_fd, frame_end = self._pipe(theirs, ours=0)
            life_end, _ = self._pipe(theirs, ours=1)
            self.frames = wire.FrameReader(frame_fd)
            passed = (command_end, frame_end, done, life_end, memory, self._trace)
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(index), *map(str, passed)],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                env={**dict.fromkeys(_THREAD_VARIABLES, "1"), **os.environ},
                process_group=0,  # Ctrl-C goes to the learner alone, which ends its workers
            )
            self.watched = [frame_fd]
            if hasattr(os, "pidfd_open"):  # an env may fork a child that keeps the pipe open, so watch the process too
                self.watched.append(self._keep(os.pidfd_open(self.process.pid)))
        except BaseException:
            if hasattr(self, "process"):
                self.kill()
            self.close_fds()
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        os.set_blocking(self.commands, False)
        os.set_blocking(frame_fd, False)

    def _keep(self, fd: int) -> int:
        self._open.append(fd)
        return fd

    def _pipe(self, theirs: list[int], ours: int) -> tuple[int, int]:
        ends = os.pipe()
        self._keep(ends[ours])
        theirs.append(ends[1 - ours])
        return ends

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    def send(self, kind: int, payload: bytes = b"") -> None:
        """Write a frame, reading what the worker writes meanwhile, so that the two cannot deadlock."""
        view = memoryview(wire.frame(kind, payload))
        while view:
            try:
                view = view[os.write(self.commands, view) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self.commands, select.POLLOUT)
                poll.register(self.frames.fd, select.POLLIN)
                if any(fd == self.frames.fd for fd, _ in poll.poll(1000)) and not self.frames.feed():
                    raise BrokenPipeError from None
                if self.is_dead:
                    raise BrokenPipeError from None

    def stack_trace(self) -> str:
        """The stack that the worker's fault handler wrote, as an addition to an error message."""
        text = os.pread(self._trace, 1 << 16, 0).decode(errors="replace").strip()
        return f"\n\nWhere it was:\n{text}" if text else ""

    def request_stack_trace(self) -> str:
        """The stack of a stuck worker, as an addition to an error message."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        for _ in range(20):
            if trace := self.stack_trace():
                return trace
            time.sleep(0.01)
        return ""

    def cause_of_death(self) -> str:
        """How the process ended, for an error message."""
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "closed its pipes"
        if code >= 0:
            return f"exited with code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (out of memory, or killed by hand)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"

    def kill(self) -> None:
        """Kill the worker and its subprocesses and close the descriptors."""
        self._kill_group()
        self.process.kill()
        self.process.wait()
        self.close_fds()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close_fds(self) -> None:
        """Close the learner's descriptors."""
        fds, self._open = self._open, []
        for fd in fds:
            os.close(fd)

    @staticmethod
    def stop(workers: Iterable[WorkerProcess], patience: float) -> None:
        """End workers: let them close their envs, then kill those that take longer than `patience` seconds."""
        workers = [worker for worker in workers if worker._open]
        try:
            for worker in workers:
                worker._open.remove(worker.commands)
                os.close(worker.commands)
            deadline = time.monotonic() + patience
            for worker in workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(deadline - time.monotonic(), 0.001))
        finally:  # also after Ctrl-C
            for worker in workers:
                worker.kill()
