"""The progress of a sweep: a dashboard with the trials under way and the best ones, plain lines in a log, or nothing.

`State` → rich panel or text. Pure drawing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from hurtle.experiments.displays import Plain, Redrawn, framed, kind_of_display
from hurtle.experiments.sweeps.finalists import checked, winner
from hurtle.experiments.sweeps.result import settings_in_words
from hurtle.experiments.sweeps.trials import Trial, pareto_front
from hurtle.tracking.dashboard import QuietDisplay
from hurtle.tracking.formatting import duration, figure
from hurtle.tracking.frame import MAX_WIDTH, MIN_WIDTH
from hurtle.tracking.metrics_tail import last_metrics

if TYPE_CHECKING:
    from hurtle.experiments.sweeps.loop import SweepLoop

STYLES = {"finished": "green", "pruned": "yellow", "cut": "yellow", "failed": "red"}


@dataclass(frozen=True)
class Running:
    """A trial under way: its share of the steps, and the return of its last training episodes."""

    trial: Trial
    share: float
    mean_return: float


@dataclass(frozen=True)
class State:
    """A sweep at one moment; scores are as the metric has them.

    Attributes:
        trials: All of them, checks included.
        running: Those under way.
        elapsed: Seconds.
        budget: Seconds.
        most_trials: Of the search; 0: no limit.
        is_checking: Whether the search is over.
        sign: -1 if smaller values of the metric are better.
    """

    trials: tuple[Trial, ...]
    running: tuple[Running, ...]
    elapsed: float
    budget: float
    most_trials: int
    is_checking: bool
    sign: int = 1

    @classmethod
    def of(cls, loop: SweepLoop) -> State:
        """The state of a loop."""
        running = []
        for number, task in loop.processes.running.items():
            newest, total = last_metrics(task.folder / "metrics.jsonl"), task.words["settings"]["total_steps"]
            share = min(1.0, newest.get("steps", 0.0) / total)
            running.append(Running(loop.journal.trials[number], share, newest.get("episode_return", math.nan)))
        return cls(
            tuple(loop.journal.trials.values()), tuple(running), loop.elapsed, loop.plan.budget, loop.plan.trials,
            loop.is_checking, -1 if loop.plan.minimize else 1,
        )  # fmt: skip

    @property
    def searched(self) -> list[Trial]:
        """The trials of the search."""
        return [trial for trial in self.trials if not trial.is_check]


class SweepDisplay(QuietDisplay):
    """Shows nothing; messages go to standard error."""

    def __init__(self, title: str, about: str, console: Console):
        self._title, self._about, self._console = title, about, console

    def show(self, state: State) -> None:
        """Set the newest state."""


class PlainSweep(Plain, SweepDisplay):
    """A line of text for each trial that has ended."""

    def __init__(self, title: str, about: str, console: Console):
        super().__init__(title, about, console)
        self._told: set[int] = set()
        self._best = -math.inf
        self.message(f"{title}  {about}")

    def show(self, state: State) -> None:
        """Print what has ended."""
        for trial in state.trials:
            if trial.state == "running" or trial.number in self._told:
                continue
            self._told.add(trial.number)
            is_best = trial.has_score and not trial.is_check and trial.score > self._best
            self._best = trial.score if is_best else self._best
            what = f"check of trial-{trial.checks:04}" if trial.is_check else settings_in_words(trial)
            seconds = "-" if math.isnan(trial.seconds) else f"{trial.seconds:.1f}"
            self.message(
                f"{duration(state.elapsed):>7}  {trial.name}  {trial.state:<8}  {figure(state.sign * trial.score):>8}  "
                f"{seconds:>6} s  {'best  ' if is_best else ''}{what}"
            )


class LiveSweep(Redrawn, SweepDisplay):
    """A dashboard that redraws itself in place."""

    def __init__(self, title: str, about: str, console: Console):
        super().__init__(title, about, console)
        self._state: State | None = None
        self.start_live(console)

    def show(self, state: State) -> None:
        """Store the state; the next frame shows it."""
        self._state = state

    def frame(self, width: int, height: int) -> Panel:
        """See `Redrawn.frame`."""
        return draw(self._state, self._title, self._about, width, height)


def make_sweep_display(mode: str, title: str, about: str, console: Console | None = None) -> SweepDisplay:
    """The display of a sweep; the modes are those of `tracking.dashboard.make_display`."""
    console = console or Console()
    kinds: dict[str, Any] = {"live": LiveSweep, "plain": PlainSweep, "quiet": SweepDisplay}
    return kinds[kind_of_display(mode, console)](title, about, console)


def draw(state: State | None, title: str, about: str, width: int, height: int) -> Panel:
    """The dashboard in at most `height` lines: the best, the counts, trials under way, then the Pareto front."""
    inner = max(min(width, MAX_WIDTH), MIN_WIDTH) - 4
    rows = [Text("starting …", "dim")] if state is None else _rows(state, inner, max(4, height - 4))
    return framed(rows, title, about, inner + 4)


def _rows(state: State, width: int, height: int) -> list[Text]:
    rows = [_best(state), _counts(state), Text()]
    rows += [_running(running, state, width) for running in state.running]
    front = pareto_front(state.searched)
    room = height - len(rows) - 2
    if front and room > 0:
        rows += [Text(), Text("fastest to best", "dim")]
        rows += [_on_the_front(trial, state) for trial in front[-room:]]
    return rows[:height]


def _best(state: State) -> Text:
    found = winner(state.trials)
    if found is None:
        return Text.assemble(("best ", "dim"), ("-", "bold cyan"))
    baseline = next((trial for trial in state.searched if trial.origin == "baseline" and trial.has_score), None)
    parts: list[Any] = [("best ", "dim"), (figure(state.sign * found.score), "bold cyan"), f" in {found.seconds:.1f} s"]
    checks = checked(state.trials)
    if found.number in checks:
        parts += [("   checked ", "dim"), figure(state.sign * checks[found.number].estimate.value)]
    if baseline is not None:
        parts += [("   baseline ", "dim"), f"{figure(state.sign * baseline.score)} in {baseline.seconds:.1f} s"]
    return Text.assemble(*parts)


def _counts(state: State) -> Text:
    states = [trial.state for trial in state.searched]
    most = f" of {state.most_trials}" if state.most_trials else ""
    parts: list[Any] = [(f"{len(states)}{most}", "bold"), (" trials", "dim")]
    for name, style in STYLES.items():
        if name in states:
            parts += [("   ", ""), (f"{states.count(name)} {name}", style)]
    checks = sum(trial.is_check for trial in state.trials)
    if state.is_checking:
        parts += [("   ", ""), (f"{checks} checks", "bold")]
    budget = f" of {duration(state.budget)}" if math.isfinite(state.budget) else ""
    return Text.assemble(*parts, ("   elapsed ", "dim"), (duration(state.elapsed), "bold"), (budget, "dim"))


def _running(running: Running, state: State, width: int) -> Text:
    trial = running.trial
    tail = f" {100 * running.share:>3.0f} %  return {figure(running.mean_return):>7}"
    cells = 24
    filled = round(running.share * cells)
    what = f"check of trial-{trial.checks:04}" if trial.is_check else settings_in_words(trial)
    return Text.assemble(
        (f"{trial.name} ", "dim"), ("━" * filled, "cyan"), ("─" * (cells - filled), "bright_black"), tail, (f"  {what}", "dim")
    )


def _on_the_front(trial: Trial, state: State) -> Text:
    score = figure(state.sign * trial.score)
    return Text.assemble(
        (f"{trial.name} ", "dim"), (f"{score:>8}", "green"), f" {trial.seconds:>7.1f} s  ", settings_in_words(trial)
    )
