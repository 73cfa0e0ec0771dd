"""`Trainer`: the local loop: collect, learn, report, evaluate, save, until the steps are done or a stop is requested.

settings → parts (assembly.py) → loop → run folder. Reports through reporting.py, saves through saving.py. Knows nothing of how
an update is computed.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import gymnasium
import torch

from hurtle.algorithms.algorithm import short_name
from hurtle.contracts import Episodes, Metrics
from hurtle.envs.registry import EnvLike, name_of
from hurtle.errors import HurtleError, LostRankError, UnknownNameError
from hurtle.kernels.ranks import ALONE, Ranks
from hurtle.policies.policy import Policy
from hurtle.runners.advice import Adviser
from hurtle.runners.assembly import Module, Parts, assemble, run_seed
from hurtle.runners.devices import gpu_errors, own_random_streams, torch_settings
from hurtle.runners.evaluate import Evaluation, evaluate_trained
from hurtle.runners.follower import prepare
from hurtle.runners.rank_messages import UPDATE, gather, receive_states, start_together, tell, tell_end
from hurtle.runners.reporting import Reporter
from hurtle.runners.run import Run
from hurtle.runners.saving import Saver, begins_anew, load_policy, next_multiple, restore_parts
from hurtle.runners.settings import Settings, settings_to_dict
from hurtle.runners.signals import StopSignals
from hurtle.tracking.dashboard import Display
from hurtle.tracking.episode_window import EpisodeWindow
from hurtle.tracking.run_folder import RunFolder
from hurtle.tracking.run_state import STOPPED_BY, Held, hold
from hurtle.tracking.trackers import make_trackers
from hurtle.trust import signed

Callback = Callable[["Trainer"], bool | None]
"""Called after every update; returning False ends the run."""


def _throw(error: Exception) -> None:
    raise error


class Trainer:
    """One run. Made by `train`, passed to callbacks.

    Attributes:
        settings: The settings of the run.
        folder: The run folder.
        steps: Steps so far.
        updates: Updates so far.
        episodes: The last 100 episodes.
    """

    def __init__(
        self,
        settings: Settings,
        env: EnvLike | gymnasium.vector.VectorEnv,
        module: Module = None,
        callbacks: Sequence[Callback] = (),
        folder: RunFolder | None = None,
        saved: dict[str, Any] | None = None,
        *,
        display: Display,
        ranks: Ranks = ALONE,
    ):
        self.settings, self._env, self._module, self._callbacks = settings, env, module, list(callbacks)
        self._ranks = ranks  # this one is the first; the others do as it says, see follower.py
        self.steps = self.updates = 0
        self.episodes = EpisodeWindow()
        self._best_evaluation = -math.inf
        self._seconds_before = 0.0  # from before a resume
        self._torch_rng: torch.Tensor | None = None
        self._gpu_rng: torch.Tensor | None = None
        self._stopped_by = ""
        self._evaluating = self._has_told_waiting = self._has_released = False
        self._lock = Held(None)
        train = settings.train
        self._display = display
        self._display.status("building envs and policy")
        with gpu_errors():
            self._parts: Parts = assemble(settings, env, module, ranks)
        self._device = self._parts.device
        try:
            if saved is not None and folder is not None:
                self._continue(saved, folder)
            elif train.fine_tune:
                load_policy(self.policy, train.fine_tune)
            self.folder = folder or RunFolder.create(
                train.runs, train.env, short_name(train.algorithm), train.seed, train.name or None
            )
            self._lock = hold(self.folder.path)
            self._open_folder(resumed=saved is not None)
        except BaseException:
            self._parts.close()
            self._lock.close()
            if folder is None and hasattr(self, "folder"):  # newly made, and still empty
                shutil.rmtree(self.folder.path)
            raise

    def _open_folder(self, resumed: bool) -> None:
        """Write what is known before the run starts, and open what is written while it runs."""
        train, parts, flat = self.settings.train, self._parts, settings_to_dict(self.settings)
        named = signed(flat)  # the user has allowed the code they name
        self.folder.write_config(named)
        self.folder.write_about({"seed": train.seed, "gear": parts.gear.name, "learners": self._ranks.size})
        self.folder.remove_summary()
        trackers = make_trackers(train.trackers, self.folder, flat, self.steps if resumed else None, self._display.message)
        head = parts.policy.head
        adviser = Adviser(train.total_steps, head.mask_size is not None, head.transform.size)
        self._reporter = Reporter(self.folder, self._display, trackers, train.progress == "quiet", train.curve, adviser)
        described = {
            "settings": named,
            "spaces": parts.spaces,
            "named_env": not self._why_unnamed,
            "named_policy": self._module is None,
        }
        self._saver = Saver(
            self.folder, parts, described, self._progress, train.keep_checkpoints, train.checkpoint_every, train.total_steps,
            self._display.message, self._other_states,
        )  # fmt: skip

    @property
    def policy(self) -> Policy:
        """The policy being trained."""
        return self._parts.policy

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last update, as sent to the trackers."""
        return self._reporter.metrics

    @property
    def seconds(self) -> float:
        """Training time so far, including time before a resume."""
        return self._seconds_before + time.perf_counter() - self._began

    def run(self, until: int | None = None) -> Run:
        """Train until the end, or pause after `until` steps; save, evaluate; always closes the envs."""
        train, gear = self.settings.train, self._parts.gear
        self._end = train.total_steps if until is None else min(until, train.total_steps)
        self._began, self._first_step = time.perf_counter(), self.steps
        try:
            with (
                torch_settings(train.threads, train.precision, self._device),
                StopSignals(self._ask_to_stop),
                self._display,
                gpu_errors(str(self._device)),
            ):
                self._seed_torch()
                if self._ranks.several:
                    self._ranks.while_waiting = self._tell_waiting
                self._display.start(str(self.folder.path))
                if train.progress != "quiet":
                    self._display.message(f"gear        {gear.name}: {gear.reason}")
                    if self._parts.runner:
                        self._display.message(f"runner      {self._parts.runner}")
                    if self._ranks.several:
                        self._display.message(f"learners    {self._described_ranks()}")
                self._display.status("first update; the first run compiles it")
                self._prepare()
                self._loop()
                self._collect_pending()
                seconds = self.seconds
                self.save()
                self._release_others(seconds)
                evaluation = None
                if self._stopped_by not in STOPPED_BY:
                    evaluation = self._evaluate()
                return self._finish(seconds, evaluation)
        except LostRankError as error:
            self._ranks.abort()
            if self._device.type == "cpu":  # a GPU's gradients may be half exchanged
                self._saver.save_after_error(self.steps)
            self._saver.name_last_checkpoint(error)
            raise
        except HurtleError as error:
            self._saver.name_last_checkpoint(error)
            raise
        finally:
            self._reporter.close()
            self._parts.close()
            self._lock.close()

    def _prepare(self) -> None:
        """Compile and capture before the clock starts: one-time costs are not training time."""
        parts = self._parts
        if self._ranks.several:
            start_together(self._ranks, parts)
        prepare(parts)
        if parts.collector.warning:
            self._display.message(f"warning: {parts.collector.warning}")
        parts.timer.shares()
        parts.collector.seconds()
        parts.learner.seconds()
        self._began = time.perf_counter()
        self._saver.start(self.steps)
        self._reporter.start(self.steps, self.seconds)
        self._next_evaluation = next_multiple(self.steps, self.settings.train.eval_every)

    def _seed_torch(self) -> None:
        """Seed torch's global stream, which a user's module may draw from (dropout, distributions)."""
        if self._torch_rng is None:
            torch.manual_seed(run_seed(self.settings.train.seed))
        else:
            torch.set_rng_state(self._torch_rng)
            if self._gpu_rng is not None and self._device.type == "cuda":
                torch.cuda.set_rng_state(self._gpu_rng, self._device)

    def _loop(self) -> None:
        train = self.settings.train
        while self.steps < self._end and not self._stopped_by:
            if (count := self._fitting()) > 1:
                self._update_together(count)
            else:
                self._update()
            if self._stopped_by:
                self._display.message(f"{self._stopped_by}: saving …")
                break
            if train.eval_every and self.steps >= self._next_evaluation:
                self._next_evaluation = next_multiple(self.steps, train.eval_every)
                self._evaluate()
            self._saver.save_if_due(self.steps)
            target = train.stop_at_return
            full = self.episodes.count >= self.episodes.size
            if target is not None and full and self.episodes.mean_return >= target:
                self._stopped_by = "stop_at_return"
            if self._callbacks_end_it():
                self._stopped_by = self._stopped_by or "callback"
        self._stopped_by = self._stopped_by or ("total_steps" if self.steps >= train.total_steps else "until")

    def _callbacks_end_it(self) -> bool:
        try:
            return False in [callback(self) for callback in self._callbacks]  # a list, so that each one is called
        except Exception:
            self._saver.try_save(self.steps)
            raise

    def _update(self) -> None:
        """One rollout, and one update from it."""
        parts, collector, learner = self._parts, self._parts.collector, self._parts.learner
        progress = min(1.0, self.steps / self.settings.train.total_steps)
        collector.load_weights(learner.weights())
        if self._ranks.several:
            tell(self._ranks, UPDATE, progress)
        episodes = self._guarded(lambda: collector.collect(parts.rollout))
        steps = parts.rollout.num_valid
        if self._ranks.several:
            episodes, steps = self._gather(episodes, steps)
        if episodes is None:  # stop requested
            return
        with parts.timer("learn"):
            learned = learner.update(parts.rollout, progress)
        self.steps += steps
        self.updates += 1
        self.episodes.add(episodes)
        if on_gpu := learner.seconds():  # the host's clock would only measure launches
            parts.timer.share_out(on_gpu | collector.seconds())
        self._shares = parts.timer.shares()
        self._report(learned, self.seconds)

    def _gather(self, episodes: Episodes | None, steps: int) -> tuple[Episodes | None, int]:
        """The episodes and steps of all ranks; None if one of them was asked to stop before its rollout was full."""
        with self._parts.timer("wait"):
            found = gather(self._ranks, episodes, steps)
        self._stopped_by = self._stopped_by or found.stopped_by
        return (found.episodes if found.is_whole else None), found.steps

    def _other_states(self) -> list[dict[str, Any]]:
        """For a checkpoint: what the other learners have of their own."""
        if not self._ranks.several:
            return []
        states, episodes = receive_states(self._ranks)
        self.episodes.add(episodes)
        return states

    def _release_others(self, seconds: float) -> None:
        if self._ranks.several:
            self._has_released = True
            result = {"path": str(self.folder.path), "steps": self.steps, "seconds": seconds}
            tell_end(self._ranks, {**result, "mean_return": self.episodes.mean_return, "stopped_by": self._stopped_by})

    def _described_ranks(self) -> str:
        found = f"{self._ranks.size}, each with {self.settings.train.num_envs} envs"
        if self._device.type == "cpu":
            return found
        return f"{found}; gradients by " + ("NCCL" if self._ranks.backend == "nccl" else "gloo: NCCL needs a GPU for each")

    def _tell_waiting(self) -> None:
        """Called while others are waited for: say so, once, after Ctrl-C."""
        again = {"Ctrl-C": "once more to end at once", "SIGTERM": "Ctrl-C ends at once"}.get(self._stopped_by)
        if again and not self._has_told_waiting:
            self._has_told_waiting = True
            self._display.message(f"{self._stopped_by}: waiting for the other learners; {again}")

    def lose(self) -> None:
        """Another learner has ended; may be called by any thread, so that the rollout under way does not delay the error."""
        if not self._has_released:
            self._parts.collector.request_stop()

    def _report(self, learned: Metrics, seconds: float) -> None:
        collector, learner = self._parts.collector, self._parts.learner
        progress = {"steps": self.steps, "updates": self.updates, "seconds": seconds}
        threads = {"collect": collector.threads(), "learn": learner.threads()}
        self._reporter.update(progress, self.episodes, learned, collector.metrics(), threads, self._shares)

    def _fitting(self) -> int:
        """How many updates may run in one call: nothing has to happen between them."""
        loop, train, steps = self._parts.gear.loop, self.settings.train, self.steps
        if loop is None or self._callbacks or train.stop_at_return is not None:
            return 1
        left = min(self._end - steps, self._saver.steps_left(steps))
        if train.eval_every:
            left = min(left, self._next_evaluation - steps)
        return min(loop.fitting(self._parts.rollout), math.ceil(left / self._parts.rollout.num_valid))

    def _update_together(self, count: int) -> None:
        """Several rollouts, each followed by an update; all of them share the time."""
        loop, rollout, before = self._parts.gear.loop, self._parts.rollout, self.seconds
        size, total = rollout.num_valid, self.settings.train.total_steps
        assert loop is not None
        found = loop.run(rollout, [min(1.0, (self.steps + k * size) / total) for k in range(count)])
        self._parts.timer.share_out(found.seconds)
        self._shares = self._parts.timer.shares()
        each = (self.seconds - before) / max(1, len(found.done))
        for k, (episodes, learned) in enumerate(found.done, 1):
            self.steps += size
            self.updates += 1
            self.episodes.add(episodes)
            self._report(learned, before + k * each)
        if found.rollout_error is not None:
            self._guarded(partial(_throw, found.rollout_error))
        if found.update_error is not None:
            raise found.update_error

    def _guarded(self, collects: Callable[[], Any]) -> Any:
        """Call something that an env can make fail; if it does, save the policy of the last update."""
        try:
            with gpu_errors(str(self._device)):
                return collects()
        except Exception as error:
            if not getattr(error, "device_lost", False):
                self._saver.save_after_error(self.steps)
            raise

    def _collect_pending(self) -> None:
        """Add what a GPU had not reported yet: its numbers arrive an update or two late."""
        self.episodes.add(self._guarded(lambda: self._parts.collector.pending(wait=True)))
        self._reporter.add(self._guarded(lambda: self._parts.learner.pending(wait=True)))

    def _evaluate(self) -> Evaluation | None:
        """Play new episodes; None if that is impossible or was interrupted."""
        train = self.settings.train
        if isinstance(self._env, gymnasium.vector.VectorEnv):
            return None  # no way to make another one
        self._evaluating = True
        try:
            with own_random_streams(self._device):  # so that evaluating does not change a policy's training draws
                emulate, gear = self._parts.spaces["structure"] is not None, self._parts.gear.name
                evaluation = evaluate_trained(train, self.policy, self._env, emulate, "auto" if gear == "native" else "general")
        except KeyboardInterrupt:
            return None
        except HurtleError as error:  # the policy is saved; failing to score it is not fatal
            self._display.message(f"warning: no evaluation: {error}")
            return None
        finally:
            self._evaluating = False
        self._reporter.evaluation(self.steps, evaluation)
        if train.eval_every and evaluation.mean > self._best_evaluation and self._saver.try_save(self.steps, best=True):
            self._best_evaluation = evaluation.mean
        return evaluation

    def _finish(self, seconds: float, evaluation: Evaluation | None) -> Run:
        run = Run(self.folder.path, self.steps, seconds, self.episodes.mean_return, evaluation, self._stopped_by)
        rate = (self.steps - self._first_step) / max(seconds - self._seconds_before, 1e-9)
        unplayable = self._why_unnamed or ("the policy is a module of your own" if self._module is not None else "")
        self._reporter.finish(run, rate, self.episodes.count, self._parts.collector.advice, unplayable)
        return run

    @cached_property
    def _why_unnamed(self) -> str:
        """The reason another process cannot find the env by name, or an empty string."""
        if isinstance(self._env, gymnasium.vector.VectorEnv):
            return "the env is a vector that you made"
        try:
            return "" if name_of(self._env) else "the env has no name"
        except UnknownNameError as error:
            return f"the env has no name: {error}"

    def save(self) -> Path:
        """Write a checkpoint now; callbacks may call it."""
        return self._saver.save(self.steps)

    def _progress(self, with_envs: bool) -> dict[str, Any]:
        if with_envs:  # the envs are ahead of the GPU's reports; after an error no more will come
            self._collect_pending()
        return {
            "steps": self.steps,
            "updates": self.updates,
            "seconds": self.seconds,
            "best_evaluation": self._best_evaluation,
            "episodes": self.episodes.state_dict(),
        }

    def _continue(self, saved: dict[str, Any], folder: RunFolder) -> None:
        progress = saved["progress"]
        self.steps, self.updates = progress["steps"], progress["updates"]
        self._seconds_before, self._best_evaluation = progress["seconds"], progress["best_evaluation"]
        self.episodes.load_state_dict(progress["episodes"])
        self._torch_rng, self._gpu_rng = saved["torch_rng"], saved.get("gpu_rng")
        restore_parts(self._parts, saved, folder.path, self._ranks)
        if told := begins_anew(saved, self._ranks):
            self._display.message(told)

    def _ask_to_stop(self, why: str) -> None:
        self._stopped_by = why
        if self._evaluating:  # it is safe to stop midway
            raise KeyboardInterrupt
        if not self._parts.collector.resumes_exactly:  # otherwise rollouts are short, and saves at their end are exact
            self._parts.collector.request_stop()
