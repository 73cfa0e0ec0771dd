"""`Exchange`: one HTTP request and its answer: status line, headers, errors, compression. Knows no sockets and no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import orjson

from hurtle.errors import ServingError
from hurtle.serving.compression import COMPRESSED_ASIDE, MIN_COMPRESSED, accepted_coding, deflate
from hurtle.serving.memory import FULL
from hurtle.serving.rest.watch import Watch
from hurtle.serving.status import CODES
from hurtle.serving.unpacking import Unpacker

_REASONS = {
    200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found", 405: b"Method Not Allowed",
    408: b"Request Timeout", 413: b"Content Too Large", 414: b"URI Too Long", 415: b"Unsupported Media Type",
    417: b"Expectation Failed", 429: b"Too Many Requests", 431: b"Request Header Fields Too Large",
    499: b"Client Closed Request", 500: b"Internal Server Error", 501: b"Not Implemented", 503: b"Service Unavailable",
    504: b"Gateway Timeout",
}  # fmt: skip
JOINED = 64 << 10
"""Bytes above which an answer is written in parts instead of being copied once more."""
_REASON_OF = {
    404: "not_found", 405: "unimplemented", 408: "deadline_exceeded", 413: "resource_exhausted", 429: "resource_exhausted",
    500: "internal", 501: "unimplemented", 503: "unavailable",
}  # fmt: skip
"""The reason that an `HttpError` is counted as by default; other statuses count as invalid_argument."""
RETRY = b"Retry-After: 1\r\n"
_SMALL = 1 << 10
"""Bytes up to which a waiting answer is not counted: refusing it would save nothing."""
_FREE = 64 << 10
"""Bytes that the body of a management request may always have."""
_STARTS = {code: b"HTTP/1.1 %d %b\r\n" % (code, text) for code, text in _REASONS.items()}


class HttpError(Exception):
    """An error of a request as HTTP; `ServingError` is for errors of its content.

    Args:
        status: HTTP status of the answer.
        message: What was expected and what came.
        extra: Further header lines of the answer, each with its line end.
        reason: The reason that it is counted as; by default derived from the status.
    """

    def __init__(self, status: int, message: str, extra: bytes = b"", reason: str = ""):
        super().__init__(message)
        self.status, self.extra = status, extra
        self.reason = reason or _REASON_OF.get(status, "invalid_argument")
        self.is_counted = False


def status_of(error: ServingError | HttpError) -> int:
    """The HTTP status of an error."""
    return CODES[error.reason].http if isinstance(error, ServingError) else error.status


def memory_error() -> HttpError:
    """The error of a request that came when all connections together hold too much."""
    return HttpError(503, FULL, RETRY, "resource_exhausted")


class Cancellable(Protocol):
    """A running inference, as `InferenceService.infer` returns it."""

    def cancel(self) -> None:
        """Give up: nobody waits for the answer."""


class Route(NamedTuple):
    """What a path means."""

    name: str
    """Its name in the access log."""
    methods: frozenset[bytes]
    handle: Callable[[Any, Exchange, Route], Any] | None
    """A coroutine function; None: inference."""
    model: str = ""
    version: str = ""
    is_free: bool = False
    """Whether it needs no token."""


class ExchangeConnection(Protocol):
    """A connection as its exchanges see it."""

    service: Any
    watch: Watch
    pending: deque[Exchange]
    is_congested: bool

    def flush(self) -> None:
        """Write the answers whose turn it is."""

    def spawn(self, exchange: Exchange, work: Any) -> None:
        """Run a coroutine that answers an exchange."""

    def write_log(self, exchange: Exchange, status: int, size: int) -> None:
        """Write a line of the access log."""


class Exchange:
    """A request and its answer.

    Attributes:
        method: The HTTP method, such as b"POST".
        url: The path and query as sent.
        route: What the path means; None if the request was refused before that was known.
        headers: By name in lower case.
        body: Complete and decompressed by the time `routes.begin` gets it.
        wanted: What encoding the answer needs to know; belongs to `codec`.
        ticket: The running inference, if any.
        unpacker: Decompresses the body in a thread, if needed.
        answer: The bytes of the answer, until they are written.
    """

    __slots__ = (
        "answer", "body", "charged", "close", "connection", "headers", "id", "is_complete", "method", "old", "refusal", "route",
        "started", "ticket", "unpacker", "url", "wanted", "wants_continue",
    )  # fmt: skip

    def __init__(
        self, connection: ExchangeConnection, method: bytes, url: bytes, headers: dict[bytes, bytes], close: bool, old: bool
    ):
        self.connection, self.method, self.url, self.headers = connection, method, url, headers
        self.close, self.old = close, old
        self.route: Route | None = None
        self.body: bytes | bytearray = b""
        self.refusal: HttpError | ServingError | None = None
        """The reason not to serve it, found before the body arrived."""
        self.ticket: Cancellable | None = None
        self.unpacker: Unpacker | None = None
        self.answer: bytes | tuple[bytes, ...] | None = None
        self.wanted: Any = False
        self.id = ""
        self.charged = 0
        """Bytes of its body and its waiting answer that count against the limit of all connections."""
        self.is_complete = self.wants_continue = False
        self.started = 0.0 if connection.service.access_log is None else perf_counter()

    def respond(
        self,
        status: int,
        parts: Sequence[bytes],
        content_type: bytes = b"application/json",
        extra: bytes = b"",
        compress: bool = True,
    ) -> None:
        """Answer; `extra` has further header lines, each with its line end."""
        size = sum(map(len, parts)) if len(parts) > 1 else len(parts[0])
        if size > MIN_COMPRESSED and compress and (coding := accepted_coding(self.headers.get(b"accept-encoding"))):
            extra += b"Content-Encoding: %b\r\nVary: Accept-Encoding\r\n" % coding
            if size > COMPRESSED_ASIDE:
                self.connection.spawn(self, self._compress_aside(status, parts, content_type, extra, coding))
                return
            parts = [deflate(parts, coding)]
            size = len(parts[0])
        self._send(status, parts, size, content_type, extra)

    def fail(self, error: ServingError | HttpError) -> None:
        """Answer with an error."""
        if not error.is_counted and self.answer is None:
            of_model = (
                self.route if error is not self.refusal else None
            )  # a request that was not admitted is none of the model's
            model, version = (of_model.model, of_model.version) if of_model is not None else ("", "")
            self.connection.service.count_failure(error.reason, model, version)
        status = status_of(error)
        extra = b"X-Content-Type-Options: nosniff\r\n"
        if isinstance(error, HttpError):
            extra += error.extra
        elif status == 401:
            extra += b"WWW-Authenticate: Bearer\r\n"
        self._send(status, parts := [orjson.dumps({"error": str(error)})], len(parts[0]), b"application/json", extra)

    def charge(self, size: int) -> bool:
        """Count bytes of the body as held; returns whether the limit of all connections allows them."""
        self.charged += size
        return self.connection.service.memory.hold(size) or (not self.is_inference() and self.charged <= _FREE)

    def is_inference(self) -> bool:
        """Whether it is inference, which is refused when memory is full; management is not."""
        return self.route is None or self.route.handle is None

    def is_waited_for(self) -> bool:
        """Whether the client is still there."""
        return self in self.connection.pending

    async def _compress_aside(
        self, status: int, parts: Sequence[bytes], content_type: bytes, extra: bytes, coding: bytes
    ) -> None:
        packed = await self.connection.watch.aside(deflate, parts, coding)
        self._send(status, [packed], len(packed), content_type, extra)

    def _send(self, status: int, parts: Sequence[bytes], size: int, content_type: bytes, extra: bytes) -> None:
        connection = self.connection
        if size > _SMALL and self.answer is None and not self._may_keep(size) and status == 200:
            self.fail(memory_error())
            return
        if self.close:
            extra += b"Connection: close\r\n"
        elif self.old:
            extra += b"Connection: keep-alive\r\n"
        start = _STARTS.get(status) or b"HTTP/1.1 %d Error\r\n" % status
        head = b"%bDate: %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (
            start, connection.watch.date, content_type, size, extra
        )  # fmt: skip
        if self.method == b"HEAD":
            self.answer = head
        else:
            self.answer = b"".join((head, *parts)) if size <= JOINED else (head, *parts)
        if connection.service.access_log is not None:
            connection.write_log(self, status, size)
        connection.flush()
        if connection.pending:  # if it has to wait, release what it was made from
            self.ticket, self.body = None, b""

    def _may_keep(self, size: int) -> bool:
        """Whether memory allows this answer; one that waits behind others is counted."""
        connection, memory = self.connection, self.connection.service.memory
        waits = bool(connection.pending) and connection.pending[0] is not self
        if not waits and not connection.is_congested:
            return memory.used - self.charged <= memory.limit or not self.is_inference()
        if memory.used + size > memory.limit:
            return False
        if waits:
            self.charge(size)
        return True


def with_close(answer: bytes | tuple[bytes, ...]) -> bytes | tuple[bytes, ...]:
    """The answer with `Connection: close`."""
    head = answer if isinstance(answer, bytes) else answer[0]
    start, _, rest = head.partition(b"\r\n\r\n")
    start = start.removesuffix(b"\r\nConnection: keep-alive")
    head = b"%b\r\nConnection: close\r\n\r\n%b" % (start, rest)
    return head if isinstance(answer, bytes) else (head, *answer[1:])
