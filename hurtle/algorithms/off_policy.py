"""`OffPolicy`: what DQN, SAC, TD3 and their kin share: remember rollouts, then take gradient steps on what is drawn.

rollout → replay buffer → batches → the algorithm's `gradient_step` → target networks. Knows no loss.
"""

from __future__ import annotations

import copy
import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.off_policy_graphs import StepGraphs
from hurtle.algorithms.ppo import AUTOCAST, not_finite
from hurtle.algorithms.replay_settings import ReplayConfig
from hurtle.algorithms.trained import Trained
from hurtle.buffers.device_replay import DeviceReplay
from hurtle.buffers.replay import REPLAY_STREAM, Replay, Transitions
from hurtle.buffers.rollout import Rollout, torch_dtype
from hurtle.collect.rewards import RewardRule
from hurtle.contracts import Learner, Metrics, Weights
from hurtle.errors import HurtleError
from hurtle.kernels.cuda_graphs import Graphs
from hurtle.kernels.flat_parameters import FlatParameters
from hurtle.kernels.ranks import ALONE, Ranks
from hurtle.native.rng import stream_state
from hurtle.policies.numpy_acting import see
from hurtle.policies.policy import Policy

NOISE_STREAM, WEIGHTS_STREAM = 12, 13
"""The random streams of a learner's own draws, such as the actions of SAC's loss, and of its critics' initial weights."""

AGE_EVERY = 32
"""Updates between measurements of how old the sampled steps are."""


class OffPolicy(Learner):
    """The learner, without a loss.

    Subclasses set `METRICS` and define `gradient_step`. They make networks with `trained` and `target_of`, so that these are
    stepped, moved and saved here.

    Args:
        policy: What collectors act with; trained in place.
        config: The settings.
        setup: Seed, reward preprocessing, number of rows.
    """

    METRICS: tuple[str, ...] = ()
    """What `gradient_step` returns, in order; value_loss comes first."""
    period = 1
    """Gradient steps after which it does the same again; see TD3."""
    takes_lag = True
    rank_state = ("generator", "rewards", "counts", "replay")
    axes: tuple[int, ...] = ()
    """Axes of a batch before its transitions: none, or one of seeds that learn side by side."""

    def __init__(self, policy: Policy, config: Any, setup: LearnerSetup | None = None):
        self.policy, self.setup = policy, setup or LearnerSetup()
        self.config: ReplayConfig = config
        self.device = next(policy.parameters()).device
        self.ranks: Ranks = self.setup.ranks or ALONE
        self._seed = self.setup.drawing_seed
        self.generator = torch.Generator(self.device).manual_seed(stream_state(self._seed, NOISE_STREAM) >> 1)
        self.rewards: RewardRule = (self.setup.rewards or RewardRule()).to(self.device)
        self._autocast = AUTOCAST[self.setup.precision]
        self._is_plain = policy.normalizer is None and self.rewards.normalizer is None  # batches are learned from as they are
        self._obs_dtype = torch_dtype(policy.observation_space.dtype)
        self.updates = self.steps = self.gradient_steps = 0
        self._owed = 0.0  # gradient steps, a fraction
        self._rollouts = 0  # in the replay buffer
        self._is_resumed = False
        self._has_begun = False  # learned already, from the replay buffer that is continued
        self._age, self._next_age = math.nan, 0
        self._trained: dict[str, Trained] = {}
        self._targets: list[tuple[nn.Module, nn.Module]] = []
        self._flat_targets: list[tuple[FlatParameters, FlatParameters] | None] = []  # of the same, where parameters are flat
        self._acting: Any = policy.network
        self._replay: Any = None
        self._graphs: StepGraphs | None = None
        wants_graphs = self.setup.graphs is not None or (self.device.type == "cuda" and not self.setup.is_pool)
        if wants_graphs and not self.setup.lags:  # actors must not use the GPU while a graph is captured
            self._graphs = StepGraphs(self, self.setup.graphs or Graphs(self.device, self.ranks.capturable))
        self._saved_replay: dict[str, Any] | None = None

    # For subclasses.

    @abstractmethod
    def gradient_step(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """Take one gradient step.

        Args:
            batch: Observations as the policy sees them, rewards scaled; on the learner's device. Side by side, its tensors have
                an axis of seeds first, `descend` gives each seed's part to the loss, and what it returns has that axis too.

        Returns:
            The TD errors [B], and the METRICS, one number each.
        """

    def exploration(self, progress: float) -> float:
        """The share of random actions after the first `learning_starts` steps."""
        return 0.0

    def observe(self, rewards: Tensor, ended: Tensor, valid: Tensor, columns: np.ndarray | None) -> None:
        """Look at the rewards of a rollout, [T, N] each, before it is remembered; see `Rollout` for what they mean."""

    def own_state(self) -> dict[str, Any]:
        """What to save besides networks, targets and counts."""
        return {}

    def load_own_state(self, saved: dict[str, Any]) -> None:
        """Continue with what `own_state` saved."""

    def join(self, learners: Sequence[Any]) -> None:
        """Take gradient steps of all these seeds from now on: what each has of its own gets an axis of seeds first."""

    def can_draw(self) -> bool:
        """Whether the replay buffer holds what a batch needs; one rollout may have no known successors."""
        return self._rollouts > 1

    def draw(self, beta: float | Tensor) -> Any:
        """A batch from the replay buffer, as `gradient_step` takes it once it is `prepared`."""
        return self.replay.sample(self.config.batch_size, beta)

    def trained(self, name: str, module: nn.Module, learning_rate: float | None = None) -> Trained:
        """Train a module from now on; `name` is its name in checkpoints."""
        flat = self._graphs is not None
        self._trained[name] = Trained(module.to(self.device), self.config, learning_rate, flat, self.ranks)
        return self._trained[name]

    @contextmanager
    def own_stream(self) -> Iterator[None]:
        """Initialize weights from the learner's seed, leaving torch's global stream as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stream_state(self.setup.seed, WEIGHTS_STREAM) >> 1)
            yield

    def target_of(self, module: nn.Module) -> Any:
        """A copy of a module that follows it slowly."""
        target = copy.deepcopy(module).requires_grad_(False)
        self._targets.append((target, module))
        sources = [part.flat for part in self._trained.values() if part.module is module and part.flat is not None]
        flat = FlatParameters(target.requires_grad_(), has_gradients=False, padded=True) if sources else None
        target.requires_grad_(False)
        self._flat_targets.append(None if flat is None else (flat, sources[0]))
        return target

    def compile(self, *methods: str) -> None:
        """Run methods of this learner through `torch.compile`, if the user asks for it."""
        for name in methods if self.setup.compiled else ():
            setattr(self, name, torch.compile(getattr(self, name)))

    def descend(self, part: Trained, loss: Callable[..., tuple[Tensor, ...]], *inputs: Any) -> tuple[Tensor, ...]:
        """One gradient step of a network on `loss(*inputs)[0]`.

        Returns:
            The gradient's norm, and what `loss` returned besides the loss.
        """
        return part.descend(loss, inputs, self._autocast)

    def reported(self, numbers: Tensor, norm: Tensor) -> Tensor:
        """Metrics of a gradient step; NaN, which `checked` finds, if the gradient's norm is not finite."""
        return torch.where(norm.isfinite().unsqueeze(-1), numbers, torch.nan)

    def normals(self, *shape: int) -> Tensor:
        """Standard normals from the learner's own stream."""
        return torch.randn(shape, generator=self.random, device=self.device)

    @property
    def random(self) -> torch.Generator | None:
        """The learner's own stream; None: torch's, which CUDA graphs know."""
        return None if self.device.type == "cuda" else self.generator

    # What a runner calls.

    def prepare(self, experience: Rollout) -> None:
        """Make the replay buffer: a rollout gives the shapes. Target networks begin as the networks are now (`fine_tune`)."""
        self._replay = self._new_replay(experience)
        for target, source in self._targets if not self._is_resumed else ():
            target.load_state_dict(source.state_dict())
        if self._saved_replay is not None:
            try:
                self._replay.load_state_dict(self._saved_replay)
                self._rollouts = 2
            except HurtleError as error:
                print(f"hurtle: begins with an empty replay buffer. {error}", file=sys.stderr, flush=True)
                self.steps, self._has_begun = 0, False
            self._saved_replay = None

    def _new_replay(self, experience: Rollout) -> Any:
        config = self.config
        if self._graphs is not None:
            return DeviceReplay(
                experience, config.capacity, n_step=config.n_step, gamma=config.gamma, priority_alpha=config.priority_alpha,
                seed=stream_state(self._seed, REPLAY_STREAM) >> 34,
            )  # fmt: skip
        return Replay(
            experience,
            config.capacity,
            num_rows=self.setup.num_rows,
            n_step=config.n_step,
            gamma=config.gamma,
            frame_stack=config.frame_stack,
            priority_alpha=config.priority_alpha,
            seed=self._seed,
            folder=config.replay_folder or None,
        )

    @property
    def replay(self) -> Any:
        """The replay buffer; `prepare` makes it."""
        if self._replay is None:
            raise HurtleError("Call prepare(rollout) first: it makes the replay buffer.")
        return self._replay

    def update(self, experience: Rollout, progress: float = 0.0) -> Metrics:
        """Remember the rollout, then learn from what is remembered; metrics are means over the gradient steps.

        On a GPU, metrics are those of earlier gradient steps.
        """
        config = self.config
        for part in self._trained.values():
            part.check()
        self._see(experience)
        self.replay.add(experience)
        taken: float = experience.num_valid // math.prod(self.axes)  # of each seed
        self.updates += 1
        self.steps += int(taken)
        self._rollouts += 1
        is_learning = (self._has_begun or self.steps * self.ranks.size >= config.learning_starts) and self.can_draw()
        if self.ranks.several:  # all take as many gradient steps
            total, ready = self.ranks.sums(taken, is_learning)
            taken, is_learning = total / self.ranks.size, ready == self.ranks.size
        has_learned = self.ranks.several and self.gradient_steps > 0  # it waits for one that has joined with an empty buffer
        epsilon = self.exploration(progress) if is_learning or has_learned else 1.0
        self._acting.epsilon.fill_(epsilon)
        metrics = {"replay": len(self.replay) / self.replay.capacity, "epsilon": epsilon}
        if is_learning:
            if config.anneal_learning_rate:
                self.scale_learning_rates(1.0 - progress)
            self._owed += config.replay_ratio * taken
            count, self._owed = int(self._owed), self._owed % 1.0
            metrics |= self._learn(count, progress)
        return metrics

    def scale_learning_rates(self, factor: float) -> None:
        """Set all learning rates to a part of what they were at first."""
        for part in self._trained.values():
            part.optimizer.set_learning_rate(factor * part.learning_rate)

    def _learn(self, count: int, progress: float) -> dict[str, float]:
        if not count:
            return {}
        config, seen = self.config, []
        beta = config.priority_beta + (1.0 - config.priority_beta) * progress
        if self._graphs is not None:
            return self._graphs.run(count, beta)
        for _ in range(count):
            drawn = self.draw(beta)
            errors, numbers = self.gradient_step(self.prepared(drawn))
            self.gradient_steps += 1
            if self.gradient_steps % config.target_every == 0:
                self.move_targets()
            if config.priority_alpha:
                self.replay.update_priorities(drawn.ids, errors)
            seen.append(numbers)
        found = self.checked(self.mean_metrics(seen).tolist())
        if self.updates >= self._next_age:
            self._age = float(self.replay.ages(drawn.ids).mean()) * self.replay.num_rows
            self._next_age = self.updates + AGE_EVERY
        return {**found, "replay_age": self._age}

    def mean_metrics(self, seen: list[Tensor]) -> Tensor:
        """Means of the METRICS over gradient steps. Where one is NaN, the step has none; but every step has a value loss."""
        found = seen[0]
        if len(seen) > 1:
            every = torch.stack(seen)
            found = torch.cat([every[..., :1].mean(0), every[..., 1:].nanmean(0)], -1)
        return self.ranks.mean_(found.clone()) if self.ranks.several else found

    def checked(self, numbers: list[float]) -> dict[str, float]:
        """The METRICS by name.

        Raises:
            NonFiniteError: A loss is not finite.
        """
        found = dict(zip(self.METRICS, numbers, strict=True))
        if math.isinf(sum(found.values())) or math.isnan(found["value_loss"]):
            raise not_finite(found)
        return found

    @torch.no_grad()
    def _see(self, rollout: Rollout) -> None:
        """Update the statistics of observations and rewards, and the algorithm's own."""
        if self.policy.normalizer is not None:
            self.policy.normalizer.update(rollout.obs, rollout.valid, self.ranks)
        if self.rewards.mode == "sign":
            rollout.rewards.sign_()  # before they are summed over n steps
        elif self.rewards.normalizer is not None:  # these are stored as they are: the scale changes
            ended = rollout.terminated | rollout.truncated
            self.rewards.normalizer.scale(rollout.rewards, ended, rollout.valid, rollout.columns, self.ranks)
        self.observe(rollout.rewards, rollout.terminated | rollout.truncated, rollout.valid, rollout.columns)

    @torch.no_grad()
    def prepared(self, batch: Any) -> Any:
        """A batch as `gradient_step` takes it."""
        if self._is_plain and batch.obs.device == self.device and batch.obs.dtype == self._obs_dtype:
            return batch
        observed = {name: getattr(batch, name) for name in ("obs", "next_obs") if hasattr(batch, name)}
        batch = batch._replace(**{name: see(self.policy, obs, self.device) for name, obs in observed.items()})
        if (normalizer := self.rewards.normalizer) is not None:
            scaled = batch.rewards / (normalizer.variance + normalizer.eps).sqrt().float().to(batch.rewards.device)
            batch = batch._replace(rewards=scaled.clamp(-normalizer.clip, normalizer.clip))
        if batch.rewards.device == self.device:
            return batch
        return type(batch)(*(_moved(part, self.device) for part in batch))

    @torch.no_grad()
    def move_targets(self) -> None:
        """Move target networks toward the trained ones."""
        rate = self.config.target_rate
        for (target, source), flat in zip(self._targets, self._flat_targets, strict=True):
            if flat is not None:
                flat[0].values.lerp_(flat[1].values, rate)
                continue
            own: list[Tensor] = list(target.parameters())
            new: list[Tensor] = list(source.parameters())
            torch._foreach_copy_(own, new) if rate == 1.0 else torch._foreach_lerp_(own, new, rate)

    def pending(self, wait: bool = False) -> Metrics:
        """See `Learner.pending`."""
        return {} if self._graphs is None else self._graphs.pending(wait)

    def seconds(self) -> dict[str, float]:
        """See `Learner.seconds`."""
        return {} if self._graphs is None else self._graphs.graphs.seconds("learn")

    def weights(self) -> Weights:
        """See `Learner.weights`."""
        return Weights.of(self.policy, self.updates)

    def state_dict(self) -> dict[str, Any]:
        """Optimizers, networks besides the policy, the replay buffer unless it is left out, and counts."""
        replay = self.replay.state_dict() if self.config.save_replay and self._replay is not None else None
        return {
            "trained": {name: part.state_dict() for name, part in self._trained.items()},
            "targets": [target.state_dict() for target, _ in self._targets],
            "generator": self.generator.get_state(),
            "rewards": self.rewards.state_dict(),
            "counts": (self.updates, self.steps, self.gradient_steps, self._owed),
            "replay": replay,
            **self.own_state(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state. Without its replay buffer, `learning_starts` steps are collected first."""
        for name, part in self._trained.items():
            part.load_state_dict(saved["trained"][name])
        for (target, _), state in zip(self._targets, saved["targets"], strict=True):
            target.load_state_dict(state)
        generator = saved["generator"].cpu()
        if len(generator) == len(self.generator.get_state()):  # else it comes from another kind of device
            self.generator.set_state(generator)
        self.rewards.load_state_dict(saved["rewards"])
        self.updates, self.steps, self.gradient_steps, self._owed = saved["counts"]
        self._saved_replay, self._is_resumed = saved["replay"], True
        self._has_begun = self._saved_replay is not None and self.gradient_steps > 0
        if self._saved_replay is None:
            self.steps = 0
        self.load_own_state(saved)


def _moved(part: Any, device: torch.device) -> Any:
    """A part of a batch on another device."""
    if part is None or isinstance(part, Tensor):
        return part if part is None else part.to(device)
    return tuple(each.to(device) for each in part)
