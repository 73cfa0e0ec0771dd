"""HTTP/2 and gRPC as bytes: what a peer that keeps the rules, but uses all of them, gets."""

import struct
import zlib

import hpack
import pytest
from grpc_server import infer_request, serving
from http2_client import HELLO, INFER, LIVE, STREAM_INFER, block, call, fields, message, raw_client

from hurtle.serving.grpc.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WITH_PRIORITY,
    ErrorCode,
    encode_headers,
    frame,
    settings,
    window_update,
)
from hurtle.serving.protos import ModelInferResponse, ModelStreamInferResponse


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.fixture
def raw(server):
    with raw_client(server) as found:
        yield found


def test_settings_and_pings_are_acknowledged(raw):
    kind, flags, _, payload = raw.next_frame()
    assert (kind, flags) == (SETTINGS, 0)
    announced = dict(struct.iter_unpack(">HI", payload))
    assert announced[3] == 1024
    raw.send(frame(PING, 0, 0, b"12345678"), frame(PING, ACK, 0, b"87654321"))
    while (found := raw.next_frame())[0] != PING:
        if found[0] == SETTINGS:
            assert found[1] == ACK
    assert found[1:] == (ACK, 0, b"12345678")


def test_bytes_may_come_one_by_one(server):
    with raw_client(server, b"") as raw:
        for byte in HELLO + call():
            raw.send(bytes([byte]))
        headers, data = raw.answer(1)
        assert headers == {":status": "200", "content-type": "application/grpc", "grpc-status": "0"}
        assert data[0] == 0
        assert struct.unpack(">I", data[1:5])[0] == len(data) - 5
        assert ModelInferResponse.FromString(data[5:]).model_name == "echo"


def test_a_message_may_come_in_any_pieces(raw):
    whole = message()
    for n in range(1, len(whole)):
        raw.send(
            frame(HEADERS, END_HEADERS, 2 * n - 1, block()),
            frame(DATA, 0, 2 * n - 1, whole[:n]),
            frame(DATA, END_STREAM, 2 * n - 1, whole[n:]),
        )
        assert raw.status(2 * n - 1) == 0


def test_the_end_may_come_by_an_empty_frame_or_by_trailers(raw):
    raw.send(frame(HEADERS, END_HEADERS, 1, block()), frame(DATA, 0, 1, message()), frame(DATA, END_STREAM, 1))
    assert raw.status(1) == 0
    raw.send(frame(HEADERS, END_HEADERS, 3, block()), frame(DATA, 0, 3, message()))
    raw.send(frame(HEADERS, END_HEADERS | END_STREAM, 3, encode_headers([(b"some", b"trailer")])))
    assert raw.status(3) == 0


def test_headers_may_be_continued_padded_and_have_a_priority(raw):
    head = block()
    raw.send(
        frame(HEADERS, 0, 1, head[:5]), frame(CONTINUATION, 0, 1, head[5:9]), frame(CONTINUATION, END_HEADERS, 1, head[9:])
    )
    raw.send(frame(DATA, END_STREAM | PADDED, 1, b"\x07" + message() + bytes(7)))
    assert raw.status(1) == 0
    raw.send(frame(PRIORITY, 0, 9, b"\0\0\0\0\5"))
    raw.send(frame(HEADERS, END_HEADERS | PADDED | WITH_PRIORITY, 3, b"\x02\0\0\0\1\5" + head + b"\0\0"))
    raw.send(frame(DATA, END_STREAM, 3, message()))
    assert raw.status(3) == 0


def test_unknown_frames_and_settings_are_ignored(raw):
    raw.send(frame(77, 0xFF, 5, b"what"), settings([(99, 5)]), call())
    assert raw.status(1) == 0


def test_cached_header_blocks_are_forgotten_when_the_table_changes(server, raw):
    encoder = hpack.Encoder()
    for n, (path, more) in enumerate(
        [
            (INFER, {}),
            (INFER, {}),
            (INFER, {}),
            (LIVE, {}),
            (INFER, {"x": "y"}),
            (LIVE, {}),
            (INFER, {}),
            (INFER, {"x": "z"}),
            (LIVE, {}),
        ]
    ):
        raw.send(frame(HEADERS, END_HEADERS, 2 * n + 1, block(path, encoder, **more)))
        raw.send(frame(DATA, END_STREAM, 2 * n + 1, message() if path == INFER else message(b"")))
        data = raw.answer(2 * n + 1)[1]
        assert (data[5:] == b"\x08\x01") == (path == LIVE)
    # The same bytes with another table: the path that index 62 means has changed.
    literal = b"\x44" + bytes([len(LIVE)]) + LIVE.encode()
    rest = encode_headers([(b"content-type", b"application/grpc")])
    for n, (first, path) in enumerate(
        [(b"\x44" + bytes([len(INFER)]) + INFER.encode(), INFER), (b"\xbe", INFER), (literal, LIVE), (b"\xbe", LIVE)], 20
    ):
        raw.send(frame(HEADERS, END_HEADERS, 2 * n + 1, b"\x83\x86" + first + rest))
        raw.send(frame(DATA, END_STREAM, 2 * n + 1, message() if path == INFER else message(b"")))
        assert (raw.answer(2 * n + 1)[1][5:] == b"\x08\x01") == (path == LIVE)


def test_answers_keep_to_the_stream_s_window(server):
    big = infer_request("big", bytes=5000).SerializeToString()
    with raw_client(server, PREFACE + settings([(INITIAL_WINDOW_SIZE, 0)])) as raw:
        raw.send(call(1, payload=big), frame(PING, 0, 0, b"12345678"))
        raw.until(PING)  # came after whatever was sent of the answer
        raw.send(window_update(1, 10))
        assert len(raw.until(DATA)) == 10
        raw.send(settings([(INITIAL_WINDOW_SIZE, 1000)]))
        assert len(raw.until(DATA)) == 1000
        raw.send(settings([(INITIAL_WINDOW_SIZE, 400)]), window_update(1, 700))  # 600 in debt, then 100 to spend
        assert len(raw.until(DATA)) == 100
        raw.send(window_update(1, 100_000))
        headers, data = raw.answer(1)
        assert headers["grpc-status"] == "0"
        assert 1110 + len(data) == len(ModelInferResponse.FromString(_big(server)).SerializeToString()) + 5


def _big(server):
    with raw_client(server) as raw:
        raw.send(call(1, payload=infer_request("big", bytes=5000).SerializeToString()))
        return raw.answer(1)[1][5:]


def test_answers_keep_to_the_connection_s_window_and_streams_take_turns(server):
    big = infer_request("big", bytes=100_000).SerializeToString()
    with raw_client(server, PREFACE + settings([(INITIAL_WINDOW_SIZE, 1 << 20)])) as raw:
        raw.send(call(1, payload=big), call(3, payload=big), frame(PING, 0, 0, b"12345678"))
        sizes = {1: 0, 3: 0}
        while (found := raw.next_frame())[0] != PING:
            if found[0] == DATA:
                assert len(found[3]) <= 1 << 14
                sizes[found[2]] += len(found[3])
        assert sum(sizes.values()) == 65535
        raw.send(window_update(0, 40_000))
        for _ in range(3):
            payload = raw.next_frame()
            sizes[payload[2]] += len(payload[3])
        assert sum(sizes.values()) == 105_535
        assert min(sizes.values()) > 10_000
        raw.send(window_update(0, 1 << 20))
        assert {len(raw.answer(1)[1]) > 0, True} == {True}


def test_a_stream_that_is_reset_sends_no_more_and_the_window_goes_to_others(server):
    big = infer_request("big", bytes=100_000).SerializeToString()
    with raw_client(server, PREFACE + settings([(INITIAL_WINDOW_SIZE, 1 << 20)])) as raw:
        raw.send(call(1, payload=big), frame(PING, 0, 0, b"12345678"))
        raw.until(PING)
        raw.send(frame(RST_STREAM, 0, 1, bytes(4)), call(3), window_update(0, 1 << 20))
        assert raw.status(3) == 0
        (connection,) = [found for found in server.service.connections if found.last_id == 3 and not found.streams]
        assert connection.output.queued == 0


def test_a_smaller_header_table_is_acknowledged_in_the_next_headers(server):
    with raw_client(server, PREFACE + settings([(HEADER_TABLE_SIZE, 0)])) as raw:
        raw.decoder.max_allowed_table_size = 0
        for n in (1, 3):
            raw.send(call(n))
            assert raw.status(n) == 0


def test_a_request_that_is_not_grpc_gets_an_http_status(raw):
    raw.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, block(__method="GET")))
    assert raw.answer(1)[0] == {":status": "405"}
    raw.send(frame(HEADERS, END_HEADERS, 3, block(content_type="text/plain")))
    assert raw.answer(3)[0] == {":status": "415"}


@pytest.mark.parametrize(
    "changed",
    [
        fields()[:2] + fields()[3:],
        fields()[1:],
        [*fields(), ("Upper", "x")],
        [*fields(), (":late", "x")],
        [*fields(), (":path", "/again")],
        [*fields(), ("connection", "close")],
        [*fields(), ("", "x")],
    ],
)
def test_malformed_headers_end_the_stream_alone(raw, changed):
    raw.send(frame(HEADERS, END_HEADERS, 1, hpack.Encoder().encode(changed)))
    assert raw.reset(1) == ErrorCode.PROTOCOL_ERROR
    raw.send(call(3))
    assert raw.status(3) == 0


@pytest.mark.parametrize("timeout", ["", "5", "S", "123456789S", "-1S", "5x", "1.5S", "5S "])
def test_a_malformed_timeout_is_refused(raw, timeout):
    raw.send(call(grpc_timeout=timeout))
    assert raw.status(1) == 3


@pytest.mark.parametrize(
    ("timeout", "seconds"), [("2H", 7200), ("3M", 180), ("4S", 4), ("500m", 0.5), ("70000u", 0.07), ("99999999n", 0.099999999)]
)
def test_a_timeout_has_its_unit(server, raw, timeout, seconds):
    import time

    before = time.monotonic()
    raw.send(call(grpc_timeout=timeout))
    raw.answer(1)
    assert before <= server.service.requests[-1].deadline - seconds + 1e-6
    assert server.service.requests[-1].deadline - seconds - 1e-6 <= time.monotonic()


def test_a_request_that_comes_after_its_deadline_is_not_run(server, raw):
    before = server.service.asked
    for n, timeout in enumerate(("1n", "0S", "1u")):
        raw.send(call(2 * n + 1, grpc_timeout=timeout))
        assert raw.status(2 * n + 1) == 4
    assert server.service.asked == before


def test_an_unknown_compression_is_unimplemented_and_the_known_are_named(raw):
    raw.send(call(grpc_encoding="snappy"))
    headers, _ = raw.answer(1)
    assert headers["grpc-status"] == "12"
    assert "gzip" in headers["grpc-accept-encoding"]
    assert "snappy" in headers["grpc-message"]


@pytest.mark.parametrize(
    ("data", "flag", "encoding", "status"),
    [
        (zlib.compress(infer_request().SerializeToString()), 1, "deflate", 0),
        (infer_request().SerializeToString(), 0, "gzip", 0),
        (infer_request().SerializeToString(), 1, None, 13),
        (infer_request().SerializeToString(), 2, "gzip", 13),
        (b"no zlib", 1, "deflate", 3),
        (zlib.compress(b"x" * 1000)[:-3], 1, "deflate", 3),
        (zlib.compress(b"") + b"more", 1, "deflate", 3),
    ],
)
def test_compressed_messages_are_what_they_say_or_refused(raw, data, flag, encoding, status):
    raw.send(frame(HEADERS, END_HEADERS, 1, block(grpc_encoding=encoding)), frame(DATA, END_STREAM, 1, message(data, flag)))
    assert raw.status(1) == status


def test_a_message_that_is_cut_is_refused(raw):
    for n, data in enumerate([message()[:-1], b"\0\0", message() + b"\0"]):
        raw.send(frame(HEADERS, END_HEADERS, 2 * n + 1, block()), frame(DATA, END_STREAM, 2 * n + 1, data))
        assert raw.status(2 * n + 1) == 3


def test_an_error_before_the_client_s_end_also_stops_the_client(raw):
    raw.send(frame(HEADERS, END_HEADERS, 1, block("/nothing")))
    assert raw.status(1) == 12
    assert raw.reset(1) == ErrorCode.NO_ERROR
    raw.send(frame(DATA, 0, 1, b"late"), frame(DATA, END_STREAM, 1, b"later"), call(3))  # no fault of the client's
    assert raw.status(3) == 0


def test_a_stream_s_window_is_given_back_as_its_messages_are_taken(raw):
    raw.send(settings([(INITIAL_WINDOW_SIZE, 1 << 20)]), window_update(0, 1 << 20))
    raw.send(frame(HEADERS, END_HEADERS, 1, block(STREAM_INFER)))
    one = message(infer_request(request_id="x" * 8000).SerializeToString())
    for _ in range(40):  # 320 KB through a window of 64
        raw.send(frame(DATA, 0, 1, one))
        payload = raw.until(DATA, 1)
        assert len(ModelStreamInferResponse.FromString(payload[5:]).infer_response.id) == 8000
    raw.send(frame(DATA, END_STREAM, 1))
    assert raw.status(1) == 0
