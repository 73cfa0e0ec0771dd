"""`LoadConnection`: what the load generator sees of a connection, whatever protocol it speaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

Answered = Callable[[Any, str | None], None]
"""Of the connection, and the error if there was one."""


class LoadConnection(asyncio.Protocol):
    """One connection with one request at a time.

    Args:
        answered: Called with each answer.
        lost: Called when the connection is gone.
    """

    transport: asyncio.Transport

    def __init__(self, answered: Answered, lost: Callable[[Any], None]):
        self._answered, self._lost = answered, lost
        self._gone = False
        self.failure: str | None = None
        """What the server did wrong, also before it was asked."""
        self.waiting = False
        """A request is on its way."""
        self.closing = False
        """The server will close, or has closed, the connection."""
        self.began = 0.0
        """When the request in flight should have been sent; the load generator's."""

    @property
    def body(self) -> bytes:
        """The last answer's."""
        raise NotImplementedError

    def send(self) -> None:
        """Send the request."""
        raise NotImplementedError

    def close(self) -> None:
        """Close now, whatever runs."""
        self.closing = True
        if not self._gone:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready to send."""
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: BaseException | None) -> None:
        """The server is gone, or we closed."""
        self.closing = self._gone = True
        self._lost(self)

    def _finish(self, error: str | None) -> None:
        self.waiting = False
        self._answered(self, error)
