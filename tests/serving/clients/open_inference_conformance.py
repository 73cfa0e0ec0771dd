"""Independent clients: open-inference-grpc and open-inference-openapi (generated from the protocol's own files), and curl.

python open_inference_conformance.py '{"grpc": 8001, "http": 8000}'
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import warnings
from typing import Any

import grpc
import numpy as np
from checks import check, equal, names, run_checks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it speaks pydantic's old dialect
    from open_inference.grpc import protocol as pb
    from open_inference.grpc.service import GRPCInferenceServiceStub
    from open_inference.openapi.client import OpenInferenceClient
    from open_inference.openapi.core import ApiError
    from open_inference.openapi.types import InferenceRequest, RequestInput, RequestOutput

TYPED = {
    "BOOL": ("bool_contents", [True, False]),
    "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-(2**15), 2**15 - 1]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 65535]),
    "UINT32": ("uint_contents", [0, 2**32 - 1]),
    "UINT64": ("uint64_contents", [0, 2**64 - 1]),
    "FP32": ("fp32_contents", [-1.5, 3.25]),
    "FP64": ("fp64_contents", [-1e300, 1e-300]),
    "BYTES": ("bytes_contents", [b"", b"\xff\x00\n"]),
}
NUMPY = {"BOOL": "?", "FP32": "<f4", "FP64": "<f8", "FP16": "<f2"}


class Clients:
    def __init__(self, ports: dict[str, int]):
        self.stub = GRPCInferenceServiceStub(grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}"))
        self.rest = OpenInferenceClient(base_url=f"http://127.0.0.1:{ports['http']}", timeout=20)
        self.url = f"http://127.0.0.1:{ports['http']}"

    def infer(self, model: str, *inputs: Any, **fields: Any) -> Any:
        request = pb.ModelInferRequest(model_name=model, inputs=inputs, **fields)
        return self.stub.ModelInfer(request, timeout=20)

    def fails(self, status: str, call: Any, *words: str) -> None:
        try:
            call()
        except grpc.RpcError as error:
            equal(error.code().name, status, error.details())
            names(error.details(), *words)
            return
        raise AssertionError(f"expected {status}, got an answer")

    def curl(self, path: str, *arguments: str, data: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body)."""
        command = ["curl", "-sS", "-i", "--max-time", "20", *arguments, self.url + path]
        if data is not None:
            command += ["--data-binary", "@-"]
        done = subprocess.run(command, input=data, capture_output=True, timeout=30, check=True)
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        while head.startswith(b"HTTP/1.1 1"):  # 100 Continue
            head, _, body = body.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return int(first.split()[1]), headers, body


def tensor(name: str, datatype: str, shape: list[int], **contents: Any) -> Any:
    found = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    for field, values in contents.items():
        getattr(found.contents, field).extend(values)
    return found


@check("grpc: health")
def _(c: Clients) -> None:
    assert c.stub.ServerLive(pb.ServerLiveRequest(), timeout=5).live
    assert c.stub.ServerReady(pb.ServerReadyRequest(), timeout=5).ready
    assert c.stub.ModelReady(pb.ModelReadyRequest(name="scale", version="3"), timeout=5).ready


@check("grpc: metadata")
def _(c: Clients) -> None:
    equal(c.stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=5).name, "hurtle")
    found = c.stub.ModelMetadata(pb.ModelMetadataRequest(name="identity_bytes"), timeout=5)
    equal((found.name, list(found.versions), found.platform), ("identity_bytes", ["1"], "test_identity"))
    equal([(one.name, one.datatype, list(one.shape)) for one in found.inputs], [("x", "BYTES", [-1, -1])])


def read_raw(datatype: str, raw: bytes) -> list[Any]:
    if datatype == "BYTES":
        values, at = [], 0
        while at < len(raw):
            (size,) = struct.unpack_from("<I", raw, at)
            values.append(raw[at + 4 : at + 4 + size])
            at += 4 + size
        return values
    kind = NUMPY.get(datatype) or f"<{'u' if datatype[0] == 'U' else 'i'}{int(datatype.split('INT')[1]) // 8}"
    return np.frombuffer(raw, kind).tolist()


def infer_typed(c: Clients, datatype: str) -> None:
    field, values = TYPED[datatype]
    found = c.infer(f"identity_{datatype.lower()}", tensor("x", datatype, [1, 2], **{field: values}), id="typed")
    equal((found.id, found.outputs[0].name, found.outputs[0].datatype), ("typed", "y", datatype))
    equal(list(found.outputs[0].shape), [1, 2])
    equal(read_raw(datatype, found.raw_output_contents[0]), values)


for _datatype in TYPED:
    check(f"grpc: typed {_datatype}")(lambda c, datatype=_datatype: infer_typed(c, datatype))


@check("grpc: several typed inputs")
def _(c: Clients) -> None:
    inputs = [tensor(name, "INT32", [1, 4], int_contents=values) for name, values in (("a", [1, 2, 3, 4]), ("b", [4] * 4))]
    found = c.infer("sum_difference", *inputs, outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="difference")])
    equal([one.name for one in found.outputs], ["difference"])
    equal(read_raw("INT32", found.raw_output_contents[0]), [-3, -2, -1, 0])


@check("grpc: typed values that do not fit")
def _(c: Clients) -> None:
    big = tensor("x", "INT8", [1, 2], int_contents=[1, 300])
    c.fails("INVALID_ARGUMENT", lambda: c.infer("identity_int8", big), "'x'", "INT8", "got 300")
    short = tensor("x", "FP32", [1, 3], fp32_contents=[1.0, 2.0])
    c.fails("INVALID_ARGUMENT", lambda: c.infer("identity_fp32", short), "'x'", "takes 3 values", "got 2")
    other = tensor("x", "FP32", [1, 2], int_contents=[1, 2])
    c.fails("INVALID_ARGUMENT", lambda: c.infer("identity_fp32", other), "'x'", "fp32_contents", "got int_contents")
    half = tensor("x", "FP16", [1, 2], fp32_contents=[1, 2])
    c.fails("INVALID_ARGUMENT", lambda: c.infer("identity_fp16", half), "'x'", "FP16", "raw_input_contents")


@check("grpc: unknown model and input")
def _(c: Clients) -> None:
    x = tensor("x", "FP32", [1, 2], fp32_contents=[1, 2])
    c.fails("NOT_FOUND", lambda: c.infer("nobody", x), "nobody")
    c.fails("INVALID_ARGUMENT", lambda: c.infer("sum_difference", x), "'x'")
    c.fails("INVALID_ARGUMENT", lambda: c.infer("sum_difference", raw_input_contents=[b"1"]), "0 inputs", "got 1")


@check("openapi: health")
def _(c: Clients) -> None:
    c.rest.check_server_liveness()
    c.rest.check_server_readiness()
    c.rest.check_model_readiness("scale")
    c.rest.check_model_version_readiness("scale", "1")


@check("openapi: metadata")
def _(c: Clients) -> None:
    equal(c.rest.read_server_metadata().name, "hurtle")
    found = c.rest.read_model_metadata("sum_difference")
    equal([(one.name, one.datatype, one.shape) for one in found.inputs], [("a", "INT32", [-1, 4]), ("b", "INT32", [-1, 4])])


@check("openapi: infer")
def _(c: Clients) -> None:
    request = InferenceRequest(
        id="42",
        inputs=[
            RequestInput(name="a", datatype="INT32", shape=[2, 4], data=[[1, 2, 3, 4], [5, 6, 7, 8]]),
            RequestInput(name="b", datatype="INT32", shape=[2, 4], data=[1] * 8),
        ],
        outputs=[RequestOutput(name="sum")],
    )
    found = c.rest.model_infer("sum_difference", request=request)
    equal((found.id, found.model_name, [one.name for one in found.outputs]), ("42", "sum_difference", ["sum"]))
    data = found.outputs[0].data
    equal(list(getattr(data, "__root__", data)), [2, 3, 4, 5, 6, 7, 8, 9])


@check("openapi: bad input and unknown model")
def _(c: Clients) -> None:
    bad = InferenceRequest(inputs=[RequestInput(name="a", datatype="INT32", shape=[1, 4], data=[1, 2])])
    for model, status, word in (("sum_difference", 400, "takes 4 values"), ("nobody", 404, "nobody")):
        try:
            c.rest.model_infer(model, request=bad if status == 400 else InferenceRequest(inputs=[]))
        except ApiError as caught:
            equal(caught.status_code, status)
            names(str(caught.body), word)
        else:
            raise AssertionError(f"expected {status}, got an answer")


@check("curl: health, metadata, metrics")
def _(c: Clients) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/scale/ready", "/v2/models/scale/versions/1/ready"):
        equal(c.curl(path)[0], 200, path)
    equal(json.loads(c.curl("/v2")[2])["name"], "hurtle")
    equal(json.loads(c.curl("/v2/models/scale")[2])["versions"], ["1", "3"])
    names(c.curl("/metrics")[2].decode(), "# TYPE", "scale")
    status, headers, body = c.curl("/v2", "--head")
    equal((status, body), (200, b""))
    assert int(headers["content-length"]) > 0


@check("curl: infer with JSON")
def _(c: Clients) -> None:
    text = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2]}]}'
    status, headers, body = c.curl("/v2/models/scale/versions/1/infer", data=text)
    equal((status, headers["content-type"].split(";")[0]), (200, "application/json"))
    equal(json.loads(body)["outputs"], [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [3.125, 4.125]}])


@check("curl: infer in chunks, and with Expect: 100-continue")
def _(c: Clients) -> None:
    text = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2]}]}'
    for header in ("Transfer-Encoding: chunked", "Expect: 100-continue"):
        status, _, body = c.curl("/v2/models/scale/versions/1/infer", "-H", header, data=text)
        equal((status, json.loads(body)["outputs"][0]["data"]), (200, [3.125, 4.125]), header)


@check("curl: infer with binary data")
def _(c: Clients) -> None:
    raw = np.array([1.5, 2], "<f4").tobytes()
    head = json.dumps({
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": len(raw)}}],
        "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
    }).encode()  # fmt: skip
    length = f"Inference-Header-Content-Length: {len(head)}"
    status, headers, body = c.curl("/v2/models/scale/versions/1/infer", "-H", length, data=head + raw)
    equal(status, 200, body)
    at = int(headers["inference-header-content-length"])
    equal(json.loads(body[:at])["outputs"][0]["parameters"], {"binary_data_size": 8})
    equal(np.frombuffer(body[at:], "<f4").tolist(), [3.125, 4.125])


@check("curl: compressed answers")
def _(c: Clients) -> None:
    x = {"name": "x", "datatype": "FP32", "shape": [1, 2000], "data": [1.0] * 2000}
    text = json.dumps({"inputs": [x]}).encode()
    status, headers, body = c.curl("/v2/models/identity_fp32/infer", "--compressed", data=text)
    equal((status, json.loads(body)["outputs"][0]["data"]), (200, x["data"]))
    equal(headers["content-encoding"] in ("gzip", "deflate"), True)


@check("curl: errors are JSON with the right status")
def _(c: Clients) -> None:
    for path, arguments, data, status, word in (
        ("/v2/nothing", (), None, 404, "/v2/nothing"),
        ("/v2/models/nobody", (), None, 404, "nobody"),
        ("/v2/models/scale/infer", (), None, 405, "POST"),
        ("/v2/models/scale/infer", (), b"{", 400, "JSON"),
        ("/v2/models/scale/infer", (), b"[]", 400, "object"),
        ("/v2/models/scale/infer", ("-H", "Inference-Header-Content-Length: 99"), b"{}", 400, "99"),
        ("/v2/models/scale/infer", (), b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": ["a"]}]}',
         400, "'x'"),
        ("/v2/models/../../etc/passwd", ("--path-as-is",), None, 404, "No such path"),
        ("/v2/repository/models/..%2f..%2fetc/load", ("-X", "POST"), None, 404, "No such path"),
    ):  # fmt: skip
        found, headers, body = c.curl(path, *arguments, data=data)
        equal((found, headers["content-type"].split(";")[0]), (status, "application/json"), path)
        names(json.loads(body)["error"], word)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_checks(Clients(json.loads(sys.argv[1])))
