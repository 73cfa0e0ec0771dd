"""Merges the infos of many envs into one dict of arrays with `_key` masks, the format of Gymnasium's vector envs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Infos = dict[str, Any]


def merge_infos(pairs: Iterable[tuple[int, Infos]], size: int) -> Infos:
    """Merge `(row, info)` pairs into arrays of `size` rows; `_key` marks the rows that have `key`.

    Numbers and equal-shaped arrays become arrays of their dtype, dicts are merged recursively, all else is kept as objects.

    Example:
        >>> merge_infos([(0, {"lives": 3}), (2, {"lives": 1})], 3)
        {'lives': array([3, 0, 1]), '_lives': array([ True, False,  True])}
    """
    columns: dict[str, tuple[list[int], list[Any]]] = {}
    for row, info in pairs:
        for key, value in info.items():
            column = columns.get(key)
            if column is None:
                columns[key] = ([row], [value])
            else:
                column[0].append(row)
                column[1].append(value)
    merged: Infos = {}
    for key, (rows, values) in columns.items():
        mask = np.zeros(size, np.bool_)
        mask[rows] = True
        merged[key] = _gather(rows, values, size)
        merged[f"_{key}"] = mask
    return merged


def _gather(rows: list[int], values: list[Any], size: int) -> Any:
    kinds = set(map(type, values))
    if all(issubclass(kind, dict) for kind in kinds):
        return merge_infos(zip(rows, values, strict=True), size)
    if all(kind in (bool, int, float) or issubclass(kind, np.number | np.bool_) for kind in kinds):
        shape: tuple[int, ...] = ()
    elif kinds == {np.ndarray} and len({(value.shape, value.dtype) for value in values}) == 1 and values[0].dtype != object:
        shape = values[0].shape
    else:
        return _objects(rows, values, size)
    stacked = np.array(values)
    if stacked.dtype == object:  # an int beyond 64 bits
        return _objects(rows, values, size)
    if len(rows) == size and rows[0] == 0 and rows == list(range(size)):
        return stacked
    gathered = np.zeros((size, *shape), stacked.dtype)
    gathered[rows] = stacked
    return gathered


def _objects(rows: list[int], values: list[Any], size: int) -> np.ndarray:
    gathered = np.full(size, None, object)
    for row, value in zip(rows, values, strict=True):
        gathered[row] = value
    return gathered
