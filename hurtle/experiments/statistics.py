"""Statistics over runs, after "Deep RL at the edge of the statistical precipice" (Agarwal et al., 2021).

returns or curves of several runs → interquartile mean with a bootstrapped 95 % interval; scores of several tasks → performance
profile, probability of improvement. Every run counts once. Knows nothing of run folders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hurtle.errors import HurtleError
from hurtle.tracking.formatting import figure
from hurtle.tracking.return_statistics import bootstrap_interval, iqm, iqm_of_each

RESAMPLES = 2000
OF_A_CURVE = 500
"""Resamples for each point of a curve."""
ENDS = (0.025, 0.975)
DRAWN_AT_ONCE = 1 << 21
"""Numbers drawn at a time: 16 MB."""


class Estimate(NamedTuple):
    """A statistic of several runs and its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The IQM of one number per run."""
        return cls(iqm(values), *bootstrap_interval(values, iqm))

    def __str__(self) -> str:
        return f"{figure(self.value)} [{figure(self.low)}, {figure(self.high)}]"


class Curve(NamedTuple):
    """Several runs as one curve; each field is float64 [points]."""

    x: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


def joined_curve(curves: Sequence[Sequence[Sequence[float]]] | Sequence[np.ndarray], points: int = 200) -> Curve | None:
    """The IQM of runs at each x, with its 95 % interval; None if no run has two points, or the runs share no stretch.

    Runs report at different x: each is interpolated, over the stretch that all of them have.

    Args:
        curves: (x, y) of each run, x rising, [its points, 2]; runs with fewer than two are left out.
        points: Points of the joined curve.
    """
    known = [np.asarray(curve, np.float64) for curve in curves if len(curve) > 1]
    begin, end = max((curve[0, 0] for curve in known), default=0.0), min((curve[-1, 0] for curve in known), default=0.0)
    if not known or begin > end:
        return None
    x = np.linspace(begin, end, points)
    values = np.stack([np.interp(x, *curve.T) for curve in known])  # [runs, points]
    rng, found, left = np.random.default_rng(0), [], OF_A_CURVE
    while left:
        rows = min(left, max(1, DRAWN_AT_ONCE // values.size))
        found.append(iqm_of_each(values[rng.integers(0, len(values), (rows, len(values)))], axis=1))
        left -= rows
    return Curve(x, iqm_of_each(values, axis=0), *np.quantile(np.concatenate(found), ENDS, axis=0))


# Several tasks --------------------------------------------------------------------------------------------------------

Scores = Sequence[Sequence[float]] | Sequence[np.ndarray]
"""One sequence per task, with one number per run."""


def normalized(tasks: Sequence[Scores]) -> list[list[np.ndarray]]:
    """Scores from 0, the worst run of any method on that task, to 1, the best one.

    Args:
        tasks: For each task the scores of each method.
    """
    found = []
    for methods in tasks:
        every = np.concatenate([np.asarray(scores, np.float64) for scores in methods])
        low, span = every.min(), np.ptp(every) or 1.0
        found.append([(np.asarray(scores, np.float64) - low) / span for scores in methods])
    return found


def overall(scores: Scores, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """The IQM of the runs of all tasks together; the interval resamples the runs of each task."""
    tasks = _tasks(scores)
    samples = np.concatenate(_resampled(tasks, resamples, seed), axis=1)
    return Estimate(iqm(np.concatenate(tasks)), *np.quantile(iqm_of_each(samples), ENDS).tolist())


def performance_profile(scores: Scores, thresholds: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> Curve:
    """The share of runs that score above each threshold, the mean over the tasks."""
    tasks = _tasks(scores)
    share = np.mean([_share_above(np.sort(task), thresholds) for task in tasks], axis=0)
    drawn = [
        np.stack([_share_above(sample, thresholds) for sample in np.sort(samples)])
        for samples in _resampled(tasks, resamples, seed)
    ]
    return Curve(thresholds, share, *np.quantile(np.mean(drawn, axis=0), ENDS, axis=0))


def probability_of_improvement(first: Scores, second: Scores, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """How likely a run of `first` beats one of `second` on the same task, the mean over the tasks; ties count half."""
    ours, theirs = _tasks(first), _tasks(second)
    if len(ours) != len(theirs):
        raise HurtleError(f"Both need scores on the same tasks, got {len(ours)} and {len(theirs)} of them.")
    value = np.mean([_wins(x[None], y[None])[0] for x, y in zip(ours, theirs, strict=True)])
    pairs = zip(_resampled(ours, resamples, seed), _resampled(theirs, resamples, seed + 1), strict=True)
    drawn = np.mean([_wins(x, y) for x, y in pairs], axis=0)
    return Estimate(float(value), *np.quantile(drawn, ENDS).tolist())


def _tasks(scores: Scores) -> list[np.ndarray]:
    tasks = [np.asarray(task, np.float64) for task in scores]
    if not tasks or not all(len(task) and np.isfinite(task).all() for task in tasks):
        raise HurtleError("Every task needs the finite score of at least one run.")
    return tasks


def _resampled(tasks: list[np.ndarray], resamples: int, seed: int) -> list[np.ndarray]:
    """For each task [resamples, runs], drawn with replacement."""
    rng = np.random.default_rng(seed)
    return [task[rng.integers(0, len(task), (resamples, len(task)))] for task in tasks]


def _share_above(ordered: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    return 1 - np.searchsorted(ordered, thresholds, side="right") / len(ordered)


def _wins(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The share of pairs in which x is larger, for each row: [rows, runs of x] and [rows, runs of y] → [rows]."""
    rows = max(1, DRAWN_AT_ONCE // (x.shape[1] * y.shape[1]))
    compare: Callable[[slice], np.ndarray] = lambda part: np.sign(x[part, :, None] - y[part, None, :]).mean((1, 2))  # noqa: E731
    parts = [compare(slice(start, start + rows)) for start in range(0, len(x), rows)]
    return (1 + np.concatenate(parts)) / 2
