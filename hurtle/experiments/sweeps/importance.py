"""How much each searched setting matters: the share of a model's variance that it explains by itself. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hurtle.experiments.space import Space
from hurtle.experiments.sweeps.gaussian_process import GaussianProcess
from hurtle.experiments.sweeps.search import normal_scores, reached, usable
from hurtle.experiments.sweeps.trials import Trial

LEAST = 12
"""Trials from which on there is an estimate."""
SAMPLES, LEVELS = 256, 16


def importance(space: Space, trials: Sequence[Trial], of: str = "score") -> dict[str, float]:
    """The first-order share of each setting in the variance of the score, or of the seconds; from the largest to the smallest.

    Shares do not sum to 1: the rest is due to settings acting together. It is of a model, and says little after few trials.

    Args:
        space: What was searched.
        trials: Those of the search.
        of: "score" or "seconds".
    """
    known = [trial for trial in trials if usable(trial) and (of == "score" or trial.has_score)]
    if len(known) < LEAST:
        return {}
    points = np.stack([space.point(reached(trial)) for trial in known])
    values = normal_scores(known) if of == "score" else np.log([max(trial.seconds, 1e-3) for trial in known])
    model = GaussianProcess(space.features(points), values)
    rng = np.random.default_rng(0)
    anywhere = rng.random((SAMPLES, len(space.dimensions)))
    total = float(np.var(model.predict(space.features(anywhere))[0])) or 1.0
    found = {}
    for k, dimension in enumerate(space.dimensions):
        count = len(dimension.choices) or LEVELS
        means = []
        for level in range(count):
            fixed = anywhere.copy()
            fixed[:, k] = (level + 0.5) / count
            means.append(model.predict(space.features(fixed))[0].mean())
        found[dimension.name] = min(1.0, float(np.var(means)) / total)
    return dict(sorted(found.items(), key=lambda item: -item[1]))
