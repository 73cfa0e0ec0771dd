"""Which trials are trained again with fresh seeds, and which of them wins: the best of many noisy scores is partly luck."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hurtle.experiments.space import Space
from hurtle.experiments.statistics import Estimate
from hurtle.experiments.sweeps.gaussian_process import GaussianProcess
from hurtle.experiments.sweeps.search import STARTS, normal_scores
from hurtle.experiments.sweeps.trials import Trial

FINALISTS = 3


def choose_finalists(space: Space, trials: Sequence[Trial], count: int = FINALISTS) -> list[int]:
    """The numbers of the trials to check: the best by a model that smooths over trials, the best as scored, and the baseline.

    The cheaper one comes first where scores are equal.
    """
    scored = [trial for trial in trials if trial.has_score]
    if not scored:
        return []
    merits = {trial.number: trial.score for trial in scored}
    if len(scored) >= STARTS:
        features = space.features(np.stack([space.point(trial.values) for trial in scored]))
        smooth, _ = GaussianProcess(features, normal_scores(scored)).predict(features)
        merits = {trial.number: float(value) for trial, value in zip(scored, np.round(smooth, 6), strict=True)}
    by_score = sorted(scored, key=lambda trial: (-trial.score, trial.seconds))
    by_merit = sorted(scored, key=lambda trial: (-merits[trial.number], trial.seconds))
    chosen = dict.fromkeys(trial.number for trial in [by_score[0], *by_merit])
    baseline = [trial.number for trial in scored if trial.origin == "baseline"]
    return list(dict.fromkeys([*list(chosen)[:count], *baseline]))


@dataclass(frozen=True)
class Check:
    """What the runs with fresh seeds say of a finalist.

    Attributes:
        estimate: The IQM of its scores, with the 95 % interval; a failure counts as the worst score of all finalists.
        seeds: How many seeds, the same for all finalists.
        failed: How many of them failed.
    """

    estimate: Estimate
    seeds: int
    failed: int = 0

    @property
    def is_known(self) -> bool:
        """Whether any seed ended well; else the estimate is that of others."""
        return self.failed < self.seeds

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return {**(self.estimate._asdict() if self.is_known else {}), "seeds": self.seeds, "failed": self.failed}

    def __str__(self) -> str:
        seeds = f"{self.seeds} fresh seed{'s' * (self.seeds > 1)}"
        if not self.is_known:
            return f"failed with {seeds}"
        return f"{self.estimate} over {seeds}{f', {self.failed} of which failed' * bool(self.failed)}"


def checked(trials: Sequence[Trial]) -> dict[int, Check]:
    """The check of each finalist, by its number, over the seeds that all of them have; empty if there is no such seed."""
    checks = [trial for trial in trials if trial.is_check and trial.state in ("finished", "failed")]
    finalists = list(dict.fromkeys(trial.checks for trial in trials if trial.is_check))
    scores = {(trial.checks, trial.seed): trial.score for trial in checks}
    every = sorted({seed for _, seed in scores})
    seeds = [seed for seed in every if all((finalist, seed) in scores for finalist in finalists)]
    finite = [score for score in scores.values() if math.isfinite(score)]
    if not seeds or not finite:
        return {}
    found = {}
    for finalist in finalists:
        own = [scores[finalist, seed] for seed in seeds]
        failed = sum(not math.isfinite(score) for score in own)
        found[finalist] = Check(Estimate.of([s if math.isfinite(s) else min(finite) for s in own]), len(seeds), failed)
    return found


def winner(trials: Sequence[Trial]) -> Trial | None:
    """The finalist that failed least with fresh seeds, of those the one with the best scores, of those the fastest.

    Without checks, the best trial of the search.
    """
    by_number = {trial.number: trial for trial in trials}
    if found := checked(trials):
        merit = {number: (check.failed, -check.estimate.value) for number, check in found.items()}
        return min((by_number[number] for number in found), key=lambda trial: (*merit[trial.number], trial.seconds))
    scored = [trial for trial in trials if trial.has_score and not trial.is_check]
    return min(scored, key=lambda trial: (-trial.score, trial.seconds), default=None)
