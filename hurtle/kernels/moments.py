"""Running mean and variance in float64, for the normalizers, beside the NumPy reference.

running moments + a rollout's columns [T, N, D] → running moments. Columns are merged one by one, in order (Chan et al., 1983),
so the same columns give the same bits, however the work is divided. Knows no policy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from hurtle.errors import HurtleError

Moments = tuple[float, np.ndarray, np.ndarray]
"""Count; mean [D]; sum of squared distances from the mean [D] (the variance is that divided by the count)."""

BLOCK_ELEMENTS = 1024
"""Columns are processed in blocks of about this many elements, whose sums stay in the L1 cache."""


def merge_columns(count: float, mean: np.ndarray, m2: np.ndarray, columns: Any, valid: Any = None) -> Moments:
    """Merge a rollout into running moments.

    Args:
        count: Number of samples in the running moments.
        mean: Their mean, float64. [D]
        m2: Their sum of squared distances from the mean, float64. [D]
        columns: Samples of any real dtype, time-major; column n belongs to row n. [T, N, D]
        valid: False for samples to ignore; None uses all. [T, N]

    Returns:
        The new count, mean and m2; the arguments are not changed.

    Example:
        >>> samples = np.array([1.0, 2.0, 3.0, 6.0], np.float32).reshape(2, 2, 1)
        >>> count, mean, m2 = merge_columns(0.0, np.zeros(1), np.zeros(1), samples)
        >>> count, mean.item(), (m2 / count).item()
        (4.0, 3.0, 3.5)
    """
    columns, valid = np.ascontiguousarray(columns), None if valid is None else np.ascontiguousarray(valid, np.bool_)
    count, mean, m2 = float(count), np.array(mean, np.float64), np.array(m2, np.float64)
    if columns.ndim != 3 or mean.shape != columns.shape[2:] or m2.shape != mean.shape:
        raise HurtleError(
            f"columns must be [steps, rows, size] for moments of that size; got {columns.shape} for a mean of shape "
            f"{mean.shape} and an m2 of shape {m2.shape}."
        )
    if valid is not None and valid.shape != columns.shape[:2]:
        raise HurtleError(f"valid must have the shape {columns.shape[:2]} of the columns, got {valid.shape}.")
    if columns.size:
        count = _merge_columns(count, mean, m2, columns, valid)
    return count, mean, m2


def merge_columns_reference(count: float, mean: np.ndarray, m2: np.ndarray, columns: Any, valid: Any = None) -> Moments:
    """The reference for `merge_columns`."""
    columns = np.asarray(columns)
    count, mean, m2 = float(count), np.array(mean, np.float64), np.array(m2, np.float64)
    for n in range(columns.shape[1]):
        column = columns[:, n] if valid is None else columns[np.asarray(valid)[:, n], n]
        column = column.astype(np.float64)
        size = len(column)
        if size:
            own_mean = column.mean(0)
            own_m2 = ((column - own_mean) ** 2).sum(0)
            delta, total = own_mean - mean, count + size
            mean += delta * size / total
            m2 += own_m2 + delta**2 * count * size / total
            count = total
    return count, mean, m2


@njit(cache=True, nogil=True)
def _merge_columns(count, mean, m2, columns, valid):
    """Merge into `mean` and `m2` in place; returns the new count."""
    num_columns, size = columns.shape[1:]
    block = max(1, BLOCK_ELEMENTS // size)
    sizes = np.empty(block, np.int64)
    own_mean, own_m2 = np.empty((block, size)), np.empty((block, size))
    for first in range(0, num_columns, block):
        width = min(block, num_columns - first)
        if valid is None:
            _block_moments(columns, first, width, sizes, own_mean, own_m2)
        else:
            _valid_block_moments(columns, valid, first, width, sizes, own_mean, own_m2)
        for b in range(width):
            if sizes[b]:
                total = count + sizes[b]
                for d in range(size):
                    delta = own_mean[b, d] - mean[d]
                    mean[d] += delta * sizes[b] / total
                    m2[d] += own_m2[b, d] + delta * delta * count * sizes[b] / total
                count = total
    return count


@njit(cache=True, nogil=True)
def _block_moments(columns, first, width, sizes, own_mean, own_m2):
    """The moments of each of `width` columns from `first` on, in two passes along memory."""
    steps, num_columns, size = columns.shape
    samples = columns.reshape(steps, num_columns * size)
    mean, m2 = own_mean.reshape(-1), own_m2.reshape(-1)
    start = np.uint64(first * size)  # unsigned: a check for negative indices would prevent vectorization
    sizes[:] = steps
    mean[:] = 0.0
    m2[:] = 0.0
    for t in range(steps):
        for e in range(width * size):
            mean[e] += np.float64(samples[t, start + np.uint64(e)])
    for e in range(width * size):
        mean[e] /= steps
    for t in range(steps):
        for e in range(width * size):
            delta = np.float64(samples[t, start + np.uint64(e)]) - mean[e]
            m2[e] += delta * delta


@njit(cache=True, nogil=True)
def _valid_block_moments(columns, valid, first, width, sizes, own_mean, own_m2):
    """The same, for valid samples only."""
    steps, _, size = columns.shape
    sizes[:] = 0
    own_mean[:] = 0.0
    own_m2[:] = 0.0
    for t in range(steps):
        for b in range(width):
            if valid[t, first + b]:
                sizes[b] += 1
                for d in range(size):
                    own_mean[b, d] += np.float64(columns[t, first + b, d])
    for b in range(width):
        for d in range(size):
            own_mean[b, d] /= max(1, sizes[b])
    for t in range(steps):
        for b in range(width):
            if valid[t, first + b]:
                for d in range(size):
                    delta = np.float64(columns[t, first + b, d]) - own_mean[b, d]
                    own_m2[b, d] += delta * delta
