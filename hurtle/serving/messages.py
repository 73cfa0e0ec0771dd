"""One inference, independent of the transport: `InferRequest` in, `InferResponse` or `ServingError` out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hurtle.errors import ServingError

Parameter = bool | int | float | str
Outputs = dict[str, np.ndarray]


@dataclass(slots=True)
class InferRequest:
    """A client's request."""

    model: str
    inputs: dict[str, np.ndarray]
    """Tensors by name, in the client's order."""
    version: str = ""
    """If empty, the newest loaded version."""
    id: str = ""
    """Returned with the answer."""
    outputs: tuple[str, ...] = ()
    """Outputs that the client wants; all if empty."""
    parameters: dict[str, Parameter] = field(default_factory=dict)
    deadline: float | None = None
    """On the clock of `time.monotonic`; nobody waits for the answer after it."""
    trace_parent: str = ""
    """The header `traceparent`, for tracing."""


@dataclass(slots=True)
class InferResponse:
    """A model's answer."""

    model: str
    version: str
    id: str
    outputs: Outputs
    parameters: dict[str, Parameter] = field(default_factory=dict)


Reply = Callable[[InferResponse | ServingError], None]
"""Takes the answer to the transport: called once, on the event loop's thread, unless the request was cancelled."""
