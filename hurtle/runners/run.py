"""`Run`: what `hurtle.train` returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hurtle.runners.evaluate import Evaluation


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        path: The run folder; `hurtle.load(run)`, `hurtle eval` and `hurtle watch` take it.
        steps: Steps trained for, summed over envs and agents.
        seconds: Training time, excluding the final evaluation and, in the device gear, compilation.
        mean_return: Mean return of the last 100 training episodes.
        evaluation: The final evaluation, or None if the run was stopped.
        stopped_by: "total_steps", "stop_at_return", "callback", "until", "Ctrl-C" or "SIGTERM".
    """

    path: Path
    steps: int
    seconds: float
    mean_return: float
    evaluation: Evaluation | None
    stopped_by: str
