"""`Stream`: one request and its answer on an HTTP/2 connection, with RFC 9113's stream states. Knows nothing of frames.

OPEN ──▶ HALF_CLOSED_REMOTE (the request is whole) ──▶ FLUSHING (the answer's end is queued) ──▶ CLOSED
    └──▶ HALF_CLOSED_LOCAL (answered before the request was whole) ──┘
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Protocol

from hurtle.serving.grpc.http2_frames import ErrorCode
from hurtle.serving.grpc.http2_limits import STREAM_WINDOW
from hurtle.serving.memory import Memory


class StreamState(IntEnum):
    """Who may still send. The order matters: from `HALF_CLOSED_LOCAL` on, the answer has ended."""

    OPEN = 0
    """Both sides may send."""
    HALF_CLOSED_REMOTE = 1
    """The client has sent everything."""
    HALF_CLOSED_LOCAL = 2
    """The answer has ended, though the client may still send."""
    FLUSHING = 3
    """Both have ended; the end of the answer may still be queued."""
    CLOSED = 4
    """The last frame is sent, or either side has reset the stream."""


class StreamEvent(IntEnum):
    """What changes a stream's state."""

    REMOTE_END = 0
    """END_STREAM came."""
    LOCAL_END = 1
    """The answer has its status; nothing is added to it any more."""
    CLOSE = 2
    """The last frame was sent, or the stream was reset."""


OPEN, HALF_CLOSED_REMOTE, HALF_CLOSED_LOCAL, FLUSHING, CLOSED = StreamState
REMOTE_END, LOCAL_END, CLOSE = StreamEvent
TRANSITIONS: Mapping[StreamState, Mapping[StreamEvent, StreamState]] = {
    OPEN: {REMOTE_END: HALF_CLOSED_REMOTE, LOCAL_END: HALF_CLOSED_LOCAL, CLOSE: CLOSED},
    HALF_CLOSED_REMOTE: {LOCAL_END: FLUSHING, CLOSE: CLOSED},
    HALF_CLOSED_LOCAL: {REMOTE_END: FLUSHING, CLOSE: CLOSED},
    FLUSHING: {CLOSE: CLOSED},
    CLOSED: {},
}
"""By state and event, the next state; every other pair is a bug."""
AFTER_REMOTE_END, AFTER_LOCAL_END, AFTER_CLOSE = (
    {state: events[event] for state, events in TRANSITIONS.items() if event in events} for event in StreamEvent
)
"""The same table by event, for the paths that every call takes."""


class StreamConnection(Protocol):
    """A connection as its streams see it."""

    output: Any
    guard: Any
    memory: Memory
    loop: asyncio.AbstractEventLoop
    peer: str

    def close_stream(self, stream: Stream) -> None:
        """Remove a stream whose answer is sent."""

    def reset_stream(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream whose client broke the rules."""


class Loan:
    """Bytes that a stream was allowed to send beyond its first window, or waits to be allowed."""

    __slots__ = ("granted", "size")

    def __init__(self, size: int):
        self.size, self.granted = size, False


class Stream:
    """One request and its answer. Subclasses handle the data; the connection owns the plain attributes."""

    id: int
    head: Any
    send_window: int
    receive_window = STREAM_WINDOW
    content_left: int | None = None
    """Bytes of data still to come, if `content-length` was given."""
    state = OPEN
    queue: deque[memoryview] | None = None
    queued = 0
    tail: bytes | None = None
    in_ready = False
    loan: Loan | None = None

    def __init__(self, connection: StreamConnection, stream_id: int, head: Any):
        self.connection, self.id, self.head = connection, stream_id, head
        self.send_window = connection.output.initial_window

    def fire(self, event: StreamEvent) -> None:
        """Enter the state that follows; KeyError if the state does not allow the event."""
        self.state = TRANSITIONS[self.state][event]

    @property
    def remote_closed(self) -> bool:
        """Whether the client has sent everything."""
        state = self.state
        return state is HALF_CLOSED_REMOTE or state >= FLUSHING

    @property
    def ended(self) -> bool:
        """Whether the answer has its status."""
        return self.state >= HALF_CLOSED_LOCAL

    def on_open(self) -> None:
        """The stream has been added to the connection."""

    def on_data(self, data: bytes, start: int, stop: int, ended: bool) -> None:
        """Take `data[start:stop]`; `ended`: these were the last bytes."""
        raise NotImplementedError

    def on_cancel(self) -> None:
        """Stop whatever runs for the stream: the client or the connection is gone."""

    def on_drained(self) -> None:
        """The queue has been sent."""

    def on_drain(self) -> None:
        """The server stops: end a stream that would otherwise go on forever."""

    def moved(self) -> int | None:
        """Bytes sent and received so far if the server waits for the client, else None."""
        return None

    def on_stall(self) -> None:
        """The client has made no progress for too long."""
        self.connection.reset_stream(self, ErrorCode.ENHANCE_YOUR_CALM)

    def on_sent(self) -> None:
        """The last frame has been written."""
        self.connection.close_stream(self)
