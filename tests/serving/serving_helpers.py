"""Backends, models and event loops for the tests of the server."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np

from hurtle.errors import ServingError
from hurtle.serving.backends.base import Backend, Metadata, TensorSpec
from hurtle.serving.backends.fusing import infer_fused
from hurtle.serving.config import ModelOptions
from hurtle.serving.event_loop import new_event_loop
from hurtle.serving.messages import InferRequest
from hurtle.serving.model import Model

LIMIT = 60.0
"""Seconds after which a test that waits has failed, however busy the machine."""


class Doubler(Backend):
    """y = 2·x; fails where x is negative; counts its calls."""

    def __init__(self, path=None, parameters=None):
        super().__init__(path, parameters or {})
        self.delay = float(self.parameters.get("delay", 0))
        self.calls: list[int] = []
        self.threads: set[str] = set()
        self.closed = False

    def metadata(self):
        spec = (-1, int(self.parameters.get("size", 3)))
        return Metadata((TensorSpec("x", "FP32", spec),), (TensorSpec("y", "FP32", spec),), "test_doubler")

    def _run(self, inputs):
        self.calls.append(len(inputs["x"]))
        self.threads.add(threading.current_thread().name)
        if self.delay:
            time.sleep(self.delay)
        if (inputs["x"] < 0).any():
            raise ValueError("x is negative")
        return {"y": inputs["x"] * 2}

    def infer(self, request):
        return self._run(request.inputs)

    def infer_batch(self, requests):
        return infer_fused(requests, self._run)

    def close(self):
        self.closed = True


class Gated(Doubler):
    """A `Doubler` whose calls wait while `gate` is closed, so that tests need not guess how long anything takes."""

    gate = threading.Event()
    gate.set()

    def _run(self, inputs):
        self.calls.append(len(inputs["x"]))
        assert self.gate.wait(LIMIT)
        return {"y": inputs["x"] * 2}


class Counter(Backend):
    """Recurrent: total += x, and gives the total."""

    def metadata(self):
        return Metadata(
            (TensorSpec("x", "FP32", (-1, 1)), TensorSpec("state_in_0", "FP32", (-1, 1))),
            (TensorSpec("total", "FP32", (-1, 1)), TensorSpec("state_out_0", "FP32", (-1, 1))),
            "test_counter",
            state=(("state_in_0", "state_out_0"),),
        )

    def infer(self, request):
        if (request.inputs["x"] > 1000).any():
            raise ServingError("invalid_argument", "x is too large")
        total = request.inputs["x"] + request.inputs["state_in_0"]
        return {"total": total, "state_out_0": total}


def request(value=1.0, rows=1, model="m", **fields) -> InferRequest:
    return InferRequest(model, {"x": np.full((rows, 3), value, np.float32)}, **fields)


def make_model(backend=Doubler, version="1", parameters=None, **options) -> Model:
    return Model("m", version, lambda: backend(None, parameters or {}), ModelOptions(**options))


def run(main):
    """Run a coroutine on the server's kind of event loop."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(asyncio.wait_for(main, 2 * LIMIT))


class Answers(list):
    """Collects replies; `await wait(n)` until there are n."""

    async def wait(self, count: int):
        end = time.monotonic() + LIMIT
        while len(self) < count:
            assert time.monotonic() < end, f"{len(self)} of {count} answers came"
            await asyncio.sleep(0.001)
        return self


def wait_until(is_true, seconds=LIMIT):
    """Fails if it does not become true in time."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)
