"""One inference as the shell knows it, whatever the transport: `InferRequest` in, `InferResponse` or a `ServingError` out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hurtle.errors import ServingError

Parameter = bool | int | float | str
Outputs = dict[str, np.ndarray]


@dataclass(slots=True)
class InferRequest:
    """What a client asks."""

    model: str
    inputs: dict[str, np.ndarray]
    """By name, in the client's order."""
    version: str = ""
    """The newest that is ready when empty."""
    id: str = ""
    """Echoed."""
    outputs: tuple[str, ...] = ()
    """What the client wants back; everything when empty."""
    parameters: dict[str, Parameter] = field(default_factory=dict)
    deadline: float | None = None
    """On `time.monotonic`'s clock; after it nobody waits for the answer."""
    trace_parent: str = ""
    """The header `traceparent`, for tracing."""


@dataclass(slots=True)
class InferResponse:
    """What the model said."""

    model: str
    version: str
    id: str
    outputs: Outputs
    parameters: dict[str, Parameter] = field(default_factory=dict)


Reply = Callable[[InferResponse | ServingError], None]
"""How an answer gets back to its transport: called once, on the event loop's thread, unless the request was cancelled."""
