"""Finds NaN in batches of observations, including emulated ones that are stored as bytes."""

from __future__ import annotations

import numpy as np

from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.emulation.leaves import tree_leaves


def nan_rows(rows: np.ndarray, layout: SpaceLayout | None) -> np.ndarray:
    """Which observations of a batch [B, …] contain NaN, bool [B]; of a record of bytes, its float leaves are checked."""
    leaves = [rows]
    if rows.dtype == np.uint8 and layout is not None and not layout.is_plain:
        leaves = tree_leaves(layout.unflatten(rows))
    found = np.zeros(len(rows), np.bool_)
    for leaf in leaves:
        if leaf.dtype.kind == "f":
            found |= np.isnan(leaf).reshape(len(rows), -1).any(axis=1)
    return found
