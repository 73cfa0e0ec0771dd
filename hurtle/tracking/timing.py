"""Measures the time of each stage: `with timer("env"): …` around each, then their fractions of the wall time.

One clock that is always charged to exactly one stage, so that the fractions add up to 1. For one thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from time import perf_counter


class Timer:
    """Fractions of the wall time by stage; time outside any stage is "other".

    Stages may nest: the time of a stage excludes the stages inside it.

    Example:
        >>> timer = Timer()
        >>> with timer("env"):
        ...     pass
        >>> sorted(timer.shares())
        ['env', 'other']
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float, other=0.0)
        self._stages = ["other"]  # the current stages; the innermost, the last one, is charged
        self._entering = "other"
        self._since = perf_counter()

    def __call__(self, stage: str) -> Timer:
        """Set the stage of the `with` block."""
        self._entering = stage
        return self

    def __enter__(self) -> None:
        self._charge()
        self._stages.append(self._entering)

    def __exit__(self, *exception: object) -> None:
        self._charge()
        self._stages.pop()

    def switch(self, stage: str) -> None:
        """Charge the rest of the `with` block to another stage; in loops this takes a third of the time of a block."""
        self._charge()
        self._stages[-1] = stage

    def _charge(self) -> None:
        now = perf_counter()
        self._seconds[self._stages[-1]] += now - self._since
        self._since = now

    def share_out(self, seconds: Mapping[str, float]) -> None:
        """Replace the time measured so far with times measured elsewhere, such as on a GPU; the rest is "other"."""
        if not seconds:
            return
        self._charge()
        total, others = sum(self._seconds.values()), sum(seconds.values())
        self._seconds = defaultdict(float, dict.fromkeys(self._seconds, 0.0))
        for stage, spent in seconds.items():
            self._seconds[stage] = spent * min(1.0, total / others) if others else 0.0
        self._seconds["other"] += max(0.0, total - others)

    def shares(self) -> dict[str, float]:
        """The fraction of time in each stage since the last call (or the start); they add up to 1."""
        self._charge()
        total = sum(self._seconds.values())
        shares = {stage: seconds / total if total else float(stage == "other") for stage, seconds in self._seconds.items()}
        self._seconds = defaultdict(float, dict.fromkeys(self._seconds, 0.0))  # stages stay listed, with 0 if unused
        return shares
