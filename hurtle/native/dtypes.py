"""Field types of a `State` record: `x: float32`, `grid: uint8[10, 10]`, `board: int8["height", "2 * width"]`.

A field type is also a cast (`int8(3)`), so that env code can use it on every target.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hurtle.errors import EnvDefinitionError


class FieldType:
    """A scalar type, or a fixed-size array of it; dimensions may be computed from attributes of the env."""

    def __init__(self, scalar: type[np.generic], shape: tuple[int | str, ...] = ()):
        self.scalar = scalar
        self.shape = shape

    def __getitem__(self, shape: int | str | tuple[int | str, ...]) -> FieldType:
        return FieldType(self.scalar, shape if isinstance(shape, tuple) else (shape,))

    def __call__(self, value: Any) -> Any:
        """Cast a number."""
        return self.scalar(value)

    def __repr__(self) -> str:
        dims = ", ".join(map(str, self.shape))
        return self.scalar.__name__ + (f"[{dims}]" if dims else "")

    @property
    def dtype(self) -> np.dtype:
        """The NumPy scalar dtype: lets NumPy and Gymnasium accept `uint8` wherever they accept a dtype."""
        return np.dtype(self.scalar)


bool_ = FieldType(np.bool_)
int8 = FieldType(np.int8)
int16 = FieldType(np.int16)
int32 = FieldType(np.int32)
int64 = FieldType(np.int64)
uint8 = FieldType(np.uint8)
uint16 = FieldType(np.uint16)
uint32 = FieldType(np.uint32)
float32 = FieldType(np.float32)


def fitting(value: Any, dtype: np.dtype, what: str) -> np.ndarray:
    """A value as an array, if it fits the dtype without loss.

    Raises:
        EnvDefinitionError: A float for an integer, a number out of range, or no number at all.

    Example:
        >>> fitting([1, 2], np.dtype(np.int8), "speed").dtype
        dtype('int8')
    """
    given = np.asarray(value)
    fits = given.dtype.kind in "biuf" and (given.dtype.kind != "f" or dtype.kind == "f")
    if fits and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        fits = bool(((given >= limits.min) & (given <= limits.max)).all())
    if fits and dtype.kind == "b":
        fits = bool(((given == 0) | (given == 1)).all())
    if not fits:
        raise EnvDefinitionError(f"{what} holds {dtype.name}, got {value!r}.")
    return given.astype(dtype)
