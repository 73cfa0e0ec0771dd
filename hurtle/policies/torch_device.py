"""`find_device`: the torch device behind "cpu", "cuda", "cuda:1" or "auto"."""

from __future__ import annotations

import torch

from hurtle.errors import DeviceError


def find_device(device: str) -> torch.device:
    """The torch device with this name; "auto" picks a GPU if there is one.

    Raises:
        DeviceError: There is no such GPU.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise DeviceError(f"A device is cpu, cuda, cuda:1 … or auto, got {device!r}.") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise DeviceError(
            f"device={device!r}: torch {torch.__version__} sees {count or 'no'} GPU{'' if count == 1 else 's'} here. "
            "Use device='cpu', or device='auto' to take a GPU only where there is one."
        )
    return found
