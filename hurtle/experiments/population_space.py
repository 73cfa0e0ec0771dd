"""The settings that a population searches: where each may lie, how it is drawn, and how a copy changes it.

names, dict or TOML file → checked ranges and choices → values. Refuses settings that a run cannot change when it is resumed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.experiments.many_runs import reading
from hurtle.runners.settings import check_settings, setting_types, unknown_setting

FACTORS = (0.8, 1.25)
"""What a copy multiplies numbers by."""
SCALES = ("log", "linear", "complement")
"""How numbers are drawn: evenly in the logarithm, evenly, or evenly in the logarithm of 1 − value, for those near 1."""
NEAR_ONE = ("gamma", "gae_lambda", "trace_lambda", "return_lambda")
"""Settings whose distance from 1 is what matters."""
DEFAULTS: dict[str, tuple[float, float]] = {
    "learning_rate": (1e-5, 1e-2),
    "entropy_coef": (1e-4, 0.1),
    "clip_range": (0.05, 0.5),
    "gamma": (0.9, 0.999),
    "gae_lambda": (0.8, 0.99),
    "trace_lambda": (0.8, 0.99),
    "return_lambda": (0.5, 0.95),
    "num_epochs": (1, 20),
    "value_coef": (0.1, 2.0),
    "max_grad_norm": (0.1, 10.0),
    "critic_learning_rate": (1e-5, 1e-2),
    "replay_ratio": (0.1, 4.0),
    "target_rate": (1e-3, 0.1),
    "temperature": (1e-3, 1.0),
    "exploration_noise": (0.02, 0.5),
}
"""Where a setting may lie if the user only names it."""
SEARCHED = ("learning_rate", "entropy_coef", "clip_range")
"""What is searched if the user does not say, as far as the algorithm has it."""
_NETWORK = "it shapes the network, whose weights are copied from member to member"
_REPLAY = "the saved replay buffer is laid out by it, and would be lost"
_START = "it only matters at the start of a run"
FIXED = {
    "num_steps": "members must take the same steps between two comparisons",
    "optimizer": "the moments of one optimizer mean nothing to another",
    "rescale_values": "the values that were learned would mean something else",
    **dict.fromkeys(("dueling", "noisy", "distributional", "num_atoms", "value_low", "value_high"), _NETWORK),
    **dict.fromkeys(("value_bound", "critic_sizes", "num_critics"), _NETWORK),
    **dict.fromkeys(("capacity", "frame_stack", "replay_folder", "save_replay", "stored_state"), _REPLAY),
    **dict.fromkeys(("sequence_length", "burn_in"), _REPLAY),
    **dict.fromkeys(("learning_starts", "initial_temperature"), _START),
}
"""Settings of algorithms that a resumed run cannot change, and why."""


@dataclass(frozen=True)
class Between:
    """A number from `low` to `high`.

    Attributes:
        scale: One of SCALES.
        is_whole: Whether it is an integer.
    """

    low: float
    high: float
    scale: str
    is_whole: bool = False

    def draw(self, rng: random.Random) -> float:
        """A value to begin with."""
        if self.scale == "linear":
            return self._fitted(rng.uniform(self.low, self.high))
        low, high = sorted(map(self._on_scale, (self.low, self.high)))
        return self._fitted(self._on_scale(math.exp(rng.uniform(math.log(low), math.log(high)))))

    def changed(self, value: float, rng: random.Random) -> float:
        """The value times one of FACTORS, in bounds; at a bound that would not change it, the other one."""
        first = rng.randrange(2)
        for factor in (FACTORS[first], FACTORS[1 - first]):
            if (found := self._times(value, factor)) != value:
                return found
        return value

    def to_dict(self) -> dict[str, Any]:
        """As it is written in population.toml."""
        return {"low": self.low, "high": self.high, "scale": self.scale}

    def _times(self, value: float, factor: float) -> float:
        if self.scale == "linear" and self.low <= 0:  # multiplying would stop at 0
            return self._fitted(value + math.copysign(0.1, factor - 1) * (self.high - self.low))
        found = self._fitted(self._on_scale(factor * self._on_scale(value)))
        if self.is_whole and found == value:
            return self._fitted(value + (1 if factor > 1 else -1))
        return found

    def _on_scale(self, value: float) -> float:
        """To the scale's own numbers; the same way back."""
        return 1 - value if self.scale == "complement" else value

    def _fitted(self, value: float) -> float:
        """In bounds, with four digits."""
        if self.is_whole:
            return int(min(self.high, max(self.low, round(value))))
        short = round(1 - float(f"{1 - value:.4g}"), 12) if self.scale == "complement" else float(f"{value:.4g}")
        return min(self.high, max(self.low, short))


@dataclass(frozen=True)
class Choices:
    """One of several values, in their order."""

    choices: tuple[Any, ...]

    def draw(self, rng: random.Random) -> Any:
        """A value to begin with."""
        return rng.choice(self.choices)

    def changed(self, value: Any, rng: random.Random) -> Any:
        """A neighbour."""
        at = self.choices.index(value)
        return rng.choice([self.choices[near] for near in (at - 1, at + 1) if 0 <= near < len(self.choices)])

    def to_dict(self) -> dict[str, Any]:
        """As it is written in population.toml."""
        return {"choices": list(self.choices)}


Space = dict[str, Between | Choices]


def make_space(given: Any, algorithm: str, fixed: Collection[str] = ()) -> Space:
    """The settings to search.

    Args:
        given: None (SEARCHED), names, or a dict or TOML file of `name = [low, high]`, `name = [a, b, c]`,
            `name = { low = 1e-4, high = 1e-2, scale = "log" }` or `name = { choices = [32, 64] }`.
        algorithm: The algorithm.
        fixed: Settings that the user has given a value.

    Raises:
        UnknownNameError: There is no such setting; suggests the closest name.
        HurtleError: A range does not fit its setting, or a resumed run cannot change that.
    """
    types = setting_types(algorithm)
    if isinstance(given, Path) or (isinstance(given, str) and given.endswith(".toml")):
        with reading(Path(given)) as given:
            pass
    if given is None:
        given = [name for name in SEARCHED if name in types and name not in fixed]
        if not given:
            raise HurtleError(f"Which settings of {algorithm} to search? For example search={{'learning_rate': [1e-4, 1e-2]}}.")
    if isinstance(given, str | Path):
        given = [name.strip() for name in str(given).split(",")]
    if not isinstance(given, Mapping):
        given = dict.fromkeys(given)
    if not given:
        raise HurtleError("A population searches at least one setting, such as learning_rate.")
    found: Space = {}
    for name, values in given.items():
        if name not in types:
            raise unknown_setting(name, algorithm, " to search")
        if name in fixed:
            raise HurtleError(f"{name} is searched by the population: do not give it a value, or leave it out of the search.")
        _check_may_change(name, algorithm)
        if values is None and name not in DEFAULTS:
            raise HurtleError(f"{name} has no range of its own: give one, such as {name} = [low, high].")
        found[name] = _part(name, DEFAULTS[name] if values is None else values, types[name], algorithm)
    return found


def _check_may_change(name: str, algorithm: str) -> None:
    from hurtle.algorithms.algorithm import find_algorithm
    from hurtle.algorithms.replay_settings import ReplayConfig

    config = find_algorithm(algorithm).config
    why = FIXED.get(name, "")
    if name == "priority_alpha" and issubclass(config, ReplayConfig):
        why = _REPLAY
    if name not in get_type_hints(config):  # of the env, the policy, the machine, the results
        why = "only settings of the algorithm change in mid-run: envs and networks stay as they are"
    if why:
        raise HurtleError(f"{name} cannot be searched by a population: {why}. Compare runs with other values instead.")


def _part(name: str, values: Any, kind: Any, algorithm: str) -> Between | Choices:
    scale = None
    if isinstance(values, Mapping):
        known = ("low", "high", "scale", "choices")
        if unknown := [key for key in values if key not in known]:
            raise UnknownNameError(f"{name} to search has no {unknown[0]!r}. {did_you_mean(unknown[0], known)}")
        scale = values.get("scale")
        if "choices" in values:
            return _choices(name, values["choices"], algorithm)
        if not {"low", "high"} <= values.keys():
            raise HurtleError(f"{name} to search needs low and high, or choices, got {dict(values)!r}.")
        values = (values["low"], values["high"])
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise HurtleError(f"{name} to search must be [low, high] or a list of choices, got {values!r}.")
    is_range = len(values) == 2 and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return _between(name, values, scale, kind, algorithm) if is_range else _choices(name, values, algorithm)


def _between(name: str, values: Sequence[Any], scale: Any, kind: Any, algorithm: str) -> Between:
    low, high = (check_settings({name: value}, algorithm, " to search")[name] for value in values)
    if not low < high:
        raise HurtleError(f"{name} to search: low must be less than high, got {low} and {high}.")
    if scale is None:
        scale = "complement" if name in NEAR_ONE else "log" if low > 0 and high >= 10 * low else "linear"
    if scale not in SCALES:
        raise UnknownNameError(f"{name} to search has no scale {scale!r}. {did_you_mean(str(scale), SCALES)}")
    if (scale == "log" and low <= 0) or (scale == "complement" and high >= 1):
        bound = "low must be more than 0" if scale == "log" else "high must be less than 1"
        raise HurtleError(f"{name} to search: on the scale {scale!r} {bound}, got {low} and {high}.")
    return Between(low, high, scale, is_whole=kind is int or int in get_args(kind))


def _choices(name: str, values: Any, algorithm: str) -> Choices:
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) < 2:
        raise HurtleError(f"{name} to search needs at least two choices, got {values!r}.")
    found = [check_settings({name: value}, algorithm, " to search")[name] for value in values]
    if len(set(found)) < len(found):
        raise HurtleError(f"{name} to search has the same choice twice: {values!r}.")
    return Choices(tuple(found))
