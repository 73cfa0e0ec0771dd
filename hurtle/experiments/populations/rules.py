"""The rules of a population: who copies whom after an interval, and with which settings everybody goes on.

entries, scores → ranking → truncation selection → entries. Pure: the same seed and scores give the same decisions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hurtle.experiments.populations.lineage import Entry
from hurtle.experiments.populations.search_space import Space


@dataclass(frozen=True)
class Result:
    """What an interval of training came to.

    Attributes:
        steps: Steps of the member so far.
        score: Its score; NaN if no episode has ended yet.
        failed: What went wrong, or an empty string.
    """

    steps: int
    score: float
    failed: str = ""


def first_generation(space: Space, size: int, seed: int) -> list[Entry]:
    """The members before any training: settings drawn at random."""
    drawn = []
    for member in range(size):
        rng = stream(seed, 0, member)
        drawn.append({name: part.value(rng.random()) for name, part in space.items()})
    return [Entry(0, member, 0, math.nan, None, "", settings) for member, settings in enumerate(drawn)]


def next_generation(
    before: Sequence[Entry], results: Sequence[Result], space: Space, share: float, seed: int, is_last: bool = False
) -> list[Entry]:
    """Compare the members, and decide how each goes on.

    The lowest `share` of them, and all that failed, copy a random one of the highest `share` and change its settings, if it has
    a higher score. Members whose score is unknown are left alone.

    Args:
        before: The last comparison.
        results: What each has reached since.
        space: The searched settings.
        share: The share of members at either end; at least one.
        seed: The population's.
        is_last: Training ends here: nobody copies.
    """
    generation = before[0].generation + 1
    sources = {} if is_last else choose_sources(results, share, generation, seed)
    found = []
    for entry, result in zip(before, results, strict=True):
        source, settings = sources.get(entry.member), entry.settings
        if source is not None:
            rng = stream(seed, generation, entry.member)
            settings = {name: part.changed(before[source].settings[name], rng) for name, part in space.items()}
        found.append(Entry(generation, entry.member, result.steps, result.score, source, result.failed, settings))
    return found


def choose_sources(results: Sequence[Result], share: float, generation: int, seed: int) -> dict[int, int]:
    """Whom each member copies that copies at all."""
    known = [member for member, result in enumerate(results) if not result.failed and math.isfinite(result.score)]
    ranked = sorted(known, key=lambda member: (results[member].score, -member))  # of equal scores, the first is higher
    failed = [member for member, result in enumerate(results) if result.failed]
    count = max(1, int(share * len(results)))
    unknown = [member for member, result in enumerate(results) if not result.failed]
    top = ranked[-min(count, max(1, len(ranked) // 2)) :] or unknown
    bottom = ranked[: max(0, min(count - len(failed), len(ranked) // 2))]
    found = {}
    for member in [*failed, *bottom]:
        better = [other for other in top if member in failed or results[other].score > results[member].score]
        if better:
            found[member] = stream(seed, generation, member, "source").choice(sorted(better))
    return found


def stream(seed: int, generation: int, member: int, what: str = "settings") -> random.Random:
    """Random numbers for one member at one comparison, whoever else draws some."""
    return random.Random(f"{seed} {generation} {member} {what}")
