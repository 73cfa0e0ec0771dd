"""What goes out of an HTTP/2 connection: frames gathered to one write a loop pass, data held to the peer's windows.

message → stream's queue → (windows, and room in the transport) → frames → transport. Knows nothing of what comes in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from hurtle.serving.grpc.http2_frames import DATA, DEFAULT_WINDOW, FRAME_SIZE, frame_head

if TYPE_CHECKING:
    from hurtle.serving.grpc.http2_guard import Guard
    from hurtle.serving.grpc.http2_stream import Stream
    from hurtle.serving.memory import Memory

LARGEST_FRAME = 1 << 16
"""Of data, where the peer takes more: streams take turns by frames."""
SLICE = 1 << 18
"""Bytes given to the transport at once; then others on the loop have their turn."""
HIGH_WATER = 1 << 18


class Output:
    """The sending side of a connection."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, guard: Guard, memory: Memory):
        self.transport, self._loop, self._guard, self._memory = transport, loop, guard, memory
        self.window = self.initial_window = DEFAULT_WINDOW
        """What the peer takes, on the connection and on a new stream."""
        self.frame_size = FRAME_SIZE
        self.queued = 0
        """Bytes of data that wait, of all streams."""
        self.paused = False
        """The transport has more than it can send."""
        self.corked = False
        """Someone will call `flush` anyway."""
        self.closed = False
        self.table_update = b""
        """What the next header block must begin with."""
        self._parts: list[bytes | memoryview] = []
        self._ready: deque[Stream] = deque()
        self._flush_planned = self._pump_planned = False
        transport.set_write_buffer_limits(high=HIGH_WATER)

    def write(self, data: bytes | memoryview) -> None:
        """Send whole frames that no window holds back."""
        self._parts.append(data)
        if not self.corked and not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self._planned_flush)

    def flush(self) -> None:
        """Give the transport what was gathered."""
        self.corked = False
        parts = self._parts
        if parts:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            if not self.closed:
                self.transport.write(data)

    def fits(self, stream: Stream, size: int) -> bool:
        """Whether `size` bytes of data may go at once, in one frame; whoever sends them then counts them by `sent`."""
        return (
            size <= self.window
            and size <= stream.send_window
            and size <= self.frame_size
            and not self.paused
            and not stream.queue
        )

    def send(self, stream: Stream, data: bytes) -> None:
        """Send data when the windows allow it."""
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
        """Send `tail`, the stream's last frames, after its data."""
        if stream.queue:
            stream.tail = tail
        else:
            self.write(tail)
            stream.on_sent()

    def wake(self, stream: Stream) -> None:
        """The stream may have become able to send."""
        if stream.queue and stream.send_window > 0 and not stream.in_ready:
            stream.in_ready = True
            self._ready.append(stream)
        if self._ready:
            self.pump()

    def forget(self, stream: Stream) -> None:
        """Nothing more of this stream is to be sent."""
        if stream.queue:
            self.queued -= stream.queued
            self._memory.used -= stream.queued
            stream.queued = 0
            stream.queue.clear()
        stream.tail = None

    def shrink_table(self, size: int) -> None:
        """The peer's HPACK table has another size now. We use none, but must say so where it became smaller."""
        if size < 4096:
            self.table_update = b"\x20"

    def pump(self) -> None:
        """Send what windows and transport allow, the streams in turn."""
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
        """The transport is full."""
        self.paused = True

    def resume(self) -> None:
        """The transport has room again."""
        self.paused = False
        self.pump()

    def _planned_flush(self) -> None:
        self._flush_planned = False
        self.flush()

    def _planned_pump(self) -> None:
        self._pump_planned = False
        self.pump()
