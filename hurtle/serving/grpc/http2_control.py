"""Handlers of the HTTP/2 frames that carry no request: SETTINGS, PING, WINDOW_UPDATE, RST_STREAM and the like."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from hurtle.serving.grpc.http2_frames import (
    ACK,
    ENABLE_PUSH,
    FRAME_SIZE,
    GOAWAY,
    HEADER_TABLE_SIZE,
    INITIAL_WINDOW_SIZE,
    LARGEST_WINDOW,
    MAX_FRAME_SIZE,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ConnectionFailed,
    ErrorCode,
    frame,
)
from hurtle.serving.grpc.http2_guard import Guard
from hurtle.serving.grpc.http2_output import LARGEST_FRAME, Output
from hurtle.serving.grpc.http2_stream import Stream

DRAIN_PING = b"draining"
"""The payload of our PING after the first GOAWAY: its ACK means that the client has seen the GOAWAY."""


class ControlledConnection(Protocol):
    """A connection as control frames see it."""

    output: Output
    guard: Guard
    last_id: int
    ended_early: deque[int]

    @property
    def streams(self) -> Mapping[int, Stream]:
        """By number."""

    def on_settings_received(self) -> None:
        """Go on with the handshake, if these are the first SETTINGS."""

    def on_drain_ping_answered(self) -> None:
        """The client has seen GOAWAY."""

    def drop(self, stream: Stream) -> None:
        """End a stream that nobody waits for."""

    def reset_stream(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream whose client broke the rules."""


def on_reset(connection: ControlledConnection, flags: int, stream_id: int, payload: bytes) -> None:
    """RST_STREAM: the client gives up a request."""
    _check_size("RST_STREAM", payload, 4)
    if stream_id > connection.last_id or not stream_id:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"RST_STREAM for stream {stream_id}, which was never opened")
    connection.guard.count_reset()
    stream = connection.streams.get(stream_id)
    if stream is not None:
        connection.drop(stream)


def on_settings(connection: ControlledConnection, flags: int, stream_id: int, payload: bytes) -> None:
    """SETTINGS: the client's limits."""
    if stream_id:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
    if flags & ACK:
        _check_size("SETTINGS' ACK", payload, 0)
        return
    if len(payload) % 6:
        raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of no whole entries")
    connection.output.write(frame(SETTINGS, ACK, 0))
    connection.on_settings_received()
    window = connection.output.initial_window
    for key, value in struct.iter_unpack(">HI", payload):
        if key == INITIAL_WINDOW_SIZE:
            if value > LARGEST_WINDOW:
                raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE of {value}")
            window = value
        elif key == MAX_FRAME_SIZE:
            if not FRAME_SIZE <= value < 1 << 24:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE of {value}")
            connection.output.frame_size = min(value, LARGEST_FRAME)
        elif key == ENABLE_PUSH and value > 1:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH of {value}")
        elif key == HEADER_TABLE_SIZE:
            connection.output.shrink_table(value)
    if window != connection.output.initial_window:  # once per frame, as it concerns every stream
        _set_initial_window(connection, window)


def _set_initial_window(connection: ControlledConnection, value: int) -> None:
    change = value - connection.output.initial_window
    connection.output.initial_window = value
    for stream in list(connection.streams.values()):
        stream.send_window += change
        if stream.send_window > LARGEST_WINDOW:
            raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "a stream's window over 2³¹ − 1")
        connection.output.wake(stream)


def on_ping(connection: ControlledConnection, flags: int, stream_id: int, payload: bytes) -> None:
    """PING: echo it; an ACK may be the answer to ours."""
    if stream_id:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
    _check_size("PING", payload, 8)
    if not flags & ACK:
        connection.output.write(frame(PING, ACK, 0, payload))
    elif payload == DRAIN_PING:
        connection.on_drain_ping_answered()


def on_window_update(connection: ControlledConnection, flags: int, stream_id: int, payload: bytes) -> None:
    """WINDOW_UPDATE: the client accepts more bytes."""
    _check_size("WINDOW_UPDATE", payload, 4)
    size = int.from_bytes(payload, "big") & LARGEST_WINDOW
    if not stream_id:
        connection.output.window += size
        if not size:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        if connection.output.window > LARGEST_WINDOW:
            raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window over 2³¹ − 1")
        connection.output.pump()
        return
    stream = connection.streams.get(stream_id)
    if stream is None:
        if stream_id > connection.last_id and stream_id not in connection.ended_early:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"WINDOW_UPDATE for stream {stream_id}, never opened")
        return
    stream.send_window += size
    if not size:
        connection.reset_stream(stream, ErrorCode.PROTOCOL_ERROR)
    elif stream.send_window > LARGEST_WINDOW:
        connection.reset_stream(stream, ErrorCode.FLOW_CONTROL_ERROR)
    else:
        connection.output.wake(stream)


def on_priority(connection: ControlledConnection, flags: int, stream_id: int, payload: bytes) -> None:
    """PRIORITY: ignored, as streams take turns."""
    if not stream_id:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
    _check_size("PRIORITY", payload, 5)
    if int.from_bytes(payload[:4], "big") & LARGEST_WINDOW == stream_id:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"stream {stream_id} depends on itself")


def on_push_promise(connection: ControlledConnection, flags: int, stream_id: int, payload: bytes) -> None:
    """PUSH_PROMISE: clients must not push."""
    raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")


def on_goaway(connection: ControlledConnection, flags: int, stream_id: int, payload: bytes) -> None:
    """GOAWAY: the client opens no more streams, and closes once it has its answers."""
    if stream_id:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
    if len(payload) < 8:
        raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY takes 8 bytes or more, got {len(payload)}")


def _check_size(name: str, payload: bytes, size: int) -> None:
    if len(payload) != size:
        raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, f"{name} takes {size} bytes, got {len(payload)}")


CONTROL = {
    RST_STREAM: on_reset,
    SETTINGS: on_settings,
    PING: on_ping,
    WINDOW_UPDATE: on_window_update,
    PRIORITY: on_priority,
    PUSH_PROMISE: on_push_promise,
    GOAWAY: on_goaway,
}
"""Handlers by frame type; unknown types are ignored."""
