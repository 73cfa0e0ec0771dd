"""Watches seeds, or the members of a population, while they train.

processes and the ends of their metrics files → lines of a display; signals → stop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hurtle.experiments.run_processes import Task
from hurtle.experiments.seeds_display import Line, SeedsDisplay
from hurtle.runners.signals import StopSignals
from hurtle.tracking.metrics_tail import last_metrics
from hurtle.tracking.run_folder import RunFolder
from hurtle.tracking.run_state import STOPPED_BY

POLL_SECONDS, SHOW_SECONDS = 0.1, 0.5


class Processes(Protocol):
    """What trains seeds: see `RunProcesses`, and `TogetherProcess` for many in one."""

    failed: dict[int, str]

    @property
    def running(self) -> dict[int, Task]:
        """The tasks under way, by seed."""

    @property
    def waiting(self) -> set[int]:
        """The seeds that have not been started."""

    def poll(self) -> bool:
        """Notice what has ended, start what may; returns whether anything is left to do."""

    def stop(self) -> None:
        """Ask all to save and end."""


def watch(processes: Processes, progress: Progress, display: SeedsDisplay, advance: Callable[[], bool] = lambda: False) -> str:
    """Train until nothing is left to do.

    Args:
        processes: What trains.
        progress: Where each run is.
        display: Shows it.
        advance: Called when everything is done; adds more to do, or returns False.

    Returns:
        The signal that ended it before, or an empty string.
    """
    signals: list[str] = []
    told: set[int] = set()
    shown_at, is_stopping = -math.inf, False

    def is_busy() -> bool:
        if processes.poll():
            return True
        _tell_failures(processes, told, display, progress.noun)
        return not signals and advance()

    with StopSignals(signals.append):
        while is_busy():
            told &= processes.failed.keys()
            if signals and not is_stopping:
                is_stopping = True
                display.message(f"{signals[0]}: saving {len(processes.running)} runs …")
                processes.stop()
            _tell_failures(processes, told, display, progress.noun)
            if time.monotonic() - shown_at >= SHOW_SECONDS:
                display.show(progress.lines())
                shown_at = time.monotonic()
            time.sleep(POLL_SECONDS)
    _tell_failures(processes, told, display, progress.noun)
    display.show(progress.lines())
    return signals[0] if signals else ""


def _tell_failures(processes: Processes, told: set[int], display: SeedsDisplay, noun: str) -> None:
    """Tell what went wrong, once: seeds of one process fail for one reason."""
    by_reason: dict[str, list[int]] = {}
    for seed in sorted(processes.failed.keys() - told):
        by_reason.setdefault(processes.failed[seed], []).append(seed)
        told.add(seed)
    for reason, seeds in by_reason.items():
        which = f"{noun} {seeds[0]}" if len(seeds) == 1 else f"{noun}s {', '.join(map(str, seeds))}"
        display.message(f"{which} crashed: {reason}")


class Progress:
    """Where each seed is, from the ends of their metrics files; those that have ended are read once.

    Args:
        folder: Holds their run folders.
        seeds: Their numbers.
        processes: What trains them.
        total_steps: Of each.
        noun: What they are called, also in the names of their folders.
    """

    def __init__(self, folder: Path, seeds: list[int], processes: Processes, total_steps: int, noun: str = "seed"):
        self._folder, self._seeds, self._processes, self._total_steps = folder, seeds, processes, total_steps
        self.noun = noun
        self._ended: dict[int, Line] = {}

    def lines(self) -> list[Line]:
        """One per seed."""
        return [self._line(seed) for seed in self._seeds]

    def forget(self) -> None:
        """Read all again: those that have ended go on."""
        self._ended.clear()

    def _line(self, seed: int) -> Line:
        if seed in self._ended:
            return self._ended[seed]
        folder, waiting = RunFolder(self._folder / f"{self.noun}-{seed}"), self._processes.waiting
        newest, is_running = last_metrics(folder.metrics_file), seed in self._processes.running
        summary = {} if is_running else folder.read_summary()
        if is_running:
            state = "training" if "steps" in newest else "starting"
        elif seed in self._processes.failed:
            state = "crashed"
        elif seed in waiting or not folder.path.exists():
            state = "waiting"
        elif summary.get("stopped_by") == "until":
            state = "paused"
        else:
            state = "finished" if summary and summary.get("stopped_by") not in STOPPED_BY else "stopped"
        line = Line(
            seed, state, int(newest.get("steps", 0)), self._total_steps,
            newest.get("steps_per_second", math.nan) if state == "training" else math.nan,
            newest.get("episode_return", math.nan),
        )  # fmt: skip
        if not is_running and seed not in waiting:
            self._ended[seed] = line
        return line
