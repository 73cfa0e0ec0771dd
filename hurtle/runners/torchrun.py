"""Whether torchrun has started this process as one of several, from the variables that it sets. Imports no torch."""

from __future__ import annotations

import os
from typing import NamedTuple


class World(NamedTuple):
    """The processes that torchrun has started."""

    rank: int
    size: int
    local_rank: int
    """The number of this one among those of this machine …"""
    local_size: int
    """… and how many these are."""


def launched() -> World:
    """The processes that train together with this one; this one alone if torchrun has not started it.

    Example:
        >>> launched()
        World(rank=0, size=1, local_rank=0, local_size=1)
    """
    found = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if not all(map(str.isdecimal, found)) or "MASTER_ADDR" not in os.environ:
        return World(0, 1, 0, 1)
    return World(*map(int, found))
