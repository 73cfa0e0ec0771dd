"""`HttpClient`: a keep-alive connection that repeats one request and reads only the status of the answers.

Knows HTTP/1.1; knows nothing of when to send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httptools
import orjson

from hurtle.serving.load.connection import Answered, LoadConnection


class HttpClient(LoadConnection):
    """One connection with one request at a time.

    Args:
        request: The complete request.
        answered: Called with each answer.
        lost: Called when the connection is gone.
    """

    def __init__(self, request: bytes, answered: Answered, lost: Callable[[Any], None]):
        super().__init__(answered, lost)
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""

    @property
    def body(self) -> bytes:
        """The body of the last answer; complete if it came in one piece."""
        return self._body

    def send(self) -> None:
        """Send the request."""
        self.waiting = True
        self._body = b""
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Read answers."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.failure = f"not HTTP: {error}"
            self.close()
            if self.waiting:
                self._finish(self.failure)

    def on_body(self, body: bytes) -> None:
        """Keep the body."""
        self._body = self._body + body if self._body else body

    def on_message_complete(self) -> None:
        """Report the answer."""
        status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.closing = True
            self.transport.close()
        if status < 200 or not self.waiting:
            return
        self._finish(None if status == 200 else f"{status} {_reason(self._body)}")


def _reason(body: bytes) -> str:
    """The protocol's error message, or the beginning of the body."""
    try:
        found = orjson.loads(body)
        return str(found["error"])[:300]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
