"""The rules of curricula: from which range each env draws an option, and what the returns of ended episodes change about it.

"gated:3:12:0.9" → a rule → ranges of all envs before each rollout; returns by level → the rule's state. Knows no envs.

Levels divide the values of an option: level k holds those from `edges[k]` up to the next edge, the first and the last also all
beyond. A rule with `edges` is told how many episodes of each level ended and the sum of their returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from hurtle.errors import HurtleError, did_you_mean

GATE_EPISODES = 100
"""Episodes at the frontier that a gate judges by, unless told otherwise."""
FAST, SLOW = 0.1, 0.01
"""The share of a level's averages that one episode replaces: what they differ by is the recent progress."""
EVENLY = 0.2
"""The share of envs that `Progress` spreads evenly over all levels, to notice where there is progress again."""


class Rule(Protocol):
    """Chooses the ranges of one option."""

    edges: np.ndarray | None = None
    """Where its levels begin, ascending, float64 [levels]; None: it does not listen to returns."""

    def ranges(self, uniforms: np.ndarray, progress: float) -> tuple[np.ndarray, np.ndarray]:
        """The lowest and the highest value of each env.

        Args:
            uniforms: A random number in [0, 1) for each env.
            progress: The finished part of the run, from 0 to 1.
        """

    def update(self, levels: np.ndarray) -> None:
        """Learn from ended episodes: their count and the sum of their returns by level, float64 [levels, 2]."""
        return

    def metrics(self) -> dict[str, float]:
        """What the user should see besides the ranges."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers and lists."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        return


class Uniform(Rule):
    """All values from `low` to `high` are equally likely: domain randomization.

    Example:
        >>> Uniform(0.5, 2.0).ranges(np.zeros(2), progress=0.0)
        (array([0.5, 0.5]), array([2., 2.]))
    """

    def __init__(self, low: float, high: float, is_whole: bool = False):
        if low > high:
            raise ValueError(f"goes from low to high, got {low:g} to {high:g}.")
        self._low, self._high, self._dtype = low, high, _dtype(is_whole)

    def ranges(self, uniforms: np.ndarray, progress: float) -> tuple[np.ndarray, np.ndarray]:
        """See `Rule.ranges`."""
        return np.full(len(uniforms), self._low, self._dtype), np.full(len(uniforms), self._high, self._dtype)


class Linear(Rule):
    """One value for all envs, which moves evenly from `first` to `last` over the first `share` of the run.

    Example:
        >>> Linear(3, 12, 0.5, is_whole=True).ranges(np.zeros(1), progress=0.25)
        (array([8]), array([8]))
    """

    def __init__(self, first: float, last: float, share: float = 0.5, is_whole: bool = False):
        if not 0 < share <= 1:
            raise ValueError(f"has a share of the run above 0 and up to 1, got {share:g}.")
        self._first, self._last, self._share, self._is_whole = first, last, share, is_whole

    def ranges(self, uniforms: np.ndarray, progress: float) -> tuple[np.ndarray, np.ndarray]:
        """See `Rule.ranges`."""
        value = self._first + (self._last - self._first) * min(1.0, progress / self._share)
        each = np.full(len(uniforms), _rounded(value, self._is_whole), _dtype(self._is_whole))
        return each, each


class Gated(Rule):
    """A frontier that moves one step from `first` towards `last` as soon as recent episodes at it reach a return.

    Every other env plays the frontier itself; the others draw from all values so far, so that nothing is forgotten. Judged are
    the last episodes within half a step of the frontier. The frontier never moves back.

    Args:
        first: The easiest value.
        last: The hardest one, which may be the lower one.
        target: The mean return that opens the gate.
        steps: Steps from `first` to `last`.
        episodes: Episodes to judge by; about as many count, and fewer never do.
        is_whole: Whether values are ints.

    Example:
        >>> rule = Gated(1.0, 2.0, target=0.8, steps=4, episodes=10)
        >>> rule.update(np.array([[10, 9.0], [0, 0], [0, 0], [0, 0], [0, 0]]))  # ten episodes of level 0 returned 9 in all
        >>> rule.ranges(np.zeros(2), progress=0.0)
        (array([1.25, 1.  ]), array([1.25, 1.25]))
    """

    def __init__(
        self,
        first: float,
        last: float,
        target: float,
        steps: float = 10,
        episodes: float = GATE_EPISODES,
        is_whole: bool = False,
    ):
        if first == last:
            raise ValueError(f"goes from the easiest value to the hardest, got {first:g} twice.")
        if not (steps >= 1 and episodes >= 1 and float(steps).is_integer() and float(episodes).is_integer()):
            raise ValueError(f"has at least 1 step and 1 episode, whole numbers; got {steps:g} and {episodes:g}.")
        count = int(min(steps, abs(last - first)) if is_whole else steps)
        self._values = np.array([_rounded(first + (last - first) * k / count, is_whole) for k in range(count + 1)])
        self._values = self._values.astype(_dtype(is_whole))
        ascending = np.sort(self._values)
        self.edges = _edges([-np.inf, *(ascending[:-1] + ascending[1:]) / 2])
        self._falls, self._target, self._episodes = last < first, target, int(episodes)
        self.level, self._count, self._sum = 0, 0.0, 0.0

    def ranges(self, uniforms: np.ndarray, progress: float) -> tuple[np.ndarray, np.ndarray]:
        """See `Rule.ranges`."""
        frontier, rest = self._values[self.level], np.arange(len(uniforms)) % 2 == 1
        easiest = np.where(rest, self._values[0], frontier)
        every = np.full(len(uniforms), frontier)
        return (every, easiest) if self._falls else (easiest, every)

    def update(self, levels: np.ndarray) -> None:
        """See `Rule.update`."""
        count, total = levels[-1 - self.level if self._falls else self.level]
        self._count, self._sum = self._count + count, self._sum + total
        if self._count < self._episodes:
            return
        if self._sum / self._count >= self._target and self.level < len(self._values) - 1:
            self.level, self._count, self._sum = self.level + 1, 0.0, 0.0
        else:  # older episodes count less and less
            self._sum *= self._episodes / self._count
            self._count = float(self._episodes)

    def metrics(self) -> dict[str, float]:
        """The level of the frontier, and the mean return at it so far."""
        return {"level": float(self.level), "return": self._sum / self._count if self._count else math.nan}

    def state_dict(self) -> dict[str, Any]:
        """See `Rule.state_dict`."""
        return {"level": self.level, "count": float(self._count), "sum": float(self._sum)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """See `Rule.load_state_dict`."""
        self.level, self._count, self._sum = saved["level"], saved["count"], saved["sum"]


class Progress(Rule):
    """Plays most where returns change most: neither what is mastered nor what is still too hard.

    A level's progress is the difference of a fast and a slow average of its returns; each env gets a level in proportion to its
    absolute value (Matiisen et al., 2017; Kanitscheider et al., 2021).

    Args:
        low: The lowest value.
        high: The highest one.
        bins: Levels, all of one width.
        is_whole: Whether values are ints.

    Example:
        >>> rule = Progress(0.0, 4.0, bins=2)
        >>> for mean in (0.0, 0.0, 5.0):  # the first level improves, the second does not
        ...     rule.update(np.array([[10, 10 * mean], [10, 0.0]]))
        >>> rule.probabilities.round(2)
        array([0.9, 0.1])
    """

    def __init__(self, low: float, high: float, bins: float = 8, is_whole: bool = False):
        if low >= high:
            raise ValueError(f"goes from low to high, got {low:g} to {high:g}.")
        if not (bins >= 2 and float(bins).is_integer()):
            raise ValueError(f"has at least 2 bins, a whole number; got {bins:g}.")
        self._lows: np.ndarray
        self._highs: np.ndarray
        if is_whole:
            size = int(high) - int(low) + 1
            starts = int(low) + np.arange(min(int(bins), size) + 1) * size // min(int(bins), size)
            self._lows, self._highs = starts[:-1], starts[1:] - 1
        else:
            ends = np.linspace(low, high, int(bins) + 1)
            self._lows, self._highs = ends[:-1], ends[1:]
        self.edges = _edges(self._lows)
        self._fast, self._slow = np.zeros(len(self._lows)), np.zeros(len(self._lows))
        self._is_known = np.zeros(len(self._lows), np.bool_)

    @property
    def probabilities(self) -> np.ndarray:
        """How likely an env gets each level, float64 [levels]."""
        changes, count = np.abs(self._fast - self._slow), len(self._fast)
        total = changes.sum()
        return np.full(count, 1.0 / count) if total == 0 else EVENLY / count + (1.0 - EVENLY) * changes / total

    def ranges(self, uniforms: np.ndarray, progress: float) -> tuple[np.ndarray, np.ndarray]:
        """See `Rule.ranges`."""
        chosen = np.searchsorted(self.probabilities.cumsum()[:-1], uniforms, side="right")
        return self._lows[chosen], self._highs[chosen]

    def update(self, levels: np.ndarray) -> None:
        """See `Rule.update`: as if each episode of a level had returned their mean."""
        counts, means = levels[:, 0], levels[:, 1] / np.maximum(levels[:, 0], 1.0)
        new = (counts > 0) & ~self._is_known
        for average, share in ((self._fast, FAST), (self._slow, SLOW)):
            average += np.where(new, 1.0, 1.0 - (1.0 - share) ** counts) * (means - average)
        self._is_known |= new

    def metrics(self) -> dict[str, float]:
        """The greatest progress of a level, and where it is."""
        changes = np.abs(self._fast - self._slow)
        return {"progress": float(changes.max()), "focus": float((self._lows + self._highs)[changes.argmax()] / 2)}

    def state_dict(self) -> dict[str, Any]:
        """See `Rule.state_dict`."""
        return {"fast": self._fast.tolist(), "slow": self._slow.tolist(), "is_known": self._is_known.tolist()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """See `Rule.load_state_dict`."""
        self._fast, self._slow = np.array(saved["fast"]), np.array(saved["slow"])
        self._is_known = np.array(saved["is_known"], np.bool_)


RULES: dict[str, tuple[Callable[..., Any], str, int, int]] = {
    "uniform": (Uniform, "uniform:LOW:HIGH", 2, 2),
    "linear": (Linear, "linear:FROM:TO[:SHARE]", 2, 3),
    "gated": (Gated, "gated:FROM:TO:RETURN[:STEPS[:EPISODES]]", 3, 5),
    "progress": (Progress, "progress:LOW:HIGH[:BINS]", 2, 3),
}
"""The class of each rule, how it is written, and the fewest and the most numbers that it takes."""


def read_rule(text: Any, is_whole: bool | None = None) -> Rule:
    """A rule as written in settings.

    Args:
        text: Such as "uniform:0.25:1.0", "linear:3:12:0.5", "gated:3:12:0.9" or "progress:3:12:8".
        is_whole: Whether the option is an int; None: if both ends are written as ints.

    Raises:
        ValueError: There is no such rule, or its numbers do not fit; the message continues after the name of the setting.

    Example:
        >>> read_rule("gated:3:12:0.9").level
        0
    """
    kind, *given = text.split(":") if isinstance(text, str) else ("",)
    if kind not in RULES:
        forms = ", ".join(form for _, form, _, _ in RULES.values())
        raise ValueError(f"must be one of {forms}; got {text!r}. {did_you_mean(kind, RULES) if kind else ''}".rstrip())
    make, form, fewest, most = RULES[kind]
    if not fewest <= len(given) <= most:
        raise ValueError(f"must be {form}, got {text!r}.")
    numbers = [_number(item, form, text) for item in given]
    whole_ends = all(isinstance(number, int) for number in numbers[:2])
    if is_whole and not whole_ends:
        raise ValueError(f"is an option that holds whole numbers, got {text!r}.")
    try:
        return make(*numbers, is_whole=whole_ends if is_whole is None else is_whole)
    except ValueError as error:
        raise ValueError(f"must be {form}, which {error}") from None


def check_curriculum(curriculum: Mapping[str, Any]) -> None:
    """Raise unless every option has a rule.

    Raises:
        ValueError: The message continues after the name of the setting.
    """
    for name, text in curriculum.items():
        try:
            read_rule(text)
        except ValueError as error:
            raise ValueError(f"{name}={text} {error}") from None


def make_rules(curriculum: Mapping[str, Any], dtypes: Mapping[str, np.dtype | None]) -> dict[str, Rule]:
    """New rules for the options of a vector; `dtypes` are those of its options, None where they are not known.

    Raises:
        HurtleError: A rule does not suit its option.
    """
    rules = {}
    for name, text in curriculum.items():
        dtype = dtypes[name]
        try:
            rules[name] = read_rule(text, None if dtype is None else dtype.kind in "iu")
        except ValueError as error:
            raise HurtleError(f"curriculum: {name} {error}") from None
    return rules


def by_level(values: np.ndarray, returns: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Count and sum of the returns of each level, float64 [levels, 2].

    Args:
        values: The value that each episode was played with.
        returns: The return of each.
        edges: Where levels begin.

    Example:
        >>> by_level(np.array([1, 5, 9]), np.array([0.5, 1.0, 2.0]), np.array([0, 4, 10])).tolist()
        [[1.0, 0.5], [2.0, 3.0], [0.0, 0.0]]
    """
    level = np.searchsorted(edges[1:], values, side="right")
    return np.stack([np.bincount(level, weights, len(edges)) for weights in (np.ones(len(level)), returns)], axis=1)


def _edges(values: Any) -> np.ndarray:
    """Edges as float32 records hold them, so that all gears find the same levels."""
    return np.array(values, np.float32).astype(np.float64)


def _dtype(is_whole: bool) -> Any:
    return np.int64 if is_whole else np.float64


def _rounded(value: float, is_whole: bool) -> float:
    return round(value) if is_whole else value


def _number(text: str, form: str, whole: str) -> float:
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if math.isfinite(number):
            return number
    raise ValueError(f"must be {form} with numbers, got {whole!r}.")
