"""What one gRPC client can make the server keep, and for how long: stalled messages, unread answers, full memory, draining."""

import asyncio
import struct
import time

import numpy as np
import pytest
from grpc_server import TIMEOUT, FakeService, infer_request, serving
from http2_client import HELLO, INFER, STREAM_INFER, MemoryTransport, RawClient, block, call, feed, in_frames, message
from serving_helpers import run, wait_until

from hurtle.serving import client_connection
from hurtle.serving.grpc import http2_stalls
from hurtle.serving.grpc.calls import MAX_PENDING
from hurtle.serving.grpc.http2_frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    ErrorCode,
    frame,
    settings,
    window_update,
)
from hurtle.serving.protos import message_class

MIB = 1 << 20
WIDE = PREFACE + settings([(INITIAL_WINDOW_SIZE, 1 << 30)]) + window_update(0, 1 << 30)
SERVICE = "/inference.GRPCInferenceService/"


class CountingService(FakeService):
    """Keeps which model a failure was counted for."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.counted = []

    def count_failure(self, reason, model="", version=""):
        self.counted.append((reason, model))


def opened(number, path=INFER):
    return frame(HEADERS, END_HEADERS, number, block(path))


def drain(server):
    server.call(lambda: [connection.drain() for connection in list(server.service.connections)])


# Draining.


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(0, id="whole"),
        pytest.param(3, id="head", marks=pytest.mark.slow),
        pytest.param(5, id="body to come", marks=pytest.mark.slow),
        pytest.param(20, id="body"),
    ],
)
def test_a_stream_with_more_requests_than_may_run_takes_only_what_had_begun_to_come(cut):
    whole = message(infer_request("slow", seconds=0.2).SerializeToString())
    sent = 2 * MAX_PENDING
    with serving() as server:
        client = RawClient(server.port, WIDE)
        client.send(opened(1, STREAM_INFER), in_frames(1, whole * sent + whole[:cut]))
        wait_until(lambda: server.service.running == MAX_PENDING)
        drain(server)
        client.send(frame(PING, ACK, 0, client.until(PING)))
        client.until(GOAWAY)
        client.send(in_frames(1, (whole[cut:] if cut else b"") + whole * 20), frame(DATA, 0, 1, whole * 20))
        headers, _ = client.answer(1)
        assert headers["grpc-status"] == "14"  # more came than was answered
        assert server.service.asked == sent + (cut > 0)
        client.close()


def test_what_was_written_is_sent_when_a_connection_closes_while_the_client_takes_it(monkeypatch):
    monkeypatch.setattr(client_connection, "CLOSE_TIMEOUT", 0.05)

    class SlowTransport(MemoryTransport):
        """Its client takes some between the first ten looks at it, and nothing afterwards."""

        aborted, looks = False, 0

        def get_write_buffer_size(self):
            self.looks += 1
            self.taken += 1000 * (self.looks <= 10)
            return super().get_write_buffer_size()

        def abort(self):
            self.aborted = True
            self.looks_before = self.looks

    async def main():
        connection = feed(FakeService(), [HELLO])[0]
        transport = SlowTransport()
        connection.transport = connection.output.transport = transport
        transport.write(bytes(100_000))
        connection.fail(ErrorCode.NO_ERROR, "bye")
        end = time.monotonic() + TIMEOUT
        while not transport.aborted:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        assert transport.looks_before > 10
        assert transport.get_write_buffer_size()

    run(main())


# Clients that do not go on.


@pytest.fixture
def soon(monkeypatch):
    """A stall is one after 0.3 s."""
    monkeypatch.setattr(http2_stalls, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(http2_stalls, "STALL_SECONDS", 0.3)


@pytest.mark.parametrize("path", [INFER, STREAM_INFER, pytest.param(SERVICE + "ModelMetadata", marks=pytest.mark.slow)])
def test_a_message_whose_rest_does_not_come_is_given_up(soon, path):
    with serving() as server:
        client = RawClient(server.port)
        client.send(opened(1, path), in_frames(1, message(bytes(MIB))[:40_000]))
        wait_until(lambda: server.service.memory.used == 40_000)
        assert client.status(1) == 4  # DEADLINE_EXCEEDED
        assert server.service.memory.used == 0
        client.close()


def test_a_call_that_does_not_end_after_its_message_is_given_up(soon):
    with serving() as server:
        client = RawClient(server.port)
        client.send(opened(1), frame(DATA, 0, 1, message()))
        assert client.status(1) == 4
        assert server.service.memory.used == 0
        client.close()


@pytest.mark.parametrize("path", [INFER, STREAM_INFER])
def test_an_answer_that_nobody_takes_is_given_up(soon, path):
    with serving() as server:
        client = RawClient(server.port)
        flags = END_STREAM if path == INFER else 0
        large = infer_request("big", bytes=3 * MIB).SerializeToString()
        client.send(opened(1, path), frame(DATA, flags, 1, message(large)))
        wait_until(lambda: server.service.memory.used > 2 * MIB)
        assert client.reset(1) == ErrorCode.ENHANCE_YOUR_CALM
        assert server.service.memory.used == 0
        client.send(window_update(0, MIB), call(3))
        assert client.status(3) == 0  # the others on the connection go on
        client.close()


def test_a_connection_that_reads_nothing_is_given_up(soon):
    with serving() as server:
        client = RawClient(server.port, WIDE)
        large = infer_request("big", bytes=32 * MIB).SerializeToString()
        client.send(call(1, INFER, large))
        wait_until(lambda: server.service.memory.used > 16 * MIB)
        wait_until(lambda: not server.service.connections)
        assert server.service.memory.used == 0
        client.close()


def test_who_goes_on_or_waits_for_us_is_not_given_up(soon, monkeypatch):
    monkeypatch.setattr(http2_stalls, "STALL_BYTES", 100)
    with serving() as server:
        client, idle = RawClient(server.port), RawClient(server.port)
        slow = message(infer_request("slow", seconds=0.8).SerializeToString())
        client.send(opened(1), opened(3, STREAM_INFER), frame(DATA, 0, 3, slow), opened(5), frame(DATA, END_STREAM, 5, slow))
        whole = message(infer_request("echo", np.zeros(4000, np.uint8)).SerializeToString())
        for at in range(0, len(whole), 800):  # 100 bytes in 0.3 s would do
            client.send(frame(DATA, END_STREAM if at + 800 >= len(whole) else 0, 1, whole[at : at + 800]))
            time.sleep(0.1)
        assert client.status(1) == 0
        assert client.status(5) == 0
        time.sleep(0.4)  # the stream has nothing that we keep
        client.send(frame(DATA, END_STREAM, 3, message()))
        assert client.status(3) == 0
        idle.send(call(1))
        assert idle.status(1) == 0
        for one in (client, idle):
            one.close()


def test_a_client_that_sends_a_little_now_and_then_is_given_up(soon):
    with serving() as server:
        client = RawClient(server.port)
        client.send(opened(1), frame(DATA, 0, 1, message(bytes(MIB))[:100]))
        begun = time.monotonic()
        while server.call(lambda: any(connection.streams for connection in server.service.connections)):
            assert time.monotonic() - begun < TIMEOUT
            client.send(frame(DATA, 0, 1, b"x"))
            time.sleep(0.05)
        assert client.status(1) == 4
        client.close()


def test_a_stalled_call_holds_a_server_that_stops_for_a_short_time_only(soon, monkeypatch):
    monkeypatch.setattr(http2_stalls, "STALL_SECONDS", 60.0)
    monkeypatch.setattr(http2_stalls, "DRAIN_SECONDS", 0.2)
    with serving() as server:
        client = RawClient(server.port)
        client.send(opened(1), in_frames(1, message(bytes(MIB))[:40_000]))
        wait_until(lambda: server.service.memory.used == 40_000)
        time.sleep(0.4)
        drain(server)
        client.send(frame(PING, ACK, 0, client.until(PING)))
        assert client.status(1) == 4
        client.close()
        wait_until(lambda: not server.service.connections)


# Memory that is full.


def test_answers_that_wait_behind_a_slow_one_are_bounded():
    with serving(CountingService(MIB, max_buffered_bytes=16 * MIB)) as server:
        service, client = server.service, RawClient(server.port, WIDE)
        slow = message(infer_request("slow", seconds=1.0).SerializeToString())
        large = message(infer_request("big", bytes=3 * MIB).SerializeToString())
        client.send(opened(1, STREAM_INFER), frame(DATA, END_STREAM, 1, slow + large * 10))
        wait_until(lambda: service.asked == 11)
        assert 12 * MIB < service.memory.used <= 16 * MIB
        headers, data = client.answer(1)
        assert headers["grpc-status"] == "0"
        kind, answers, at = message_class("inference.ModelStreamInferResponse"), [], 0
        while at < len(data):
            (size,) = struct.unpack_from(">I", data, at + 1)
            answers.append(kind.FromString(data[at + 5 : at + 5 + size]))
            at += 5 + size
        texts = [answer.error_message for answer in answers]
        assert [bool(text) for text in texts] == [False] * 6 + [True] * 5
        assert all("retry later" in text for text in texts[6:])
        assert [answer.infer_response.model_name for answer in answers[6:]] == ["big"] * 5
        assert service.counted == [("resource_exhausted", "")] * 5  # the model has counted what it did
        assert service.memory.used == 0
        client.close()


def fill(server):
    """As if others held all memory, and more."""
    memory = server.service.memory
    server.call(lambda: memory.hold(memory.limit + 1))


def test_only_inference_is_refused_when_memory_is_full():
    with serving() as server:
        client = RawClient(server.port)
        fill(server)
        ask = message_class("inference.ModelMetadataRequest")(name="echo").SerializeToString()
        load = message_class("inference.RepositoryModelLoadRequest")(model_name="echo").SerializeToString()
        for number, path, payload in (
            (1, "ModelMetadata", ask),
            (3, "ModelStatistics", b""),
            (5, "RepositoryModelLoad", load),
        ):
            client.send(opened(number, SERVICE + path), frame(DATA, 0, number, message(payload)[:3]))
            client.send(frame(DATA, 0, number, message(payload)[3:]), frame(DATA, END_STREAM, number, b""))
            assert client.status(number) == 0
        client.send(call(7), opened(9, STREAM_INFER), opened(11, SERVICE + "ModelMetadata"))
        client.send(in_frames(11, message(bytes(10_000))))
        assert [client.status(number) for number in (7, 9, 11)] == [8, 8, 8]  # no way around the bound either
        client.close()


def test_a_request_that_is_there_is_served_though_others_filled_memory_before_its_end_came():
    with serving() as server:
        client = RawClient(server.port)
        client.send(opened(1), frame(DATA, 0, 1, message()))
        wait_until(lambda: server.service.memory.used)
        fill(server)
        client.send(frame(DATA, END_STREAM, 1, b""))
        assert client.status(1) == 0
        client.close()


def test_a_request_makes_room_for_its_answer():
    with serving(FakeService(MIB)) as server:
        whole = message(infer_request("echo", np.zeros(200_000, np.uint8)).SerializeToString())
        server.service.memory.limit = len(whole) + 100
        client = RawClient(server.port, WIDE)
        client.send(opened(1), in_frames(1, whole[:60_000]))
        wait_until(lambda: server.service.memory.used == 60_000)
        client.until(8)  # WINDOW_UPDATE: the rest may come
        client.send(in_frames(1, whole[60_000:], END_STREAM))
        headers, data = client.answer(1)
        assert (headers["grpc-status"], len(data) > 200_000) == ("0", True)
        assert server.service.memory.used == 0
        client.close()


# Counts.


def test_failures_are_those_of_a_model_only_where_it_failed_to_infer():
    with serving(CountingService()) as server:
        client = RawClient(server.port)
        named = message_class("inference.ModelMetadataRequest")(name="nobody").SerializeToString()
        load = message_class("inference.RepositoryModelUnloadRequest")(model_name="echo").SerializeToString()
        nobody, odd = (infer_request(name).SerializeToString() for name in ("nobody", "odd"))
        client.send(call(1, SERVICE + "ModelMetadata", named), call(3, SERVICE + "RepositoryModelUnload", load))
        client.send(call(5, INFER, nobody), call(7, INFER, odd), call(9, STREAM_INFER, nobody), call(11, STREAM_INFER, odd))
        wait_until(lambda: len(server.service.counted) == 6)
        assert sorted(server.service.counted) == [
            ("failed_precondition", ""),
            ("invalid_argument", ""),  # the answer cannot be sent, but the model gave one
            ("invalid_argument", ""),
            ("not_found", ""),
            ("not_found", "nobody"),
            ("not_found", "nobody"),
        ]
        client.close()
