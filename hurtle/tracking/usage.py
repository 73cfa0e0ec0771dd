"""`Usage`: the CPU, memory and GPU usage of this process, sampled at most once a second.

clocks and /proc → dict of numbers. Queries the GPU only if torch is already imported and uses CUDA.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from time import monotonic, process_time
from types import ModuleType


class Usage:
    """The resource usage of this process; `sample` may be called at any rate.

    Args:
        every: Seconds for which a sample is reused.
    """

    def __init__(self, every: float = 1.0):
        self._every = every
        self._wall, self._cpu = monotonic(), process_time()
        self._sample: dict[str, float] = {}

    def sample(self) -> dict[str, float]:
        """The latest values, without those that are unavailable.

        `cpu_percent` (100 is one core; the sum of all threads), `memory` (resident bytes), and if CUDA is in use `gpu_memory`
        (bytes reserved by torch), `gpu_memory_total`, and `gpu_percent` if NVIDIA's Python library is installed.
        """
        now = monotonic()
        if self._sample and now - self._wall < self._every:
            return self._sample
        cpu = process_time()
        sample = {"memory": float(_resident_bytes()), **_gpu()}
        if now > self._wall:
            sample["cpu_percent"] = 100 * (cpu - self._cpu) / (now - self._wall)
        self._wall, self._cpu, self._sample = now, cpu, sample
        return sample


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no /proc: macOS, which reports the peak, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _gpu() -> dict[str, float]:
    torch = sys.modules.get("torch")
    if torch is None or _is_half_imported(torch) or not torch.cuda.is_initialized():
        return {}
    # Not the current device, which is per thread, and this thread only draws: take the device with the most memory in use.
    device = max(range(torch.cuda.device_count()), key=torch.cuda.memory_reserved)
    found = {
        "gpu_memory": float(torch.cuda.memory_reserved(device)),
        "gpu_memory_total": float(torch.cuda.mem_get_info(device)[1]),
    }
    try:
        found["gpu_percent"] = float(torch.cuda.utilization(device))
    except Exception:  # no pynvml, or no driver support: ignore
        return found
    return found


def _is_half_imported(module: ModuleType) -> bool:
    """Whether another thread is still importing the module."""
    return getattr(getattr(module, "__spec__", None), "_initializing", False)
