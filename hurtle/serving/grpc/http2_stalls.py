"""`Stalls`: ends streams and connections whose peer holds memory and makes no progress: half-sent messages, unread answers.

Progress is sampled every few seconds; requests pay nothing for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from hurtle.serving.grpc.http2_stream import Stream
from hurtle.serving.lifecycle import Lifecycle, State

CHECK_SECONDS = 5.0
"""Seconds between two samples."""
STALL_SECONDS = 60.0
"""Seconds in which a stream, or the connection, must move `STALL_BYTES`."""
STALL_BYTES = 1 << 14
DRAIN_SECONDS = 5.0
"""Seconds in which a stream must move at all while the server stops; stopping has a deadline of its own."""


class StallingConnection(Protocol):
    """A connection as `Stalls` sees it."""

    loop: asyncio.AbstractEventLoop
    lifecycle: Lifecycle

    @property
    def streams(self) -> Mapping[int, Stream]:
        """By number."""

    def count_unsent(self) -> int:
        """Bytes that the peer does not read; 0 if it keeps up."""

    def abort(self) -> None:
        """Close now."""


class Stalls:
    """Samples one connection until `stop`."""

    def __init__(self, connection: StallingConnection):
        self._connection = connection
        self._marks: dict[int, tuple[float, int]] = {}
        """By stream (0: the connection): the time of its last progress, and the bytes it had moved by then."""
        self._timer: asyncio.TimerHandle = connection.loop.call_later(CHECK_SECONDS, self._sample)

    def stop(self) -> None:
        """Sample no more."""
        self._timer.cancel()

    def _sample(self) -> None:
        connection, old, self._marks = self._connection, self._marks, {}
        self._timer = connection.loop.call_later(CHECK_SECONDS, self._sample)
        unsent = connection.count_unsent()
        if unsent:  # streams wait for the connection then, which may not even be read
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
        is_draining = self._connection.lifecycle.state >= State.DRAINING
        seconds, least = (DRAIN_SECONDS, 1) if is_draining else (STALL_SECONDS, STALL_BYTES)
        if moved - before >= least:
            since, before = now, moved
        self._marks[key] = since, before
        return now - since < seconds
