"""`KernelCrew`: runs a kernel of a learner on several threads, which wait for each other at a barrier."""

from __future__ import annotations

from typing import Any

import numpy as np

from hurtle.kernels.loader import load_kernels
from hurtle.native.build import COMPILING, address_of_entry
from hurtle.native.threads import Crew


class KernelCrew:
    """A kernel and its threads.

    Args:
        kernel: Called as `kernel(job, thread, threads)`; returns an int.
        most: The most threads that a call may use.
        others: Further barriers at which the kernel's threads wait.

    Attributes:
        barrier: What the kernel passes to `wait_for_all`; the job must have its address.
        address: The kernel's.
    """

    def __init__(self, kernel: Any, most: int, others: tuple[np.ndarray, ...] = ()):
        self.barrier: np.ndarray = load_kernels().sync.new_barrier()
        self._barriers = (self.barrier, *others)
        self._kernel, self._crew = kernel, Crew(most) if most > 1 else None
        with COMPILING:
            self.address = address_of_entry(kernel)
            if self._crew is not None:
                load_kernels().sync.abort(self.barrier.copy())  # compiles it

    def run(self, job: int, threads: int) -> int:
        """Call the kernel on so many threads with the job at that address; returns the lowest of their results."""
        if self._crew is None or threads == 1:
            return self._kernel(job, 0, 1)
        try:
            return min(self._crew.run(self.address, job, threads, self._abort))
        except BaseException:
            if self.barrier[load_kernels().sync.ABORTED]:  # else it is another call's, which goes on
                for barrier in self._barriers:
                    barrier[:] = 0
            raise

    def _abort(self) -> None:
        for barrier in self._barriers:
            load_kernels().sync.abort(barrier)

    def close(self) -> None:
        """Stop the helper threads."""
        if self._crew is not None:
            self._crew.close()
