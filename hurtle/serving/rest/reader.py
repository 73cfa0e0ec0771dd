"""`RequestReader`: bytes of a connection → httptools' parser → `Exchange`s, with all limits on what a request may be.

Knows nothing of sockets, of the order of answers, and of time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import httptools

from hurtle.errors import ServingError
from hurtle.serving.rest import routes
from hurtle.serving.rest.exchange import Exchange, HttpError, memory_error

if TYPE_CHECKING:
    from hurtle.serving.rest.connection import HttpConnection

log = logging.getLogger("hurtle.serving")
MAX_URL = 8 << 10
MAX_HEAD = 64 << 10
"""Bytes of a request's head; also of what stands between the chunks of a chunked body."""
MAX_HEADERS = 128
IDLE, HEAD, BODY = range(3)
_SINGLE = frozenset((b"host", b"authorization", b"content-encoding", b"inference-header-content-length", b"expect"))
"""Headers that say two things when they come twice."""


class RequestReader:
    """Reads one connection's requests.

    Args:
        connection: Told when a request begins (`began`), has its head (`admitted`) and is whole (`completed`).
        max_body: Bytes.

    Attributes:
        phase: What it is in the middle of.
        exchange: The request that is read, when its head is there.
        received: Bytes of its body that came.
        body_left: Bytes of it that are still to come, where it said how many.
    """

    def __init__(self, connection: HttpConnection, max_body: int):
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
        """Of the head that is read, as far as it came."""
        return self._url if self.phase == HEAD else b""

    def close(self) -> None:
        """Let go of everything: what holds a large body must not wait for the garbage collector."""
        self._parser = self._connection = self.exchange = self._refusal = cast("Any", None)

    def feed(self, data: bytes | memoryview) -> HttpError | ServingError | None:
        """Read on. What is given back is why the connection cannot be read any further."""
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
                    self._refusal = HttpError(500, "The server failed; its log says why.")
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
        """The head once more for another parser: we speak no other protocol, and this one would not read the body."""
        hidden = (b"upgrade", b"connection", b"http2-settings")
        lines = [b"%b: %b\r\n" % item for item in self._headers.items() if item[0] not in hidden]
        if b"close" in self._headers.get(b"connection", b"").lower():
            lines.append(b"Connection: close\r\n")
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (self._parser.get_method(), self._url, b"".join(lines))

    def _stop(self, error: HttpError | ServingError) -> HttpError | ServingError:
        """To raise from the parser's calls, which would not say what it was."""
        self._refusal = error
        return error

    # The parser's calls.

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self._connection.is_ending:  # by a request before it in the same bytes
            raise self._stop(HttpError(503, "The server is about to stop."))
        self.phase = HEAD
        self._connection.began()
        self._url, self._headers = b"", {}
        self._header_count = self.body_left = self.received = self._wire = self._chunks = 0

    def on_url(self, url: bytes) -> None:
        """The path, or more of it."""
        self._url = self._url + url if self._url else url
        if len(self._url) > MAX_URL:
            raise self._stop(HttpError(414, f"Expected a path of at most {MAX_URL:,} bytes."))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which says nothing to us."""
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
        """The head is there: decide on it before the body comes."""
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
            routes.admit(self._connection.shell, route, exchange)
        except (HttpError, ServingError) as error:
            exchange.refusal = error.with_traceback(None)  # which would hold this frame, and that the exchange
        if b"expect" in headers and not old:
            if headers[b"expect"].lower() != b"100-continue":
                raise self._stop(HttpError(417, "Expect: only 100-continue is known."))
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
        """Of a chunked body."""
        self._chunks += 1

    def on_body(self, data: bytes) -> None:
        """Some of the body."""
        exchange = self.exchange
        self.received += len(data)
        self.body_left -= len(data)
        if self.received > self._max_body:
            raise self._stop(HttpError(413, f"The body: expected at most {self._max_body:,} bytes, got more."))
        if exchange.refusal is not None:
            return
        if not exchange.body:
            exchange.body = data
            if not self.body_left:  # as most do it came in one piece
                return
        else:
            if isinstance(exchange.body, bytes):
                exchange.body = bytearray(exchange.body)
            exchange.body += data
        if not exchange.charge(len(data)):
            raise self._stop(memory_error())

    def on_message_complete(self) -> None:
        """A request is whole."""
        if self.phase == HEAD:  # a wish to upgrade: it comes again, see `_head_without_upgrade`
            return
        self.phase = IDLE
        exchange, self.exchange = self.exchange, cast("Exchange", None)
        exchange.is_complete = True
        self._connection.completed(exchange)
