"""What clients make the server hold is bounded over all connections: unfinished requests, and answers that nobody takes."""

import http.client

import numpy as np
import pytest
from grpc_server import TIMEOUT, infer_request, serving
from grpc_server import FakeService as GrpcService
from http2_client import INFER, LIVE, STREAM_INFER, RawClient, block, call, message
from rest_server import FakeService as HttpService
from rest_server import HttpServer, infer_json, read_answer, request
from serving_helpers import wait_until

from hurtle.serving.config import ServeConfig, defaults_from
from hurtle.serving.grpc.http2_frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame
from hurtle.serving.server import ServerThread

MIB = 1 << 20
PART = 15_000
LARGE = message(bytes(2 * MIB))[: 4 * PART]


def part_of_a_call(number, path=INFER):
    """60 kB of a message of 2 MiB, which is less than needs leave to be sent."""
    parts = [frame(DATA, 0, number, LARGE[at : at + PART]) for at in range(0, len(LARGE), PART)]
    return frame(HEADERS, END_HEADERS, number, block(path)) + b"".join(parts)


@pytest.fixture
def server(tmp_path):
    path = tmp_path / "double.test"
    path.write_text("")
    options = {"backend": "serving_helpers:Doubler", "max_message_mib": 4.0, "max_buffered_mib": 8.0, "drain": 2.0}
    with ServerThread(ServeConfig(models=(str(path),), http_port=0, grpc_port=0, **options)) as server:
        yield server


def test_many_connections_that_send_half_of_a_message_do_not_exhaust_memory(server):
    memory = server.server.service.memory
    clients = [RawClient(server.grpc_port) for _ in range(8)]
    for client in clients:
        for number in range(1, 80, 2):  # 40 calls, 2.4 MB
            client.send(part_of_a_call(number, STREAM_INFER if number % 4 == 1 else INFER))
    for client in clients[4:]:  # by then the first four have filled it, and more
        client.send(call(101, LIVE, b""))
        headers, _ = client.answer(101)
        assert headers["grpc-status"] == "0"  # whoever looks after the server hears that it lives
    assert 7 * MIB < memory.used <= 8 * MIB + len(LARGE)
    client = RawClient(server.grpc_port)
    client.send(part_of_a_call(1), part_of_a_call(3), part_of_a_call(5))
    assert client.status(5) == 8  # RESOURCE_EXHAUSTED
    row = infer_request("double", np.ones((1, 3), np.float32)).SerializeToString()
    client.send(call(7, INFER, row))
    assert client.status(7) == 0  # what needs no memory is served
    rest = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=TIMEOUT)
    rest.request("POST", "/v2/models/double/infer", bytes(MIB))
    assert rest.getresponse().status == 503  # both transports share it
    rest.close()
    for one in (*clients, client):
        one.close()
    wait_until(lambda: memory.used == 0)


def test_every_way_that_a_call_can_end_gives_its_memory_back():
    with serving() as server:
        memory, client = server.service.memory, RawClient(server.port)
        whole = message(infer_request("echo", np.zeros(10_000, np.uint8)).SerializeToString())
        for number, path in ((1, INFER), (3, STREAM_INFER)):  # answered
            client.send(frame(HEADERS, END_HEADERS, number, block(path)), frame(DATA, 0, number, whole[:5000]))
            wait_until(lambda: memory.used == 5000)
            client.send(frame(DATA, END_STREAM, number, whole[5000:]))
            assert client.status(number) == 0
            assert memory.used == 0
        client.send(part_of_a_call(5))  # reset
        wait_until(lambda: memory.used == len(LARGE))
        client.send(frame(3, 0, 5, bytes([0, 0, 0, 8])))
        wait_until(lambda: memory.used == 0)
        client.send(part_of_a_call(7), frame(DATA, END_STREAM, 7, b""))  # broken off
        assert client.status(7) == 3
        stuck = infer_request("slow", np.zeros(9000, np.uint8), seconds=60).SerializeToString()
        client.send(frame(HEADERS, END_HEADERS, 9, block(STREAM_INFER)), frame(DATA, 0, 9, message(stuck)))  # runs
        wait_until(lambda: memory.used == len(stuck))
        client.close()
        wait_until(lambda: memory.used == 0)


def test_answers_that_nobody_takes_are_bounded_over_all_connections_of_grpc():
    with serving(GrpcService(MIB, max_buffered_bytes=16 * MIB)) as server:
        memory = server.service.memory
        clients = [RawClient(server.port) for _ in range(10)]
        ask = call(1, INFER, infer_request("big", bytes=3 * MIB).SerializeToString())
        for n, client in enumerate(clients):
            client.send(ask)
            wait_until(lambda n=n: server.service.asked > n)
        assert 12 * MIB < memory.used <= 16 * MIB
        assert [client.status(1) for client in clients[5:]] == [8] * 5
        for client in clients:
            client.close()
        wait_until(lambda: memory.used == 0)


def test_answers_that_nobody_reads_are_bounded_over_all_connections_of_http():
    service = HttpService(max_buffered_bytes=16 * MIB)
    service.outputs = {"x": np.zeros(16 * MIB, np.uint8)}
    server = HttpServer(service)
    binary = infer_json(parameters={"binary_data_output": True})
    clients = [server.connect() for _ in range(3)]
    try:
        for client in clients[:2]:
            before = service.memory.used
            client.sendall(request("POST", "/v2/models/echo/infer", binary, close=False))
            wait_until(lambda before=before: service.memory.used > before)
        clients[2].sendall(
            request("POST", "/v2/models/echo/infer", binary, close=False) + request("GET", "/v2/health/live", close=False)
        )
        with clients[2].makefile("rb") as stream:
            status, headers, _ = read_answer(stream)
            assert (status, headers["retry-after"]) == (503, "1")
            assert read_answer(stream)[0] == 200
        with clients[0].makefile("rb") as stream:
            assert len(read_answer(stream)[2]) > 16 * MIB
        clients[1].close()
        wait_until(lambda: service.memory.used == 0)
    finally:
        for client in clients:
            client.close()
        server.close()


def test_the_bound_is_set_by_flag_file_or_variable_and_grows_with_the_largest_message(tmp_path):
    assert ServeConfig().max_buffered_bytes == 1 << 30
    assert ServeConfig(max_message_mib=1024).max_buffered_bytes == 4 << 30
    (tmp_path / "serve.toml").write_text("max_buffered_mib = 128\n")
    assert defaults_from(tmp_path / "serve.toml", {}).max_buffered_bytes == 128 * MIB
    assert defaults_from(None, {"HURTLE_SERVE_MAX_BUFFERED_MIB": "200"}).max_buffered_bytes == 200 * MIB
