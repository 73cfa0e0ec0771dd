"""`SideBySide`: many seeds of one off-policy algorithm, whose gradient steps are taken together.

rollout of all seeds → one replay buffer, sampled by seed → the algorithm's `gradient_step` on batches [seeds, B, …] → for each
network one gradient of all seeds, one optimizer step, one move of the targets. Knows no loss.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hurtle.algorithms.off_policy import OffPolicy
from hurtle.algorithms.ppo import not_finite
from hurtle.algorithms.seeds_losses import Losses
from hurtle.algorithms.trained import Trained, batch_norms_of
from hurtle.buffers.device_replay import DeviceReplay
from hurtle.buffers.replay import REPLAY_STREAM, Transitions
from hurtle.buffers.replay_groups import forget, load_group, state_of_group
from hurtle.buffers.rollout import Rollout
from hurtle.contracts import Metrics, Weights
from hurtle.errors import HurtleError, NonFiniteError
from hurtle.kernels.flat_parameters import FlatRows
from hurtle.kernels.optimizers import FlatOptimizer
from hurtle.native.rng import stream_state
from hurtle.policies.batch_norm_networks import settle


class SideBySide(OffPolicy):
    """Learners that differ only in their seeds, as one learner.

    Their parameters, moments and target networks become rows of matrices, one matrix per network: each learner's policy acts,
    exports and saves as before, with the weights of the last step. The loss is that of the algorithm, mapped over the seeds by
    `torch.func`, so that its products become batched ones. A seed whose gradient is not finite is left as it is; the others
    learn on.

    Rollouts have the rows of the first seed, then those of the second, and so on. `learning_starts`, `replay_ratio` and
    `capacity` are per seed. Draws come from one stream, so that a seed does not learn what it would alone.

    Args:
        learners: Of one class, config and shape, made for the device gear.

    Attributes:
        learners: As given.
        seed_metrics: The newest metrics of each seed; NaN where a loss is not finite.

    Raises:
        HurtleError: The learners do not fit together, or use what has no version for many seeds.
    """

    def __init__(self, learners: Sequence[OffPolicy]):
        _check(learners)
        first = learners[0]
        self.learners, self.axes = list(learners), (len(learners),)
        self.METRICS, self.period = first.METRICS, first.period
        super().__init__(first.policy, first.config, first.setup)
        self.updates, self.steps, self.gradient_steps, self._owed = _counts(first)
        self._is_resumed = first._is_resumed or first.updates > 0
        self.seed_metrics: list[dict[str, float]] = []

        names = list(first._trained)
        parts = {name: [learner._trained[name] for learner in learners] for name in names}
        losses = Losses(self.setup.compiled)
        together = {name: TrainedTogether(name, parts[name], losses) for name in names}
        rows_of = {id(parts[name][0].flat): together[name].rows for name in names}
        self._trained.update(together)
        self._moves: list[tuple[FlatRows, FlatRows]] = []  # target networks of all seeds, and what they follow
        for k in range(len(first._targets)):
            pairs = [pair for learner in learners if (pair := learner._flat_targets[k]) is not None]
            targets = FlatRows([target for target, _ in pairs])
            losses.add(f"target_{k}", targets)
            self._moves.append((targets, rows_of[id(pairs[0][1])]))
        self._targets = [pair for learner in learners for pair in learner._targets]

        epsilons = torch.stack([learner._acting.epsilon for learner in learners])
        for learner, epsilon in zip(learners, epsilons, strict=True):
            learner._acting.epsilon = epsilon
        self._acting = SimpleNamespace(epsilon=epsilons)
        self._steps = self._step_taker(first, parts)

    def _step_taker(self, first: OffPolicy, parts: dict[str, list[Trained]]) -> OffPolicy:
        """The first learner with its networks, but which steps all seeds and draws from this learner's stream."""
        taker = copy.copy(first)
        together = {id(own[0]): self._trained[name] for name, own in parts.items()}
        for name, value in list(vars(taker).items()):
            if id(value) in together:
                setattr(taker, name, together[id(value)])
            elif callable(value) and hasattr(type(taker), name):
                delattr(taker, name)  # a compiled loss: here it is compiled with its gradient
        taker.generator = self.generator
        taker.join(self.learners)
        return taker

    def gradient_step(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """See `OffPolicy.gradient_step`: of all seeds, [N, B] and [N, METRICS]."""
        self._steps.gradient_steps = self.gradient_steps
        return self._steps.gradient_step(batch)

    def update(self, experience: Rollout, progress: float = 0.0) -> Metrics:
        """See `OffPolicy.update`; the learners count along, so that each can be saved by itself."""
        found = super().update(experience, progress)
        for learner in self.learners:
            learner.updates, learner.steps, learner.gradient_steps, learner._owed = _counts(self)
        return found

    def observe(self, rewards: Tensor, ended: Tensor, valid: Tensor, columns: np.ndarray | None) -> None:
        """See `OffPolicy.observe`; each learner sees its own rows."""
        own = (part.chunk(len(self.learners), 1) for part in (rewards, ended, valid))
        for learner, *parts in zip(self.learners, *own, strict=True):
            learner.observe(*parts, None)

    def prepared(self, batch: Transitions) -> Transitions:
        """See `OffPolicy.prepared`."""
        return self._steps.prepared(batch)

    def own_state(self) -> dict[str, Any]:
        """See `OffPolicy.own_state`: that of each seed."""
        return {"seeds": [learner.own_state() for learner in self.learners]}

    def load_own_state(self, saved: dict[str, Any]) -> None:
        """See `OffPolicy.load_own_state`."""
        for learner, own in zip(self.learners, saved["seeds"], strict=True):
            learner.load_own_state(own)

    def state_of(self, n: int) -> dict[str, Any]:
        """The state of one learner with its part of the replay buffer: it can go on alone, or side by side."""
        is_saved = self.config.save_replay and self._replay is not None
        own = {"replay": state_of_group(self.replay, n) if is_saved else None, "generator": self.generator.get_state()}
        return {**self.learners[n].state_dict(), **own}

    def load_states(self, states: Iterable[dict[str, Any]]) -> None:
        """Continue from the states of single learners, which are taken one at a time. Call `prepare` first.

        Raises:
            HurtleError: They have learned for unequally long.
        """
        counts, problem = set(), ""
        for n, (learner, saved) in enumerate(zip(self.learners, states, strict=True)):
            learner.load_state_dict({**saved, "replay": None})
            counts.add(tuple(saved["counts"]))
            if not n and len(saved["generator"]) == len(self.generator.get_state()):
                self.generator.set_state(saved["generator"].cpu())
            try:
                if saved["replay"] is not None and not problem:
                    load_group(self.replay, n, saved["replay"])
            except HurtleError as error:
                problem = str(error)
                print(f"hurtle: begins with an empty replay buffer. {problem}", file=sys.stderr, flush=True)
            problem = problem or ("none was saved" if saved["replay"] is None else "")
        if len(counts) > 1:
            raise HurtleError("Only seeds that have learned for equally long can go on side by side.")
        (self.updates, self.steps, self.gradient_steps, self._owed) = counts.pop()
        self._is_resumed = True
        if problem:
            forget(self.replay)
            self.steps = 0
        else:
            self._rollouts = 2
        for learner in self.learners:
            learner.updates, learner.steps, learner.gradient_steps, learner._owed = _counts(self)

    def exploration(self, progress: float) -> float:
        """See `OffPolicy.exploration`."""
        return self._steps.exploration(progress)

    @torch.no_grad()
    def move_targets(self) -> None:
        """Move the target networks of all seeds."""
        for target, source in self._moves:
            target.values.lerp_(source.values, self.config.target_rate)

    def _new_replay(self, experience: Rollout) -> DeviceReplay:
        config, seeds = self.config, len(self.learners)
        return DeviceReplay(
            experience, config.capacity * seeds, n_step=config.n_step, gamma=config.gamma,
            priority_alpha=config.priority_alpha, seed=stream_state(self.setup.seed, REPLAY_STREAM) >> 34, groups=seeds,
        )  # fmt: skip

    def checked(self, numbers: list[Any]) -> dict[str, float]:
        """The METRICS by name, means over the seeds whose losses are finite; and the share of the others, if there are any.

        Raises:
            NonFiniteError: No seed's loss is finite.
        """
        found = torch.tensor(numbers)
        good = found[:, self.METRICS.index("value_loss")].isfinite() & ~found.isinf().any(1)
        self.seed_metrics = [dict(zip(self.METRICS, row, strict=True)) for row in numbers]
        if not good.any():
            raise not_finite(self.seed_metrics[0])
        means = dict(zip(self.METRICS, found[good].nanmean(0).tolist(), strict=True))
        return means if good.all() else {**means, "diverged": 1.0 - float(good.float().mean())}

    def failures(self) -> list[NonFiniteError | None]:
        """What is wrong with each seed's newest metrics."""
        found: list[NonFiniteError | None] = []
        for metrics in self.seed_metrics:
            try:
                self.learners[0].checked(list(metrics.values()))
                found.append(None)
            except NonFiniteError as error:
                found.append(error)
        return found

    def leave(self, n: int) -> None:
        """A seed is not recorded any more; it steps along, or is left as it is where its gradients are not finite."""

    def weights(self) -> Weights:
        """The weights of all seeds: `flat` is [N, parameters], and buffers have an axis of seeds first."""
        policies = [learner.policy for learner in self.learners]
        same = zip(*(policy.parameters() for policy in policies), strict=True)
        flat = torch.cat([torch.stack([part.detach().reshape(-1) for part in parts]) for parts in same], 1)
        buffers = tuple(torch.stack(parts) for parts in zip(*(policy.buffers() for policy in policies), strict=True))
        return Weights(flat, self.updates, buffers)


class TrainedTogether(Trained):
    """A network of all seeds, their optimizers as one.

    Args:
        name: The network's name.
        parts: The seeds' own, which share the memory from now on.
        losses: What computes gradients.
    """

    def __init__(self, name: str, parts: list[Trained], losses: Losses):
        self.name, self.parts, self.losses = name, parts, losses
        first = parts[0].optimizer
        self.rows = FlatRows([part.flat for part in parts if part.flat is not None])
        self.optimizer = FlatOptimizer(self.rows, "adam", first.settings.eps, max_grad_norm=parts[0].max_grad_norm)
        self.learning_rate = parts[0].learning_rate
        self.optimizer.set_learning_rate(self.learning_rate)
        for n, part in enumerate(parts):
            part.optimizer.join(self.optimizer, n)
        self._batch_norms = BatchNormsTogether(self.rows, [part.module for part in parts])
        losses.add(name, self.rows, self._batch_norms.buffers)

    @torch.no_grad()
    def descend(self, loss: Callable[..., tuple[Tensor, ...]], inputs: tuple[Any, ...], dtype: torch.dtype | None) -> Any:
        """See `Trained.descend`; all tensors of the inputs and of what it returns have an axis of seeds first."""
        self.rows.gradients, others = self.losses.gradients(self.name, loss, inputs, dtype)
        return self.optimizer.step(), *others

    def check(self) -> None:
        """See `Trained.check`."""
        for part in self.parts:
            part.check()

    @torch.no_grad()
    def settle(self, found: Tensor, good: Tensor) -> None:
        """See `Trained.settle`; an axis of seeds first."""
        self._batch_norms.settle(found, good)

    @torch.no_grad()
    def step_along(self, slope: Tensor) -> None:
        """See `Trained.step_along`; one slope for each seed."""
        self.rows.gradients[:, 0] = slope
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Weights and moments of each seed."""
        return {"seeds": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with saved weights and moments.

        Raises:
            HurtleError: They are of another number of seeds, or of one learner by itself.
        """
        if (count := len(saved.get("seeds", ()))) != len(self.parts):
            raise HurtleError(f"The checkpoint is of {count or 'no'} seeds side by side, not of {len(self.parts)}.")
        for part, state in zip(self.parts, saved["seeds"], strict=True):
            part.load_state_dict(state)


class BatchNormsTogether:
    """The layers with batch norm of a network of all seeds: their running statistics as rows of one tensor.

    Args:
        rows: The parameters of all seeds.
        modules: The network of each.

    Attributes:
        buffers: The statistics by their names in the network, an axis of seeds first; empty if it has no batch norm.
    """

    def __init__(self, rows: FlatRows, modules: list[nn.Module]):
        self.buffers: dict[str, Tensor] = {}
        each = [batch_norms_of(module) for module in modules]
        place, first = each[0]
        if first is None:
            return
        self._weights = [view for name, view in rows.views().items() if name.startswith(f"{place}.weights.")]
        for name in ("statistics", "batches"):
            together = torch.stack([getattr(layers, name) for _, layers in each])
            for (_, layers), own in zip(each, together, strict=True):
                setattr(layers, name, own)
            self.buffers[f"{place}.{name}"] = together
        self._statistics, self._batches = self.buffers.values()

    def settle(self, found: Tensor, good: Tensor) -> None:
        """See `Trained.settle`; an axis of seeds first."""
        settle(self._weights, self._statistics, self._batches, found, good)


def _common(learner: OffPolicy) -> tuple[Any, ...]:
    """What learners side by side have in common."""
    setup, rewards = learner.setup, learner.rewards
    return type(learner), learner.config, learner.device, setup.precision, setup.compiled, setup.num_rows, rewards.mode


def _counts(learner: OffPolicy) -> tuple[int, int, int, float]:
    """How long it has learned."""
    return learner.updates, learner.steps, learner.gradient_steps, learner._owed


def _check(learners: Sequence[OffPolicy]) -> None:
    """Reject learners that cannot learn side by side."""
    if not learners:
        raise HurtleError("Give at least one learner.")
    first = learners[0]
    if any(_common(one) != _common(first) for one in learners):
        raise HurtleError("Only learners of one class, with equal settings and on one device, can learn side by side.")
    if any(_counts(one) != _counts(first) for one in learners):
        raise HurtleError("Only learners that have learned for equally long can go on side by side.")
    if len({id(one.policy) for one in learners}) < len(learners):
        raise HurtleError("Each learner needs a policy of its own: two of them train the same.")
    if first._graphs is None:
        raise HurtleError("Learners side by side need CUDA graphs: make them for the device gear, with LearnerSetup(graphs=…).")
    if any(one._graphs is not None and one._graphs.has_captured for one in learners):
        raise HurtleError("These learners have taken gradient steps: save them, and load their states into new ones.")
    if any(part.flat is not None and part.flat.is_row for one in learners for part in one._trained.values()):
        raise HurtleError("These learners are side by side with others already.")
    if first.policy.is_recurrent:
        raise HurtleError("Policies with a memory do not learn side by side: train the seeds one by one.")
    if getattr(first.config, "noisy", False):
        raise HurtleError("Noisy layers cannot learn side by side: all seeds would have the same noise. Set noisy=False.")
    if first.policy.normalizer is not None or first.rewards.normalizer is not None:
        raise HurtleError(
            "Running statistics are not kept for each of many seeds: use normalize_observations=False and a reward_mode "
            "other than 'normalize', or train the seeds one by one."
        )
