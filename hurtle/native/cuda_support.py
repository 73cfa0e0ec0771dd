"""The only module that imports numba.cuda: finds the GPU or the simulator, or reports what is missing."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from hurtle.errors import DeviceError


def import_cuda() -> Any:
    """`numba.cuda`, ready to compile.

    Raises:
        DeviceError: There is no usable GPU, or the extra that drives it is not installed.
    """
    if not hasattr(np, "row_stack"):  # numba-cuda uses a name that NumPy 2.5 removed
        np.row_stack = np.vstack
    try:
        from numba import cuda
    except ImportError as error:
        raise DeviceError(f"device='cuda' needs numba-cuda: pip install 'hurtle[cuda]' ({error}).") from None
    warnings.filterwarnings("ignore", message=".*under-utilization due to low occupancy.*")  # few envs are the user's choice
    if not simulated() and not cuda.is_available():
        raise DeviceError(
            "device='cuda' was asked for, but numba finds no usable GPU. Check the driver with nvidia-smi, and that "
            "numba-cuda is installed: pip install 'hurtle[cuda]'. Without a GPU, use device='cpu'."
        )
    return cuda


def simulated() -> bool:
    """Whether Numba runs CUDA kernels in its simulator (NUMBA_ENABLE_CUDASIM=1)."""
    from numba import config

    return bool(config.ENABLE_CUDASIM)  # type: ignore[attr-defined]


def gpu_is_usable() -> bool:
    """Whether `device="cuda"` would work here, on a GPU or in the simulator."""
    try:
        import_cuda()
    except DeviceError:
        return False
    return True
