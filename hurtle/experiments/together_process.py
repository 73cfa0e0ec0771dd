"""`TogetherProcess`: trains many seeds side by side in one process, those that do not fit into memory in a next one.

tasks → process → what happens to each seed, and the exit code. If the process crashes, all its seeds have crashed; the others
are trained. It is watched as `RunProcesses` is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hurtle.experiments.run_processes import INSIDE, REFUSED, Task, has_begun, what_happened

COMMAND = (sys.executable, "-m", "hurtle.experiments.together_worker")


class TogetherProcess:
    """Runs tasks in one process at a time. Use it as a context manager: no process outlives it.

    Args:
        tasks: The seeds. Their "settings" are all settings of their runs, also where they go on.
        most: The most seeds at a time; None: as many as memory allows.

    Attributes:
        running: The tasks under way, by seed.
        failed: What went wrong, by seed.
    """

    def __init__(self, tasks: Sequence[Task], most: int | None = None):
        self._waiting, self._most = {task.number: task for task in tasks}, most
        self.running: dict[int, Task] = {}
        self.failed: dict[int, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._log, self._told, self._is_stopping = Path(), b"", False

    @property
    def waiting(self) -> set[int]:
        """The seeds that have not been started."""
        return set(self._waiting)

    def poll(self) -> bool:
        """Notice what has happened, start what is left; returns whether anything is left to do."""
        if self._process is not None:
            code = self._process.poll()  # before reading: nothing is told after the end
            self._listen()
            if code is not None:
                self._end(code)
        if self._process is None and self._waiting:
            self._start()
        return self._process is not None

    def stop(self) -> None:
        """Ask all to save and end; those that wait are not started any more."""
        self._is_stopping = True
        self._waiting.clear()
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)

    def __enter__(self) -> TogetherProcess:
        return self

    def __exit__(self, *error: object) -> None:
        """Kill what is left."""
        if self._process is not None:
            self._kill(self._process)

    def _start(self) -> None:
        self.running, self._waiting = self._waiting, {}
        seeds, first = list(self.running), next(iter(self.running.values()))
        name = f"seed-{seeds[0]}-to-{seeds[-1]}" if len(seeds) > 1 else first.folder.name
        self._log, self._told = first.folder.with_name(f"{name}.log"), b""
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, INSIDE: "yes"},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops its child
            )
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        runs = [task.words for task in self.running.values()]
        with suppress(BrokenPipeError):  # it has crashed already
            process.stdin.write(json.dumps({"runs": runs, "most": self._most}).encode() + b"\n")
            process.stdin.flush()  # and stays open: its end means that this process is gone
        self._process = process

    def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._told += self._process.stdout.read() or b""
        *lines, self._told = self._told.split(b"\n")
        for line in lines:
            what, seed, why = json.loads(line)
            task = self.running.pop(seed)
            if what == "left" and not self._is_stopping:
                self._waiting[seed] = task
            elif what == "failed":
                self.failed[seed] = why
                with task.log.open("a", encoding="utf-8") as log:
                    log.write(f"hurtle: error: {why}\n")

    def _end(self, code: int) -> None:
        """The process has ended: seeds of which nothing was told have ended with it."""
        assert self._process is not None
        if code and not self._is_stopping:
            why = what_happened(code, self._log).removeprefix(REFUSED)
            self.failed |= dict.fromkeys(self.running, why)
            if not any(has_begun(task) for task in self.running.values()):
                self._waiting.clear()  # the others would fail alike
        elif not code and not self._log.stat().st_size:
            self._log.unlink()
        self.running = {}
        self._kill(self._process)
        self._process = None

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
