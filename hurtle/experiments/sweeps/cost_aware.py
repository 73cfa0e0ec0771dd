"""`CostAwareSearch`: Bayesian optimization of scores and of the seconds that they take. Plain NumPy.

trials → models of score and cost → candidates near the Pareto front → the one that is expected to improve it most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from hurtle.experiments.space import Space
from hurtle.experiments.sweeps.gaussian_process import GaussianProcess
from hurtle.experiments.sweeps.search import STARTS, IsValid, RandomSearch, normal_scores, reached, usable, valid
from hurtle.experiments.sweeps.trials import Trial, pareto_front

CANDIDATES = 1024
NEAR = 0.7
"""The share of candidates near trials on the Pareto front; the others are anywhere."""
MOST_POINTS = 300
"""Of a model: the newest, and those on the front."""


class CostAwareSearch(RandomSearch):
    """Bayesian optimization of the score and of the seconds it takes, in the spirit of CARBS and Protein.

    Two Gaussian processes predict the score, as its rank among all trials, and the logarithm of the seconds. Candidates are
    drawn around the trials on the Pareto front and anywhere. Every other trial is to improve the best score; the rest are to
    improve the front at a cost that is drawn between its ends, so that cheap settings are found on the way, and teach what
    the expensive ones need.

    Args:
        space: What to search.
        seed: Of the draws.
        is_valid: Whether settings fit together.
        most_seconds: The most that a trial may take.
    """

    def __init__(self, space: Space, seed: int, is_valid: IsValid, most_seconds: float = math.inf):
        super().__init__(space, seed, is_valid)
        self.most_seconds = most_seconds

    def suggest(self, number: int, trials: Sequence[Trial]) -> tuple[dict[str, Any], str]:
        """See `Search.suggest`."""
        every = [trial for trial in trials if usable(trial)]
        front = pareto_front(every)
        known = [trial for k, trial in enumerate(every) if k >= len(every) - MOST_POINTS or trial in front]
        if len([trial for trial in known if trial.has_score]) < STARTS:
            return super().suggest(number, trials)
        rng = np.random.default_rng((self.seed, number))
        points = np.stack([self.space.point(reached(trial)) for trial in known])
        scores, costs = normal_scores(known), np.array([math.log(max(trial.seconds, 1e-3)) for trial in known])
        trained = np.array([trial.state != "failed" for trial in known])  # a failure does not tell what it would have taken
        timed = trained & np.isfinite(costs)
        cost = GaussianProcess(self.space.features(points[timed]), costs[timed], number)
        score = GaussianProcess(self.space.features(points), scores, number)
        pending = [self.space.point(trial.values) for trial in trials if trial.state == "running"]
        if pending:  # believe the model where trials are under way, so that the next one is somewhere else
            more = np.stack(pending)
            believed = score.predict(self.space.features(more))[0]
            both = self.space.features(np.concatenate([points, more]))
            score = GaussianProcess(both, np.concatenate([scores, believed]), like=score)
        places = {trial.number: k for k, trial in enumerate(known)}
        candidates = self._candidates(rng, np.stack([points[places[trial.number]] for trial in front]))
        mean, deviation = score.predict(self.space.features(candidates))
        seconds, spread = cost.predict(self.space.features(candidates))
        front_costs = np.array([costs[places[trial.number]] for trial in front])
        front_scores = np.array([scores[places[trial.number]] for trial in front])
        if number % 2:
            value = expected_improvement(mean, deviation, front_scores[-1])
        else:
            below = np.searchsorted(front_costs, seconds, side="right") - 1
            value = expected_improvement(mean, deviation, np.where(below < 0, scores.min(), front_scores[below]))
            target = rng.uniform(front_costs[0], front_costs[-1] + math.log(1.5))
            value = value * np.exp(-0.5 * np.square(seconds - target))
        if math.isfinite(self.most_seconds):  # times the probability that it ends in time
            value = value * _cumulative((math.log(self.most_seconds) - seconds) / spread)
        return next(valid(self.space, candidates[np.argsort(-value, kind="stable")], self.is_valid)), "search"

    def _candidates(self, rng: np.random.Generator, front: np.ndarray) -> np.ndarray:
        """Points of the unit cube, [CANDIDATES, dimensions]."""
        near = round(NEAR * CANDIDATES)
        size = front.shape[1]
        bases = front[rng.integers(0, len(front), near)]
        reach = np.exp(rng.uniform(math.log(0.02), math.log(0.4), (near, 1)))
        moves = rng.random((near, size)) < np.maximum(0.3, 1.5 / size)
        steps = rng.normal(size=(near, size)) * reach * moves
        jumps = np.array([len(d.choices) > 1 for d in self.space.dimensions]) & moves & (rng.random((near, size)) < 0.3)
        moved = np.where(jumps, rng.random((near, size)), np.abs(bases + steps))
        moved = np.where(moved > 1, 2 - moved, moved).clip(0, 1)  # reflected at the ends
        return np.concatenate([moved, rng.random((CANDIDATES - near, size))])


def expected_improvement(mean: np.ndarray, deviation: np.ndarray, best: np.ndarray | float) -> np.ndarray:
    """How much a normal variable exceeds `best`, on average."""
    z = (mean - best) / deviation
    density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return deviation * (z * _cumulative(z) + density)


def _cumulative(z: np.ndarray) -> np.ndarray:
    return np.array([NormalDist().cdf(value) for value in z])
