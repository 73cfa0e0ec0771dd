"""What the checks with tritonclient share: both of its clients behind the same few words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import checks
import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

CODES = {
    "CANCELLED": 499,
    "INVALID_ARGUMENT": 400,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "PERMISSION_DENIED": 403,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
}
"""What gRPC calls a failure, and HTTP."""


@dataclass
class Session:
    """A client of one transport, and the ports of all servers of the test."""

    transport: str
    ports: dict[str, Any]

    def __post_init__(self) -> None:
        self.module: Any = getattr(tritonclient, self.transport)
        self.client = self.connect()
        self.draining = self.connect("draining_")
        assert self.draining.is_server_ready()  # connected before it begins to drain

    @property
    def is_grpc(self) -> bool:
        return self.transport == "grpc"

    def connect(self, server: str = "", **options: Any) -> Any:
        """Another client; `server` is the prefix of its ports' names."""
        if not self.is_grpc:
            options = {"network_timeout": 20.0, "connection_timeout": 10.0, "concurrency": 32, **options}
        return self.module.InferenceServerClient(f"127.0.0.1:{self.ports[server + self.transport]}", **options)

    def input(self, name: str, array: np.ndarray, binary: bool | None = None, **other: Any) -> Any:
        """An input; `datatype` and `shape` may be wrong on purpose."""
        datatype = np_to_triton_dtype(array.dtype)
        found = self.module.InferInput(name, list(array.shape), datatype)
        found.set_data_from_numpy(array, **({} if binary is None else {"binary_data": binary}))
        lies = found._input if self.is_grpc else found
        for key, value in other.items():
            if not self.is_grpc:
                setattr(lies, f"_{key}", value)
            elif key == "shape":
                lies.ClearField("shape")
                lies.shape.extend(value)
            else:
                setattr(lies, key, value)
        return found

    def output(self, name: str, binary: bool | None = None) -> Any:
        return self.module.InferRequestedOutput(name, **({} if binary is None else {"binary_data": binary}))

    def pair(self, a: int = 7, b: int = 3, rows: int = 1) -> list[Any]:
        """The inputs of the model sum_difference."""
        return [self.input(name, np.full((rows, 4), value, np.int32)) for name, value in (("a", a), ("b", b))]

    def number(self, value: float = 1.0, rows: int = 1) -> list[Any]:
        """The input of the models slow, held, gate and total."""
        return [self.input("x", np.full((rows, 1), value, np.float32))]

    def fails(self, status: str, call: Callable[[], Any], *words: str) -> str:
        """Check that a call fails, how, and what it says; the message."""
        expected = f"StatusCode.{status}" if self.is_grpc else str(CODES[status])
        try:
            call()
        except InferenceServerException as error:
            checks.equal(error.status(), expected, f"status of {error.message()!r}")
            checks.names(error.message(), *words)
            return error.message()
        raise AssertionError(f"expected {expected}, got an answer")


def both(name: str) -> Callable[[Callable[[Session], None]], Callable[[Session], None]]:
    """Enter a check for both transports."""

    def enter(function: Callable[[Session], None]) -> Callable[[Session], None]:
        checks.check(f"grpc: {name}")(lambda sessions: function(sessions["grpc"]))
        checks.check(f"http: {name}")(lambda sessions: function(sessions["http"]))
        return function

    return enter


def only(transport: str, name: str) -> Callable[[Callable[[Session], None]], Callable[[Session], None]]:
    """Enter a check for one transport."""

    def enter(function: Callable[[Session], None]) -> Callable[[Session], None]:
        checks.check(f"{transport}: {name}")(lambda sessions: function(sessions[transport]))
        return function

    return enter
