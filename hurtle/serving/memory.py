"""`Memory`: counts and bounds the bytes that clients make one process hold: unfinished requests, unread answers.

Transports count what they hold, over all connections. Requests that come and go in one piece, as most do, are not counted.
"""

from __future__ import annotations

FULL = "The server's buffers for unfinished requests and answers are full; retry later."


class Memory:
    """Counts bytes; used on the event loop's thread only.

    Args:
        limit: Bytes beyond which new requests are refused.

    Attributes:
        used: Bytes held now.

    Example:
        >>> memory = Memory(10)
        >>> memory.hold(8), memory.hold(8)
        (True, False)
    """

    __slots__ = ("limit", "used")

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0

    def hold(self, size: int) -> bool:
        """Count bytes until `release`; returns whether the total is within the limit."""
        self.used += size
        return self.used <= self.limit

    def release(self, size: int) -> None:
        """Stop counting bytes."""
        self.used -= size
