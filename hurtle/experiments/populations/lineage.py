"""`lineage.jsonl`: who in a population trained with which settings, with what score, and whose weights it went on from.

generation → one line per member, appended and synced → the same again after a crash → the schedule behind the best member.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError
from hurtle.tracking.json_text import to_json
from hurtle.tracking.run_folder import write_whole

LINEAGE_FILE = "lineage.jsonl"


@dataclass(frozen=True)
class Entry:
    """A member at a comparison. Generation 0 is the start, before any training.

    Attributes:
        generation: Number of the comparison.
        member: The member.
        steps: Steps trained before it.
        score: Its score after them; NaN if unknown.
        copied_from: The member whose weights and optimizer it took after the comparison, or None.
        failed: What went wrong before it, or an empty string.
        settings: The searched settings with which it goes on.
    """

    generation: int
    member: int
    steps: int
    score: float
    copied_from: int | None
    failed: str
    settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class Stretch:
    """A part of a schedule: steps that were trained with the same settings.

    Attributes:
        begins: The first step.
        ends: The last one.
        member: Who trained.
        settings: With which searched settings.
    """

    begins: int
    ends: int
    member: int
    settings: dict[str, Any]


class Lineage:
    """The entries of a population so far.

    Args:
        folder: The population's folder.
        size: The number of members.

    Attributes:
        generations: The entries of each comparison, by member.
    """

    def __init__(self, folder: Path, size: int):
        self.file, self.size = folder / LINEAGE_FILE, size
        self.generations: list[list[Entry]] = []

    @classmethod
    def read(cls, folder: Path, size: int) -> Lineage:
        """What was written; the lines of a comparison that are not complete are dropped: it had not been acted upon.

        Raises:
            HurtleError: The file cannot be read, or is damaged elsewhere than at its end.
        """
        found = cls(folder, size)
        try:
            lines = found.file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            raise HurtleError(f"{found.file} could not be read: {error.strerror}.") from None
        entries: list[Entry] = []
        for number, line in enumerate(lines):
            try:
                values = json.loads(line)
                entry = Entry(**{**values, "score": math.nan if values["score"] is None else float(values["score"])})
            except (ValueError, TypeError, KeyError) as error:
                if number == len(lines) - 1:
                    break
                raise HurtleError(f"{found.file} is damaged in line {number + 1}: {error!r}.") from None
            if (entry.generation, entry.member) != divmod(len(entries), size):
                raise HurtleError(f"{found.file} is damaged in line {number + 1}: another member was expected.")
            entries.append(entry)
        whole = len(entries) // size
        found.generations = [entries[k * size : (k + 1) * size] for k in range(whole)]
        if whole * size < len(lines):
            write_whole(found.file, "".join(line + "\n" for line in lines[: whole * size]))
        return found

    def append(self, entries: list[Entry]) -> None:
        """Add a comparison; it counts once this returns.

        Raises:
            HurtleError: It cannot be written.
        """
        try:
            with self.file.open("ab") as file:
                file.write("".join(to_json(entry.to_dict()) for entry in entries).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise HurtleError(f"{self.file} could not be written: {error.strerror}.") from None
        self.generations.append(entries)

    @property
    def newest(self) -> list[Entry]:
        """The last comparison."""
        return self.generations[-1]

    def ancestors(self, member: int) -> list[int]:
        """Who trained, from comparison to comparison, the weights that a member had at the last one."""
        found = []
        for entries in reversed(self.generations[:-1]):
            found.append(member)
            if (source := entries[member].copied_from) is not None:
                member = source
        return found[::-1]

    def schedule(self, member: int) -> list[Stretch]:
        """The settings behind the weights that a member had at the last comparison; equal ones in a row are joined."""
        found: list[Stretch] = []
        for generation, trained in enumerate(self.ancestors(member)):
            before, after = self.generations[generation][trained], self.generations[generation + 1][trained]
            source = before.member if before.copied_from is None else before.copied_from
            begins = self.generations[generation][source].steps
            if found and found[-1].settings == before.settings:
                found[-1] = replace(found[-1], ends=after.steps)
            else:
                found.append(Stretch(begins, after.steps, trained, before.settings))
        return found
