"""`Output`: the sending side of an HTTP/2 connection. Frames are gathered into one write per pass of the event loop.

message → stream's queue → (the peer's windows, room in the transport) → frames → transport. Knows nothing of what comes in.
"""

from __future__ import annotations

import asyncio
from collections import deque

from hurtle.serving.grpc.http2_frames import DATA, DEFAULT_WINDOW, FRAME_SIZE, frame_head
from hurtle.serving.grpc.http2_guard import Guard
from hurtle.serving.grpc.http2_stream import Stream
from hurtle.serving.memory import Memory

LARGEST_FRAME = 1 << 16
"""The largest DATA frame we send, even if the peer takes more: streams take turns frame by frame."""
SLICE = 1 << 18
"""Bytes given to the transport at a time; then other work on the event loop gets its turn."""
HIGH_WATER = 1 << 18


class Output:
    """The sending side of a connection."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, guard: Guard, memory: Memory):
        self.transport, self._loop, self._guard, self._memory = transport, loop, guard, memory
        self.window = self.initial_window = DEFAULT_WINDOW
        """Bytes that the peer accepts on the connection, and on a new stream."""
        self.frame_size = FRAME_SIZE
        self.queued = 0
        """Bytes of data that wait, over all streams."""
        self.paused = False
        """The transport's buffer is full."""
        self.corked = False
        """`flush` will be called at the end of this pass anyway."""
        self.closed = False
        self.table_update = b""
        """HPACK bytes that the next header block must begin with."""
        self._parts: list[bytes | memoryview] = []
        self._ready: deque[Stream] = deque()
        self._flush_planned = self._pump_planned = False
        transport.set_write_buffer_limits(high=HIGH_WATER)

    def write(self, data: bytes | memoryview) -> None:
        """Send whole frames that are not subject to flow control."""
        self._parts.append(data)
        if not self.corked and not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self._planned_flush)

    def flush(self) -> None:
        """Write the gathered frames to the transport."""
        self.corked = False
        parts = self._parts
        if parts:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            if not self.closed:
                self.transport.write(data)

    def fits(self, stream: Stream, size: int) -> bool:
        """Whether `size` bytes of data may be sent now, in one frame; the caller then reduces the windows itself."""
        return (
            size <= self.window
            and size <= stream.send_window
            and size <= self.frame_size
            and not self.paused
            and not stream.queue
        )

    def send(self, stream: Stream, data: bytes) -> None:
        """Queue data; it is sent as the windows allow."""
        if not data:
            return
        if stream.queue is None:
            stream.queue = deque()
        stream.queue.append(memoryview(data))
        stream.queued += len(data)
        self.queued += len(data)
        self._memory.used += len(data)
        self.wake(stream)

    def end(self, stream: Stream, tail: bytes) -> None:
        """Send `tail`, the stream's last frames, after its queued data."""
        if stream.queue:
            stream.tail = tail
        else:
            self.write(tail)
            stream.on_sent()

    def wake(self, stream: Stream) -> None:
        """Send what a stream has queued, now that it may be able to."""
        if stream.queue and stream.send_window > 0 and not stream.in_ready:
            stream.in_ready = True
            self._ready.append(stream)
        if self._ready:
            self.pump()

    def forget(self, stream: Stream) -> None:
        """Drop what a stream has queued."""
        if stream.queue:
            self.queued -= stream.queued
            self._memory.used -= stream.queued
            stream.queued = 0
            stream.queue.clear()
        stream.tail = None

    def shrink_table(self, size: int) -> None:
        """The peer changed the size of its HPACK table. We do not use it, but must acknowledge that it became smaller."""
        if size < 4096:
            self.table_update = b"\x20"

    def pump(self) -> None:
        """Send as much as the windows and the transport allow, taking streams in turn."""
        budget, ready = SLICE, self._ready
        while ready and self.window > 0 and budget > 0 and not self.paused:
            stream = ready.popleft()
            stream.in_ready = False
            if not stream.queue:
                continue
            chunk = stream.queue[0]
            size = min(self.window, stream.send_window, self.frame_size, len(chunk))
            if size <= 0:
                continue
            if size < len(chunk):
                stream.queue[0] = chunk[size:]
                chunk = chunk[:size]
            else:
                stream.queue.popleft()
            self.write(frame_head(size, DATA, 0, stream.id))
            self.write(chunk)
            budget -= size
            self._guard.worked += 1
            self.window -= size
            stream.send_window -= size
            stream.queued -= size
            self.queued -= size
            self._memory.used -= size
            if stream.queue:
                stream.in_ready = True
                ready.append(stream)
            elif stream.tail is not None:
                self.write(stream.tail)
                stream.tail = None
                stream.on_sent()
            else:
                self._loop.call_soon(stream.on_drained)
        if ready and self.window > 0 and not self.paused and not self._pump_planned and not self.closed:
            self._pump_planned = True
            self._loop.call_soon(self._planned_pump)

    def pause(self) -> None:
        """Stop sending: the transport's buffer is full."""
        self.paused = True

    def resume(self) -> None:
        """Send again."""
        self.paused = False
        self.pump()

    def _planned_flush(self) -> None:
        self._flush_planned = False
        self.flush()

    def _planned_pump(self) -> None:
        self._pump_planned = False
        self.pump()
