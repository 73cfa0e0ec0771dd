"""`SweepPlan`: the choices of a sweep, checked, and their file sweep.toml; amounts of time and memory in words."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError, did_you_mean
from hurtle.experiments.sweeps.search import METHODS
from hurtle.tracking.run_folder import write_whole
from hurtle.tracking.toml_text import to_toml
from hurtle.trust import signed

SWEEP_FILE, SPACE_FILE = "sweep.toml", "space.toml"
SEARCH_SHARE = 0.75
"""Of the time; the rest is for checking the winners."""


@dataclass(frozen=True)
class SweepPlan:
    """How a sweep goes about it.

    Attributes:
        budget: Seconds in all, checks included; infinite: only `trials` ends the search.
        trials: The most trials of the search; 0: as many as the budget allows.
        method: One of `search.METHODS`.
        metric: What is maximized: "return", of the final evaluation, or any name in metrics.jsonl.
        minimize: Minimize it instead.
        prune: Give trials up that learn worse than half of the others.
        parallel: Trials at a time; 0: as many as there are cores.
        trial_seconds: The most that a trial may take; infinite: a quarter of the budget.
        trial_memory: The most bytes that a trial may take; infinite: what is free when the sweep begins.
        check_seeds: Fresh seeds with which the best and the baseline are trained again; 0: no check.
        ray: The address of a Ray cluster whose nodes run trials; "local" starts one here; "": none.
    """

    budget: float = 600.0
    trials: int = 0
    method: str = "cost_aware"
    metric: str = "return"
    minimize: bool = False
    prune: bool = True
    parallel: int = 0
    trial_seconds: float = math.inf
    trial_memory: float = math.inf
    check_seeds: int = 5
    ray: str = ""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            HurtleError: One is out of range.
        """
        if self.method not in METHODS:
            raise HurtleError(f"No method {self.method!r} of search. {did_you_mean(self.method, METHODS)}")
        for name, least in (("trials", 0), ("parallel", 0), ("check_seeds", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise HurtleError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        for name in ("budget", "trial_seconds", "trial_memory"):
            if not getattr(self, name) > 0:
                raise HurtleError(f"{name} must be more than 0, got {getattr(self, name)!r}.")
        if math.isfinite(self.trial_memory) and not Path("/proc/self/statm").exists():
            raise HurtleError("trial_memory needs /proc, which this system does not have: leave it out.")
        if math.isinf(self.budget) and not self.trials:
            raise HurtleError("A sweep needs an end: a budget, such as 10m, or a number of trials.")
        if not self.metric:
            raise HurtleError("metric needs a name: return, or one in metrics.jsonl.")

    @property
    def search_seconds(self) -> float:
        """When the search ends, and checks begin."""
        return self.budget * (SEARCH_SHARE if self.check_seeds else 1.0)

    @property
    def seconds_of_trial(self) -> float:
        """The limit of one trial."""
        return self.trial_seconds if math.isfinite(self.trial_seconds) else self.budget / 4

    def write(self, folder: Path, settings: dict[str, Any]) -> None:
        """Write sweep.toml, with the settings that all trials share."""
        write_whole(folder / SWEEP_FILE, to_toml({**signed(settings), "sweep": asdict(self)}))

    @classmethod
    def read(cls, folder: Path) -> tuple[SweepPlan, dict[str, Any]]:
        """The plan and the settings, with their signature.

        Raises:
            HurtleError: There is no such file, or it is damaged.
        """
        file = folder / SWEEP_FILE
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
            return cls(**values.pop("sweep")), values
        except OSError as error:
            raise HurtleError(
                f"{folder} is not the folder of a sweep: {SWEEP_FILE} cannot be read ({error.strerror})."
            ) from None
        except (ValueError, TypeError, KeyError) as error:
            raise HurtleError(f"{file} is damaged: {error!r}.") from None


def seconds(amount: Any, name: str = "budget") -> float:
    """Seconds from a number, or from words such as 90s, 10m, 1.5h.

    Example:
        >>> seconds("10m"), seconds("1.5h"), seconds(90)
        (600.0, 5400.0, 90.0)
    """
    units = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
    return _amount(amount, units, f"{name} must be an amount of time such as 90s, 10m or 2h")


def size(amount: Any, name: str = "trial_memory") -> float:
    """Bytes from a number, or from words such as 500M, 2G.

    Example:
        >>> size("2G"), size(1e9)
        (2147483648.0, 1000000000.0)
    """
    units = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
    return _amount(str(amount).lower().removesuffix("ib").removesuffix("b"), units, f"{name} must be a size such as 500M or 2G")


def _amount(amount: Any, units: dict[str, int], expected: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?|inf)\s*([a-z]*)\s*", str(amount).lower())
    if found is None or found[2] not in units:
        raise HurtleError(f"{expected}, got {amount!r}.")
    return float(found[1]) * units[found[2]]
