"""Whether a run is running, finished, stopped or crashed: a lock on its folder while a process trains it, and its summary.

The system releases the lock with the process, however that ends, so that nothing stale is left behind.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError
from hurtle.tracking.run_folder import RunFolder

STATES = ("running", "finished", "stopped", "crashed")
STOPPED_BY = ("Ctrl-C", "SIGTERM", "until")
"""What ends a run before it is done, as `stopped_by` in summary.json has it."""
PATIENCE = 0.3
"""Seconds to wait for whoever only looks at the lock."""
FRESH = 120.0
"""Where the file system has no locks, a run that has written something in so many seconds counts as running."""


class Held:
    """The lock on a folder, until it is closed or collected. Processes that are started with `exec` do not inherit it."""

    def __init__(self, descriptor: int | None):
        self._descriptor = descriptor

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def hold(folder: Path, patience: float = PATIENCE) -> Held:
    """Lock a folder.

    Raises:
        HurtleError: Another process trains there, or another run of this one.
    """
    until = time.monotonic() + patience
    while True:
        try:
            return Held(_lock(folder, fcntl.LOCK_EX))
        except BlockingIOError:
            if time.monotonic() >= until:
                raise HurtleError(f"{folder} is being trained at this moment: wait until it is done, or stop it.") from None
        except OSError:  # a network file system without locks on folders
            return Held(None)
        time.sleep(0.02)


def is_running(folder: Path) -> bool:
    """Whether a process trains in this folder."""
    try:
        Held(_lock(folder, fcntl.LOCK_SH)).close()
    except BlockingIOError:
        return True
    except OSError:
        return time.time() - last_written(folder) < FRESH
    return False


def state_of(folder: RunFolder, summary: dict[str, Any]) -> str:
    """One of STATES; a run that neither runs nor has a summary has crashed."""
    if is_running(folder.path):
        return "running"
    if not summary:
        return "crashed"
    return "stopped" if summary.get("stopped_by") in STOPPED_BY else "finished"


def last_written(folder: Path) -> float:
    """When the run last wrote metrics, else its settings; 0 if never."""
    for name in ("metrics.jsonl", "config.toml", "seeds.toml", "population.toml"):
        try:
            return (folder / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def _lock(folder: Path, kind: int) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
