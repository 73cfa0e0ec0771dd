"""Memory of large buffers: arrays in RAM, or in a file where they would not fit.

shape, dtype → array of zeros. The file has no name: it is gone when the process ends, however it ends.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hurtle.errors import HurtleError

SHARE_OF_MEMORY = 0.8
"""Share of the available memory that a buffer may take before it goes to a file."""


class Storage:
    """Allocates the arrays of one buffer.

    Args:
        size: Bytes of all its arrays together.
        folder: Where to put them: a folder, "memory", or None for memory if they fit and else the system's temporary folder.

    Attributes:
        folder: The folder of the files, or None if the arrays are in memory.
    """

    def __init__(self, size: int, folder: str | Path | None = None):
        if folder is None and size > SHARE_OF_MEMORY * available_memory():
            folder = tempfile.gettempdir()
        self.folder = None if folder is None or folder == "memory" else Path(folder)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array of zeros.

        Raises:
            HurtleError: There is not enough memory, or room on the disk.
        """
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if self.folder is None or not size:
            try:
                return np.zeros(shape, dtype)
            except MemoryError:
                raise HurtleError(f"A replay buffer of {gib(size)} does not fit in memory: use a smaller capacity.") from None
        try:
            with tempfile.TemporaryFile(dir=self.folder, prefix="hurtle-replay-") as file:  # the mapping keeps it open
                _reserve(file.fileno(), size)
                return np.memmap(file, dtype, "r+", shape=shape)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise HurtleError(f"A replay buffer of {gib(size)} does not fit on the disk of {self.folder}.") from error
            raise HurtleError(f"A replay buffer cannot be kept in {self.folder}: {error.strerror or error}.") from error


def _reserve(file: int, size: int) -> None:
    """Take the room on the disk now: a full disk would kill the process when a page is written later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def available_memory() -> int:
    """Bytes that can be used without swapping, in a container at most what it is allowed."""
    try:
        with Path("/proc/meminfo").open() as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        most, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        return min(free, int(most) - int(used))
    except (OSError, ValueError):  # no such file, or "max": no limit
        return free


def gib(size: int) -> str:
    """A number of bytes in words."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
