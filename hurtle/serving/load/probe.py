"""Asks a server, before it is loaded, which models it has, what the chosen one takes, and whether it answers.

target → `plan` → a `Plan`: the bytes to send, known to get a result. Uses the load generator's own REST and gRPC clients.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson

from hurtle.errors import HurtleError, did_you_mean
from hurtle.serving.load.generator import CONNECT_TIMEOUT, MakeClient
from hurtle.serving.load.grpc_client import GrpcClient, grpc_headers
from hurtle.serving.load.http_client import HttpClient
from hurtle.serving.load.request import GRPC_INFER, Encoding, Target, count_rows, grpc_message, http_request, make_inputs
from hurtle.serving.protos import INFERENCE, message_class

ANSWER_TIMEOUT = 60.0


@dataclass(frozen=True)
class Plan:
    """A request, and where to send it."""

    target: Target
    request: bytes
    """Over HTTP the complete request, over gRPC the message."""
    rows: int
    path: str = GRPC_INFER

    def make(self, keep: bool = False) -> MakeClient:
        """A function that makes clients."""
        if self.target.protocol == "http":
            return lambda answered, lost: HttpClient(self.request, answered, lost)
        headers = grpc_headers(self.target, self.path)
        return lambda answered, lost: GrpcClient(headers, self.request, answered, lost, keep)

    def as_json(self) -> dict[str, Any]:
        """JSON values for `from_json`."""
        return {**asdict(self), "request": base64.b64encode(self.request).decode()}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Plan:
        """The plan of `as_json`, in another process."""
        return cls(Target(**found["target"]), base64.b64decode(found["request"]), found["rows"], found["path"])


async def plan(
    target: Target, rows: int = 1, encoding: Encoding = "binary", inputs: Mapping[str, np.ndarray] | None = None
) -> Plan:
    """Make the request and send it once.

    Args:
        target: The server; without a model its only one is used.
        rows: Rows of the request.
        encoding: Encoding of tensors over HTTP.
        inputs: The user's tensors; by default they are made from the model's metadata.

    Raises:
        HurtleError: Nothing listens there, there is no such model, or it refuses the request.
    """
    if rows < 1:
        raise HurtleError(f"rows must be at least 1, got {rows}.")
    if not target.model:
        target = replace(target, model=await _only_model(target))
    if inputs is None:
        inputs = make_inputs(await _inputs_of(target), rows)
    request = http_request(target, inputs, encoding) if target.protocol == "http" else grpc_message(target, inputs)
    made = Plan(target, request, count_rows(inputs))
    await ask(made)
    return made


async def ask(plan: Plan) -> bytes:
    """Send one request over a new connection; returns the answer's body.

    Raises:
        HurtleError: There is no answer, or it is an error.
    """
    target = plan.target
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str | None] = loop.create_future()

    def answered(client: Any, error: str | None) -> None:
        if not answer.done():
            answer.set_result(error)

    def lost(client: Any) -> None:
        other = "REST" if target.protocol == "grpc" else "gRPC"
        answered(client, f"the connection was closed without an answer. Is this the port of {other}, or one with TLS?")

    try:
        connecting = loop.create_connection(lambda: plan.make(keep=True)(answered, lost), target.host, target.port)
        _, client = await asyncio.wait_for(connecting, CONNECT_TIMEOUT)
    except ConnectionRefusedError:
        raise HurtleError(
            f"Nothing listens at {target.address}. Start a server (hurtle serve policy.onnx), or say --address."
        ) from None
    except TimeoutError:
        raise HurtleError(f"{target.address} does not answer: no connection after {CONNECT_TIMEOUT:g} s.") from None
    except OSError as error:
        raise HurtleError(f"No connection to {target.address}: {error.strerror or error}.") from None
    try:
        if client.closing:
            lost(client)
        else:
            client.send()
        wrong = await asyncio.wait_for(answer, ANSWER_TIMEOUT)
    except TimeoutError:
        raise HurtleError(f"{target.address} gives no answer within {ANSWER_TIMEOUT:g} s.") from None
    finally:
        client.close()
    if wrong is not None:
        raise HurtleError(f"{target.address}: {client.failure or wrong}")
    return client.body


async def _call(target: Target, method: str, http_method: str, path: str, **fields: Any) -> Any:
    """One metadata request over either protocol; returns JSON or the gRPC message."""
    if target.protocol == "grpc":
        request = message_class(f"inference.{method}Request")(**fields).SerializeToString()
        answer = await ask(Plan(target, request, 0, f"/{INFERENCE}/{method}"))
        found = message_class(f"inference.{method}Response")()
        found.ParseFromString(answer)
        return found
    lines = [f"{http_method} {path} HTTP/1.1", f"Host: {target.address}", "Accept: application/json"]
    if target.token:
        lines.append(f"Authorization: Bearer {target.token}")
    body = "{}" if http_method == "POST" else ""
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", body]
    try:
        return orjson.loads(await ask(Plan(target, "\r\n".join(lines).encode(), 0)))
    except orjson.JSONDecodeError:
        raise HurtleError(f"{target.address}: {path} gave no JSON. Is it a server of the Open Inference Protocol?") from None


async def _only_model(target: Target) -> str:
    names = await _model_names(target)
    if len(names) == 1:
        return names[0]
    raise HurtleError(f"Which model? The server has {', '.join(names) or 'none'}: say --model NAME.")


async def _model_names(target: Target) -> list[str]:
    found = await _call(target, "RepositoryIndex", "POST", "/v2/repository/index")
    if target.protocol == "grpc":
        return sorted({model.name for model in found.models})
    return sorted({str(model["name"]) for model in found})


async def _inputs_of(target: Target) -> list[dict[str, Any]]:
    try:
        found = await _call(target, "ModelMetadata", "GET", f"/v2/models/{quote(target.model, safe='')}", name=target.model)
    except HurtleError as error:
        if "404" not in str(error) and "grpc-status 5" not in str(error):
            raise
        names = await _model_names(target)
        raise HurtleError(f"The server has no model {target.model!r}. {did_you_mean(target.model, names)}") from None
    if target.protocol == "grpc":
        return [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in found.inputs]
    return list(found["inputs"])
