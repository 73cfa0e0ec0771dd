"""Watches seeds while they train: processes and the ends of their metrics files → lines of a display; signals → stop."""

from __future__ import annotations

import math
import time
from pathlib import Path

from hurtle.experiments.run_processes import RunProcesses
from hurtle.experiments.seeds_display import Line, SeedsDisplay
from hurtle.runners.signals import StopSignals
from hurtle.tracking.metrics_tail import last_metrics
from hurtle.tracking.run_folder import RunFolder
from hurtle.tracking.run_state import STOPPED_BY

POLL_SECONDS, SHOW_SECONDS = 0.1, 0.5


def watch(processes: RunProcesses, progress: Progress, display: SeedsDisplay) -> str:
    """Train until nothing is left to do; returns the signal that ended it before, or an empty string."""
    signals: list[str] = []
    told: set[int] = set()
    shown_at, is_stopping = -math.inf, False
    with StopSignals(signals.append):
        while processes.poll():
            if signals and not is_stopping:
                is_stopping = True
                display.message(f"{signals[0]}: saving {len(processes.running)} runs …")
                processes.stop()
            for seed in processes.failed.keys() - told:
                told.add(seed)
                display.message(f"seed {seed} crashed: {processes.failed[seed]}")
            if time.monotonic() - shown_at >= SHOW_SECONDS:
                display.show(progress.lines())
                shown_at = time.monotonic()
            time.sleep(POLL_SECONDS)
    for seed in processes.failed.keys() - told:
        display.message(f"seed {seed} crashed: {processes.failed[seed]}")
    display.show(progress.lines())
    return signals[0] if signals else ""


class Progress:
    """Where each seed is, from the ends of their metrics files; those that have ended are read once."""

    def __init__(self, folder: Path, seeds: list[int], processes: RunProcesses, total_steps: int):
        self._folder, self._seeds, self._processes, self._total_steps = folder, seeds, processes, total_steps
        self._ended: dict[int, Line] = {}

    def lines(self) -> list[Line]:
        """One per seed."""
        return [self._line(seed) for seed in self._seeds]

    def _line(self, seed: int) -> Line:
        if seed in self._ended:
            return self._ended[seed]
        folder, waiting = RunFolder(self._folder / f"seed-{seed}"), self._processes.waiting
        newest, is_running = last_metrics(folder.metrics_file), seed in self._processes.running
        summary = {} if is_running else folder.read_summary()
        if is_running:
            state = "training" if "steps" in newest else "starting"
        elif seed in self._processes.failed:
            state = "crashed"
        elif seed in waiting or not folder.path.exists():
            state = "waiting"
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
