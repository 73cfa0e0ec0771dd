"""Fixed-size spaces (Box, Discrete, MultiDiscrete, MultiBinary): one leaf each.

value ⇄ the leaf's array, for one record or a batch. Knows nothing of the tree around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from hurtle.emulation.leaves import kind_of
from hurtle.emulation.nodes import Node, Views
from hurtle.errors import EmulationError

if TYPE_CHECKING:
    from hurtle.emulation.plan import Plan

ROUNDING = 1e-6
"""How far observations may be beyond their bounds: normalized ones are, by rounding."""
FIXED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class FixedNode(Node):
    """A space whose values are arrays, or integers, of one shape and dtype."""

    def __init__(self, space: spaces.Space, path: str, plan: Plan):
        self.path, self.space = path, space
        self.is_scalar = isinstance(space, spaces.Discrete)
        self.low, self.high = bounds(space)
        self.leaf = plan.leaf(path, space, self.low.dtype, self.low.shape, self.low, self.high)
        self.fields = self.leaf
        self.leaves = (self.leaf,)
        self._fitting = {self.leaf.dtype}  # dtypes known to fit

    def store(self, views: Views, value: Any) -> None:
        """Write one value into the leaf's array."""
        views[self.leaf][...] = value

    def load(self, views: Views) -> Any:
        """Read the value: a copy of the array, or the integer of a Discrete."""
        array = views[self.leaf]
        return array[()] if self.is_scalar else array.copy()

    def store_many(self, views: Views, values: Any, lead: tuple[int, ...]) -> None:
        """Write arrays [*lead, *shape], or a list of values."""
        values, target = _as_array(values), views[self.leaf]
        if values.shape != target.shape:  # NumPy would silently broadcast a smaller one
            raise EmulationError(f"{self.path}: expected a batch of shape {target.shape}, got {values.shape}.")
        if not np.can_cast(values.dtype, target.dtype, "same_kind"):
            raise EmulationError(f"{self.path}: expected {target.dtype}, got {values.dtype}.")
        target[...] = values

    def load_many(self, views: Views, lead: tuple[int, ...]) -> Any:
        """A view of the whole array, [*lead, *shape]."""
        return views[self.leaf]

    def item(self, batch: Any, i: int) -> Any:
        """Row i: an integer for a Discrete, else an array, even where the space's shape is ()."""
        return batch[i] if self.is_scalar else np.asarray(batch)[i, ...]

    def admit(self, value: Any) -> Any:
        """Return the value if its shape and kind of number fit. Runs on every step, so bounds are left to `check`.

        Raises:
            TypeError: The value does not fit: NumPy would broadcast it, turn None into NaN, or drop an imaginary part.
        """
        if self.is_scalar and isinstance(value, int):
            return value
        array = _as_array(value)
        if array.dtype not in self._fitting:
            if not (array.dtype.kind in "iu" if self.is_scalar else _fits(array.dtype, self.leaf.dtype)):
                raise TypeError(f"{self.path}: {kind_of(value)} does not fit.")
            self._fitting.add(array.dtype)
        if array.shape != self.low.shape:
            raise TypeError(f"{self.path}: {kind_of(value)} does not fit.")
        return array

    def check(self, value: Any, path: str) -> None:
        """Check the type, shape, dtype and bounds of a value."""
        check_bounds(value, path, self.low, self.high, self.is_scalar, ROUNDING)


def check_bounds(value: Any, path: str, low: np.ndarray, high: np.ndarray, is_scalar: bool, rounding: float = 0.0) -> None:
    """Check that `value` has the dtype and shape of `low` (or is an integer, if `is_scalar`) and lies within the bounds.

    Floats may be beyond a bound by `rounding`, relative to the bound if that is above 1.

    Raises:
        EmulationError: It does not; the message begins with `path`.
    """
    if is_scalar:
        expected = f"expected an integer from {low} to {high}"
        is_array = isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "iu" and value.shape == ()
        if not is_array and not isinstance(value, int):
            raise EmulationError(f"{path}: {expected}, got {kind_of(value)}.")
        if not int(low) <= int(value) <= int(high):
            raise EmulationError(f"{path}: {expected}, got {value}.")
        return
    array = _as_array(value)
    if array.shape != low.shape or not _fits(array.dtype, low.dtype):
        got = kind_of(array) if array.dtype.kind in "biuf" else kind_of(value)
        raise EmulationError(f"{path}: expected {low.dtype} of shape {low.shape}, got {got}.")
    lowest, highest = low, high
    if low.dtype.kind == "f":  # compare what will be stored: a float64 0.1 is below a float32 bound of 0.1
        with np.errstate(over="ignore"):
            array = array.astype(low.dtype)
            if rounding:
                lowest, highest = (bound.astype(np.float64) for bound in (low, high))
                lowest = lowest - rounding * np.maximum(1.0, np.abs(lowest))
                highest = highest + rounding * np.maximum(1.0, np.abs(highest))
    outside = ~((array >= lowest) & (array <= highest))  # true for NaN
    if outside.any():
        at = tuple(int(i) for i in np.argwhere(outside)[0])
        place = f" at {list(at)}" if at else ""
        raise EmulationError(f"{path}: expected values from {low[at]} to {high[at]}, got {array[at]}{place}.")


def bounds(space: spaces.Space) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and highest value of each entry of a fixed-size space, in its dtype and shape."""
    assert space.dtype is not None
    dtype = space.dtype.newbyteorder("=")
    if isinstance(space, spaces.Box):
        return space.low.astype(dtype), space.high.astype(dtype)
    if isinstance(space, spaces.Discrete):
        return np.array(int(space.start), dtype), np.array(int(space.start) + int(space.n) - 1, dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return space.start.astype(dtype), (space.start + (space.nvec - 1)).astype(dtype)
    return np.zeros(space.shape or (), dtype), np.ones(space.shape or (), dtype)


def _as_array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:  # ragged lists
        return np.empty(len(value), object)


def _fits(given: np.dtype, wanted: np.dtype) -> bool:
    """Whether the kind of number fits; the range of integers is left to the bounds."""
    return np.can_cast(given, wanted, "same_kind") or (given.kind in "iu" and wanted.kind in "iu")
