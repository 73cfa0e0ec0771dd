"""A learning curve in a terminal: a history of bounded size, drawn with block characters.

values → History → rows of text. Knows nothing of what the values are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS = " ▁▂▃▄▅▆▇█"


class History:
    """All values so far in at most `size` points: when it is full, pairs of neighbours are averaged.

    Adding a value takes constant time, however long the run. NaN is ignored.
    """

    def __init__(self, size: int = 512):
        self._size = size
        self._points: list[float] = []
        self._per_point = 1
        self._sum, self._count = 0.0, 0

    def add(self, value: float) -> None:
        """Add the newest value."""
        if not math.isfinite(value):
            return
        self._sum += min(max(value, -1e200), 1e200)  # sums and differences stay finite
        self._count += 1
        if self._count < self._per_point:
            return
        self._points.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._points) >= self._size:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(first + second) / 2 for first, second in pairs]
            self._per_point *= 2

    def columns(self, width: int) -> list[float]:
        """The history as `width` means over equal parts; fewer points are returned as is."""
        points = self._points[:]
        if self._count:
            points.append(self._sum / self._count)
        if len(points) <= width:
            return points
        edges = [round(index * len(points) / width) for index in range(width + 1)]
        return [sum(points[a:b]) / (b - a) for a, b in pairwise(edges)]


def block_chart(values: Sequence[float], rows: int) -> list[str]:
    """Rows of text, top first, with one column per value; the lowest is one eighth of a row high, the highest fills all rows.

    Example:
        >>> block_chart([0.0, 1.0, 2.0, 3.0], rows=1)
        ['▁▃▆█']
    """
    if not values:
        return [""] * rows
    low, span = min(values), max(values) - min(values)
    heights = [round(1 + (8 * rows - 1) * ((value - low) / span)) if span else 4 * rows for value in values]
    return ["".join(BLOCKS[min(max(height - 8 * row, 0), 8)] for height in heights) for row in reversed(range(rows))]
