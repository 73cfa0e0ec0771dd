"""`GrpcClient`: an HTTP/2 connection that repeats one gRPC call and reads only the status of the answers.

Knows HTTP/2 frames and gRPC headers; knows nothing of messages or of when to send.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import unquote

from hurtle.serving.grpc.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    FRAME_HEAD,
    FRAME_SIZE,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    LARGEST_WINDOW,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    ConnectionFailed,
    encode_headers,
    frame,
    frame_head,
    settings,
    window_update,
)
from hurtle.serving.grpc.http2_headers import Fields, HeaderDecoder
from hurtle.serving.load.connection import Answered, LoadConnection
from hurtle.serving.load.request import Target, grpc_body

_LAST_STREAM = LARGEST_WINDOW - 2
_REFILL = 1 << 29
"""Bytes received between two WINDOW_UPDATE frames."""
_START = PREFACE + settings([(ENABLE_PUSH, 0), (INITIAL_WINDOW_SIZE, LARGEST_WINDOW)])
_START += window_update(0, LARGEST_WINDOW - DEFAULT_WINDOW)


class Head(NamedTuple):
    """The parts of an answer's headers or trailers that matter."""

    status: str | None
    """The HTTP status."""
    error: str | None
    """The error, or None if gRPC's status is 0 or not there yet."""
    is_final: bool
    """Whether gRPC's status is among them."""


def _head(fields: Fields) -> Head:
    found = {name: value.decode("utf-8", "replace") for name, value in fields}
    code = found.get(b"grpc-status")
    error = None if code in (None, "0") else f"grpc-status {code} {unquote(found.get(b'grpc-message', ''))[:300]}"
    return Head(found.get(b":status"), error, code is not None)


def grpc_headers(target: Target, path: str) -> bytes:
    """The header block of a call, the same on every connection."""
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", target.address.encode()),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
    if target.token:
        fields.append((b"authorization", f"Bearer {target.token}".encode()))
    return encode_headers(fields)


class GrpcClient(LoadConnection):
    """One connection with one call at a time.

    Args:
        headers: The header block.
        message: The message without its five-byte prefix.
        answered: Called with each answer.
        lost: Called when the connection is gone.
        keep: Keep the last answer's message in `body`.
    """

    def __init__(self, headers: bytes, message: bytes, answered: Answered, lost: Callable[[Any], None], keep: bool = False):
        super().__init__(answered, lost)
        self._headers, self._body = headers, grpc_body(message)
        self._decoder: HeaderDecoder[Head] = HeaderDecoder(_head)
        self._keep = keep
        self._kept: list[bytes] = []
        self._rest = b""
        self._stream = -1
        self._unsent = memoryview(b"")
        self._connection_window = self._initial_window = DEFAULT_WINDOW
        self._stream_window = 0
        self._received = 0
        self._block: tuple[int, list[bytes]] | None = None
        """Flags and parts of a header block that CONTINUATION goes on with."""
        self._status: str | None = None

    @property
    def body(self) -> bytes:
        """The message of the last answer."""
        return b"".join(self._kept)[5:]

    def send(self) -> None:
        """Send the call."""
        self.waiting = True
        self._status = None
        self._kept.clear()
        stream = self._stream = self._stream + 2
        body, headers = self._body, self._headers
        head = frame_head(len(headers), HEADERS, END_HEADERS, stream)
        size = len(body)
        if size <= FRAME_SIZE and size <= self._connection_window and size <= self._initial_window:
            self._connection_window -= size
            self.transport.write(b"".join((head, headers, frame_head(size, DATA, END_STREAM, stream), body)))
            return
        self._stream_window = self._initial_window
        self._unsent = memoryview(body)
        self.transport.write(head + headers)
        self._send_more()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preface; HTTP/2 lets a client send requests before the server's SETTINGS."""
        super().connection_made(transport)
        self.transport.write(_START)

    def data_received(self, data: bytes) -> None:
        """Read frames."""
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        try:
            while end - at >= 9:
                high, low, kind, flags, stream = FRAME_HEAD.unpack_from(data, at)
                stop = at + 9 + (high << 8 | low)
                if stop - at - 9 > FRAME_SIZE:
                    raise ValueError("a frame is too large")
                if stop > end:
                    break
                self._on_frame(kind, flags, stream & LARGEST_WINDOW, data, at + 9, stop)
                at = stop
        except (ConnectionFailed, ValueError, IndexError, struct.error) as error:
            self.failure = "this is HTTP/1, the port of REST" if data[:6] == b"HTTP/1" else f"not HTTP/2: {error}"
            self.close()
            if self.waiting:
                self._finish(self.failure)
            return
        self._rest = data[at:] if at < end else b""

    def _on_frame(self, kind: int, flags: int, stream: int, data: bytes, start: int, stop: int) -> None:
        if kind == DATA:
            self._count(stop - start)
            if stream == self._stream and self.waiting:
                if self._keep:
                    if flags & PADDED:
                        start, stop = start + 1, stop - data[start]
                    self._kept.append(data[start:stop])
                if flags & END_STREAM:
                    self._finish("the answer ended without gRPC's status")
        elif kind == HEADERS:
            if flags & (PADDED | WITH_PRIORITY):
                start, stop = _unpadded(flags, data, start, stop)
            if flags & END_HEADERS:
                self._on_head(flags, self._decoder.decode(data[start:stop]), stream)
            else:
                self._block = (flags, [data[start:stop]])
        elif kind == CONTINUATION and self._block is not None:
            self._block[1].append(data[start:stop])
            if flags & END_HEADERS:
                (flags, parts), self._block = self._block, None
                self._on_head(flags, self._decoder.decode(b"".join(parts)), stream)
        elif kind == WINDOW_UPDATE:
            more = int.from_bytes(data[start:stop], "big") & LARGEST_WINDOW
            if stream == 0:
                self._connection_window += more
            elif stream == self._stream:
                self._stream_window += more
            if self._unsent:
                self._send_more()
        elif kind == SETTINGS and not flags & ACK:
            self._on_settings(data[start:stop])
        elif kind == PING and not flags & ACK:
            self.transport.write(frame(PING, ACK, 0, data[start:stop]))
        elif kind == RST_STREAM and stream == self._stream and self.waiting:
            self._finish(f"the server reset the call (HTTP/2 error {int.from_bytes(data[start:stop], 'big')})")
        elif kind == GOAWAY:
            self.closing = True
            if not self.waiting or int.from_bytes(data[start : start + 4], "big") & LARGEST_WINDOW < self._stream:
                self.transport.close()

    def _on_head(self, flags: int, head: Head, stream: int) -> None:
        if stream != self._stream or not self.waiting:
            return
        self._status = head.status or self._status
        if not flags & END_STREAM:
            return
        if not head.is_final:
            self._finish(f"no gRPC: HTTP status {self._status} and no grpc-status")
        else:
            self._finish(head.error)

    def _on_settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == INITIAL_WINDOW_SIZE:
                self._stream_window += value - self._initial_window
                self._initial_window = value
        self.transport.write(frame(SETTINGS, ACK, 0))
        if self._unsent:
            self._send_more()

    def _send_more(self) -> None:
        """Send as much of the message as the windows allow."""
        while self._unsent and (size := min(len(self._unsent), FRAME_SIZE, self._connection_window, self._stream_window)) > 0:
            part, self._unsent = self._unsent[:size], self._unsent[size:]
            self._connection_window -= size
            self._stream_window -= size
            self.transport.write(frame_head(size, DATA, 0 if self._unsent else END_STREAM, self._stream))
            self.transport.write(bytes(part))

    def _count(self, size: int) -> None:
        self._received += size
        if self._received >= _REFILL:
            self.transport.write(window_update(0, self._received))
            self._received = 0

    def _finish(self, error: str | None) -> None:
        if self._unsent:  # the server answered before it had read everything: the stream is half open
            self._unsent = memoryview(b"")
            self.close()
        if self._stream >= _LAST_STREAM or self.closing:
            self.closing = True
            self.transport.close()
        super()._finish(error)


def _unpadded(flags: int, data: bytes, start: int, stop: int) -> tuple[int, int]:
    if flags & PADDED:
        start, stop = start + 1, stop - data[start]
    return (start + 5, stop) if flags & WITH_PRIORITY else (start, stop)
