"""The clients of `serve.py`: wrk for HTTP, h2load for gRPC, and before either one request whose answer is checked.

A `Case` is what is sent to a server and what must come back. h2load does not see gRPC's status, which is in the trailers; but a
failed call has no data, so the bytes received must be those of as many right answers. Without h2load, Hurtle's own load
generator drives gRPC; being written in Python it needs more of its core, which makes fast servers look slower.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
import numpy as np
from serve_servers import SCRIPTS, Running

from hurtle.serving.load.generator import Setting
from hurtle.serving.load.probe import Plan
from hurtle.serving.load.processes import measure
from hurtle.serving.load.request import GRPC_INFER, Target, grpc_body, grpc_message, http_body
from hurtle.serving.protos import ModelInferResponse

Format = Literal["gRPC", "HTTP binary", "HTTP JSON", "HTTP bytes"]
"""The Open Inference Protocol's three, and bare float32 values."""


@dataclass(frozen=True)
class Measured:
    """One run of a driver."""

    requests_per_second: float
    p50_ms: float
    p99_ms: float
    requests: int


@dataclass(frozen=True)
class Case:
    """What is sent to a server, in which format, and what must come back."""

    server: Running
    format: Format
    model: str
    inputs: Mapping[str, np.ndarray]
    output: str
    expected: np.ndarray

    def body(self) -> tuple[bytes, dict[str, str]]:
        """The body to post, and its headers."""
        if self.format == "gRPC":
            message = grpc_message(Target("", 0, "grpc", self.model), self.inputs)
            return grpc_body(message), {"content-type": "application/grpc", "te": "trailers"}
        if self.format == "HTTP bytes":
            return next(iter(self.inputs.values())).tobytes(), {"Content-Type": "application/octet-stream"}
        body, json_length = http_body(self.inputs, "binary" if self.format == "HTTP binary" else "json")
        if json_length is None:
            return body, {"Content-Type": "application/json"}
        return body, {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(json_length)}

    @property
    def path(self) -> str:
        """The path to post to."""
        if self.format == "gRPC":
            return GRPC_INFER
        return "/inference" if self.format == "HTTP bytes" else f"/v2/models/{self.model}/infer"

    def check(self) -> int:
        """Send one request and check the answer; returns its size.

        Raises:
            AssertionError: The answer is wrong.
            OSError, grpc.RpcError: There is none.
        """
        size, found = self._ask_grpc() if self.format == "gRPC" else self._ask_http()
        assert found.shape == self.expected.shape, (found.shape, self.expected.shape)
        np.testing.assert_allclose(found, self.expected, rtol=1e-4, atol=1e-5)
        return size

    def _ask_grpc(self) -> tuple[int, np.ndarray]:
        body, _ = self.body()
        with grpc.insecure_channel(f"127.0.0.1:{self.server.grpc_port}") as channel:
            answer = channel.unary_unary(GRPC_INFER)(body[5:], timeout=10)
        message = ModelInferResponse()
        message.ParseFromString(answer)
        (tensor,) = [tensor for tensor in message.outputs if tensor.name == self.output]
        if message.raw_output_contents:
            values = np.frombuffer(message.raw_output_contents[0], np.float32)
        else:
            values = np.array(tensor.contents.fp32_contents, np.float32)
        return 5 + len(answer), values.reshape(tuple(tensor.shape))

    def _ask_http(self) -> tuple[int, np.ndarray]:
        body, headers = self.body()
        connection = http.client.HTTPConnection("127.0.0.1", self.server.http_port, timeout=10)
        try:
            connection.request("POST", self.path, body, headers)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        assert response.status == 200, (response.status, data[:300])
        if self.format == "HTTP bytes":
            return len(data), np.frombuffer(data, np.float32).reshape(self.expected.shape)
        json_length = response.headers.get("Inference-Header-Content-Length")
        about = json.loads(data[: int(json_length)] if json_length else data)
        (tensor,) = [tensor for tensor in about["outputs"] if tensor["name"] == self.output]
        if json_length:
            values = np.frombuffer(data, np.float32, offset=int(json_length))
        else:
            values = np.array(tensor["data"], np.float32)
        return len(data), values.reshape(tensor["shape"])


class HeldUpError(Exception):
    """The client itself did not run for a while, so the figures mean nothing."""


def drive(case: Case, connections: int, seconds: int, core: int, folder: Path) -> Measured:
    """Load a server from one core; every answer must be right.

    Raises:
        AssertionError: One was not.
    """
    size = case.check()
    before = counts(case)
    body, headers = case.body()
    file = folder / "body"
    file.write_bytes(body)
    with_core = ["taskset", "-c", str(core)]
    grpc_driver = _h2load if shutil.which("h2load") else _own_generator
    found = (grpc_driver if case.format == "gRPC" else _wrk)(case, connections, seconds, with_core, file, headers, size)
    after = counts(case)
    if before is not None and after is not None:  # the server's own counts
        assert after["fail"] == before["fail"], f"{after['fail'] - before['fail']} requests failed"
        assert after["success"] - before["success"] >= found.requests, (before, after, found)
    return found


def counts(case: Case) -> dict[str, int] | None:
    """The server's own counts of answered and failed requests, or None if it has none."""
    if not case.server.name.startswith("hurtle"):
        return None
    connection = http.client.HTTPConnection("127.0.0.1", case.server.http_port, timeout=10)
    try:
        connection.request("GET", f"/v2/models/{case.model}/stats")
        stats = json.loads(connection.getresponse().read())["model_stats"][0]["inference_stats"]
    finally:
        connection.close()
    return {name: int(stats[name].get("count", 0)) for name in ("success", "fail")}


def _wrk(
    case: Case, connections: int, seconds: int, with_core: list[str], body: Path, headers: dict[str, str], size: int
) -> Measured:
    url = f"http://127.0.0.1:{case.server.http_port}{case.path}"
    lines = "\n".join(f"{name}: {value}" for name, value in headers.items())
    command = [
        *with_core,
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{seconds}s",
        "--timeout",
        "30s",
        "-s",
        str(SCRIPTS / "post.lua"),
        url,
    ]
    text = _output(command, {"BODY": str(body), "HEADERS": lines})
    found: dict[str, Any] = json.loads(re.findall(r"RESULT (.*)", text)[0])
    if found["seconds"] > 1.5 * seconds:
        raise HeldUpError(f"{seconds} s took {found['seconds']:.1f} s")
    assert found["errors"] == 0, f"{case}: {text}"
    assert found["requests"], f"{case}: {text}"
    return Measured(found["requests"] / found["seconds"], found["p50_ms"], found["p99_ms"], found["requests"])


def _h2load(
    case: Case, connections: int, seconds: int, with_core: list[str], body: Path, headers: dict[str, str], size: int
) -> Measured:
    log = body.with_name("h2load.log")
    log.unlink(missing_ok=True)
    url = f"http://127.0.0.1:{case.server.grpc_port}{case.path}"
    command = [*with_core, "h2load", "-D", str(seconds), f"-c{connections}"]
    command += ["-m1", "-t1", "-d", str(body), f"--log-file={log}"]
    for name, value in headers.items():
        command += ["-H", f"{name}: {value}"]
    text = _output([*command, url], {})
    done, good, bad, errored = (
        int(n) for n in re.findall(r"(\d+) done, (\d+) succeeded, (\d+) failed, (\d+) errored", text)[0]
    )
    (data,) = (int(n) for n in re.findall(r"headers \(space savings.*\((\d+)\) data", text))
    assert done == good, text
    assert bad == errored == 0, text
    # No --warm-up-time: its bytes would be counted, its calls not. What is under way at the end is counted in part.
    assert 0 <= data - good * size <= connections * size, f"{data} bytes for {good} answers of {size}: not all were right"
    latencies = np.sort([int(line.split("\t")[2]) for line in log.read_text().splitlines()]) / 1e3
    p50, p99 = (float(np.percentile(latencies, q)) for q in (50, 99))
    return Measured(good / seconds, p50, p99, good)


def _own_generator(
    case: Case, connections: int, seconds: int, with_core: list[str], body: Path, headers: dict[str, str], size: int
) -> Measured:
    target = Target("127.0.0.1", case.server.grpc_port or 0, "grpc", case.model)
    plan = Plan(target, grpc_message(target, case.inputs), len(next(iter(case.inputs.values()))))
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {int(with_core[-1])})
    try:
        found = measure(plan, Setting(connections, seconds=float(seconds), warm_up=0.2))
    finally:
        os.sched_setaffinity(0, cores)
    assert not found.failed, found.errors
    return Measured(found.requests_per_second, found.latency_ms(50), found.latency_ms(99), found.answers)


def _output(command: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **variables})
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
