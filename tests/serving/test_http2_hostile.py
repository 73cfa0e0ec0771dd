"""What a peer that breaks the rules of HTTP/2 or gRPC gets: the right code, and nobody else suffers."""

import struct
import time

import hpack
import pytest
from grpc_server import FakeShell, client, infer_request, serving
from http2_client import HELLO, INFER, STREAM_INFER, block, call, feed, message, raw_client, split_frames
from serving_helpers import run

from hurtle.serving.grpc import connection as grpc_connection
from hurtle.serving.grpc.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    ErrorCode,
    frame,
    frame_head,
    reset,
    settings,
    window_update,
)


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server
        end = time.monotonic() + 5
        while server.shell.connections and time.monotonic() < end:
            time.sleep(0.01)
        assert not server.shell.connections


OPEN = frame(HEADERS, END_HEADERS, 1, block())
OPEN_STREAM = frame(HEADERS, END_HEADERS, 1, block(STREAM_INFER))
BROKEN = {
    "a frame over the limit": (frame_head(20_000, DATA, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
    "PING of 7 bytes": (frame(PING, 0, 0, b"1234567"), ErrorCode.FRAME_SIZE_ERROR),
    "PING on a stream": (frame(PING, 0, 1, b"12345678"), ErrorCode.PROTOCOL_ERROR),
    "SETTINGS of 5 bytes": (frame(SETTINGS, 0, 0, b"12345"), ErrorCode.FRAME_SIZE_ERROR),
    "SETTINGS on a stream": (frame(SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "SETTINGS' ACK with data": (frame(SETTINGS, ACK, 0, b"123456"), ErrorCode.FRAME_SIZE_ERROR),
    "ENABLE_PUSH of 2": (settings([(2, 2)]), ErrorCode.PROTOCOL_ERROR),
    "a window of 2³¹": (settings([(4, 1 << 31)]), ErrorCode.FLOW_CONTROL_ERROR),
    "a small MAX_FRAME_SIZE": (settings([(5, 100)]), ErrorCode.PROTOCOL_ERROR),
    "a large MAX_FRAME_SIZE": (settings([(5, 1 << 24)]), ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE of 0": (window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE of 3 bytes": (frame(WINDOW_UPDATE, 0, 0, b"123"), ErrorCode.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE over 2³¹ − 1": (window_update(0, (1 << 31) - 1), ErrorCode.FLOW_CONTROL_ERROR),
    "WINDOW_UPDATE of no stream": (window_update(1, 5), ErrorCode.PROTOCOL_ERROR),
    "initial window over a stream's": (
        OPEN_STREAM + window_update(1, (1 << 31) - 70_000) + settings([(4, 100_000)]),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "RST_STREAM of no stream": (reset(1, ErrorCode.CANCEL), ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM of stream 0": (reset(0, ErrorCode.CANCEL), ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM of 3 bytes": (OPEN + frame(RST_STREAM, 0, 1, b"123"), ErrorCode.FRAME_SIZE_ERROR),
    "PUSH_PROMISE": (frame(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2"), ErrorCode.PROTOCOL_ERROR),
    "PRIORITY of 4 bytes": (frame(PRIORITY, 0, 1, b"1234"), ErrorCode.FRAME_SIZE_ERROR),
    "PRIORITY on stream 0": (frame(PRIORITY, 0, 0, b"12345"), ErrorCode.PROTOCOL_ERROR),
    "a stream that depends on itself": (
        frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, b"\0\0\0\1\0" + block()),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "DATA of no stream": (frame(DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
    "DATA on stream 0": (frame(DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "DATA after the end": (call() + frame(DATA, 0, 1, b"x"), ErrorCode.STREAM_CLOSED),
    "HEADERS after the end": (call() + OPEN, ErrorCode.STREAM_CLOSED),
    "more padding than frame": (OPEN + frame(DATA, PADDED, 1, b"\x05abc"), ErrorCode.PROTOCOL_ERROR),
    "padding without a length": (OPEN + frame(DATA, PADDED, 1), ErrorCode.PROTOCOL_ERROR),
    "a stream of even number": (frame(HEADERS, END_HEADERS, 2, block()), ErrorCode.PROTOCOL_ERROR),
    "HEADERS on stream 0": (frame(HEADERS, END_HEADERS, 0, block()), ErrorCode.PROTOCOL_ERROR),
    "a stream older than the last": (
        frame(HEADERS, END_HEADERS, 5, block()) + frame(HEADERS, END_HEADERS, 3, block()),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "CONTINUATION of nothing": (frame(CONTINUATION, END_HEADERS, 1, block()), ErrorCode.PROTOCOL_ERROR),
    "CONTINUATION of another": (frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 3), ErrorCode.PROTOCOL_ERROR),
    "PING within headers": (frame(HEADERS, 0, 1, b"") + frame(PING, 0, 0, b"12345678"), ErrorCode.PROTOCOL_ERROR),
    "DATA within headers": (frame(HEADERS, 0, 1, b"") + frame(DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
    "an index that is not there": (frame(HEADERS, END_HEADERS, 1, b"\xfe"), ErrorCode.COMPRESSION_ERROR),
    "headers that are cut": (frame(HEADERS, END_HEADERS, 1, b"\x40\x0aabc"), ErrorCode.COMPRESSION_ERROR),
    "an absurd integer": (frame(HEADERS, END_HEADERS, 1, b"\xff" * 15_000 + b"\x01"), ErrorCode.COMPRESSION_ERROR),
    "a table size over ours": (frame(HEADERS, END_HEADERS, 1, b"\x3f\xff\xff\x03"), ErrorCode.COMPRESSION_ERROR),
    "a flood of CONTINUATION": (
        frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, b"\x82") * 100,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "an endless header block": (
        frame(HEADERS, 0, 1, bytes(10_000)) + frame(CONTINUATION, 0, 1, bytes(16_000)) * 3,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "a flood of PING": (frame(PING, 0, 0, b"12345678") * 3000, ErrorCode.ENHANCE_YOUR_CALM),
    "a flood of SETTINGS": (settings([(4, 65535)]) * 3000, ErrorCode.ENHANCE_YOUR_CALM),
    "a flood of empty DATA": (OPEN_STREAM + frame(DATA, 0, 1) * 3000, ErrorCode.ENHANCE_YOUR_CALM),
    "a flood of WINDOW_UPDATE": (window_update(0, 1) * 3000, ErrorCode.ENHANCE_YOUR_CALM),
    "a flood of PRIORITY": (frame(PRIORITY, 0, 1, b"\0\0\0\0\1") * 3000, ErrorCode.ENHANCE_YOUR_CALM),
    "a flood of unknown frames": (frame(99, 0, 0, b"x") * 3000, ErrorCode.ENHANCE_YOUR_CALM),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_peer_that_breaks_the_rules_is_told_which_and_cut_off(server, name):
    sent, code = BROKEN[name]
    with raw_client(server) as raw:
        raw.send(sent)
        assert raw.goaway() == code


def test_a_first_frame_that_is_no_settings_is_an_error(server):
    for first in (frame(PING, 0, 0, b"12345678"), OPEN, frame(DATA, 0, 1, b"x")):
        with raw_client(server, PREFACE + first) as raw:
            assert raw.goaway() == ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("hello", [b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nSMxx", b"\0" * 24, b"hello"])
def test_a_peer_that_speaks_something_else_is_cut_off(server, hello):
    with raw_client(server, hello) as raw:
        assert raw.goaway() == ErrorCode.PROTOCOL_ERROR
        assert raw.next_frame() is None


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"POST /v2 HTTP/1.1\r\n\r\n", b"P", b"G"])
def test_http_1_gets_an_answer_that_it_understands(server, hello):
    with raw_client(server, hello) as raw:
        if hello == b"P":  # may be the beginning of HTTP/2's
            raw.send(b"UT / HTTP/1.1\r\n\r\n")
        raw.next_frame()
        text = raw.data
        while more := raw.socket.recv(1000):
            text += more
        assert text.startswith(b"HTTP/1.1 505 ")
        assert b"gRPC" in text


def test_a_reset_flood_is_stopped():
    with serving() as server, raw_client(server) as raw:
        slow = infer_request("slow", seconds=5.0).SerializeToString()
        for n in range(1, 6001, 2):
            raw.send(call(n, payload=slow), reset(n, ErrorCode.CANCEL))
        assert raw.goaway() == ErrorCode.ENHANCE_YOUR_CALM
        assert server.shell.cancelled == server.shell.asked <= 2048


MADE_RESETS = {
    "WINDOW_UPDATE of 0": lambda n: frame(HEADERS, END_HEADERS, n, block()) + window_update(n, 0),
    "a window over 2³¹ − 1": lambda n: frame(HEADERS, END_HEADERS, n, block()) + window_update(n, (1 << 31) - 1),
    "HEADERS that are no trailers": lambda n: frame(HEADERS, END_HEADERS, n, block()) * 2,
    "less than content-length": lambda n: call(n, content_length="9999"),
    "content-length without data": lambda n: frame(HEADERS, END_HEADERS | END_STREAM, n, block(content_length="9")),
    "malformed headers": lambda n: frame(HEADERS, END_HEADERS | END_STREAM, n, block(te="gzip")),
}


@pytest.mark.parametrize("name", MADE_RESETS)
def test_resets_that_a_client_makes_us_do_count_as_its_own(name):
    async def check():
        shell = FakeShell()
        one = MADE_RESETS[name]
        _, transport = feed(shell, [HELLO, *(one(n) for n in range(1, 6001, 2))])
        frames = split_frames(bytes(transport.written))
        (code,) = {struct.unpack(">I", payload[4:8])[0] for kind, _, _, payload in frames if kind == GOAWAY}
        assert code == ErrorCode.ENHANCE_YOUR_CALM
        assert sum(kind == RST_STREAM for kind, *_ in frames) <= 2048
        assert transport.closed

    run(check())


def test_resets_among_answered_calls_are_no_flood():
    async def check():
        bad = MADE_RESETS["less than content-length"]
        calls = [bad(n) if n % 6 == 1 else call(n) for n in range(1, 15_001, 2)]  # every third
        _, transport = feed(FakeShell(), [HELLO + window_update(0, 1 << 30), *calls])
        assert not transport.closed
        assert sum(kind == RST_STREAM for kind, *_ in split_frames(bytes(transport.written))) == 2500

    run(check())


def test_a_header_bomb_is_stopped(server):
    encoder = hpack.Encoder()
    big = [("x", "v" * 3000)]
    first = encoder.encode([(":method", "POST"), (":path", INFER), (":scheme", "http"), *big])
    bomb = encoder.encode([(":method", "POST"), (":path", INFER), (":scheme", "http"), *big * 5000])
    assert len(bomb) < 10_000
    with raw_client(server) as raw:
        raw.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, first), frame(HEADERS, END_HEADERS | END_STREAM, 3, bomb))
        assert raw.goaway() == ErrorCode.ENHANCE_YOUR_CALM


def test_too_many_streams_are_refused_and_the_others_live(server):
    head = block(STREAM_INFER)
    with raw_client(server) as raw:
        raw.send(*[frame(HEADERS, END_HEADERS, 2 * n + 1, head) for n in range(1025)])
        assert raw.reset(2049) == ErrorCode.REFUSED_STREAM
        raw.send(frame(DATA, END_STREAM, 1, message()))
        assert raw.status(1) == 0


def test_a_client_that_sends_more_than_its_window_loses_the_stream(server, monkeypatch):
    with raw_client(server) as raw:
        size = (1 << 26) - 1000
        for n in (1, 3, 5):
            raw.send(frame(HEADERS, END_HEADERS, n, block()), frame(DATA, 0, n, b"\0" + struct.pack(">I", size)))
        assert struct.unpack(">I", raw.until(WINDOW_UPDATE, 1))[0] == size - 65536 + 5
        assert raw.until(WINDOW_UPDATE, 3) is not None
        # No more is lent: the third has its first window only.
        raw.send(*[frame(DATA, 0, 5, bytes(16_000))] * 5)
        assert raw.reset(5) == ErrorCode.FLOW_CONTROL_ERROR
        raw.send(call(7))
        assert raw.status(7) == 0


def test_memory_for_messages_is_lent_again_when_it_was_given_back(server):
    with raw_client(server) as raw:
        size = (1 << 26) - 1000
        for n in (1, 3, 5):
            raw.send(frame(HEADERS, END_HEADERS, n, block()), frame(DATA, 0, n, b"\0" + struct.pack(">I", size)))
        raw.until(WINDOW_UPDATE, 3)
        raw.send(frame(PING, 0, 0, b"12345678"))
        assert raw.next_frame()[0] == PING
        raw.send(reset(1, ErrorCode.CANCEL))
        assert raw.until(WINDOW_UPDATE, 5) is not None


def test_a_client_that_does_not_read_is_not_answered_without_end(monkeypatch):
    monkeypatch.setattr(grpc_connection, "MIN_BUDGET", 1 << 20)
    hello = HELLO + settings([(INITIAL_WINDOW_SIZE, (1 << 31) - 1)]) + window_update(0, (1 << 31) - 70_000)
    with serving(FakeShell(max_message_bytes=1000)) as server, raw_client(server, hello) as raw:
        big = infer_request("big", bytes=4 << 20).SerializeToString()
        for n in range(1, 100, 2):
            raw.send(call(n, payload=big))
            time.sleep(0.002)
        (connection,) = server.shell.connections
        queued = server.call(lambda: connection.output.queued + connection.transport.get_write_buffer_size())
        assert queued < 24 << 20
        assert server.shell.asked < 12
        # And who reads late gets all.
        statuses, size = [], 0
        while len(statuses) < 50:
            kind, flags, _, payload = raw.next_frame()
            size += len(payload) if kind == DATA else 0
            if kind == HEADERS:
                headers = dict(raw.decoder.decode(payload))
                statuses += [headers["grpc-status"]] if flags & END_STREAM else []
        assert statuses.count("0") == server.shell.asked
        assert statuses.count("8") == 50 - server.shell.asked
        assert size > server.shell.asked * (4 << 20)


def test_a_client_that_only_asks_and_never_reads_is_read_no_more_until_it_reads():
    async def main():
        connection, transport = feed(FakeShell(), [HELLO])
        connection.pause_writing()  # what a transport does that has too much to send
        head, n = block("/nothing"), 1
        while not transport.reading_paused:
            connection.data_received(frame(HEADERS, END_HEADERS | END_STREAM, n, head))
            n += 2
            assert n < 50_000
        assert 1 << 20 < len(transport.written) < 2 << 20
        transport.taken = len(transport.written)
        connection.resume_writing()
        assert not transport.reading_paused
        connection.connection_lost(None)

    run(main())


def test_a_connection_that_says_nothing_is_closed(monkeypatch):
    monkeypatch.setattr("hurtle.serving.grpc.http2.PREFACE_TIMEOUT", 0.1)
    with serving() as server, raw_client(server, b"PRI * HT") as raw:
        assert raw.next_frame() is None


def test_a_hostile_connection_does_not_hurt_the_others(server):
    with client(server) as calls:
        assert calls.ask("ServerLive").live
        for sent, _ in list(BROKEN.values())[:20]:
            with raw_client(server) as raw:
                raw.send(sent)
        assert calls.ask("ServerLive").live


def test_a_connection_that_ends_anywhere_leaves_nothing(server):
    whole = HELLO + call(1) + call(3, STREAM_INFER) + frame(GOAWAY, 0, 0, bytes(8))
    for end in range(0, len(whole), 7):
        with raw_client(server, whole[:end]):
            pass
    end = time.monotonic() + 5
    while server.shell.connections:
        assert time.monotonic() < end
        time.sleep(0.01)
