"""What a peer that breaks the rules of HTTP/2 or gRPC gets: the right code, and nobody else suffers."""

import struct
import time

import hpack
import pytest
from grpc_server import FakeService, client, infer_request, serving
from http2_client import HELLO, INFER, OPEN, OPEN_STREAM, STREAM_INFER, block, call, feed, message, raw_client, split_frames
from serving_helpers import run

from hurtle.serving.grpc import connection as grpc_connection
from hurtle.serving.grpc import http2_frames as h2


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server
        end = time.monotonic() + 5
        while server.service.connections and time.monotonic() < end:
            time.sleep(0.01)
        assert not server.service.connections


BROKEN = {
    "a frame over the limit": (h2.frame_head(20_000, h2.DATA, 0, 1), h2.ErrorCode.FRAME_SIZE_ERROR),
    "PING of 7 bytes": (h2.frame(h2.PING, 0, 0, b"1234567"), h2.ErrorCode.FRAME_SIZE_ERROR),
    "PING on a stream": (h2.frame(h2.PING, 0, 1, b"12345678"), h2.ErrorCode.PROTOCOL_ERROR),
    "SETTINGS of 5 bytes": (h2.frame(h2.SETTINGS, 0, 0, b"12345"), h2.ErrorCode.FRAME_SIZE_ERROR),
    "SETTINGS on a stream": (h2.frame(h2.SETTINGS, 0, 1), h2.ErrorCode.PROTOCOL_ERROR),
    "SETTINGS' ACK with data": (h2.frame(h2.SETTINGS, h2.ACK, 0, b"123456"), h2.ErrorCode.FRAME_SIZE_ERROR),
    "ENABLE_PUSH of 2": (h2.settings([(2, 2)]), h2.ErrorCode.PROTOCOL_ERROR),
    "a window of 2³¹": (h2.settings([(4, 1 << 31)]), h2.ErrorCode.FLOW_CONTROL_ERROR),
    "a small MAX_FRAME_SIZE": (h2.settings([(5, 100)]), h2.ErrorCode.PROTOCOL_ERROR),
    "a large MAX_FRAME_SIZE": (h2.settings([(5, 1 << 24)]), h2.ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE of 0": (h2.window_update(0, 0), h2.ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE of 3 bytes": (h2.frame(h2.WINDOW_UPDATE, 0, 0, b"123"), h2.ErrorCode.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE over 2³¹ − 1": (h2.window_update(0, (1 << 31) - 1), h2.ErrorCode.FLOW_CONTROL_ERROR),
    "WINDOW_UPDATE of no stream": (h2.window_update(1, 5), h2.ErrorCode.PROTOCOL_ERROR),
    "initial window over a stream's": (
        OPEN_STREAM + h2.window_update(1, (1 << 31) - 70_000) + h2.settings([(4, 100_000)]),
        h2.ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "RST_STREAM of no stream": (h2.reset(1, h2.ErrorCode.CANCEL), h2.ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM of stream 0": (h2.reset(0, h2.ErrorCode.CANCEL), h2.ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM of 3 bytes": (OPEN + h2.frame(h2.RST_STREAM, 0, 1, b"123"), h2.ErrorCode.FRAME_SIZE_ERROR),
    "PUSH_PROMISE": (h2.frame(h2.PUSH_PROMISE, h2.END_HEADERS, 1, b"\0\0\0\2"), h2.ErrorCode.PROTOCOL_ERROR),
    "PRIORITY of 4 bytes": (h2.frame(h2.PRIORITY, 0, 1, b"1234"), h2.ErrorCode.FRAME_SIZE_ERROR),
    "PRIORITY on stream 0": (h2.frame(h2.PRIORITY, 0, 0, b"12345"), h2.ErrorCode.PROTOCOL_ERROR),
    "a stream that depends on itself": (
        h2.frame(h2.HEADERS, h2.END_HEADERS | h2.WITH_PRIORITY, 1, b"\0\0\0\1\0" + block()),
        h2.ErrorCode.PROTOCOL_ERROR,
    ),
    "DATA of no stream": (h2.frame(h2.DATA, 0, 1, b"x"), h2.ErrorCode.PROTOCOL_ERROR),
    "DATA on stream 0": (h2.frame(h2.DATA, 0, 0, b"x"), h2.ErrorCode.PROTOCOL_ERROR),
    "DATA after the end": (call() + h2.frame(h2.DATA, 0, 1, b"x"), h2.ErrorCode.STREAM_CLOSED),
    "HEADERS after the end": (call() + OPEN, h2.ErrorCode.STREAM_CLOSED),
    "more padding than frame": (OPEN + h2.frame(h2.DATA, h2.PADDED, 1, b"\x05abc"), h2.ErrorCode.PROTOCOL_ERROR),
    "padding without a length": (OPEN + h2.frame(h2.DATA, h2.PADDED, 1), h2.ErrorCode.PROTOCOL_ERROR),
    "a stream of even number": (h2.frame(h2.HEADERS, h2.END_HEADERS, 2, block()), h2.ErrorCode.PROTOCOL_ERROR),
    "HEADERS on stream 0": (h2.frame(h2.HEADERS, h2.END_HEADERS, 0, block()), h2.ErrorCode.PROTOCOL_ERROR),
    "a stream older than the last": (
        h2.frame(h2.HEADERS, h2.END_HEADERS, 5, block()) + h2.frame(h2.HEADERS, h2.END_HEADERS, 3, block()),
        h2.ErrorCode.PROTOCOL_ERROR,
    ),
    "CONTINUATION of nothing": (h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, block()), h2.ErrorCode.PROTOCOL_ERROR),
    "CONTINUATION of another": (h2.frame(h2.HEADERS, 0, 1, b"") + h2.frame(h2.CONTINUATION, 0, 3), h2.ErrorCode.PROTOCOL_ERROR),
    "PING within headers": (
        h2.frame(h2.HEADERS, 0, 1, b"") + h2.frame(h2.PING, 0, 0, b"12345678"),
        h2.ErrorCode.PROTOCOL_ERROR,
    ),
    "DATA within headers": (h2.frame(h2.HEADERS, 0, 1, b"") + h2.frame(h2.DATA, 0, 1, b"x"), h2.ErrorCode.PROTOCOL_ERROR),
    "an index that is not there": (h2.frame(h2.HEADERS, h2.END_HEADERS, 1, b"\xfe"), h2.ErrorCode.COMPRESSION_ERROR),
    "headers that are cut": (h2.frame(h2.HEADERS, h2.END_HEADERS, 1, b"\x40\x0aabc"), h2.ErrorCode.COMPRESSION_ERROR),
    "an absurd integer": (h2.frame(h2.HEADERS, h2.END_HEADERS, 1, b"\xff" * 15_000 + b"\x01"), h2.ErrorCode.COMPRESSION_ERROR),
    "a table size over ours": (h2.frame(h2.HEADERS, h2.END_HEADERS, 1, b"\x3f\xff\xff\x03"), h2.ErrorCode.COMPRESSION_ERROR),
    "a flood of CONTINUATION": (
        h2.frame(h2.HEADERS, 0, 1, b"") + h2.frame(h2.CONTINUATION, 0, 1, b"\x82") * 100,
        h2.ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "an endless header block": (
        h2.frame(h2.HEADERS, 0, 1, bytes(10_000)) + h2.frame(h2.CONTINUATION, 0, 1, bytes(16_000)) * 3,
        h2.ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "a flood of PING": (h2.frame(h2.PING, 0, 0, b"12345678") * 3000, h2.ErrorCode.ENHANCE_YOUR_CALM),
    "a flood of SETTINGS": (h2.settings([(4, 65535)]) * 3000, h2.ErrorCode.ENHANCE_YOUR_CALM),
    "a flood of empty DATA": (OPEN_STREAM + h2.frame(h2.DATA, 0, 1) * 3000, h2.ErrorCode.ENHANCE_YOUR_CALM),
    "a flood of WINDOW_UPDATE": (h2.window_update(0, 1) * 3000, h2.ErrorCode.ENHANCE_YOUR_CALM),
    "a flood of PRIORITY": (h2.frame(h2.PRIORITY, 0, 1, b"\0\0\0\0\1") * 3000, h2.ErrorCode.ENHANCE_YOUR_CALM),
    "a flood of unknown frames": (h2.frame(99, 0, 0, b"x") * 3000, h2.ErrorCode.ENHANCE_YOUR_CALM),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_peer_that_breaks_the_rules_is_told_which_and_cut_off(server, name):
    sent, code = BROKEN[name]
    with raw_client(server) as raw:
        raw.send(sent)
        assert raw.goaway() == code


def test_a_first_frame_that_is_no_settings_is_an_error(server):
    for first in (h2.frame(h2.PING, 0, 0, b"12345678"), OPEN, h2.frame(h2.DATA, 0, 1, b"x")):
        with raw_client(server, h2.PREFACE + first) as raw:
            assert raw.goaway() == h2.ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("hello", [b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nSMxx", b"\0" * 24, b"hello"])
def test_a_peer_that_speaks_something_else_is_cut_off(server, hello):
    with raw_client(server, hello) as raw:
        assert raw.goaway() == h2.ErrorCode.PROTOCOL_ERROR
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
            raw.send(call(n, payload=slow), h2.reset(n, h2.ErrorCode.CANCEL))
        assert raw.goaway() == h2.ErrorCode.ENHANCE_YOUR_CALM
        assert server.service.cancelled == server.service.asked <= 2048


MADE_RESETS = {
    "WINDOW_UPDATE of 0": lambda n: h2.frame(h2.HEADERS, h2.END_HEADERS, n, block()) + h2.window_update(n, 0),
    "a window over 2³¹ − 1": lambda n: h2.frame(h2.HEADERS, h2.END_HEADERS, n, block()) + h2.window_update(n, (1 << 31) - 1),
    "HEADERS that are no trailers": lambda n: h2.frame(h2.HEADERS, h2.END_HEADERS, n, block()) * 2,
    "less than content-length": lambda n: call(n, content_length="9999"),
    "content-length without data": lambda n: h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, n, block(content_length="9")),
    "malformed headers": lambda n: h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, n, block(te="gzip")),
}


@pytest.mark.parametrize("name", MADE_RESETS)
def test_resets_that_a_client_makes_us_do_count_as_its_own(name):
    async def check():
        service = FakeService()
        one = MADE_RESETS[name]
        _, transport = feed(service, [HELLO, *(one(n) for n in range(1, 4201, 2))])  # 2100 of them
        frames = split_frames(bytes(transport.written))
        (code,) = {struct.unpack(">I", payload[4:8])[0] for kind, _, _, payload in frames if kind == h2.GOAWAY}
        assert code == h2.ErrorCode.ENHANCE_YOUR_CALM
        assert sum(kind == h2.RST_STREAM for kind, *_ in frames) <= 2048
        assert transport.closed

    run(check())


def test_resets_among_answered_calls_are_no_flood():
    async def check():
        bad = MADE_RESETS["less than content-length"]
        calls = [bad(n) if n % 6 == 1 else call(n) for n in range(1, 12_601, 2)]  # every third
        _, transport = feed(FakeService(), [HELLO + h2.window_update(0, 1 << 30), *calls])
        assert not transport.closed
        assert sum(kind == h2.RST_STREAM for kind, *_ in split_frames(bytes(transport.written))) == 2100

    run(check())


def test_a_header_bomb_is_stopped(server):
    encoder = hpack.Encoder()
    big = [("x", "v" * 3000)]
    first = encoder.encode([(":method", "POST"), (":path", INFER), (":scheme", "http"), *big])
    bomb = encoder.encode([(":method", "POST"), (":path", INFER), (":scheme", "http"), *big * 5000])
    assert len(bomb) < 10_000
    with raw_client(server) as raw:
        raw.send(
            h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, first),
            h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 3, bomb),
        )
        assert raw.goaway() == h2.ErrorCode.ENHANCE_YOUR_CALM


def test_too_many_streams_are_refused_and_the_others_live(server):
    head = block(STREAM_INFER)
    with raw_client(server) as raw:
        raw.send(*[h2.frame(h2.HEADERS, h2.END_HEADERS, 2 * n + 1, head) for n in range(1025)])
        assert raw.reset(2049) == h2.ErrorCode.REFUSED_STREAM
        raw.send(h2.frame(h2.DATA, h2.END_STREAM, 1, message()))
        assert raw.status(1) == 0


def test_a_client_that_sends_more_than_its_window_loses_the_stream(server, monkeypatch):
    with raw_client(server) as raw:
        size = (1 << 26) - 1000
        for n in (1, 3, 5):
            raw.send(h2.frame(h2.HEADERS, h2.END_HEADERS, n, block()), h2.frame(h2.DATA, 0, n, b"\0" + struct.pack(">I", size)))
        assert struct.unpack(">I", raw.until(h2.WINDOW_UPDATE, 1))[0] == size - 65536 + 5
        assert raw.until(h2.WINDOW_UPDATE, 3) is not None
        # No more is lent: the third has its first window only.
        raw.send(*[h2.frame(h2.DATA, 0, 5, bytes(16_000))] * 5)
        assert raw.reset(5) == h2.ErrorCode.FLOW_CONTROL_ERROR
        raw.send(call(7))
        assert raw.status(7) == 0


def test_memory_for_messages_is_lent_again_when_it_was_given_back(server):
    with raw_client(server) as raw:
        size = (1 << 26) - 1000
        for n in (1, 3, 5):
            raw.send(h2.frame(h2.HEADERS, h2.END_HEADERS, n, block()), h2.frame(h2.DATA, 0, n, b"\0" + struct.pack(">I", size)))
        raw.until(h2.WINDOW_UPDATE, 3)
        raw.send(h2.frame(h2.PING, 0, 0, b"12345678"))
        assert raw.next_frame()[0] == h2.PING
        raw.send(h2.reset(1, h2.ErrorCode.CANCEL))
        assert raw.until(h2.WINDOW_UPDATE, 5) is not None


def test_a_client_that_does_not_read_is_not_answered_without_end(monkeypatch):
    monkeypatch.setattr(grpc_connection, "MIN_BUDGET", 1 << 20)
    hello = HELLO + h2.settings([(h2.INITIAL_WINDOW_SIZE, (1 << 31) - 1)]) + h2.window_update(0, (1 << 31) - 70_000)
    with serving(FakeService(max_message_bytes=1000)) as server, raw_client(server, hello) as raw:
        big = infer_request("big", bytes=4 << 20).SerializeToString()
        for n in range(1, 100, 2):
            raw.send(call(n, payload=big))
            time.sleep(0.002)
        (connection,) = server.service.connections
        queued = server.call(lambda: connection.output.queued + connection.transport.get_write_buffer_size())
        assert queued < 24 << 20
        assert server.service.asked < 12
        # And who reads late gets all.
        statuses, size = [], 0
        while len(statuses) < 50:
            kind, flags, _, payload = raw.next_frame()
            size += len(payload) if kind == h2.DATA else 0
            if kind == h2.HEADERS:
                headers = dict(raw.decoder.decode(payload))
                statuses += [headers["grpc-status"]] if flags & h2.END_STREAM else []
        assert statuses.count("0") == server.service.asked
        assert statuses.count("8") == 50 - server.service.asked
        assert size > server.service.asked * (4 << 20)


def test_a_client_that_only_asks_and_never_reads_is_read_no_more_until_it_reads():
    async def main():
        connection, transport = feed(FakeService(), [HELLO])
        connection.pause_writing()  # what a transport does that has too much to send
        head, n = block("/nothing"), 1
        while not transport.reading_paused:
            connection.data_received(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, n, head))
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
    whole = HELLO + call(1) + call(3, STREAM_INFER) + h2.frame(h2.GOAWAY, 0, 0, bytes(8))
    for end in range(0, len(whole), 7):
        with raw_client(server, whole[:end]):
            pass
    end = time.monotonic() + 5
    while server.service.connections:
        assert time.monotonic() < end
        time.sleep(0.01)
