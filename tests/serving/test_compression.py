"""Compressed answers over gRPC: for clients that take them, where it pays, in order, and never long on the event loop."""

import asyncio
import struct
import threading
import time
import zlib

import numpy as np
import pytest
from grpc_server import TIMEOUT, FakeService, client, infer_request, serving
from http2_client import STREAM_INFER, block, call, message, raw_client

from hurtle.serving import compression
from hurtle.serving.compression import COMPRESSED_ASIDE, MIN_COMPRESSED, Packer, pays
from hurtle.serving.grpc.http2_frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame
from hurtle.serving.protos import ModelInferResponse, ModelStreamInferResponse

BITS = {"gzip": 31, "deflate": 15}


@pytest.fixture(scope="module")
def server():
    with serving(FakeService()) as server:
        yield server


@pytest.fixture
def raw(server):
    with raw_client(server) as found:
        yield found


def split(data, encoding=None):
    """The messages of an answer: was it compressed, and its content."""
    found = []
    while data:
        flag, size = struct.unpack(">BI", data[:5])
        content, data = data[5 : 5 + size], data[5 + size :]
        found.append((flag, zlib.decompress(content, BITS[encoding]) if flag else content))
    return found


def big(size):
    return infer_request("big", bytes=size).SerializeToString()


@pytest.mark.parametrize("size", [MIN_COMPRESSED + 1, COMPRESSED_ASIDE, 1 << 20])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_large_answers_are_compressed_for_clients_that_take_it(server, raw, size, encoding):
    raw.send(call(1, payload=big(size), grpc_accept_encoding=f"identity,{encoding}", grpc_timeout="10S"))
    headers, data = raw.answer(1)
    assert (headers["grpc-status"], headers["grpc-encoding"]) == ("0", encoding)
    assert len(data) < size / 20
    ((flag, content),) = split(data, encoding)
    assert flag == 1
    assert ModelInferResponse.FromString(content).raw_output_contents == [bytes(size)]
    assert server.call(lambda: server.service.memory.used) == 0


@pytest.mark.parametrize("accepted", [None, "identity", "br,zstd", "gzip;q=0"])
def test_clients_that_do_not_take_it_get_plain_answers(raw, accepted):
    raw.send(call(1, payload=big(40_000), grpc_accept_encoding=accepted))
    headers, data = raw.answer(1)
    ((flag, content),) = split(data)
    assert (headers["grpc-status"], headers.get("grpc-encoding"), flag) == ("0", None, 0)
    assert ModelInferResponse.FromString(content).raw_output_contents == [bytes(40_000)]


@pytest.mark.parametrize("size", [100, MIN_COMPRESSED - 100, 12_000])
def test_what_is_short_or_does_not_shrink_is_sent_as_it_is(raw, size):
    noise = (
        np.random.default_rng(0).integers(0, 256, size).astype(np.uint8) if size > MIN_COMPRESSED else np.zeros(size, np.uint8)
    )
    raw.send(call(1, payload=infer_request(array=noise).SerializeToString(), grpc_accept_encoding="gzip"))
    headers, data = raw.answer(1)
    ((flag, content),) = split(data)
    assert (headers["grpc-status"], flag) == ("0", 0)
    assert ModelInferResponse.FromString(content).raw_output_contents == [noise.tobytes()]


def test_the_answers_of_a_stream_keep_their_order_though_some_are_compressed_on_threads(server, raw):
    sizes = [1 << 20, 10, 20_000, 300_000, 5, 1 << 19]
    parts = [frame(DATA, 0, 1, message(big(size))) for size in sizes]
    raw.send(
        frame(HEADERS, END_HEADERS, 1, block(STREAM_INFER, grpc_accept_encoding="gzip")),
        *parts,
        frame(DATA, END_STREAM, 1, b""),
    )
    headers, data = raw.answer(1)
    assert (headers["grpc-status"], headers["grpc-encoding"]) == ("0", "gzip")
    found = split(data, "gzip")
    assert [flag for flag, _ in found] == [1, 0, 1, 1, 0, 1]
    answers = [ModelStreamInferResponse.FromString(content).infer_response for _, content in found]
    assert [len(answer.raw_output_contents[0]) for answer in answers] == sizes
    assert server.call(lambda: server.service.memory.used) == 0


def test_large_answers_are_not_compressed_on_the_event_loop(server, raw, monkeypatch):
    threads = {}

    def deflate(parts, coding, plain=compression.deflate):
        threads[len(parts[0]) > COMPRESSED_ASIDE] = threading.current_thread()
        return plain(parts, coding)

    monkeypatch.setattr(compression, "deflate", deflate)
    for number, size in ((1, 1 << 20), (3, MIN_COMPRESSED + 1)):
        raw.send(call(number, payload=big(size), grpc_accept_encoding="gzip"))
        assert raw.status(number) == 0
    assert threads[False] is server.thread
    assert threads[True].name.startswith("hurtle-pack")


def test_a_client_that_leaves_while_its_answer_is_compressed_costs_nothing(server, monkeypatch):
    is_packing, go_on = threading.Event(), threading.Event()

    def deflate(parts, coding):
        is_packing.set()
        assert go_on.wait(TIMEOUT)
        return b"x"

    monkeypatch.setattr(compression, "deflate", deflate)
    with raw_client(server) as leaving:
        leaving.send(call(1, payload=big(1 << 20), grpc_accept_encoding="gzip"))
        assert is_packing.wait(TIMEOUT)
        assert server.call(lambda: server.service.memory.used) >= 1 << 20
    end = time.monotonic() + TIMEOUT
    while server.call(lambda: server.service.memory.used):
        assert time.monotonic() < end
    go_on.set()


def test_grpcio_reads_compressed_answers(server):
    with client(server) as calls:  # it offers gzip and deflate always
        answer = calls.ModelInfer(infer_request("big", bytes=1 << 20), timeout=TIMEOUT)
    assert answer.raw_output_contents == [bytes(1 << 20)]


def test_when_all_threads_are_busy_messages_go_out_as_they_are():
    async def main():
        packer, found = Packer(), []
        text = bytes(COMPRESSED_ASIDE + 1)
        for _ in range(2 * packer._threads + 1):
            packer.pack(text, b"gzip", lambda data, is_compressed: found.append(is_compressed))
        assert found == [False]  # the last; the others are on their way
        while len(found) <= 2 * packer._threads:
            await asyncio.sleep(0.001)
        assert found.count(True) == 2 * packer._threads
        packer.pack(text, b"gzip", lambda data, is_compressed: found.append(is_compressed))
        while len(found) <= 2 * packer._threads + 1:
            await asyncio.sleep(0.001)
        assert found[-1]

    asyncio.run(asyncio.wait_for(main(), TIMEOUT))


def test_what_pays_is_long_and_shrinks():
    noise = np.random.default_rng(0).normal(size=20_000).astype(np.float32).tobytes()
    assert not pays(noise)
    assert not pays(bytes(MIN_COMPRESSED))
    assert pays(bytes(MIN_COMPRESSED + 1))
    assert pays(np.arange(20_000).tobytes())
