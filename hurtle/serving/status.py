"""The one table from a `ServingError`'s reason to its gRPC and HTTP codes."""

from __future__ import annotations

from typing import NamedTuple

from hurtle.errors import ServingError


class Codes(NamedTuple):
    """The codes of one reason in both protocols."""

    grpc: int
    http: int


CODES = {
    "cancelled": Codes(1, 499),
    "invalid_argument": Codes(3, 400),
    "deadline_exceeded": Codes(4, 504),
    "not_found": Codes(5, 404),
    "permission_denied": Codes(7, 403),
    "resource_exhausted": Codes(8, 429),
    "failed_precondition": Codes(9, 400),
    "unimplemented": Codes(12, 501),
    "internal": Codes(13, 500),
    "unavailable": Codes(14, 503),
    "unauthenticated": Codes(16, 401),
}


UNSUPPORTED = {
    "systemsharedmemory": "system shared memory; send tensors in the request",
    "cudasharedmemory": "CUDA shared memory; send tensors in the request",
    "trace": "trace settings; --otlp-endpoint sends traces",
    "logging": "log settings",
}
"""Triton's extensions that the server lacks, by the first part of their REST paths."""


def unsupported(extension: str) -> ServingError:
    """The error of a request for a Triton extension that the server lacks."""
    return ServingError("unimplemented", f"This server does not support {UNSUPPORTED[extension]}.")


def invalid(message: str) -> ServingError:
    """The error of a bad request; the message names the tensor, what was expected and what came."""
    return ServingError("invalid_argument", message)
