"""`Population`: trains members interval by interval; between two intervals it compares them, and lets some copy others.

lineage → tasks of the generation under way → run folders → scores → rules → copies put aside → lineage → copies adopted.
What is on disk says at every moment how to go on.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError
from hurtle.experiments.populations.folders import adopt, member_folder, saved_steps, set_log_aside, stage, summary_of
from hurtle.experiments.populations.lineage import Entry, Lineage
from hurtle.experiments.populations.rules import Result, next_generation
from hurtle.experiments.populations.search_space import Space
from hurtle.experiments.records import RunRecord
from hurtle.experiments.run_processes import RunProcesses, Task
from hurtle.experiments.seeds_display import SeedsDisplay
from hurtle.experiments.seeds_progress import Progress
from hurtle.tracking.formatting import figure

RETURN, EVALUATION = "return", "evaluation"
"""What members are compared by: the mean of their last 100 training episodes, or an evaluation after every interval."""
GIB = 1 << 30


@dataclass(frozen=True)
class Rules:
    """How a population is trained.

    Attributes:
        size: Number of members.
        interval: Steps between comparisons.
        share: The share of members that copy, and that are copied.
        score: RETURN or EVALUATION.
        time_limit: Seconds that a member may take for an interval; None: any.
        memory_limit: GiB that its process may take; None: any.
    """

    size: int
    interval: int
    share: float = 0.25
    score: str = RETURN
    time_limit: float | None = None
    memory_limit: float | None = None


class Population:
    """The population of a folder.

    Args:
        folder: Holds the members' run folders.
        settings: All settings of its runs, flat and as TOML has them.
        changed: Those that this call changes in runs that were begun before.
        rules: How it is trained.
        space: What it searches.
        lineage: What has been decided.
        trust: See `hurtle.train`.

    Attributes:
        failed: What went wrong in the generation under way, by member.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        changed: dict[str, Any],
        rules: Rules,
        space: Space,
        lineage: Lineage,
        trust: bool = False,
    ):
        self.folder, self.settings, self.rules, self.space, self.lineage = folder, settings, rules, space, lineage
        self.failed: dict[int, str] = {}
        self._changed, self._trust, self._is_under_way = changed, trust, False
        adopt(folder, lineage.newest[0].generation)

    @property
    def is_done(self) -> bool:
        """Whether all steps are done, or a member has reached `stop_at_return`."""
        return max(entry.steps for entry in self.lineage.newest) >= self.settings["total_steps"] or self._is_reached()

    @property
    def until(self) -> int:
        """The steps at which the generation under way ends."""
        most, every = max(entry.steps for entry in self.lineage.newest), self.rules.interval
        return min((most // every + 1) * every, self.settings["total_steps"])

    @property
    def generations(self) -> int:
        """How many comparisons there will have been at the end."""
        steps = max(entry.steps for entry in self.lineage.newest)
        to_come = max(0, self.settings["total_steps"] - steps // self.rules.interval * self.rules.interval)
        return self.lineage.newest[0].generation + math.ceil(to_come / self.rules.interval)

    def advance(self, processes: RunProcesses, progress: Progress, display: SeedsDisplay) -> bool:
        """End the generation under way and begin the next; returns False when there is none.

        Raises:
            HurtleError: Every member failed.
        """
        if self._is_under_way:
            self._end(processes, display)
        while not self.is_done:
            self._is_under_way = True
            tasks = self.tasks()
            progress.forget()
            if tasks:
                processes.expects_more = self.until < self.settings["total_steps"]
                for task in tasks:
                    processes.add(task)
                return True
            self._end(processes, display)
        return False

    def tasks(self) -> list[Task]:
        """What is left to do in this generation."""
        tasks = []
        for entry in self.lineage.newest:
            run = member_folder(self.folder, entry.member)
            if not self._has_arrived(run):
                limits = self.rules.time_limit or math.inf, (self.rules.memory_limit or math.inf) * GIB
                tasks.append(Task(entry.member, run, self._words(entry, run), *limits))
        return tasks

    def _words(self, entry: Entry, run: Path) -> dict[str, Any]:
        """The arguments of `run_worker.train_run`."""
        own = {"seed": self.settings["seed"] + entry.member, "runs": str(self.folder), "name": run.name, "progress": "quiet"}
        own |= {"total_steps": self.settings["total_steps"], **entry.settings}
        until = self.until if self.until < self.settings["total_steps"] else None
        if (run / "config.toml").is_file() and saved_steps(run):
            return {"settings": {**self._changed, **own}, "resume": str(run), "trust": self._trust, "until": until}
        shutil.rmtree(run, ignore_errors=True)  # it ended before it had saved anything
        return {"settings": {**self.settings, **own}, "resume": "", "trust": False, "until": until}

    def _has_arrived(self, run: Path) -> bool:
        """Whether a member has nothing left to do in this generation; the last one ends with an evaluation."""
        summary = summary_of(run)
        if summary.get("stopped_by") in ("stop_at_return", "callback"):
            return True
        return saved_steps(run) >= self.until and (self.until < self.settings["total_steps"] or bool(summary))

    def _end(self, processes: RunProcesses, display: SeedsDisplay) -> None:
        """Compare, decide, and copy."""
        before, self._is_under_way = self.lineage.newest, False
        generation = before[0].generation + 1
        self.failed = {}
        for entry in before:
            if (failure := processes.failed.pop(entry.member, "")) or not self._has_arrived(self._run(entry)):
                self.failed[entry.member] = failure or "it was not trained"
                set_log_aside(self.folder, entry.member, generation)
        if len(self.failed) == self.rules.size:
            member, failure = min(self.failed.items(), key=lambda pair: (pair[1] == "it was not trained", pair[0]))
            raise HurtleError(f"Every member failed; see {self.folder}. Member {member}: {failure}")
        results = [self._result(entry) for entry in before]
        is_last = max(result.steps for result in results) >= self.settings["total_steps"] or self._is_reached()
        share, seed = self.rules.share, self.settings["seed"]
        entries = next_generation(before, results, self.space, share, seed, is_last)
        stage(self.folder, entries)
        self.lineage.append(entries)
        adopt(self.folder, generation)
        if self.settings["progress"] != "quiet":
            display.message(in_words(entries, self.generations))

    def _run(self, entry: Entry) -> Path:
        return member_folder(self.folder, entry.member)

    def _is_reached(self) -> bool:
        return any(summary_of(self._run(entry)).get("stopped_by") == "stop_at_return" for entry in self.lineage.newest)

    def _result(self, entry: Entry) -> Result:
        run, failure = self._run(entry), self.failed.get(entry.member, "")
        if failure and not (run / "config.toml").is_file():
            return Result(0, math.nan, failure)
        steps, score = saved_steps(run), score_of(RunRecord.read(run), self.rules.score)
        return Result(steps, math.nan if failure else score, failure)


def score_of(run: RunRecord, score: str) -> float:
    """What a member is compared by; NaN if it is not known yet."""
    return run.evaluation if score == EVALUATION else run.training_return


def in_words(entries: list[Entry], generations: int) -> str:
    """A line about a comparison."""
    known = [entry for entry in entries if math.isfinite(entry.score)]
    best = max(known, key=lambda entry: (entry.score, -entry.member), default=None)
    said = "no episode has ended yet" if best is None else f"best {figure(best.score)} (member {best.member})"
    copies = [f"{entry.member} copies {entry.copied_from}" for entry in entries if entry.copied_from is not None]
    return f"generation {entries[0].generation} of {generations}: {'; '.join([said, *copies])}"
