"""What sweeps and populations search: settings with their ranges or choices, and their places in a unit cube.

TOML, a dict or spaces.toml → `Space` ⇄ settings of a run ⇄ point in [0, 1]^d. Knows nothing of searching.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

import numpy as np

from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.references import is_reference
from hurtle.runners.settings import check_settings, setting_types
from hurtle.tracking.toml_text import to_toml

SCALES = ("linear", "log", "near_one", "power_of_two")
FACTORS = (0.8, 1.25)
"""What a small change multiplies numbers by."""
NEAR_ONE = ("gamma", "gae_lambda", "trace_lambda", "return_lambda")
"""Settings whose distance from 1 is what matters."""
NOT_SEARCHED = (
    "env",
    "algorithm",
    "seed",
    "runs",
    "name",
    "progress",
    "curve",
    "trackers",
    "device",
    "preset",
    "env_parameters",
    "unsafe",
    "fine_tune",
    "replay_folder",
    "curriculum",
    "stop_at_return",
)


@dataclass(frozen=True)
class Dimension:
    """One setting.

    Attributes:
        name: Its name.
        low: The smallest value.
        high: The largest value.
        scale: "linear"; "log"; "near_one", the logarithm of the distance from 1, for discounts; or "power_of_two".
        whole: Whether it takes whole numbers only.
        choices: The values to choose from; then there is no range.
    """

    name: str
    low: float = 0.0
    high: float = 1.0
    scale: str = "linear"
    whole: bool = False
    choices: tuple[Any, ...] = ()

    def value(self, unit: float) -> Any:
        """The value at a place from 0 to 1.

        Example:
            >>> Dimension("learning_rate", 1e-4, 1e-2, "log").value(0.5), Dimension("size", 8, 64, "power_of_two").value(0.5)
            (0.001, 32)
        """
        unit = min(max(float(unit), 0.0), 1.0)
        if self.choices:
            return self.choices[min(int(unit * len(self.choices)), len(self.choices) - 1)]
        low, high = self._ends()
        if self.scale == "power_of_two":
            return 2 ** int(min(low + math.floor(unit * (high - low + 1)), high))
        if self.whole and self.scale == "linear":
            return int(min(self.low + math.floor(unit * (self.high - self.low + 1)), self.high))
        at = low + unit * (high - low)
        value = {"linear": lambda: at, "log": lambda: math.exp(at), "near_one": lambda: 1 - math.exp(at)}[self.scale]()
        if self.whole:
            return int(min(max(round(value), self.low), self.high))
        return min(max(float(f"{value:.4g}") if self.scale != "near_one" else round(value, 6), self.low), self.high)

    def unit(self, value: Any) -> float:
        """The place of a value; outside the range at its ends, unknown choices and what is no number in the middle."""
        if self.choices:
            places = [k for k, choice in enumerate(self.choices) if choice == value]
            return (places[0] + 0.5) / len(self.choices) if places else 0.5
        low, high = self._ends()
        if not isinstance(value, int | float):  # such as "none"
            return 0.5
        value = min(max(float(value), self.low), self.high)
        if self.scale == "power_of_two":
            return (round(math.log2(value)) - low + 0.5) / (high - low + 1)
        if self.whole and self.scale == "linear":
            return (value - self.low + 0.5) / (self.high - self.low + 1)
        at = {"linear": lambda: value, "log": lambda: math.log(value), "near_one": lambda: math.log(1 - value)}[self.scale]()
        return (at - low) / (high - low)

    def changed(self, value: Any, rng: random.Random) -> Any:
        """A value nearby: a neighbour among choices, else the number times one of FACTORS, in bounds."""
        if self.choices:
            at = self.choices.index(value)
            return rng.choice([self.choices[near] for near in (at - 1, at + 1) if 0 <= near < len(self.choices)])
        first = rng.randrange(2)
        for factor in (FACTORS[first], FACTORS[1 - first]):
            if (found := self._times(value, factor)) != value:
                return found
        return value

    def _times(self, value: float, factor: float) -> Any:
        if self.scale == "power_of_two":
            found = value * 2 if factor > 1 else value / 2
        elif self.scale == "near_one":
            found = round(1 - (1 - value) * factor, 6)
        elif self.low <= 0:  # multiplying would stop at 0
            found = value + math.copysign(0.1, factor - 1) * (self.high - self.low)
        else:
            found = value * factor
        if self.whole:
            found = round(found) if round(found) != value else value + (1 if factor > 1 else -1)
            return int(min(max(found, self.low), self.high))
        return min(max(found if self.scale == "near_one" else float(f"{found:.4g}"), self.low), self.high)

    def _ends(self) -> tuple[float, float]:
        """The range on its scale."""
        if self.scale == "log":
            return math.log(self.low), math.log(self.high)
        if self.scale == "near_one":
            return math.log(1 - self.low), math.log(1 - self.high)
        if self.scale == "power_of_two":
            return round(math.log2(self.low)), round(math.log2(self.high))
        return self.low, self.high


@dataclass(frozen=True)
class Space:
    """The settings that a sweep searches."""

    dimensions: tuple[Dimension, ...]

    @property
    def names(self) -> list[str]:
        """The names of the settings."""
        return [dimension.name for dimension in self.dimensions]

    def values(self, point: Sequence[float] | np.ndarray) -> dict[str, Any]:
        """The settings at a point of the unit cube."""
        return {dimension.name: dimension.value(unit) for dimension, unit in zip(self.dimensions, point, strict=True)}

    def point(self, values: Mapping[str, Any]) -> np.ndarray:
        """The point of these settings, float64 [dimensions]; missing ones are in the middle."""
        return np.array([d.unit(values[d.name]) if d.name in values else 0.5 for d in self.dimensions])

    def features(self, points: np.ndarray) -> np.ndarray:
        """Points for a model that measures distances, [points, features]: more than two choices get a column each."""
        columns = []
        for dimension, column in zip(self.dimensions, points.T, strict=True):
            count = len(dimension.choices)
            if count > 2:
                chosen = np.minimum((column * count).astype(int), count - 1)
                columns += list((np.arange(count)[:, None] == chosen) / math.sqrt(2))
            else:
                columns.append(np.minimum((column * count).astype(int), 1) if count else column)
        return np.stack(columns, axis=1).astype(np.float64)

    def to_toml(self) -> str:
        """The space as a file that `read_space` reads."""
        ranges = [dimension for dimension in self.dimensions if not dimension.choices]
        lists = {dimension.name: dimension.choices for dimension in self.dimensions if dimension.choices}
        width = max((len(dimension.name) for dimension in ranges), default=0)
        lines = [
            f'{d.name:<{width}} = {{ low = {_number(d.low)}, high = {_number(d.high)}, scale = "{d.scale}" }}' for d in ranges
        ]
        return "\n".join(lines) + ("\n" if ranges else "") + to_toml({k: [_listed(v) for v in vs] for k, vs in lists.items()})


def default_space(base: Mapping[str, Any], fixed: Collection[str] = ()) -> Space:
    """The space that comes with an algorithm, around the settings that a run would have without a sweep.

    Args:
        base: All settings of such a run; its "algorithm" decides.
        fixed: Settings to leave out.

    Raises:
        HurtleError: The algorithm has none, as one of the user's own.
    """
    algorithm = str(base["algorithm"])
    tables = tomllib.loads(Path(__file__).with_name("spaces.toml").read_text(encoding="utf-8"))
    table = tables["every"] | tables.get(algorithm, {})
    if algorithm not in tables:
        known = {"learning_rate", "gamma", "entropy_coef"} & setting_types(algorithm).keys()
        table |= {name: tables["ppo"][name] for name in sorted(known)}
    if "cnn" in str(base.get("policy")):
        table.pop("normalize_observations", None)  # images have a scale
    return make_space({name: entry for name, entry in table.items() if name not in fixed}, base, widen=True)


def read_space(file: str | Path, base: Mapping[str, Any]) -> Space:
    """The space in a TOML file: `name = { low = …, high = …, scale = "…" }`, or `name = [choice, choice, …]`.

    Raises:
        HurtleError: The file cannot be read, or says something that does not fit the settings.
    """
    try:
        table = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise HurtleError(f"The space {file} could not be read: {error.strerror}.") from None
    except ValueError as error:
        raise HurtleError(f"{file} is not a TOML file: {error}.") from None
    return make_space(table, base, f" in {file}")


def make_space(table: Mapping[str, Any], base: Mapping[str, Any], where: str = "", widen: bool = False) -> Space:
    """The space of a table as in a TOML file.

    Args:
        table: By name: a range, `{"low": …, "high": …, "scale": …}`, or a list of choices. Without a scale, one is chosen:
            near_one for discounts, log for positive ranges of a factor of 10 or more, else linear.
        base: The settings of a run without a search; "algorithm" is needed.
        where: For errors: where the table comes from, such as " in space.toml".
        widen: Whether ranges are widened to include the settings in `base`.

    Raises:
        HurtleError: Something does not fit the settings.

    Example:
        >>> make_space({"gamma": {"low": 0.9, "high": 0.99}}, {"algorithm": "ppo"}).dimensions[0].scale
        'near_one'
    """
    algorithm = str(base["algorithm"])
    types = setting_types(algorithm)
    found = []
    for name, entry in table.items():
        if name not in types:
            raise UnknownNameError(f"No setting {name}{where}. {did_you_mean(name, types)}")
        if name in NOT_SEARCHED:
            raise HurtleError(f"{name}{where} is the same for all runs of a search: leave it out.")
        if isinstance(entry, Mapping):
            found.append(_range(name, dict(entry), types[name], base.get(name), algorithm, where, widen))
        elif isinstance(entry, list | tuple) and len(entry) > 1:
            if get_origin(types[name]) is tuple and not all(isinstance(choice, list | tuple) for choice in entry):
                raise HurtleError(f"Each choice of {name}{where} is a list: {name} = [[64, 64], [128]], got {entry!r}.")
            choices = [check_settings({name: choice}, algorithm, where)[name] for choice in entry]
            if any(isinstance(choice, str) and is_reference(choice) for choice in choices):
                raise HurtleError(
                    f"{name}{where} names code of your own, {entry!r}: only names that come with Hurtle can be searched."
                )
            if any(choice in choices[:k] for k, choice in enumerate(choices)):
                raise HurtleError(f"{name}{where} has the same choice twice: {entry!r}.")
            found.append(Dimension(name, choices=tuple(choices)))
        else:
            raise HurtleError(
                f'{name}{where} needs a range, {{ low = 0.1, high = 1.0, scale = "log" }}, or a list of choices, got {entry!r}.'
            )
    if not found:
        raise HurtleError(f"There is nothing to search{where}: name at least one setting.")
    return Space(tuple(found))


def _range(name: str, entry: dict[str, Any], kind: Any, base: Any, algorithm: str, where: str, widen: bool) -> Dimension:
    if widen and (times := entry.pop("times", None)):  # spaces.toml: relative to the setting of a run without a sweep
        entry |= {"low": base * times[0], "high": base * times[1]}
    scale = entry.pop("scale", None)
    low, high = (entry.pop(end, None) for end in ("low", "high"))
    whole = kind is int
    if entry:
        raise HurtleError(f"{name}{where} has {', '.join(entry)}: a range takes low, high and scale.")
    if scale is not None and scale not in SCALES:
        raise HurtleError(f"The scale of {name}{where} must be one of {', '.join(SCALES)}, got {scale!r}.")
    if not all(isinstance(end, int | float) and not isinstance(end, bool) and math.isfinite(end) for end in (low, high)):
        raise HurtleError(f"{name}{where} needs low and high, two numbers.")
    if scale is None:
        scale = "near_one" if name in NEAR_ONE and high < 1 else "log" if low > 0 and high >= 10 * low else "linear"
    if not (whole or kind is float or kind == float | None or kind == int | None):
        raise HurtleError(f"{name}{where} is not a number: give a list of choices.")
    if whole:
        low, high = max(1, round(low)), round(high)
    if scale == "power_of_two":
        low, high = 2 ** max(0, round(math.log2(max(low, 1)))), 2 ** max(0, round(math.log2(max(high, 1))))
    if widen and isinstance(base, int | float) and not isinstance(base, bool):
        fits = scale != "log" or base > 0
        low, high = (min(low, base), max(high, base)) if fits and not (scale == "near_one" and base >= 1) else (low, high)
    if not low < high:
        raise HurtleError(f"{name}{where}: low must be less than high, got {low:g} and {high:g}.")
    if (scale == "log" and low <= 0) or (scale == "near_one" and high >= 1):
        raise HurtleError(f"{name}{where}: on a {scale} scale, {'low must be above 0' if scale == 'log' else 'high below 1'}.")
    for end in (low, high):
        check_settings({name: end}, algorithm, where)
    return Dimension(name, float(low), float(high), scale, whole or scale == "power_of_two")


def _number(value: float) -> str:
    """A number as TOML, every digit of it."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
