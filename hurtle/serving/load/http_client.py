"""`HttpClient`: a keep-alive connection that sends the same bytes again and again and looks only at the answers' status.

Knows HTTP/1.1, and nothing of when to send.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
import orjson

Answered = Callable[[Any, str | None], None]
"""Of the connection, and the error if there was one."""


class HttpClient(asyncio.Protocol):
    """One connection with one request at a time.

    Args:
        request: All bytes of it.
        answered: Called with each answer.
        lost: Called when the connection is gone.
    """

    transport: asyncio.Transport

    def __init__(self, request: bytes, answered: Answered, lost: Callable[[Any], None]):
        self._request, self._answered, self._lost = request, answered, lost
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
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
        """The last answer's, whole if it came in one piece."""
        return self._body

    def send(self) -> None:
        """Send the request."""
        self.waiting = True
        self._body = b""
        self.transport.write(self._request)

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

    def data_received(self, data: bytes) -> None:
        """A part of an answer."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.failure = f"not HTTP: {error}"
            self.close()
            if self.waiting:
                self._finish(self.failure)

    def on_body(self, body: bytes) -> None:
        """A part of the answer's body."""
        self._body = self._body + body if self._body else body

    def on_message_complete(self) -> None:
        """The answer is whole."""
        status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.closing = True
            self.transport.close()
        if status < 200 or not self.waiting:
            return
        self._finish(None if status == 200 else f"{status} {_reason(self._body)}")

    def _finish(self, error: str | None) -> None:
        self.waiting = False
        self._answered(self, error)


def _reason(body: bytes) -> str:
    """The protocol's error text, or the beginning of what came."""
    try:
        found = orjson.loads(body)
        return str(found["error"])[:300]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
