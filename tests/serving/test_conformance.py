"""Real clients, unmodified, in an environment of their own (`make clients`): tritonclient, generated clients, curl.

Each check of tests/serving/clients/ is a test here, by a name from a fixed list: a check that is not run fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conformance_models import Switch, make_conformance_config

from hurtle.serving.server import ServerThread
from hurtle.serving.tensors import DTYPES

ROOT = Path(__file__).parents[2]
CERTIFICATES = Path(__file__).parent / "certificates"
SCRIPTS = Path(__file__).parent / "clients"
PYTHON = Path(os.environ.get("HURTLE_CLIENTS", ROOT / ".venv-clients")) / "bin" / "python"
BOTH = (
    "live, ready and model ready", "server metadata", "model metadata", "model config", "infer with no rows",
    "several inputs and outputs, request id echoed", "requested outputs, in their order",
    "a version by name, the newest by default", "large tensors", "compression with gzip", "compression with deflate",
    "load with a config", "load with files, which this server does not allow",
    "many in flight", "a sequence by single calls", "unload, index and load", "statistics",
    "unknown model", "unknown version", "unknown input", "missing input", "an input twice", "wrong datatype",
    "a datatype that does not exist", "wrong shape", "inputs of different batches", "negative and overflowing dimensions",
    "wrong byte size", "unknown output", "too many rows", "a message that is too large", "a model that says no",
    "a queue that is full", "the server's timeout, while it waits in the queue", "a server that drains", "shared memory",
    "classification", "trace and log settings", "asyncio: health, metadata, many in flight", "asyncio: errors",
    "TLS with a token",
)  # fmt: skip
TRITON = (
    *(f"{transport}: {name}" for name in BOTH for transport in ("grpc", "http")),
    *(f"grpc: infer {datatype}" for datatype in DTYPES),
    *(f"http: infer {datatype} as binary" for datatype in DTYPES),
    *(f"http: infer {datatype} as JSON" for datatype in DTYPES if datatype not in ("FP16", "BF16")),
    "http: JSON in with binary out, and binary in with JSON out",
    "http: wrong number of values in JSON",
    "http: data in JSON and binary together",
    "grpc: raw and typed contents together",
    "grpc: stream infer answers in order",
    "grpc: an error in a stream leaves the stream open",
    "grpc: a sequence over a stream",
    "grpc: the client's timeout",
    "grpc: asyncio: a stream",
    "http: asyncio: compression",
    "grpc: cancel",
    "grpc: SIGTERM: what runs is answered, the next is UNAVAILABLE",
)
OPEN_INFERENCE = (
    *("grpc: health", "grpc: metadata", "grpc: several typed inputs", "grpc: typed values that do not fit"),
    *(f"grpc: typed {datatype}" for datatype in DTYPES if datatype not in ("FP16", "BF16")),
    *("grpc: unknown model and input", "openapi: health", "openapi: metadata", "openapi: infer"),
    *("openapi: bad input and unknown model", "curl: health, metadata, metrics", "curl: infer with JSON"),
    *("curl: infer in chunks, and with Expect: 100-continue", "curl: infer with binary data", "curl: compressed answers"),
    "curl: errors are JSON with the right status",
)


@pytest.fixture(scope="module")
def ports(tmp_path_factory):
    """Of a server for most, of one that stops when its model `switch` is asked, and of a process to be ended."""
    folder = tmp_path_factory.mktemp("models")
    draining_folder = tmp_path_factory.mktemp("draining")
    secure_folder = tmp_path_factory.mktemp("secure")
    token = secure_folder / "token"
    token.write_text("s3cret")
    tls = {"tls_cert": str(CERTIFICATES / "server.pem"), "tls_key": str(CERTIFICATES / "server.key")}
    with (
        ServerThread(make_conformance_config(folder)) as server,
        ServerThread(make_conformance_config(secure_folder, auth_token_file=str(token), **tls)) as secure,
        ServerThread(make_conformance_config(draining_folder)) as draining,
    ):
        Switch.flip = staticmethod(lambda: vars(draining.server.service).update(draining=True, stopped=True))
        leaving, leaving_ports = start_process(folder / "model.test")
        try:
            yield {
                "grpc": server.grpc_port,
                "http": server.http_port,
                "draining_grpc": draining.grpc_port,
                "draining_http": draining.http_port,
                "secure_grpc": secure.grpc_port,
                "secure_http": secure.http_port,
                "certificates": str(CERTIFICATES),
                "leaving_http": leaving_ports[0],
                "leaving_grpc": leaving_ports[1],
                "leaving_pid": leaving.pid,
            }
        finally:
            leaving.kill()
            leaving.communicate()
            Switch.flip = staticmethod(lambda: None)


def start_process(model):
    process = subprocess.Popen(
        [sys.executable, "-m", "hurtle", "serve", f"slow={model}", "--backend", "conformance_models:Slow", "--executor",
         "worker", "--parameters", "delay=0.8", "--http-port", "0", "--grpc-port", "0"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"},
    )  # fmt: skip
    said = ""
    for line in process.stderr:
        said += line
        if line.startswith("ready"):
            break
    found = re.findall(r"127\.0\.0\.1:(\d+)", said)
    assert len(found) == 2, said
    return process, tuple(map(int, found))


def results_of(script, ports):
    if not PYTHON.exists():
        pytest.fail(f"The foreign clients are not installed in {PYTHON.parent.parent}: run `make clients`.")
    if shutil.which("curl") is None:
        pytest.fail("This test needs curl.")
    done = subprocess.run(
        [PYTHON, SCRIPTS / script, json.dumps(ports)], capture_output=True, text=True, timeout=600, check=False, cwd=SCRIPTS
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def triton(ports):
    return results_of("triton_conformance.py", ports)


@pytest.fixture(scope="module")
def open_inference(ports):
    return results_of("open_inference_conformance.py", ports)


@pytest.mark.parametrize("name", TRITON)
def test_tritonclient(triton, name):
    assert triton.get(name, "was not run") is None


@pytest.mark.parametrize("name", OPEN_INFERENCE)
def test_independent_clients(open_inference, name):
    assert open_inference.get(name, "was not run") is None


def test_all_checks_are_on_the_list(triton, open_inference):
    assert set(triton) == set(TRITON)
    assert set(open_inference) == set(OPEN_INFERENCE)
