"""`GrpcConnection`: a client's gRPC connection to a `Shell`, as an asyncio protocol.

HTTP/2 (`http2`) → head → the method's kind of call (`services`, `calls`). Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hurtle.errors import ServingError
from hurtle.serving.grpc.call import Call
from hurtle.serving.grpc.head import CallHead, Heads
from hurtle.serving.grpc.http2 import Http2Connection
from hurtle.serving.grpc.http2_frames import ErrorCode, goaway, settings
from hurtle.serving.grpc.http2_headers import Fields
from hurtle.serving.grpc.services import METHODS

MIN_BUDGET = 1 << 26
"""Bytes that a connection's unfinished messages may hold together, and its unsent answers, before new calls wait or fail."""

REFUSED_SECONDS = 5.0
"""That a connection which is one too many may wait with its first call."""
GOODBYE = settings([]) + goaway(0, ErrorCode.NO_ERROR, "too many connections")
"""What a client hears that cannot even be refused call by call."""


class GrpcConnection(Http2Connection):
    """Give it to an event loop: `loop.create_server(lambda: GrpcConnection(shell), host, port)`; with TLS, offer ALPN "h2".

    Args:
        shell: What answers.

    Attributes:
        refusal: What calls get, except health checks, where the connection is one too many; it closes after the first.
        on_made: Called when it is among the shell's connections.
    """

    refusal: ServingError | None = None
    on_made: Callable[[Any], None] | None = None

    def __init__(self, shell: Any):
        self.max_message: int = shell.config.max_message_bytes
        self._heads = Heads(METHODS)
        super().__init__(max(MIN_BUDGET, 2 * self.max_message), shell.memory)
        self.shell = shell

    def connection_made(self, transport: Any) -> None:
        """A client is there."""
        super().connection_made(transport)
        self.shell.connections.add(self)
        if self.on_made is not None:
            self.on_made(self)
        if self.shell.draining:
            self.drain()
        elif self.refusal is not None:
            self.loop.call_later(REFUSED_SECONDS, self.drain)

    def drain(self) -> None:
        """Let the client know that it should go; one that is refused and idle goes at once when the server stops."""
        if self.shell.draining and self.refusal is not None and self.is_idle():
            self.hang_up()
        else:
            super().drain()

    def is_idle(self) -> bool:
        """Whether no call runs."""
        return not self.streams

    def hang_up(self) -> None:
        """Close an idle connection without waiting for what may be on its way."""
        super().fail(ErrorCode.NO_ERROR, "too many connections")
        self.transport.close()

    def fail(self, code: ErrorCode, message: str) -> None:
        """Say why, to the log too, and close."""
        if not self._closed:
            is_calmed = code is ErrorCode.ENHANCE_YOUR_CALM
            kind = "gRPC connections told to calm down" if is_calmed else "gRPC connections closed for breaking HTTP/2's rules"
            self.shell.notices.count(kind, f"{message}, from {self.peer}")
        super().fail(code, message)

    def on_closed(self) -> None:
        """It is gone."""
        self.shell.connections.discard(self)

    def make_head(self, fields: Fields) -> CallHead:
        """What a call's headers say."""
        return self._heads.read(fields)

    def make_stream(self, stream_id: int, head: CallHead) -> Call | None:
        """The method's kind of call."""
        if head.malformed:
            return None
        call = (Call if head.method is None else head.method.call)(self, stream_id, head)
        call.content_left = head.content_length
        return call

    def is_trailers(self, head: CallHead) -> bool:
        """Whether headers may stand at a call's end."""
        return head.is_trailers
