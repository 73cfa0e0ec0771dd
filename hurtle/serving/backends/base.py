"""`Backend`: what runs a model. Three methods; the shell around it does the rest. Knows nothing of transports and threads."""

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
    """One tensor that goes in or comes out; −1 in the shape is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @cached_property
    def dtype(self) -> np.dtype:
        """NumPy's."""
        return DTYPES[self.datatype]


@dataclass(frozen=True)
class Metadata:
    """What a model takes and gives.

    Attributes:
        inputs: In the model's own order.
        outputs: Likewise.
        platform: What runs it, such as "onnxruntime_onnx".
        optional: Names of inputs that may be left out.
        state: Pairs (input, output) of tensors that a recurrent model takes back in the next step; a client may leave these
            out and name a sequence, whose state the server keeps. It begins with zeros.
        batched: The first dimension of every tensor is the batch.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    platform: str
    optional: frozenset[str] = frozenset()
    state: tuple[tuple[str, str], ...] = ()
    batched: bool = True


class Phases:
    """How long a call of a backend prepared inputs and extracted outputs, besides running the model.

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
        """Count time of the call that runs."""
        self._input_ns += input_ns
        self._output_ns += output_ns

    def take(self) -> tuple[int, int]:
        """Nanoseconds of inputs and of outputs since the last time."""
        found = self._input_ns, self._output_ns
        self._input_ns = self._output_ns = 0
        return found


class Backend:
    """Runs one model. Subclass it for a runtime of your own, and serve with `--backend package.module:Class`.

    An object is made per lane and used by one thread at a time. Inputs were checked against `metadata` before they come here:
    names, datatypes, shapes. Raise `ServingError("invalid_argument", …)` for what only the model can know to be wrong.

    Args:
        path: The model's file, or its folder.
        parameters: What the user gave, such as {"device": "cuda"}.
    """

    phases: Phases | None = None
    """Backends that measure where the time of a call goes add it here; statistics leave out what is not measured."""

    def __init__(self, path: Path, parameters: dict[str, Any]):
        self.path, self.parameters = path, parameters

    def metadata(self) -> Metadata:
        """What the model takes and gives; must not change."""
        raise NotImplementedError

    def infer(self, request: InferRequest) -> Outputs:
        """The model's outputs, by name."""
        raise NotImplementedError

    def infer_batch(self, requests: Sequence[InferRequest]) -> Sequence[Outputs | ServingError]:
        """As `infer` for each; override it where one call is faster. A request's own error may stand for its outputs."""
        return [self.infer(request) for request in requests]

    def rows(self, request: InferRequest) -> int:
        """How many rows a request adds to a batch: by default the first dimension of its first input."""
        for array in request.inputs.values():
            return int(array.shape[0]) if array.ndim else 1
        return 1

    def warm_up_request(self, rows: int = 1) -> InferRequest:
        """What the server runs before it says that it is ready: zeros; `rows` of them if the model takes batches."""
        inputs, metadata = {}, self.metadata()
        for spec in metadata.inputs:
            shape = [1 if size < 0 else size for size in spec.shape]
            if metadata.batched:
                shape[0] = rows
            inputs[spec.name] = np.full(shape, b"", object) if spec.datatype == "BYTES" else np.zeros(shape, spec.dtype)
        return InferRequest("warm-up", inputs)

    def close(self) -> None:
        """Give back what it holds."""
