"""`EpochsTogether`: many seeds of PPO or A2C, whose updates are computed together on the device.

rollout of all seeds → advantages → epochs of minibatches [seeds, B], each seed's in its own order → the algorithm's loss mapped
over the seeds → one optimizer step on the rows of all parameters. Knows no loss.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.device_actor_critic import DeviceActorCritic, steps_of
from hurtle.algorithms.device_epochs import NEXT_KEY, draw_key
from hurtle.algorithms.ppo import explained_variance_on_device, not_finite
from hurtle.algorithms.seeds_losses import Losses
from hurtle.buffers.rollout import Done, Minibatch, Rollout
from hurtle.collect.postprocess import Postprocess
from hurtle.collect.rewards import RewardRule
from hurtle.contracts import Learner, Metrics, Weights
from hurtle.errors import HurtleError, NonFiniteError, UnsupportedError
from hurtle.kernels.cuda_graphs import MOST_IN_FLIGHT, WARM_UPS, Readback
from hurtle.kernels.flat_parameters import FlatRows
from hurtle.kernels.optimizers import FlatOptimizer
from hurtle.kernels.row_kernels import RowKernels
from hurtle.policies.together import PoliciesTogether


class EpochsTogether(Learner):
    """Learners that differ only in their seeds, as one learner.

    Each seed learns what it would learn alone, up to rounding: from its own rows, in its own order of minibatches, with its own
    statistics, gradient norm and KL stop. Its parameters and moments become rows of matrices. One whose gradient is not finite
    is left as it is; the others learn on.

    Rollouts have the rows of the first seed, then those of the second, and so on.

    Args:
        learners: Of one class and config, made for the device gear; new ones.
        setup: Precision, and the graphs, which are shared with the collector. With CUDA graphs, fused kernels replace the
            policies if they support them.

    Attributes:
        learners: As given; each can be saved by itself.
        policy: Acts for all seeds.
        seed_metrics: The newest metrics of each seed; NaN where a loss is not finite.

    Raises:
        HurtleError: The learners do not fit together, or do what has no version for many seeds.
    """

    def __init__(self, learners: Sequence[DeviceActorCritic], setup: LearnerSetup):
        _check(learners)
        self.learners, first = list(learners), learners[0]
        self.config, self.passes, self.device, self.graphs = first.config, first.passes, first.device, setup.graphs
        self._rows = FlatRows([learner.parameters for learner in learners])
        own = first.optimizer
        settings = own.settings
        self.optimizer = FlatOptimizer(self._rows, settings.name, settings.eps, settings.weight_decay, own.max_grad_norm)
        for n, learner in enumerate(learners):
            learner.optimizer.join(self.optimizer, n)
        self.policy = PoliciesTogether([learner.policy for learner in learners], self._rows)
        self._losses = Losses(setup.compiled)
        self._losses.add("policy", self._rows)
        rewards = RewardRule.together([learner.postprocess.rewards.to(self.device) for learner in learners])
        past = first.postprocess
        self.postprocess = Postprocess(self.policy, past.gamma, past.gae_lambda, rewards, first.half)
        self._kernels, self._readback = RowKernels(self.device), Readback(self.device)
        self._names = first.METRICS
        seeds = len(learners)
        self._keys = torch.zeros(seeds, dtype=torch.int64, device=self.device)
        is_gpu = self.device.type == "cuda"
        self._staged = [torch.zeros(seeds, dtype=torch.int64, pin_memory=is_gpu) for _ in range(MOST_IN_FLIGHT + 2)]
        self._sums = torch.zeros(seeds, len(self._names) + 1, device=self.device)  # of minibatches so far, and their number
        self._epoch_kl = torch.zeros(seeds, 2, device=self.device)
        self._kl_and_count = torch.tensor([self._names.index("approx_kl"), len(self._names)], device=self.device)
        self._goes_on = torch.ones(seeds, dtype=torch.bool, device=self.device)  # beyond the target KL an update ends
        self._is_in = torch.ones_like(self._goes_on)
        self._left: set[int] = set()
        self._failures: dict[int, NonFiniteError] = {}
        self._explained = torch.zeros(seeds, device=self.device)
        self._one = torch.ones(seeds, 1, device=self.device)
        self._rates: list[dict[str, float]] = []
        self._rollout: Rollout | None = None
        self.seed_metrics: list[dict[str, float]] = []
        if self.graphs.enabled:
            with suppress(UnsupportedError):
                self.fuse(first.fused_kernels(self._rows.values, setup))

    def fuse(self, kernels: Any) -> None:
        """Train with fused kernels (a `FusedMLP`, made from the rows of parameters) instead of the policies."""
        self.acting_kernels = kernels

    # What a runner calls.

    def prepare(self, rollout: Rollout) -> None:
        """Capture the update; see `Learner.prepare`."""
        done = rollout.done
        before = copy.deepcopy([(learner.policy.state_dict(), learner.state_dict()) for learner in self.learners])
        for _ in range(WARM_UPS + 1):
            rollout.done = done
            self.update(rollout)
        self.pending(wait=True)
        for learner, (weights, state) in zip(self.learners, before, strict=True):
            learner.policy.load_state_dict(weights)
            learner.load_state_dict(state)
        self.seed_metrics, self._failures = [], {}

    def update(self, rollout: Rollout, progress: float = 0.0) -> Metrics:
        """Learn from one rollout of all seeds; see `Learner.update`.

        Raises:
            NonFiniteError: No seed's losses of an earlier update were finite.
        """
        if rollout is not self._rollout:
            self._bind(rollout)
        staged = self._staged[self.learners[0].updates % len(self._staged)]  # copied when this update runs
        staged.copy_(torch.tensor([draw_key(learner.generator) for learner in self.learners]))
        self._keys.copy_(staged, non_blocking=True)
        rates = self.learners[0].rates(progress)
        self.optimizer.set_learning_rate(rates["learning_rate"])
        self._prepare()
        for _ in range(self.passes.epochs):
            self._epoch()
        rollout.done = Done.NOTHING
        for learner in self.learners:
            learner.updates += 1
        self._rates.append(rates)
        self._readback.send(torch.cat([self._sums, self._explained.unsqueeze(1)], 1))
        return self.pending()

    def pending(self, wait: bool = False) -> Metrics:
        """See `Learner.pending`: means over the seeds whose losses are finite, and the share of the others, if there are any.

        Raises:
            NonFiniteError: No seed that is left has finite losses.
        """
        found: dict[str, float] = {}
        for numbers in self._readback.arrived(wait):
            rates = self._rates.pop(0)
            means = numbers[:, :-2] / np.maximum(numbers[:, -2:-1], 1.0)
            own = [dict(zip(self._names, row, strict=True)) for row in means.tolist()]
            reported = self.learners[0].REPORTED or self._names
            rest = [{"explained_variance": explained, **rates} for explained in numbers[:, -1].tolist()]
            self.seed_metrics = [{name: a[name] for name in reported} | b for a, b in zip(own, rest, strict=True)]
            for n in np.flatnonzero(~np.isfinite(means).all(1)).tolist():
                self._failures.setdefault(n, not_finite(own[n]))
            learning = [metrics for n, metrics in enumerate(self.seed_metrics) if n not in self._left | self._failures.keys()]
            if learning:
                found = {name: float(np.mean([metrics[name] for metrics in learning])) for name in learning[0]}
        if self._failures:
            if len(self._left | self._failures.keys()) == len(self.learners):
                raise next(iter(self._failures.values()))
            found["diverged"] = len(self._failures) / len(self.learners)
        return found

    def failures(self) -> list[NonFiniteError | None]:
        """What was wrong with each seed's metrics since the last call."""
        found = [self._failures.get(n) for n in range(len(self.learners))]
        self._failures = {}
        return found

    def leave(self, n: int) -> None:
        """Stop training a seed."""
        self._left.add(n)
        self._is_in[n] = False

    def state_of(self, n: int) -> dict[str, Any]:
        """The state of one learner: it can go on alone, or side by side."""
        return self.learners[n].state_dict()

    def load_states(self, states: Iterable[dict[str, Any]]) -> None:
        """Continue from the states of single learners."""
        for learner, saved in zip(self.learners, states, strict=True):
            learner.load_state_dict(saved)

    def weights(self) -> Weights:
        """The weights of all seeds: `flat` is [N, parameters]."""
        return Weights(self._rows.values, self.learners[0].updates)

    def seconds(self) -> dict[str, float]:
        """See `Learner.seconds`."""
        return self.graphs.seconds("learn")

    def close(self) -> None:
        """Release the graphs and the rollout."""
        self.graphs.close()
        self._rollout = None
        for name in ("_prepare", "_epoch"):
            self.__dict__.pop(name, None)

    def _bind(self, rollout: Rollout) -> None:
        """Prepare to learn from this rollout repeatedly.

        Raises:
            HurtleError: Some of its steps may not count.
        """
        if not rollout.all_valid:
            raise HurtleError("Seeds whose agents may be absent do not learn side by side: use side_by_side=False.")
        self._rollout, self._done, seeds = rollout, rollout.done, len(self.learners)
        self._share = rollout.num_rows // seeds
        own = rollout.of_rows(0, self._share)
        sizes = self.learners[0].minibatch_sizes(own)
        self._steps = torch.arange(sum(sizes), device=self.device).repeat(seeds).view(seeds, -1)  # of each seed's own rows
        self._begins = torch.arange(seeds, device=self.device).unsqueeze(1) * self._share
        self._places = self._in_rollout(self._steps)
        self._minibatches = self._places.split(sizes, 1)  # the same memory
        self._prepare = self.graphs.wrap(self._prepare_update, "learn")
        self._epoch = self.graphs.wrap(self._learn_epoch, "learn")

    def _in_rollout(self, steps: Tensor) -> Tensor:
        """Flat indices into the rollout of steps that are numbered among each seed's own rows."""
        return steps.div(self._share, rounding_mode="floor") * self.rollout.num_rows + self._begins + steps % self._share

    # Everything below is captured: the same launches on the same memory, regardless of the data.

    @torch.no_grad()
    def _prepare_update(self) -> None:
        rollout = self.rollout
        rollout.done = self._done
        self.postprocess(rollout)
        self._sums.zero_()
        self._goes_on.copy_(self._is_in)
        self._explained.copy_(explained_variance_on_device(rollout, groups=len(self.learners)))
        if self.acting_kernels is not None:
            self.acting_kernels.begin(steps_of(rollout), self.learners[0].loss_settings())

    def _learn_epoch(self) -> None:
        if self.passes.shuffles:
            seeds, count = self._steps.shape
            self._kernels("shuffle_rows", seeds * count, count, self._keys, self._steps.view(-1))
            self._places.copy_(self._in_rollout(self._steps))
        self._epoch_kl.zero_()
        for chosen in self._minibatches:
            if self.acting_kernels is None:
                self._learn(self.rollout.steps(chosen))
            else:
                self._learn_fused(chosen)
        self._check_kl()
        self._keys.add_(NEXT_KEY)

    def _check_kl(self) -> None:
        """End the update of seeds beyond the target KL."""
        target = getattr(self.config, "target_kl", None)
        if target is not None:
            total, count = self._epoch_kl.unbind(1)
            self._goes_on.logical_and_(~(total / count > target))

    @torch.no_grad()
    def _learn(self, batch: Minibatch) -> None:
        """One step of all seeds; those that do not go on have a gradient of NaN, which the optimizer skips."""
        goes_on, first = self._goes_on.unsqueeze(1), self.learners[0]
        gradients, metrics = self._losses.gradients("policy", first.minibatch_loss, (batch,), first.half)
        self._rows.gradients.copy_(torch.where(goes_on, gradients, torch.nan))
        norm = self.optimizer.step()
        seen = torch.cat([torch.stack(metrics, 1), norm.unsqueeze(1), self._one], 1)
        seen = torch.where(goes_on, seen, 0.0)
        self._sums.add_(seen)
        self._epoch_kl.add_(seen[:, self._kl_and_count])

    @torch.no_grad()
    def _learn_fused(self, chosen: Tensor) -> None:
        """The same with fused kernels."""
        from hurtle.kernels.triton.loss import add_metrics

        kernels, goes_on = self.acting_kernels, self._goes_on
        stats, moments = kernels.gradients(chosen, self.learners[0].clip_range, goes_on=goes_on)
        norm = self.optimizer.step(kernels.partials)
        add_metrics(stats, moments, norm, self._sums, self._epoch_kl, goes_on)

    @property
    def rollout(self) -> Rollout:
        """The rollout that the update learns from."""
        assert self._rollout is not None
        return self._rollout


def _check(learners: Sequence[DeviceActorCritic]) -> None:
    """Reject learners that cannot learn side by side."""
    if not learners:
        raise HurtleError("Give at least one learner.")
    first = learners[0]
    if any((type(one), one.config, one.device) != (type(first), first.config, first.device) for one in learners):
        raise HurtleError("Only learners of one class, with equal settings and on one device, can learn side by side.")
    if len({id(one.policy) for one in learners}) < len(learners):
        raise HurtleError("Each learner needs a policy of its own: two of them train the same.")
    if any(one.parameters.is_row for one in learners):
        raise HurtleError("These learners are side by side with others already.")
    if not all(one.parameters.is_whole for one in learners):
        raise HurtleError("Learners with frozen parameters cannot learn side by side.")
    if first.passes.by_segments or getattr(first.config, "vtrace", False):
        raise HurtleError("Policies with a memory, priorities and V-trace have no version for seeds side by side.")
