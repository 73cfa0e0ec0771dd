"""Mutated conversations: whatever comes, the connection lives on or ends with a clean word, and leaves nothing behind.

HURTLE_FUZZ=100000 sets the number of runs, HURTLE_FUZZ_SEED the seed.
"""

import asyncio
import gzip
import logging
import os
import random
import struct
from functools import cache

import hpack
import pytest
import uvloop
from grpc_server import FakeService, infer_request
from http2_client import HELLO, INFER, LIVE, STREAM_INFER, block, feed, message, split_frames

from hurtle.serving.grpc import http2_frames as h2
from hurtle.serving.protos import HEALTH, REFLECTION, message_class

RUNS = int(os.environ.get("HURTLE_FUZZ", "400"))
SLOW_RUNS = 4000
SEED = int(os.environ.get("HURTLE_FUZZ_SEED", "8"))


@cache
def conversation():
    """Frames of a client that uses everything, each as bytes."""
    encoder = hpack.Encoder()
    typed = message_class("inference.ModelInferRequest")(model_name="echo")
    typed.inputs.add(name="x", datatype="INT8", shape=[2]).contents.int_contents.extend([1, -2])
    typed.parameters["n"].uint64_param = 2**63
    head = block(INFER, encoder)
    slow = infer_request("slow", seconds=30.0, request_id="s").SerializeToString()
    big = infer_request("big", bytes=200_000).SerializeToString()
    reflection = message_class("grpc.reflection.v1.ServerReflectionRequest")
    frames = [h2.settings([(4, 100_000), (5, 20_000), (1, 100)]), h2.window_update(0, 1000)]
    frames += [h2.frame(h2.HEADERS, h2.END_HEADERS, 1, head), h2.frame(h2.DATA, h2.END_STREAM, 1, message())]
    frames += [h2.frame(h2.HEADERS, 0, 3, head[:3]), h2.frame(h2.CONTINUATION, h2.END_HEADERS, 3, head[3:])]
    frames += [h2.frame(h2.DATA, h2.PADDED, 3, b"\x03" + message(typed.SerializeToString())[:9] + bytes(3))]
    frames += [h2.frame(h2.DATA, h2.END_STREAM, 3, message(typed.SerializeToString())[9:])]
    frames += [h2.frame(h2.HEADERS, h2.END_HEADERS, 5, block(STREAM_INFER, encoder, grpc_timeout="5S"))]
    frames += [h2.frame(h2.DATA, 0, 5, message() + message(slow) + message(b"\xff"))]
    frames += [h2.frame(h2.HEADERS, h2.END_HEADERS, 7, block(INFER, encoder, grpc_encoding="gzip"))]
    frames += [h2.frame(h2.DATA, h2.END_STREAM, 7, message(gzip.compress(infer_request().SerializeToString()), 1))]
    frames += [
        h2.frame(h2.HEADERS, h2.END_HEADERS, 9, head),
        h2.frame(h2.DATA, h2.END_STREAM, 9, message(slow)),
        h2.reset(9, h2.ErrorCode.CANCEL),
    ]
    frames += [
        h2.frame(h2.HEADERS, h2.END_HEADERS, 11, head),
        h2.frame(h2.DATA, h2.END_STREAM, 11, message(big)),
        h2.window_update(11, 70_000),
    ]
    frames += [h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 13, block(LIVE, encoder))]
    frames += [
        h2.frame(h2.HEADERS, h2.END_HEADERS, 15, block(f"/{HEALTH}/Watch", encoder)),
        h2.frame(h2.DATA, h2.END_STREAM, 15, message(b"")),
    ]
    frames += [h2.frame(h2.HEADERS, h2.END_HEADERS, 17, block(f"/{REFLECTION}/ServerReflectionInfo", encoder))]
    frames += [
        h2.frame(h2.DATA, 0, 17, message(reflection(file_containing_symbol="inference.ModelConfig").SerializeToString()))
    ]
    frames += [
        h2.frame(h2.PING, 0, 0, b"12345678"),
        h2.frame(h2.DATA, h2.END_STREAM, 5, message()),
        h2.frame(h2.GOAWAY, 0, 0, bytes(8)),
    ]
    frames += [
        h2.frame(h2.HEADERS, h2.END_HEADERS, 19, head),
        h2.frame(h2.DATA, 0, 19, b"\0" + struct.pack(">I", 300_000) + bytes(10_000)),
    ]
    return frames


def mutate(frames, rng):
    """The bytes of a conversation in which something is wrong."""
    frames = list(frames)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(frames))
        data = bytearray(frames[at])
        kind = rng.randrange(9)
        if not data:
            continue
        if kind == 0:
            data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind == 1:
            data[rng.randrange(min(9, len(data)))] ^= 1 << rng.randrange(8)
        elif kind == 2 and len(data) > 9:  # within the payload, the frame stays whole
            start = rng.randrange(9, len(data))
            cut = rng.randrange(start, len(data) + 1)
            more = rng.randbytes(rng.randrange(20))
            data[start:cut] = more
            data[:3] = (len(data) - 9).to_bytes(3, "big")
        elif kind == 3:
            del data[rng.randrange(len(data)) :]
        elif kind == 4:
            frames.insert(rng.randrange(len(frames)), bytes(data))
        elif kind == 5:
            other = rng.randrange(len(frames))
            frames[at], frames[other] = frames[other], frames[at]
            continue
        elif kind == 6:
            frames.insert(
                at, h2.frame(rng.randrange(12), rng.randrange(256), rng.randrange(25), rng.randbytes(rng.randrange(40)))
            )
            continue
        elif kind == 7 and len(data) > 10:  # an extreme number somewhere
            start = rng.randrange(9, len(data))
            extreme = rng.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\x80\0\0\0", b"\xff\xff\xff\x7f"))
            data[start : start + 4] = extreme[: len(data) - start]
        elif kind == 8:
            frames.pop(at)
            frames = frames or [b""]
            continue
        frames[at] = bytes(data)
    return b"".join(frames)


def pieces(data, rng):
    if rng.random() < 0.5:
        return [data]
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(1, 12)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def check_written(written):
    """What a server may send: whole frames, at most one GOAWAY, which is the last."""
    found = split_frames(bytes(written))
    assert [kind for kind, *_ in found].count(h2.GOAWAY) <= 1
    for kind, _, stream_id, payload in found:
        assert kind in (h2.DATA, h2.HEADERS, h2.RST_STREAM, h2.SETTINGS, h2.PING, h2.GOAWAY, h2.WINDOW_UPDATE)
        assert stream_id % 2 == 1 or kind in (h2.SETTINGS, h2.PING, h2.GOAWAY, h2.WINDOW_UPDATE, h2.RST_STREAM)
        if kind == h2.GOAWAY:
            assert struct.unpack(">I", payload[4:8])[0] != h2.ErrorCode.INTERNAL_ERROR, payload[8:]
            assert found[-1][0] == h2.GOAWAY
    return found


async def run(seed):
    rng, service = random.Random(seed), FakeService(max_message_bytes=400_000)
    data = mutate(conversation(), rng)
    chunks = pieces(HELLO + data if rng.random() < 0.95 else mutate([HELLO], rng) + data, rng)
    connection, transport = feed(service, [chunk for chunk in chunks if chunk])
    await asyncio.sleep(0)
    connection.connection_lost(None)
    await asyncio.sleep(0)
    check_http1 = bytes(transport.written).startswith(b"HTTP/1.1 505")
    frames = [] if check_http1 else check_written(transport.written)
    assert not connection.streams
    assert not service.connections
    assert connection.guard._lent == 0
    assert not connection.guard._waiting
    assert connection.output.queued == 0
    return frames


@pytest.mark.parametrize("runs", [RUNS, pytest.param(SLOW_RUNS, marks=pytest.mark.slow)])
def test_mutated_conversations_end_cleanly(caplog, runs):
    kinds = set()

    async def main():
        for n in range(runs):
            try:
                kinds.update((kind, flags & h2.END_STREAM) for kind, flags, *_ in await run(SEED * 10**9 + n))
            except Exception as error:
                raise AssertionError(f"seed {SEED * 10**9 + n} failed") from error
        assert len(asyncio.all_tasks()) == 1

    with caplog.at_level(logging.ERROR, "hurtle.serving"), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    mine = [record for record in caplog.records if "grpc_server.py" not in (record.exc_text or "")]  # the fake may raise
    assert not mine
    assert {(h2.DATA, 0), (h2.HEADERS, 1), (h2.RST_STREAM, 0), (h2.GOAWAY, 0)} <= kinds


def test_the_conversation_itself_is_right():
    async def main():
        service = FakeService(max_message_bytes=400_000)
        connection, transport = feed(service, [HELLO + b"".join(conversation())])
        found = check_written(transport.written)
        ended = {stream_id for kind, flags, stream_id, _ in found if kind == h2.HEADERS and flags & h2.END_STREAM}
        assert ended == {1, 3, 7, 13}
        assert {5, 11} <= {stream_id for kind, _, stream_id, _ in found if kind == h2.DATA}
        assert h2.GOAWAY not in [kind for kind, *_ in found]
        assert set(connection.streams) == {5, 11, 15, 17, 19}
        connection.connection_lost(None)
        assert service.cancelled == 2

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("size", [0, 1, 8, 9, 23, 24, 25, 100, 5000])
def test_noise_ends_cleanly(size):
    async def main():
        rng = random.Random(size)
        for _ in range(50):
            for start in (b"", HELLO):
                connection, transport = feed(FakeService(), [start + rng.randbytes(size)])
                check_written(transport.written)
                connection.connection_lost(None)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
