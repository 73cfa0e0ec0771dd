"""`Backend`: runs a model. Three methods; the server does the rest. Knows nothing of transports and threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hurtle.errors import ServingError
from hurtle.serving.messages import InferRequest, Outputs
from hurtle.serving.tensors import DTYPES


@dataclass(frozen=True)
class TensorSpec:
    """An input or output tensor; −1 in the shape is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @cached_property
    def dtype(self) -> np.dtype:
        """The NumPy dtype."""
        return DTYPES[self.datatype]


@dataclass(frozen=True)
class Metadata:
    """A model's inputs and outputs.

    Attributes:
        inputs: In the model's order.
        outputs: In the model's order.
        platform: The runtime, such as "onnxruntime_onnx".
        optional: Names of inputs that may be left out.
        state: Pairs (input, output) of tensors that a recurrent model feeds back in the next step; a client may leave them out
            and name a sequence, whose state the server keeps. It starts with zeros.
        batched: Whether the first dimension of every tensor is the batch.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    platform: str
    optional: frozenset[str] = frozenset()
    state: tuple[tuple[str, str], ...] = ()
    batched: bool = True


class Phases:
    """The time that a backend call spends on preparing inputs and extracting outputs, besides running the model.

    Example:
        >>> phases = Phases()
        >>> phases.add(input_ns=500, output_ns=200)
        >>> phases.add(input_ns=100)
        >>> phases.take(), phases.take()
        ((600, 200), (0, 0))
    """

    __slots__ = ("_input_ns", "_output_ns")

    def __init__(self) -> None:
        self._input_ns = self._output_ns = 0

    def add(self, input_ns: int = 0, output_ns: int = 0) -> None:
        """Count time of the current call."""
        self._input_ns += input_ns
        self._output_ns += output_ns

    def take(self) -> tuple[int, int]:
        """Nanoseconds for inputs and for outputs since the last `take`."""
        found = self._input_ns, self._output_ns
        self._input_ns = self._output_ns = 0
        return found


class Backend:
    """Runs one model. Subclass it for a runtime of your own, and serve with `--backend package.module:Class`.

    One object is made per lane, and used by one thread at a time. The server checks inputs against `metadata` first: names,
    datatypes, shapes. Raise `ServingError("invalid_argument", …)` for errors that only the model can detect.

    Args:
        path: The model's file or folder.
        parameters: The user's parameters, such as {"device": "cuda"}.
    """

    phases: Phases | None = None
    """Set by backends that measure their phases; statistics leave out what is not measured."""

    def __init__(self, path: Path, parameters: dict[str, Any]):
        self.path, self.parameters = path, parameters

    def metadata(self) -> Metadata:
        """The model's inputs and outputs; must not change."""
        raise NotImplementedError

    def infer(self, request: InferRequest) -> Outputs:
        """Run one request; returns the outputs by name."""
        raise NotImplementedError

    def infer_batch(self, requests: Sequence[InferRequest]) -> Sequence[Outputs | ServingError]:
        """Run several requests; override it if one call is faster. An error may take the place of a request's outputs."""
        return [self.infer(request) for request in requests]

    def rows(self, request: InferRequest) -> int:
        """The rows that a request adds to a batch: by default the first dimension of its first input."""
        for array in request.inputs.values():
            return int(array.shape[0]) if array.ndim else 1
        return 1

    def warm_up_request(self, rows: int = 1) -> InferRequest:
        """A request of zeros that the server runs before it is ready; with `rows` rows if the model takes batches."""
        inputs, metadata = {}, self.metadata()
        for spec in metadata.inputs:
            shape = [1 if size < 0 else size for size in spec.shape]
            if metadata.batched:
                shape[0] = rows
            inputs[spec.name] = np.full(shape, b"", object) if spec.datatype == "BYTES" else np.zeros(shape, spec.dtype)
        return InferRequest("warm-up", inputs)

    def close(self) -> None:
        """Release what the backend holds."""
