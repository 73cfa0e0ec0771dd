"""tritonclient against our server: what must be refused, how, and with which words. triton_conformance.py runs it."""

from __future__ import annotations

import queue
import time
from contextlib import suppress
from typing import Any

import numpy as np
from checks import equal, names
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


@both("a queue that is full")
def _(s: Session) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with s.connect() as client:
        if s.is_grpc:
            for n in range(6):
                client.async_infer("slow", s.number(n), lambda result, error: answers.put(error or result))
                if not n:
                    time.sleep(0.1)  # it runs, and does not wait
            found = [answers.get(timeout=20) for _ in range(6)]
        else:
            found = []
            first = client.async_infer("slow", s.number(0))
            client.is_server_live()  # lets the first go ahead
            for one in [first, *(client.async_infer("slow", s.number(n)) for n in range(1, 6))]:
                try:
                    found.append(one.get_result(timeout=20))
                except InferenceServerException as error:
                    found.append(error)
    errors = [one for one in found if isinstance(one, InferenceServerException)]
    equal(len(errors), 3, "refused: one runs, two wait")
    for error in errors:
        equal(error.status(), "StatusCode.RESOURCE_EXHAUSTED" if s.is_grpc else "429")
        names(error.message(), "slow", "2 requests are waiting")
    equal(sorted(int(one.as_numpy("y")[0, 0]) for one in found if one not in errors), [0, 1, 2])


@only("grpc", "the client's timeout")
def _(s: Session) -> None:
    s.fails("DEADLINE_EXCEEDED", lambda: s.client.infer("slow", s.number(), client_timeout=0.1))
    time.sleep(1.0)


@both("the server's timeout, while it waits in the queue")
def _(s: Session) -> None:
    with s.connect() as client:
        if s.is_grpc:
            answers: queue.Queue[Any] = queue.Queue()
            client.async_infer("slow", s.number(1), lambda result, error: answers.put(error or result))
            time.sleep(0.1)
            s.fails("DEADLINE_EXCEEDED", lambda: client.infer("slow", s.number(2), timeout=100_000), "slow", "not run")
            equal(answers.get(timeout=10).as_numpy("y").tolist(), [[1.0]])
        else:
            first = client.async_infer("slow", s.number(1))
            second = client.async_infer("slow", s.number(2), timeout=100_000)
            s.fails("DEADLINE_EXCEEDED", second.get_result, "slow", "not run")
            equal(first.get_result().as_numpy("y").tolist(), [[1.0]])


@only("grpc", "cancel")
def _(s: Session) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with s.connect() as client:

        def runs() -> int:
            found = client.get_inference_statistics("slow", as_json=True)
            return int(found["model_stats"][0].get("execution_count", 0))

        before, running = runs(), []
        for n in range(3):
            running.append(client.async_infer("slow", s.number(n), lambda result, error: answers.put(error or result)))
            time.sleep(0.05)
        running[2].cancel()
        running[1].cancel()
        found = [answers.get(timeout=60) for _ in range(3)]
        errors = [one for one in found if isinstance(one, InferenceServerException)]
        equal([error.status() for error in errors], ["StatusCode.CANCELLED"] * 2)
        client.infer("slow", s.number())
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
