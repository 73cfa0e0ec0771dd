"""The progress display of training: a live dashboard on a terminal, plain lines in a log, or nothing.

trainer → display.update(metrics) after every update (only stores) → drawn a few times a second. Knows nothing of algorithms.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from time import monotonic
from typing import IO, Any, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel

from hurtle.errors import UnknownNameError, did_you_mean
from hurtle.tracking.formatting import count, duration, figure, quantity
from hurtle.tracking.frame import MIN_WIDTH, NAN, Report, draw
from hurtle.tracking.usage import Usage

COLUMNS = {
    "policy_loss": ("policy loss", 7),
    "value_loss": ("value loss", 7),
    "entropy": ("entropy", 6),
    "approx_kl": ("KL", 6),
}
"""The learner metrics in a line of text, with label and width …"""
REPLAY_COLUMNS = {"value_loss": ("value loss", 7), "q_value": ("Q", 7), "td_error": ("TD error", 7), "epsilon": ("random", 6)}
"""… and those of learners with a replay buffer."""


class Display(Protocol):
    """Shows a run. Use it as a context manager: it always restores the terminal."""

    def status(self, text: str) -> None:
        """Show what happens before the first update, such as "importing torch"; may be called before `start`."""

    def start(self, about: str = "") -> None:
        """Start the display; `about` is a short text, such as the run's folder."""

    def update(self, metrics: Mapping[str, float]) -> None:
        """Set the newest metrics; cheap enough to call thousands of times a second."""

    def message(self, text: str) -> None:
        """Show a message, such as a warning, without disturbing the display."""

    def stop(self) -> None:
        """End the display and leave the last metrics visible; a second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def make_display(mode: str, title: str, total_steps: int, console: Console | None = None) -> Display:
    """The display of a run.

    Args:
        mode: "live" (a dashboard that redraws itself), "plain" (lines), "quiet" (only messages, on standard error), or
            "auto": live on a terminal, else plain.
        title: A title, such as "cartpole · ppo".
        total_steps: Number of steps of the run.
        console: The console to write to; None writes to standard output.
    """
    console = console or Console()
    if mode == "auto":
        mode = "live" if can_redraw(console) else "plain"
    kinds = {"live": LiveDisplay, "plain": PlainDisplay, "quiet": QuietDisplay}
    if mode not in kinds:
        raise UnknownNameError(f"No progress display {mode!r}. {did_you_mean(mode, ['auto', *kinds])}")
    kind: Any = kinds[mode]
    return kind(title, total_steps, console)


def can_redraw(console: Console) -> bool:
    """Whether a dashboard can be drawn there."""
    unicode = console.encoding.lower().startswith("utf")
    return console.is_terminal and not console.is_dumb_terminal and console.width >= MIN_WIDTH and unicode


@contextmanager
def ignoring_closed_pipe(console: Console) -> Iterator[None]:
    """If the reader of a pipe is gone (`hurtle train … | head`), stop writing instead of ending the run."""
    try:
        yield
    except (BrokenPipeError, SystemExit):  # rich's console turns the first into the second
        console.quiet = True
        _discard(console.file)


def _discard(file: IO[str]) -> None:
    """Discard what is buffered and what is written from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError):  # not a real file
        os.dup2(nowhere, file.fileno())
    os.close(nowhere)


class QuietDisplay:
    """Shows nothing; messages go to standard error."""

    def __init__(self, title: str, total_steps: int, console: Console):
        pass

    def status(self, text: str) -> None:
        """Do nothing."""

    def start(self, about: str = "") -> None:
        """Do nothing."""

    def update(self, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def message(self, text: str) -> None:
        """Print to standard error."""
        try:
            print(f"hurtle: {text}", file=sys.stderr, flush=True)
        except BrokenPipeError:
            _discard(sys.stderr)

    def stop(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class PlainDisplay(QuietDisplay):
    """Prints a line for each 1 % of progress (at least every minute, at most every two seconds), and one at the end.

    The next line after an evaluation shows its result.
    """

    every = 2.0
    at_least_every = 60.0

    def __init__(self, title: str, total_steps: int, console: Console):
        self._console = console
        self._report = Report(title, total_steps)
        self._steps_width = len(count(total_steps))
        self._printed_at, self._printed_percent = -self.every, -1
        self._evaluation = ""  # not printed yet
        self._pending = False

    def status(self, text: str) -> None:
        """Print a line."""
        self._print(f"{self._report.title}: {text} …")

    def start(self, about: str = "") -> None:
        """Print the header."""
        self._print(f"{self._report.title}  {count(self._report.total_steps)} steps  {about}".rstrip())

    def update(self, metrics: Mapping[str, float]) -> None:
        """Print a line if one is due."""
        report = self._report
        report.metrics.update(metrics)
        self._pending = True
        if "eval_return" in metrics:
            interval = f"{figure(report.value('eval_return_low'))} to {figure(report.value('eval_return_high'))}"
            self._evaluation = f"  evaluation {figure(metrics['eval_return'])} ({interval})"
        since = monotonic() - self._printed_at
        if since >= self.every and (report.percent_done > self._printed_percent or since >= self.at_least_every):
            self._report_line()

    def message(self, text: str) -> None:
        """Print a line."""
        self._print(text)

    def stop(self) -> None:
        """Print the last metrics, if they have not been printed yet."""
        if self._pending:
            self._report_line()

    def _report_line(self) -> None:
        report, value = self._report, self._report.value
        self._printed_at, self._printed_percent, self._pending = monotonic(), report.percent_done, False
        best = f"(best {figure(value('episode_return_best'))})"
        line = (
            f"steps {count(value('steps')):>{self._steps_width}} ({report.percent_done:>3} %)"
            f"  {quantity(value('steps_per_second')):>5} steps/s  ETA {duration(report.seconds_left):>7}"
            f"  return {figure(value('episode_return')):>7} {best:<14}"
            f"  length {figure(value('episode_length')):>6}{self._learner()}{self._evaluation}"
        )
        self._evaluation = ""
        self._print(line)

    def _learner(self) -> str:
        """Losses, and what else tells how learning goes."""
        columns = REPLAY_COLUMNS if "replay" in self._report.metrics else COLUMNS
        return "".join(f"  {label} {figure(self._report.value(name)):>{width}}" for name, (label, width) in columns.items())

    def _print(self, text: str) -> None:
        encoding = self._console.encoding  # an ASCII-only log must not end a run
        text = text.encode(encoding, "replace").decode(encoding)
        with ignoring_closed_pipe(self._console):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay(QuietDisplay):
    """A dashboard that redraws itself in place, from its own thread, so that the clocks keep running during long updates."""

    frames_per_second = 4

    def __init__(self, title: str, total_steps: int, console: Console):
        self._console = console
        self._report = Report(title, total_steps)
        self._usage = Usage()
        self._started = self._updated = monotonic()
        self._running = False
        self._live = Live(
            console=console,
            get_renderable=self._frame,
            refresh_per_second=self.frames_per_second,
            vertical_overflow="crop",
        )

    def status(self, text: str) -> None:
        """Draw a frame with this text in place of the curve."""
        self._report.status = f"{text} …"
        self._draw()

    def start(self, about: str = "") -> None:
        """Draw a frame and start redrawing."""
        self._report.about = about
        self._draw()

    def _draw(self) -> None:
        """Draw a frame at once; the first call starts the thread."""
        with ignoring_closed_pipe(self._console):
            if self._running:
                self._live.refresh()
                return
            self._started = self._updated = monotonic()
            self._running = True
            self._live.start(refresh=True)

    def update(self, metrics: Mapping[str, float]) -> None:
        """Store the metrics; the next frame shows them."""
        report = self._report
        report.returns.add(metrics.get("episode_return", NAN))
        shares = {name[5:]: share for name, share in metrics.items() if name.startswith("time/")}
        # Smoothed, because they fluctuate between updates. New dicts, because the thread may be reading the old ones.
        report.shares = {stage: 0.9 * report.shares.get(stage, share) + 0.1 * share for stage, share in shares.items()}
        report.metrics = {**report.metrics, **metrics}
        self._updated = monotonic()

    def message(self, text: str) -> None:
        """Print above the dashboard."""
        with ignoring_closed_pipe(self._console):
            self._console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        """Leave the last frame on the screen; none if there were no updates, so that only an error shows."""
        if self._running:
            self._running = False
            self._live.transient = not self._report.metrics
            with ignoring_closed_pipe(self._console):
                self._live.stop()

    def _frame(self) -> Panel:
        report = self._report
        now = monotonic()
        trained = report.value("seconds")  # includes the time before a resume
        since = now - self._updated if self._running else 0.0
        report.elapsed = trained + since if trained == trained else now - self._started
        report.usage = self._usage.sample()
        size = self._console.size
        return draw(report, size.width, size.height - 1, colored=self._console.color_system is not None)
