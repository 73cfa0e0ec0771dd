"""`DrawnOptions`: a Gymnasium env whose options are drawn anew for each episode, wherever it is stepped and reset.

ranges, set from outside → a draw of the env's own stream → `reset(options=…)`, and attributes of the same names. The values of
an episode are in its last info.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np

from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.native.drawn import draw
from hurtle.native.rng import OPTION_STREAM, stream_state

INFO = "drawn_options"
"""The key of an episode's values in its last info."""


def with_drawn_options(maker: Callable[[], Any], names: Sequence[str]) -> gymnasium.Env:
    """Make an env and draw these options for its episodes.

    Raises:
        HurtleError: It is not a Gymnasium env.
    """
    made = maker()
    if not isinstance(made, gymnasium.Env):
        made.close()
        raise HurtleError(f"Options are drawn for Gymnasium and native envs; {type(made).__name__} is neither.")
    return DrawnOptions(made, names)


class DrawnOptions(gymnasium.Wrapper):
    """Draws options whenever an episode begins; before there are ranges, resets are the env's own.

    Attributes:
        drawn_options: Their names.
        option_ranges: The lowest and highest value of each; ints are drawn between ints, the highest one included.

    Example:
        >>> env = DrawnOptions(gymnasium.make("CartPole-v1"), ["length"])
        >>> env.option_ranges = {"length": (0.25, 0.5)}
        >>> _ = env.reset(seed=0)
        >>> 0.25 <= env.unwrapped.length <= 0.5
        True
    """

    def __init__(self, env: gymnasium.Env, names: Sequence[str]):
        super().__init__(env)
        if taken := sorted({"r", "l", "t"} & set(names)):
            raise HurtleError(f"The option {taken[0]!r} cannot be drawn: episodes report a statistic of that name.")
        self.drawn_options = tuple(names)
        self.option_ranges: dict[str, tuple[Any, Any]] = {}
        self._stream, self._draws = 0, 0
        self._values: dict[str, float | int] = {}
        self._is_checked = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode with newly drawn options, over which `options` take precedence."""
        if seed is not None:
            self._stream, self._draws = stream_state(seed, OPTION_STREAM), 0
        if not self.option_ranges:
            return self.env.reset(seed=seed, options=options)
        own, count = self.env.unwrapped, len(self.drawn_options)
        drawn = {
            name: draw(self._stream, self._draws * count + k, low, high, isinstance(low, int) and isinstance(high, int))
            for k, (name, (low, high)) in enumerate((name, self.option_ranges[name]) for name in self.drawn_options)
        }
        self._draws += 1
        self._values = drawn | {name: value for name, value in (options or {}).items() if name in drawn}
        for name, value in self._values.items():
            if _is_number(getattr(own, name, None)):
                setattr(own, name, value)
        asked = _Asked({**drawn, **(options or {})})
        result = self.env.reset(seed=seed, options=asked)
        if not self._is_checked:
            self._check(asked.names)
        return result

    def step(self, action: Any) -> Any:
        """Step the env; the last info of an episode has its options."""
        outcome = self.env.step(action)
        if (outcome[2] or outcome[3]) and self._values:
            return (*outcome[:4], {**outcome[4], INFO: self._values})
        return outcome

    def _check(self, asked: set[str] | None) -> None:
        """Raise if the env takes no notice of an option."""
        self._is_checked = True
        own = self.env.unwrapped
        numbers = [name for name, value in vars(own).items() if _is_number(value) and not name.startswith("_")]
        for name in self.drawn_options:
            if asked is not None and name not in asked and not _is_number(getattr(own, name, None)):
                raise UnknownNameError(
                    f"{type(own).__name__} has no option {name!r}: its reset(options=…) does not read it, and it has no such "
                    f"attribute. {did_you_mean(name, numbers)}"
                )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


class _Asked(dict):
    """Options that notice which of them an env reads; `names` is None if it has gone through all."""

    def __init__(self, options: dict[str, Any]):
        super().__init__(options)
        self.names: set[str] | None = set()

    def _note(self, name: str) -> None:
        if self.names is not None:
            self.names.add(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._note(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self._note(name)
        return super().pop(name, *default)

    def __getitem__(self, name: str) -> Any:
        self._note(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._note(str(name))
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self.names = None
        return super().__iter__()

    def keys(self) -> Any:
        self.names = None
        return super().keys()

    def items(self) -> Any:
        self.names = None
        return super().items()

    def copy(self) -> Any:
        self.names = None
        return dict(super().items())
