"""`Stream`: one request and its answer on an HTTP/2 connection, as the connection sees it. Knows nothing of frames."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from hurtle.serving.grpc.http2_frames import ErrorCode
from hurtle.serving.grpc.http2_guard import Loan
from hurtle.serving.grpc.http2_limits import STREAM_WINDOW

if TYPE_CHECKING:
    from hurtle.serving.grpc.http2 import Http2Connection


class Stream:
    """One request and its answer. Subclasses say what comes of data; plain attributes are the connection's business."""

    connection: Http2Connection
    id: int
    head: Any
    send_window: int
    receive_window = STREAM_WINDOW
    content_left: int | None = None
    """Bytes of data that are still to come, where `content-length` says it."""
    remote_closed = False
    """The client will send no more."""
    closed = False
    """Nothing more will come or go."""
    queue: deque[memoryview] | None = None
    queued = 0
    tail: bytes | None = None
    in_ready = False
    loan: Loan | None = None

    def __init__(self, connection: Http2Connection, stream_id: int, head: Any):
        self.connection, self.id, self.head = connection, stream_id, head
        self.send_window = connection.output.initial_window

    def on_open(self) -> None:
        """It is one of the connection's now."""

    def on_data(self, data: bytes, start: int, stop: int, ended: bool) -> None:
        """`data[start:stop]` came; `ended`: it was the last."""
        raise NotImplementedError

    def on_cancel(self) -> None:
        """Client or connection are gone: stop whatever runs for the stream."""

    def on_drained(self) -> None:
        """What was queued has been sent."""

    def on_drain(self) -> None:
        """The server is going: a stream without an end should find one."""

    def moved(self) -> int | None:
        """Bytes that have come and gone, where some are kept and it is the client's turn; else None."""
        return None

    def on_stall(self) -> None:
        """The client does not go on."""
        self.connection.reset_stream(self, ErrorCode.ENHANCE_YOUR_CALM)

    def on_sent(self) -> None:
        """The last frame is on its way."""
        self.connection.close_stream(self)
