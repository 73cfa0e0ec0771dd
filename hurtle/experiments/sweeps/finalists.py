"""Which trials are trained again with fresh seeds, and which of them wins: the best of many noisy scores is partly luck."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def checked(trials: Sequence[Trial]) -> dict[int, Estimate]:
    """The IQM of each finalist's checks, over the seeds that all have; a failed check counts as the worst score of all."""
    checks = [trial for trial in trials if trial.is_check and trial.state in ("finished", "failed")]
    finalists = list(dict.fromkeys(trial.checks for trial in trials if trial.is_check))
    scores = {(trial.checks, trial.seed): trial.score for trial in checks}
    seeds = [seed for seed in sorted({seed for _, seed in scores}) if all((finalist, seed) in scores for finalist in finalists)]
    finite = [score for score in scores.values() if math.isfinite(score)]
    if not seeds or not finite:
        return {}
    worst = min(finite)
    each = {finalist: [scores[finalist, seed] for seed in seeds] for finalist in finalists}
    return {
        finalist: Estimate.of([score if math.isfinite(score) else worst for score in found]) for finalist, found in each.items()
    }


def winner(trials: Sequence[Trial]) -> Trial | None:
    """The finalist with the best checks; the best trial if there are none; where they are equal, the faster one."""
    by_number = {trial.number: trial for trial in trials}
    found = checked(trials)
    if found:
        return min((by_number[number] for number in found), key=lambda trial: (-found[trial.number].value, trial.seconds))
    scored = [trial for trial in trials if trial.has_score and not trial.is_check]
    return min(scored, key=lambda trial: (-trial.score, trial.seconds), default=None)
