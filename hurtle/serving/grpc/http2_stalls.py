"""`Stalls`: what a peer makes an HTTP/2 connection keep and does not go on with: messages begun, answers not taken.

A look now and then at what has moved since the last one; nothing is done per request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hurtle.serving.grpc.http2 import Http2Connection

CHECK_SECONDS = 5.0
"""Between looks."""
STALL_SECONDS = 60.0
"""For a stream, or the connection, to move `STALL_BYTES`."""
STALL_BYTES = 1 << 14
DRAIN_SECONDS = 5.0
"""For a stream to move at all while the server is about to stop, which has a limit of its own."""


class Stalls:
    """Looks after one connection until `stop`."""

    def __init__(self, connection: Http2Connection):
        self._connection = connection
        self._marks: dict[int, tuple[float, int]] = {}
        """By stream, 0 the connection: since when it moves too little, and the bytes that it had moved then."""
        self._timer: asyncio.TimerHandle = connection.loop.call_later(CHECK_SECONDS, self._look)

    def stop(self) -> None:
        """The connection is about to close."""
        self._timer.cancel()

    def _look(self) -> None:
        connection, old, self._marks = self._connection, self._marks, {}
        self._timer = connection.loop.call_later(CHECK_SECONDS, self._look)
        unsent = connection.count_unsent()
        if unsent:  # then streams wait for it, and perhaps we do not even read
            if not self._is_moving(0, -unsent, old):
                connection.abort()
            return
        for stream in list(connection.streams.values()):
            moved = stream.moved()
            if moved is not None and not self._is_moving(stream.id, moved, old):
                stream.on_stall()

    def _is_moving(self, key: int, moved: int, old: dict[int, tuple[float, int]]) -> bool:
        now = self._connection.loop.time()
        since, before = old.get(key, (now, moved))
        seconds, least = (DRAIN_SECONDS, 1) if self._connection.draining else (STALL_SECONDS, STALL_BYTES)
        if moved - before >= least:
            since, before = now, moved
        self._marks[key] = since, before
        return now - since < seconds
