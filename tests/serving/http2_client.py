"""`RawClient` sends any frames to an HTTP/2 server; `feed` does so without a socket. Shared by the tests of HTTP/2."""

import asyncio
import socket
import struct
from contextlib import contextmanager, suppress

import hpack
from grpc_server import TIMEOUT, infer_request

from hurtle.serving.grpc.connection import GrpcConnection
from hurtle.serving.grpc.http2_frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEAD,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    frame,
    settings,
)

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"
HELLO = PREFACE + settings([])


def fields(path=INFER, **more):
    found = {":method": "POST", ":scheme": "http", ":path": path, "te": "trailers", "content-type": "application/grpc"}
    found |= {name.replace("_", "-").replace("--", ":"): value for name, value in more.items()}
    return [(name, value) for name, value in found.items() if value is not None]


def block(path=INFER, encoder=None, **more):
    return (encoder or hpack.Encoder()).encode(fields(path, **more))


def message(payload=None, flag=0):
    payload = infer_request().SerializeToString() if payload is None else payload
    return bytes([flag]) + struct.pack(">I", len(payload)) + payload


def call(stream_id=1, path=INFER, payload=None, **more):
    """A whole unary call."""
    head = frame(HEADERS, END_HEADERS, stream_id, block(path, **more))
    return head + frame(DATA, END_STREAM, stream_id, message(payload))


OPEN = frame(HEADERS, END_HEADERS, 1, block())
OPEN_STREAM = frame(HEADERS, END_HEADERS, 1, block(STREAM_INFER))
"""The headers of a call alone, unary or streaming."""


def in_frames(stream_id, data, flags=0, size=16_000):
    """DATA frames, of which the last has the flags."""
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(frame(DATA, flags if n == len(parts) - 1 else 0, stream_id, part) for n, part in enumerate(parts))


def split_frames(data):
    """Whole frames as (type, flags, stream, payload)."""
    found, at = [], 0
    while at < len(data):
        high, low, kind, flags, stream_id = FRAME_HEAD.unpack_from(data, at)
        end = at + 9 + (high << 8 | low)
        assert end <= len(data), "a frame that was cut"
        found.append((kind, flags, stream_id, data[at + 9 : end]))
        at = end
    return found


class RawClient:
    def __init__(self, port, hello=HELLO):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.data, self.decoder = b"", hpack.Decoder()
        self.send(hello)

    def send(self, *parts):
        with suppress(ConnectionResetError, BrokenPipeError):
            self.socket.sendall(b"".join(parts))

    def next_frame(self):
        """(type, flags, stream, payload), or None at the end."""
        while True:
            if len(self.data) >= 9:
                high, low, kind, flags, stream_id = FRAME_HEAD.unpack_from(self.data)
                end = 9 + (high << 8 | low)
                if len(self.data) >= end:
                    payload, self.data = self.data[9:end], self.data[end:]
                    return kind, flags, stream_id, payload
            try:
                more = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not more:
                return None
            self.data += more

    def until(self, wanted, stream_id=None):
        """The payload of the next frame of a type, others skipped; None: the connection ended."""
        while (found := self.next_frame()) is not None:
            if found[0] == HEADERS:
                self.headers = dict(self.decoder.decode(found[3]))
            if found[0] == wanted and stream_id in (None, found[2]):
                return found[3]
        return None

    def goaway(self):
        """The error code of GOAWAY, or None if the connection ended without one."""
        payload = self.until(GOAWAY)
        return None if payload is None else struct.unpack(">I", payload[4:8])[0]

    def reset(self, stream_id):
        """The error code of a stream's RST_STREAM."""
        return struct.unpack(">I", self.until(RST_STREAM, stream_id))[0]

    def answer(self, stream_id):
        """All headers of a stream, and its data."""
        found, data = {}, bytearray()
        while (got := self.next_frame()) is not None:
            kind, flags, number, payload = got
            if kind == HEADERS:
                headers = self.decoder.decode(payload)
                if number == stream_id:
                    found |= dict(headers)
            elif kind == DATA and number == stream_id:
                data += payload
            if kind in (HEADERS, DATA) and number == stream_id and flags & END_STREAM:
                return found, bytes(data)
        raise AssertionError("the connection ended")

    def status(self, stream_id):
        return int(self.answer(stream_id)[0]["grpc-status"])

    def close(self):
        self.socket.close()


@contextmanager
def raw_client(server, hello=HELLO):
    client = RawClient(server.port, hello)
    try:
        yield client
    finally:
        client.close()


class MemoryTransport(asyncio.Transport):
    """Takes what is written."""

    def __init__(self):
        super().__init__()
        self.written, self.closed = bytearray(), False
        self.taken, self.reading_paused = 0, False

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def get_write_buffer_size(self):
        return len(self.written) - self.taken

    def write(self, data):
        assert not self.closed
        self.written += data

    def close(self):
        self.closed = True

    abort = close

    def is_closing(self):
        return self.closed

    def pause_reading(self):
        self.reading_paused = True

    def resume_reading(self):
        self.reading_paused = False


def feed(service, chunks):
    """A connection that got these bytes; must be called on an event loop."""
    connection, transport = GrpcConnection(service), MemoryTransport()
    connection.connection_made(transport)
    for chunk in chunks:
        connection.data_received(chunk)
    return connection, transport
