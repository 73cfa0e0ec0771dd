"""`Exchange`: one HTTP request and its answer, its head, errors and compression. Knows no sockets and no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from hurtle.errors import ServingError
from hurtle.serving.compression import COMPRESSED_ASIDE, MIN_COMPRESSED, accepted_coding, deflate
from hurtle.serving.memory import FULL
from hurtle.serving.status import CODES
from hurtle.serving.unpacking import Unpacker

if TYPE_CHECKING:
    from hurtle.serving.rest.connection import HttpConnection
    from hurtle.serving.rest.routes import Route

_REASONS = {
    200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found", 405: b"Method Not Allowed",
    408: b"Request Timeout", 413: b"Content Too Large", 414: b"URI Too Long", 415: b"Unsupported Media Type",
    417: b"Expectation Failed", 429: b"Too Many Requests", 431: b"Request Header Fields Too Large",
    499: b"Client Closed Request", 500: b"Internal Server Error", 501: b"Not Implemented", 503: b"Service Unavailable",
    504: b"Gateway Timeout",
}  # fmt: skip
JOINED = 64 << 10
"""Answers longer than this are written in parts, and not copied once more."""
_REASON_OF = {
    404: "not_found", 405: "unimplemented", 408: "deadline_exceeded", 413: "resource_exhausted", 429: "resource_exhausted",
    500: "internal", 501: "unimplemented", 503: "unavailable",
}  # fmt: skip
"""What an `HttpError` is counted as, unless it says; others are invalid_argument."""
RETRY = b"Retry-After: 1\r\n"
_SMALL = 1 << 10
"""Answers of at most so many bytes are not counted while they wait: to refuse them would save nothing."""
_FREE = 64 << 10
"""Bytes of a body that all but inference may always send."""
_STARTS = {code: b"HTTP/1.1 %d %b\r\n" % (code, text) for code, text in _REASONS.items()}


class HttpError(Exception):
    """What is wrong with a request as HTTP; `ServingError` is for what is wrong with it in itself.

    Args:
        status: Of the answer.
        message: What was expected and what came.
        extra: More header lines of the answer, each with its end.
        reason: What it is counted as; by default what the status means.
    """

    def __init__(self, status: int, message: str, extra: bytes = b"", reason: str = ""):
        super().__init__(message)
        self.status, self.extra = status, extra
        self.reason = reason or _REASON_OF.get(status, "invalid_argument")
        self.is_counted = False


def status_of(error: ServingError | HttpError) -> int:
    """HTTP's code for an error."""
    return CODES[error.reason].http if isinstance(error, ServingError) else error.status


def memory_error() -> HttpError:
    """All connections together hold too much."""
    return HttpError(503, FULL, RETRY, "resource_exhausted")


class Cancellable(Protocol):
    """What `Shell.infer` gives back."""

    def cancel(self) -> None:
        """Nobody waits any more."""


class Exchange:
    """A request, and the way for its answer.

    Attributes:
        method: Such as b"POST".
        url: As it was asked.
        route: What the path means; None where it was refused before.
        headers: By name in lower case.
        body: Whole, and not compressed, when `routes.begin` gets it.
        wanted: For `rest` to keep what the answer's encoding needs.
        ticket: Of the inference that runs; it keeps what goes in and what comes out.
        unpacker: Of a compressed body, while it is unpacked in a thread.
        answer: When it is there, until it is written.
    """

    __slots__ = (
        "answer", "body", "charged", "close", "connection", "headers", "id", "is_complete", "method", "old", "refusal", "route",
        "started", "ticket", "unpacker", "url", "wanted", "wants_continue",
    )  # fmt: skip

    def __init__(
        self, connection: HttpConnection, method: bytes, url: bytes, headers: dict[bytes, bytes], close: bool, old: bool
    ):
        self.connection, self.method, self.url, self.headers = connection, method, url, headers
        self.close, self.old = close, old
        self.route: Route | None = None
        self.body: bytes | bytearray = b""
        self.refusal: HttpError | ServingError | None = None
        """Why it will not be served, found while the body was still to come."""
        self.ticket: Cancellable | None = None
        self.unpacker: Unpacker | None = None
        self.answer: bytes | tuple[bytes, ...] | None = None
        self.wanted: Any = False
        self.id = ""
        self.charged = 0
        """Bytes of its body, and of an answer that waits, which count against what all connections may hold."""
        self.is_complete = self.wants_continue = False
        self.started = 0.0 if connection.shell.access_log is None else perf_counter()

    def respond(
        self,
        status: int,
        parts: Sequence[bytes],
        content_type: bytes = b"application/json",
        extra: bytes = b"",
        compress: bool = True,
    ) -> None:
        """Answer; `extra`: more header lines, each with its end."""
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
            of_model = self.route if error is not self.refusal else None  # who may not ask is not the model's business
            model, version = (of_model.model, of_model.version) if of_model is not None else ("", "")
            self.connection.shell.count_failure(error.reason, model, version)
        status = status_of(error)
        extra = b"X-Content-Type-Options: nosniff\r\n"
        if isinstance(error, HttpError):
            extra += error.extra
        elif status == 401:
            extra += b"WWW-Authenticate: Bearer\r\n"
        self._send(status, parts := [orjson.dumps({"error": str(error)})], len(parts[0]), b"application/json", extra)

    def charge(self, size: int) -> bool:
        """Count bytes of its body as held; whether those of all connections together are few enough for it."""
        self.charged += size
        return self.connection.shell.memory.hold(size) or (not self.is_inference() and self.charged <= _FREE)

    def is_inference(self) -> bool:
        """Which is refused when the server holds too much; what looks after the server is not."""
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
        if connection.shell.access_log is not None:
            connection.write_log(self, status, size)
        connection.flush()
        if connection.pending:  # where it has to wait, then without all that it was made of
            self.ticket, self.body = None, b""

    def _may_keep(self, size: int) -> bool:
        """Whether all connections hold little enough for this answer too; one that waits for others before it is counted."""
        connection, memory = self.connection, self.connection.shell.memory
        waits = bool(connection.pending) and connection.pending[0] is not self
        if not waits and not connection.is_congested:
            return memory.used - self.charged <= memory.limit or not self.is_inference()
        if memory.used + size > memory.limit:
            return False
        if waits:
            self.charge(size)
        return True


def with_close(answer: bytes | tuple[bytes, ...]) -> bytes | tuple[bytes, ...]:
    """An answer that was made to keep the connection, as the last one."""
    head = answer if isinstance(answer, bytes) else answer[0]
    start, _, rest = head.partition(b"\r\n\r\n")
    start = start.removesuffix(b"\r\nConnection: keep-alive")
    head = b"%b\r\nConnection: close\r\n\r\n%b" % (start, rest)
    return head if isinstance(answer, bytes) else (head, *answer[1:])
