"""One frame of the live dashboard: a `Report` of the state of training, drawn to fit the terminal.

Report → rich Panel. Pure drawing; knows nothing of clocks, threads or algorithms, only the names of common metrics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from hurtle.tracking.chart import History, block_chart
from hurtle.tracking.formatting import count, duration, figure, memory, percent, quantity

NAN = float("nan")
LABELS = {
    "policy_loss": "policy loss",
    "entropy": "entropy",
    "learning_rate": "learning rate",
    "value_loss": "value loss",
    "approx_kl": "KL divergence",
    "clip_range": "clip range",
    "grad_norm": "gradient norm",
    "clip_fraction": "clip fraction",
    "explained_variance": "explained var.",
}
"""Common learner metrics, in the order of the grid; other metrics are listed below them by name."""
REPLAY_LABELS = {
    "policy_loss": "policy loss",
    "q_value": "Q value",
    "replay": "replay filled",
    "value_loss": "value loss",
    "td_error": "TD error",
    "replay_age": "replay age",
    "entropy": "entropy",
    "temperature": "temperature",
    "epsilon": "random actions",
}
"""The same for learners with a replay buffer."""

SHOWN_ELSEWHERE = {
    *("steps", "seconds", "steps_per_second", "episodes", "updates"),
    *("episode_return", "episode_return_best", "episode_length", "episode_length_best"),
    *("eval_return", "eval_return_low", "eval_return_high", "eval_length"),
}
STAGES = {"env": ("green", "█"), "inference": ("blue", "▓"), "learn": ("magenta", "▒"), "copy": ("yellow", "░")}
OTHER_STAGE = ("bright_black", "·")
MAX_WIDTH = 120
MIN_WIDTH = 40


@dataclass
class Report:
    """The state of training from which a frame is drawn."""

    title: str
    total_steps: int
    about: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    """The latest value of every metric; NaN if not known yet."""
    shares: dict[str, float] = field(default_factory=dict)
    """Fraction of the time spent in each stage; adds up to 1."""
    returns: History = field(default_factory=History)
    usage: dict[str, float] = field(default_factory=dict)
    elapsed: float = NAN
    """Seconds of training."""
    status: str = ""
    """Text shown before there is a curve."""

    def value(self, name: str) -> float:
        """The latest value of a metric; NaN if unknown."""
        return self.metrics.get(name, NAN)

    @property
    def progress(self) -> float:
        """The fraction of the steps that are done."""
        share = self.value("steps") / self.total_steps if self.total_steps > 0 else 0.0
        return min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0

    @property
    def percent_done(self) -> int:
        """The progress in percent, rounded down."""
        return math.floor(100 * self.progress)

    @property
    def seconds_left(self) -> float:
        """The remaining time at the current speed; NaN if unknown."""
        speed = self.value("steps_per_second")
        return max(self.total_steps - self.value("steps"), 0.0) / speed if speed > 0 else NAN


def labels_of(report: Report) -> dict[str, str]:
    """The learner metrics to show, and their labels: those that are known, or all that are usual."""
    labels = REPLAY_LABELS if "replay" in report.metrics else LABELS
    return {name: label for name, label in labels.items() if name in report.metrics} or LABELS


def draw(report: Report, width: int, height: int, colored: bool = True) -> Panel:
    """The dashboard in at most `width` columns and, from 15 lines on, at most `height` lines."""
    inner = max(min(width, MAX_WIDTH), MIN_WIDTH) - 4  # the border and its padding
    gap = [Text()] if height >= 20 else []
    top = [*_progress(report, inner), *gap, *_episodes(report, inner)]
    bottom = [*gap, *_grid(_learner(report), inner)]
    if report.shares:
        bottom += [*gap, *_time(report.shares, inner, colored)]
    bottom += [*gap, _usage(report)]
    spare = height - len(top) - len(bottom) - 2
    more = _more(report, inner, lines=spare - 4) if spare > 4 else []  # the curve keeps 3 lines, a gap 1
    rows = min(max(spare - len(more) - bool(more), 1), 8)
    lines = [*top, *_curve(report, inner, rows), *bottom, *([Text(), *more] if more else [])]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Panel(
        Group(*lines),
        title=Text(report.title, "bold default"),
        title_align="left",
        subtitle=Text(report.about, "default dim") if report.about else None,
        subtitle_align="right",
        border_style="bright_black",
        width=inner + 4,
    )


def _progress(report: Report, width: int) -> list[Text]:
    cells = width - 7
    filled = round(report.progress * cells)
    style = "green" if report.progress >= 1 else "cyan"
    bar = Text.assemble(
        ("━" * filled, style), ("─" * (cells - filled), "bright_black"), (f"{report.percent_done:>5} %", "bold")
    )
    number = count if report.total_steps < 1e7 else quantity
    facts = [
        ("steps", f"{number(report.metrics.get('steps', 0.0))} of {number(report.total_steps)}", ""),
        ("", quantity(report.value("steps_per_second")), "steps/s"),
        ("elapsed", duration(report.elapsed), ""),
        ("ETA", duration(report.seconds_left), ""),
    ]
    return [bar, _placed(facts, width)]


def _episodes(report: Report, width: int) -> list[Text]:
    episodes = report.value("episodes")
    facts = [
        ("return", figure(report.value("episode_return")), ""),
        ("best", figure(report.value("episode_return_best")), ""),
        ("length", figure(report.value("episode_length")), ""),
        ("longest", figure(report.value("episode_length_best")), ""),
        ("episodes", quantity(episodes) if episodes >= 1e6 else count(episodes), ""),
    ]
    lines = [_placed(facts, width, "bold cyan", starts=(0.0, 0.18, 0.36, 0.58, 0.8))]
    if not math.isnan(report.value("eval_return")):
        low, high = figure(report.value("eval_return_low")), figure(report.value("eval_return_high"))
        facts = [
            ("evaluation", figure(report.value("eval_return")), ""),
            ("95 %", f"{low}…{high}", ""),
            ("length", figure(report.value("eval_length")), ""),
        ]
        lines.append(_placed(facts, width))
    return lines


def _placed(
    facts: list[tuple[str, str, str]],
    width: int,
    first: str = "bold",
    starts: tuple[float, ...] = (0.0, 0.36, 0.58, 0.8),
) -> Text:
    """(label, value, unit) at the same columns in every line; `starts` are fractions of the width."""
    line = Text()
    for (before, value, after), start in zip(facts, starts, strict=False):
        if line:
            line.append(" " * max(round(start * width) - len(line), 2))
        line.append(f"{before} " if before else "", "dim")
        line.append(value, "bold" if start else first)
        line.append(f" {after}" if after else "", "dim")
    return line


def _curve(report: Report, width: int, rows: int) -> list[Text]:
    values = report.returns.columns(width - 11)
    if not values:
        is_learning = "steps" in report.metrics
        text = "no episode has ended yet" if is_learning or not report.status else report.status
        waiting = Text(text.center(width).rstrip(), "dim")
        return [waiting if row == rows // 2 else Text() for row in range(rows)]
    labels = [""] * rows
    labels[-1], labels[0] = figure(min(values)), figure(max(values))
    drawn = zip(labels, block_chart(values, rows), strict=True)
    return [Text.assemble((f"{label:>9} ", "dim"), ("│", "bright_black"), (row, "cyan")) for label, row in drawn]


def _learner(report: Report) -> list[tuple[str, str]]:
    return [(label, figure(report.value(name))) for name, label in labels_of(report).items()]


def _more(report: Report, width: int, lines: int) -> list[Text]:
    """The metrics without a label above, as far as they fit."""
    shown = labels_of(report).keys() | SHOWN_ELSEWHERE
    unknown = [
        (name.replace("_", " "), figure(value))
        for name, value in report.metrics.items()
        if name not in shown and not name.startswith(("time/", "usage/", "threads/"))
    ]
    fitting = lines * _columns(width)
    if len(unknown) > fitting:
        unknown = [*unknown[: fitting - 1], (f"and {len(unknown) - fitting + 1} more", "")]
    return _grid(unknown, width)


def _columns(width: int) -> int:
    return min(max(width // 24, 1), 3)


def _grid(cells: list[tuple[str, str]], width: int) -> list[Text]:
    """Labels and right-aligned values in columns."""
    columns, gap = _columns(width), 4
    size = (width - gap * (columns - 1)) // columns
    lines = []
    for start in range(0, len(cells), columns):
        line = Text()
        for index, (label, value) in enumerate(cells[start : start + columns]):
            room = size - len(value) - 1
            label = label if len(label) <= room else f"{label[: max(room - 1, 0)]}…"
            line.append(" " * gap if index else "").append(f"{label:<{room}} ", "dim").append(value)
        lines.append(line)
    return lines


def _time(shares: dict[str, float], width: int, colored: bool) -> list[Text]:
    """A bar with the time of each stage, and its legend."""
    bar, legend, drawn, seen = Text(), Text(), 0, 0.0
    for stage, share in shares.items():
        style, glyph = STAGES.get(stage, OTHER_STAGE)
        seen += share
        until = round(min(seen, 1.0) * width)  # rounding the running sum fills the line exactly
        bar.append(("━" if colored else glyph) * (until - drawn), style)
        drawn = max(until, drawn)
        legend.append("   " if legend else "").append(f"{'■' if colored else glyph} ", style)
        legend.append(f"{stage} ", "dim").append(percent(share))
    return [bar, legend]


def _usage(report: Report) -> Text:
    usage = report.usage
    parts = [("cpu", percent(usage.get("cpu_percent", NAN) / 100)), ("memory", memory(usage.get("memory", NAN)))]
    if "gpu_memory" in usage:
        busy = f"{percent(usage['gpu_percent'] / 100)}, " if "gpu_percent" in usage else ""
        parts.append(("gpu", f"{busy}{memory(usage['gpu_memory'])} of {memory(usage['gpu_memory_total'])}"))
    threads = {name[8:]: value for name, value in report.metrics.items() if name.startswith("threads/")}
    if threads:
        parts.append(("threads", ", ".join(f"{count(value)} {stage}" for stage, value in threads.items())))
    parts.append(("updates", count(report.value("updates"))))
    line = Text()
    for label, value in parts:
        line.append("   " if line else "").append(f"{label} ", "dim").append(value)
    return line
