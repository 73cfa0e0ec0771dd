"""`Saver`: a run's checkpoints: what goes into one, when to write one, and how a run continues from one.

parts of a run, progress → checkpoint file → the same parts, continued. Knows nothing of the loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from hurtle.deploy.restore import find_checkpoint, load_weights
from hurtle.errors import CheckpointError, HurtleError
from hurtle.kernels.ranks import ALONE, Ranks
from hurtle.policies.policy import Policy
from hurtle.runners.assembly import Parts
from hurtle.tracking.checkpoints import Checkpoints, load_checkpoint
from hurtle.tracking.run_folder import RunFolder

FRESH = ("generator", "replay")
"""Entries of a learner's state with which a learner that joins a run begins anew."""
PAUSE_SECONDS = 1.0
"""Shortest time between automatic checkpoints: a one-second run should not spend it on ten."""


class Saved(Protocol):
    """What a checkpoint holds of a run: its parts, or one seed's share of those of many."""

    @property
    def policy(self) -> Policy:
        """What acts."""

    @property
    def learner(self) -> Any:
        """Has a `state_dict`, as a `Learner`."""

    @property
    def collector(self) -> Any:
        """Has a `state_dict`, as a `Collector`."""

    @property
    def device(self) -> torch.device:
        """Where the policy is trained."""


class Saver:
    """Writes the checkpoints of one run.

    Args:
        folder: The run's folder.
        parts: What is saved.
        described: Constant entries: settings, spaces, whether env and policy have names.
        progress: Returns the loop's own entry: steps, updates, seconds, episodes. The argument says whether envs are saved.
        keep: How many of the newest checkpoints to keep.
        every: Steps between checkpoints; 0 takes a tenth of `total_steps`, but at most one per second.
        total_steps: Steps of the whole run.
        warn: Called with messages for the user.
        others: Returns the states of the other learners that train with this one.
    """

    def __init__(
        self,
        folder: RunFolder,
        parts: Saved,
        described: dict[str, Any],
        progress: Callable[[bool], dict[str, Any]],
        keep: int,
        every: int,
        total_steps: int,
        warn: Callable[[str], None],
        others: Callable[[], list[dict[str, Any]]] = list,
    ):
        self.checkpoints = Checkpoints(folder.checkpoints, keep)
        self._parts, self._described, self._progress, self._warn = parts, described, progress, warn
        self._others = others
        self._every = every or max(1, total_steps // 10)
        self._pause = 0.0 if every else PAUSE_SECONDS
        self._next_step, self._not_before = 0, 0.0

    def start(self, steps: int) -> None:
        """Start the clock at this step."""
        self._next_step, self._not_before = next_multiple(steps, self._every), time.perf_counter() + self._pause

    def save(self, steps: int) -> Path:
        """Write a checkpoint.

        Raises:
            CheckpointError: It cannot be written.
        """
        return self.checkpoints.save(steps, self._state())

    def steps_left(self, steps: int) -> float:
        """Steps until the next checkpoint; infinite if it waits for its time."""
        return self._next_step - steps if self._next_step > steps else math.inf

    def is_due(self, steps: int) -> bool:
        """Whether it is time for a checkpoint."""
        return steps >= self._next_step and time.perf_counter() >= self._not_before

    def save_if_due(self, steps: int) -> None:
        """Write a checkpoint if one is due."""
        if self.is_due(steps):
            self.save_and_wait(steps)

    def save_and_wait(self, steps: int) -> None:
        """Write a checkpoint, and start the clock for the next one."""
        self._next_step = next_multiple(steps, self._every)
        self.try_save(steps)
        self._not_before = time.perf_counter() + self._pause

    def try_save(self, steps: int, best: bool = False, with_envs: bool = True) -> bool:
        """Write a checkpoint; on a full disk, warn and continue. Returns whether it was written."""
        try:
            self.checkpoints.save(steps, self._state(with_envs), best=best)
        except CheckpointError as error:
            self._warn(f"warning: {error}")
            return False
        return True

    def save_after_error(self, steps: int) -> None:
        """After an env error, save everything but the env states, unless this step was already saved with them."""
        if not any(path.name == f"step-{steps:012}.pt" for path in self.checkpoints.all()):
            self.try_save(steps, with_envs=False)

    def _state(self, with_envs: bool = True) -> dict[str, Any]:
        parts = self._parts
        device = parts.device
        others = self._others() if with_envs else []  # after an error nobody answers
        return {
            **self._described,
            "policy": parts.policy.state_dict(),
            "learner": parts.learner.state_dict(),
            "collector": parts.collector.state_dict(with_envs),
            "torch_rng": torch.get_rng_state(),
            "gpu_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            "progress": self._progress(with_envs),
            **({"ranks": others} if others else {}),
        }

    def name_last_checkpoint(self, error: HurtleError) -> None:
        """Add the last checkpoint to an error."""
        last = self.checkpoints.latest()
        saved = f"Last checkpoint: {last}" if last is not None else "No checkpoint was written yet."
        between = "\n" if "\n" in str(error) else " "
        error.args = (f"{error}{between}{saved}", *error.args[1:])


def restore_parts(parts: Parts, saved: dict[str, Any], source: Path, ranks: Ranks = ALONE) -> None:
    """Continue with the saved policy, learner and collector; of several learners, with the share of this one."""
    learner, collector = saved["learner"], saved["collector"]
    if (own := rank_entry(saved, ranks)) is not None:
        learner, collector = {**learner, **own["learner"]}, own["collector"]
    elif ranks.rank:  # it was not there when this was saved
        fresh = parts.learner.state_dict()
        learner = {**learner, **{name: fresh[name] for name in FRESH if name in fresh}}
    before = int(saved["settings"].get("num_learners", 1))
    if max(before, ranks.size) > 1:
        starts_anew = before != ranks.size or (ranks.rank and own is None)
        collector = {name: part for name, part in collector.items() if name != "envs" or not starts_anew}
        collector["num_envs"] = max(before, ranks.size) * saved["settings"]["num_envs"]  # so that seeds are not used again
    load_weights(parts.policy, saved["policy"], source)
    parts.learner.load_state_dict(learner)
    parts.collector.load_state_dict(collector)


def rank_entry(saved: dict[str, Any] | None, ranks: Ranks) -> dict[str, Any] | None:
    """What a checkpoint holds of a learner beside the first; None if that was not there, or did not answer any more."""
    states = (saved or {}).get("ranks", [])
    return states[ranks.rank - 1] if 0 < ranks.rank <= len(states) else None


def begins_anew(saved: dict[str, Any], ranks: Ranks) -> str:
    """What to tell of learners whose replay buffers a checkpoint does not hold; empty if there are none."""
    count = ranks.size - 1 - len(saved.get("ranks", []))
    if count <= 0 or saved["learner"].get("replay") is None:
        return ""
    who, whom = ("1 learner begins", "it") if count == 1 else (f"{count} learners begin", "them")
    return f"{who} with an empty replay buffer: the checkpoint holds none for {whom}"


def load_policy(policy: Policy, source: str) -> None:
    """Start with the weights of another run or checkpoint."""
    _, file = find_checkpoint(source)
    load_weights(policy, load_checkpoint(file)["policy"], file)


def next_multiple(steps: int, every: int) -> int:
    """The next multiple of `every`, regardless of how often the run was stopped and resumed; 0: never."""
    return (steps // every + 1) * every if every else 0
