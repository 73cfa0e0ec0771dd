"""tritonclient, unmodified, against our server: what must work. Run by test_conformance.py with the ports as JSON.

python triton_conformance.py '{"grpc": 8001, "http": 8000, …}'
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import time
from typing import Any

import ml_dtypes
import numpy as np
import triton_aio  # noqa: F401  enters its checks
import triton_refusals  # noqa: F401
from checks import equal, names, run_checks, wait_for
from triton_session import Session, both, only
from tritonclient.utils import InferenceServerException

DATATYPES: dict[str, Any] = {
    **{f"INT{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BOOL": np.dtype(bool),
    "BYTES": np.dtype(object),
}


def sample(datatype: str) -> np.ndarray:
    """Values at the edges of a datatype, (2, 3)."""
    dtype = DATATYPES[datatype]
    if datatype == "BYTES":
        return np.array([[b"", b"a", "käse".encode()], [b"x" * 300, b"\n\"'", b"end"]], object)
    if dtype.kind == "b":
        return np.array([[True, False, True], [False, False, True]])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.array([[limits.min, limits.max, 0], [1, 2, 100]], dtype)
    return np.array([[0.0, -1.5, 3.0], [1e-3, 1000.0, -0.0]]).astype(dtype)


@both("live, ready and model ready")
def _(s: Session) -> None:
    client = s.client
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("sum_difference")
    assert client.is_model_ready("scale", "1")
    assert not client.is_model_ready("scale", "2")
    assert not client.is_model_ready("nobody")


def as_json(s: Session, call: Any, *arguments: Any, **options: Any) -> Any:
    return call(*arguments, **options, **({"as_json": True} if s.is_grpc else {}))


@both("server metadata")
def _(s: Session) -> None:
    found = as_json(s, s.client.get_server_metadata)
    equal(found["name"], "hurtle")
    assert found["version"]
    assert {"sequence", "model_repository", "statistics", "binary_tensor_data"} <= set(found["extensions"])


@both("model metadata")
def _(s: Session) -> None:
    found = as_json(s, s.client.get_model_metadata, "scale")
    equal((found["name"], found["versions"], found["platform"]), ("scale", ["1", "3"], "test_scale"))
    found = as_json(s, s.client.get_model_metadata, "sum_difference", "1")
    equal([(tensor["name"], tensor["datatype"], list(map(int, tensor["shape"]))) for tensor in found["inputs"]],
          [("a", "INT32", [-1, 4]), ("b", "INT32", [-1, 4])])  # fmt: skip
    equal([tensor["name"] for tensor in found["outputs"]], ["sum", "difference"])


@both("model config")
def _(s: Session) -> None:
    found = as_json(s, s.client.get_model_config, "sum_difference")
    found = found["config"] if s.is_grpc else found
    equal((found["name"], found["max_batch_size"]), ("sum_difference", 8))
    equal([(tensor["data_type"], list(map(int, tensor["dims"]))) for tensor in found["input"]], [("TYPE_INT32", [4])] * 2)
    equal([tensor["name"] for tensor in found["output"]], ["sum", "difference"])


def infer_sample(s: Session, datatype: str, binary: bool | None) -> None:
    array = sample(datatype)
    outputs = None if binary is None else [s.output("y", binary)]
    answer = s.client.infer(f"identity_{datatype.lower()}", [s.input("x", array, binary)], outputs=outputs)
    found = answer.as_numpy("y")
    expected = array
    equal((found.dtype, found.shape), (expected.dtype, expected.shape))
    if datatype == "BYTES" and binary is False:  # the client gives JSON's text as it is
        found = np.vectorize(lambda value: value.encode() if isinstance(value, str) else value, otypes=[object])(found)
    equal(found.tolist(), expected.tolist())
    described = answer.get_output("y")
    described = described if isinstance(described, dict) else {"datatype": described.datatype, "shape": list(described.shape)}
    equal((described["datatype"], list(described["shape"])), (datatype, [2, 3]))


for _datatype in DATATYPES:
    only("grpc", f"infer {_datatype}")(lambda s, datatype=_datatype: infer_sample(s, datatype, None))
    only("http", f"infer {_datatype} as binary")(lambda s, datatype=_datatype: infer_sample(s, datatype, True))
    if _datatype not in ("FP16", "BF16"):  # which the client sends as binary only
        only("http", f"infer {_datatype} as JSON")(lambda s, datatype=_datatype: infer_sample(s, datatype, False))


@both("infer with no rows")
def _(s: Session) -> None:
    found = s.client.infer("identity_fp32", [s.input("x", np.zeros((0, 3), np.float32))]).as_numpy("y")
    equal(found.shape, (0, 3))


@both("several inputs and outputs, request id echoed")
def _(s: Session) -> None:
    answer = s.client.infer("sum_difference", s.pair(7, 3, 2), request_id="number 42 – ü")
    equal((answer.as_numpy("sum").tolist(), answer.as_numpy("difference").tolist()), ([[10] * 4] * 2, [[4] * 4] * 2))
    said = answer.get_response()
    found = (said.id, said.model_name, said.model_version) if s.is_grpc else (
        said["id"], said["model_name"], said["model_version"])  # fmt: skip
    equal(found, ("number 42 – ü", "sum_difference", "1"))


@both("requested outputs, in their order")
def _(s: Session) -> None:
    answer = s.client.infer("sum_difference", s.pair(), outputs=[s.output("difference")])
    equal(answer.as_numpy("sum"), None)
    equal(answer.as_numpy("difference").tolist(), [[4] * 4])
    said = s.client.infer("sum_difference", s.pair(), outputs=[s.output("difference"), s.output("sum")]).get_response()
    equal([tensor.name if s.is_grpc else tensor["name"] for tensor in (said.outputs if s.is_grpc else said["outputs"])],
          ["difference", "sum"])  # fmt: skip


@both("a version by name, the newest by default")
def _(s: Session) -> None:
    x = [s.input("x", np.ones((1, 2), np.float32))]
    for version, expected in (("1", 2.125), ("3", 2.375), ("", 2.375)):
        equal(s.client.infer("scale", x, version).as_numpy("y").tolist(), [[expected] * 2], version)


@only("http", "JSON in with binary out, and binary in with JSON out")
def _(s: Session) -> None:
    array = sample("FP32")
    for way in (True, False):
        answer = s.client.infer("identity_fp32", [s.input("x", array, way)], outputs=[s.output("y", not way)])
        equal(answer.as_numpy("y").tolist(), array.tolist())


@both("large tensors")
def _(s: Session) -> None:
    array = np.random.default_rng(0).standard_normal((500, 1000)).astype(np.float32)
    assert np.array_equal(s.client.infer("identity_fp32", [s.input("x", array)]).as_numpy("y"), array)


def infer_compressed(s: Session, algorithm: str) -> None:
    array = np.zeros((100, 500), np.float32)
    array[3, 4] = 5
    inputs = [s.input("x", array)]
    if s.is_grpc:
        found = s.client.infer("identity_fp32", inputs, compression_algorithm=algorithm)
        assert np.array_equal(found.as_numpy("y"), array)
        return
    for request, response in ((algorithm, None), (None, algorithm), (algorithm, algorithm)):
        found = s.client.infer("identity_fp32", inputs, request_compression_algorithm=request,
                               response_compression_algorithm=response)  # fmt: skip
        assert np.array_equal(found.as_numpy("y"), array)


both("compression with gzip")(lambda s: infer_compressed(s, "gzip"))
both("compression with deflate")(lambda s: infer_compressed(s, "deflate"))


@both("many in flight")
def _(s: Session) -> None:
    count = 200 if s.is_grpc else 50  # over HTTP the client waits for 10 ms after each
    if s.is_grpc:
        answers: queue.Queue[Any] = queue.Queue()
        for n in range(count):
            s.client.async_infer("sum_difference", s.pair(n, 1), lambda result, error: answers.put((result, error)),
                                 request_id=str(n))  # fmt: skip
        found = [answers.get(timeout=20) for _ in range(count)]
        equal([error for _, error in found if error is not None], [])
        said = {result.get_response().id: result.as_numpy("sum").tolist() for result, _ in found}
    else:
        asked = [s.client.async_infer("sum_difference", s.pair(n, 1), request_id=str(n)) for n in range(count)]
        results = [one.get_result(timeout=20) for one in asked]
        said = {result.get_response()["id"]: result.as_numpy("sum").tolist() for result in results}
    equal(said, {str(n): [[n + 1] * 4] for n in range(count)})


def stream(s: Session, send: Any, count: int) -> list[Any]:
    """What comes back over a stream that `send` fills."""
    answers: queue.Queue[Any] = queue.Queue()
    with s.connect() as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        send(client)
        found = [answers.get(timeout=20) for _ in range(count)]
        client.stop_stream()
        assert answers.empty()
    return found


@only("grpc", "stream infer answers in order")
def _(s: Session) -> None:
    def send(client: Any) -> None:
        for n in range(100):
            client.async_stream_infer("sum_difference", s.pair(n, 1), request_id=str(n))

    found = stream(s, send, 100)
    equal([error for _, error in found if error is not None], [])
    equal([result.get_response().id for result, _ in found], [str(n) for n in range(100)])
    equal([int(result.as_numpy("sum")[0, 0]) for result, _ in found], list(range(1, 101)))
    assert all(result.get_response().parameters["triton_final_response"].bool_param for result, _ in found)


@only("grpc", "an error in a stream leaves the stream open")
def _(s: Session) -> None:
    def send(client: Any) -> None:
        client.async_stream_infer("sum_difference", s.pair(1), request_id="good")
        client.async_stream_infer("nobody", s.pair(2), request_id="unknown")
        client.async_stream_infer("sum_difference", s.pair(2)[:1], request_id="missing")
        client.async_stream_infer("sum_difference", s.pair(3), request_id="good again")

    (first, no_error), (_, unknown), (_, missing), (last, _) = stream(s, send, 4)
    equal((no_error, first.get_response().id, last.get_response().id), (None, "good", "good again"))
    equal(last.as_numpy("sum").tolist(), [[6] * 4])
    assert isinstance(unknown, InferenceServerException)
    names(str(unknown), "nobody")
    names(str(missing), "'b'", "'a'")


@only("grpc", "a sequence over a stream")
def _(s: Session) -> None:
    def send(client: Any) -> None:
        for n in range(20):
            for sequence in (101, 102, "text"):
                value = n * (2 if sequence == 102 else 1)
                client.async_stream_infer("total", s.number(value), request_id=f"{sequence}/{n}", sequence_id=sequence,
                                          sequence_start=n == 0, sequence_end=n == 19)  # fmt: skip

    found = stream(s, send, 60)
    equal([error for _, error in found if error is not None], [])
    totals = {result.get_response().id: float(result.as_numpy("total")[0, 0]) for result, _ in found}
    sums = np.cumsum(range(20)).tolist()
    expected = {f"{q}/{n}": sums[n] * (2 if q == 102 else 1) for n in range(20) for q in (101, 102, "text")}
    equal(totals, expected)


@both("a sequence by single calls")
def _(s: Session) -> None:
    def step(value: float, **options: Any) -> list[Any]:
        return s.client.infer("total", s.number(value), sequence_id=7, **options).as_numpy("total").tolist()

    equal(step(5, sequence_start=True), [[5]])
    equal(step(2), [[7]])
    equal(step(1, sequence_end=True), [[8]])
    s.fails("INVALID_ARGUMENT", lambda: step(1), "sequence_start", "7")
    equal(step(3, sequence_start=True, sequence_end=True), [[3]])


@both("unload, index and load")
def _(s: Session) -> None:
    def states() -> dict[tuple[str, str], str]:
        found = as_json(s, s.client.get_model_repository_index)
        found = found["models"] if s.is_grpc else found
        return {(row["name"], row["version"]): row["state"] for row in found}

    x = [s.input("x", np.ones((1, 2), np.float32))]
    equal(states()[("other", "1")], "READY")
    s.client.unload_model("other")
    equal(states()[("other", "1")], "UNAVAILABLE")
    assert not s.client.is_model_ready("other")
    s.fails("UNAVAILABLE", lambda: s.client.infer("other", x), "other")
    s.client.load_model("other")
    equal(states()[("other", "1")], "READY")
    equal(s.client.infer("other", x).as_numpy("y").tolist(), [[5.125] * 2])
    s.fails("NOT_FOUND", lambda: s.client.load_model("nobody"), "nobody")
    s.fails("NOT_FOUND", lambda: s.client.unload_model("nobody"), "nobody")


@both("load with a config")
def _(s: Session) -> None:
    def most() -> int:
        found = as_json(s, s.client.get_model_config, "other")
        return int((found["config"] if s.is_grpc else found)["max_batch_size"])

    default = most()
    s.client.load_model("other", config='{"max_batch_size": 3}')
    equal(most(), 3)
    s.fails("INVALID_ARGUMENT", lambda: s.client.infer("other", [s.input("x", np.ones((4, 2), np.float32))]), "3 rows", "4")
    s.fails("INVALID_ARGUMENT", lambda: s.client.load_model("other", config='{"ensemble": 1}'), "ensemble")
    s.fails("INVALID_ARGUMENT", lambda: s.client.load_model("other", config='{"max_batch_size": -1}'), "max_batch_size")
    equal(most(), 3)
    s.client.load_model("other")
    equal(most(), default)


@both("load with files, which this server does not allow")
def _(s: Session) -> None:
    files = {"file:1/model.onnx": b"bytes"}
    s.fails("PERMISSION_DENIED", lambda: s.client.load_model("sent", config="{}", files=files), "--allow-file-overrides")


@both("statistics")
def _(s: Session) -> None:
    def counts() -> dict[str, Any]:
        found = as_json(s, s.client.get_inference_statistics, "scale", "3")["model_stats"]
        equal([(row["name"], row["version"]) for row in found], [("scale", "3")])
        return found[0]

    def number(value: Any) -> int:
        return int(value or 0)

    before = counts()
    s.client.infer("scale", [s.input("x", np.ones((5, 2), np.float32))])
    after = counts()
    equal(number(after["inference_count"]) - number(before.get("inference_count")), 5, "inference_count")
    equal(number(after["execution_count"]) - number(before.get("execution_count")), 1, "execution_count")
    success = after["inference_stats"]["success"]
    assert number(success["count"]) >= 1
    assert number(success["ns"]) > 0
    every = as_json(s, s.client.get_inference_statistics)["model_stats"]
    assert {"scale", "held", "sum_difference"} <= {row["name"] for row in every}


@only("grpc", "SIGTERM: what runs is answered, the next is UNAVAILABLE")
def _(s: Session) -> None:
    with s.connect("leaving_") as client:
        answers: queue.Queue[Any] = queue.Queue()
        client.async_infer("slow", s.number(4), lambda result, error: answers.put((result, error)))
        time.sleep(0.2)
        os.kill(s.ports["leaving_pid"], signal.SIGTERM)
        time.sleep(0.2)
        s.fails("UNAVAILABLE", lambda: client.infer("slow", s.number(5), client_timeout=5))
        result, error = answers.get(timeout=10)
        equal(error, None)
        equal(result.as_numpy("y").tolist(), [[4.0]])
    wait_for(lambda: not alive(s.ports["leaving_pid"]), "the server to end")


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rsplit(")")[-1].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    ports = json.loads(sys.argv[1])
    run_checks({transport: Session(transport, ports) for transport in ("grpc", "http")})
