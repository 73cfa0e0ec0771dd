"""The request of a load generator: a model's tensors, from its metadata or a file → bytes, made once.

Knows the Open Inference Protocol's two encodings; knows nothing of connections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
import orjson

from hurtle.errors import HurtleError, ServingError
from hurtle.serving.address import joined
from hurtle.serving.protos import INFERENCE, ModelInferRequest
from hurtle.serving.tensors import datatype_of, dtype_of, from_values, rows_of, to_raw, to_values

Protocol = Literal["http", "grpc"]
Encoding = Literal["binary", "json"]
GRPC_INFER = f"/{INFERENCE}/ModelInfer"


@dataclass(frozen=True)
class Target:
    """The server and model to load."""

    host: str
    port: int
    protocol: Protocol = "http"
    model: str = ""
    token: str | None = None

    @property
    def address(self) -> str:
        """Host and port as text."""
        return joined(self.host, self.port)


def parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT.

    Example:
        >>> parse_address("127.0.0.1:8000"), parse_address("[::1]:8001")
        (('127.0.0.1', 8000), ('::1', 8001))
    """
    host, _, port = text.removeprefix("http://").removesuffix("/").rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise HurtleError(f"--address: expected HOST:PORT such as 127.0.0.1:8000, got {text!r}.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def make_inputs(specs: Sequence[Mapping[str, Any]], rows: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
    """Make tensors for a model: floats from -1 to 1, zeros for integers (which may be ids), empty strings.

    Args:
        specs: From the model's metadata: name, datatype, shape; a first size of -1 becomes the rows, others become 1.
        rows: Rows of the request.
        seed: Seed of the random numbers.

    Raises:
        HurtleError: The model has another fixed number of rows, or its metadata lists no inputs.
    """
    if not specs:
        raise HurtleError("The server does not list the model's inputs: give a request with --input FILE.")
    rng = np.random.default_rng(seed)
    inputs: dict[str, np.ndarray] = {}
    for spec in specs:
        name, datatype, sizes = str(spec["name"]), str(spec["datatype"]), [int(size) for size in spec["shape"]]
        if sizes and sizes[0] != -1 and rows not in (1, sizes[0]):
            raise HurtleError(f"Tensor {name!r} has the fixed shape {sizes}: --rows {rows} does not fit.")
        shape = [(rows if at == 0 else 1) if size == -1 else size for at, size in enumerate(sizes)]
        dtype = dtype_of(name, datatype)
        if datatype == "BYTES":
            array = np.full(shape, b"", object)
        elif datatype.startswith(("FP", "BF")):
            array = rng.uniform(-1, 1, shape).astype(dtype)
        else:
            array = np.zeros(shape, dtype)
        inputs[name] = array
    return inputs


def read_inputs(path: Path) -> dict[str, np.ndarray]:
    """Read tensors from a file with a request in the protocol's JSON: {"inputs": [{"name", "datatype", "shape", "data"}]}.

    Raises:
        HurtleError: It cannot be read, or is not such a request.
    """
    try:
        found = orjson.loads(path.read_bytes())
        inputs = {
            tensor["name"]: from_values(tensor["name"], tensor["datatype"], tensor["shape"], tensor["data"])
            for tensor in found["inputs"]
        }
    except OSError as error:
        raise HurtleError(f"Cannot read {path}: {error.strerror}.") from None
    except ServingError as error:
        raise HurtleError(f"{path}: {error}") from None
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        expected = 'expected {"inputs": [{"name": …, "datatype": …, "shape": […], "data": […]}]}'
        raise HurtleError(f"{path}: {expected}, got {type(error).__name__}: {error}.") from None
    if not inputs:
        raise HurtleError(f"{path}: it has no inputs.")
    return inputs


def count_rows(inputs: Mapping[str, np.ndarray]) -> int:
    """The rows of a request: the first size of its first tensor."""
    return rows_of(inputs.values())


def http_body(inputs: Mapping[str, np.ndarray], encoding: Encoding = "binary") -> tuple[bytes, int | None]:
    """The body of a REST inference request, and the length of its JSON if binary tensors follow."""
    heads: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for name, array in inputs.items():
        head: dict[str, Any] = {"name": name, "datatype": datatype_of(array.dtype), "shape": list(array.shape)}
        if encoding == "binary":
            blobs.append(to_raw(array))
            head["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            head["data"] = to_values(array)
        heads.append(head)
    described: dict[str, Any] = {"inputs": heads}
    if encoding == "binary":
        described["parameters"] = {"binary_data_output": True}
    text = orjson.dumps(described)
    return b"".join([text, *blobs]), len(text) if encoding == "binary" else None


def http_request(target: Target, inputs: Mapping[str, np.ndarray], encoding: Encoding = "binary") -> bytes:
    """A complete REST request."""
    body, json_length = http_body(inputs, encoding)
    lines = [
        f"POST /v2/models/{quote(target.model, safe='')}/infer HTTP/1.1",
        f"Host: {target.address}",
        f"Content-Length: {len(body)}",
    ]
    lines.append(f"Content-Type: application/{'json' if json_length is None else 'octet-stream'}")
    if json_length is not None:
        lines.append(f"Inference-Header-Content-Length: {json_length}")
    if target.token:
        lines.append(f"Authorization: Bearer {target.token}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def grpc_message(target: Target, inputs: Mapping[str, np.ndarray]) -> bytes:
    """A gRPC inference request with raw contents."""
    message = ModelInferRequest(model_name=target.model)
    for name, array in inputs.items():
        message.inputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
        message.raw_input_contents.append(to_raw(array))
    return message.SerializeToString()


def grpc_body(message: bytes) -> bytes:
    """A message with gRPC's five-byte prefix: uncompressed, and its length."""
    return b"\0" + len(message).to_bytes(4, "big") + message
