"""`Metric`: what a sweep maximizes, from the folder of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hurtle.errors import UnknownNameError, did_you_mean
from hurtle.experiments.curves_of_runs import ALIASES
from hurtle.experiments.records import RunRecord
from hurtle.tracking.metrics_tail import last_metrics


@dataclass(frozen=True)
class Metric:
    """A number of a run, the larger the better.

    Attributes:
        name: "return", that of the final evaluation, else of the last training episodes; or a name in metrics.jsonl.
        minimize: Whether smaller numbers are better; scores are then the negative ones.
    """

    name: str = "return"
    minimize: bool = False

    @property
    def is_return(self) -> bool:
        """Whether the returns of training episodes tell how a run will end."""
        return self.name in ("return", "evaluation", "episode_return", "eval_return") and not self.minimize

    def of(self, record: RunRecord) -> float:
        """The score of a run that is finished.

        Raises:
            UnknownNameError: Its metrics have no such name.
        """
        if self.name in ("return", "evaluation", "eval_return"):
            return self._signed(record.final_return)
        if self.name in ("speed", "steps_per_second"):
            return self._signed(record.steps_per_second)
        found = last_metrics(record.path / "metrics.jsonl")
        name = ALIASES.get(self.name, self.name)
        if name not in found:
            raise UnknownNameError(f"No metric {self.name!r} in {record.path}. {did_you_mean(self.name, [*ALIASES, *found])}")
        return self._signed(found[name])

    def of_training(self, record: RunRecord) -> float:
        """The score of a run that was stopped: the return of training, if that is what counts; else NaN."""
        return record.training_return if self.is_return else math.nan

    def shown(self, score: float) -> float:
        """The number that a score is of."""
        return self._signed(score)

    def _signed(self, value: float) -> float:
        return -value if self.minimize else value
