"""HTTP at its limits: what is refused when memory is full, and what clients get that send on and on while the server stops."""

import time

import numpy as np
import pytest
from rest_server import FakeShell, HttpServer, infer_json, read_answer, request

from hurtle.serving.messages import InferResponse

MIB = 1 << 20
SECONDS = 20
BINARY = infer_json(parameters={"binary_data_output": True})


class Shell(FakeShell):
    """Model `held` answers when it is let go; who asks is counted."""

    def __init__(self):
        super().__init__(max_buffered_bytes=16 * MIB)
        self.asked, self.replies = 0, []

    def infer(self, request, reply):
        self.asked += 1
        if request.model != "held":
            return super().infer(request, reply)
        self.replies.append((reply, InferResponse(request.model, "1", request.id, self.outputs or request.inputs)))
        return None

    def let_go(self):
        replies, self.replies = self.replies, []
        for reply, response in replies:
            reply(response)


@pytest.fixture
def server():
    server = HttpServer(Shell())
    yield server
    server.close()


def wait_until(is_true):
    end = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


def infer(model="echo", body=BINARY):
    return request("POST", f"/v2/models/{model}/infer", body, close=False)


def drain(server):
    server.call(lambda: [connection.drain() for connection in list(server.shell.connections)])


def only_connection(server):
    (found,) = server.shell.connections
    return found


# Memory.


def fill(server):
    server.call(lambda: setattr(server.shell.memory, "used", server.shell.memory.limit + 1))


def test_when_memory_is_full_inference_is_refused_and_counted_as_such(server):
    fill(server)
    ((status, headers, _),) = server.ask(request("POST", "/v2/models/echo/infer", BINARY))
    assert (status, headers["retry-after"]) == (503, "1")
    assert server.shell.failures == ["resource_exhausted"]
