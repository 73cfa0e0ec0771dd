"""`Notices`: events that may concern many clients, counted and logged at most once a minute."""

from __future__ import annotations

import logging
from time import monotonic

log = logging.getLogger("hurtle.serving")
MINUTE = 60.0
"""Seconds between two lines about the same kind of event."""


class Notices:
    """Counts events by kind; `flush` logs them. Used on the event loop's thread only.

    Example:
        >>> notices = Notices()
        >>> notices.count("connections refused", "from 10.0.0.7:4711")
        >>> notices.pending()
        {'connections refused': 1}
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._examples: dict[str, str] = {}
        self._logged: dict[str, float] = {}

    def count(self, kind: str, example: str = "", times: int = 1) -> None:
        """Count an event; the log shows the last `example`."""
        self._counts[kind] = self._counts.get(kind, 0) + times
        self._examples[kind] = example

    def pending(self) -> dict[str, int]:
        """Counts that are not logged yet."""
        return dict(self._counts)

    def flush(self, at_once: bool = False) -> None:
        """Log every kind that was not logged within the last minute; all of them if `at_once`."""
        now = monotonic()
        for kind, count in list(self._counts.items()):
            if at_once or now - self._logged.get(kind, -MINUTE) >= MINUTE:
                example = "".join(char if char.isprintable() else "?" for char in self._examples[kind][:200])
                log.warning("%s: %d%s", kind, count, f" (last: {example})" if example else "")
                self._logged[kind] = now
                del self._counts[kind], self._examples[kind]
