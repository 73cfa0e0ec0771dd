"""`NativeMLPBackend`: plain MLP policies that Hurtle exported to .onnx, in compiled code: obs [, mask] → action.

Knows nothing of ONNX Runtime; the file's other outputs (logits, value …) are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from hurtle.deploy.exported import ExportedPolicy
from hurtle.deploy.policy_file import read_policy_file
from hurtle.errors import HurtleError, ServingError
from hurtle.serving.backends.base import Backend, Metadata, Phases
from hurtle.serving.backends.fusing import infer_fused
from hurtle.serving.backends.parameters import Given
from hurtle.serving.backends.policy_tensors import spec_of
from hurtle.serving.messages import InferRequest, Outputs
from hurtle.serving.status import invalid


class NativeMLPBackend(Backend):
    """Runs the layers listed in an exported policy's card."""

    def __init__(self, path: Path, parameters: dict[str, Any]):
        super().__init__(path, parameters)
        Given("native_mlp", parameters, ("runtime",)).word("runtime", "native", ("native",))
        file = read_policy_file(path)
        if "native" not in ExportedPolicy.runtimes_of(file):
            raise HurtleError(
                f"{path} cannot run natively: only plain MLPs, exported to .onnx with deterministic actions, can; "
                "without backend or runtime=native it is served through ONNX Runtime or torch."
            )
        self._policy = ExportedPolicy(file, runtime="native")
        action = next(port for port in file.card.outputs if port.name == "action")
        optional = frozenset(port.name for port in file.card.inputs if port.name == "mask")
        inputs = tuple(spec_of(port) for port in file.card.inputs)
        self._first, self._action = inputs[0], spec_of(action)
        self._metadata = Metadata(inputs, (self._action,), "hurtle_native_mlp", optional)
        is_plain = len(inputs) == 1 and len(inputs[0].shape) > 1 and file.card.layouts == (None, None)
        self._act = self._policy.act if is_plain else None
        self._phases = self.phases = Phases()
        self._may_be_nan = [spec.name for spec in inputs if spec.dtype.kind == "f"]

    def metadata(self) -> Metadata:
        """The inputs and outputs of the policy's card."""
        return self._metadata

    def infer(self, request: InferRequest) -> Outputs:
        """Compute the actions for the request's rows; a single plain row takes a few microseconds."""
        begun = perf_counter_ns()
        if self._act is not None and len(rows := request.inputs[self._first.name]) == 1 and rows.flags.aligned:
            row = rows[0]
            ready = perf_counter_ns()
            try:
                action = self._act(row)
            except HurtleError as error:
                raise invalid(f"Tensor {self._first.name!r}: {error}") from None
            done = perf_counter_ns()
            outputs = {"action": np.array([action], self._action.dtype)}
            self._phases.add(ready - begun, perf_counter_ns() - done)
            return outputs
        return self._run(request.inputs)

    def infer_batch(self, requests: Sequence[InferRequest]) -> Sequence[Outputs | ServingError]:
        """Compute the actions for all rows in one call."""
        return infer_fused(requests, self._run, self.phases)

    def _run(self, inputs: dict[str, np.ndarray]) -> Outputs:
        begun = perf_counter_ns()
        for name, array in inputs.items():
            flags = array.flags
            if not (flags.aligned and flags.c_contiguous):  # compiled code reads raw memory
                inputs = {**inputs, name: np.array(array, order="C")}
        for name in self._may_be_nan:
            if np.isnan(inputs[name]).any():
                raise invalid(f"Tensor {name!r}: expected numbers, got NaN.")
        if not len(inputs[self._first.name]):
            return {"action": np.empty((0, *self._action.shape[1:]), self._action.dtype)}
        ready = perf_counter_ns()
        found = self._policy.run(inputs)
        done = perf_counter_ns()
        self._phases.add(ready - begun, perf_counter_ns() - done)
        return found
