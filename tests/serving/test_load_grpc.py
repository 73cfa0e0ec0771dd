"""The load generator's HTTP/2 client, frame by frame."""

import pytest

from hurtle.serving.grpc.http2_frames import (
    ACK,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    FRAME_HEAD,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    RST_STREAM,
    SETTINGS,
    encode_headers,
    frame,
    settings,
    window_update,
)
from hurtle.serving.load.grpc_client import GrpcClient, grpc_headers
from hurtle.serving.load.request import Target

DONE = frame(HEADERS, END_HEADERS | END_STREAM, 1, encode_headers([(b"grpc-status", b"0")]))


class Wire:
    """A client whose bytes go nowhere."""

    def __init__(self, message=b"hello"):
        self.sent, self.answers, self.closed = bytearray(), [], False
        headers = grpc_headers(Target("host", 1, "grpc", token="t"), "/a.B/C")
        self.client = GrpcClient(headers, message, lambda client, error: self.answers.append(error), lambda client: None, True)
        self.client.connection_made(self)
        self.sent.clear()

    def write(self, data):
        self.sent += data

    def close(self):
        self.closed = True

    abort = close

    def frames(self):
        """(kind, flags, stream, payload) of what was sent since the last look."""
        found, at = [], 0
        while at < len(self.sent):
            high, low, kind, flags, stream = FRAME_HEAD.unpack_from(self.sent, at)
            size = high << 8 | low
            found.append((kind, flags, stream, bytes(self.sent[at + 9 : at + 9 + size])))
            at += 9 + size
        self.sent.clear()
        return found

    def data(self):
        return [(len(payload), bool(flags & END_STREAM)) for kind, flags, _, payload in self.frames() if kind == DATA]


def test_a_message_waits_for_the_server_s_windows():
    wire = Wire(bytes(100_000 - 5))
    wire.client.send()
    assert sum(size for size, _ in wire.data()) == DEFAULT_WINDOW
    wire.client.data_received(window_update(1, 50_000))
    assert wire.data() == []
    wire.client.data_received(window_update(0, 10))
    assert wire.data() == [(10, False)]
    wire.client.data_received(window_update(0, 50_000))
    sent = wire.data()
    assert sum(size for size, _ in sent) == 100_000 - DEFAULT_WINDOW - 10
    assert sent[-1][1]
    wire.client.data_received(DONE)
    assert wire.answers == [None]


def test_a_small_window_holds_for_each_call():
    wire = Wire(bytes(15))
    wire.client.data_received(settings([(INITIAL_WINDOW_SIZE, 12)]))
    assert [(kind, flags) for kind, flags, *_ in wire.frames()] == [(SETTINGS, ACK)]
    wire.client.send()
    assert wire.data() == [(12, False)]
    wire.client.data_received(settings([(INITIAL_WINDOW_SIZE, 16)]))
    assert wire.data() == [(4, False)]
    wire.client.data_received(window_update(1, 100))
    assert wire.data() == [(4, True)]


def test_frames_may_come_in_any_pieces():
    wire = Wire()
    wire.client.send()
    answer = frame(HEADERS, END_HEADERS, 1, encode_headers([(b":status", b"200")])) + frame(DATA, 0, 1, b"\0\0\0\0\2ok") + DONE
    for at in range(len(answer)):
        assert wire.answers == []
        wire.client.data_received(answer[at : at + 1])
    assert (wire.answers, wire.client.body) == ([None], b"ok")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (frame(HEADERS, 5, 1, encode_headers([(b"grpc-status", b"8"), (b"grpc-message", b"a%20b")])), "grpc-status 8 a b"),
        (frame(HEADERS, 5, 1, encode_headers([(b":status", b"404")])), "no gRPC: HTTP status 404"),
        (frame(DATA, END_STREAM, 1, b"x"), "without gRPC's status"),
        (frame(RST_STREAM, 0, 1, (7).to_bytes(4, "big")), "HTTP/2 error 7"),
        (b"HTTP/1.1 400 Bad Request\r\n", "this is HTTP/1"),
        (b"\xff" * 20, "not HTTP/2"),
        (frame(HEADERS, 5, 1, b"\xff\xff\xff\xff\xff"), "not HTTP/2"),
    ],
)
def test_answers_that_are_errors_are_told_apart(answer, error):
    wire = Wire()
    wire.client.send()
    wire.client.data_received(answer)
    assert len(wire.answers) == 1
    assert error in wire.answers[0]
    wire.client.data_received(DONE)
    assert len(wire.answers) == 1


def test_streams_are_numbered_and_those_of_before_are_ignored():
    wire = Wire()
    for stream in (1, 3, 5):
        wire.client.send()
        assert [found[2] for found in wire.frames()] == [stream, stream]
        wire.client.data_received(DONE.replace(b"\0\0\0\1", stream.to_bytes(4, "big"), 1))
    assert wire.answers == [None] * 3
    wire.client.send()
    wire.client.data_received(DONE)
    assert len(wire.answers) == 3


def test_pings_are_answered_and_goodbyes_are_taken_after_the_answer():
    wire = Wire()
    wire.client.data_received(frame(PING, 0, 0, b"12345678") + frame(PING, ACK, 0, b"12345678"))
    assert wire.frames() == [(PING, ACK, 0, b"12345678")]
    wire.client.send()
    wire.client.data_received(frame(GOAWAY, 0, 0, (1).to_bytes(4, "big") + bytes(4)))
    assert (wire.client.closing, wire.closed) == (True, False)
    wire.client.data_received(DONE)
    assert (wire.answers, wire.closed) == ([None], True)
