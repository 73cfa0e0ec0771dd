"""The metrics of a run as curves against steps or seconds, smoothed and thinned.

metrics.jsonl → columns → (x, y) of one metric. Also while the run is being trained.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.tracking.curves import read_metrics

ALIASES = {"return": "episode_return", "length": "episode_length", "evaluation": "eval_return", "speed": "steps_per_second"}
"""Short names of metrics."""
X_AXES = ("steps", "seconds")
POINTS = 2000
"""The most points of a curve that are kept."""
NOT_METRICS = ("step", "steps", "seconds", "updates")


class RunCurves:
    """The metrics of one run.

    Raises:
        HurtleError: The run has no metrics yet.
    """

    def __init__(self, folder: Path):
        file = folder / "metrics.jsonl"
        self._columns = read_metrics(file) if file.is_file() else {}
        if not len(self._columns.get("step", ())):
            raise HurtleError(
                f"{folder} has no metrics yet: {'metrics.jsonl is empty' if file.is_file() else f'there is no {file}'}."
            )
        self.folder = folder

    @property
    def names(self) -> list[str]:
        """The metrics that have at least one value."""
        return [name for name, values in self._columns.items() if name not in NOT_METRICS and np.isfinite(values).any()]

    def curve(self, metric: str, x: str = "steps", smooth: int = 1) -> np.ndarray:
        """The points of a metric, float64 [points, 2], x rising; empty if it has no value.

        Args:
            metric: A name in metrics.jsonl, or one of ALIASES.
            x: "steps" or "seconds".
            smooth: Mean over so many values, the point itself the newest.
        """
        name = ALIASES.get(metric, metric)
        if name not in self._columns:
            return np.empty((0, 2))
        steps, values = self._columns["step"], self._columns[name]
        known = np.isfinite(values) & np.isfinite(steps)
        steps, values = steps[known], values[known]
        if x == "seconds" and len(steps):
            clock = self._columns.get("seconds", np.full(len(known), np.nan))
            timed = np.isfinite(clock) & np.isfinite(self._columns["step"])
            if not timed.any():
                return np.empty((0, 2))
            at = np.interp(steps, self._columns["step"][timed], clock[timed])  # evaluations have no clock of their own
        else:
            at = steps
        if smooth > 1 and len(values):
            values = _running_mean(values, smooth)
        keep = np.concatenate([np.diff(at) > 0, [True]]) if len(at) else np.empty(0, bool)  # of equal x, the newest
        at, values = at[keep], values[keep]
        if len(at) > POINTS:
            chosen = np.unique(np.linspace(0, len(at) - 1, POINTS).round().astype(int))
            at, values = at[chosen], values[chosen]
        return np.stack([at, values], axis=1)

    def seconds_to(self, target: float) -> float:
        """Seconds until the return of training episodes reached a target; NaN if it never did."""
        curve = self.curve("return", "seconds")
        reached = curve[curve[:, 1] >= target, 0]
        return float(reached[0]) if len(reached) else float("nan")


def check_metrics(metrics: list[str], runs: list[RunCurves]) -> None:
    """Raise if no run has one of these metrics.

    Raises:
        UnknownNameError: Suggests the closest name.
    """
    known = {name for run in runs for name in run.names}
    for metric in metrics:
        if ALIASES.get(metric, metric) not in known:
            short = [name for name, meant in ALIASES.items() if meant in known]
            raise UnknownNameError(f"No run has the metric {metric!r}. {did_you_mean(metric, [*known, *short])}")


def _running_mean(values: np.ndarray, size: int) -> np.ndarray:
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - size)
    return (sums[ends] - sums[starts]) / (ends - starts)
