"""`TorchExportBackend`: runs .pt2 files of torch.export. arrays → tensors → the exported program → arrays.

Hurtle's own exports are verified before torch reads them. Other files are loaded only if the user trusts them.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from hurtle.deploy.card import Card
from hurtle.deploy.policy_file import read_policy_file
from hurtle.errors import HurtleError, PolicyFileError, ServingError
from hurtle.serving.backends.base import Backend, Metadata, Phases, TensorSpec
from hurtle.serving.backends.fusing import infer_fused
from hurtle.serving.backends.parameters import Given
from hurtle.serving.backends.policy_tensors import is_mask, spec_of, state_pairs, with_masks
from hurtle.serving.backends.torch_device import (
    LOADING,
    datatype_of_tensor,
    model_failed,
    open_device,
    to_array,
    to_tensor,
    wait_for,
)
from hurtle.serving.messages import InferRequest, Outputs
from hurtle.serving.status import invalid

PLATFORM = "pytorch_export"
_UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, NotImplementedError)
"""Errors that `zipfile` raises for files that are no archives."""


class TorchExportBackend(Backend):
    """Runs an exported program.

    Parameters: `device` (cpu, cuda, cuda:N), `threads` (torch's, on the CPU; 1), `trusted` (true: load a file that Hurtle did
    not export; such a file can run any code).
    """

    def __init__(self, path: Path, parameters: dict[str, Any]):
        super().__init__(path, parameters)
        given = Given("torch_export", parameters, ("device", "threads", "trusted"))
        self._device = open_device(given)
        self._phases = self.phases = Phases()
        with LOADING:
            program, card = _load(path, given.truth("trusted", False))
            if self._device.type != "cpu":
                program = move_to_device_pass(program, self._device)
            self._module, self._in_spec = program.module(), program.call_spec.in_spec
        self._metadata = _metadata_of_card(card) if card is not None else _metadata_of_program(path, program)
        self._masks = [spec for spec in self._metadata.inputs if spec.name in self._metadata.optional]

    def metadata(self) -> Metadata:
        """The inputs and outputs of the policy's card, or of the traced program."""
        return self._metadata

    def infer(self, request: InferRequest) -> Outputs:
        """Run the program once."""
        return self._run(with_masks(request.inputs, self._masks))

    def infer_batch(self, requests: Sequence[InferRequest]) -> Sequence[Outputs | ServingError]:
        """Run requests in one call, if the first dimension is the batch."""
        if not self._metadata.batched:
            return super().infer_batch(requests)
        if self._masks:
            requests = [InferRequest(request.model, with_masks(request.inputs, self._masks)) for request in requests]
        return infer_fused(requests, self._run, self.phases)

    def _run(self, inputs: dict[str, np.ndarray]) -> Outputs:
        begun = perf_counter_ns()
        tensors = [to_tensor(inputs[spec.name], self._device) for spec in self._metadata.inputs]
        args, kwargs = pytree.tree_unflatten(tensors, self._in_spec)
        ready = perf_counter_ns()
        try:
            with torch.inference_mode():
                found = pytree.tree_leaves(self._module(*args, **kwargs))
            wait_for(self._device)
        except AssertionError as error:  # the program was not exported for these sizes
            raise invalid(f"The exported program refuses these inputs: {error!s:.300}") from None
        except RuntimeError as error:
            raise model_failed(error) from None
        done = perf_counter_ns()
        outputs = {spec.name: to_array(tensor) for spec, tensor in zip(self._metadata.outputs, found, strict=True)}
        self._phases.add(ready - begun, perf_counter_ns() - done)
        return outputs


def _load(path: Path, trusted: bool) -> tuple[Any, Card | None]:
    """Load the program, and the card if it is an export of Hurtle's."""
    source: Any = path
    card = None
    try:
        file = read_policy_file(path)
        source, card = io.BytesIO(file.content), file.card
    except PolicyFileError as error:
        if not path.is_file():
            raise
        _check_whole(path)
        if not trusted:
            raise HurtleError(
                f"{error} torch.export.load runs what a file names: if you trust who made it, say trusted=true."
            ) from None
    try:
        return torch.export.load(source), card
    except Exception as error:  # it raises many kinds
        raise HurtleError(f"torch cannot load {path}: {error!s:.300}") from None


def _check_whole(path: Path) -> None:
    """Raise if the file is damaged, rather than foreign."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (*_UNREADABLE, OSError) as error:
        raise HurtleError(f"{path} is damaged or truncated, or not a torch.export archive: {error}.") from None
    if damaged is not None:
        raise HurtleError(f"{path} is damaged: the checksum of {damaged[:80]!r} in it is wrong.")


def _metadata_of_card(card: Card) -> Metadata:
    inputs, outputs = (tuple(spec_of(port) for port in ports) for ports in (card.inputs, card.outputs))
    optional = frozenset(spec.name for spec in inputs if is_mask(spec))
    return Metadata(inputs, outputs, PLATFORM, optional, state_pairs(inputs, outputs))


def _metadata_of_program(path: Path, program: Any) -> Metadata:
    signature = program.graph_signature
    nodes = {node.name: node.meta.get("val") for node in program.graph.nodes}
    named = [
        [value for value in values if isinstance(value, str)] for values in (signature.user_inputs, signature.user_outputs)
    ]
    if [len(names) for names in named] != [len(signature.user_inputs), len(signature.user_outputs)]:
        raise HurtleError(f"{path} takes or returns constants, which cannot be served: export it with tensors only.")
    given = _output_names(program.call_spec.out_spec, len(named[1]))
    inputs = tuple(_spec(path, name, nodes[name]) for name in named[0])
    outputs = tuple(_spec(path, name, nodes[node]) for name, node in zip(given, named[1], strict=True))
    first = {str(nodes[name].shape[0]) if nodes[name].ndim else "" for name in (*named[0], *named[1])}
    batched = bool(inputs) and len(first) == 1 and all(spec.shape[:1] == (-1,) for spec in inputs + outputs)
    return Metadata(inputs, outputs, PLATFORM, state=state_pairs(inputs, outputs), batched=batched)


def _output_names(spec: Any, count: int) -> list[str]:
    """The keys of a dict of tensors; else output, or output_0 and so on."""
    if spec.type is dict and spec.num_leaves == len(spec.context):
        return [str(key) for key in spec.context]
    return ["output"] if count == 1 else [f"output_{k}" for k in range(count)]


def _spec(path: Path, name: str, value: Any) -> TensorSpec:
    if not isinstance(value, torch.Tensor):
        raise HurtleError(f"{path}: {name!r} is a {type(value).__name__}; only tensors can be served.")
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    return TensorSpec(name, datatype_of_tensor(name, value.dtype), shape)
