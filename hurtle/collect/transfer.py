"""`Staging`: pinned memory between the host and a GPU, so that copies overlap with work on both.

array → pinned buffer → device tensor, and back; on the CPU, views. Knows nothing of envs, policies or rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

BUFFERS = 2
"""Buffers per name: one is filled while the other may still be being copied."""


class CudaCopies:
    """The GPU operations that staging needs, on the GPU's current stream.

    Args:
        device: Which GPU.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Page-locked host memory, for asynchronous copies."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def upload(self, buffer: Tensor) -> Tensor:
        """Start copying a pinned buffer into new GPU memory."""
        return buffer.to(self._device, non_blocking=True)

    def download(self, tensor: Tensor, buffer: Tensor) -> None:
        """Start copying a GPU tensor into a pinned buffer."""
        buffer.copy_(tensor, non_blocking=True)

    def event(self) -> Any:
        """An event in the GPU's stream; its `synchronize()` waits until the GPU has reached it."""
        return torch.cuda.Event()

    def record(self, event: Any) -> None:
        """Record the event after everything launched so far."""
        event.record(torch.cuda.current_stream(self._device))


@dataclass
class _Buffer:
    """Pinned memory, NumPy's view of it, and the event of the copy that uses it."""

    memory: Tensor
    array: np.ndarray
    event: Any

    def fits(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether such an array fits into its first rows."""
        own = self.memory.shape
        return self.memory.dtype == dtype and len(own) == len(shape) and own[0] >= shape[0] and own[1:] == shape[1:]


class Arrival:
    """An array being copied to the host."""

    def __init__(self, array: np.ndarray, event: Any = None):
        self._array, self._event = array, event

    def wait(self) -> np.ndarray:
        """The array, once it has arrived; does not wait for work launched after its copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._array


class Staging:
    """Copies between NumPy arrays and a device's tensors.

    A copy to a GPU has started when `to_device` returns, and work launched afterwards sees the result; the array may be changed
    at once. Each name has two pinned buffers, used in turn; neither is refilled before its copy is done.

    Args:
        device: Where the tensors are.
        copies: Does the copying; None: the device's default. On the CPU, tensors and arrays share memory.

    Example:
        >>> staging = Staging(torch.device("cpu"))
        >>> staging.to_device("starts", np.array([True, False]))
        tensor([ True, False])
    """

    def __init__(self, device: torch.device | str, copies: CudaCopies | None = None):
        self.device = torch.device(device)
        self._copies = CudaCopies(self.device) if copies is None and self.device.type == "cuda" else copies
        self._buffers: dict[tuple[str, str], list[_Buffer]] = {}  # by direction and name, the next to use first

    @property
    def shares_memory(self) -> bool:
        """Whether device tensors and host arrays share memory."""
        return self._copies is None and self.device.type == "cpu"

    def to_device(self, name: str, array: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
        """The array as a tensor on the device, without waiting for the copy.

        Args:
            name: Whose buffers to use; arrays of one name may differ only in their number of rows.
            array: `[rows, …]`.
            dtype: The tensor's dtype; None keeps the array's.

        Returns:
            On the CPU a view where the dtype allows it, on a GPU new memory.
        """
        if self._copies is None:
            tensor = torch.as_tensor(array, device=self.device)
            return tensor if dtype is None else tensor.to(dtype)
        buffer = self._next_buffer("to device", name, array.shape, dtype or _torch_dtype(array.dtype))
        np.copyto(buffer.array[: len(array)], array, casting="unsafe")
        tensor = self._copies.upload(buffer.memory[: len(array)])
        self._copies.record(buffer.event)
        return tensor

    def to_host(self, name: str, tensor: Tensor) -> np.ndarray:
        """The tensor as an array; waits for this copy, but not for work launched after it.

        Args:
            name: Whose buffers to use.
            tensor: `[rows, …]`, on the device.

        Returns:
            On the CPU a view; else memory that is reused by the next copy but one of this name.
        """
        return self.start_to_host(name, tensor).wait()

    def start_to_host(self, name: str, tensor: Tensor) -> Arrival:
        """Start what `to_host` does; the host can launch more until it needs the array."""
        if self._copies is None:
            return Arrival(tensor.cpu().numpy())
        buffer = self._next_buffer("to host", name, tuple(tensor.shape), tensor.dtype)
        self._copies.download(tensor, buffer.memory[: len(tensor)])
        self._copies.record(buffer.event)
        return Arrival(buffer.array[: len(tensor)], buffer.event)

    def host_array(self, tensor: Tensor) -> np.ndarray:
        """The array in which the host builds this tensor: its own memory on the CPU, else zeros for `to_device`."""
        return tensor.numpy() if self.shares_memory else np.zeros(tensor.shape, str(tensor.dtype).removeprefix("torch."))

    def _next_buffer(self, direction: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> _Buffer:
        """A buffer that no copy is using, large enough for such an array."""
        assert self._copies is not None
        buffers = self._buffers.setdefault((direction, name), [])
        buffer = buffers.pop(0) if len(buffers) == BUFFERS else None
        if buffer is not None:
            buffer.event.synchronize()
        if buffer is None or not buffer.fits(shape, dtype):
            memory = self._copies.pinned(shape, dtype)
            buffer = _Buffer(memory, memory.numpy(), self._copies.event() if buffer is None else buffer.event)
        buffers.append(buffer)
        return buffer


@cache
def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, dtype)).dtype
