"""The progress of many seeds, or of a population: a dashboard with a line for each and the aggregate, plain lines, or nothing.

lines → aggregate → rich panel or text. Pure drawing: where the numbers come from is seeds.py's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import monotonic
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from hurtle.experiments.displays import Plain, Redrawn, framed, kind_of_display
from hurtle.experiments.statistics import Estimate
from hurtle.tracking.dashboard import QuietDisplay
from hurtle.tracking.formatting import count, duration, figure, quantity
from hurtle.tracking.frame import MAX_WIDTH, MIN_WIDTH

STYLES = {
    "waiting": "bright_black",
    "starting": "bright_black",
    "paused": "bright_black",
    "training": "cyan",
    "finished": "green",
    "stopped": "yellow",
}
"""Styles of states; that of crashed seeds is red."""


@dataclass(frozen=True)
class Line:
    """One seed or member.

    Attributes:
        state: "waiting", "starting", "training", "paused", "finished", "stopped" or "crashed".
        steps_per_second: NaN if it does not train.
        mean_return: Of the last 100 training episodes; NaN if unknown.
    """

    seed: int
    state: str
    steps: int
    total_steps: int
    steps_per_second: float
    mean_return: float

    @property
    def share(self) -> float:
        """The fraction of the steps that are done."""
        return 1.0 if self.state == "finished" else min(1.0, self.steps / self.total_steps)


@dataclass(frozen=True)
class Aggregate:
    """All seeds together."""

    share: float
    finished: int
    crashed: int
    steps_per_second: float
    seconds_left: float
    returns: Estimate | None
    known: int
    """Seeds that have a return."""

    @classmethod
    def of(cls, lines: list[Line]) -> Aggregate:
        """Seeds that crashed count neither as done nor as something to come."""
        alive = [line for line in lines if line.state not in ("crashed", "stopped")]
        rate = sum(line.steps_per_second for line in lines if line.state == "training" and line.steps_per_second > 0)
        left = sum(line.total_steps - line.steps for line in alive if line.state != "finished")
        returns = [line.mean_return for line in lines if math.isfinite(line.mean_return)]
        return cls(
            share=sum(line.share for line in lines) / max(1, len(lines)),
            finished=sum(line.state == "finished" for line in lines),
            crashed=sum(line.state == "crashed" for line in lines),
            steps_per_second=rate or math.nan,
            seconds_left=max(0, left) / rate if rate else math.nan,
            returns=Estimate.of(returns) if returns else None,
            known=len(returns),
        )


class SeedsDisplay(QuietDisplay):
    """Shows nothing; messages go to standard error."""

    def __init__(self, title: str, about: str, console: Console, noun: str = "seed"):
        self._title, self._about, self._console, self._noun = title, about, console, noun

    def show(self, lines: list[Line]) -> None:
        """Set the newest numbers."""


class PlainSeeds(Plain, SeedsDisplay):
    """A line of text for each 1 % of progress, at most every two seconds and at least every minute."""

    every, at_least_every = 2.0, 60.0

    def __init__(self, title: str, about: str, console: Console, noun: str = "seed"):
        super().__init__(title, about, console, noun)
        self._printed_at, self._percent, self._pending = -math.inf, -1, ""
        self.message(f"{title}  {about}")

    def show(self, lines: list[Line]) -> None:
        """Print a line if one is due."""
        found, now = Aggregate.of(lines), monotonic()
        percent, since = math.floor(100 * found.share), now - self._printed_at
        self._pending = _in_words(found, lines)
        if since >= self.every and (percent > self._percent or since >= self.at_least_every):
            self._printed_at, self._percent = now, percent
            self._flush()

    def stop(self) -> None:
        """Print the last numbers, if they have not been printed yet."""
        self._flush()

    def _flush(self) -> None:
        if self._pending:
            self.message(self._pending)
            self._pending = ""


class LiveSeeds(Redrawn, SeedsDisplay):
    """A dashboard that redraws itself in place."""

    def __init__(self, title: str, about: str, console: Console, noun: str = "seed"):
        super().__init__(title, about, console, noun)
        self._lines: list[Line] = []
        self._began = monotonic()
        self.start_live(console)

    def show(self, lines: list[Line]) -> None:
        """Store the numbers; the next frame shows them."""
        self._lines = lines

    def frame(self, width: int, height: int) -> Panel:
        """See `Redrawn.frame`."""
        return draw(self._lines, self._title, self._about, monotonic() - self._began, width, height, self._noun)


def make_seeds_display(mode: str, title: str, about: str, console: Console | None = None, noun: str = "seed") -> SeedsDisplay:
    """The display of many seeds; the modes are those of `tracking.dashboard.make_display`, `noun` is what they are called."""
    console = console or Console()
    kinds: dict[str, Any] = {"live": LiveSeeds, "plain": PlainSeeds, "quiet": SeedsDisplay}
    return kinds[kind_of_display(mode, console)](title, about, console, noun)


def draw(lines: list[Line], title: str, about: str, elapsed: float, width: int, height: int, noun: str = "seed") -> Panel:
    """The dashboard in at most `height` lines: the aggregate, then as many seeds as fit, those under way first."""
    inner = max(min(width, MAX_WIDTH), MIN_WIDTH) - 4
    room = max(1, height - 6)
    shown = lines
    if len(lines) > room:
        urgent = sorted(lines, key=lambda line: (line.state != "training", line.state != "crashed"))[: room - 1]
        shown = sorted(urgent, key=lambda line: line.seed)
    head = _head(Aggregate.of(lines), len(lines), elapsed, noun)
    rows = [*head, Text(), *(_row(line, lines, inner, noun) for line in shown)]
    if len(shown) < len(lines):
        rows.append(Text(f"and {len(lines) - len(shown)} more", "dim"))
    return framed(rows, title, about, inner + 4)


def _head(found: Aggregate, seeds: int, elapsed: float, noun: str) -> list[Text]:
    returns = Text.assemble(("return ", "dim"), (figure(found.returns.value) if found.returns else "-", "bold cyan"))
    if found.returns is not None:
        interval = f"{figure(found.returns.low)}…{figure(found.returns.high)}" if found.known > 1 else "-"
        returns.append_text(Text.assemble(("   95 % ", "dim"), interval, (f"   IQM of {found.known} {noun}s", "dim")))
    progress = Text.assemble(
        (f"{found.finished} of {seeds}", "bold"), (" finished", "dim"),
        *([(f", {found.crashed} crashed", "red")] if found.crashed else []),
        ("   ", ""), (quantity(found.steps_per_second), "bold"), (" steps/s   elapsed ", "dim"), (duration(elapsed), "bold"),
        ("   ETA ", "dim"), (duration(found.seconds_left), "bold"),
    )  # fmt: skip
    return [returns, progress]


def _row(line: Line, lines: list[Line], width: int, noun: str) -> Text:
    style = STYLES.get(line.state, "red")
    digits = max(len(str(other.seed)) for other in lines)
    tail = f" {100 * line.share:>4.0f} %  {quantity(line.steps):>6}  {quantity(line.steps_per_second):>6}/s"
    tail += f"  return {figure(line.mean_return):>7}  {line.state:<8}"
    cells = max(4, width - len(tail) - digits - len(noun) - 2)
    filled = round(line.share * cells)
    return Text.assemble(
        (f"{noun} ", "dim"), f"{line.seed:>{digits}} ", ("━" * filled, style), ("─" * (cells - filled), "bright_black"),
        (tail[:-8], ""), (tail[-8:], style),
    )  # fmt: skip


def _in_words(found: Aggregate, lines: list[Line]) -> str:
    crashed = f", {found.crashed} crashed" if found.crashed else ""
    interval = (
        "" if found.returns is None or found.known < 2 else f" ({figure(found.returns.low)} to {figure(found.returns.high)})"
    )
    return (
        f"{100 * found.share:>3.0f} %  {found.finished} of {len(lines)} finished{crashed}"
        f"  {quantity(found.steps_per_second):>5} steps/s  ETA {duration(found.seconds_left):>7}"
        f"  return {figure(found.returns.value) if found.returns else '-'}{interval}"
        f"  steps {count(sum(line.steps for line in lines))}"
    )
