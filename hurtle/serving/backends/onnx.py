"""`OnnxBackend`: runs any .onnx file with ONNX Runtime: arrays → session → outputs; rows of many requests in one call.

Knows nothing of policies except that Hurtle's have masks, which may be left out, and a memory: state_in_K → state_out_K.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import ml_dtypes
import numpy as np

from hurtle.deploy.onnx_file import KEY, read_sealed
from hurtle.errors import DeviceError, HurtleError, PolicyFileError, ServingError
from hurtle.serving.backends.base import Backend, Metadata, Phases, TensorSpec
from hurtle.serving.backends.external_data import check_external_data
from hurtle.serving.backends.fusing import infer_fused
from hurtle.serving.backends.parameters import Given
from hurtle.serving.backends.policy_tensors import is_mask, state_pairs, with_masks
from hurtle.serving.messages import InferRequest, Outputs
from hurtle.serving.status import invalid
from hurtle.serving.tensors import as_bytes_array

DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(bfloat16)": "BF16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}
_BFLOAT16 = 16
"""ONNX's number for this type, which NumPy lacks."""


class OnnxBackend(Backend):
    """Runs a model with ONNX Runtime.

    Parameters: `device` (cpu, cuda, cuda:N), `threads` (1), `optional` (names of inputs with a default in the file that clients
    may set; other such inputs keep their defaults), `batched` (true or false, if the file's shapes do not tell whether rows are
    independent of each other), `runtime` (onnxruntime; native runs plain MLPs, see native_mlp.py).
    """

    def __init__(self, path: Path, parameters: dict[str, Any]):
        super().__init__(path, parameters)
        given = Given("onnx", parameters, ("device", "threads", "optional", "batched", "runtime"))
        given.word("runtime", "onnxruntime", ("onnxruntime",))
        device = given.device()
        self._session = _open_session(path, device, given.whole("threads", 1))
        self._phases = Phases()
        self.phases = self._phases if device == "cpu" else None  # copies to and from a GPU happen within the call
        self._metadata = self._read_metadata(given)
        self._names = [spec.name for spec in self._metadata.outputs]
        self._invalid_argument = _runtime().capi.onnxruntime_pybind11_state.InvalidArgument
        self._masks = [spec for spec in self._metadata.inputs if spec.name in self._metadata.optional and is_mask(spec)]
        specs = self._metadata.inputs + self._metadata.outputs
        self._has_text = any(spec.datatype == "BYTES" for spec in specs)
        self._has_bfloat16 = any(spec.datatype == "BF16" for spec in specs)

    def metadata(self) -> Metadata:
        """The inputs and outputs of the session."""
        return self._metadata

    def infer(self, request: InferRequest) -> Outputs:
        """Run the session once."""
        return self._run(with_masks(request.inputs, self._masks) if self._masks else request.inputs)

    def infer_batch(self, requests: Sequence[InferRequest]) -> Sequence[Outputs | ServingError]:
        """Run requests in one call, if the first dimension is the batch."""
        if not self._metadata.batched:
            return [self._run_alone(request) for request in requests]
        if self._masks:
            requests = [InferRequest(request.model, with_masks(request.inputs, self._masks)) for request in requests]
        return infer_fused(requests, self._run, self.phases)

    def close(self) -> None:
        """Free the session."""
        del self._session

    def _run_alone(self, request: InferRequest) -> Outputs | ServingError:
        try:
            return self.infer(request)
        except ServingError as error:
            return error

    def _run(self, inputs: dict[str, np.ndarray]) -> Outputs:
        begun = perf_counter_ns()
        for name, array in inputs.items():
            if not array.flags.aligned:  # it shares memory with a message; the runtime may rely on alignment
                inputs = {**inputs, name: array.copy()}
        try:
            if self._has_text or self._has_bfloat16:
                return self._run_converted(inputs, begun)
            ready = perf_counter_ns()
            found = self._session.run(self._names, inputs)
            done = perf_counter_ns()
            outputs = dict(zip(self._names, found, strict=True))
            self._phases.add(ready - begun, perf_counter_ns() - done)
            return outputs
        except self._invalid_argument as error:
            raise invalid(f"ONNX Runtime refuses the inputs: {_short(error)}") from None

    def _run_converted(self, inputs: dict[str, np.ndarray], begun: int) -> Outputs:
        """Run with types that ONNX Runtime supports but cannot exchange as NumPy arrays."""
        if not self._has_bfloat16:
            feeds = {name: _decoded(name, array) if array.dtype == object else array for name, array in inputs.items()}
            ready = perf_counter_ns()
            found = self._session.run(self._names, feeds)
            done = perf_counter_ns()
        else:
            values = {name: self._as_value(name, array) for name, array in inputs.items()}
            ready = perf_counter_ns()
            given = self._session.run_with_ort_values(self._names, values)
            done = perf_counter_ns()
            found = [_as_array(value) for value in given]
        outputs = {
            name: as_bytes_array([str(text).encode() for text in array.ravel()], array.shape)
            if array.dtype == object
            else array
            for name, array in zip(self._names, found, strict=True)
        }
        self._phases.add(ready - begun, perf_counter_ns() - done)
        return outputs

    def _as_value(self, name: str, array: np.ndarray) -> Any:
        make = _runtime().OrtValue
        if array.dtype == ml_dtypes.bfloat16:
            return make.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array).view(np.uint16), _BFLOAT16)
        return make.ortvalue_from_numpy(_decoded(name, array) if array.dtype == object else np.ascontiguousarray(array))

    def _read_metadata(self, given: Given) -> Metadata:
        session = self._session
        defaults = {tensor.name: tensor for tensor in session.get_overridable_initializers()}
        optional = given.words("optional")
        for name in optional:
            if name not in defaults:
                raise HurtleError(f"optional: {self.path} has no default for an input {name!r}; it has for {list(defaults)}.")
        takes = [*session.get_inputs(), *(defaults[name] for name in optional)]
        gives = session.get_outputs()
        inputs, outputs = (tuple(_spec(self.path, tensor) for tensor in tensors) for tensors in (takes, gives))
        if KEY in session.get_modelmeta().custom_metadata_map:
            _check_sealed(self.path)
            optional += tuple(spec.name for spec in inputs if is_mask(spec))
        batched = given.truth("batched", _is_batched(session.get_inputs(), gives) and not set(optional) - {"mask"})
        if batched and not all(spec.shape[:1] == (-1,) for spec in inputs + outputs):
            raise HurtleError(
                f"batched=true: {self.path} has tensors whose first dimension is fixed: {_shapes(inputs + outputs)}."
            )
        return Metadata(inputs, outputs, "onnxruntime_onnx", frozenset(optional), state_pairs(inputs, outputs), batched)


def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise HurtleError(f'Serving .onnx files needs onnxruntime: pip install "hurtle[serve]" ({error}).') from None
    return onnxruntime


def _open_session(path: Path, device: str, threads: int) -> Any:
    """Session options: one thread is fastest for small networks, and no spinning threads disturb others."""
    runtime = _runtime()
    check_external_data(path)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_mem_pattern = False  # it would keep a plan for every shape, so that clients could make memory grow
    options.log_severity_level = 4
    providers: list[Any] = ["CPUExecutionProvider"]
    if device != "cpu":
        if "CUDAExecutionProvider" not in runtime.get_available_providers():
            raise DeviceError(f"device={device}: this onnxruntime cannot use CUDA (onnxruntime-gpu can).")
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": device.partition(":")[2] or "0"}))
    try:
        session = runtime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # its errors have no common base class
        raise HurtleError(f"ONNX Runtime cannot load {path}: {_short(error)}") from None
    if device != "cpu" and "CUDAExecutionProvider" not in session.get_providers():
        raise DeviceError(f"device={device}: ONNX Runtime found no GPU that it can use.")
    return session


def _check_sealed(path: Path) -> None:
    """Refuse an export of Hurtle's that was modified since, as `hurtle eval` does."""
    try:
        read_sealed(path.read_bytes())
    except PolicyFileError as error:
        raise HurtleError(
            f"{path} is an export of Hurtle's, but {error}. Export it again; if it was changed on purpose, remove the entry "
            f"{KEY!r} from its metadata."
        ) from None


def _spec(path: Path, tensor: Any) -> TensorSpec:
    if tensor.type not in DATATYPES:
        raise HurtleError(f"{path}: {tensor.name!r} is a {tensor.type}, which the Open Inference Protocol has no datatype for.")
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in tensor.shape)
    return TensorSpec(tensor.name, DATATYPES[tensor.type], shape)


def _shapes(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {list(spec.shape)}" for spec in specs)


def _is_batched(inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    """Whether all tensors start with the same free dimension; unnamed ones count as the same."""
    tensors = [*inputs, *outputs]
    if not inputs or any(not tensor.shape or isinstance(tensor.shape[0], int) for tensor in tensors):
        return False
    names = {tensor.shape[0] for tensor in tensors if tensor.shape[0] and not tensor.shape[0].startswith("unk_")}
    return len(names) <= 1


def _decoded(name: str, array: np.ndarray) -> np.ndarray:
    try:
        texts = [value.decode() if isinstance(value, bytes) else value for value in array.ravel().tolist()]
    except UnicodeDecodeError:
        raise invalid(f"Tensor {name!r}: expected UTF-8, the only encoding that ONNX Runtime takes for BYTES.") from None
    found = np.empty(len(texts), object)
    found[:] = texts
    return found.reshape(array.shape)


def _as_array(value: Any) -> np.ndarray:
    """Copy an output out of the runtime's memory."""
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    shape = value.shape()
    size = math.prod(shape) * 2
    content = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(content, ml_dtypes.bfloat16).reshape(shape)


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 300 else text[:300] + " …"
