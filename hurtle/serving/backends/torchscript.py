"""`TorchScriptBackend`: runs TorchScript archives (.pt, .ts, .torchscript). arrays → tensors → `forward` → arrays.

`forward` takes tensors, a list of tensors or a dict of them, and returns the same. An archive is a program that torch's C++
interpreter runs: it is not unpickled, but it can read and write files. Serve only archives whose authors you trust.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from hurtle.errors import HurtleError, ServingError
from hurtle.serving.backends.base import Backend, Metadata, Phases, TensorSpec
from hurtle.serving.backends.fusing import infer_fused
from hurtle.serving.backends.parameters import Given
from hurtle.serving.backends.policy_tensors import state_pairs
from hurtle.serving.backends.tensor_lists import KEYS, TensorLists, example, read_tensor_lists
from hurtle.serving.backends.torch_device import LOADING, model_failed, open_device, to_array, to_tensor, wait_for
from hurtle.serving.messages import InferRequest, Outputs
from hurtle.serving.status import invalid
from hurtle.serving.tensors import datatype_of

_DATATYPES = {
    "Bool": "BOOL",
    "Byte": "UINT8",
    "Char": "INT8",
    "Short": "INT16",
    "Int": "INT32",
    "Long": "INT64",
    "Half": "FP16",
    "BFloat16": "BF16",
    "Float": "FP32",
    "Double": "FP64",
}
"""Datatypes by TorchScript's names."""


class TorchScriptBackend(Backend):
    """Runs the `forward` of a module.

    The file does not describe its tensors. A JSON file beside it does (see tensor_lists.py). The outputs may be left out, and
    for a traced module the inputs too: they get the types and sizes of its example, with a free first dimension.

    Parameters: `device` (cpu, cuda, cuda:N), `threads` (torch's, on the CPU; 1), `load_library` (shared libraries with custom
    operators, separated by commas), `inputs`, `outputs`, `batched`, `optional`, `state` (as in the JSON file).
    """

    def __init__(self, path: Path, parameters: dict[str, Any]):
        super().__init__(path, parameters)
        given = Given("torchscript", parameters, ("device", "threads", "load_library", *KEYS))
        self._device = open_device(given)
        self._phases = self.phases = Phases()
        for library in given.words("load_library"):
            _load_library(library)
        self._module = _load_module(path, self._device)
        self._signature = Signature.of(path, self._module)
        written = read_tensor_lists(path, parameters)
        self._inputs = written.inputs or _traced_inputs(path, self._signature)
        self._names: list[str] | None = None
        self._places = self._signature.places(path, self._inputs)
        self._metadata = self._complete(written)
        self._names = [spec.name for spec in self._metadata.outputs]

    def metadata(self) -> Metadata:
        """The user's specs, completed by a run with zeros."""
        return self._metadata

    def infer(self, request: InferRequest) -> Outputs:
        """Call `forward` once."""
        return self._run(request.inputs)

    def infer_batch(self, requests: Sequence[InferRequest]) -> Sequence[Outputs | ServingError]:
        """Run requests in one call, if the first dimension is the batch."""
        return infer_fused(requests, self._run, self.phases) if self._metadata.batched else super().infer_batch(requests)

    def _run(self, inputs: dict[str, np.ndarray]) -> Outputs:
        begun = perf_counter_ns()
        arguments = self._arguments({name: to_tensor(array, self._device) for name, array in inputs.items()})
        ready = perf_counter_ns()
        try:
            with torch.inference_mode():
                found = self._module(*arguments)
            wait_for(self._device)
        except Exception as error:  # torch.jit.Error has no useful base class
            raise model_failed(error) from None
        done = perf_counter_ns()
        outputs = {name: to_array(tensor) for name, tensor in _named(found, self._names).items()}
        self._phases.add(ready - begun, perf_counter_ns() - done)
        return outputs

    def _arguments(self, tensors: dict[str, torch.Tensor]) -> list[Any]:
        if self._signature.kind == "dict":
            return [tensors]
        found = [tensors.get(name) if name is not None else None for name in self._places]
        if self._signature.kind == "list":
            missing = [name for name in self._places if name not in tensors]
            if missing:
                raise invalid(f"Tensor {missing[0]!r} is missing.")
            return [found]
        return found

    def _complete(self, written: TensorLists) -> Metadata:
        """The metadata; outputs without specs are found by running zeros of two sizes."""
        for spec in self._inputs + (written.outputs or ()):
            if spec.datatype == "BYTES":
                raise HurtleError(f"{self.path}: {spec.name!r} is BYTES, and torch has no string tensors.")
        optional = written.optional | (self._signature.optional & {spec.name for spec in self._inputs})
        outputs = written.outputs or self._find_outputs()
        is_open = all(spec.shape[:1] == (-1,) for spec in self._inputs + outputs)
        if written.batched and not is_open:
            raise HurtleError(f"{self.path}: batched is true, but not all shapes begin with −1.")
        batched = is_open if written.batched is None else written.batched
        state = written.state or state_pairs(self._inputs, outputs)
        return Metadata(self._inputs, outputs, "pytorch_libtorch", frozenset(optional), state, batched)

    def _find_outputs(self) -> tuple[TensorSpec, ...]:
        runs = []
        for size in (2, 3):
            shapes = {spec: [size if n < 0 else n for n in spec.shape] for spec in self._inputs}
            try:
                runs.append(self._run({spec.name: np.zeros(shape, spec.dtype) for spec, shape in shapes.items()}))
            except ServingError as error:
                raise HurtleError(
                    f"{self.path} could not be run with zeros of shapes {list(shapes.values())} to see its outputs: specify "
                    f"them too, in {self.path.with_suffix('.json').name}. {error}"
                ) from None
        specs = []
        for name, first in runs[0].items():
            second = runs[1].get(name)
            if second is None or second.ndim != first.ndim:
                raise HurtleError(f"{self.path} returns different outputs for different sizes; specify them.")
            shape = tuple(a if a == b else -1 for a, b in zip(first.shape, second.shape, strict=True))
            specs.append(TensorSpec(name, datatype_of(first.dtype), shape))
        return tuple(specs)


@dataclass(frozen=True)
class Signature:
    """The arguments of `forward`."""

    kind: str
    """tensors, list or dict."""
    names: tuple[str, ...]
    """Names of the tensor arguments; for a list or dict, the argument's own name."""
    optional: frozenset[str] = frozenset()
    """Names that may be left out."""

    @classmethod
    def of(cls, path: Path, module: Any) -> Signature:
        """Read the signature of a module.

        Raises:
            HurtleError: It needs an argument that is no tensor.
        """
        arguments = module.forward.schema.arguments[1:]  # without self
        kinds = [str(argument.type) for argument in arguments]
        for kind, name in (("dict", "Dict[str, Tensor]"), ("list", "List[Tensor]")):
            if kinds[:1] == [name] and all(argument.has_default_value() for argument in arguments[1:]):
                return cls(kind, (arguments[0].name,))
        names = []
        for argument, kind in zip(arguments, kinds, strict=True):
            if kind not in ("Tensor", "Optional[Tensor]"):
                if argument.has_default_value():
                    break  # later arguments keep their defaults as well
                raise HurtleError(
                    f"{path}: its forward takes {argument.name!r} of type {kind}; only tensors, or a list or "
                    "dict of them, can be served."
                )
            names.append(argument.name)
        may_miss = [argument.name for argument, kind in zip(arguments, kinds, strict=True) if kind == "Optional[Tensor]"]
        return cls("tensors", tuple(names), frozenset(may_miss))

    def places(self, path: Path, inputs: Sequence[TensorSpec]) -> list[str | None]:
        """The input of each argument: by name if all names match, else by order. None: left out."""
        if self.kind != "tensors":
            return [spec.name for spec in inputs]
        given = [spec.name for spec in inputs]
        if set(given) <= set(self.names) and set(self.names) - set(given) <= self.optional:
            return [name if name in given else None for name in self.names]
        required = [name for name in self.names if name not in self.optional]
        if not len(required) <= len(given) <= len(self.names):
            raise HurtleError(
                f"{path}: its forward takes {', '.join(self.names)}; the inputs that are written down are {given}."
            )
        return list(given)


def _load_library(library: str) -> None:
    if not Path(library).is_file():
        raise HurtleError(f"load_library: there is no file {library!r}.")
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise HurtleError(f"load_library: {library} cannot be loaded: {error}.") from None


def _load_module(path: Path, device: torch.device, **options: Any) -> Any:
    """Load a module if the file is TorchScript; files of `torch.save` are pickles, which can run any code."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name.partition("/")[2] for name in archive.namelist()}
    except OSError as error:
        raise HurtleError(f"Cannot read {path}: {error.strerror or error}.") from None
    except zipfile.BadZipFile:
        members = set()
    if "constants.pkl" not in members or not any(name.startswith("code/") for name in members):
        what = "a pickle of torch.save, which is never loaded" if "data.pkl" in members else "something else, or damaged"
        raise HurtleError(
            f"{path} is not a TorchScript archive but {what}: write it with torch.jit.save, or export it to .pt2."
        )
    try:
        with LOADING:
            return torch.jit.load(path, map_location=device, **options).eval()
    except Exception as error:  # it raises many kinds of errors
        raise HurtleError(f"torch cannot load {path}: {error!s:.300}") from None


def _traced_inputs(path: Path, signature: Signature) -> tuple[TensorSpec, ...]:
    """The specs of the example that a module was traced with, with any batch size.

    Raises:
        HurtleError: It was not traced; the message says what to specify.
    """
    if signature.kind == "tensors":
        # Load a separate module, as shape inference may tie it to these sizes.
        values = list(_load_module(path, torch.device("cpu"), _restore_shapes=True).graph.inputs())[1:]
        types = [value.type() for value in values[: len(signature.names)]]
        specs = []
        for name, kind in zip(signature.names, types, strict=False):
            is_known = kind.kind() == "TensorType" and kind.sizes() and kind.scalarType() in _DATATYPES
            if not is_known or any(size is None for size in kind.sizes()):
                break
            specs.append(TensorSpec(name, _DATATYPES[kind.scalarType()], (-1, *kind.sizes()[1:])))
        if specs and len(specs) == len(signature.names):
            return tuple(specs)
    names = signature.names if signature.kind == "tensors" else ("a", "b")
    raise HurtleError(
        f"{path} does not say what its inputs are: write {path.with_suffix('.json').name} beside it, such as {example(names)} "
        f"with the names, datatypes and shapes that it takes (−1: any size)."
    )


def _named(found: Any, names: Sequence[str] | None) -> dict[str, torch.Tensor]:
    """A module's outputs by name: those of a dict or named tuple, else the user's."""
    if isinstance(found, dict):
        tensors = {str(name): value for name, value in found.items()}
        if names is not None and not set(names) <= set(tensors):
            raise ServingError("internal", f"The model returned {sorted(tensors)}, expected {list(names)}.")
        tensors = {name: tensors[name] for name in names} if names is not None else tensors
    else:
        parts = list(found) if isinstance(found, tuple | list) else [found]
        default = ["output"] if len(parts) == 1 else [f"output_{k}" for k in range(len(parts))]
        known = list(names if names is not None else getattr(found, "_fields", default))
        if len(known) != len(parts):
            raise ServingError("internal", f"The model returned {len(parts)} outputs, expected {known}.")
        tensors = dict(zip(known, parts, strict=True))
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise ServingError("internal", f"The model returned {name!r} as {type(value).__name__}, not as a tensor.")
    return tensors
