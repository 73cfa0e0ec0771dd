"""`follow`: a learner beside the first of a run: collects and learns as that one says, writes nothing.

settings → the same parts as rank 0's, with envs of its own → commands of rank 0 until the run ends → `Run`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import torch

from hurtle.contracts import Episodes
from hurtle.envs.registry import EnvLike
from hurtle.errors import LostRankError
from hurtle.kernels.ranks import Ranks
from hurtle.runners.assembly import Module, Parts, assemble, run_seed
from hurtle.runners.devices import gpu_errors, own_random_streams, torch_settings
from hurtle.runners.rank_messages import SAVE, UPDATE, gather, hear_end, listen, send_state, start_together
from hurtle.runners.run import Run
from hurtle.runners.saving import load_policy, rank_entry, restore_parts
from hurtle.runners.settings import Settings
from hurtle.runners.signals import StopSignals


class Follower:
    """One rank's part of a run.

    Args:
        settings: The settings of the run.
        env: The env to train on.
        module: The user's own policy module or class, or None.
        saved: The checkpoint to continue from, if any.
        source: Its file or folder.
        ranks: All ranks; this one is not the first.
    """

    def __init__(
        self,
        settings: Settings,
        env: EnvLike | gymnasium.vector.VectorEnv,
        module: Module,
        saved: dict[str, Any] | None,
        source: Path,
        ranks: Ranks,
    ):
        train = settings.train
        self.settings, self.ranks, self._saved = settings, ranks, saved
        self._stopped_by = ""
        with gpu_errors():
            self._parts: Parts = assemble(settings, env, module, ranks)
        try:
            if saved is not None:
                restore_parts(self._parts, saved, source, ranks)
            elif train.fine_tune:
                load_policy(self._parts.policy, train.fine_tune)
        except BaseException:
            self._parts.close()
            raise

    def run(self) -> Run:
        """Follow rank 0 to the end of the run; always closes the envs."""
        train, parts = self.settings.train, self._parts
        try:
            with (
                torch_settings(train.threads, train.precision, parts.device),
                StopSignals(self._ask_to_stop),
                gpu_errors(str(parts.device)),
            ):
                self._seed_torch()
                start_together(self.ranks, parts)
                prepare(parts)
                while True:
                    command, number = listen(self.ranks)
                    if command == UPDATE:
                        self._update(number)
                    elif command == SAVE:
                        send_state(self.ranks, parts)
                    else:
                        return self._result(hear_end(self.ranks, number))
        except LostRankError:
            self.ranks.abort()
            raise
        finally:
            parts.close()

    def _update(self, progress: float) -> None:
        """One rollout, and one update from it."""
        parts, collector, learner = self._parts, self._parts.collector, self._parts.learner
        collector.load_weights(learner.weights())
        episodes: Episodes | None = collector.collect(parts.rollout)
        if gather(self.ranks, episodes, parts.rollout.num_valid, self._stopped_by).is_whole:
            learner.update(parts.rollout, progress)

    def _seed_torch(self) -> None:
        own = rank_entry(self._saved, self.ranks)
        if own is None:
            torch.manual_seed(run_seed(self.settings.train.seed) + self.ranks.rank)
            return
        torch.set_rng_state(own["torch_rng"])
        if own["gpu_rng"] is not None and self._parts.device.type == "cuda":
            torch.cuda.set_rng_state(own["gpu_rng"], self._parts.device)

    def _ask_to_stop(self, why: str) -> None:
        """Rank 0 hears of it after the next rollout."""
        self._stopped_by = why
        if not self._parts.collector.resumes_exactly:
            self._parts.collector.request_stop()

    def _result(self, told: dict[str, Any]) -> Run:
        return Run(Path(told["path"]), told["steps"], told["seconds"], told["mean_return"], None, told["stopped_by"])


def prepare(parts: Parts) -> None:
    """Compile and capture what updates need; all ranks do it at the same time, since learners may exchange gradients."""
    with own_random_streams(parts.device):
        parts.collector.load_weights(parts.learner.weights())
        parts.collector.prepare(parts.rollout)
        parts.learner.prepare(parts.rollout)
