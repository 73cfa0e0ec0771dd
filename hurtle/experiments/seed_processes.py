"""`SeedProcesses`: trains seeds in other processes, as many at a time as the machine's cores and memory allow.

tasks → processes → exit codes and logs. A crash ends one seed and no other. A child that outlives the parent saves and ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from hurtle.buffers.storage import available_memory
from hurtle.native.threads import free_cores

INSIDE = "HURTLE_SEED"
"""Set in a process that trains seeds."""
DONE = b"done"
"""What a worker prints when it has done a task."""
ENDED_BADLY, INTERRUPTED = 2, 130
"""Exit codes of a worker: an error that its log explains; a signal before there was anything to save."""
COMMAND = (sys.executable, "-m", "hurtle.experiments.seed_worker")
MEMORY = 700_000_000
"""Bytes that a run is expected to take until one is seen to take more: torch, and little else."""
LAST_LINES = 15
"""Of a log, in the report of a crash."""


@dataclass(frozen=True)
class Task:
    """What one process does.

    Attributes:
        seed: The seed that it trains.
        folder: Its run folder.
        words: The arguments of `seed_worker.train_seed`.
    """

    seed: int
    folder: Path
    words: dict[str, Any]

    @property
    def log(self) -> Path:
        """The file with what the process prints; removed if that is nothing."""
        return self.folder.with_name(f"{self.folder.name}.log")


class Worker:
    """A process that trains one task after another. It is new, and knows nothing, whenever one before it has failed.

    Attributes:
        task: What it does now; None if it has nothing to do.
    """

    def __init__(self, task: Task, cores: int):
        with task.log.open("ab") as log:
            self.process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,  # a line for each task that is done
                stderr=log,
                # Torch's own variable is left alone: the QR that draws the first weights rounds differently with other threads.
                env={**os.environ, "HURTLE_CORES": str(cores), INSIDE: "yes"},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops its children
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self.task: Task | None = None
        self.give(task)

    def give(self, task: Task) -> None:
        """Give it something to do."""
        self.task = task
        task.log.touch()
        with suppress(BrokenPipeError):  # it has crashed already
            self._stdin.write(json.dumps({"log": str(task.log), **task.words}).encode() + b"\n")
            self._stdin.flush()

    def poll(self) -> tuple[Task, int] | None:
        """The task that has just ended, and its exit code."""
        code, told = self.process.poll(), self._stdout.read() or b""  # in this order: nothing is told after the end
        task = self.task
        if task is None or (code is None and DONE not in told):
            return None
        self.task = None
        return task, 0 if DONE in told else code or 0

    def dismiss(self) -> None:
        """Nothing more is to come: it ends by itself."""
        with suppress(BrokenPipeError):
            self._stdin.close()

    def kill(self) -> None:
        """End it at once, and the processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.dismiss()
        self._stdout.close()


class SeedProcesses:
    """Runs tasks, at most `at_once` at a time. Use it as a context manager: no process outlives it.

    Args:
        tasks: What to do, in this order.
        at_once: The most processes at a time; each gets its share of the cores.
        afresh: Each task gets a new process, so that the one before has given back the GPU's memory. Else processes that have
            done a task take another: importing torch takes seconds.

    Attributes:
        failed: What went wrong, by seed.
    """

    def __init__(self, tasks: Iterable[Task], at_once: int, afresh: bool = False):
        self._waiting, self._at_once, self._afresh = list(tasks), max(1, at_once), afresh
        self._share = max(1, free_cores() // self._at_once)
        self._workers: list[Worker] = []
        self._most_memory, self._looked = MEMORY, 0.0
        self._refused, self._worked = 0, False  # settings do not fit: how often; and whether they ever did
        self._is_stopping = False
        self.failed: dict[int, str] = {}

    @property
    def running(self) -> dict[int, Task]:
        """The tasks under way, by seed."""
        return {worker.task.seed: worker.task for worker in self._workers if worker.task is not None}

    @property
    def waiting(self) -> set[int]:
        """The seeds that have not been started."""
        return {task.seed for task in self._waiting}

    def poll(self) -> bool:
        """Notice what has ended, start what may; returns whether anything is left to do."""
        for worker in list(self._workers):
            if (ended := worker.poll()) is not None:
                self._note(*ended)
            if worker.process.returncode is not None:
                self._workers.remove(worker)
                worker.kill()
        if self._refused >= self._at_once and not self._worked and not any(map(_began, self.running.values())):
            self._waiting.clear()
        for worker in [worker for worker in self._workers if worker.task is None]:
            if self._waiting and not self._afresh:
                worker.give(self._waiting.pop(0))
            else:
                worker.dismiss()
        while self._waiting and len(self._workers) < self._at_once and self._fits():
            self._workers.append(Worker(self._waiting.pop(0), self._share))
        return bool(self.running or self._waiting)

    def stop(self) -> None:
        """Ask all to save and end; those that wait are not started any more."""
        self._waiting.clear()
        self._is_stopping = True
        for worker in self._workers:
            worker.process.send_signal(signal.SIGINT)

    def __enter__(self) -> SeedProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        """Kill what is left."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _note(self, task: Task, code: int) -> None:
        if code == ENDED_BADLY and not _began(task):
            self._refused += 1
        else:
            self._worked = True
        if code and not self._is_stopping:
            self.failed[task.seed] = _what_happened(code, task.log)
        elif not code and not task.log.stat().st_size:
            task.log.unlink()

    def _fits(self) -> bool:
        """Whether there is memory for one more, and for what those under way may still take."""
        if not self._workers:
            return True
        if monotonic() - self._looked < 0.5:
            return False  # once is enough
        taken = [_resident_bytes(process.pid) for process in (worker.process for worker in self._workers)]
        self._most_memory = max(self._most_memory, *taken)
        to_come = sum(max(0, self._most_memory - size) for size in taken)
        if available_memory() >= to_come + self._most_memory:
            return True
        self._looked = monotonic()
        return False


def _began(task: Task) -> bool:
    file = task.folder / "metrics.jsonl"
    return file.is_file() and file.stat().st_size > 0


def _what_happened(code: int, log: Path) -> str:
    """The error that the process printed, or the end of its log."""
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    _, said, error = text.rpartition("hurtle: error: ")
    if said:
        return error
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    hint = ", perhaps because the memory was full" if code == -signal.SIGKILL else ""
    lines = text.splitlines()[-LAST_LINES:]
    return "\n".join([f"{how}{hint}", *lines])


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # no /proc, or it has just ended
        return MEMORY
