"""`RankProcesses`: the processes of the learners beside the first: starts them, notices when one ends, says why.

task → a pickle on each one's standard input → rank_process.py. The input stays open: a process whose input ends ends too, so
that none outlives this one, however it dies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hurtle.errors import HurtleError, LostRankError
from hurtle.runners.settings import settings_to_dict
from hurtle.vector.pickling import dumps_by_value

if TYPE_CHECKING:
    from hurtle.runners.rank_group import Task

FAILED, LOST = 2, 3
"""Exit codes of a rank: an error that its log explains; it has ended only because another one was lost."""
GRACE = 10.0
"""Seconds that the others have to end by themselves."""
LAST_LINES = 15
"""Of what a rank has printed, in the report of its end."""
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from hurtle.runners.rank_process import main; main()"


class RankProcesses:
    """Ranks 1 … size − 1 of a run, each in a process of its own. A context manager: none outlives it.

    Args:
        task: What all train.
        size: How many ranks there are, this process included.

    Raises:
        HurtleError: The env or the policy cannot be sent to another process.
    """

    def __init__(self, task: Task, size: int):
        self._size, self._is_over = size, False
        self._folder = tempfile.TemporaryDirectory(prefix="hurtle-learners-")
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._on_loss: Callable[[], None] | None = None
        self.store = Path(self._folder.name) / "store"
        content = _packed(task)
        try:
            for rank in range(1, size):
                self._processes[rank] = self._start(rank)
            for rank, process in self._processes.items():
                assert process.stdin is not None
                with suppress(BrokenPipeError):  # it has ended already, which joining the group reports
                    process.stdin.write(len(content).to_bytes(8, "little") + content)
                    process.stdin.flush()
                threading.Thread(target=self._wait, args=(rank,), daemon=True).start()
        except BaseException:
            self.__exit__()
            raise

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(rank), str(self._size), str(self.store)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches this process alone, which tells the others
            )

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"learner-{rank}.log"

    def wait_until_ready(self) -> None:
        """Wait until all are about to join the group, which waits for them however long they take.

        Raises:
            LostRankError: One has ended; says why.
        """
        while not all(ready_file(self.store, rank).exists() for rank in self._processes):
            if any(process.poll() is not None for process in self._processes.values()):
                raise LostRankError(f"Training could not start, since a learner was lost: {self.reason()}")
            time.sleep(0.01)

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Call this, from any thread, when a rank has ended before the run has."""
        self._on_loss = on_loss

    def _wait(self, rank: int) -> None:
        self._processes[rank].wait()
        if not self._is_over and self._on_loss is not None:
            self._on_loss()

    def reason(self) -> str:
        """Which rank has ended the run, and why; waits for those that end because of it."""
        until = time.monotonic() + GRACE
        while time.monotonic() < until:
            codes = {rank: process.poll() for rank, process in self._processes.items()}
            first = next((rank for rank, code in codes.items() if code not in (None, LOST)), None)
            if first is not None:
                return self._what_happened(first, codes[first] or 0)
            time.sleep(0.02)
        return "none of their processes has failed, but their connection has."

    def _what_happened(self, rank: int, code: int) -> str:
        text = self._log(rank).read_text(encoding="utf-8", errors="replace").strip()
        _, said, error = text.rpartition("hurtle: error: ")
        name = f"learner {rank} of {self._size} (counted from 0)"
        if said:
            return f"{name} failed. {error}"
        if code == 0:
            return f"{name} ended by itself (exit code 0), as if its env had called sys.exit."
        if code < 0:
            hint = ", perhaps because the memory was full" if code == -signal.SIGKILL else ""
            return f"{name} was killed by {signal.Signals(-code).name}{hint}."
        lines = [line.removeprefix(f"[rank{rank}]: ") for line in text.splitlines()]  # as torch writes before each
        return "\n".join([f"{name} failed:", *lines[-LAST_LINES:]])

    def kill(self) -> None:
        """End all at once, also those that hang."""
        self._is_over = True
        for process in self._processes.values():
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        """Let those that are done end, and kill the others."""
        self._is_over = True
        until = time.monotonic() + (0.0 if error and error[0] is not None else GRACE)
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        self.kill()
        for process in self._processes.values():
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
        self._folder.cleanup()


def ready_file(store: Path, rank: int) -> Path:
    """The file that a rank makes when it is about to join the group of this store."""
    return store.with_name(f"ready-{rank}")


def _packed(task: Task) -> bytes:
    """The task as rank_process.py takes it."""
    content: dict[str, Any] = {**asdict(task), "settings": settings_to_dict(task.settings), "saved": None}
    content |= {"env": task.env, "module": task.module}  # not as `asdict` copies them
    try:
        return dumps_by_value(content)
    except Exception as error:
        raise HurtleError(
            f"num_learners={task.settings.train.num_learners}: the env or the policy cannot be sent to another process "
            f"({error}): put its class into a file, and name it as my_env.py:MyEnv."
        ) from error
