"""tritonclient against our server: what must be refused, how, and with which words. triton_conformance.py runs it."""

from __future__ import annotations

import queue
import re
import urllib.request
from contextlib import suppress
from typing import Any

import numpy as np
from checks import equal, names, wait_for
from triton_session import Session, both, only
from tritonclient.utils import InferenceServerException


def float_row(s: Session, rows: int = 1, width: int = 2) -> list[Any]:
    return [s.input("x", np.ones((rows, width), np.float32))]


@both("unknown model")
def _(s: Session) -> None:
    s.fails("NOT_FOUND", lambda: s.client.infer("sum_diference", s.pair()), "sum_diference", "sum_difference")
    s.fails("NOT_FOUND", lambda: s.client.get_model_metadata("nobody"), "nobody")
    s.fails("NOT_FOUND", lambda: s.client.get_model_config("nobody"), "nobody")
    s.fails("NOT_FOUND", lambda: s.client.get_inference_statistics("nobody"), "nobody")


@both("unknown version")
def _(s: Session) -> None:
    s.fails("NOT_FOUND", lambda: s.client.infer("scale", float_row(s), "2"), "scale", "'2'", "1, 3")
    s.fails("NOT_FOUND", lambda: s.client.get_model_metadata("scale", "2"), "scale", "'2'", "1, 3")


@both("unknown input")
def _(s: Session) -> None:
    inputs = [*s.pair(), s.input("c", np.ones((1, 4), np.int32))]
    s.fails("INVALID_ARGUMENT", lambda: s.client.infer("sum_difference", inputs), "sum_difference", "'c'")


@both("missing input")
def _(s: Session) -> None:
    s.fails("INVALID_ARGUMENT", lambda: s.client.infer("sum_difference", s.pair()[:1]), "needs", "'b'", "got 'a'")


@both("an input twice")
def _(s: Session) -> None:
    first, second = s.pair()
    s.fails("INVALID_ARGUMENT", lambda: s.client.infer("sum_difference", [first, second, first]), "'a'")


@both("wrong datatype")
def _(s: Session) -> None:
    inputs = [s.input("a", np.ones((1, 4), np.float32)), s.pair()[1]]
    s.fails("INVALID_ARGUMENT", lambda: s.client.infer("sum_difference", inputs), "'a'", "expected INT32", "got FP32")


@both("a datatype that does not exist")
def _(s: Session) -> None:
    inputs = [s.input("a", np.ones((1, 4), np.int32), datatype="INT128"), s.pair()[1]]
    s.fails("INVALID_ARGUMENT", lambda: s.client.infer("sum_difference", inputs), "'a'", "'INT128'", "INT64")


@both("wrong shape")
def _(s: Session) -> None:
    for shape in ((1, 5), (4,), (1, 4, 1)):
        inputs = [s.input("a", np.ones(shape, np.int32)), s.pair()[1]]
        call = lambda inputs=inputs: s.client.infer("sum_difference", inputs)  # noqa: E731
        s.fails("INVALID_ARGUMENT", call, "'a'", "expected shape [-1, 4]", f"got {list(shape)}")


@both("inputs of different batches")
def _(s: Session) -> None:
    inputs = [s.pair(rows=2)[0], s.pair(rows=3)[1]]
    s.fails("INVALID_ARGUMENT", lambda: s.client.infer("sum_difference", inputs), "'b'", "expected a batch of 2", "got 3")


@both("negative and overflowing dimensions")
def _(s: Session) -> None:
    for shape in ([-1, 4], [2**40, 2**40], [-2, -2], [2**62, 4]):
        inputs = [s.input("a", np.ones((1, 4), np.int32), shape=shape), s.pair()[1]]
        call = lambda inputs=inputs: s.client.infer("sum_difference", inputs)  # noqa: E731
        s.fails("INVALID_ARGUMENT", call, "'a'", str(shape[0]))


@both("wrong byte size")
def _(s: Session) -> None:
    inputs = [s.input("a", np.ones((1, 4), np.int32), shape=[3, 4]), s.pair()[1]]
    s.fails("INVALID_ARGUMENT", lambda: s.client.infer("sum_difference", inputs), "'a'", "takes 48 bytes", "got 16")


@only("http", "wrong number of values in JSON")
def _(s: Session) -> None:
    inputs = [s.input("a", np.ones((1, 4), np.int32), binary=False, shape=[3, 4]), s.pair()[1]]
    s.fails("INVALID_ARGUMENT", lambda: s.client.infer("sum_difference", inputs), "'a'", "takes 12 values", "got 4")


@both("unknown output")
def _(s: Session) -> None:
    call = lambda: s.client.infer("sum_difference", s.pair(), outputs=[s.output("product")])  # noqa: E731
    s.fails("INVALID_ARGUMENT", call, "sum_difference", "'product'")


@both("too many rows")
def _(s: Session) -> None:
    equal(s.client.infer("sum_difference", s.pair(rows=8)).as_numpy("sum").shape, (8, 4))
    s.fails("INVALID_ARGUMENT", lambda: s.client.infer("sum_difference", s.pair(rows=9)), "at most 8", "got 9")


@both("a message that is too large")
def _(s: Session) -> None:
    big = [s.input("x", np.zeros((3, 2**18), np.float32))]
    if s.is_grpc:
        s.fails("RESOURCE_EXHAUSTED", lambda: s.client.infer("identity_fp32", big), "2,097,152")
    else:
        try:
            s.client.infer("identity_fp32", big)
        except InferenceServerException as error:
            equal(error.status(), "413")
            names(error.message(), "2,097,152")
        else:
            raise AssertionError("expected 413, got an answer")
    equal(s.client.infer("sum_difference", s.pair()).as_numpy("sum").tolist(), [[10] * 4])


@only("grpc", "raw and typed contents together")
def _(s: Session) -> None:
    inputs = s.pair()
    inputs[0]._input.contents.int_contents.extend([7] * 4)
    s.fails("INVALID_ARGUMENT", lambda: s.client.infer("sum_difference", inputs), "'a'", "raw_input_contents", "got both")


@only("http", "data in JSON and binary together")
def _(s: Session) -> None:
    inputs = s.pair()
    inputs[0]._data = [7] * 4
    inputs[0]._parameters["binary_data_size"] = 16
    tensor = inputs[0]._get_tensor
    inputs[0]._get_tensor = lambda: {**tensor(), "data": [7] * 4, "parameters": {"binary_data_size": 16}}
    s.fails("INVALID_ARGUMENT", lambda: s.client.infer("sum_difference", inputs), "'a'", "got both")


@both("a model that says no")
def _(s: Session) -> None:
    call = lambda: s.client.infer("total", s.number(-1), sequence_id=9, sequence_start=True)  # noqa: E731
    s.fails("INVALID_ARGUMENT", call, "'x'", "expected", "got less")


def gate(s: Session, is_open: bool) -> int:
    """Let calls of the model `held` end, or not; how many are running."""
    return int(s.client.infer("gate", s.number(is_open)).as_numpy("running")[0, 0])


def hold(s: Session, client: Any, answers: queue.Queue[Any]) -> Any:
    """A call of the model `held` that runs until the gate is opened."""
    gate(s, is_open=False)
    if s.is_grpc:
        asked = client.async_infer("held", s.number(0), lambda result, error: answers.put(error or result))
    else:
        asked = client.async_infer("held", s.number(0))
    wait_for(lambda: gate(s, is_open=False) == 1, "the model to run")
    return asked


def queued(s: Session) -> int:
    """How many calls of the model `held` wait."""
    s.client.is_server_live()  # over HTTP, calls go ahead while the client waits for another
    with urllib.request.urlopen(f"http://127.0.0.1:{s.ports['http']}/metrics", timeout=20) as answer:
        (found,) = re.findall(r'^hurtle_queue_length{model="held".*} (\d+)$', answer.read().decode(), re.MULTILINE)
    return int(found)


def result_of(asked: Any) -> Any:
    """A result of the HTTP client, or its error."""
    try:
        return asked.get_result(timeout=20)
    except InferenceServerException as error:
        return error


@both("a queue that is full")
def _(s: Session) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with s.connect() as client:
        first = hold(s, client, answers)
        if s.is_grpc:
            for n in range(1, 6):
                client.async_infer("held", s.number(n), lambda result, error: answers.put(error or result))
                wait_for(lambda n=n: queued(s) == min(n, 2), "the request to wait")
            errors = [answers.get(timeout=20) for _ in range(3)]
            gate(s, is_open=True)
            results = [answers.get(timeout=20) for _ in range(3)]
        else:
            waiting = [client.async_infer("held", s.number(n)) for n in (1, 2)]
            wait_for(lambda: queued(s) == 2, "the requests to wait")
            errors = [result_of(client.async_infer("held", s.number(n))) for n in range(3, 6)]
            gate(s, is_open=True)
            results = [result_of(one) for one in (first, *waiting)]
    equal([type(one) for one in errors], [InferenceServerException] * 3, "refused: one runs, two wait")
    for error in errors:
        equal(error.status(), "StatusCode.RESOURCE_EXHAUSTED" if s.is_grpc else "429")
        names(error.message(), "held", "2 requests are waiting")
    equal(sorted(int(one.as_numpy("y")[0, 0]) for one in results), [0, 1, 2])


@only("grpc", "the client's timeout")
def _(s: Session) -> None:
    gate(s, is_open=False)
    s.fails("DEADLINE_EXCEEDED", lambda: s.client.infer("held", s.number(), client_timeout=0.1))
    wait_for(lambda: gate(s, is_open=True) == 0, "the model to end")


@both("the server's timeout, while it waits in the queue")
def _(s: Session) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with s.connect() as client:
        first = hold(s, client, answers)
        s.fails("DEADLINE_EXCEEDED", lambda: client.infer("held", s.number(2), timeout=100_000), "held", "not run")
        gate(s, is_open=True)
        answer = answers.get(timeout=20) if s.is_grpc else first.get_result(timeout=20)
        equal(answer.as_numpy("y").tolist(), [[0.0]])


@only("grpc", "cancel")
def _(s: Session) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with s.connect() as client:

        def runs() -> int:
            found = client.get_inference_statistics("held", as_json=True)
            return int(found["model_stats"][0].get("execution_count", 0))

        before = runs()
        hold(s, client, answers)
        waiting = [client.async_infer("held", s.number(n), lambda result, error: answers.put(error or result)) for n in (1, 2)]
        wait_for(lambda: queued(s) == 2, "the requests to wait")
        for one in reversed(waiting):
            one.cancel()
        wait_for(lambda: queued(s) == 0, "the requests to be dropped")
        gate(s, is_open=True)
        found = [answers.get(timeout=60) for _ in range(3)]
        errors = [one for one in found if isinstance(one, InferenceServerException)]
        equal([error.status() for error in errors], ["StatusCode.CANCELLED"] * 2)
        client.infer("held", s.number())
        equal(runs() - before, 2, "what was cancelled has been run")


@both("a server that drains")
def _(s: Session) -> None:
    client = s.draining
    with suppress(InferenceServerException):  # the other transport's check came first
        client.infer("switch", s.number())
    assert client.is_server_live()
    assert not client.is_server_ready()
    assert not client.is_model_ready("sum_difference")
    s.fails("UNAVAILABLE", lambda: client.infer("sum_difference", s.pair()), "shutting down")


@both("shared memory")
def _(s: Session) -> None:
    s.fails("UNIMPLEMENTED", lambda: s.client.register_system_shared_memory("region", "/key", 64), "system shared memory")
    s.fails("UNIMPLEMENTED", s.client.get_system_shared_memory_status, "system shared memory")
    s.fails("UNIMPLEMENTED", s.client.unregister_system_shared_memory, "system shared memory")
    s.fails("UNIMPLEMENTED", s.client.get_cuda_shared_memory_status, "CUDA shared memory")
    s.fails("UNIMPLEMENTED", lambda: s.client.register_cuda_shared_memory("region", b"aGFuZGxl", 0, 64), "CUDA shared memory")
    inputs = s.pair()
    inputs[0].set_shared_memory("region", 16)
    s.fails("UNIMPLEMENTED", lambda: s.client.infer("sum_difference", inputs), "'a'", "shared_memory_region")


@both("classification")
def _(s: Session) -> None:
    outputs = [s.module.InferRequestedOutput("sum", class_count=2)]
    s.fails("UNIMPLEMENTED", lambda: s.client.infer("sum_difference", s.pair(), outputs=outputs), "'sum'", "classification")


@both("trace and log settings")
def _(s: Session) -> None:
    s.fails("UNIMPLEMENTED", s.client.get_trace_settings, "trace settings")
    s.fails("UNIMPLEMENTED", s.client.get_log_settings, "log settings")
