"""Who is let in: the limit of connections, and what clients over it hear; no file descriptors; stalled handshakes; the log."""

import asyncio
import errno
import http.client
import json
import resource
import signal
import socket
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc_server import OPTIONS, TIMEOUT, Client, infer_request
from http2_client import LIVE, RawClient, call
from serving_helpers import wait_until
from test_server import TLS, ask, body, client_context, config, start
from test_server import model as model  # the fixture

from hurtle.serving import acceptor, notices
from hurtle.serving.grpc import connection as grpc_connection
from hurtle.serving.grpc.http2_frames import SETTINGS, ErrorCode
from hurtle.serving.notices import Notices
from hurtle.serving.rest.connection import HttpConnection
from hurtle.serving.server import ServerThread
from hurtle.serving.service import InferenceService

REFUSED = "connections refused: limit of 1 reached (--max-connections)"


@contextmanager
def one_connection(model, **options):
    """A server that has all the connections that it may: one."""
    with ServerThread(config(model, max_connections=1, **options)) as server, ExitStack() as stack:
        client = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=TIMEOUT)
        stack.callback(client.close)
        assert get(client)[0] == 200
        yield server, client


def get(client, method="GET", path="/v2", content=None):
    client.request(method, path, content)
    answer = client.getresponse()
    return answer.status, json.loads(answer.read() or b"null"), dict(answer.getheaders())


def count_files():
    """This process's open files, where the system tells."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def pending(server):
    return server.call(server.server.service.notices.pending)


@pytest.fixture(autouse=True)
def unlogged(monkeypatch, request):
    """Notices stay pending, where a test looks at them."""
    if "flushed" not in request.fixturenames:
        monkeypatch.setattr(Notices, "flush", lambda self, at_once=False: None)


@pytest.fixture(params=["uvloop", "asyncio"])
def loops(request, monkeypatch):
    """Both event loops."""
    if request.param == "asyncio":
        monkeypatch.setattr("hurtle.serving.server.new_event_loop", asyncio.new_event_loop)


def test_http_clients_over_the_limit_get_503_and_those_within_are_served(model, loops):
    with one_connection(model) as (server, first):
        other = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=TIMEOUT)
        for method, path, content in (("GET", "/v2", None), ("POST", "/v2/models/double/infer", body())):
            status, found, headers = get(other, method, path, content)
            assert (status, headers["Connection"], headers["Retry-After"]) == (503, "close", "1")
            assert "The server has too many connections (its limit is 1)" in found["error"]
        status, _, headers = get(other, path="/v2/health/live")
        assert (status, headers["Connection"]) == (200, "close")  # whoever looks after the server is heard
        other.close()
        assert pending(server)[REFUSED] == 3
        assert get(first, "POST", "/v2/models/double/infer", body())[0] == 200
        first.close()
        wait_until(lambda: get(other)[0] == 200)
        assert get(other)[0] == 200


def test_grpc_clients_over_the_limit_get_unavailable(model, loops):
    with (
        one_connection(model) as (server, _),
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options=OPTIONS) as channel,
    ):
        with pytest.raises(grpc.RpcError) as caught:
            Client(channel).ModelInfer(infer_request("double"), timeout=TIMEOUT)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "too many connections" in caught.value.details()
        assert Client(channel).ask("ServerLive").live
        wait_until(lambda: len(server.server.service.connections) == 1)  # they are closed after it
        assert pending(server)[REFUSED] >= 1


def test_a_refused_grpc_connection_is_told_to_go(model):
    with one_connection(model) as (server, _):
        for path, status in ((LIVE, 0), ("/inference.GRPCInferenceService/ModelInfer", 14)):
            raw = RawClient(server.grpc_port)
            raw.send(call(1, path, b""))
            assert raw.status(1) == status
            assert raw.goaway() == ErrorCode.NO_ERROR
            raw.close()


def test_a_refused_connection_that_says_nothing_is_closed(model, monkeypatch):
    monkeypatch.setattr(grpc_connection, "REFUSED_SECONDS", 0.1)
    monkeypatch.setattr("hurtle.serving.rest.connection.LINGER_SECONDS", 0)
    with one_connection(model) as (server, first):
        for port in (server.grpc_port, server.http_port):
            with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as client:
                assert client.recv(100) == b""
        assert get(first)[0] == 200


def test_refused_connections_do_not_take_the_place_of_others(model):
    with one_connection(model) as (server, first), ExitStack() as stack:
        for port in (server.http_port, server.grpc_port) * 3:
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT))
        wait_until(lambda: len(server.server.service.connections) == 7)
        first.close()
        wait_until(lambda: len(server.server.service.connections) == 6)
        assert get(first)[0] == 200


def test_a_client_counts_once_while_it_is_let_in(model, monkeypatch, loops):
    counted, made = [], HttpConnection.connection_made

    def noted(self, transport):
        made(self, transport)
        counted.append(len(self.service.connections) + len(server.server._acceptor._arriving))

    monkeypatch.setattr(HttpConnection, "connection_made", noted)
    with ServerThread(config(model, max_connections=2)) as server:
        assert ask(server.http_port)[0] == 200
        assert counted == [1]


def test_health_checks_are_answered_though_refused_connections_linger(model, monkeypatch):
    monkeypatch.setattr(acceptor, "MOST_REFUSALS", 3)
    with one_connection(model) as (server, first), ExitStack() as stack:
        idle = []
        for port in (server.http_port, server.grpc_port) * 2:
            idle.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)))
            wait_until(lambda: len(server.server.service.connections) == min(1 + len(idle), 4))
        assert idle[0].recv(100) == b""  # the oldest made room for the last
        assert ask(server.http_port, path="/v2/health/live")[0] == 200
        raw = RawClient(server.grpc_port)
        raw.send(call(1, LIVE, b""))
        assert raw.status(1) == 0
        raw.close()
        assert get(first)[0] == 200


def test_refused_connections_close_at_once_when_the_server_stops(model):
    with one_connection(model) as (server, first), ExitStack() as stack:
        for port in (server.http_port, server.grpc_port):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT))
            wait_until(lambda: len(server.server.service.connections) == 2)
            (refused,) = (one for one in server.server.service.connections if one.refusal is not None)

            def drain(refused=refused):
                server.server.service.draining = True
                refused.drain()
                server.server.service.draining = False
                return refused.transport.is_closing() if hasattr(refused, "transport") else refused._transport.is_closing()

            assert server.call(drain)
            while client.recv(1000):
                pass
            wait_until(lambda: len(server.server.service.connections) == 1)
        assert get(first)[0] == 200


def test_a_refusal_counts_as_unavailable_in_both_protocols_and_is_noticed_once(model):
    with one_connection(model) as (server, _):
        assert ask(server.http_port)[0] == 503
        raw = RawClient(server.grpc_port)
        raw.send(call(1))
        assert raw.status(1) == 14
        raw.close()
        service = server.server.service
        assert server.call(lambda: dict(service._refused)) == {"unavailable": 2}
        server.call(service._notice_refusals)
        assert pending(server) == {REFUSED: 2}


class FullListener:
    """A socket whose first `accept` finds no file descriptor."""

    def __init__(self, then):
        self._answers = [OSError(errno.EMFILE, "Too many open files"), then]

    def accept(self):
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("then", "noticed", "pauses"),
    [(BlockingIOError(), [], 0), (OSError(errno.EMFILE, "Too many"), ["pauses of 1 s in accepting connections"], 1)],
)
def test_only_connections_that_were_closed_are_noticed_as_such(model, monkeypatch, then, noticed, pauses):
    paused = []
    monkeypatch.setattr(acceptor.Acceptor, "_pause", lambda self, listener: paused.append(listener))

    async def main():
        service = InferenceService(config(model))
        found = acceptor.Acceptor(service, 10)
        found._accept(acceptor.Listener(FullListener(then), None, None, b""))
        await found.close()
        assert list(service.notices.pending()) == noticed
        assert len(paused) == pauses

    asyncio.run(main())


def test_a_handshake_that_fails_without_a_word_is_named(model, monkeypatch):
    async def main():
        service = InferenceService(config(model))
        found = acceptor.Acceptor(service, 10)

        async def fail(*arguments, **options):
            raise TimeoutError

        found._loop = SimpleNamespace(connect_accepted_socket=fail)
        await found._welcome(acceptor.Listener(None, None, object(), b""), None, "peer", False)
        assert service.notices._examples == {"TLS handshakes failed": "TimeoutError, from peer"}
        await found.close()

    asyncio.run(main())


def test_too_many_refusals_at_a_time_are_short(model, monkeypatch):
    monkeypatch.setattr(acceptor, "MOST_REFUSALS", 0)
    with one_connection(model) as (server, first):
        with socket.create_connection(("127.0.0.1", server.http_port), timeout=TIMEOUT) as client:
            answer = http.client.HTTPResponse(client)
            answer.begin()
            assert (answer.status, answer.getheader("Retry-After")) == (503, "1")
            assert "too many connections" in json.loads(answer.read())["error"]
        raw = RawClient(server.grpc_port, b"")
        assert raw.next_frame()[0] == SETTINGS
        assert raw.goaway() == ErrorCode.NO_ERROR
        raw.close()
        assert pending(server)[REFUSED] == 2
        assert len(server.server.service.connections) == 1
        assert get(first)[0] == 200


def test_a_refusal_over_tls_is_one_that_clients_understand(model):
    with ServerThread(config(model, max_connections=1, **TLS)) as server:
        context = client_context()
        first, second = (
            http.client.HTTPSConnection("127.0.0.1", server.http_port, timeout=TIMEOUT, context=context) for _ in range(2)
        )
        assert [get(first)[0], get(second)[0], get(first)[0]] == [200, 503, 200]
        first.close()
        second.close()


def test_a_tls_handshake_that_stalls_or_fails_ends_and_leaves_nothing(model, monkeypatch, loops):
    monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", 0.2)
    with ServerThread(config(model, max_connections=4, **TLS)) as server:
        assert ask(server.http_port, context=client_context())[0] == 200
        before = count_files()
        for _ in range(3):
            with ExitStack() as stack:
                ports = (server.http_port, server.grpc_port)
                clients = [
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)) for port in ports
                ]
                for client in clients:
                    client.sendall(b"\x16\x03\x01")  # and no more
                for client in clients:
                    assert client.recv(100) == b""
        with socket.create_connection(("127.0.0.1", server.http_port), timeout=TIMEOUT) as client:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while client.recv(100):
                pass
        wait_until(lambda: pending(server)["TLS handshakes failed"] == 7)
        assert ask(server.http_port, context=client_context())[0] == 200
        wait_until(lambda: count_files() <= before)


def test_the_handshake_s_time_is_short():
    assert 1 <= acceptor.HANDSHAKE_SECONDS <= 10


def test_the_default_limit_leaves_file_descriptors_for_the_rest(monkeypatch):
    for soft, expected in ((1024, 896), (65536, 65408), (100, 50), (resource.RLIM_INFINITY, 1 << 20)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, soft=soft: (soft, soft))
        assert acceptor.default_limit() == expected


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_without_file_descriptors_clients_and_the_log_are_told(model):
    process, port, _ = start(model, "--max-connections", "5000")
    try:
        fds = Path(f"/proc/{process.pid}/fd")
        limit = len(list(fds.iterdir())) + 10
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        clients = [socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) for _ in range(30)]
        heard = []
        for client in clients[15:]:
            heard.append(client.recv(1000)[:12])
        assert set(heard) == {b"HTTP/1.1 503"}
        for line in process.stderr:
            if "no file descriptors left" in line:
                break
        else:
            raise AssertionError("the log says nothing")
        clients[0].sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert clients[0].recv(1000).startswith(b"HTTP/1.1 200")  # who was let in is served
        for client in clients:
            client.close()
        end = time.monotonic() + TIMEOUT
        while True:
            with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as client:
                client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
                if client.recv(1000).startswith(b"HTTP/1.1 200"):
                    break
            assert time.monotonic() < end
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


# The log.


def test_a_kind_of_event_is_logged_once_a_minute_with_its_count(caplog, monkeypatch, flushed):
    now = [1000.0]
    monkeypatch.setattr(notices, "monotonic", lambda: now[0])
    found = Notices()

    def logged():
        caplog.clear()
        found.flush()
        return [record.getMessage() for record in caplog.records]

    found.count("connections refused", "from a")
    assert logged() == ["connections refused: 1 (last: from a)"]
    for peer in "bcd":
        now[0] += 10
        found.count("connections refused", f"from {peer}")
        assert logged() == []
    found.count("requests refused", "a line\nof its own", times=7)
    assert logged() == ["requests refused: 7 (last: a line?of its own)"]
    now[0] += 31
    assert logged() == ["connections refused: 3 (last: from d)"]
    now[0] += 100
    assert logged() == []
    found.count("connections refused", "from e")
    found.flush()
    found.count("connections refused", "from f")
    caplog.clear()
    found.flush(at_once=True)
    assert [record.getMessage() for record in caplog.records] == ["connections refused: 1 (last: from f)"]


@pytest.fixture
def flushed():
    """Asks for notices as they are."""


def test_connections_that_are_calmed_or_closed_are_counted(model):
    from hurtle.serving.grpc.http2_frames import PING, frame

    with ServerThread(config(model)) as server:
        raw = RawClient(server.grpc_port)
        raw.send(frame(PING, 0, 0, b"12345678") * 3000)
        assert raw.goaway() == ErrorCode.ENHANCE_YOUR_CALM
        other = RawClient(server.grpc_port, b"nonsense, which is neither HTTP/2 nor HTTP/1")
        assert other.goaway() == ErrorCode.PROTOCOL_ERROR
        with socket.create_connection(("127.0.0.1", server.http_port), timeout=TIMEOUT) as client:
            client.sendall(b"nonsense\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 400")
        assert pending(server) == {
            "gRPC connections told to calm down": 1,
            "gRPC connections closed for breaking HTTP/2's rules": 1,
            "HTTP connections closed for a request that cannot be read": 1,
        }
        raw.close()
        other.close()


def test_requests_that_are_refused_are_counted_whoever_refused_them(model):
    service = InferenceService(config(model))
    for reason in ("resource_exhausted", "unauthenticated", "resource_exhausted", "not_found"):
        service.count_failure(reason)
    service._notice_refusals()
    service._notice_refusals()
    service.count_failure("resource_exhausted")
    service._notice_refusals()
    assert service.notices.pending() == {
        "requests refused (RESOURCE_EXHAUSTED)": 3,
        "requests refused (UNAUTHENTICATED)": 1,
    }


def test_the_log_hears_of_refusals_while_the_server_runs(model, caplog, flushed):
    with one_connection(model) as (server, _):
        other = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=TIMEOUT)
        assert get(other)[0] == 503
        other.close()
        wait_until(lambda: any(REFUSED in record.getMessage() for record in caplog.records))
