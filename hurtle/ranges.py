"""The range of a setting, written on its field: `gamma: Annotated[float, between(0, 1)] = 0.99`. Imports nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """Which numbers a setting may have.

    Attributes:
        text: How an error states it, such as "1 or more".
        low: The smallest value …
        excludes_low: … which itself is not allowed.
        high: The largest value.
        allows_infinity: For bounds: infinity means none.
    """

    text: str
    low: float = -math.inf
    high: float = math.inf
    excludes_low: bool = False
    allows_infinity: bool = False

    def check(self, value: Any) -> None:
        """Refuse a number, or one of several, that is out of range; None is always allowed.

        Raises:
            ValueError: The message continues after the name of the setting.
        """
        for item in value if isinstance(value, tuple) else [value]:
            if item is None:
                continue
            if not self.low <= item <= self.high or (self.excludes_low and item == self.low):
                raise ValueError(f"must be {self.text}, got {value!r}.")
            if math.isinf(item) and not self.allows_infinity:
                raise ValueError(f"must be finite, got {value!r}.")


def at_least(low: float) -> Range:
    """`low` or more, and finite."""
    return Range(f"{low:g} or more", low)


def positive(allows_infinity: bool = False) -> Range:
    """More than 0."""
    return Range("more than 0", 0.0, excludes_low=True, allows_infinity=allows_infinity)


def between(low: float, high: float, text: str = "") -> Range:
    """From `low` to `high`, both included."""
    return Range(text or f"from {low:g} to {high:g}", low, high)
