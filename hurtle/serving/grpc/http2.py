"""`Http2Connection`: the receiving side of an HTTP/2 server connection, on callbacks; for gRPC only (no push, no priorities).

bytes → frames → `Stream.on_data` of the stream they are for; what goes out is `http2_output`'s. Knows nothing of messages.
Everything a peer can make us keep or do is bounded: see `http2_limits` and `http2_guard`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from hurtle.serving.address import peer_name
from hurtle.serving.grpc import http2_frames
from hurtle.serving.grpc.http2_blocks import HeaderBlock, strip_headers, unpad
from hurtle.serving.grpc.http2_control import CONTROL, FIRST_GOODBYE
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
from hurtle.serving.grpc.http2_stream import Stream
from hurtle.serving.memory import Memory

log = logging.getLogger("hurtle.serving")
SKIPS = 16
"""Gaps between the numbers of a client's streams that are remembered: after others it hears STREAM_CLOSED instead of why."""
PREFACE_TIMEOUT = 10.0
DRAIN_GRACE = 0.2
"""Seconds for a client that had connected, and said nothing yet, when the server began to stop."""
CLOSE_TIMEOUT = 5.0
"""Seconds for some of what was written to be sent, once the connection is to close."""
LINGER = 1.0
"""Seconds that a client which has been told to go may take; what it still sends would else make it lose our last answers."""
PING_TIMEOUT = 1.0
"""Seconds for a client to answer our PING while we drain."""


class Http2Connection(asyncio.Protocol):
    """A server's connection. Subclasses open the streams: `make_head` from the headers, `make_stream` from that.

    Args:
        budget: Bytes that unfinished messages may hold together.
        memory: Where they, and what was not sent, are counted with those of all other connections.
    """

    output: Output
    transport: asyncio.Transport
    _stalls: Stalls | None = None

    def __init__(self, budget: int, memory: Memory):
        self.memory = memory
        self.streams: dict[int, Stream] = {}
        self.loop = asyncio.get_running_loop()
        self.guard = Guard(budget)
        self.peer = ""
        self._headers: HeaderDecoder[Any] = HeaderDecoder(self.make_head)
        self._rest = b""
        self._read = self._read_preface
        self._closed = False
        self.last_id = 0
        self.ended_early: deque[int] = deque(maxlen=MAX_STREAMS)
        """Streams that we closed while the client could still send: what comes for them is not its fault."""
        self._skipped: deque[range] = deque(maxlen=SKIPS)
        """Streams that the client passed over, and must not open any more."""
        self._received = 0
        self._block: HeaderBlock | None = None
        """What CONTINUATION goes on with."""
        self.settled = False
        """The client's first SETTINGS came."""
        self.draining = self._last_call = False
        self._reading_paused = False
        self._unsent = 0
        """Bytes that the transport held when it was full."""
        self._timer: asyncio.TimerHandle | None = None

    def make_head(self, fields: Fields) -> Any:
        """What a request's headers say; the same object may serve many requests. Must not raise."""
        raise NotImplementedError

    def make_stream(self, stream_id: int, head: Any) -> Stream | None:
        """What will take a stream's data; None: the headers break HTTP/2's rules."""
        raise NotImplementedError

    def is_trailers(self, head: Any) -> bool:
        """Whether headers may stand at a request's end."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there; its preface must follow soon."""
        self.transport = transport  # type: ignore[assignment]
        self.output = Output(self.transport, self.loop, self.guard, self.memory)
        self.peer = peer_name(transport.get_extra_info("peername"))
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._timer = self.loop.call_later(PREFACE_TIMEOUT, self.abort)
        self._stalls = Stalls(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client is gone, or we closed and all is sent."""
        self._finish()
        self._set_unsent(0)
        self.on_closed()

    def pause_writing(self) -> None:
        """The peer does not keep up."""
        self.output.pause()
        self.count_unsent()

    def resume_writing(self) -> None:
        """It does again."""
        self._set_unsent(0)
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()
        self.output.resume()

    def count_unsent(self) -> int:
        """Bytes in the transport that the peer does not take; 0 where it keeps up."""
        if self.output.paused:
            self._set_unsent(self.transport.get_write_buffer_size())
        return self._unsent

    def _set_unsent(self, size: int) -> None:
        self.memory.used += size - self._unsent
        self._unsent = size

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._closed:
            return
        if self._rest:
            data = self._rest + data
        output = self.output
        output.corked = True
        try:
            self._rest = self._read(data)
        except ConnectionFailed as error:
            self.fail(error.code, str(error))
        except Exception:
            log.exception("gRPC connection of %s failed", self.peer)
            self.fail(ErrorCode.INTERNAL_ERROR, "internal error")
        output.flush()
        if output.paused and not self._closed and self.transport.get_write_buffer_size() > MAX_UNSENT:
            self._reading_paused = True
            self.transport.pause_reading()

    def drain(self) -> None:
        """Let the client know that it should go; answer what it has sent, then close."""
        if self.draining or self._closed:
            return
        self.draining = True
        if self.settled:
            self.say_goodbye()
        else:  # its preface and its first request may be on their way
            self._wait(DRAIN_GRACE, self.abort)

    def say_goodbye(self) -> None:
        """The first of two steps, so that no request that is on its way is lost: the second when the client has seen this."""
        self.output.write(FIRST_GOODBYE)
        self._wait(PING_TIMEOUT, self.call_last)

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, then)

    def abort(self) -> None:
        """Close at once."""
        self._finish()
        self.transport.abort()

    def fail(self, code: ErrorCode, message: str) -> None:
        """Say why, and close."""
        if not self._closed:
            self.output.write(http2_frames.goaway(self.last_id, code, message))
            self._close()

    def close_stream(self, stream: Stream) -> None:
        """Our side of a stream has ended."""
        if self.streams.pop(stream.id, None) is None:
            return
        stream.closed = True
        self.guard.give_back(stream)
        if stream.remote_closed:
            self.guard.answered += 1
        else:
            self.ended_early.append(stream.id)
            self.output.write(http2_frames.reset(stream.id, ErrorCode.NO_ERROR))
        if self._last_call:
            self._close_if_done()

    def reset_stream(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream whose client broke the rules. It counts like a reset by the client, who could else cause any number."""
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
            stream.closed = True
            self.output.forget(stream)
            self.guard.give_back(stream)
            stream.on_cancel()
            if self._last_call:
                self._close_if_done()

    def call_last(self) -> None:
        """While draining: take no more streams, and close when the last has its answer."""
        if self._last_call or self._closed:
            return
        self._last_call = True
        self.output.write(http2_frames.goaway(self.last_id, ErrorCode.NO_ERROR, "draining"))
        for stream in list(self.streams.values()):  # also those that were opened since the first step
            stream.on_drain()
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._last_call and not self.streams and not self._closed:
            self._close()

    def _close(self) -> None:
        self.output.flush()
        self._finish()
        if self._last_call and self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER, self.transport.close)
        else:
            self.transport.close()
        self.loop.call_later(CLOSE_TIMEOUT, self._abort_when_sent, self.transport.get_write_buffer_size())

    def _abort_when_sent(self, unsent: int) -> None:
        """Or when the peer takes nothing of it any more."""
        left = self.transport.get_write_buffer_size()
        if 0 < left < unsent:
            self.loop.call_later(CLOSE_TIMEOUT, self._abort_when_sent, left)
        else:
            self.transport.abort()

    def _finish(self) -> None:
        if self._closed:
            return
        self._closed = self.output.closed = True
        self._rest = b""
        if self._timer is not None:
            self._timer.cancel()
        if self._stalls is not None:
            self._stalls.stop()
        for stream in list(self.streams.values()):
            self.drop(stream)

    def on_closed(self) -> None:
        """The connection is gone."""

    def _read_preface(self, data: bytes) -> bytes:
        if not data.startswith(http2_frames.PREFACE):
            if http2_frames.PREFACE.startswith(data):
                return data
            if any(verb.startswith(data[:4]) for verb in HTTP1_VERBS):
                self.output.write(HTTP1_ANSWER)
                self._close()
                return b""
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "expected HTTP/2's connection preface")
        if self._timer is not None and not self.draining:
            self._timer.cancel()
        self.output.write(OUR_SETTINGS)
        self._read = self._read_frames
        return self._read_frames(data[len(http2_frames.PREFACE) :])

    def _read_frames(self, data: bytes) -> bytes:
        at, end = 0, len(data)
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
            if self._closed:
                return b""
        return data[at:]

    def _on_data(self, data: bytes, start: int, stop: int, flags: int, stream_id: int) -> None:
        size = stop - start
        self._received += size
        if self._received > CONNECTION_WINDOW // 2:
            self.output.write(http2_frames.window_update(0, self._received))
            self._received = 0
        stream = self.streams.get(stream_id)
        if stream is None or stream.remote_closed:
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
            stream.remote_closed = True
        if start < stop:
            self.guard.worked += 1
        elif not ended:
            self.guard.count_noise()
        stream.on_data(data, start, stop, ended)

    def _on_headers(self, data: bytes, start: int, stop: int, flags: int, stream_id: int) -> None:
        if not self.settled:
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
        head = self._headers.decode(block)
        ended = flags & END_STREAM != 0
        if stream_id % 2 == 0:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"a client cannot open stream {stream_id}")
        if stream_id <= self.last_id:
            self._on_late_headers(stream_id, head, ended)
            return
        if self._last_call:
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
        stream.remote_closed = ended
        self.streams[stream_id] = stream
        stream.on_open()
        if ended and not stream.closed:
            if stream.content_left:
                self.reset_stream(stream, ErrorCode.PROTOCOL_ERROR)
            else:
                stream.on_data(b"", 0, 0, True)

    def _on_late_headers(self, stream_id: int, head: Any, ended: bool) -> None:
        """Of a stream that is open (trailers, which say nothing in gRPC), or was."""
        stream = self.streams.get(stream_id)
        if any(stream_id in gap for gap in self._skipped):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"HEADERS for stream {stream_id}, which is older than the last")
        if stream is None or stream.remote_closed:
            self._on_stray(stream_id)
        elif not ended or stream.content_left or not self.is_trailers(head):
            self.reset_stream(stream, ErrorCode.PROTOCOL_ERROR)
        else:
            stream.remote_closed = True
            stream.on_data(b"", 0, 0, True)

    def _on_stray(self, stream_id: int) -> None:
        """Data or headers for a stream that is not open."""
        if stream_id > self.last_id or not stream_id:
            if stream_id not in self.ended_early:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"data for stream {stream_id}, which was never opened")
        elif stream_id not in self.ended_early:
            raise ConnectionFailed(ErrorCode.STREAM_CLOSED, f"data for stream {stream_id}, which is closed")
        self.guard.count_noise()

    def _refuse(self, stream_id: int, code: ErrorCode) -> None:
        self.ended_early.append(stream_id)
        self.guard.count_noise()
        self.output.write(http2_frames.reset(stream_id, code))

    def _on_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None and kind != CONTINUATION:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "expected CONTINUATION")
        if not self.settled and kind != http2_frames.SETTINGS:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "expected SETTINGS first")
        if kind != http2_frames.RST_STREAM:
            self.guard.count_noise()
        if kind == CONTINUATION:
            self._on_continuation(flags, stream_id, payload)
        elif kind in CONTROL:
            CONTROL[kind](self, flags, stream_id, payload)
