"""RFC 9113 and RFC 7541, section by section: what must be accepted, and the error code of what must not."""

import struct

import hpack
import pytest
from grpc_server import serving
from http2_client import HELLO, INFER, OPEN, OPEN_STREAM, STREAM_INFER, block, call, fields, message, raw_client

from hurtle.serving.grpc import http2_frames as h2

PROTOCOL_ERROR, STREAM_CLOSED = h2.ErrorCode.PROTOCOL_ERROR, h2.ErrorCode.STREAM_CLOSED
FRAME_SIZE_ERROR, FLOW_CONTROL_ERROR = h2.ErrorCode.FRAME_SIZE_ERROR, h2.ErrorCode.FLOW_CONTROL_ERROR
COMPRESSION_ERROR = h2.ErrorCode.COMPRESSION_ERROR
LARGEST = (1 << 31) - 1
BLOCK = block()
BODY = message()
END = h2.frame(h2.DATA, h2.END_STREAM, 1, BODY)
SPARE = b"12345678"


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


def headers(*more, without=(), path=INFER):
    """A request's header block with fields added or left out; a name may stand twice."""
    return hpack.Encoder().encode([*(field for field in fields(path) if field[0] not in without), *more])


def opened(block, flags=h2.END_HEADERS):
    return h2.frame(h2.HEADERS, flags, 1, block)


ACCEPTED = {
    "4.1 frames of an unknown type": h2.frame(0xFF, 0, 0, SPARE) + h2.frame(0x10, 0xFF, 1, SPARE) + call(),
    "4.1 undefined flags": h2.frame(h2.HEADERS, h2.END_HEADERS | 0x80 | 0x40, 1, BLOCK)
    + h2.frame(h2.DATA, h2.END_STREAM | 0x42, 1, BODY),
    "4.1 the reserved bit": h2.frame(h2.HEADERS, h2.END_HEADERS, 1 | 1 << 31, BLOCK)
    + h2.frame(h2.DATA, h2.END_STREAM, 1 | 1 << 31, BODY),
    "4.2 a frame of 2¹⁴ bytes": h2.frame(h2.PRIORITY, 0, 1, b"\0\0\0\0\1") + h2.frame(0x20, 0, 0, bytes(1 << 14)) + call(),
    "4.3 an empty CONTINUATION": h2.frame(h2.HEADERS, 0, 1, BLOCK) + h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1) + END,
    "5.1 PRIORITY on an idle stream": h2.frame(h2.PRIORITY, 0, 7, b"\0\0\0\0\1") + call(),
    "5.1 PRIORITY on a half-closed stream": OPEN + END + h2.frame(h2.PRIORITY, 0, 1, b"\0\0\0\3\1"),
    "5.1 WINDOW_UPDATE after the end": call() + h2.window_update(1, 100),
    "5.1 RST_STREAM after the end": call() + h2.reset(1, h2.ErrorCode.CANCEL),
    "5.1.1 streams passed over": h2.frame(h2.HEADERS, h2.END_HEADERS, 1, BLOCK) + END + call(2001),
    "5.3 a dependency on a stream that is not there": h2.frame(h2.PRIORITY, 0, 1, b"\x80\0\0\x63\xff") + call(),
    "6.1 padding": OPEN
    + h2.frame(h2.DATA, h2.PADDED, 1, b"\x03" + BODY[:7] + bytes(3))
    + h2.frame(h2.DATA, h2.END_STREAM, 1, BODY[7:]),
    "6.1 nothing but padding": OPEN + h2.frame(h2.DATA, h2.PADDED, 1, b"\x04" + bytes(4)) + END,
    "6.2 padding and priority": opened(
        b"\x02" + b"\0\0\0\3\x10" + BLOCK + bytes(2), h2.END_HEADERS | h2.PADDED | h2.WITH_PRIORITY
    )
    + END,
    "6.4 RST_STREAM with an unknown code": call() + h2.frame(h2.RST_STREAM, 0, 1, b"\0\0\0\xff"),
    "6.5 SETTINGS of nothing": h2.frame(h2.SETTINGS, 0, 0) + call(),
    "6.5 an unknown setting": h2.settings([(0xFF, 1)]) + call(),
    "6.5 a setting that comes twice": h2.settings([(4, 0), (4, 1 << 20)]) + call(),
    "6.5 an acknowledgement": h2.frame(h2.SETTINGS, h2.ACK, 0) + call(),
    "6.5.2 the largest values": h2.settings([(1, (1 << 32) - 1), (2, 1), (3, 0), (4, LARGEST), (5, (1 << 24) - 1)]) + call(),
    "6.7 a PING's acknowledgement": h2.frame(h2.PING, h2.ACK, 0, SPARE) + call(),
    "6.8 GOAWAY with an unknown code": h2.frame(h2.GOAWAY, 0, 0, b"\0\0\0\0\0\0\0\xffwhy") + call(),
    "6.9 the largest window": h2.window_update(0, LARGEST - 65535) + call(),
    "6.9.2 a window below zero": OPEN + h2.settings([(4, 0)]) + END + h2.settings([(4, 1 << 16)]),
    "6.10 several CONTINUATIONs": h2.frame(h2.HEADERS, 0, 1, BLOCK[:9])
    + h2.frame(h2.CONTINUATION, 0, 1, BLOCK[9:11])
    + h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, BLOCK[11:])
    + END,
    "8.1 trailers": OPEN
    + h2.frame(h2.DATA, 0, 1, BODY)
    + opened(hpack.Encoder().encode([("x-end", "1")]), h2.END_HEADERS | h2.END_STREAM),
    "8.1.1 the right content-length": opened(headers(("content-length", str(len(BODY))))) + END,
    "8.1.1 the right content-length, in pieces": opened(headers(("content-length", str(len(BODY)))))
    + h2.frame(h2.DATA, h2.PADDED, 1, b"\x03" + BODY[:7] + bytes(3))
    + h2.frame(h2.DATA, h2.END_STREAM, 1, BODY[7:]),
    "8.2.1 a value with spaces around it": opened(headers(("x-note", " a "))) + END,
    "8.2.2 no te": opened(headers(without=["te"])) + END,
    "8.3.1 an authority": opened(hpack.Encoder().encode([(":authority", "host:1"), *fields()])) + END,
    "7541 6.3 a smaller table": opened(b"\x20" + BLOCK) + END,
    "7541 6.3 two sizes of the table": opened(b"\x20\x3f\xe1\x1f" + BLOCK) + END,
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_the_rules_allow_is_accepted(server, name):
    with raw_client(server) as raw:
        raw.send(ACCEPTED[name])
        assert raw.status(1 if "passed over" not in name else 2001) == 0
        raw.send(h2.frame(h2.PING, 0, 0, SPARE))
        assert raw.until(h2.PING) == SPARE


FATAL = {
    "3.4 a first frame that is no SETTINGS": (h2.PREFACE + h2.window_update(0, 1), PROTOCOL_ERROR),
    "4.2 DATA over 2¹⁴ bytes": (HELLO + OPEN + h2.frame_head((1 << 14) + 1, h2.DATA, 0, 1), FRAME_SIZE_ERROR),
    "4.2 HEADERS over 2¹⁴ bytes": (HELLO + h2.frame_head((1 << 14) + 1, h2.HEADERS, h2.END_HEADERS, 1), FRAME_SIZE_ERROR),
    "4.3 a header block that cannot be decoded": (HELLO + opened(b"\xff\xff\xff\xff\xff"), COMPRESSION_ERROR),
    "4.3 PRIORITY within a header block": (
        HELLO + h2.frame(h2.HEADERS, 0, 1, BLOCK) + h2.frame(h2.PRIORITY, 0, 1, b"\0\0\0\0\1"), PROTOCOL_ERROR,
    ),
    "4.3 HEADERS of another stream within a header block": (
        HELLO + h2.frame(h2.HEADERS, 0, 1, BLOCK) + h2.frame(h2.HEADERS, h2.END_HEADERS, 3, BLOCK), PROTOCOL_ERROR,
    ),
    "5.1 idle: DATA": (HELLO + h2.frame(h2.DATA, h2.END_STREAM, 1, b"x"), PROTOCOL_ERROR),
    "5.1 idle: RST_STREAM": (HELLO + h2.reset(1, h2.ErrorCode.CANCEL), PROTOCOL_ERROR),
    "5.1 idle: WINDOW_UPDATE": (HELLO + h2.window_update(1, 100), PROTOCOL_ERROR),
    "5.1 idle: CONTINUATION": (HELLO + h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, BLOCK), PROTOCOL_ERROR),
    "5.1 half-closed: DATA": (HELLO + call() + h2.frame(h2.DATA, h2.END_STREAM, 1, b"x"), STREAM_CLOSED),
    "5.1 half-closed: HEADERS": (HELLO + call() + OPEN, STREAM_CLOSED),
    "5.1 closed by RST_STREAM: DATA": (HELLO + OPEN_STREAM + h2.reset(1, h2.ErrorCode.CANCEL) + END, STREAM_CLOSED),
    "5.1 closed by RST_STREAM: HEADERS": (HELLO + OPEN_STREAM + h2.reset(1, h2.ErrorCode.CANCEL) + OPEN, STREAM_CLOSED),
    "5.1.1 an even stream": (HELLO + h2.frame(h2.HEADERS, h2.END_HEADERS, 2, BLOCK), PROTOCOL_ERROR),
    "5.1.1 an even stream below the last": (HELLO + call(5) + h2.frame(h2.HEADERS, h2.END_HEADERS, 4, BLOCK), PROTOCOL_ERROR),
    "5.1.1 a stream that was passed over": (HELLO + call(5) + h2.frame(h2.HEADERS, h2.END_HEADERS, 3, BLOCK), PROTOCOL_ERROR),
    "5.1.1 the first stream, passed over": (HELLO + call(9) + h2.frame(h2.HEADERS, h2.END_HEADERS, 1, BLOCK), PROTOCOL_ERROR),
    "5.3.1 HEADERS that depend on themselves": (
        HELLO + opened(b"\0\0\0\1\0" + BLOCK, h2.END_HEADERS | h2.WITH_PRIORITY), PROTOCOL_ERROR,
    ),
    "5.3.1 PRIORITY that depends on itself": (HELLO + h2.frame(h2.PRIORITY, 0, 1, b"\x80\0\0\1\0"), PROTOCOL_ERROR),
    "5.5 an unknown frame within a header block": (
        HELLO + h2.frame(h2.HEADERS, 0, 1, BLOCK) + h2.frame(0x20, 0, 1), PROTOCOL_ERROR,
    ),
    "6.1 DATA on stream 0": (HELLO + h2.frame(h2.DATA, 0, 0, b"x"), PROTOCOL_ERROR),
    "6.1 more padding than DATA": (HELLO + OPEN + h2.frame(h2.DATA, h2.PADDED, 1, b"\x06abcd"), PROTOCOL_ERROR),
    "6.2 HEADERS on stream 0": (HELLO + h2.frame(h2.HEADERS, h2.END_HEADERS, 0, BLOCK), PROTOCOL_ERROR),
    "6.2 more padding than HEADERS": (HELLO + opened(b"\xff" + BLOCK, h2.END_HEADERS | h2.PADDED), PROTOCOL_ERROR),
    "6.3 PRIORITY on stream 0": (HELLO + h2.frame(h2.PRIORITY, 0, 0, b"\0\0\0\1\1"), PROTOCOL_ERROR),
    "6.3 PRIORITY of 4 bytes": (HELLO + h2.frame(h2.PRIORITY, 0, 1, b"\0\0\0\0"), FRAME_SIZE_ERROR),
    "6.4 RST_STREAM on stream 0": (HELLO + h2.reset(0, h2.ErrorCode.CANCEL), PROTOCOL_ERROR),
    "6.4 RST_STREAM of 3 bytes": (HELLO + OPEN + h2.frame(h2.RST_STREAM, 0, 1, b"\0\0\0"), FRAME_SIZE_ERROR),
    "6.5 an acknowledgement with a payload": (HELLO + h2.frame(h2.SETTINGS, h2.ACK, 0, bytes(6)), FRAME_SIZE_ERROR),
    "6.5 SETTINGS on a stream": (HELLO + h2.frame(h2.SETTINGS, 0, 1, bytes(6)), PROTOCOL_ERROR),
    "6.5 SETTINGS of 3 bytes": (HELLO + h2.frame(h2.SETTINGS, 0, 0, bytes(3)), FRAME_SIZE_ERROR),
    "6.5.2 ENABLE_PUSH of 2": (HELLO + h2.settings([(2, 2)]), PROTOCOL_ERROR),
    "6.5.2 INITIAL_WINDOW_SIZE of 2³¹": (HELLO + h2.settings([(4, 1 << 31)]), FLOW_CONTROL_ERROR),
    "6.5.2 MAX_FRAME_SIZE below 2¹⁴": (HELLO + h2.settings([(5, (1 << 14) - 1)]), PROTOCOL_ERROR),
    "6.5.2 MAX_FRAME_SIZE of 2²⁴": (HELLO + h2.settings([(5, 1 << 24)]), PROTOCOL_ERROR),
    "6.7 PING on a stream": (HELLO + h2.frame(h2.PING, 0, 1, SPARE), PROTOCOL_ERROR),
    "6.7 PING of 6 bytes": (HELLO + h2.frame(h2.PING, 0, 0, SPARE[:6]), FRAME_SIZE_ERROR),
    "6.8 GOAWAY on a stream": (HELLO + h2.frame(h2.GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR),
    "6.8 GOAWAY of 7 bytes": (HELLO + h2.frame(h2.GOAWAY, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
    "6.9 WINDOW_UPDATE of 0": (HELLO + h2.window_update(0, 0), PROTOCOL_ERROR),
    "6.9 WINDOW_UPDATE of 3 bytes": (HELLO + h2.frame(h2.WINDOW_UPDATE, 0, 0, b"\0\0\1"), FRAME_SIZE_ERROR),
    "6.9.1 the connection's window over 2³¹ − 1": (HELLO + h2.window_update(0, LARGEST), FLOW_CONTROL_ERROR),
    "6.9.2 a stream's window over 2³¹ − 1, by SETTINGS": (
        HELLO + OPEN_STREAM + h2.window_update(1, LARGEST - 65535) + h2.settings([(4, 65536)]), FLOW_CONTROL_ERROR,
    ),
    "6.10 CONTINUATION on stream 0": (
        HELLO + h2.frame(h2.HEADERS, 0, 1, BLOCK) + h2.frame(h2.CONTINUATION, 4, 0), PROTOCOL_ERROR,
    ),
    "6.10 CONTINUATION after END_HEADERS": (HELLO + OPEN + h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1), PROTOCOL_ERROR),
    "6.10 CONTINUATION after a CONTINUATION with END_HEADERS": (
        HELLO + h2.frame(h2.HEADERS, 0, 1, BLOCK) + h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1) * 2, PROTOCOL_ERROR,
    ),
    "6.10 CONTINUATION after DATA": (
        HELLO + OPEN + h2.frame(h2.DATA, 0, 1, BODY) + h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1), PROTOCOL_ERROR,
    ),
    "8.4 PUSH_PROMISE": (HELLO + OPEN + h2.frame(h2.PUSH_PROMISE, h2.END_HEADERS, 1, b"\0\0\0\2" + BLOCK), PROTOCOL_ERROR),
    "7541 2.3.3 an index that is not there": (HELLO + opened(BLOCK + b"\xff\x20"), COMPRESSION_ERROR),
    "7541 2.3.3 a name's index that is not there": (HELLO + opened(BLOCK + b"\x7f\x20\1a"), COMPRESSION_ERROR),
    "7541 4.2 a table's size after fields": (HELLO + opened(BLOCK + b"\x20"), COMPRESSION_ERROR),
    "7541 5.2 Huffman padding over 7 bits": (HELLO + opened(BLOCK + b"\0\1a\x82\x1f\xff"), COMPRESSION_ERROR),
    "7541 5.2 Huffman padding of zeros": (HELLO + opened(BLOCK + b"\0\1a\x81\x18"), COMPRESSION_ERROR),
    "7541 5.2 Huffman's EOS": (HELLO + opened(BLOCK + b"\0\1a\x84\xff\xff\xff\xff"), COMPRESSION_ERROR),
    "7541 6.1 index 0": (HELLO + opened(BLOCK + b"\x80"), COMPRESSION_ERROR),
    "7541 6.3 a table over ours": (HELLO + opened(b"\x3f\xe2\x1f" + BLOCK), COMPRESSION_ERROR),
}  # fmt: skip


@pytest.mark.parametrize("name", FATAL)
def test_what_ends_the_connection_is_said(server, name):
    sent, code = FATAL[name]
    with raw_client(server, sent) as raw:
        assert raw.goaway() == code
        assert raw.next_frame() is None


MALFORMED = {
    "5.1.1 HEADERS again without END_STREAM": OPEN + OPEN,
    "8.1 pseudo-headers in trailers": OPEN
    + h2.frame(h2.DATA, 0, 1, BODY)
    + opened(hpack.Encoder().encode([(":method", "POST")]), h2.END_HEADERS | h2.END_STREAM),
    "8.1 :status in trailers": OPEN + opened(hpack.Encoder().encode([(":status", "200")]), h2.END_HEADERS | h2.END_STREAM),
    "8.1 capitals in trailers": OPEN + opened(hpack.Encoder().encode([("X-End", "1")]), h2.END_HEADERS | h2.END_STREAM),
    "8.1.1 less data than content-length": opened(headers(("content-length", str(len(BODY) + 1)))) + END,
    "8.1.1 more data than content-length": opened(headers(("content-length", str(len(BODY) - 1)))) + END,
    "8.1.1 more data than content-length, in pieces": opened(headers(("content-length", "9")))
    + h2.frame(h2.DATA, 0, 1, BODY[:5])
    + h2.frame(h2.DATA, 0, 1, BODY[5:]),
    "8.1.1 no data, but content-length": opened(headers(("content-length", "1")), h2.END_HEADERS | h2.END_STREAM),
    "8.1.1 trailers before content-length is reached": opened(headers(("content-length", str(len(BODY) + 1))))
    + h2.frame(h2.DATA, 0, 1, BODY)
    + opened(hpack.Encoder().encode([("x-end", "1")]), h2.END_HEADERS | h2.END_STREAM),
    "8.1.1 two values of content-length": opened(headers(("content-length", "1"), ("content-length", "2"))),
    "8.1.1 a content-length that is no number": opened(headers(("content-length", "+5"))),
    "8.1.1 an empty content-length": opened(headers(("content-length", ""))),
    "8.2.1 capitals": opened(headers(("X-Note", "a"))),
    "8.2.1 an empty name": opened(headers(("", "a"))),
    "8.2.1 a space in a name": opened(headers(("x note", "a"))),
    "8.2.1 a colon in a name": opened(headers(("x:note", "a"))),
    "8.2.1 a byte over 0x7e in a name": opened(headers((b"x\x80", b"a"))),
    "8.2.1 NUL in a value": opened(headers(("x", "a\0b"))),
    "8.2.1 CR in a value": opened(headers(("x", "a\rb"))),
    "8.2.1 LF in a value": opened(headers(("traceparent", "a\nb"))),
    "8.2.2 connection": opened(headers(("connection", "keep-alive"))),
    "8.2.2 keep-alive": opened(headers(("keep-alive", "5"))),
    "8.2.2 proxy-connection": opened(headers(("proxy-connection", "close"))),
    "8.2.2 transfer-encoding": opened(headers(("transfer-encoding", "chunked"))),
    "8.2.2 upgrade": opened(headers(("upgrade", "h2c"))),
    "8.2.2 te other than trailers": opened(headers(("te", "trailers, deflate;q=0.5"), without=["te"])),
    "8.2.2 te twice, the second other than trailers": opened(headers(("te", "gzip"))),
    "8.3 an unknown pseudo-header": opened(hpack.Encoder().encode([(":test", "ok"), *fields()])),
    "8.3 :status in a request": opened(hpack.Encoder().encode([(":status", "200"), *fields()])),
    "8.3 :protocol, which we did not offer": opened(hpack.Encoder().encode([(":protocol", "x"), *fields()])),
    "8.3 a pseudo-header after others": opened(headers((":authority", "a"))),
    "8.3 a pseudo-header after grpc-timeout": opened(hpack.Encoder().encode([("grpc-timeout", "1S"), *fields()])),
    "8.3.1 no :method": opened(headers(without=[":method"])),
    "8.3.1 no :scheme": opened(headers(without=[":scheme"])),
    "8.3.1 no :path": opened(headers(without=[":path"])),
    "8.3.1 an empty :path": opened(headers(path="")),
    "8.3.1 :method twice": opened(hpack.Encoder().encode([(":method", "POST"), *fields()])),
    "8.3.1 :scheme twice": opened(hpack.Encoder().encode([(":scheme", "http"), *fields()])),
    "8.3.1 :path twice": opened(hpack.Encoder().encode([(":path", INFER), *fields()])),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_is_reset_without_being_run_and_the_others_live(server, name):
    asked = server.service.asked
    with raw_client(server) as raw:
        raw.send(MALFORMED[name])
        assert raw.reset(1) == PROTOCOL_ERROR
        assert server.service.asked == asked
        raw.send(call(3))
        assert raw.status(3) == 0


STREAM_ERRORS = {
    "6.9 WINDOW_UPDATE of 0": (OPEN_STREAM + h2.window_update(1, 0), PROTOCOL_ERROR),
    "6.9.1 a stream's window over 2³¹ − 1": (OPEN_STREAM + h2.window_update(1, LARGEST), FLOW_CONTROL_ERROR),
}


@pytest.mark.parametrize("name", STREAM_ERRORS)
def test_an_error_of_one_stream_leaves_the_others(server, name):
    sent, code = STREAM_ERRORS[name]
    with raw_client(server) as raw:
        raw.send(sent)
        assert raw.reset(1) == code
        raw.send(call(3))
        assert raw.status(3) == 0


def test_5_1_2_streams_over_the_limit_are_refused(server):
    with raw_client(server) as raw:
        limit = dict(struct.iter_unpack(">HI", raw.until(h2.SETTINGS)))[3]
        head = block(STREAM_INFER)
        raw.send(*[h2.frame(h2.HEADERS, h2.END_HEADERS, 2 * n + 1, head) for n in range(limit + 1)])
        assert raw.reset(2 * limit + 1) == h2.ErrorCode.REFUSED_STREAM
