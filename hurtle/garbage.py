"""`RARE_COLLECTIONS`: fewer garbage collections while modules are imported and code is compiled.

Both make many objects, nearly all of which stay: Python's collector would go through them again and again.
"""

from __future__ import annotations

import gc
import os
import threading


class _RareCollections:
    """A context in which garbage is collected less often, in all threads; may be entered again inside.

    A collector that is off stays off. A child forked while another thread is inside keeps the rare collections.
    """

    THRESHOLDS = 50_000, 20, 100
    """As `gc.set_threshold` takes them."""

    def __init__(self) -> None:
        self._lock, self._depth, self._usual = threading.Lock(), 0, gc.get_threshold()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_child)

    def __enter__(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._usual = gc.get_threshold()
                if self._usual[0]:
                    gc.set_threshold(*map(max, self._usual, self.THRESHOLDS))
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                gc.set_threshold(*self._usual)

    def _in_child(self) -> None:
        """The thread that held the lock in the parent does not exist in the child."""
        self._lock = threading.Lock()


RARE_COLLECTIONS = _RareCollections()
