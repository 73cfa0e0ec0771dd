"""`Reporter`: what a run shows and records: metrics for trackers and dashboard, the summary, the closing message.

numbers of an update → one dict of metrics → trackers, display. Does not know how they are computed.
"""

from __future__ import annotations

import math
import shlex
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hurtle.contracts import Metrics
from hurtle.errors import HurtleError
from hurtle.runners.advice import Adviser
from hurtle.runners.evaluate import Evaluation
from hurtle.runners.run import Run
from hurtle.tracking.curves import plot_run
from hurtle.tracking.dashboard import Display
from hurtle.tracking.episode_window import EpisodeWindow
from hurtle.tracking.run_folder import RunFolder
from hurtle.tracking.trackers import Tracker

RATE_SECONDS = 5.0
"""Window of steps_per_second, in seconds."""


class Reporter:
    """Reports one run.

    Args:
        folder: The run's folder.
        display: The dashboard, or lines of text.
        trackers: TensorBoard and others.
        quiet: Print nothing at the end.
        curve: Draw curve.png.
        adviser: Looks at the metrics, and says when they look wrong; None: nobody does.

    Attributes:
        metrics: The latest value of every metric.
    """

    def __init__(
        self,
        folder: RunFolder,
        display: Display,
        trackers: list[Tracker],
        quiet: bool,
        curve: bool,
        adviser: Adviser | None = None,
    ):
        self.folder, self.display = folder, display
        self.metrics: dict[str, float] = {}
        self._trackers, self._quiet, self._draws_curve = trackers, quiet, curve
        self._adviser = None if quiet else adviser
        self._recent: deque[tuple[float, int]] = deque()
        self._summary: dict[str, Any] = {}
        self._threads: Mapping[str, tuple[int, int] | None] = {}

    def start(self, steps: int, seconds: float) -> None:
        """Begin to measure steps_per_second, at this time of the run."""
        self._recent = deque([(seconds, steps)])

    def update(
        self,
        progress: Mapping[str, float],
        episodes: EpisodeWindow,
        learned: Metrics,
        counts: Metrics,
        threads: Mapping[str, tuple[int, int] | None],
        shares: Mapping[str, float],
    ) -> None:
        """Report an update.

        Args:
            progress: "steps", "updates" and "seconds" so far.
            episodes: The most recent ones.
            learned: The learner's metrics; empty until a GPU has reported some.
            counts: The collector's metrics.
            threads: Threads in use by each stage, and the most it may use.
            shares: Each stage's share of the time.
        """
        self._threads = threads
        self.metrics = {
            **progress,
            "steps_per_second": self._rate(progress["seconds"], int(progress["steps"]), is_known=bool(learned)),
            "episodes": episodes.count,
            "episode_return": episodes.mean_return,
            "episode_return_best": episodes.best_return,
            "episode_length": episodes.mean_length,
            "episode_length_best": episodes.best_length,
            **learned,
            **{f"episode/{name}": value for name, value in episodes.mean_metrics.items()},
            **counts,
            **{f"threads/{stage}": found[0] for stage, found in threads.items() if found is not None},
            **{f"time/{stage}": share for stage, share in shares.items()},
        }
        self._log(self.metrics)
        if self._adviser is not None and learned and (text := self._adviser.look(self.metrics)):
            self.display.message(f"advice: {text}.")

    def _rate(self, now: float, steps: int, is_known: bool) -> float:
        """Recent steps per second; NaN until a GPU has reported, since the clock would only measure launches."""
        self._recent.append((now, steps))
        while len(self._recent) > 2 and now - self._recent[0][0] > RATE_SECONDS:
            self._recent.popleft()
        since, before = self._recent[0]
        return (steps - before) / (now - since) if is_known and now > since else math.nan

    def add(self, metrics: Metrics) -> None:
        """Report metrics that arrived after their update."""
        if metrics:
            self.metrics |= metrics
            self._log(self.metrics)

    def evaluation(self, steps: int, evaluation: Evaluation) -> None:
        """Report an evaluation."""
        self._log(
            {
                "steps": steps,
                "eval_return": evaluation.mean,
                "eval_return_low": evaluation.low,
                "eval_return_high": evaluation.high,
                "eval_length": float(evaluation.lengths.mean()),
            }
        )

    def _log(self, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(metrics, int(metrics["steps"]))
        self.display.update({**self.metrics, **metrics})

    def finish(self, run: Run, steps_per_second: float, episodes: int, advice: str, unplayable: str) -> None:
        """Write the summary, draw the curve, and print where everything is.

        Args:
            run: What the run returns.
            steps_per_second: Over the whole run.
            episodes: Number of episodes.
            advice: What the collector says about its speed, or an empty string.
            unplayable: The reason the command line cannot play the policy, or an empty string.
        """
        self._summary = {
            "steps": run.steps,
            "seconds": run.seconds,
            "steps_per_second": steps_per_second,
            "mean_return": run.mean_return,
            "episodes": episodes,
            "stopped_by": run.stopped_by,
            "evaluation": None if run.evaluation is None else run.evaluation.summary(),
        }
        self.folder.write_summary(self._summary)
        self.display.stop()
        curve = self._plot() if self._draws_curve and run.stopped_by != "until" else None
        if not self._quiet:
            self.display.message(closing_message(run, curve, threads_in_words(self._threads), advice, unplayable))

    def _plot(self) -> Path | None:
        try:
            return plot_run(self.folder)
        except HurtleError as error:  # no plot without matplotlib; the run is fine
            self.display.message(str(error))
            return None

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self._trackers:
            tracker.finish(self._summary)


def threads_in_words(threads: Mapping[str, tuple[int, int] | None]) -> str:
    """How many threads collected and learned, and why; an empty string if there is nothing to choose."""
    found = {stage: each for stage, each in threads.items() if each is not None and each[1] > 1}
    if not found:
        return ""
    return f"{', '.join(f'{stage} {used} of {most}' for stage, (used, most) in found.items())} (the fastest, as measured)"


def closing_message(run: Run, curve: Path | None, threads: str, advice: str, unplayable: str) -> str:
    """The message at the end of a run: how it ended, where it is, what to do next."""
    ended = {"total_steps": "Done", "stop_at_return": "Reached the return asked for,"}
    how = ended.get(run.stopped_by, f"Stopped by {run.stopped_by},")
    lines = [f"{how} after {run.steps:,} steps in {run.seconds:.1f} s."]
    if run.evaluation is not None:
        lines.append(f"evaluation  {run.evaluation}")
    if threads:
        lines.append(f"threads     {threads}")
    if advice:
        lines.append(f"actors      {advice}")
    lines.append(f"run folder  {run.path}")
    if curve is not None:
        lines.append(f"curve       {curve}")
    if unplayable:
        lines.append(f"next        hurtle watch and eval cannot play it: {unplayable}. In Python, hurtle.load(run) can")
        return "\n".join(lines)
    path = shlex.quote(str(run.path))
    verbs = ["train --resume"] if run.evaluation is None else ["watch", "eval"]
    lines += [f"{'' if k else 'next':<12}hurtle {verb} {path}" for k, verb in enumerate(verbs)]
    return "\n".join(lines)
