"""A fake service and an HTTP server around it on a thread, for tests of the transport alone; plain sockets to talk to it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np

from hurtle.errors import ServingError
from hurtle.serving.event_loop import new_event_loop
from hurtle.serving.memory import Memory
from hurtle.serving.messages import InferRequest, InferResponse
from hurtle.serving.notices import Notices
from hurtle.serving.rest.connection import HttpConnection

METADATA = {
    "name": "echo",
    "versions": ["1"],
    "platform": "fake",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
    "outputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
}


class Ticket:
    def __init__(self, service: FakeService):
        self.service, self.timer = service, None

    def cancel(self) -> None:
        self.service.cancelled += 1
        if self.timer is not None:
            self.timer.cancel()


class FakeService:
    """Model `echo` gives its inputs back at once, `slow` after 50 ms, `stuck` never; `broken` fails; others are not there."""

    def __init__(self, token: str | None = None, max_message_bytes: int = 1 << 20, max_buffered_bytes: int = 1 << 30):
        self.config = SimpleNamespace(max_message_bytes=max_message_bytes, auth_token=token)
        self.memory = Memory(max(max_buffered_bytes, 4 * max_message_bytes))
        self.notices = Notices()
        self.draining, self.connections, self.access_log = False, set(), None
        self.token = token
        self.cancelled = 0
        self.last: InferRequest | None = None
        self.outputs: dict[str, np.ndarray] | None = None
        self.calls: list[Any] = []
        self.ready = True

    def count_failure(self, reason, model="", version=""):
        self.failures = [*getattr(self, "failures", []), reason]

    def infer(self, request, reply):
        self.last = request
        outputs = request.inputs if self.outputs is None else self.outputs
        response = InferResponse(request.model, request.version or "1", request.id, outputs)
        if request.model == "echo":
            reply(response)
        elif request.model == "slow":
            ticket = Ticket(self)
            ticket.timer = asyncio.get_running_loop().call_later(0.05, reply, response)
            return ticket
        elif request.model == "stuck":
            return Ticket(self)
        elif request.model == "broken":
            reply(ServingError("internal", "Model 'broken' failed."))
        else:
            reply(ServingError("not_found", f"No model {request.model!r}."))
        return None

    def authorize(self, header):
        if self.token is None or header == f"Bearer {self.token}".encode():
            return None
        return ServingError("unauthenticated", "This server wants a token.")

    def is_live(self):
        return True

    def is_ready(self):
        return self.ready

    def is_model_ready(self, name, version=""):
        return self.ready and name == "echo"

    def _find(self, name):
        if name != "echo":
            raise ServingError("not_found", f"No model {name!r}.")

    def server_metadata(self):
        return {"name": "hurtle", "version": "0", "extensions": ["binary_tensor_data"]}

    def model_metadata(self, name, version=""):
        self._find(name)
        return METADATA

    def model_config(self, name, version=""):
        self._find(name)
        return {"name": name, "max_batch_size": 8, "version asked": version}

    async def statistics(self, name="", version=""):
        if name:
            self._find(name)
        return {"model_stats": [{"name": "echo", "version": version or "1"}]}

    async def index(self, ready=False):
        self.calls.append(("index", ready))
        return [{"name": "echo", "version": "1", "state": "READY", "reason": ""}]

    async def load(self, name, parameters):
        self.calls.append(("load", name, parameters))
        if name == "crash":
            raise RuntimeError("a secret of the server")
        self._find(name)

    async def unload(self, name, parameters):
        self.calls.append(("unload", name, parameters))
        self._find(name)

    async def metrics(self):
        return "# TYPE hurtle_requests_total counter\n" + "hurtle_requests_total 1\n" * 400


class HttpServer:
    """Serves a service at a free port of this machine until it is closed."""

    def __init__(self, service: Any):
        self.service = service
        started: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        self.port = started.result(timeout=60)

    def _run(self, started: Future[int]) -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self._serve(started))

    async def _serve(self, started: Future[int]) -> None:
        self.loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self.loop_errors: list[Any] = []
        self.loop.set_exception_handler(lambda _, context: self.loop_errors.append(context))
        server = await self.loop.create_server(lambda: HttpConnection(self.service), "127.0.0.1", 0)
        started.set_result(server.sockets[0].getsockname()[1])
        await self._stopped.wait()
        server.close()
        for connection in list(self.service.connections):
            connection.abort()
        await asyncio.sleep(0)

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call a function on the event loop."""

        async def run() -> Any:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout=60)

    def connect(self, receive_bytes: int | None = None) -> socket.socket:
        """A connection; `receive_bytes` keeps the kernel from receiving more than that ahead of the reader."""
        found = socket.socket()
        if receive_bytes:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        found.settimeout(60)
        found.connect(("127.0.0.1", self.port))
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found

    def ask(self, data: bytes) -> list[tuple[int, dict[str, str], bytes]]:
        """Send bytes, say that no more come after the answers are there, and read all answers."""
        with self.connect() as client:
            client.sendall(data)
            return read_answers(client)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()
        assert self.loop_errors == []


def read_answer(stream: Any, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
    """One answer from a file made of a socket; status 0 at the end."""
    line = stream.readline()
    if not line:
        return 0, {}, b""
    status, headers = int(line.split()[1]), {}
    while (line := stream.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    body = stream.read(int(headers.get("content-length", 0))) if has_body else b""
    return status, headers, body


def read_answers(client: socket.socket) -> list[tuple[int, dict[str, str], bytes]]:
    """All answers until the server closes."""
    found = []
    with client.makefile("rb") as stream:
        while (answer := read_answer(stream))[0]:
            found.append(answer)
    return found


def request(method: str, path: str, body: bytes = b"", close: bool = True, **headers: Any) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: test"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    if close:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def infer_json(x: Any = ((1.5, 2.5),), **more: Any) -> bytes:
    x = np.asarray(x)
    return json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.tolist()}], **more}
    ).encode()


def infer_binary(x: Any = ((1.5, 2.5),), **more: Any) -> tuple[bytes, int]:
    """A body and the length of its JSON."""
    raw = np.asarray(x, "<f4")
    tensor = {"name": "x", "datatype": "FP32", "shape": list(raw.shape), "parameters": {"binary_data_size": raw.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}, **more}).encode()
    return head + raw.tobytes(), len(head)
