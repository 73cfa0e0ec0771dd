"""`LoadConnection`: a connection as the load generator sees it, whatever the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

Answered = Callable[[Any, str | None], None]
"""Called with the connection, and the error if there was one."""


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
        """The server's error, even one before the first request."""
        self.waiting = False
        """Whether a request is in flight."""
        self.closing = False
        """Whether the server closes, or has closed, the connection."""
        self.began = 0.0
        """When the request in flight was due; set by the load generator."""

    @property
    def body(self) -> bytes:
        """The body of the last answer."""
        raise NotImplementedError

    def send(self) -> None:
        """Send the request."""
        raise NotImplementedError

    def close(self) -> None:
        """Close now."""
        self.closing = True
        if not self._gone:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is ready."""
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: BaseException | None) -> None:
        """The connection is closed, by either side."""
        self.closing = self._gone = True
        self._lost(self)

    def _finish(self, error: str | None) -> None:
        self.waiting = False
        self._answered(self, error)
