"""User hooks of an emulated env: a featurizer with the space that it returns, reward shaping, and a log of printed lines.

featurize(sample of the space) → space. Knows nothing of agents or of how observations are stored.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from hurtle.errors import EmulationError

Featurize = Callable[[Any], Any]
"""featurize(observation) -> an array, a number, or a tree of dicts and tuples of those."""

ShapeReward = Callable[[Any, Any, Any, dict[str, Any]], float]
"""shape_reward(reward, observation, action, info) -> reward; observation and action are the env's own, not the flat ones."""

PRINTED_LINES = 1000
"""Number of printed lines kept, the latest ones."""


class PrintLog(io.TextIOBase):
    """A text stream that keeps the last lines written to it."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=PRINTED_LINES)
        self._unfinished = ""

    def write(self, text: str) -> int:
        """Append text; a newline completes a line."""
        *complete, self._unfinished = (self._unfinished + text).split("\n")
        self._lines.extend(complete)
        return len(text)

    @property
    def lines(self) -> list[str]:
        """The last lines, including the unfinished one."""
        return [*self._lines, *([self._unfinished] if self._unfinished else [])]

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that what it prints goes into this log."""

        def captured(*args: Any, **kwargs: Any) -> Any:
            with contextlib.redirect_stdout(self), contextlib.redirect_stderr(self):
                return function(*args, **kwargs)

        return captured


def featurized_space(featurize: Featurize, space: spaces.Space) -> spaces.Space:
    """The space of what `featurize` returns: its attribute `space`, or inferred by calling it on a sample of `space`.

    Raises:
        EmulationError: `featurize` fails on a sample, or returns something other than arrays and numbers.

    Example:
        >>> featurized_space(lambda obs: {"mean": obs.mean()}, spaces.Box(0, 1, (4,)))
        Dict('mean': Box(-inf, inf, (), float32))
    """
    declared = getattr(featurize, "space", None)
    if declared is not None:
        if not isinstance(declared, spaces.Space):
            raise EmulationError(f"featurize.space must be a gymnasium space, got {declared!r}.")
        return declared
    name = getattr(featurize, "__name__", repr(featurize))
    sampler = copy.deepcopy(space)  # the env's own space keeps its random stream
    sampler.seed(0)
    try:
        value = featurize(sampler.sample())
    except Exception as error:
        raise EmulationError(
            f"featurize ({name}) failed on a sample of {space}: {type(error).__name__}: {error}. Its space is inferred by "
            f"calling it on a sample; if it cannot handle samples, declare the space: {name}.space = gymnasium.spaces.Box(…)."
        ) from error
    return _space_of(value, f"featurize ({name})")


def _space_of(value: Any, path: str) -> spaces.Space:
    """The space of a tree of arrays and numbers, with a Box of the widest bounds for each."""
    if isinstance(value, Mapping):
        return spaces.Dict({key: _space_of(child, f"{path}[{key!r}]") for key, child in value.items()})
    if isinstance(value, tuple):
        return spaces.Tuple([_space_of(child, f"{path}[{i}]") for i, child in enumerate(value)])
    array = np.asarray(value)
    if array.dtype == np.bool_:
        return spaces.Box(0, 1, array.shape, np.uint8)
    if np.issubdtype(array.dtype, np.floating):
        return spaces.Box(-np.inf, np.inf, array.shape, array.dtype.type)
    if np.issubdtype(array.dtype, np.integer):
        limits = np.iinfo(array.dtype)
        return spaces.Box(limits.min, limits.max, array.shape, array.dtype.type)
    raise EmulationError(
        f"{path} returned {type(value).__name__} {value!r}; expected an array, a number, or a dict or tuple of those. "
        "For anything else, declare the space in the function's attribute `space`."
    )
