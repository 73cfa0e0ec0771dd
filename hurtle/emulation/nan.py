"""Which observations hold NaN, also among the bytes of emulated ones."""

from __future__ import annotations

import numpy as np

from hurtle.emulation.layout import SpaceLayout
from hurtle.emulation.leaves import tree_leaves


def nan_rows(rows: np.ndarray, layout: SpaceLayout | None) -> np.ndarray:
    """Which observations [B, …] hold NaN, bool [B]; bytes of a structured space are searched for the floats among them."""
    leaves = [rows]
    if rows.dtype == np.uint8 and layout is not None and not layout.is_plain:
        leaves = tree_leaves(layout.unflatten(rows))
    found = np.zeros(len(rows), np.bool_)
    for leaf in leaves:
        if leaf.dtype.kind == "f":
            found |= np.isnan(leaf).reshape(len(rows), -1).any(axis=1)
    return found
