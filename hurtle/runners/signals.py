"""Ctrl-C and SIGTERM as stop requests: the first one lets the run save, a second Ctrl-C interrupts immediately."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, Self


class StopSignals:
    """A context in which SIGINT and SIGTERM call `ask` with their name instead of ending the process.

    It does nothing outside the main thread, where Python delivers no signals.
    """

    def __init__(self, ask: Callable[[str], None]):
        self._ask = ask
        self._asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = True
        self._ask("Ctrl-C" if number == signal.SIGINT else "SIGTERM")
