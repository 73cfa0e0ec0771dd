"""The torch device that a run asks for, and torch's global settings for as long as it lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hurtle.errors import DeviceError


def find_device(device: str) -> torch.device:
    """The torch device that was asked for.

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


@contextmanager
def torch_settings(threads: int, precision: str, device: torch.device) -> Iterator[None]:
    """Torch's threads, float precision and random streams, which are global, set for a run and restored after it."""
    num_threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        with own_random_streams(device):
            yield
    finally:
        torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def own_random_streams(device: torch.device) -> Iterator[None]:
    """What is drawn inside leaves torch's global generators as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
