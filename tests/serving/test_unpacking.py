"""Compressed messages: small ones are unpacked at once, large ones in a thread, and none beyond the bounds."""

import asyncio
import gc
import gzip
import socket
import struct
import threading
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from grpc_server import FakeService, infer_request, serving
from http2_client import INFER, STREAM_INFER, block, call, in_frames, message, raw_client
from rest_server import FakeService as HttpService
from rest_server import HttpServer, infer_binary, read_answer, request
from serving_helpers import wait_until

from hurtle.errors import ServingError
from hurtle.serving import unpacking
from hurtle.serving.grpc.http2_frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    ErrorCode,
    frame,
    reset,
    settings,
    window_update,
)
from hurtle.serving.lifecycle import State
from hurtle.serving.protos import ModelStreamInferResponse
from hurtle.serving.unpacking import DEFLATE, FREE, GZIP, MAX_RATIO, QUICK, STEP, Unpacker

MIB = 1 << 20
PACK = {GZIP: gzip.compress, DEFLATE: zlib.compress}
WIDE = PREFACE + settings([(INITIAL_WINDOW_SIZE, 1 << 30)]) + window_update(0, 1 << 30)
CODINGS = pytest.mark.parametrize("bits", [GZIP, DEFLATE], ids=["gzip", "deflate"])


def repetitive(size, period=4000):
    """Bytes that pack well, though not better than the bounds allow."""
    return (np.random.default_rng(0).bytes(period) * (size // period + 1))[:size]


LARGE = np.frombuffer(repetitive(3 * MIB), np.uint8)


def packed_call(number=1, array=LARGE, path=INFER, coding="gzip", flags=END_STREAM, model="echo"):
    data = infer_request(model, array, request_id=str(number)).SerializeToString()
    packed = gzip.compress(data) if coding == "gzip" else zlib.compress(data)
    head = frame(HEADERS, END_HEADERS, number, block(path, grpc_encoding=coding))
    return head + in_frames(number, message(packed, 1), flags)


@pytest.fixture
def thread(monkeypatch):
    """The thread that unpacks; nothing is unpacked in it before `thread.go.set()`."""
    with ThreadPoolExecutor(1, "held") as pool:
        pool.go = threading.Event()
        pool.submit(pool.go.wait, 60)
        monkeypatch.setattr(unpacking, "_thread", pool)
        try:
            yield pool
        finally:
            pool.go.set()


def run(unpacker, hold=lambda size: True):
    return unpacker.join() if unpacker.begin() else asyncio.run(unpacker.finish(hold))


def unpack(packed, bits, most=1 << 30):
    return run(Unpacker(packed, bits, most))


@CODINGS
@pytest.mark.parametrize("size", [0, 1, QUICK - 1, QUICK, QUICK + 1, FREE, FREE + STEP + 1])
def test_what_was_packed_is_unpacked(bits, size):
    for data in (repetitive(size), np.random.default_rng(1).bytes(min(size, QUICK + 1)), bytes(min(size, FREE))):
        assert unpack(PACK[bits](data), bits) == data


def test_input_that_comes_to_nothing_does_not_stay_on_the_loop():
    empty = b"\x00\x00\x00\xff\xff" * 20_000  # stored blocks without a byte
    whole = b"\x78\x9c" + empty + zlib.compress(b"abc")[2:]
    unpacker = Unpacker(whole, DEFLATE, 100)
    assert not unpacker.begin()
    assert (unpacker.size, unpacker._at) == (0, unpacking.QUICK_INPUT)
    assert unpack(whole, DEFLATE, 100) == b"abc"


@CODINGS
def test_more_bytes_than_allowed_are_refused_before_more_than_that_is_unpacked(bits):
    packed = PACK[bits](repetitive(4 * MIB))
    unpacker = Unpacker(packed, bits, 2 * MIB)
    with pytest.raises(ServingError, match="unpacked: expected at most 2,097,152 bytes, got more") as caught:
        run(unpacker)
    assert caught.value.reason == "resource_exhausted"
    assert unpacker.size <= (QUICK if bits == GZIP else 2 * MIB + 1)  # gzip says it before


@CODINGS
def test_a_ratio_that_only_a_bomb_has_is_refused(bits):
    packed = PACK[bits](bytes(12 * MIB))
    assert MAX_RATIO * len(packed) < 12 * MIB
    unpacker = Unpacker(packed, bits, 16 * MIB)
    with pytest.raises(ServingError, match=f"for {len(packed):,} packed ones, got more"):
        run(unpacker)
    assert unpacker.size <= (QUICK if bits == GZIP else FREE + 1)


def test_a_size_that_is_a_lie_does_not_help():
    packed = gzip.compress(repetitive(3 * MIB))
    lie = packed[:-4] + (100_000).to_bytes(4, "little")
    held = []
    with pytest.raises(ServingError, match="is not gzip") as caught:
        run(Unpacker(lie, GZIP, 1 << 30), lambda size: held.append(size) or True)
    assert caught.value.reason == "invalid_argument"
    assert 100_000 + sum(held) >= 2 * MIB  # what came beyond the claim was counted


@CODINGS
def test_damaged_messages_are_refused_wherever_the_damage_is(bits):
    packed = PACK[bits](np.random.default_rng(2).bytes(2 * MIB), 1)
    for broken in (
        packed[:-1],
        packed[: MIB + 1],
        packed + b"x",
        packed + packed,
        packed[:MIB] + b"\xff" * 64 + packed[MIB + 64 :],
    ):
        with pytest.raises(ServingError):
            unpack(broken, bits)


def test_only_large_messages_leave_the_event_loop(monkeypatch):
    threads, step = [], Unpacker._step

    def noted(self, *arguments):
        threads.append(threading.current_thread().name)
        return step(self, *arguments)

    monkeypatch.setattr(Unpacker, "_step", noted)
    with serving() as server, raw_client(server, WIDE) as raw:
        raw.send(packed_call(1, LARGE[:10_000]))
        assert raw.status(1) == 0
        assert threads == [server.thread.name]
        for number, coding in ((3, "gzip"), (5, "deflate")):
            threads.clear()
            raw.send(packed_call(number, coding=coding))
            assert raw.status(number) == 0
            assert threads[0] == server.thread.name
            assert len(threads) >= 3
            assert all(name.startswith("hurtle-unpack") for name in threads[1:])


def test_others_are_answered_while_a_large_message_is_unpacked(thread):
    with serving() as server, raw_client(server, WIDE) as first, raw_client(server, WIDE) as second:
        first.send(packed_call())
        wait_until(lambda: server.service.memory.used > 0)
        second.send(call())
        assert second.status(1) == 0
        first.send(call(3), packed_call(5, LARGE[:1000]))
        assert first.status(3) == 0  # calls do not wait for each other, on one connection either
        assert first.status(5) == 0
        assert server.service.asked == 3
        thread.go.set()
        assert first.status(1) == 0
        assert server.service.memory.used == 0


@pytest.mark.parametrize("size", [12 * MIB, 17 * MIB])
def test_a_bomb_is_refused_without_the_thread(thread, size):
    with serving(FakeService(16 * MIB)) as server, raw_client(server, WIDE) as raw:
        raw.send(packed_call(array=np.zeros(size, np.uint8)))
        assert raw.status(1) == 8
        assert (server.service.asked, server.service.memory.used) == (0, 0)


def test_the_unpacked_size_counts_as_held_before_it_is_unpacked(thread):
    with serving(FakeService(4 * MIB, max_buffered_bytes=16 * MIB)) as server, raw_client(server, WIDE) as raw:
        memory = server.service.memory
        for number in (1, 3, 5, 7, 9):
            raw.send(packed_call(number))
        wait_until(lambda: memory.used > 15 * MIB)
        raw.send(packed_call(11))
        assert raw.status(11) == 8
        assert 15 * MIB < memory.used < 16 * MIB
        raw.send(packed_call(13, LARGE[:1000]))
        assert raw.status(13) == 0
        raw.close()
        wait_until(lambda: memory.used == 0)
        assert server.service.asked == 1


def test_a_call_that_is_given_up_while_it_is_unpacked_is_not_run(thread):
    with serving() as server, raw_client(server, WIDE) as raw:
        raw.send(packed_call(1), packed_call(3, path=STREAM_INFER, flags=0))
        wait_until(lambda: server.service.memory.used > 6 * MIB)
        raw.send(reset(1, ErrorCode.CANCEL), reset(3, ErrorCode.CANCEL))
        wait_until(lambda: server.service.memory.used == 0)
        thread.go.set()
        thread.submit(int).result(10)  # what was given to the thread before has ended
        raw.send(call(5))
        assert raw.status(5) == 0
        assert server.service.asked == 1


@pytest.fixture
def unpackers(monkeypatch):
    """Weak references to all that are made, while the cyclic collector is off."""
    found, init = [], Unpacker.__init__

    def noted(self, *arguments):
        found.append(weakref.ref(self))
        init(self, *arguments)

    monkeypatch.setattr(Unpacker, "__init__", noted)
    gc.disable()
    try:
        yield found
    finally:
        gc.enable()


def test_calls_given_up_while_they_wait_for_the_thread_drop_their_bytes(thread, unpackers):
    with serving() as server, raw_client(server, WIDE) as raw:
        numbers = range(1, 9, 2)
        for number in numbers:
            raw.send(packed_call(number))
        wait_until(lambda: server.service.memory.used > 12 * MIB)
        raw.send(*(reset(number, ErrorCode.CANCEL) for number in numbers))
        wait_until(lambda: server.service.memory.used == 0)
        kept = [one for one in (ref() for ref in unpackers) if one is not None]
        assert sum(len(one._packed) + sum(map(len, one._parts)) for one in kept) == 0
        del kept
        thread.go.set()
        wait_until(lambda: not any(ref() for ref in unpackers))


@pytest.fixture
def held_step(monkeypatch):
    """Steps in the thread end only after `go.set()`; `begun` says that one has begun."""
    begun, go, step = threading.Event(), threading.Event(), Unpacker._step

    def held(self, *arguments):
        found = step(self, *arguments)
        if threading.current_thread().name.startswith("hurtle-unpack"):
            begun.set()
            assert go.wait(60)
        return found

    monkeypatch.setattr(Unpacker, "_step", held)
    try:
        yield begun, go
    finally:
        go.set()


def test_a_call_given_up_while_a_step_runs_counts_until_the_step_has_ended(held_step, unpackers):
    begun, go = held_step
    with serving() as server, raw_client(server, WIDE) as raw:
        raw.send(packed_call(1))
        assert begun.wait(30)
        raw.send(reset(1, ErrorCode.CANCEL), call(3))
        assert raw.status(3) == 0  # the reset has been read
        assert server.service.memory.used > 3 * MIB
        go.set()
        wait_until(lambda: server.service.memory.used == 0)
        wait_until(lambda: not any(ref() for ref in unpackers))


def test_a_rest_client_that_goes_while_a_step_runs_counts_until_the_step_has_ended(held_step, unpackers):
    begun, go = held_step
    service = HttpService(max_message_bytes=64 * MIB)
    server = HttpServer(service)
    try:
        with server.connect() as client:
            packed = gzip.compress(repetitive(2 * MIB))
            client.sendall(request("POST", "/v2/models/echo/infer", packed, Content_Encoding="gzip"))
            assert begun.wait(30)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset it
        wait_until(lambda: not service.connections)
        assert service.memory.used > 2 * MIB
        go.set()
        wait_until(lambda: service.memory.used == 0)
        wait_until(lambda: not any(ref() for ref in unpackers))
    finally:
        server.close()


def test_a_step_reads_little_even_where_input_comes_to_nothing(monkeypatch):
    read, step = [], Unpacker._step

    def noted(self, *arguments):
        before = self._at
        found = step(self, *arguments)
        read.append(self._at - before)
        return found

    monkeypatch.setattr(Unpacker, "_step", noted)
    whole = b"\x78\x9c" + b"\x00\x00\x00\xff\xff" * 400_000 + zlib.compress(b"abc")[2:]
    assert unpack(whole, DEFLATE, 100) == b"abc"
    assert max(read) <= 256 << 10
    assert sum(read) == len(whole)


def test_a_stream_s_messages_keep_their_order_while_one_is_unpacked(thread):
    with serving() as server, raw_client(server, WIDE) as raw:
        raw.send(packed_call(1, LARGE[:100_000], STREAM_INFER, flags=0))
        for name in "ab":
            raw.send(frame(DATA, 0, 1, message(infer_request(request_id=name).SerializeToString())))
        raw.send(frame(DATA, END_STREAM, 1), call(3))
        assert raw.status(3) == 0
        assert server.service.asked == 1
        thread.go.set()
        _, data = raw.answer(1)
        found = []
        while data:
            size = int.from_bytes(data[1:5], "big")
            found.append(ModelStreamInferResponse.FromString(data[5 : 5 + size]).infer_response.id)
            data = data[5 + size :]
        assert found == ["1", "a", "b"]


def test_a_call_that_ends_within_a_message_behind_one_that_is_unpacked_is_refused(thread):
    with serving() as server, raw_client(server, WIDE) as raw:
        raw.send(packed_call(1, path=STREAM_INFER, flags=0, model="slow"), frame(DATA, END_STREAM, 1, b"\0\0\0\0\x09rest"))
        wait_until(lambda: server.service.memory.used > 3 * MIB)
        thread.go.set()
        assert raw.status(1) == 3


@pytest.mark.parametrize("path", [INFER, STREAM_INFER])
def test_a_message_that_is_unpacked_when_the_server_stops_is_answered(thread, path):
    with serving() as server, raw_client(server, WIDE) as raw:
        raw.send(packed_call(1, LARGE[:200_000], path, flags=END_STREAM if path == INFER else 0))
        wait_until(lambda: server.service.memory.used > 0)
        (connection,) = server.service.connections
        server.call(connection.drain)
        raw.send(frame(PING, ACK, 0, b"draining"))
        wait_until(lambda: connection.lifecycle.state is State.LAST_CALL)
        assert connection.streams[1].moved() is None  # it is not the client that keeps us waiting
        thread.go.set()
        headers, data = raw.answer(1)
        assert headers["grpc-status"] == ("0" if path == INFER else "14")  # the stream had no end of its own
        assert len(data) > 200_000
        assert server.service.asked == 1


def test_rest_has_the_same_bounds(thread):
    service = HttpService(max_message_bytes=16 * MIB)
    server = HttpServer(service)
    try:
        for packed in (gzip.compress(bytes(12 * MIB)), gzip.compress(bytes(17 * MIB))):
            (answer,) = server.ask(request("POST", "/v2/models/echo/infer", packed, Content_Encoding="gzip"))
            assert (answer[0], b"unpacked: expected at most" in answer[2]) == (413, True)
        assert service.memory.used == 0
    finally:
        server.close()


def test_a_rest_client_that_goes_while_its_body_is_unpacked_gives_its_memory_back(thread):
    service = HttpService(max_message_bytes=64 * MIB)
    server = HttpServer(service)
    body, length = infer_binary()
    header = {"Content_Encoding": "gzip", "Inference_Header_Content_Length": length}
    try:
        with server.connect() as client:
            client.sendall(request("POST", "/v2/models/echo/infer", gzip.compress(body + repetitive(2 * MIB)), **header))
            wait_until(lambda: service.memory.used > 2 * MIB)
            with server.connect() as other:
                other.sendall(request("POST", "/v2/models/echo/infer", gzip.compress(body), **header))
                assert read_answer(other.makefile("rb"))[0] == 200
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset it
        wait_until(lambda: service.memory.used == 0)
        thread.go.set()
        thread.submit(int).result(10)
        wait_until(lambda: service.memory.used == 0)
    finally:
        server.close()


def test_a_stream_given_up_keeps_no_ticket_of_what_ran():
    with serving() as server, raw_client(server, WIDE) as raw:
        raw.send(call(1, STREAM_INFER, infer_request("slow").SerializeToString()))
        wait_until(lambda: server.service.asked == 1)
        (connection,) = server.service.connections
        (slot,) = connection.streams[1].slots
        raw.send(reset(1, ErrorCode.CANCEL))
        wait_until(lambda: server.service.cancelled == 1)
        wait_until(lambda: 1 not in connection.streams)
        assert (slot.ticket, slot.request) == (None, None)
