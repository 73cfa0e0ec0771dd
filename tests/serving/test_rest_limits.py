"""HTTP at its limits: what is refused when memory is full, and what clients get that send on and on while the server stops."""

import time

import numpy as np
import pytest
from rest_server import FakeService, HttpServer, Ticket, infer_json, read_answer, request

from hurtle.serving.lifecycle import State
from hurtle.serving.messages import InferResponse
from hurtle.serving.rest import connection as http

MIB = 1 << 20
SECONDS = 20
BINARY = infer_json(parameters={"binary_data_output": True})


class InferenceService(FakeService):
    """Model `held` answers when it is let go; who asks is counted."""

    def __init__(self):
        super().__init__(max_buffered_bytes=16 * MIB)
        self.asked, self.replies = 0, []

    def infer(self, request, reply):
        self.asked += 1
        if request.model != "held":
            return super().infer(request, reply)
        self.replies.append((reply, InferResponse(request.model, "1", request.id, self.outputs or request.inputs)))
        return Ticket(self)

    def let_go(self, count=None):
        replies, self.replies = self.replies[:count], self.replies[count:] if count else []
        for reply, response in replies:
            reply(response)


@pytest.fixture
def server():
    server = HttpServer(InferenceService())
    yield server
    server.close()
    server.service.replies.clear()


def wait_until(is_true):
    end = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


def infer(model="echo", body=BINARY):
    return request("POST", f"/v2/models/{model}/infer", body, close=False)


def drain(server):
    server.call(lambda: [connection.drain() for connection in list(server.service.connections)])


def only_connection(server):
    (found,) = server.service.connections
    return found


# Memory.


def fill(server):
    server.call(lambda: setattr(server.service.memory, "used", server.service.memory.limit + 1))


def test_when_memory_is_full_inference_is_refused_and_counted_as_such(server):
    fill(server)
    ((status, headers, _),) = server.ask(request("POST", "/v2/models/echo/infer", BINARY))
    assert (status, headers["retry-after"]) == (503, "1")
    assert server.service.failures == ["resource_exhausted"]


@pytest.mark.parametrize(
    "asked",
    [
        request("GET", "/metrics"),
        request("GET", "/v2/models/stats"),
        request("GET", "/v2/models/echo"),
        request("POST", "/v2/repository/index", b"{}"),
        request("POST", "/v2/repository/models/echo/unload"),
        request("POST", "/v2/repository/models/echo/load", Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b"")
        + b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
    ],
)
def test_who_looks_after_the_server_is_heard_when_memory_is_full(server, asked):
    fill(server)
    ((status, _, _),) = server.ask(asked)
    assert status == 200


def test_a_large_body_is_refused_when_memory_is_full_whatever_it_asks_for(server):
    fill(server)
    with server.connect() as client, client.makefile("rb") as stream:
        client.sendall(request("POST", "/v2/repository/models/echo/load", bytes(MIB - 1))[: 200 << 10])
        assert read_answer(stream)[0] == 503
    assert server.service.calls == []


def read_statuses(client, count):
    """Of that many answers, each of which is there whole or says when to ask again."""
    statuses = []
    with client.makefile("rb") as stream:
        for _ in range(count):
            status, headers, body = read_answer(stream)
            assert len(body) > 4 * MIB if status == 200 else headers["retry-after"] == "1"
            statuses.append(status)
    return statuses


def test_answers_that_wait_for_a_slow_one_before_them_are_bounded(server):
    memory = server.service.memory
    server.service.outputs = {"x": np.zeros(4 * MIB, np.uint8)}
    with server.connect() as client:
        client.sendall(infer("held") + infer() * 20 + request("GET", "/metrics", close=False))
        wait_until(lambda: server.call(lambda: server.service.asked == 21))  # between two requests
        assert 12 * MIB < memory.used <= 16 * MIB
        assert server.service.failures == ["resource_exhausted"] * 17
        server.call(server.service.let_go)
        assert read_statuses(client, 21) == [200] * 4 + [503] * 17
    wait_until(lambda: memory.used == 0)


def test_answers_that_wait_for_a_slow_one_are_forgotten_when_the_client_goes(server):
    server.service.outputs = {"x": np.zeros(4 * MIB, np.uint8)}
    with server.connect() as client:
        client.sendall(infer("held") + infer() * 2)
        wait_until(lambda: server.service.memory.used > 8 * MIB)
    wait_until(lambda: server.service.memory.used == 0)


def test_an_answer_that_waits_keeps_nothing_of_what_it_was_made_of(server):
    with server.connect() as client, client.makefile("rb") as stream:
        client.sendall(infer("held") + infer("slow"))
        wait_until(lambda: server.service.asked == 2)
        _, waiting = only_connection(server).pending
        wait_until(lambda: waiting.answer is not None)
        assert server.call(lambda: (waiting.ticket, waiting.body)) == (None, b"")
        server.call(server.service.let_go)
        assert [read_answer(stream)[0] for _ in range(2)] == [200, 200]


def test_answers_to_one_client_that_does_not_read_are_bounded(server):
    memory = server.service.memory
    server.service.outputs = {"x": np.zeros(5 * MIB, np.uint8)}
    with server.connect() as client:
        client.sendall(infer() * 20)
        wait_until(lambda: server.service.asked == 20)
        assert server.call(lambda: memory.used) <= 16 * MIB
        statuses = read_statuses(client, 20)
        assert statuses.count(200) >= 3
        assert 503 in statuses
    wait_until(lambda: memory.used == 0)


def test_answers_to_many_clients_that_do_not_read_are_bounded(server):
    server.service.outputs = {"x": np.zeros(32 * MIB, np.uint8)}
    clients = [server.connect() for _ in range(8)]
    for client in clients:
        client.sendall(infer("held"))
    wait_until(lambda: server.service.asked == 8)
    for _ in clients:
        server.call(lambda: server.service.let_go(1))
    assert server.service.failures == ["resource_exhausted"] * 7
    for client in clients:
        client.close()
    wait_until(lambda: server.service.memory.used == 0)


def test_what_a_slow_client_has_read_is_no_longer_counted(server):
    memory = server.service.memory
    server.service.outputs = {"x": np.zeros(32 * MIB, np.uint8)}
    with server.connect(receive_bytes=64 << 10) as client, client.makefile("rb") as stream:
        client.sendall(infer())
        wait_until(lambda: memory.used > 16 * MIB)
        before = memory.used
        stream.read(16 * MIB)
        wait_until(lambda: memory.used < before - 8 * MIB)
        assert only_connection(server).is_congested
    wait_until(lambda: memory.used == 0)


@pytest.mark.slow
def test_a_slow_client_gets_all_of_the_last_answer_while_it_reads(server, monkeypatch):
    monkeypatch.setattr(http, "WRITE_SECONDS", 1)
    server.service.outputs = {"x": np.zeros(32 * MIB, np.uint8)}
    with server.connect() as client, client.makefile("rb") as stream:
        client.sendall(request("POST", "/v2/models/echo/infer", BINARY))
        size = 0
        while data := stream.read(4 * MIB):
            size += len(data)
            time.sleep(0.3)
    assert size > 32 * MIB


# Stopping.


def test_what_comes_behind_a_finished_answer_that_waits_is_answered_while_the_server_stops(server):
    """Which answer says that it is the last is decided when it is written, not when it is made."""
    with server.connect() as client, client.makefile("rb") as stream:
        client.sendall(infer("held"))
        wait_until(lambda: server.service.asked == 1)
        drain(server)
        wait_until(lambda: only_connection(server).lifecycle.state is State.CLOSE_IDLE)
        for asked in (2, 3):  # each is answered at once, and waits for the first
            client.sendall(infer())
            wait_until(lambda asked=asked: server.service.asked == asked)
        server.call(server.service.let_go)
        answers = [read_answer(stream) for _ in range(3)]
        assert [(status, headers.get("connection")) for status, headers, _ in answers] == [(200, None)] * 2 + [(200, "close")]
        assert len({body[-8:] for _, _, body in answers}) == 1
        assert stream.read() == b""


@pytest.mark.parametrize("size", [10, MIB])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_the_last_answer_says_so_once(server, size, version):
    server.service.outputs = {"x": np.arange(size, dtype=np.uint8)}
    asked = infer("held").replace(b"HTTP/1.1\r\n", b"HTTP/%b\r\nConnection: keep-alive\r\n" % version)
    with server.connect() as client, client.makefile("rb") as stream:
        client.sendall(asked)
        wait_until(lambda: server.service.asked == 1)
        drain(server)
        server.call(server.service.let_go)
        head, _, body = stream.read().partition(b"\r\n\r\n")
    assert head.lower().count(b"connection:") == 1
    assert b"\r\nConnection: close" in head
    assert b"Content-Length: %d\r\n" % len(body) in head
    assert body[-size:] == np.arange(size, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("ahead", [0, 20], ids=["whole", "in the middle of a request"])
def test_a_client_that_never_waits_for_its_answers_does_not_hold_the_stop(server, ahead, monkeypatch):
    """What is run is answered, the last answer says so, and what comes after it is not run."""
    monkeypatch.setattr(http, "DRAIN_CUT", 0.1)
    service, asked, sent, answered, is_last = server.service, infer("held"), 4, 0, False
    with server.connect() as client, client.makefile("rb") as stream:
        client.sendall(asked * sent + asked[:ahead])
        wait_until(lambda: service.asked == sent)
        begun, connection, end = server.call(server.loop.time), only_connection(server), time.monotonic() + 60
        drain(server)
        while not is_last:
            assert time.monotonic() < end
            server.call(lambda: service.let_go(1))
            status, headers, _ = read_answer(stream)
            assert status == 200
            answered += 1
            is_last = headers.get("connection") == "close"
            client.sendall(asked[ahead:] + asked[:ahead])
            sent += 1
            wait_until(lambda sent=sent: connection.is_ending or service.asked == sent)
        assert server.call(server.loop.time) >= begun + http.HttpConnection.grace + http.DRAIN_CUT
        assert stream.read() == b""
    assert service.asked == answered
    wait_until(lambda: not service.connections)


def test_all_that_was_read_before_a_client_is_cut_off_is_answered(server, monkeypatch):
    monkeypatch.setattr(http.HttpConnection, "grace", 0.02)
    monkeypatch.setattr(http, "DRAIN_CUT", 0.0)
    with server.connect() as client, client.makefile("rb") as stream:
        client.sendall(infer("slow") * 200)  # of which only some may wait for their answers at a time
        wait_until(lambda: server.service.asked >= http.MAX_PENDING)
        drain(server)
        answers = [read_answer(stream) for _ in range(200)]
        assert [(status, headers.get("connection")) for status, headers, _ in answers] == [(200, None)] * 199 + [(200, "close")]
        assert stream.read() == b""
    assert server.service.asked == 200


def test_the_last_request_of_a_client_that_is_cut_off_may_take_its_time_to_arrive(server, monkeypatch):
    monkeypatch.setattr(http.HttpConnection, "grace", 0.02)
    monkeypatch.setattr(http, "DRAIN_CUT", 0.0)
    with server.connect() as client, client.makefile("rb") as stream:
        client.sendall(infer("slow") * 2 + infer()[:-10])
        wait_until(lambda: server.service.asked == 2)
        drain(server)
        assert [read_answer(stream)[0] for _ in range(2)] == [200, 200]
        client.sendall(infer()[-10:] + infer())  # the second came too late
        status, headers, _ = read_answer(stream)
        assert (status, headers["connection"]) == (200, "close")
        assert stream.read() == b""
    assert server.service.asked == 3
