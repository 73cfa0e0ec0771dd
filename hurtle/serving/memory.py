"""`Memory`: what clients make one process hold, and its bound: incomplete or unanswered requests, answers not taken.

Transports count what they keep, over all connections. What comes and goes in one piece, as most requests do, is not counted.
"""

from __future__ import annotations

FULL = "The server holds as much of unfinished requests and answers as it may; try later."


class Memory:
    """Counts bytes; used on the event loop's thread only.

    Args:
        limit: Beyond it new requests are refused.

    Attributes:
        used: Bytes that are held now.

    Example:
        >>> memory = Memory(10)
        >>> memory.hold(8), memory.hold(8)
        (True, False)
    """

    __slots__ = ("limit", "used")

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0

    def hold(self, size: int) -> bool:
        """Count bytes, until `release`; whether all together are few enough."""
        self.used += size
        return self.used <= self.limit

    def release(self, size: int) -> None:
        """Such bytes are gone."""
        self.used -= size
