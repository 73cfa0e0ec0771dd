"""`PreciseTimer`: calls back after fractions of a millisecond; event loops round to milliseconds.

On Linux a timerfd wakes the event loop; elsewhere the loop spins until it is time, which keeps a core busy.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

MILLISECONDS = 0.002
"""Seconds above which a wait starts with the loop's own timer, if the loop would have to spin."""
SOON = 10e-6
"""Seconds: shorter than a wake-up."""


class PreciseTimer:
    """One timer, which is set again and again.

    Args:
        callback: Called when the time is up.
    """

    def __init__(self, callback: Callable[[], None]):
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._at = 0.0
        self._closed = False
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._fd = -1
        if self._libc is not None:
            self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._on_readable)

    def set(self, seconds: float) -> None:
        """Call back after `seconds`."""
        if seconds < SOON:
            self._loop.call_soon(self._call)
        elif self._fd >= 0 and self._libc is not None:
            whole = int(seconds)
            times = (ctypes.c_long * 4)(0, 0, whole, max(int((seconds - whole) * 1e9), 1))  # interval, then the first
            self._libc.timerfd_settime(self._fd, 0, times, None)
        else:
            self._at = time.perf_counter() + seconds
            self._turn()

    def close(self) -> None:
        """Stop."""
        self._closed = True
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _on_readable(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._fd, 8)
        self._call()

    def _turn(self) -> None:
        left = self._at - time.perf_counter()
        if left <= 0:
            self._call()
        elif left > MILLISECONDS:
            self._loop.call_later(left - MILLISECONDS, self._turn)
        else:
            self._loop.call_soon(self._turn)

    def _call(self) -> None:
        if not self._closed:
            self._callback()
