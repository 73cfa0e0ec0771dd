"""Robust statistics of episode returns: interquartile mean and bootstrap intervals, as in rliable.

returns → numbers. Knows nothing of where the returns come from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hurtle.errors import HurtleError

DRAWN_AT_ONCE = 1 << 20
"""Values drawn at a time: 8 MB."""


def iqm(x: ArrayLike) -> float:
    """The interquartile mean: the mean of the middle half, without the int(n / 4) lowest and highest values.

    More robust to outliers than the mean, and more efficient than the median.

    Example:
        >>> iqm([0.0, 1.0, 2.0, 3.0, 100.0])
        2.0
    """
    return float(iqm_of_each(_values(x)))


def iqm_of_each(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """The interquartile means along an axis."""
    ordered = np.moveaxis(np.sort(values, axis), axis, -1)
    cut = int(0.25 * ordered.shape[-1])
    return ordered[..., cut : ordered.shape[-1] - cut].mean(-1)


def bootstrap_interval(
    x: ArrayLike,
    statistic: Callable[[np.ndarray], Any] = np.mean,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """The percentile bootstrap interval of a statistic; the same seed gives the same interval.

    Args:
        x: The values, for example one return per episode, or one mean return per training seed.
        statistic: A function of an array: `np.mean`, `iqm` …
        confidence: Probability that such an interval contains the true value.
        resamples: Number of samples drawn with replacement.
        seed: Seed of the resampling.
    """
    if not 0 < confidence < 1:
        raise HurtleError(f"confidence must be between 0 and 1 (0.95 for a 95 % interval), got {confidence}.")
    values = _values(x)
    rng = np.random.default_rng(seed)
    found: list[float] = []
    while len(found) < resamples:
        rows = min(resamples - len(found), max(1, DRAWN_AT_ONCE // len(values)))
        samples = rng.choice(values, (rows, len(values)))
        if statistic is np.mean:
            found += samples.mean(axis=1).tolist()
        elif statistic is iqm:
            found += iqm_of_each(samples).tolist()
        else:
            found += [float(statistic(sample)) for sample in samples]
    low, high = np.quantile(found, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def summarize(returns: ArrayLike) -> dict[str, float]:
    """Mean, population std, IQM, the mean's 95 % bootstrap interval (low, high), min, max and the number of episodes."""
    values = _values(returns)
    low, high = bootstrap_interval(values)
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "iqm": iqm(values),
        "low": low,
        "high": high,
        "min": float(values.min()),
        "max": float(values.max()),
        "episodes": len(values),
    }


def _values(x: ArrayLike) -> np.ndarray:
    values = np.asarray(x, np.float64).ravel()
    if len(values) == 0:
        raise HurtleError("There are no values to summarize: expected at least one finished episode, got none.")
    return values
