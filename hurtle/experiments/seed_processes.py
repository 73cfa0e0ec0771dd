"""`SeedProcesses`: trains seeds in processes of their own, as many at a time as the machine's cores and memory allow.

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
"""Set in a process that trains one seed."""
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


class SeedProcesses:
    """Runs tasks, at most `at_once` at a time. Use it as a context manager: no process outlives it.

    Args:
        tasks: What to do, in this order.
        at_once: The most processes at a time; each gets its share of the cores.

    Attributes:
        running: The tasks under way.
        failed: What went wrong, by seed.
    """

    def __init__(self, tasks: Iterable[Task], at_once: int):
        self._waiting, self._at_once = list(tasks), max(1, at_once)
        self._share = max(1, free_cores() // self._at_once)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._most_memory, self._looked = MEMORY, 0.0
        self._refused, self._worked = 0, False  # settings do not fit: how often; and whether they ever did
        self._is_stopping = False
        self.running: dict[int, Task] = {}
        self.failed: dict[int, str] = {}

    def poll(self) -> bool:
        """Notice who has ended, start who may; returns whether anything is left to do."""
        for seed in [seed for seed, process in self._processes.items() if process.poll() is not None]:
            self._take(seed)
        if self._refused >= self._at_once and not self._worked and not any(map(_began, self.running.values())):
            self._waiting.clear()
        while self._waiting and len(self.running) < self._at_once and self._fits():
            self._start(self._waiting.pop(0))
        return bool(self.running or self._waiting)

    @property
    def waiting(self) -> set[int]:
        """The seeds that have not been started."""
        return {task.seed for task in self._waiting}

    def stop(self) -> None:
        """Ask all to save and end; those that wait are not started any more."""
        self._waiting.clear()
        self._is_stopping = True
        for process in self._processes.values():
            process.send_signal(signal.SIGINT)

    def __enter__(self) -> SeedProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        """Kill what is left, with its workers."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _close(process)
        self._processes.clear()
        self.running.clear()

    def _start(self, task: Task) -> None:
        # Torch's own variable is left alone: the QR that draws the first weights rounds differently with other threads.
        with task.log.open("ab") as log:
            process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "HURTLE_CORES": str(self._share), INSIDE: str(task.seed)},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops its children
            )
        self._processes[task.seed], self.running[task.seed] = process, task
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has crashed already
            process.stdin.write(json.dumps(task.words).encode() + b"\n")
            process.stdin.flush()

    def _take(self, seed: int) -> None:
        process, task = self._processes.pop(seed), self.running.pop(seed)
        _close(process)
        if process.returncode == ENDED_BADLY and not _began(task):
            self._refused += 1
        else:
            self._worked = True
        if process.returncode and not self._is_stopping:
            self.failed[seed] = _what_happened(process.returncode, task.log)
        elif not process.returncode and not task.log.stat().st_size:
            task.log.unlink()

    def _fits(self) -> bool:
        """Whether there is memory for one more, and for what those under way may still take."""
        if not self._processes:
            return True
        if monotonic() - self._looked < 0.5:
            return False  # once is enough
        taken = [_resident_bytes(process.pid) for process in self._processes.values()]
        self._most_memory = max(self._most_memory, *taken)
        to_come = sum(max(0, self._most_memory - size) for size in taken)
        if available_memory() >= to_come + self._most_memory:
            return True
        self._looked = monotonic()
        return False


def _began(task: Task) -> bool:
    file = task.folder / "metrics.jsonl"
    return file.is_file() and file.stat().st_size > 0


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()


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
