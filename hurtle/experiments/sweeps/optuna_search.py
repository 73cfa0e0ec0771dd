"""`OptunaSearch`: proposals by Optuna's samplers, through its ask-and-tell interface. Needs the extra `sweep`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from hurtle.errors import HurtleError
from hurtle.experiments.space import Dimension, Space
from hurtle.experiments.sweeps.search import IsValid
from hurtle.experiments.sweeps.trials import Trial


class OptunaSearch:
    """Optuna's TPE or GP sampler over the same space; scores only, seconds do not count.

    Args:
        space: What to search.
        seed: Of the sampler.
        is_valid: Whether settings fit together; others are told as failed and drawn anew.
        sampler: "tpe" or "gp".
        history: Trials of a sweep that is resumed.

    Raises:
        HurtleError: Optuna is missing.
    """

    def __init__(self, space: Space, seed: int, is_valid: IsValid, sampler: str, history: Sequence[Trial] = ()):
        try:
            import optuna
        except ImportError:
            raise HurtleError(f'--method optuna_{sampler} needs Optuna: pip install "hurtle[sweep]".') from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self.space, self.is_valid = optuna, space, is_valid
        seed += len(history)  # else a resumed sweep would repeat its draws
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of experimental features
            kinds: dict[str, Any] = {"tpe": optuna.samplers.TPESampler, "gp": optuna.samplers.GPSampler}
            options = {"tpe": {"multivariate": True, "constant_liar": True}, "gp": {}}[sampler]
            self._study = optuna.create_study(direction="maximize", sampler=kinds[sampler](seed=seed, **options))
        self._distributions = {dimension.name: _distribution(optuna, dimension) for dimension in space.dimensions}
        self._asked: dict[int, Any] = {}
        for trial in history:
            self._add(trial)

    def suggest(self, number: int, trials: Sequence[Trial]) -> tuple[dict[str, Any], str]:
        """See `Search.suggest`."""
        for _ in range(200):
            asked = self._study.ask(self._distributions)
            values = {d.name: _value(d, asked.params[d.name]) for d in self.space.dimensions}
            if self.is_valid(values):
                self._asked[number] = asked
                return values, "search"
            self._study.tell(asked, state=self._optuna.trial.TrialState.FAIL)
        raise HurtleError(f"None of 200 settings of this space fits together, such as {values}. Narrow the space.")

    def note(self, trial: Trial) -> None:
        """See `Search.note`."""
        asked = self._asked.pop(trial.number, None)
        if asked is None:  # a preset, or a trial of before a resume
            self._add(trial)
        elif math.isfinite(trial.score) and trial.state in ("finished", "pruned"):
            self._study.tell(asked, trial.score)
        else:
            self._study.tell(asked, state=self._optuna.trial.TrialState.FAIL)

    def _add(self, trial: Trial) -> None:
        if math.isfinite(trial.score) and trial.state in ("finished", "pruned"):
            params = {d.name: _param(d, trial.values[d.name]) for d in self.space.dimensions}
            made = self._optuna.trial.create_trial(params=params, distributions=self._distributions, value=trial.score)
            self._study.add_trial(made)


def _distribution(optuna: Any, dimension: Dimension) -> Any:
    """Choices by their index; for the rest the place from 0 to 1, since Optuna does not have all of our scales."""
    if dimension.choices:
        return optuna.distributions.CategoricalDistribution(range(len(dimension.choices)))
    return optuna.distributions.FloatDistribution(0.0, 1.0)


def _value(dimension: Dimension, param: float) -> Any:
    return dimension.choices[int(param)] if dimension.choices else dimension.value(param)


def _param(dimension: Dimension, value: Any) -> float:
    unit = dimension.unit(value)
    return min(int(unit * len(dimension.choices)), len(dimension.choices) - 1) if dimension.choices else unit
