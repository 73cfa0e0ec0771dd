"""`Trainer`: the local loop: collect, learn, report, evaluate, save, until the steps are done or someone asks to stop.

settings → parts (assembly.py) → loop → run folder. Knows nothing of how an update is computed.
"""

from __future__ import annotations

import math
import shlex
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import gymnasium
import torch

from hurtle.buffers.rollout import EpisodeStats, EpisodeTotals
from hurtle.collect.device import DeviceCollector
from hurtle.envs.registry import EnvLike, name_of
from hurtle.errors import CheckpointError, HurtleError, UnknownNameError
from hurtle.policies.policy import Policy
from hurtle.runners.assembly import Module, Parts, assemble, run_seed
from hurtle.runners.config import Settings, settings_to_dict
from hurtle.runners.devices import gpu_errors, own_random_streams, torch_settings
from hurtle.runners.evaluate import Evaluation, evaluate_policy
from hurtle.runners.restore import find_checkpoint, load_weights
from hurtle.runners.signals import StopSignals
from hurtle.tracking.checkpoints import Checkpoints, load_checkpoint
from hurtle.tracking.curves import plot_run
from hurtle.tracking.dashboard import Display
from hurtle.tracking.episodes import EpisodeWindow
from hurtle.tracking.run_folder import RunFolder
from hurtle.tracking.trackers import make_trackers
from hurtle.trust import signed

Callback = Callable[["Trainer"], bool | None]
"""Called after every update; returning False ends the run."""

RATE_SECONDS = 5.0  # steps/s are those of the last seconds
CHECKPOINT_SECONDS = 1.0  # between two checkpoints that nobody asked for: a run of a second should not spend it on ten


@dataclass(frozen=True)
class Run:
    """What `hurtle.train` returns.

    Attributes:
        path: The run folder; `hurtle.load(run)`, `hurtle eval` and `hurtle watch` take it.
        steps: Steps trained for, summed over envs and agents.
        seconds: How long that took, without the final evaluation, and in the device gear without compiling.
        mean_return: Of the last 100 training episodes.
        evaluation: The final evaluation, or None if the run was stopped.
        stopped_by: "total_steps", "stop_at_return", "callback", "Ctrl-C" or "SIGTERM".
    """

    path: Path
    steps: int
    seconds: float
    mean_return: float
    evaluation: Evaluation | None
    stopped_by: str


class Trainer:
    """One run. `train` makes it; callbacks get it.

    Attributes:
        settings: Of the run.
        policy: What is trained.
        folder: Where everything is kept.
        steps: Steps so far.
        updates: Updates so far.
        metrics: Of the last update, as the trackers got them.
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
    ):
        self.settings, self._env, self._module, self._callbacks = settings, env, module, list(callbacks)
        self.steps = self.updates = 0
        self.metrics: dict[str, float] = {}
        self.episodes = EpisodeWindow()
        self._best_evaluation = -math.inf
        self._seconds_before = 0.0  # of earlier parts of a resumed run
        self._torch_rng: torch.Tensor | None = None
        self._gpu_rng: torch.Tensor | None = None
        self._stopped_by = ""
        self._evaluating = False
        self._summary: dict[str, Any] = {}
        train = settings.train
        self._display = display
        self._display.status("building envs and policy")
        with gpu_errors():
            self._parts: Parts = assemble(settings, env, module)
        self._device = self._parts.rollout.device
        try:
            if saved is not None and folder is not None:
                self._load(saved, folder)
            elif train.fine_tune:
                self._load_weights(train.fine_tune)
            self.folder = folder or RunFolder.create(train.runs, train.env, train.algorithm, train.seed, train.name or None)
            self._checkpoints = Checkpoints(self.folder.checkpoints, train.keep_checkpoints)
            words = settings_to_dict(settings)
            self._signed_words = signed(words)  # whatever code they name, the user has allowed
            self.folder.write_config(self._signed_words)
            self.folder.write_about({"seed": train.seed, "gear": self._parts.gear.name})
            self._trackers = make_trackers(
                train.trackers, self.folder, words, None if saved is None else self.steps, self._display.message
            )
        except BaseException:
            self._parts.close()
            if folder is None and hasattr(self, "folder"):  # made just now, and nothing was trained in it
                shutil.rmtree(self.folder.path)
            raise
        self._every = train.checkpoint_every or max(1, train.total_steps // 10)
        self._pause = 0.0 if train.checkpoint_every else CHECKPOINT_SECONDS
        self._next_checkpoint, self._next_evaluation = _after(self.steps, self._every), _after(self.steps, train.eval_every)

    @property
    def policy(self) -> Policy:
        """What is trained."""
        return self._parts.policy

    @property
    def seconds(self) -> float:
        """Training time so far, earlier parts of a resumed run included."""
        return self._seconds_before + time.perf_counter() - self._began

    def run(self) -> Run:
        """Train until the end, save, evaluate; always closes the envs."""
        train = self.settings.train
        self._began, self._first_step = time.perf_counter(), self.steps
        self._recent: deque[tuple[float, int]] = deque([(self._began, self.steps)])
        try:
            with (
                torch_settings(train.threads, train.precision, self._device),
                StopSignals(self._ask_to_stop),
                self._display,
                gpu_errors(str(self._device)),
            ):
                self._seed_torch()
                self._display.start(str(self.folder.path))
                if train.progress != "quiet":
                    self._display.message(f"gear        {self._parts.gear.name}: {self._parts.gear.why}")
                self._display.status("first update; the first run compiles it")
                self._prepare()
                self._loop()
                self._hear_the_rest()
                seconds = self.seconds
                self.save()
                evaluation = None
                if self._stopped_by not in ("Ctrl-C", "SIGTERM"):
                    evaluation = self._evaluate()
                return self._finish(seconds, evaluation)
        except HurtleError as error:
            self._name_last_checkpoint(error)
            raise
        finally:
            for tracker in self._trackers:
                tracker.finish(self._summary)
            self._parts.close()

    def _prepare(self) -> None:
        """What takes time once is not training: it is done before the clock starts."""
        with own_random_streams(self._device):
            self._parts.gear.prepare(self._parts.rollout)
        if self._parts.gear.warning:
            self._display.message(f"warning: {self._parts.gear.warning}")
        self._parts.timer.shares()
        self._parts.gear.gpu_seconds()
        self._began = time.perf_counter()
        self._no_checkpoint_before = self._began + self._pause
        self._recent = deque([(self._began, self.steps)])

    def _seed_torch(self) -> None:
        """Torch's global stream, which a user's own module may draw from (dropout, its own distributions)."""
        if self._torch_rng is None:
            torch.manual_seed(run_seed(self.settings.train.seed))
        else:
            torch.set_rng_state(self._torch_rng)
            if self._gpu_rng is not None and self._device.type == "cuda":
                torch.cuda.set_rng_state(self._gpu_rng, self._device)

    def _loop(self) -> None:
        train = self.settings.train
        while self.steps < train.total_steps and not self._stopped_by:
            self._update()
            if self._stopped_by:
                self._display.message(f"{self._stopped_by}: saving …")
                break
            if train.eval_every and self.steps >= self._next_evaluation:
                self._next_evaluation = _after(self.steps, train.eval_every)
                self._evaluate()
            if self.steps >= self._next_checkpoint and time.perf_counter() >= self._no_checkpoint_before:
                self._next_checkpoint = _after(self.steps, self._every)
                self._save_if_possible()
                self._no_checkpoint_before = time.perf_counter() + self._pause
            target = train.stop_at_return
            full = self.episodes.count >= self.episodes.size
            if target is not None and full and self.episodes.mean_return >= target:
                self._stopped_by = "stop_at_return"
            if self._callbacks_end_it():
                self._stopped_by = self._stopped_by or "callback"
        self._stopped_by = self._stopped_by or "total_steps"

    def _callbacks_end_it(self) -> bool:
        try:
            return False in [callback(self) for callback in self._callbacks]  # a list: every one is called
        except Exception:
            self._save_if_possible()
            raise

    def _update(self) -> None:
        """One rollout and what is learned from it."""
        parts, total = self._parts, self.settings.train.total_steps
        try:
            with gpu_errors(str(self._device)):
                stats = parts.collector.collect(parts.rollout)
        except Exception as error:
            if not getattr(error, "device_lost", False):
                self._save_policy()  # it is that of the last update, whatever happened to an env
            raise
        if stats is None:
            return
        with parts.timer("learn"):
            learned = parts.algorithm.update(parts.rollout, max(0.0, 1.0 - self.steps / total))
        self.steps += parts.rollout.num_valid
        self.updates += 1
        self._add_episodes(stats)
        parts.timer.share_out(parts.gear.gpu_seconds())  # the host's own clock would show how long launching took
        now = time.perf_counter()
        self._recent.append((now, self.steps))
        while len(self._recent) > 2 and now - self._recent[0][0] > RATE_SECONDS:
            self._recent.popleft()
        (since, before), elapsed = self._recent[0], now - self._recent[0][0]
        is_known = now > since and bool(learned)  # until a GPU has said something, the clock shows how long launching took
        self.metrics = {
            "steps": self.steps,
            "updates": self.updates,
            "seconds": self.seconds,
            "steps_per_second": (self.steps - before) / elapsed if is_known else math.nan,
            "episodes": self.episodes.count,
            "episode_return": self.episodes.mean_return,
            "episode_return_best": self.episodes.best_return,
            "episode_length": self.episodes.mean_length,
            "episode_length_best": self.episodes.best_length,
            **learned,
            **{f"episode/{name}": value for name, value in self.episodes.mean_metrics.items()},
            **self._overflow(),
            **{f"time/{stage}": share for stage, share in parts.timer.shares().items()},
        }
        self._report(self.metrics)

    def _overflow(self) -> dict[str, float]:
        """Truncated episodes whose final observation found no place, if there are any."""
        lost = getattr(self._parts.collector, "overflow", 0)
        return {"final_overflow": float(lost)} if lost else {}

    def _add_episodes(self, stats: EpisodeStats | EpisodeTotals) -> None:
        if isinstance(stats, EpisodeTotals):
            totals = (stats.count, stats.returns, stats.best_return, stats.lengths, stats.best_length, stats.metrics)
            self.episodes.add_totals(*totals)
        else:
            self.episodes.add(stats.returns, stats.lengths, stats.metrics)

    def _hear_the_rest(self) -> None:
        """What a GPU has not told of yet: its numbers come an update or two late."""
        try:
            with gpu_errors(str(self._device)):
                episodes, metrics = self._parts.gear.rest()
        except Exception as error:
            if not getattr(error, "device_lost", False):
                self._save_policy()
            raise
        self._add_episodes(episodes)
        if metrics:
            self.metrics |= metrics
            self._report(self.metrics)

    def _report(self, metrics: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(metrics, self.steps)
        self._display.update({**self.metrics, **metrics})

    def _evaluate(self) -> Evaluation | None:
        """Play fresh episodes; None if that is not possible, or was interrupted."""
        train = self.settings.train
        if isinstance(self._env, gymnasium.vector.VectorEnv):
            return None  # there is no way to make another one
        self._evaluating = True
        try:
            with own_random_streams(self._device):  # else a policy that draws from them would train on with other numbers
                evaluation = evaluate_policy(
                    self.policy,
                    self._env,
                    episodes=train.eval_episodes,
                    deterministic=not train.eval_sampled,
                    seed=train.seed,
                    backend=train.backend,
                    env_parameters={**train.env_parameters, **({"unsafe": True} if train.unsafe else {})},
                    device=train.device,
                    emulate=self._parts.spaces["structure"] is not None,
                    gear="auto" if self._parts.gear.name == "native" else "general",
                )
        except KeyboardInterrupt:
            return None
        except HurtleError as error:  # what was learned is saved; that it cannot be scored is no reason to fail
            self._display.message(f"warning: no evaluation: {error}")
            return None
        finally:
            self._evaluating = False
        self._report(
            {
                "steps": self.steps,
                "eval_return": evaluation.mean,
                "eval_return_low": evaluation.low,
                "eval_return_high": evaluation.high,
                "eval_length": float(evaluation.lengths.mean()),
            }
        )
        if train.eval_every and evaluation.mean > self._best_evaluation and self._save_if_possible(best=True):
            self._best_evaluation = evaluation.mean
        return evaluation

    def _finish(self, seconds: float, evaluation: Evaluation | None) -> Run:
        path = self.folder.path
        run = Run(path, self.steps, seconds, self.episodes.mean_return, evaluation, self._stopped_by)
        self._summary = {
            "steps": run.steps,
            "seconds": run.seconds,
            "steps_per_second": (self.steps - self._first_step) / max(seconds - self._seconds_before, 1e-9),
            "mean_return": run.mean_return,
            "episodes": self.episodes.count,
            "stopped_by": run.stopped_by,
            "evaluation": None if evaluation is None else evaluation.summary(),
        }
        self.folder.write_summary(self._summary)
        self._display.stop()
        curve = self._plot()
        if self.settings.train.progress != "quiet":
            self._display.message(self._closing_words(run, curve))
        return run

    def _plot(self) -> Path | None:
        try:
            return plot_run(self.folder)
        except HurtleError as error:  # without matplotlib there is no picture, and that is no reason to fail
            self._display.message(str(error))
            return None

    def _closing_words(self, run: Run, curve: Path | None) -> str:
        ended = {"total_steps": "Done", "stop_at_return": "Reached the return asked for,"}
        lines = [
            f"{ended.get(run.stopped_by, f'Stopped by {run.stopped_by},')} after {run.steps:,} steps in {run.seconds:.1f} s."
        ]
        if run.evaluation is not None:
            lines.append(f"evaluation  {run.evaluation}")
        lines.append(f"run folder  {run.path}")
        if curve is not None:
            lines.append(f"curve       {curve}")
        path = shlex.quote(str(run.path))
        if why := self._why_unnamed or ("the policy is a module of your own" if self._module is not None else ""):
            lines.append(f"next        hurtle watch and eval cannot play it: {why}. In Python, hurtle.load(run) can")
            return "\n".join(lines)
        verbs = ["train --resume"] if run.evaluation is None else ["watch", "eval"]
        lines += [f"{'' if k else 'next':<12}hurtle {verb} {path}" for k, verb in enumerate(verbs)]
        return "\n".join(lines)

    @cached_property
    def _why_unnamed(self) -> str:
        """Why another process cannot find the env by a name; empty if it can."""
        if isinstance(self._env, gymnasium.vector.VectorEnv):
            return "the env is a vector that you made"
        try:
            return "" if name_of(self._env) else "the env has no name"
        except UnknownNameError as error:
            return f"the env has no name: {error}"

    # Saving and loading.

    def _state(self, with_envs: bool = True) -> dict[str, Any]:
        collector = self._collector_state(with_envs)
        return {
            "settings": self._signed_words,
            "spaces": self._parts.spaces,
            "named_env": not self._why_unnamed,
            "named_policy": self._module is None,
            "policy": self.policy.state_dict(),
            "algorithm": self._parts.algorithm.state_dict(),
            "collector": collector,
            "torch_rng": torch.get_rng_state(),
            "gpu_rng": torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
            "progress": {
                "steps": self.steps,
                "updates": self.updates,
                "seconds": self.seconds,
                "best_evaluation": self._best_evaluation,
                "episodes": self.episodes.state_dict(),
            },
        }

    def _collector_state(self, with_envs: bool) -> dict[str, Any]:
        collector = self._parts.collector
        if isinstance(collector, DeviceCollector):
            if with_envs:
                self._hear_the_rest()  # else the episodes of the last rollouts would be missing after a resume
            return collector.state_dict(with_envs)
        saved = collector.state_dict()
        if not with_envs:
            saved.pop("envs", None)
        return saved

    def save(self) -> Path:
        """Write a checkpoint now; callbacks may call it."""
        return self._checkpoints.save(self.steps, self._state())

    def _save_if_possible(self, best: bool = False, with_envs: bool = True) -> bool:
        """A full disk is no reason to lose what is in memory: say so, and try again at the next checkpoint."""
        try:
            self._checkpoints.save(self.steps, self._state(with_envs), best=best)
        except CheckpointError as error:
            self._display.message(f"warning: {error}")
            return False
        return True

    def _save_policy(self) -> None:
        """After an error in the envs: all but their states, unless this step was saved with them."""
        if not any(path.name == f"step-{self.steps:012}.pt" for path in self._checkpoints.all()):
            self._save_if_possible(with_envs=False)

    def _load(self, saved: dict[str, Any], folder: RunFolder) -> None:
        progress = saved["progress"]
        self.steps, self.updates = progress["steps"], progress["updates"]
        self._seconds_before, self._best_evaluation = progress["seconds"], progress["best_evaluation"]
        self.episodes.load_state_dict(progress["episodes"])
        self._torch_rng, self._gpu_rng = saved["torch_rng"], saved.get("gpu_rng")
        load_weights(self.policy, saved["policy"], folder.path)
        self._parts.algorithm.load_state_dict(saved["algorithm"])
        self._parts.collector.load_state_dict(saved["collector"])

    def _load_weights(self, source: str) -> None:
        _, file = find_checkpoint(source)
        load_weights(self.policy, load_checkpoint(file)["policy"], file)

    def _ask_to_stop(self, why: str) -> None:
        self._stopped_by = why
        if self._evaluating:  # nothing is lost by leaving off in the middle
            raise KeyboardInterrupt
        if not self._parts.can_resume_exactly:  # others' rollouts are short, and at their end a save is exact
            self._parts.collector.stop_requested = True

    def _name_last_checkpoint(self, error: HurtleError) -> None:
        """Add to the error what was saved."""
        last = self._checkpoints.latest()
        said = f"Last checkpoint: {last}" if last is not None else "No checkpoint was written yet."
        between = "\n" if "\n" in str(error) else " "
        error.args = (f"{error}{between}{said}", *error.args[1:])


def _after(steps: int, every: int) -> int:
    """The next multiple of `every`, the same however often a run was stopped and resumed."""
    return (steps // every + 1) * every if every else 0
