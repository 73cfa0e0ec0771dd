"""`SweepLoop`: starts trials, gives up those that learn badly, notes how each ended; then trains the winners with fresh seeds.

search → trials in processes → journal → checks. It can be killed at any moment: what the journal says has ended has ended.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hurtle.buffers.storage import available_memory
from hurtle.errors import HurtleError
from hurtle.experiments.curves_of_runs import RunCurves
from hurtle.experiments.records import RunRecord
from hurtle.experiments.run_processes import GRACE, RunProcesses, Task
from hurtle.experiments.space import Space
from hurtle.experiments.sweeps.finalists import choose_finalists
from hurtle.experiments.sweeps.plan import SweepPlan
from hurtle.experiments.sweeps.pruning import falls_behind
from hurtle.experiments.sweeps.scores import Metric
from hurtle.experiments.sweeps.search import Search
from hurtle.experiments.sweeps.trials import Journal, Trial, frozen
from hurtle.tracking.run_state import hold

KEPT = 10
"""Trials that keep their checkpoints: the best ones."""
LOOK_SECONDS = 1.0
"""Between looks at the curves of trials under way."""
LEAST_SECONDS = 2.0
"""With less time left, no trial is started."""
HOPELESS = 6
"""If all of the first so many trials fail, the sweep is given up."""


class SweepLoop:
    """The trials of one sweep.

    Args:
        folder: Of the sweep; trials get folders in it.
        settings: Those that all trials share, flat.
        plan: How to go about it.
        space: What is searched.
        search: What proposes trials.
        journal: What has been tried.
        processes: What trains.

    Attributes:
        stopped_by: "Ctrl-C" or "SIGTERM", or an empty string.
        messages: For the user, since the last look at them.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        plan: SweepPlan,
        space: Space,
        search: Search,
        journal: Journal,
        processes: RunProcesses,
    ):
        self.folder, self.settings, self.plan, self.space = folder, dict(settings), plan, space
        self.search, self.journal, self.processes = search, journal, processes
        self.metric = Metric(plan.metric, plan.minimize)
        self.stopped_by = ""
        self.messages: list[str] = []
        self._before, self._began = journal.elapsed, time.monotonic()
        self._ends_as: dict[int, str] = {}  # trials that were asked to stop: the state they end in
        self._curves: dict[int, np.ndarray] = {}
        self._look_at = 0.0
        self._finalists: list[int] | None = None
        free = available_memory() if processes.is_local else math.inf  # RunProcesses sees to it that all fit together
        self._memory = min(plan.trial_memory, free)
        self._again = self._interrupted()
        processes.expects_more = True

    @property
    def elapsed(self) -> float:
        """Seconds that the sweep has run, in all."""
        return self._before + time.monotonic() - self._began

    @property
    def is_checking(self) -> bool:
        """Whether the search is over."""
        return self._finalists is not None

    def stop(self, cause: str) -> None:
        """End at the next step; signal handlers may call it. A resumed sweep begins anew what is under way now."""
        self.stopped_by = self.stopped_by or cause

    def step(self) -> bool:
        """Notice what has ended and start what may; returns whether anything is left to do.

        Raises:
            HurtleError: Every trial fails, or none has the metric.
        """
        self.processes.poll()
        for task in self.processes.take_ended():
            self._note(task)
        if self.stopped_by:
            return False  # those under way begin anew, and are not waited for
        self._give_up()
        if not self._again and not self.is_checking and self._search_is_over():
            if self.processes.running:
                if self.elapsed >= self.plan.search_seconds:
                    self._cut()
                return True
            self._finalists = choose_finalists(self.space, self._searched()) if self.plan.check_seeds else []
        while self.processes.free > 0 and (trial := self._next()) is not None:
            self._start(trial)
        if self.is_checking and self.elapsed >= self.plan.budget:
            self._cut()
        return bool(self.processes.running or self.processes.waiting or self._again or not self.is_checking)

    def _searched(self) -> list[Trial]:
        return self.journal.select(lambda trial: not trial.is_check)

    def _search_is_over(self) -> bool:
        most = self.plan.trials
        is_late = self.elapsed >= self.plan.search_seconds - min(LEAST_SECONDS, self.plan.search_seconds / 10)
        return is_late or (most > 0 and len(self._searched()) >= most)

    def _next(self) -> Trial | None:
        """The next trial or check to start, or None."""
        if self._again:
            return self._again.pop(0)
        number = max(self.journal.trials, default=-1) + 1
        if self._finalists is None:
            if self._search_is_over():
                return None
            if number == 0:
                values = {name: frozen(self.settings[name]) for name in self.space.names}
                return Trial(0, values, int(self.settings["seed"]), "baseline")
            values, origin = self.search.suggest(number, self._searched())
            return Trial(number, values, int(self.settings["seed"]) + number, origin)
        if self.elapsed >= self.plan.budget - LEAST_SECONDS:
            return None
        begun = {(t.checks, t.seed) for t in self.journal.select(lambda trial: trial.is_check and trial.state != "cut")}
        for k in range(self.plan.check_seeds):
            seed = int(self.settings["seed"]) + 1_000_000 + k
            for finalist in self._finalists:
                if (finalist, seed) not in begun:
                    return Trial(number, self.journal.trials[finalist].values, seed, "check", checks=finalist)
        return None

    def _start(self, trial: Trial) -> None:
        self.journal.begin(trial, self.elapsed)
        own = {
            "seed": trial.seed,
            "runs": str(self.folder),
            "name": trial.name,
            "progress": "quiet",
            "trackers": (),
            "curve": False,
        }
        values = {**self.settings, **trial.values, **own, "keep_checkpoints": 1}
        left = self.plan.budget - self.elapsed
        words = {"settings": values, "resume": "", "trust": False}
        seconds = min(self.plan.seconds_of_trial, left + 30.0)  # it is asked to stop when the time is up
        self.processes.add(Task(trial.number, self.folder / trial.name, words, seconds, self._memory, GRACE))
        self.processes.poll()

    def _note(self, task: Task) -> None:
        """A process is done with a trial."""
        trial = self.journal.trials[task.number]
        failure = self.processes.failed.pop(task.number, "")
        if "No space left on device" in failure:  # says nothing of the settings
            raise HurtleError(
                f"The disk is full, and {trial.name} could not go on. Free some space: it begins anew when you resume."
            )
        if task.number in self.processes.refused and trial.origin == "baseline":
            self._end(trial, replace(trial, state="failed", error=failure))
            raise HurtleError(f"The baseline, which a run would be without a sweep, does not train: {failure}")
        self._end(trial, self._outcome(trial, task.folder, failure))

    def _end(self, trial: Trial, ended: Trial) -> None:
        self.journal.end(ended, self.elapsed)
        if not trial.is_check:
            self.search.note(ended)
        if ended.state == "failed":
            self.messages.append(f"{trial.name} failed: {ended.error}")
            searched = self._searched()
            if len(searched) >= HOPELESS and all(other.state in ("failed", "running") for other in searched):
                raise self.nothing_trained()
        self._drop_checkpoints()

    def _outcome(self, trial: Trial, folder: Path, failure: str) -> Trial:
        """The trial as it ended."""
        ends_as = self._ends_as.pop(trial.number, "")
        if _is_whole(folder):  # it was faster than whoever wanted to end it
            ends_as = failure = ""
        elif not failure and not ends_as:
            failure = "It ended before it was done, without an error."
        elif failure.startswith("it ran longer"):
            failure += " (--trial-seconds; by default a quarter of --budget)"
        try:
            record = RunRecord.read(folder)
        except HurtleError as error:
            return replace(trial, state=ends_as or "failed", error=failure or f"It ended without a result: {error}")
        seconds = record.seconds if math.isfinite(record.seconds) else math.nan
        known = replace(trial, seconds=seconds, steps=record.steps)
        if ends_as:
            return replace(known, state=ends_as, score=self.metric.of_training(record))
        if failure:
            return replace(known, state="failed", error=failure)
        try:
            score = self.metric.of(record)
        except HurtleError as error:
            return replace(known, state="failed", error=str(error))
        if not math.isfinite(score):
            what = "no episode has ended, or its return is not finite" if self.metric.is_return else "it is not finite"
            return replace(known, state="failed", error=f"It has no {self.plan.metric}: {what}.")
        return replace(known, state="finished", score=score)

    def nothing_trained(self) -> HurtleError:
        """The error of a sweep without a single trial that was trained to its end."""
        first = next((trial for trial in self._searched() if trial.state == "failed"), None)
        if first is None:
            return HurtleError(f"No trial of {self.folder} was trained to its end: raise the budget of {self.plan.budget:g} s.")
        return HurtleError(f"No trial was trained to its end; see {self.folder}. {first.name}: {first.error}")

    def _interrupted(self) -> list[Trial]:
        """Trials that had begun when the sweep was killed: those that were done are noted, the others are to begin again."""
        again = []
        for trial in self.journal.select(lambda trial: trial.state == "running"):
            folder = self.folder / trial.name
            if folder.exists():
                with hold(folder, patience=60.0):  # a process that outlived the sweep saves and ends
                    pass
            if _is_whole(folder):
                self._end(trial, self._outcome(trial, folder, ""))
            else:
                if folder.exists():
                    shutil.rmtree(folder)
                folder.with_name(f"{folder.name}.log").unlink(missing_ok=True)
                again.append(trial)
        return again

    def _give_up(self) -> None:
        """Stop trials that learn worse than half of the others."""
        began = time.monotonic()
        if not self.plan.prune or not self.metric.is_return or began < self._look_at:
            return
        whole = [trial for trial in self._searched() if trial.has_score]
        for trial in whole:
            if trial.number not in self._curves:
                self._curves[trial.number] = self._curve(trial)
        others = [self._curves[trial.number] for trial in whole]
        for number, task in self.processes.running.items():
            trial = self.journal.trials[number]
            if trial.is_check or number in self._ends_as or trial.origin == "baseline":
                continue
            total = int(task.words["settings"]["total_steps"])
            if falls_behind(self._curve(trial), others, total):
                self._ends_as[number] = "pruned"
                self.processes.stop(number)
        self._look_at = began + max(LOOK_SECONDS, 20 * (time.monotonic() - began))  # long files take a while to read

    def _curve(self, trial: Trial) -> np.ndarray:
        """Steps and training returns so far, [points, 2]."""
        with suppress(HurtleError):
            return RunCurves(self.folder / trial.name).curve("return", "steps")
        return np.empty((0, 2))

    def _cut(self) -> None:
        """The time is up: stop what is under way."""
        for number in self.processes.running:
            if number not in self._ends_as:
                self._ends_as[number] = "cut"
                self.processes.stop(number)

    def _drop_checkpoints(self) -> None:
        """Keep the checkpoints of the best trials, and of checks."""
        scored = sorted((trial for trial in self._searched() if trial.state != "running"), key=_merit)
        for trial in scored[:-KEPT]:
            shutil.rmtree(self.folder / trial.name / "checkpoints", ignore_errors=True)


def _merit(trial: Trial) -> float:
    return trial.score if trial.has_score else -math.inf


def _is_whole(folder: Path) -> bool:
    """Whether a run was trained to its end, and scored."""
    try:
        return RunRecord.read(folder).state == "finished"
    except HurtleError:
        return False
