"""`PopulationRun`: what a population came to: its best member, the schedule behind it, and the message at the end.

run folders, lineage → result → summary.json, schedule.toml, text.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hurtle.experiments.populations.folders import member_folder
from hurtle.experiments.populations.lineage import Lineage, Stretch
from hurtle.experiments.populations.loop import score_of
from hurtle.experiments.records import RunRecord
from hurtle.tracking.formatting import figure
from hurtle.tracking.toml_text import to_toml

SCHEDULE_FILE = "schedule.toml"
README = """\
# {name}

A population of {size} members of Hurtle on {env}: every {interval:,} steps the worst copy the best and change their settings.

| file | contents |
|---|---|
| `population.toml` | every setting, the rules, and what is searched |
| `member-0/` … | the run folder of each member |
| `member-0.log` … | what its process printed, if anything: warnings, errors |
| `lineage.jsonl` | one line per comparison and member: steps, score, whom it copied, with which settings it went on |
| `schedule.toml` | the settings behind the best member's policy, from step to step |
| `summary.json` | the result |
| `population.png` | scores and settings against steps |

```
hurtle runs {path}             # the members
hurtle watch {path}/member-0   # one of them; summary.json names the best
hurtle train --resume {path}   # go on
```
"""
SCHEDULE = """\
# The settings with which the weights of {best} were trained.
# `hurtle train --config` takes one value for each setting, not a schedule. To train with this one, do it piece by piece:
#   run = hurtle.train(env, until=…, learning_rate=…)          # the first [[stretch]]
#   run = hurtle.train(resume=run, until=…, learning_rate=…)   # each of the others
# with anneal_learning_rate=False, and the other settings of {best}/config.toml.
"""


@dataclass(frozen=True)
class PopulationRun:
    """A population.

    Attributes:
        path: The folder that holds the run folders.
        members: What became of each member that has a run folder, in order.
        best: The member with the highest score; None if no score is known.
        score: Its score.
        schedule: The settings behind its weights, from step to step.
        generations: Number of comparisons.
        copies: How often a member copied another.
        seconds: Wall time.
        failed: What went wrong last, for every member that ever failed.
        stopped_by: "Ctrl-C" or "SIGTERM", or an empty string.
    """

    path: Path
    members: tuple[RunRecord, ...]
    best: RunRecord | None
    score: float
    schedule: tuple[Stretch, ...]
    generations: int
    copies: int
    seconds: float
    failed: dict[int, str]
    stopped_by: str

    @classmethod
    def of(cls, folder: Path, lineage: Lineage, score: str, seconds: float, stopped_by: str) -> PopulationRun:
        """The result so far, from the folder."""
        entries = [entry for generation in lineage.generations for entry in generation]
        paths = [member_folder(folder, member) for member in range(lineage.size)]
        runs = {member: RunRecord.read(path) for member, path in enumerate(paths) if (path / "config.toml").is_file()}
        scores = {entry.member: entry.score for entry in lineage.newest if entry.member in runs}
        if len(lineage.generations) == 1:  # stopped before the first comparison
            scores = {member: score_of(run, score) for member, run in runs.items()}
        known = {member: value for member, value in scores.items() if math.isfinite(value)}
        best = max(known, key=lambda member: (known[member], -member), default=None)
        return cls(
            path=folder,
            members=tuple(runs.values()),
            best=None if best is None else runs[best],
            score=math.nan if best is None else known[best],
            schedule=() if best is None else tuple(lineage.schedule(best)),
            generations=len(lineage.generations) - 1,
            copies=sum(entry.copied_from is not None for entry in entries),
            seconds=seconds,
            failed={entry.member: entry.failed for entry in entries if entry.failed},
            stopped_by=stopped_by,
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON: what summary.json holds."""
        return {
            "best": None if self.best is None else self.best.path.name,
            "score": self.score,
            "evaluation": None if self.best is None else self.best.evaluation,
            "generations": self.generations,
            "copies": self.copies,
            "seconds": self.seconds,
            "stopped_by": self.stopped_by,
            "failed": {str(member): text for member, text in self.failed.items()},
            "schedule": [vars(stretch) for stretch in self.schedule],
            "members": [run.to_dict() | {"path": run.path.name} for run in self.members],
        }

    def schedule_text(self) -> str:
        """What schedule.toml holds."""
        assert self.best is not None
        parts = [SCHEDULE.format(best=self.best.path.name)]
        for stretch in self.schedule:
            values = {"from_step": stretch.begins, "until": stretch.ends, "trained_by": f"member-{stretch.member}"}
            parts.append(f"[[stretch]]\n{to_toml({**values, **stretch.settings})}")
        return "\n".join(parts)


def closing_message(found: PopulationRun, size: int, picture: Path | None) -> str:
    """The message at the end: how it ended, what came out, what to do next."""
    how = f"Stopped by {found.stopped_by}," if found.stopped_by else "Done:"
    lines = [f"{how} {found.generations} generations of {size} members after {found.seconds:.1f} s; {found.copies} copies."]
    if found.best is not None:
        evaluated = "" if math.isnan(found.best.evaluation) else f", evaluation {figure(found.best.evaluation)}"
        lines.append(f"best        {found.best.path.name}: {figure(found.score)}{evaluated}")
        if found.schedule:
            last = ", ".join(f"{name} {value}" for name, value in found.schedule[-1].settings.items())
            lines.append(f"settings    {last}; the whole schedule: {found.path / SCHEDULE_FILE}")
    if found.failed:
        lines.append(f"crashed     members {', '.join(map(str, sorted(found.failed)))}; logs: {found.path}/member-….log")
    lines.append(f"folder      {found.path}")
    if picture is not None:
        lines.append(f"picture     {picture}")
    path = shlex.quote(str(found.path))
    if found.stopped_by or found.best is None:
        lines.append(f"next        hurtle train --resume {path}")
    else:
        lines.append(f"next        hurtle watch {shlex.quote(str(found.best.path))}")
    return "\n".join(lines)
