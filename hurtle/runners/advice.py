"""`Adviser`: says when the metrics of a run look wrong, and what to try; each complaint once, three of them at most.

metrics of updates → means over windows → a sentence or nothing. Rules apply only where a learner reports what they read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

WINDOW = 20
"""Updates that are averaged before a rule is applied: single ones are noise."""
MOST = 3
"""Sentences per run."""
STILL, FAR = 3e-4, 0.05
"""KL per update below which a policy hardly moves, and above which it moves too far."""
DECIDED = 0.05
"""Share of the first entropy below which a policy with choices has decided."""
WIDER = 0.7
"""Entropy per action that a Gaussian has gained when its standard deviation has doubled."""
POOR = 0.05
"""Explained variance below which values are no better than a constant."""
NAMES = ("approx_kl", "clip_range", "entropy", "explained_variance")


class Seen(NamedTuple):
    """What a rule reads."""

    progress: float
    """Of the run, from 0 to 1."""
    mean: Mapping[str, float]
    """Of the metrics in this window."""
    first: Mapping[str, float]
    """Of those in the first one."""
    has_choices: bool
    actions: int


def _is_still(seen: Seen) -> str:
    """Later in a run an annealed learning rate lowers the KL."""
    kl = seen.mean.get("approx_kl", math.nan)
    if "clip_range" not in seen.mean or seen.progress > 0.5 or not kl < STILL:
        return ""
    what = "try more num_epochs, a smaller minibatch_size or a higher learning_rate"
    return f"the policy hardly moves (KL {kl:.1g} per update): {what}"


def _goes_far(seen: Seen) -> str:
    kl = seen.mean.get("approx_kl", math.nan)
    if "clip_range" not in seen.mean or not kl > FAR:
        return ""
    return f"the policy moves far in one update (KL {kl:.2g}): try a lower learning_rate, fewer num_epochs or target_kl=0.02"


def _has_decided(seen: Seen) -> str:
    now, first = (found.get("entropy", math.nan) for found in (seen.mean, seen.first))
    if not seen.has_choices or seen.progress > 0.3 or not now < DECIDED * first:
        return ""
    return f"the policy has almost stopped exploring (entropy {now:.2g}, {first:.2g} at first): try a higher entropy_coef"


def _widens(seen: Seen) -> str:
    now, first = (found.get("entropy", math.nan) for found in (seen.mean, seen.first))
    if seen.has_choices or not now > first + WIDER * seen.actions:
        return ""
    what = "try a lower entropy_coef, or reward_mode=normalize"
    return f"actions become more random (entropy {now:.2g}, {first:.2g} at first): {what}"


def _explains_little(seen: Seen) -> str:
    explained = seen.mean.get("explained_variance", math.nan)
    if seen.progress < 0.2 or not explained < POOR:
        return ""
    return (
        f"the values say little about the returns (explained variance {explained:.2g}): "
        "try reward_mode=normalize, clip_values=False or more num_epochs"
    )


RULES: tuple[Callable[[Seen], str], ...] = (_is_still, _goes_far, _has_decided, _widens, _explains_little)


@dataclass
class Adviser:
    """Watches the metrics of one run.

    Attributes:
        total_steps: Of the run.
        has_choices: Whether actions are discrete.
        actions: Numbers or choices per action.

    Example:
        >>> adviser = Adviser(total_steps=100, has_choices=True, actions=1)
        >>> said = [adviser.look({"steps": step, "approx_kl": 1e-6, "clip_range": 0.2}) for step in range(30)]
        >>> [text[:24] for text in said if text]
        ['the policy hardly moves ']
    """

    total_steps: int
    has_choices: bool
    actions: int
    _sums: dict[str, float] = field(default_factory=dict)
    _first: dict[str, float] = field(default_factory=dict)
    _count: int = 0
    _said: set[Callable[[Seen], str]] = field(default_factory=set)

    def look(self, metrics: Mapping[str, float]) -> str:
        """Take in the metrics of an update; what to say now, mostly nothing."""
        if len(self._said) >= MOST:
            return ""
        for name in NAMES:
            if name in metrics:
                self._sums[name] = self._sums.get(name, 0.0) + metrics[name]
        self._count += 1
        if self._count < WINDOW:
            return ""
        mean = {name: total / self._count for name, total in self._sums.items()}
        self._sums, self._count = {}, 0
        self._first = self._first or mean
        seen = Seen(metrics["steps"] / self.total_steps, mean, self._first, self.has_choices, self.actions)
        for rule in RULES:
            if rule not in self._said and (text := rule(seen)):
                self._said.add(rule)
                return text
        return ""
