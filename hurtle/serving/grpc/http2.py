"""`Http2Connection`: the receiving side of an HTTP/2 server connection, for gRPC only (no push, no priorities).

bytes → frames → `Stream.on_data` of the stream they belong to; `http2_output` sends. Knows nothing of messages.
Everything that a peer can make the server keep or do is bounded: see `http2_limits` and `http2_guard`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from typing import Any

from hurtle.serving.client_connection import ClientConnection
from hurtle.serving.grpc import http2_frames
from hurtle.serving.grpc.http2_blocks import HeaderBlock, strip_headers, unpad
from hurtle.serving.grpc.http2_control import CONTROL, DRAIN_PING
from hurtle.serving.grpc.http2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEAD,
    FRAME_SIZE,
    HEADERS,
    LARGEST_WINDOW,
    PADDED,
    WITH_PRIORITY,
    ConnectionFailed,
    ErrorCode,
)
from hurtle.serving.grpc.http2_guard import Guard
from hurtle.serving.grpc.http2_headers import Fields, HeaderDecoder
from hurtle.serving.grpc.http2_limits import CONNECTION_WINDOW, HTTP1_ANSWER, HTTP1_VERBS, MAX_STREAMS, MAX_UNSENT, OUR_SETTINGS
from hurtle.serving.grpc.http2_output import Output
from hurtle.serving.grpc.http2_stalls import Stalls
from hurtle.serving.grpc.http2_stream import AFTER_CLOSE, AFTER_REMOTE_END, CLOSE, HALF_CLOSED_REMOTE, REMOTE_END, Stream
from hurtle.serving.grpc.http2_stream import OPEN as STREAM_OPEN
from hurtle.serving.lifecycle import Event, State

log = logging.getLogger("hurtle.serving")
CLOSED, LAST_CALL, OPEN = State.CLOSED, State.LAST_CALL, State.OPEN
SKIPS = 16
"""Gaps between a client's stream numbers that are remembered; a HEADERS in an older gap gets STREAM_CLOSED as its error."""
PREFACE_TIMEOUT = 10.0
PING_TIMEOUT = 1.0
"""Seconds for a client to answer our PING while the server stops."""


class Http2Connection(ClientConnection):
    """A server's connection. Subclasses open the streams: `make_head` from the headers, then `make_stream`.

    Args:
        service: What answers.
        budget: Bytes that the connection's unfinished messages may hold together.
    """

    grace = PING_TIMEOUT
    output: Output
    _stalls: Stalls | None = None

    def __init__(self, service: Any, budget: int):
        super().__init__(service, State.PREFACE)
        self.memory = service.memory
        self.streams: dict[int, Stream] = {}
        self.guard = Guard(budget)
        self._headers: HeaderDecoder[Any] = HeaderDecoder(self.make_head)
        self._unread = b""
        """The beginning of a frame whose end has not come yet."""
        self.last_id = 0
        self.ended_early: deque[int] = deque(maxlen=MAX_STREAMS)
        """Streams that we closed while the client could still send: frames for them are not its fault."""
        self._skipped: deque[range] = deque(maxlen=SKIPS)
        """Stream numbers that the client passed over, and must not use any more."""
        self._received = 0
        """Bytes of data since our last WINDOW_UPDATE."""
        self._block: HeaderBlock | None = None
        """A header block that must go on with CONTINUATION."""
        self._is_reading_paused = False
        self._unsent = 0
        """Bytes in the transport when its buffer was full."""

    def make_head(self, fields: Fields) -> Any:
        """Parse a request's headers; one object may serve many requests. Must not raise."""
        raise NotImplementedError

    def make_stream(self, stream_id: int, head: Any) -> Stream | None:
        """Make the stream that takes the request's data; None if the headers violate HTTP/2."""
        raise NotImplementedError

    def is_trailers(self, head: Any) -> bool:
        """Whether these headers may end a request."""
        raise NotImplementedError

    def is_idle(self) -> bool:
        """Whether no stream is open."""
        return not self.streams

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the client's preface."""
        self.output = Output(transport, self.loop, self.guard, self.memory)  # type: ignore[arg-type]
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.set_timer(PREFACE_TIMEOUT, self.abort)
        self._stalls = Stalls(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Drop the streams that are left."""
        super().connection_lost(exc)
        self._set_unsent(0)

    def pause_writing(self) -> None:
        """Stop sending: the peer does not keep up."""
        self.output.pause()
        self.count_unsent()

    def resume_writing(self) -> None:
        """Send again."""
        self._set_unsent(0)
        if self._is_reading_paused:
            self._is_reading_paused = False
            self.transport.resume_reading()
        self.output.resume()

    def count_unsent(self) -> int:
        """Count the bytes in the transport that the peer does not read; 0 if it keeps up."""
        if self.output.paused:
            self._set_unsent(self.transport.get_write_buffer_size())
        return self._unsent

    def _set_unsent(self, size: int) -> None:
        self.memory.used += size - self._unsent
        self._unsent = size

    def data_received(self, data: bytes) -> None:
        """Read frames; an error of the peer's ends the connection."""
        if self.lifecycle.state is CLOSED:
            return
        if self._unread:
            data = self._unread + data
        output = self.output
        output.corked = True
        try:
            self._unread = self._read_frames(data) if self.lifecycle.state >= OPEN else self._read_handshake(data)
        except ConnectionFailed as error:
            self.fail(error.code, str(error))
        except Exception:
            log.exception("gRPC connection of %s failed", self.peer)
            self.fail(ErrorCode.INTERNAL_ERROR, "internal error")
        output.flush()
        if output.paused and self.lifecycle.state is not CLOSED and self.transport.get_write_buffer_size() > MAX_UNSENT:
            self._is_reading_paused = True
            self.transport.pause_reading()

    # Draining and closing.

    def ask_to_go(self) -> None:
        """Send a GOAWAY that still allows every stream, so that no request is lost; the PING tells when it was read."""
        self.output.write(http2_frames.goaway(LARGEST_WINDOW, ErrorCode.NO_ERROR, "draining"))
        self.output.write(http2_frames.frame(http2_frames.PING, 0, 0, DRAIN_PING))

    def on_drain_ping_answered(self) -> None:
        """The client has seen the first GOAWAY."""
        self.call_last()

    def on_last_call(self) -> None:
        """Send the final GOAWAY, and close when the last stream has its answer."""
        self.output.write(http2_frames.goaway(self.last_id, ErrorCode.NO_ERROR, "draining"))
        for stream in list(self.streams.values()):  # including those opened since the first GOAWAY
            stream.on_drain()
        self._close_if_done()

    def fail(self, code: ErrorCode, message: str) -> None:
        """Send GOAWAY with the reason, and close."""
        if self.lifecycle.state is not CLOSED:
            self.output.write(http2_frames.goaway(self.last_id, code, message))
            self._shut()

    def _close_if_done(self) -> None:
        if self.lifecycle.state is LAST_CALL and not self.streams:
            self._shut()

    def _shut(self) -> None:
        lingers = self.lifecycle.state is LAST_CALL and self.transport.can_write_eof()
        self.output.flush()
        self.finish()
        if lingers:
            self.linger()
        else:
            self.close()

    def on_finish(self) -> None:
        """Cancel every stream."""
        self.output.closed = True
        self._unread = b""
        if self._stalls is not None:
            self._stalls.stop()
        for stream in list(self.streams.values()):
            self.drop(stream)

    # Streams.

    def close_stream(self, stream: Stream) -> None:
        """Remove a stream whose answer is sent."""
        if self.streams.pop(stream.id, None) is None:
            return
        is_whole = stream.state is HALF_CLOSED_REMOTE or stream.remote_closed
        stream.state = AFTER_CLOSE[stream.state]
        self.guard.give_back(stream)
        if is_whole:
            self.guard.answered += 1
        else:
            self.ended_early.append(stream.id)
            self.output.write(http2_frames.reset(stream.id, ErrorCode.NO_ERROR))
        if self.lifecycle.state is LAST_CALL:
            self._close_if_done()

    def reset_stream(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream whose client broke the rules. It counts as one of the client's resets, which are limited."""
        self.drop(stream)
        self.ended_early.append(stream.id)
        self.output.write(http2_frames.reset(stream.id, code))
        try:
            self.guard.count_reset()
        except ConnectionFailed as error:
            self.fail(error.code, str(error))

    def drop(self, stream: Stream) -> None:
        """End a stream that nobody waits for."""
        if self.streams.pop(stream.id, None) is not None:
            self.output.forget(stream)
            self.guard.give_back(stream)
            stream.on_cancel()
            stream.fire(CLOSE)
            self._close_if_done()

    def _refuse(self, stream_id: int, code: ErrorCode) -> None:
        self.ended_early.append(stream_id)
        self.guard.count_noise()
        self.output.write(http2_frames.reset(stream_id, code))

    # Frames.

    def _read_handshake(self, data: bytes) -> bytes:
        is_first = self.lifecycle.allows(Event.PREFACE_RECEIVED)
        return self._read_preface(data) if is_first else self._read_frames(data)

    def _read_preface(self, data: bytes) -> bytes:
        if not data.startswith(http2_frames.PREFACE):
            if http2_frames.PREFACE.startswith(data):
                return data
            if any(verb.startswith(data[:4]) for verb in HTTP1_VERBS):
                self.output.write(HTTP1_ANSWER)
                self._shut()
                return b""
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "expected HTTP/2's connection preface")
        if self.lifecycle.fire(Event.PREFACE_RECEIVED) is State.SETTINGS:
            self.set_timer(None)
        self.output.write(OUR_SETTINGS)
        return self._read_frames(data[len(http2_frames.PREFACE) :])

    def on_settings_received(self) -> None:
        """The first SETTINGS complete the handshake."""
        if self.lifecycle.allows(Event.SETTINGS_RECEIVED) and self.lifecycle.fire(Event.SETTINGS_RECEIVED) is State.DRAINING:
            self.start_draining()

    def _read_frames(self, data: bytes) -> bytes:
        at, end, lifecycle = 0, len(data), self.lifecycle
        while end - at >= 9:
            high, low, kind, flags, stream_id = FRAME_HEAD.unpack_from(data, at)
            start = at + 9
            stop = start + (high << 8 | low)
            if stop - start > FRAME_SIZE:
                raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, f"a frame over {FRAME_SIZE} bytes")
            if stop > end:
                break
            at = stop
            stream_id &= LARGEST_WINDOW
            if kind == DATA and self._block is None:
                self._on_data(data, start, stop, flags, stream_id)
            elif kind == HEADERS and self._block is None:
                self._on_headers(data, start, stop, flags, stream_id)
            else:
                self._on_other(kind, flags, stream_id, data[start:stop])
            if lifecycle.state is CLOSED:
                return b""
        return data[at:]

    def _on_data(self, data: bytes, start: int, stop: int, flags: int, stream_id: int) -> None:
        size = stop - start
        self._received += size
        if self._received > CONNECTION_WINDOW // 2:
            self.output.write(http2_frames.window_update(0, self._received))
            self._received = 0
        stream = self.streams.get(stream_id)
        if stream is None or (stream.state is not STREAM_OPEN and stream.remote_closed):
            self._on_stray(stream_id)
            return
        stream.receive_window -= size
        if stream.receive_window < 0:
            self.reset_stream(stream, ErrorCode.FLOW_CONTROL_ERROR)
            return
        if flags & PADDED:
            start, stop = unpad(data, start, stop)
        ended = flags & END_STREAM != 0
        if stream.content_left is not None:
            stream.content_left -= stop - start
            if stream.content_left < 0 or (ended and stream.content_left):
                self.reset_stream(stream, ErrorCode.PROTOCOL_ERROR)
                return
        if ended:
            stream.state = AFTER_REMOTE_END[stream.state]
        if start < stop:
            self.guard.worked += 1
        elif not ended:
            self.guard.count_noise()
        stream.on_data(data, start, stop, ended)

    def _on_headers(self, data: bytes, start: int, stop: int, flags: int, stream_id: int) -> None:
        if self.lifecycle.state < OPEN:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "expected SETTINGS first")
        if flags & (PADDED | WITH_PRIORITY):
            start, stop = strip_headers(data, start, stop, flags, stream_id)
        if flags & END_HEADERS:
            self._on_block(stream_id, flags, data[start:stop])
        else:
            self._block = HeaderBlock(stream_id, flags, data[start:stop])

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = self._block
        if block is None or block.stream_id != stream_id:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "CONTINUATION that continues nothing")
        block.add(payload)
        if flags & END_HEADERS:
            self._block = None
            self._on_block(stream_id, block.flags, b"".join(block.parts))

    def _on_block(self, stream_id: int, flags: int, block: bytes) -> None:
        """Open a stream, or end the request of one that is open."""
        head = self._headers.decode(block)
        ended = flags & END_STREAM != 0
        if stream_id % 2 == 0:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"a client cannot open stream {stream_id}")
        if stream_id <= self.last_id:
            self._on_late_headers(stream_id, head, ended)
            return
        if self.lifecycle.state is LAST_CALL:
            self.ended_early.append(stream_id)
            return
        if stream_id > self.last_id + 2:
            self._skipped.append(range(self.last_id + 1, stream_id))
        self.last_id = stream_id
        if len(self.streams) >= MAX_STREAMS:
            self._refuse(stream_id, ErrorCode.REFUSED_STREAM)
            return
        self.guard.worked += 1
        stream = self.make_stream(stream_id, head)
        if stream is None:
            self.guard.count_reset()
            self._refuse(stream_id, ErrorCode.PROTOCOL_ERROR)
            return
        if ended:
            stream.fire(REMOTE_END)
        self.streams[stream_id] = stream
        stream.on_open()
        if ended and stream_id in self.streams:
            if stream.content_left:
                self.reset_stream(stream, ErrorCode.PROTOCOL_ERROR)
            else:
                stream.on_data(b"", 0, 0, True)

    def _on_late_headers(self, stream_id: int, head: Any, ended: bool) -> None:
        """Handle headers of a stream that is open (trailers, which mean nothing in gRPC) or was."""
        stream = self.streams.get(stream_id)
        if any(stream_id in gap for gap in self._skipped):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"HEADERS for stream {stream_id}, which is older than the last")
        if stream is None or stream.remote_closed:
            self._on_stray(stream_id)
        elif not ended or stream.content_left or not self.is_trailers(head):
            self.reset_stream(stream, ErrorCode.PROTOCOL_ERROR)
        else:
            stream.fire(REMOTE_END)
            stream.on_data(b"", 0, 0, True)

    def _on_stray(self, stream_id: int) -> None:
        """Handle data or headers for a stream that is not open."""
        if stream_id not in self.ended_early:
            if stream_id > self.last_id or not stream_id:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"data for stream {stream_id}, which was never opened")
            raise ConnectionFailed(ErrorCode.STREAM_CLOSED, f"data for stream {stream_id}, which is closed")
        self.guard.count_noise()

    def _on_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None and kind != CONTINUATION:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "expected CONTINUATION")
        if self.lifecycle.state < OPEN and kind != http2_frames.SETTINGS:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "expected SETTINGS first")
        if kind != http2_frames.RST_STREAM:
            self.guard.count_noise()
        if kind == CONTINUATION:
            self._on_continuation(flags, stream_id, payload)
        elif kind in CONTROL:
            CONTROL[kind](self, flags, stream_id, payload)
