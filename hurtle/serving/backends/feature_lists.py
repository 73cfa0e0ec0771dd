"""Joins and checks the lists of ids of many requests for one EmbeddingBag. Knows nothing of models and requests.

A request of B rows has F·B lengths and as many ids as these sum to, feature by feature: all rows of feature 0, then of feature
1 … Joined, feature 0 of all requests comes first: requests are interleaved. `join_reference` does the same in plain NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

FINE, NEGATIVE_LENGTH, WRONG_SUM, BAD_ID = range(4)
"""Kinds of faults. A fault is stored as its kind, the feature, the position, and the value found there."""


@njit(cache=True, nogil=True)
def join(
    lengths: Any, values: Any, rows: Any, counts: Any, limits: Any, starts: Any, ids: Any, offsets: Any, faults: Any
) -> tuple[int, int]:
    """Join the requests without faults.

    Args:
        lengths: int32, of all requests, one after another.
        values: int32, of all requests, one after another.
        rows: int64 [R], rows of each request.
        counts: int64 [R], values of each request.
        limits: int64 [F], ids of feature f are below limits[f].
        starts: int64 [F], added to the ids: the feature's first row in the joined table.
        ids: int32, room for all values; written.
        offsets: int32, room for all lengths; the start of each list in `ids`; written.
        faults: int64 [R, 4]; written.

    Returns:
        The numbers of lists and ids joined.
    """
    sizes = np.empty((len(rows), len(limits)), np.int64)  # ids per request and feature, which are contiguous
    cursors = np.empty(len(rows), np.int64)
    length_at = value_at = 0
    for r in range(len(rows)):
        cursors[r] = value_at
        length_end, value_end = length_at + len(limits) * rows[r], value_at + counts[r]
        _check(lengths[length_at:length_end], values[value_at:value_end], limits, sizes[r], faults[r])
        length_at, value_at = length_end, value_end
    bag = used = 0
    for f in range(len(limits)):
        first = 0
        for r in range(len(rows)):
            if faults[r, 0] == FINE:
                begin = used
                for length in lengths[first + f * rows[r] : first + (f + 1) * rows[r]]:
                    offsets[bag] = begin
                    bag += 1
                    begin += length
                found, into = values[cursors[r] : cursors[r] + sizes[r, f]], ids[used : used + sizes[r, f]]
                for n in range(len(found)):  # vectorized, as no list's end interrupts the loop
                    into[n] = found[n] + starts[f]
                cursors[r] += sizes[r, f]
                used += sizes[r, f]
            first += len(limits) * rows[r]
    return bag, used


@njit(cache=True, nogil=True)
def _check(lengths: Any, values: Any, limits: Any, sizes: Any, fault: Any) -> None:
    """Write the number of ids of each feature of one request, and its first fault."""
    rows = len(lengths) // len(limits)
    fault[:] = FINE
    least = total = 0
    for f in range(len(limits)):
        size = 0
        for length in lengths[f * rows : (f + 1) * rows]:
            least = min(least, length)
            size += length
        sizes[f] = size
        total += size
    if least < 0:
        at = np.flatnonzero(lengths < 0)[0]
        fault[0], fault[1], fault[2], fault[3] = NEGATIVE_LENGTH, at // rows, at, lengths[at]
    elif total != len(values):
        fault[0], fault[3] = WRONG_SUM, total
    else:
        at = 0
        for f in range(len(limits)):
            smallest, largest = 0, 0
            part = values[at : at + sizes[f]]
            for value in part:
                smallest, largest = min(smallest, value), max(largest, value)
            if smallest < 0 or largest >= limits[f]:
                bad = np.flatnonzero((part < 0) | (part >= limits[f]))[0]
                fault[0], fault[1], fault[2], fault[3] = BAD_ID, f, at + bad, part[bad]
                return
            at += sizes[f]


def join_reference(lengths: list[np.ndarray], values: list[np.ndarray], starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids and offsets of requests without faults."""
    grids = [part.reshape(len(starts), -1) for part in lengths]  # (F, B) each
    lists: list[np.ndarray] = []
    for f, start in enumerate(starts):
        for grid, ids in zip(grids, values, strict=True):
            first = grid[:f].sum()
            lists.append(ids[first : first + grid[f].sum()] + start)
    sizes = np.concatenate(grids, 1).ravel()
    return np.concatenate(lists).astype(np.int32), (np.cumsum(sizes) - sizes).astype(np.int32)
