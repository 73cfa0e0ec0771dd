"""A sum tree: draws indices with probability proportional to their priorities, in O(log n), in compiled code.

priorities of `size` leaves → tree [2 × the next power of two]: node k is the sum of nodes 2k and 2k + 1, the leaves are the
second half.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

compiled: Any = njit(cache=True, nogil=True, error_model="numpy", _nrt=False)  # type: ignore[call-overload]
"""For functions that allocate nothing: without counting references, slices cost nothing."""


def new_tree(size: int) -> np.ndarray:
    """A tree for so many leaves, all of priority 0. float64: sums of a million float32 would drift."""
    return np.zeros(2 << max(0, size - 1).bit_length(), np.float64)


@compiled
def set_leaf(tree, leaf, priority):
    """Set the priority of a leaf, and the sums above it."""
    node = leaf + tree.shape[0] // 2
    tree[node] = priority
    node //= 2
    while node:
        tree[node] = tree[2 * node] + tree[2 * node + 1]
        node //= 2


@compiled
def find_leaf(tree, mass):
    """The leaf at `mass` in [0, total): the first whose cumulative sum exceeds it. A leaf of priority 0 is never found."""
    half, node = tree.shape[0] // 2, 1
    while node < half:
        node *= 2
        # Rounding may leave nothing to the right of the last leaf: stay on the side that has some.
        if mass >= tree[node] and tree[node + 1] > 0.0:
            mass -= tree[node]
            node += 1
        elif tree[node] <= 0.0:
            node += 1
    return node - half
