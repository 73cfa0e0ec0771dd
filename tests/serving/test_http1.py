"""HTTP/1.1 over plain sockets, in front of a fake service."""

import gc
import gzip
import http.client
import json
import logging
import select
import time
import zlib

import numpy as np
import pytest
from rest_server import FakeService, HttpServer, infer_binary, infer_json, read_answer, request

from hurtle.serving.rest import connection as http1

INFER = "/v2/models/echo/infer"


@pytest.fixture
def server():
    found = HttpServer(FakeService())
    yield found
    found.close()


def error_of(answer):
    status, headers, body = answer
    assert headers["content-type"] == "application/json"
    return status, json.loads(body)["error"]


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def test_a_connection_is_kept_for_many_requests_and_closed_when_the_client_says_so(server):
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for n in range(5):
        client.request("POST", INFER, infer_json([[n, 1]]))
        answer = client.getresponse()
        assert answer.status == 200
        assert json.loads(answer.read())["outputs"][0]["data"] == [n, 1]
        assert answer.getheader("connection") is None
        assert answer.getheader("date").endswith("GMT")
    assert len(server.service.connections) == 1
    client.request("GET", "/v2", headers={"Connection": "close"})
    answer = client.getresponse()
    assert (answer.getheader("connection"), len(answer.read()) > 0) == ("close", True)
    wait_until(lambda: not server.service.connections)


def test_pipelined_requests_are_answered_in_order_though_the_first_takes_longest(server):
    slow = request("POST", "/v2/models/slow/infer", infer_json(id="0"), close=False)
    quick = [request("POST", INFER, infer_json(id=str(n)), close=False) for n in range(1, 9)]
    last = request("GET", "/v2/health/live")
    answers = server.ask(slow + b"".join(quick) + last)
    assert [status for status, _, _ in answers] == [200] * 10
    assert [json.loads(body).get("id") for _, _, body in answers[:9]] == [str(n) for n in range(9)]


def test_thousands_of_pipelined_requests_are_all_answered_and_few_are_pending_at_a_time(server):
    many = 3000
    most = 0
    infer = server.service.infer

    def counting(asked, reply):
        nonlocal most
        most = max(most, *(len(connection.pending) for connection in server.service.connections))
        return infer(asked, reply)

    server.service.infer = counting
    with server.connect() as client, client.makefile("rb") as stream:
        one = b"".join(request("POST", "/v2/models/slow/infer", infer_json(id=str(n)), close=False) for n in range(400))
        client.sendall(one)
        for n in range(400):
            assert json.loads(read_answer(stream)[2])["id"] == str(n)
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: t\r\n\r\n" * many)
        assert all(read_answer(stream)[0] == 200 for _ in range(many))
    assert 1 < most < 200


def test_a_request_may_come_byte_by_byte(server):
    body, length = infer_binary()
    data = request("POST", INFER, body, Inference_Header_Content_Length=length)
    with server.connect() as client, client.makefile("rb") as stream:
        for n in range(len(data)):
            client.sendall(data[n : n + 1])
        status, headers, answer = read_answer(stream)
    assert status == 200
    assert answer[int(headers["inference-header-content-length"]) :] == np.array([1.5, 2.5], "<f4").tobytes()


def test_chunked_requests_are_read_with_extensions_and_trailers(server):
    body = infer_json()
    head = f"POST {INFER} HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
    for size in (1, 7, len(body)):
        pieces = [body[n : n + size] for n in range(0, len(body), size)]
        chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        (answer,) = server.ask(head + chunks + b"0\r\nX-Trailer: 1\r\n\r\n")
        assert answer[0] == 200
        assert json.loads(answer[2])["outputs"][0]["data"] == [1.5, 2.5]


def test_a_client_that_expects_it_is_told_to_continue(server):
    body = infer_json()
    head = f"POST {INFER} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode()
    with server.connect() as client, client.makefile("rb") as stream:
        client.sendall(head)
        assert read_answer(stream)[0] == 100
        client.sendall(body)
        assert read_answer(stream)[0] == 200
        client.sendall(request("POST", "/v2/models/slow/infer", body, close=False) + head)
        assert read_answer(stream)[0] == 200
        assert read_answer(stream)[0] == 100
        client.sendall(body)
        assert read_answer(stream)[0] == 200


def test_a_client_that_expects_to_continue_is_not_told_so_when_its_request_will_not_be_served(server):
    for path, length, status in (("/nowhere", 5, 404), (INFER, 1 << 30, 413)):
        with server.connect() as client, client.makefile("rb") as stream:
            client.sendall(
                f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {length}\r\nExpect: 100-continue\r\n\r\n".encode()
            )
            assert read_answer(stream)[0] == status
            assert stream.read() == b""


def test_head_is_answered_as_get_without_the_body(server):
    (get,) = server.ask(request("GET", "/v2"))
    with server.connect() as client, client.makefile("rb") as stream:
        client.sendall(request("HEAD", "/v2"))
        status, headers, _ = read_answer(stream, has_body=False)
        assert (status, headers["content-length"], stream.read()) == (200, str(len(get[2])), b"")


def test_http_1_0_is_closed_after_the_answer_unless_the_client_asks_otherwise(server):
    (answer,) = server.ask(b"GET /v2 HTTP/1.0\r\n\r\n")
    assert (answer[0], answer[1]["connection"]) == (200, "close")
    with server.connect() as client, client.makefile("rb") as stream:
        for _ in range(2):
            client.sendall(b"GET /v2 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert read_answer(stream)[1]["connection"] == "keep-alive"


def test_a_wish_to_speak_another_protocol_is_passed_over(server):
    body = infer_json()
    upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    post = f"POST {INFER} HTTP/1.1\r\nHost: t\r\n{upgrade}Content-Length: {len(body)}\r\n\r\n".encode() + body
    get = f"GET /v2 HTTP/1.1\r\nHost: t\r\n{upgrade}\r\n".encode()
    answers = server.ask(post + get + post + request("GET", "/v2/health/live"))
    assert [status for status, _, _ in answers] == [200] * 4
    assert json.loads(answers[2][2])["outputs"][0]["data"] == [1.5, 2.5]


GET = b"GET /v2 HTTP/1.1\r\nHost: t\r\n"
POST = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: t\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /v2 HTTP/9.9\r\n\r\n", 400),
        (b"GET /v2\r\n\r\n", 400),
        (b"NONSENSE /v2 HTTP/1.1\r\nHost: t\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\nHost: t\n\n", 400),
        (GET + b"Host: other\r\n\r\n", 400),
        (GET + b"A : b\r\n\r\n", 400),
        (GET + b"A: b\r\n folded\r\n\r\n", 400),
        (GET + b"A: \0\r\n\r\n", 400),
        (GET + b"Authorization: a\r\nAuthorization: b\r\n\r\n", 400),
        (GET + b"".join(b"A%d: b\r\n" % n for n in range(200)) + b"\r\n", 431),
        (GET + b"A: " + b"b" * 100_000 + b"\r\n\r\n", 431),
        (GET + b"A" * 100_000, 431),
        (b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: t\r\n\r\n", 414),
        (b"GET /" + b"a" * 100_000, 414),
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nabcde", 400),
        (POST + b"Content-Length: 5, 5\r\n\r\nabcde", 400),
        (POST + b"Content-Length: -5\r\n\r\nabcde", 400),
        (POST + b"Content-Length: 0x5\r\n\r\nabcde", 400),
        (POST + b"Content-Length: 99999999999999999999999999\r\n\r\n", 400),
        (POST + b"Content-Length: 1048577\r\n\r\n", 413),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffff\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n100001\r\n" + b"a" * 0x100001, 413),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * 500_000, 431),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nA: " + b"a" * 500_000, 431),
        (POST + b"Content-Length: 5\r\nExpect: a miracle\r\n\r\n", 417),
        (b"CONNECT other:80 HTTP/1.1\r\nHost: t\r\n\r\nGET /v2 HTTP/1.1\r\nHost: t\r\n\r\n", 404),
    ],
)
def test_what_is_not_a_request_gets_one_answer_and_the_connection_is_closed(server, data, status):
    first = request("GET", "/v2/health/live", close=False)
    answers = server.ask(first + data)
    assert [answer[0] for answer in answers] == [200, status]
    assert answers[1][1]["connection"] == "close"
    assert error_of(answers[1])[1]
    assert server.ask(request("GET", "/v2/health/live"))[0][0] == 200


def test_a_client_that_sends_all_of_a_body_that_is_too_large_still_gets_the_answer(server):
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    client.request("POST", INFER, bytes(8 << 20))
    answer = client.getresponse()
    assert answer.status == 413
    assert "expected at most 1,048,576 bytes, got 8,388,608" in json.loads(answer.read())["error"]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compressed_requests_are_unpacked(server, coding):
    pack = gzip.compress if coding == "gzip" else zlib.compress
    (answer,) = server.ask(request("POST", INFER, pack(infer_json()), Content_Encoding=coding))
    assert json.loads(answer[2])["outputs"][0]["data"] == [1.5, 2.5]
    body, length = infer_binary()
    (answer,) = server.ask(request("POST", INFER, pack(body), Content_Encoding=coding, Inference_Header_Content_Length=length))
    assert answer[0] == 200


def test_compressed_requests_that_are_wrong_are_refused(server):
    packed = gzip.compress(infer_json())
    bomb = gzip.compress(bytes(50 << 20))
    for body, coding, status, says in (
        (bomb, "gzip", 413, "unpacked"),
        (packed[:-5], "gzip", 400, "one whole gzip stream"),
        (packed + packed, "gzip", 400, "one whole gzip stream"),
        (b"abc", "gzip", 400, "not gzip"),
        (packed, "deflate", 400, "not deflate"),
        (packed, "br", 415, "expected gzip or deflate"),
    ):
        (answer,) = server.ask(request("POST", INFER, body, Content_Encoding=coding))
        found, message = error_of(answer)
        assert (found, says in message) == (status, True), message
    wait_until(lambda: server.service.memory.used == 0)


@pytest.mark.parametrize(("rows", "is_large"), [(1, False), (800, True), (20_000, True)])
def test_large_answers_are_compressed_for_clients_that_ask_for_it(server, rows, is_large):
    body, length = infer_binary(np.zeros((rows, 2)))
    for coding, unpack in (("gzip", gzip.decompress), ("deflate", zlib.decompress)):
        (answer,) = server.ask(request("POST", INFER, body, Accept_Encoding=coding, Inference_Header_Content_Length=length))
        status, headers, data = answer
        assert (status, headers.get("content-encoding")) == (200, coding if is_large else None)
        plain = unpack(data) if is_large else data
        assert len(plain) == int(headers["inference-header-content-length"]) + rows * 8
    for accepted in ("br", "gzip;q=0", "gzip; q=0.0"):
        (answer,) = server.ask(request("POST", INFER, body, Accept_Encoding=accepted, Inference_Header_Content_Length=length))
        assert "content-encoding" not in answer[1]


def test_answers_larger_than_the_sockets_buffers_arrive_whole_though_the_client_reads_late(server):
    x = np.random.default_rng(0).random((100_000, 2)).astype("<f4")
    body, length = infer_binary(x)
    one = request("POST", INFER, body, close=False, Inference_Header_Content_Length=length)
    with server.connect() as client, client.makefile("rb") as stream:
        client.sendall(one * 1)
        wait_until(lambda: server.service.last is not None)
        time.sleep(0.05)
        for n in range(4):
            if n:
                client.sendall(one)
            status, headers, data = read_answer(stream)
            assert status == 200
            assert data[int(headers["inference-header-content-length"]) :] == x.tobytes()


def test_a_client_that_goes_away_cancels_what_runs_for_it(server):
    with server.connect() as client:
        client.sendall(request("POST", "/v2/models/stuck/infer", infer_json(), close=False) * 3)
        wait_until(lambda: server.service.last is not None and server.service.last.model == "stuck")
    wait_until(lambda: server.service.cancelled == 3)
    assert not server.service.connections


def test_a_draining_connection_finishes_what_runs_says_so_and_closes(server):
    with server.connect() as busy, server.connect() as idle, busy.makefile("rb") as stream:
        busy.sendall(request("POST", "/v2/models/slow/infer", infer_json(), close=False))
        wait_until(lambda: server.service.last is not None and len(server.service.connections) == 2)
        server.call(lambda: [connection.drain() for connection in list(server.service.connections)])
        assert idle.recv(1) == b""
        status, headers, _ = read_answer(stream)
        assert (status, headers["connection"], stream.read()) == (200, "close", b"")
    wait_until(lambda: not server.service.connections)


def test_clients_that_take_too_long_are_ended(server, monkeypatch):
    for name in ("HEAD_SECONDS", "BODY_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(http1, name, 0)
    body = infer_json()
    half = request("POST", INFER, body)[:-5]
    with server.connect() as idle, server.connect() as head, server.connect() as rest:
        head.sendall(b"GET /v2 HTTP/1.1\r\nHos")
        rest.sendall(half)
        assert idle.recv(1) == b""
        for client, says in ((head, b"head"), (rest, b"a second")):
            answer = client.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert says in answer


def test_requests_that_are_held_have_a_bound_together(server, monkeypatch):
    monkeypatch.setattr(server.service.memory, "limit", 4 << 20)
    clients = [server.connect() for _ in range(8)]
    for client in clients:
        client.sendall(POST + b"Content-Length: 1000000\r\n\r\n")
        for _ in range(19):
            client.sendall(bytes(50_000))
    refused, _, _ = select.select(clients, [], [], 10)
    assert 1 <= len(refused) <= 5
    for client in refused:
        assert read_answer(client.makefile("rb"))[0] == 503
    assert 1 << 20 < server.service.memory.used <= 4 << 20
    for client in clients:
        client.close()
    wait_until(lambda: server.service.memory.used == 0)


def test_a_failure_of_our_own_is_logged_and_not_shown(server, caplog):
    def fail(asked, reply):
        raise RuntimeError("a secret of the server")

    server.service.infer = fail
    with caplog.at_level(logging.ERROR, "hurtle.serving"):
        answers = server.ask(
            request("POST", INFER, infer_json(), close=False) + request("POST", "/v2/repository/models/crash/load")
        )
    assert [error_of(answer) for answer in answers] == [(500, "The server failed; see its log.")] * 2
    assert caplog.text.count("RuntimeError: a secret of the server") == 2


def test_the_access_log_gets_a_line_for_each_request(server):
    lines = []

    class Log:
        def write(self, **values):
            lines.append(values)

    server.service.access_log = Log()
    body = infer_json(id="7")
    server.ask(request("POST", INFER, body, close=False) + request("GET", "/nowhere", close=False) + b"?")
    assert [(line["method"], line["model"], line["status"], line["id"]) for line in lines] == [
        ("POST /v2/models/infer", "echo", 200, "7"),
        ("GET ?", "", 404, ""),
        ("? ?", "", 400, ""),
    ]
    assert lines[0]["request_bytes"] == len(body)
    assert lines[0]["response_bytes"] > 50
    assert 0 <= lines[0]["duration_ms"] < 1000
    assert lines[0]["peer"].startswith("127.0.0.1:")
    assert lines[0]["transport"] == "http"


def test_a_client_that_sends_no_more_still_gets_answers_that_are_near(server):
    with server.connect() as client, client.makefile("rb") as stream:
        client.sendall(request("GET", "/v2", close=False) + request("POST", "/v2/repository/index", close=False))
        client.shutdown(1)
        assert [read_answer(stream)[0] for _ in range(3)] == [200, 200, 0]


def test_nothing_of_a_request_is_left_for_the_garbage_collector(server):
    body, length = infer_binary(np.zeros((50_000, 2)))
    kinds = (http1.Exchange, http1.HttpConnection, http1.RequestReader)
    gc.collect()
    gc.disable()
    try:
        server.ask(request("POST", INFER, body, Inference_Header_Content_Length=length))
        server.ask(request("POST", INFER, infer_json(np.zeros((50_000, 2)))))
        server.ask(request("POST", INFER, b"[" * 400_000))
        server.ask(request("POST", INFER, gzip.compress(infer_json()), Content_Encoding="gzip", Accept_Encoding="gzip"))
        server.ask(request("POST", INFER, b"abc", Content_Encoding="gzip"))
        server.ask(request("POST", INFER, bytes(2 << 20)))
        server.ask(request("GET", "/metrics", Accept_Encoding="gzip"))
        server.ask(request("GET", "/nowhere") + b"?")
        with server.connect() as client:
            client.sendall(request("POST", "/v2/models/stuck/infer", infer_json()) + b"POST / HTTP/1.1\r\n")
            wait_until(lambda: server.service.last is not None and server.service.last.model == "stuck")
        wait_until(lambda: not server.service.connections)
        server.service.last = None
        server.call(lambda: None)
        left = [found for found in gc.get_objects() if type(found) in kinds]
        assert left == []
    finally:
        gc.enable()
