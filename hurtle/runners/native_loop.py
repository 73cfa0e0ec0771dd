"""`NativeLoop`: several updates of the native gear in one compiled call, since Python takes as long as a short update.

collector, learner → jobs of their kernels → `kernels.cpu.updates.run_updates` → episodes and metrics of each update. The
results are those of single updates, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hurtle.algorithms.kernel_crew import KernelCrew
from hurtle.algorithms.native_update import CALL_SECONDS, Planner, not_learned
from hurtle.collect.native_collector import NativeCollector
from hurtle.contracts import Episodes, Metrics
from hurtle.errors import HurtleError, NonFiniteError
from hurtle.kernels.error_codes import NO_ERROR
from hurtle.kernels.loader import load_kernels
from hurtle.native.bounds import OutOfBounds

MOST = 32
"""Updates in one call, at most."""
DENSE_SINGLES = 64
"""Single updates after observations that were too dense to list."""


class Updates(NamedTuple):
    """What a call of `NativeLoop.run` did."""

    done: list[tuple[Episodes, Metrics]]
    """Of each update that was finished."""
    rollout_error: HurtleError | None = None
    """What ended the rollout after these."""
    update_error: HurtleError | None = None
    """What ended the update after these."""
    seconds: Mapping[str, float] = {}
    """By stage."""


class NativeLoop:
    """Collects and learns without Python in between.

    Args:
        collector: Made with the learner's postprocessing.
        planner: The learner's, see `Learner.planner`.
    """

    def __init__(self, collector: NativeCollector, planner: Planner):
        self._collector, self._planner, self._native = collector, planner, planner.native
        native = planner.native
        kernels = load_kernels().updates
        self._job = np.zeros(1, kernels.UPDATES)
        most = max(collector.threads()[1], native.most_threads)
        self._crew = KernelCrew(kernels.run_updates, most, others=(native.barrier,))
        self._errors = np.zeros(most, np.int64)
        self._singles = 0  # updates before this loop is tried again

    @staticmethod
    def fits(collector: NativeCollector, planner: Planner | None) -> bool:
        """Whether Python has nothing to do between a rollout and its update."""
        return planner is not None and collector.computes_all and planner.native.reads_rollouts

    def fitting(self, rollout: Any) -> int:
        """How many updates the next call may have, so that it takes about 0.1 s.

        1: let Python run a single one, because nothing is known yet, another number of threads is being tried, one takes long,
        or observations were too dense to list a short while ago.
        """
        if self._singles:
            self._singles -= 1
            return 1
        collecting, learning = self._collector.tuner, self._native.tuner
        if not (collecting.is_settled and learning.is_settled):
            return 1
        share = rollout.num_steps / collecting.fitting(CALL_SECONDS) + self._native.last_steps / learning.fitting(CALL_SECONDS)
        return max(1, min(MOST, int(1.0 / share)))

    def run(self, rollout: Any, progresses: Sequence[float]) -> Updates:
        """Collect and learn, as often as there are progresses.

        Args:
            rollout: The memory of all rollouts, one after another.
            progresses: The finished part of the run before each update.
        """
        plan = self._planner.plan(rollout, progresses)
        count, native, job = len(progresses), self._native, self._job[0]
        results = native.begin(rollout, plan.order, is_filled=False, **plan.settings)
        results = results.reshape(count, -1, results.shape[-1])
        learners, learn_job = native.ready(plan.order.sizes)
        explained = np.zeros(count)
        kept = {
            "learning_rates": np.array(plan.learning_rates), "clip_ranges": np.array(plan.clip_ranges), "explained": explained,
            "barrier": self._crew.barrier, "errors": self._errors,
        }  # fmt: skip
        for name, array in kept.items():
            job[name] = array.ctypes.data
        rollouts = self._collector.begin_rollouts(rollout, count, native.packed_weights)
        for name, number in rollouts.numbers.items():
            job[name] = number
        job["learn"], job["learn_job"], job["learners"] = native.address, learn_job, learners
        job["list_inputs"], job["listing"] = native.listing()
        job["returns"], job["advantages"] = rollout.returns.data_ptr(), rollout.advantages.data_ptr()
        job["updates"], job["minibatches"], job["done"], job["failed"] = count, results.shape[1], 0, 0
        job["unlisted"] = job["collect_ns"] = job["learn_ns"] = 0
        error_code, failure = NO_ERROR, None
        try:
            error_code = self._crew.run(self._job.ctypes.data, max(learners, rollouts.numbers["collectors"]))
        except OutOfBounds as error:
            failure = error
        finally:
            native.end()
            done = int(job["done"])
            played = done + int(job["unlisted"]) + int(job["failed"])
            rollout_error = self._collector.end_rollouts(rollout, played, error_code, failure)
        if done:
            native.set_learning_rate(plan.learning_rates[done - 1])
        seconds = {"collect": 1e-9 * float(job["collect_ns"]), "learn": 1e-9 * float(job["learn_ns"])}
        if played:
            self._collector.tuner.took(played * rollout.num_steps, seconds["collect"])
        if done == count:
            native.tuner.took(plan.order.sizes.sum(), seconds["learn"])
        metrics = self._planner.planned(plan, rollout, results[:done], explained[:done])
        update_error = None
        if job["failed"]:
            update_error = not_learned(results[done, native.learned - done * results.shape[1]])
        if job["unlisted"]:  # too dense for what was planned
            self._singles = DENSE_SINGLES
            try:
                metrics.append(self._planner.update(rollout, progresses[done]))
                done += 1
            except NonFiniteError as error:
                update_error = error
        episodes = [rollouts.log.episodes(k * rollout.num_steps, (k + 1) * rollout.num_steps) for k in range(done)]
        return Updates(list(zip(episodes, metrics, strict=True)), rollout_error, update_error, seconds)

    def close(self) -> None:
        """Stop the helper threads."""
        self._crew.close()
