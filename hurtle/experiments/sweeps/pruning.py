"""The median rule: when a trial has learned too little to go on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def falls_behind(curve: np.ndarray, others: Sequence[np.ndarray], total_steps: int, least_others: int = 5) -> bool:
    """Whether a trial has learned less than half of the others had after as many steps.

    Args:
        curve: Steps and returns so far, [points, 2].
        others: Those of trials that trained to their end.
        total_steps: Of the trial; in the first quarter of them it is never given up.
        least_others: With fewer, nothing is given up.
    """
    if not len(curve) or curve[-1, 0] < total_steps / 4:
        return False
    steps, best = curve[-1, 0], curve[:, 1].max()
    then = [other[other[:, 0] <= steps, 1].max() for other in others if len(other) and other[0, 0] <= steps <= other[-1, 0]]
    return len(then) >= least_others and best < float(np.median(then))
