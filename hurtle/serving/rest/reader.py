"""`RequestReader`: a connection's bytes → httptools' parser → `Exchange`s, within the limits of a request.

Knows nothing of sockets, time, or the order of answers.
"""

from __future__ import annotations

import logging
from enum import IntEnum
from typing import Any, Protocol, cast

import httptools

from hurtle.errors import ServingError
from hurtle.serving.rest import routes
from hurtle.serving.rest.exchange import Exchange, ExchangeConnection, HttpError, memory_error

log = logging.getLogger("hurtle.serving")
MAX_URL = 8 << 10
MAX_HEAD = 64 << 10
"""Bytes of a request's head; also of the framing in a chunked body."""
MAX_HEADERS = 128
_SINGLE = frozenset((b"host", b"authorization", b"content-encoding", b"inference-header-content-length", b"expect"))
"""Headers that must not be repeated."""


class Phase(IntEnum):
    """The part of a request that comes next: IDLE → HEAD → BODY → IDLE."""

    IDLE = 0
    HEAD = 1
    BODY = 2


IDLE, HEAD, BODY = Phase


class ReadConnection(ExchangeConnection, Protocol):
    """A connection as its reader sees it."""

    @property
    def is_ending(self) -> bool:
        """Whether nothing more is read."""

    def began(self) -> None:
        """A request began to arrive."""

    def admitted(self, exchange: Exchange) -> None:
        """A request's head has arrived; its body may follow."""

    def completed(self, exchange: Exchange) -> None:
        """A request has arrived."""


class RequestReader:
    """Reads one connection's requests.

    Args:
        connection: Notified when a request begins (`began`), has its head (`admitted`) and is complete (`completed`).
        max_body: Bytes that a body may have.

    Attributes:
        phase: The part of a request that comes next.
        exchange: The request that is being read, once its head has arrived.
        received: Bytes of its body so far.
        body_left: Bytes of its body still to come, if it has a content-length.
    """

    def __init__(self, connection: ReadConnection, max_body: int):
        self._connection, self._max_body = connection, max_body
        self._parser: Any = httptools.HttpRequestParser(self)
        self.phase = IDLE
        self.exchange: Exchange = cast("Exchange", None)
        self.received = self.body_left = 0
        self._refusal: HttpError | ServingError | None = None
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_count = self._wire = self._chunks = 0

    @property
    def url(self) -> bytes:
        """The URL of the head that is being read, as far as it has arrived."""
        return self._url if self.phase == HEAD else b""

    def close(self) -> None:
        """Drop every reference: a large body must not wait for the garbage collector."""
        self._parser = self._connection = self.exchange = self._refusal = cast("Any", None)

    def feed(self, data: bytes | memoryview) -> HttpError | ServingError | None:
        """Parse bytes; returns the error if the connection cannot be read any further."""
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if self.phase == HEAD:
                    data = self._head_without_upgrade() + bytes(data)
                self._parser = httptools.HttpRequestParser(self)
                if len(data) and not self._connection.is_ending:
                    continue
            except httptools.HttpParserCallbackError as error:
                if self._refusal is None:
                    log.error("serving HTTP failed", exc_info=error.__context__)
                    self._refusal = HttpError(500, "The server failed; see its log.")
                return self._refusal.with_traceback(None)
            except httptools.HttpParserError as error:
                return HttpError(400, f"Not HTTP/1.1: {str(error)[:100]}.")
            break
        if self.phase != IDLE:
            self._wire += len(data)
            if self._wire > MAX_HEAD and (self.phase == HEAD or self._is_mostly_framing()):
                return HttpError(431, f"Expected at most {MAX_HEAD:,} bytes of headers.")
        return None

    def _is_mostly_framing(self) -> bool:
        return self._wire > self.received + 16 * self._chunks + 2 * MAX_HEAD

    def _head_without_upgrade(self) -> bytes:
        """The head again, for a new parser: we speak no other protocol, and this parser would not read the body."""
        hidden = (b"upgrade", b"connection", b"http2-settings")
        lines = [b"%b: %b\r\n" % item for item in self._headers.items() if item[0] not in hidden]
        if b"close" in self._headers.get(b"connection", b"").lower():
            lines.append(b"Connection: close\r\n")
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (self._parser.get_method(), self._url, b"".join(lines))

    def _stop(self, error: HttpError | ServingError) -> HttpError | ServingError:
        """Remember an error to raise from a callback, as the parser hides what was raised."""
        self._refusal = error
        return error

    # The parser's calls.

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._connection.is_ending:  # because of an earlier request in the same bytes
            raise self._stop(HttpError(503, "The server is shutting down."))
        self.phase = HEAD
        self._connection.began()
        self._url, self._headers = b"", {}
        self._header_count = self.body_left = self.received = self._wire = self._chunks = 0

    def on_url(self, url: bytes) -> None:
        """Take the path, or more of it."""
        self._url = self._url + url if self._url else url
        if len(self._url) > MAX_URL:
            raise self._stop(HttpError(414, f"Expected a path of at most {MAX_URL:,} bytes."))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers are ignored."""
        self._header_count += 1
        if self._header_count > MAX_HEADERS:
            raise self._stop(HttpError(431, f"Expected at most {MAX_HEADERS} headers."))
        if self.phase != HEAD:
            return
        name = name.lower()
        if name in self._headers:
            if name in _SINGLE:
                raise self._stop(HttpError(400, f"Expected the header {name.decode('latin-1')} once, got it twice."))
            value = self._headers[name] + b", " + value
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        """Admit or refuse the request before its body arrives."""
        headers, parser = self._headers, self._parser
        if b"upgrade" in headers and parser.should_upgrade():
            return
        self.phase, self._wire = BODY, 0
        version, method = parser.get_http_version(), parser.get_method()
        old = version != "1.1"
        close = method == b"CONNECT" or not parser.should_keep_alive()
        exchange = self.exchange = Exchange(self._connection, method, self._url, headers, close, old)
        length = headers.get(b"content-length")
        if length is not None:
            self.body_left = int(length)
        self._check_head(headers, version)
        try:
            route = exchange.route = routes.find_route(method, self._url)
            routes.admit(self._connection.service, route, exchange)
        except (HttpError, ServingError) as error:
            exchange.refusal = error.with_traceback(None)  # the traceback would hold this frame, and so the exchange
        if b"expect" in headers and not old:
            if headers[b"expect"].lower() != b"100-continue":
                raise self._stop(HttpError(417, "Expect: only 100-continue is supported."))
            if exchange.refusal is not None:
                raise self._stop(exchange.refusal)
            exchange.wants_continue = True
        self._connection.admitted(exchange)

    def _check_head(self, headers: dict[bytes, bytes], version: str) -> None:
        if self.body_left > self._max_body:
            raise self._stop(HttpError(413, f"The body: expected at most {self._max_body:,} bytes, got {self.body_left:,}."))
        if b"transfer-encoding" in headers and (version != "1.1" or headers[b"transfer-encoding"].lower() != b"chunked"):
            raise self._stop(HttpError(501, "Transfer-Encoding: expected chunked, in HTTP/1.1."))
        if version == "1.1":
            if b"host" not in headers:
                raise self._stop(HttpError(400, "Expected the header host."))
        elif version != "1.0":
            raise self._stop(HttpError(400, f"Expected HTTP/1.1 or 1.0, got {version}."))

    def on_chunk_header(self) -> None:
        """Count the chunks of a chunked body."""
        self._chunks += 1

    def on_body(self, data: bytes) -> None:
        """Take part of the body."""
        exchange = self.exchange
        self.received += len(data)
        self.body_left -= len(data)
        if self.received > self._max_body:
            raise self._stop(HttpError(413, f"The body: expected at most {self._max_body:,} bytes, got more."))
        if exchange.refusal is not None:
            return
        if not exchange.body:
            exchange.body = data
            if not self.body_left:  # it came in one piece, as most do
                return
        else:
            if isinstance(exchange.body, bytes):
                exchange.body = bytearray(exchange.body)
            exchange.body += data
        if not exchange.charge(len(data)):
            raise self._stop(memory_error())

    def on_message_complete(self) -> None:
        """Hand over the request."""
        if self.phase == HEAD:  # an upgrade request: parsed again, see `_head_without_upgrade`
            return
        self.phase = IDLE
        exchange, self.exchange = self.exchange, cast("Exchange", None)
        exchange.is_complete = True
        self._connection.completed(exchange)
