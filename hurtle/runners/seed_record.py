"""`SeedRecord`: the run of one of several seeds that train together, from its folder to its summary.

its episodes, losses and states → the run folder that a run of its own would leave. Knows nothing of the other seeds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hurtle.algorithms.algorithm import short_name
from hurtle.envs.registry import resolve
from hurtle.errors import HurtleError
from hurtle.native.env import Env
from hurtle.policies.policy import Policy
from hurtle.runners.evaluate import Evaluation, evaluate_trained
from hurtle.runners.reporting import Reporter
from hurtle.runners.run import Run
from hurtle.runners.saving import Saver
from hurtle.runners.settings import Settings, settings_to_dict
from hurtle.tracking.dashboard import make_display
from hurtle.tracking.episode_window import EpisodeWindow
from hurtle.tracking.run_folder import RunFolder
from hurtle.tracking.run_state import hold
from hurtle.tracking.trackers import make_trackers
from hurtle.trust import signed

GEAR = "side by side"
"""In about.json."""


@dataclass(frozen=True)
class SeedStart:
    """A seed to train.

    Attributes:
        settings: Of its own run.
        folder: The folder of the run to go on with; None: a new one.
        file: The checkpoint to go on from.
    """

    settings: Settings
    folder: Path | None = None
    file: Path | None = None


@dataclass
class SavedWhole:
    """A state that is taken when a checkpoint is written: several seeds share what it is part of."""

    take: Callable[[], dict[str, Any]] = dict

    def state_dict(self, with_envs: bool = True) -> dict[str, Any]:
        """The state now."""
        return self.take()


@dataclass
class SeedParts:
    """What a checkpoint holds of one seed; see `saving.Saved`."""

    policy: Policy
    learner: SavedWhole = field(default_factory=SavedWhole)
    collector: SavedWhole = field(default_factory=SavedWhole)

    @property
    def device(self) -> torch.device:
        """Where the policy is trained."""
        return next(self.policy.parameters()).device


@dataclass
class Clock:
    """Where the training of all seeds is."""

    steps: int = 0
    updates: int = 0
    seconds: float = 0.0


class SeedRecord:
    """Records one seed.

    Args:
        start: The seed.
        parts: What its checkpoints hold.
        spaces: As stored in a checkpoint.
        clock: Of all seeds, kept up to date by their loop.

    Attributes:
        episodes: The last 100 episodes.
        is_over: Whether nothing more is recorded: it is done, or has failed.
    """

    def __init__(self, start: SeedStart, parts: SeedParts, spaces: dict[str, Any], clock: Clock):
        self.settings, self.parts, self.clock = start.settings, parts, clock
        self.seed = start.settings.train.seed
        self.episodes, self.best_evaluation, self.is_over = EpisodeWindow(), -math.inf, False
        self._start, self._spaces = start, spaces
        self._first = Clock()

    def open(self, saved: Mapping[str, Any] | None) -> None:
        """Make or reopen the run folder; `saved` is the entry "progress" of the checkpoint to go on from.

        Raises:
            HurtleError: Another process trains there.
        """
        train, clock = self.settings.train, self.clock
        if saved is not None:
            self.episodes.load_state_dict(saved["episodes"])
            self.best_evaluation = saved["best_evaluation"]
        self._first = Clock(clock.steps, clock.updates, clock.seconds)
        if self._start.folder is None:
            self.folder = RunFolder.create(train.runs, train.env, short_name(train.algorithm), train.seed, train.name or None)
        else:
            self.folder = RunFolder(self._start.folder)
        self._lock = hold(self.folder.path)
        flat = settings_to_dict(self.settings)
        named = signed(flat)
        self.folder.write_config(named)
        self.folder.write_about({"seed": train.seed, "gear": GEAR})
        self.folder.remove_summary()
        display = make_display("quiet", "", train.total_steps)
        trackers = make_trackers(train.trackers, self.folder, flat, None if saved is None else clock.steps, display.message)
        self.reporter = Reporter(self.folder, display, trackers, quiet=True, curve=train.curve)
        described = {"settings": named, "spaces": self._spaces, "named_env": True, "named_policy": True}
        self.saver = Saver(
            self.folder, self.parts, described, self._progress, train.keep_checkpoints, train.checkpoint_every,
            train.total_steps, display.message,
        )  # fmt: skip

    def begin(self) -> None:
        """Start to measure time."""
        self.saver.start(self.clock.steps)
        self.reporter.start(self.clock.steps, self.clock.seconds)

    def report(self, learned: Mapping[str, float], counts: Mapping[str, float], shares: Mapping[str, float]) -> None:
        """Write a line of metrics."""
        clock = self.clock
        progress = {"steps": clock.steps, "updates": clock.updates, "seconds": clock.seconds}
        self.reporter.update(progress, self.episodes, learned, counts, {}, shares)

    def evaluate(self) -> Evaluation | None:
        """Play new episodes; None if that fails, which is not fatal: the policy is saved."""
        train = self.settings.train
        try:
            emulate = self._spaces["structure"] is not None
            if self.parts.device.type == "cuda" and isinstance(resolve(train.env, train.env_parameters), Env):
                # On a GPU each step would launch op by op, seed after seed; native envs are played in compiled code.
                policy = copy.deepcopy(self.parts.policy).to("cpu")
                found = evaluate_trained(replace(train, device="cpu"), policy, train.env, emulate)
            else:
                found = evaluate_trained(train, self.parts.policy, train.env, emulate, "general")
        except HurtleError as error:
            self.reporter.display.message(f"warning: no evaluation: {error}")
            return None
        self.reporter.evaluation(self.clock.steps, found)
        if train.eval_every and found.mean > self.best_evaluation and self.saver.try_save(self.clock.steps, best=True):
            self.best_evaluation = found.mean
        return found

    def finish(self, stopped_by: str, evaluation: Evaluation | None) -> None:
        """Write the summary, and give the folder back."""
        clock, first = self.clock, self._first
        run = Run(self.folder.path, clock.steps, clock.seconds, self.episodes.mean_return, evaluation, stopped_by)
        rate = (clock.steps - first.steps) / max(clock.seconds - first.seconds, 1e-9)
        self.reporter.finish(run, rate, self.episodes.count, "", "")
        self.close()

    def fail(self, error: HurtleError) -> str:
        """Give the folder back without a summary; returns the reason, with the last checkpoint."""
        self.saver.name_last_checkpoint(error)
        self.close()
        return str(error)

    def close(self) -> None:
        """Record nothing more."""
        if not self.is_over:
            self.is_over = True
            self.reporter.close()
            self._lock.close()

    def _progress(self, with_envs: bool) -> dict[str, Any]:
        return {
            "steps": self.clock.steps,
            "updates": self.clock.updates,
            "seconds": self.clock.seconds,
            "best_evaluation": self.best_evaluation,
            "episodes": self.episodes.state_dict(),
        }
