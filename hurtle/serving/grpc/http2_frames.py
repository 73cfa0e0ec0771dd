"""HTTP/2 frames, error codes and limits as bytes. Has no state and knows nothing of gRPC."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = range(1, 7)

FRAME_HEAD = struct.Struct(">HBBBI")
"""Length (high 16 bits, low 8 bits), type, flags, stream."""
FRAME_SIZE = 1 << 14
"""The largest frame that every peer accepts, and that we accept."""
DEFAULT_WINDOW = (1 << 16) - 1
LARGEST_WINDOW = (1 << 31) - 1


class ErrorCode(IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ConnectionFailed(Exception):
    """The peer violated the protocol so that the connection cannot go on."""

    def __init__(self, code: ErrorCode, message: str):
        super().__init__(message)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """A whole frame.

    Example:
        >>> frame(PING, ACK, 0, b"12345678").hex()
        '0000080601000000003132333435363738'
    """
    return frame_head(len(payload), kind, flags, stream_id) + payload


def frame_head(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """The nine bytes in front of a frame's payload."""
    return FRAME_HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *value) for value in values))


def window_update(stream_id: int, size: int) -> bytes:
    """A WINDOW_UPDATE frame: the peer may send `size` more bytes, on the connection if the stream is 0."""
    return frame(WINDOW_UPDATE, 0, stream_id, size.to_bytes(4, "big"))


def reset(stream_id: int, code: ErrorCode) -> bytes:
    """An RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def goaway(last_stream_id: int, code: ErrorCode, message: str = "") -> bytes:
    """A GOAWAY frame: the last stream that is served, and the reason."""
    return frame(GOAWAY, 0, 0, struct.pack(">II", last_stream_id, code) + message.encode()[:200])


def encode_headers(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    r"""HPACK without tables and Huffman coding: the bytes are the same on every connection, so they can be encoded once.

    Example:
        >>> encode_headers([(b":status", b"200"), (b"grpc-status", b"0")])
        b'\x88\x00\x0bgrpc-status\x010'
    """
    parts = []
    for name, value in fields:
        if (name, value) == (b":status", b"200"):
            parts.append(b"\x88")
        else:
            parts += b"\x00", _length(name), name, _length(value), value
    return b"".join(parts)


def _length(text: bytes) -> bytes:
    """An HPACK integer with a seven-bit prefix."""
    if len(text) < 127:
        return bytes([len(text)])
    parts, left = [127], len(text) - 127
    while left >= 128:
        parts.append(left & 127 | 128)
        left >>= 7
    return bytes([*parts, left])
