"""`GrpcConnection`: a client's gRPC connection to an `InferenceService`, as an asyncio protocol.

HTTP/2 (`http2`) → head → the method's kind of call (`methods`, `calls`). Knows nothing of models.
"""

from __future__ import annotations

from typing import Any

from hurtle.serving.grpc.call import Call
from hurtle.serving.grpc.head import CallHead, Heads
from hurtle.serving.grpc.http2 import Http2Connection
from hurtle.serving.grpc.http2_frames import ErrorCode, goaway, settings
from hurtle.serving.grpc.http2_headers import Fields
from hurtle.serving.grpc.methods import METHODS
from hurtle.serving.lifecycle import State

MIN_BUDGET = 1 << 26
"""Bytes that a connection's unfinished messages, or its unsent answers, may hold before new calls wait or fail."""
REFUSED_SECONDS = 5.0
"""Seconds that a connection over the limit may wait with its first call."""
GOODBYE = settings([]) + goaway(0, ErrorCode.NO_ERROR, "too many connections")
"""Sent to clients that cannot even be refused call by call."""


class GrpcConnection(Http2Connection):
    """Give it to an event loop: `loop.create_server(lambda: GrpcConnection(service), host, port)`; with TLS, offer ALPN "h2".

    A connection with a `refusal` answers its first call with that error, health checks excepted, then closes.

    Args:
        service: What answers.
    """

    def __init__(self, service: Any):
        self.max_message: int = service.config.max_message_bytes
        self._heads = Heads(METHODS)
        super().__init__(service, max(MIN_BUDGET, 2 * self.max_message))

    def connection_made(self, transport: Any) -> None:
        """Wait for the client's preface; not for long if the connection is refused."""
        super().connection_made(transport)
        if self.refusal is not None and not self.service.draining:
            self.loop.call_later(REFUSED_SECONDS, self.drain)

    def hang_up(self) -> None:
        """Close an idle connection without waiting for calls that may be on their way."""
        if self.lifecycle.state is not State.CLOSED:
            self.output.write(goaway(self.last_id, ErrorCode.NO_ERROR, "too many connections"))
            self.output.flush()
            self.finish()
        self.close()

    def fail(self, code: ErrorCode, message: str) -> None:
        """Log the reason, send it to the client, and close."""
        if self.lifecycle.state is not State.CLOSED:
            is_calmed = code is ErrorCode.ENHANCE_YOUR_CALM
            kind = "gRPC connections told to calm down" if is_calmed else "gRPC connections closed for breaking HTTP/2's rules"
            self.service.notices.count(kind, f"{message}, from {self.peer}")
        super().fail(code, message)

    def make_head(self, fields: Fields) -> CallHead:
        """Parse a call's headers."""
        return self._heads.read(fields)

    def make_stream(self, stream_id: int, head: CallHead) -> Call | None:
        """Make the method's kind of call; None if the headers are malformed."""
        if head.malformed:
            return None
        call = (Call if head.method is None else head.method.call)(self, stream_id, head)
        call.content_left = head.content_length
        return call

    def is_trailers(self, head: CallHead) -> bool:
        """Whether these headers may end a call."""
        return head.is_trailers
