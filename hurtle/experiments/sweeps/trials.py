"""`Trial` and `Journal`: what a sweep has tried, one JSON line per beginning and end, so that a kill loses nothing.

begin, end → trials.jsonl, synced → trials, read back. A line that a kill cut off is ignored.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError

STATES = ("running", "finished", "pruned", "failed", "cut")
"""Pruned: it learned worse than others; cut: the time was up."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        number: Its number; that of its folder, too.
        values: The settings that were chosen for it.
        seed: The seed of its run.
        origin: "baseline", the settings without a sweep; "random"; "search"; or "check", of another trial with a fresh seed.
        checks: The number of the trial that it checks; -1: it is no check.
        state: One of STATES.
        score: What the sweep maximizes; NaN if it has none.
        seconds: Training time.
        steps: Steps that it trained.
        error: What went wrong.
    """

    number: int
    values: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    origin: str = "search"
    checks: int = -1
    state: str = "running"
    score: float = math.nan
    seconds: float = math.nan
    steps: int = 0
    error: str = ""

    @property
    def is_check(self) -> bool:
        """Whether it checks another trial."""
        return self.checks >= 0

    @property
    def has_score(self) -> bool:
        """Whether it trained to the end and was scored."""
        return self.state == "finished" and math.isfinite(self.score) and math.isfinite(self.seconds)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{'check' if self.is_check else 'trial'}-{self.number:04}"


class Journal:
    """The trials of a sweep, on disk before `begin` and `end` return.

    Args:
        file: trials.jsonl; it need not exist.

    Attributes:
        trials: By number, as of the newest line.
        elapsed: Seconds that the sweep has run, as of the newest line.
    """

    def __init__(self, file: Path):
        self._file = file
        self.trials: dict[int, Trial] = {}
        self.elapsed = 0.0
        for line in _lines(file):
            self._take(line)

    def begin(self, trial: Trial, elapsed: float) -> None:
        """A trial is about to start, perhaps again."""
        self._append({"event": "begin", "elapsed": elapsed, **_finite(asdict(trial))})

    def end(self, trial: Trial, elapsed: float) -> None:
        """A trial has ended.

        Raises:
            HurtleError: It had ended before, or never began.
        """
        if trial.number not in self.trials or self.trials[trial.number].state != "running":
            raise HurtleError(f"Trial {trial.number} is not running: it cannot end.")
        self._append({"event": "end", "elapsed": elapsed, **_finite(asdict(trial))})

    def select(self, keep: Callable[[Trial], bool]) -> list[Trial]:
        """The trials that fit, in order of their numbers."""
        return [self.trials[number] for number in sorted(self.trials) if keep(self.trials[number])]

    def _append(self, event: dict[str, Any]) -> None:
        self._take(event)
        try:
            with self._file.open("ab") as file:
                before = file.tell()
                cut_off = before > 0 and not _ends_a_line(self._file)
                file.write(b"\n" * cut_off + json.dumps(event).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise HurtleError(f"{self._file} could not be written: {error.strerror}.") from error

    def _take(self, event: dict[str, Any]) -> None:
        values = {name: event[name] for name in Trial.__dataclass_fields__ if name in event}
        for name in ("score", "seconds"):
            values[name] = math.nan if values.get(name) is None else values[name]
        values["values"] = {name: frozen(value) for name, value in values.get("values", {}).items()}
        trial = Trial(**values)
        self.trials[trial.number] = trial if event["event"] == "end" else replace(trial, state="running")
        self.elapsed = max(self.elapsed, float(event["elapsed"]))


def pareto_front(trials: Iterable[Trial]) -> list[Trial]:
    """The scored trials than which none is both faster and better; from the fastest to the best.

    Example:
        >>> def trial(number, seconds, score):
        ...     return Trial(number, state="finished", seconds=seconds, score=score)
        >>> [found.number for found in pareto_front([trial(0, 3, 5), trial(1, 1, 2), trial(2, 2, 1), trial(3, 4, 5)])]
        [1, 0]
    """
    front: list[Trial] = []
    for trial in sorted((trial for trial in trials if trial.has_score), key=lambda trial: (trial.seconds, -trial.score)):
        if not front or trial.score > front[-1].score:
            front.append(trial)
    return front


def frozen(value: Any) -> Any:
    """A value of TOML or JSON as settings have it: lists are tuples."""
    return tuple(value) if isinstance(value, list) else value


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    found = []
    for line in file.read_bytes().split(b"\n"):
        try:
            event = json.loads(line)
        except ValueError:  # cut off
            continue
        is_event = isinstance(event, dict) and event.get("event") in ("begin", "end") and event.get("state") in STATES
        if is_event and type(event.get("number")) is int and event["number"] >= 0 and isinstance(event.get("values"), dict):
            found.append(event)
    return found


def _ends_a_line(file: Path) -> bool:
    with file.open("rb") as opened:
        opened.seek(-1, os.SEEK_END)
        return opened.read(1) == b"\n"


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()}
