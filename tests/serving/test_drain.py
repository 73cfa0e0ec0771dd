"""A server that stops: what clients had sent before they could know is answered, over both transports; then it is gone."""

import socket
import struct
import threading
import time
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
from grpc_server import OPTIONS, TIMEOUT, infer_request, serving
from http2_client import INFER, STREAM_INFER, RawClient, block, call, message
from rest_server import read_answer

from hurtle.serving.config import ServeConfig
from hurtle.serving.grpc.http2_frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    frame,
    settings,
)
from hurtle.serving.server import ServerThread

CLIENTS = 6
ROW = np.ones((1, 3), np.float32)
BODY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,3],"data":[1,2,3]}]}'
POST = b"POST /v2/models/double/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
NO_LIMIT = (1 << 31) - 1
WATCH = "/grpc.health.v1.Health/Watch"


@pytest.fixture(params=["inline", "worker"])
def server(request, tmp_path):
    path = tmp_path / "double.test"
    path.write_text("")
    lanes = 1 if request.param == "worker" else None  # one: answers come in the order of requests
    options = {"backend": "serving_helpers:Doubler", "executor": request.param, "lanes": lanes, "drain": 60.0}
    with ServerThread(ServeConfig(models=(str(path),), http_port=0, grpc_port=0, **options)) as server:
        yield server


@contextmanager
def stopping(server):
    """A server that stops within; at the end it must have."""
    server._loop.call_soon_threadsafe(server._stop.set)
    wait_until(lambda: server.server.service.draining)
    yield
    server._thread.join(2 * TIMEOUT)
    assert server.clean  # long before the limit


def wait_until(is_true):
    end = time.monotonic() + TIMEOUT
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.002)


def infer_call(stream_id):
    payload = infer_request("double", ROW).SerializeToString()
    return call(stream_id, INFER, payload)


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)


def keep_asking(port, together, counts):
    """Send requests, `together` at a time, until an answer says that it is the last or the connection ends."""
    sent, statuses, is_last = 0, [], False
    with connect(port) as client, client.makefile("rb") as stream:
        while not is_last:
            try:
                client.sendall(POST * together)
            except ConnectionError:
                break
            sent += together
            for _ in range(together):
                status, headers, _ = read_answer(stream)
                statuses.append(status)
                is_last = is_last or headers.get("connection") == "close"
        assert stream.read() == b""
    counts.append((sent, statuses))


@pytest.mark.parametrize("together", [1, 5])
def test_clients_that_keep_sending_over_http_get_every_answer(server, together):
    counts = []
    threads = [threading.Thread(target=keep_asking, args=(server.http_port, together, counts)) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(server.server.service.connections) == CLIENTS)
    time.sleep(0.1)
    with stopping(server):
        for thread in threads:
            thread.join(TIMEOUT)
    assert len(counts) == CLIENTS
    for sent, statuses in counts:
        assert statuses == [200] * sent


def test_an_idle_http_connection_may_still_ask_for_a_moment_and_is_then_closed(server):
    with connect(server.http_port) as idle, connect(server.http_port) as asking, connect(server.http_port) as slow:
        slow.sendall(POST[:-10])
        wait_until(lambda: len(server.server.service.connections) == 3)
        with stopping(server):
            asking.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n" + POST)
            assert idle.recv(1) == b""
            slow.sendall(POST[-10:])  # the grace is over, but this one has begun before
            with asking.makefile("rb") as stream, slow.makefile("rb") as late:
                assert [read_answer(stream)[0] for _ in range(2)] == [503, 200]
                status, headers, _ = read_answer(late)
                assert (status, headers["connection"]) == (200, "close")
                assert stream.read() == late.read() == b""


def test_what_is_on_the_wire_of_an_http2_connection_is_served_until_the_client_has_seen_goaway(server):
    client, late = RawClient(server.grpc_port), RawClient(server.grpc_port, b"")
    client.send(*map(infer_call, (1, 3, 5)))
    assert [client.status(number) for number in (1, 3, 5)] == [0, 0, 0]
    wait_until(lambda: len(server.server.service.connections) == 2)
    with stopping(server):
        late.send(PREFACE + settings([]), infer_call(1))  # it had connected before
        client.send(*map(infer_call, (7, 9, 11)))
        last, _ = struct.unpack(">II", client.until(GOAWAY)[:8])
        assert last == NO_LIMIT
        ping = client.until(PING)
        client.send(infer_call(13))
        assert [client.status(number) for number in (7, 9, 11, 13)] == [0] * 4
        client.send(frame(PING, ACK, 0, ping))
        last, code = struct.unpack(">II", client.until(GOAWAY)[:8])
        assert (last, code) == (13, 0)
        client.send(infer_call(15))  # for which it has to look elsewhere
        assert client.next_frame() is None
        assert late.status(1) == 0
        client.close()
        late.close()


def test_a_client_that_says_nothing_is_not_waited_for(server):
    with connect(server.grpc_port):
        wait_until(lambda: server.server.service.connections)
        with stopping(server):
            pass


def test_the_grpc_library_loses_no_call_that_was_taken(server):
    """With retries off, a call fails only if the server never took it: what the server answered and what clients got are equal.

    Such a call finds nobody to connect to, or GOAWAY comes between the choice of its connection and its first frame, or its new
    connection is closed before the handshake. The library's texts for these differ between versions and with timing.
    """
    payload = infer_request("double", ROW).SerializeToString()
    options = [*OPTIONS, ("grpc.enable_retries", 0)]
    counts, failures = [], []

    def work():
        answered = 0
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options=options) as channel:
            ask = channel.unary_unary(INFER)
            while True:
                try:
                    ask(payload, timeout=TIMEOUT)
                    answered += 1
                except grpc.RpcError as error:
                    failures.append((error.code(), error.details()))
                    break
        counts.append(answered)

    model = server.server.service.repository.find("double")
    threads = [threading.Thread(target=work) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(server.server.service.connections) == CLIENTS)
    time.sleep(0.2)
    with stopping(server):
        for thread in threads:
            thread.join(TIMEOUT)
    assert len(counts) == CLIENTS
    found = model.statistics.snapshot()
    assert (found["succeeded"], found["reasons"]) == (sum(counts), {})
    assert {code for code, _ in failures} == {grpc.StatusCode.UNAVAILABLE}, failures


# Streams, on a server whose models are fakes.


def drain(server):
    server.call(lambda: [connection.drain() for connection in list(server.service.connections)])


def open_stream(number, path, payload, flags=0):
    return frame(HEADERS, END_HEADERS, number, block(path)) + frame(DATA, flags, number, message(payload))


def slow(seconds=0.3):
    return infer_request("slow", seconds=seconds).SerializeToString()


def test_a_stream_that_the_client_had_closed_ends_well_though_the_server_drains():
    with serving() as server:
        client = RawClient(server.port)
        client.send(open_stream(1, STREAM_INFER, slow(), END_STREAM), open_stream(3, STREAM_INFER, slow()))
        wait_until(lambda: server.service.running == 2)
        drain(server)
        client.send(frame(PING, ACK, 0, client.until(PING)))
        assert client.status(1) == 0
        assert client.status(3) == 14  # more could have come: it must know that it was not all
        client.close()


def test_a_stream_takes_the_rest_of_a_message_and_nothing_after_it_while_the_server_drains():
    with serving() as server:
        client = RawClient(server.port)
        whole = message(infer_request("echo").SerializeToString())
        for number in (1, 3):
            client.send(frame(HEADERS, END_HEADERS, number, block(STREAM_INFER)), frame(DATA, 0, number, whole[:20]))
        drain(server)
        client.send(frame(PING, ACK, 0, client.until(PING)))
        client.until(GOAWAY)
        client.send(frame(DATA, END_STREAM, 1, whole[20:]))
        headers, data = client.answer(1)
        assert (headers["grpc-status"], len(data) > len(whole)) == ("0", True)
        client.send(frame(DATA, 0, 3, whole[20:]), frame(DATA, END_STREAM, 3, whole))
        headers, data = client.answer(3)
        assert headers["grpc-status"] == "14"
        assert server.service.asked == 2
        client.close()


@pytest.mark.parametrize(
    ("path", "payload"),
    [(STREAM_INFER, slow(0.1)), (WATCH, b""), (INFER, slow(0.1))],
    ids=["ModelStreamInfer", "Watch", "ModelInfer"],
)
def test_streams_that_are_opened_while_the_server_drains_do_not_hold_it(path, payload):
    with serving() as server:
        client = RawClient(server.port)
        client.send(call(1))
        assert client.status(1) == 0
        drain(server)
        client.send(open_stream(3, path, payload, END_STREAM if path == INFER else 0))
        ping = client.until(PING)
        wait_until(lambda: server.call(lambda: any(3 in connection.streams for connection in server.service.connections)))
        client.send(frame(PING, ACK, 0, ping))
        headers, data = client.answer(3)
        assert headers["grpc-status"] == ("0" if path == INFER else "14")
        assert data
        assert client.next_frame() is None or client.next_frame() is None  # at most one RST_STREAM
        client.close()
        wait_until(lambda: not server.service.connections)
