"""`Search`: which settings to try next; and at random. Others are cost_aware.py and optuna_search.py.

space, trials so far → values of the next trial. Draws depend on the seed and the number of the trial alone: a sweep that is
resumed needs no saved state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np

from hurtle.errors import HurtleError
from hurtle.experiments.space import Space
from hurtle.experiments.sweeps.trials import Trial

METHODS = ("cost_aware", "random", "optuna_tpe", "optuna_gp")
STARTS = 8
"""Trials at random before there is a model."""
IsValid = Callable[[dict[str, Any]], bool]


class Search(Protocol):
    """What proposes trials."""

    def suggest(self, number: int, trials: Sequence[Trial]) -> tuple[dict[str, Any], str]:
        """Values for trial `number`, and their origin, given all trials of the search so far, running ones included."""
        ...

    def note(self, trial: Trial) -> None:
        """A trial has ended."""
        ...


class RandomSearch:
    """Points drawn uniformly.

    Args:
        space: What to search.
        seed: Of the draws.
        is_valid: Whether settings fit together; others are drawn anew.
    """

    def __init__(self, space: Space, seed: int, is_valid: IsValid):
        self.space, self.seed, self.is_valid = space, seed, is_valid

    def suggest(self, number: int, trials: Sequence[Trial]) -> tuple[dict[str, Any], str]:
        """See `Search.suggest`."""
        rng = np.random.default_rng((self.seed, number))
        return next(valid(self.space, rng.random((200, len(self.space.dimensions))), self.is_valid)), "random"

    def note(self, trial: Trial) -> None:
        """See `Search.note`."""


def valid(space: Space, points: np.ndarray, is_valid: IsValid) -> Any:
    """The values of those points whose settings fit together.

    Raises:
        HurtleError: None does.
    """
    for point in points:
        values = space.values(point)
        if is_valid(values):
            yield values
    raise HurtleError(
        f"None of {len(points)} settings of this space fits together, such as {space.values(points[0])}. Narrow the space, for "
        "example so that minibatch_size divides num_envs × num_steps."
    )


def usable(trial: Trial) -> bool:
    """Whether a model can learn from a trial: also from one that failed or was given up."""
    return trial.has_score or (trial.state == "pruned" and math.isfinite(trial.score)) or trial.state == "failed"


def reached(trial: Trial) -> dict[str, Any]:
    """The settings that a trial came to show: one that was given up had fewer steps."""
    if trial.state == "pruned" and "total_steps" in trial.values:
        return {**trial.values, "total_steps": max(1, min(trial.steps, trial.values["total_steps"]))}
    return trial.values


def normal_scores(trials: Sequence[Trial]) -> np.ndarray:
    """Scores as quantiles of a normal distribution, by rank: one far outlier does not flatten all others. Failures are last."""
    values = np.array([trial.score if math.isfinite(trial.score) else -math.inf for trial in trials])
    below = (values[:, None] > values).sum(1)
    equal = (values[:, None] == values).sum(1)
    quantiles = (below + 0.5 * equal) / len(values)
    return np.array([NormalDist().inv_cdf(quantile) for quantile in quantiles])
