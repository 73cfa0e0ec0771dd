"""`RowKernels`: runs the functions of device_rows.py for all rows, on the device of the tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hurtle.kernels import device_rows


class RowKernels:
    """Call it with a function's name, the number of rows and its arguments: tensors, named tuples of tensors, numbers.

    Args:
        device: The device of all tensors.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def __call__(self, name: str, count: int, *arguments: Any) -> None:
        """Launch on torch's current stream, or run on the CPU."""
        if self._device.type != "cuda":
            getattr(device_rows, name)(count, *(_array(argument, Tensor.numpy) for argument in arguments))
            return
        from hurtle.kernels.loader import load_cuda_kernels

        rows = load_cuda_kernels().rows
        cuda = rows.cuda
        with cuda.gpus[self._device.index or 0]:
            stream = cuda.external_stream(torch.cuda.current_stream(self._device).cuda_stream)
            views = (_array(argument, cuda.as_cuda_array) for argument in arguments)
            rows.launch(getattr(rows, name), count, stream, *views)


def _array(argument: Any, view: Callable[[Tensor], Any]) -> Any:
    """A tensor, or a tuple of tensors, as kernels expect it; anything else unchanged."""
    if isinstance(argument, Tensor):
        return view(argument.detach())
    if isinstance(argument, tuple):
        return type(argument)(*(view(part) for part in argument))
    return argument
