"""Shared by the backends that run on torch: devices, and conversion between arrays and tensors. Knows no models."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import torch

from hurtle.errors import DeviceError, HurtleError, ServingError
from hurtle.serving.backends.parameters import Given

DATATYPES = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
    torch.uint16: "UINT16",
    torch.uint32: "UINT32",
    torch.uint64: "UINT64",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float32: "FP32",
    torch.float64: "FP64",
}
LOADING = threading.Lock()
"""Serializes loading: lanes load concurrently, and torch's loaders keep state in globals."""


def datatype_of_tensor(name: str, dtype: torch.dtype) -> str:
    """The protocol's name for a dtype.

    Raises:
        HurtleError: The protocol has none.
    """
    if dtype not in DATATYPES:
        raise HurtleError(f"Tensor {name!r} is of {dtype}, which the Open Inference Protocol has no datatype for.")
    return DATATYPES[dtype]


def open_device(given: Given) -> torch.device:
    """Apply the parameters `device` and `threads`; torch's CPU threads are set for the whole process.

    Raises:
        DeviceError: The device does not exist.
    """
    name, threads = given.device(), given.whole("threads", 1)
    device = torch.device(name)
    if device.type == "cpu" and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"device={name}: torch sees {torch.cuda.device_count()} GPUs.")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def to_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Convert an array to a tensor. Read-only arrays (a message, a kept state) are copied, as models may work in place."""
    if not (array.flags.writeable and array.flags.aligned and array.flags.c_contiguous):
        array = np.array(array, order="C")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """Convert a tensor on any device to an array."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def wait_for(device: torch.device) -> None:
    """Wait for the device, so that the next phase can be timed separately."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def model_failed(error: Exception) -> ServingError:
    """The error for the client: the last line of torch's, which is long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = "resource_exhausted" if isinstance(error, torch.OutOfMemoryError) else "internal"
    return ServingError(reason, f"The model failed: {lines[-1] if lines else type(error).__name__:.300}")
