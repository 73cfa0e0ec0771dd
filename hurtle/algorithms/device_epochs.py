"""`DeviceEpochs`: epochs of minibatches on the device; on a GPU, replays of two CUDA graphs. Algorithms add their losses.

rollout → postprocessing → epochs of random minibatches → gradients, flat → clipped → optimizer. Everything that changes from
update to update is in device tensors, and metrics are read once they have arrived. Knows no env.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.ppo import AUTOCAST, explained_variance_on_device, not_finite, shuffle_generator
from hurtle.algorithms.ppo_config import segments_per_minibatch
from hurtle.buffers.rollout import Done, Minibatch, Rollout
from hurtle.collect.postprocess import Postprocess
from hurtle.contracts import Learner, Metrics, Weights
from hurtle.errors import HurtleError, UnsupportedError
from hurtle.kernels.cuda_graphs import WARM_UPS, Graphs, Readback
from hurtle.kernels.flat_parameters import FlatParameters
from hurtle.kernels.optimizers import MOMENTS, FlatOptimizer
from hurtle.kernels.ranks import ALONE, Ranks
from hurtle.kernels.row_kernels import RowKernels
from hurtle.policies.policy import Policy

KEY_BITS = 62
NEXT_KEY = 0x9E3779B97F4A7C15 - (1 << 64)  # as an int64; from one epoch's key to the next


def draw_key(generator: torch.Generator) -> int:
    """The key of an update's minibatches."""
    return int(torch.randint(1 << KEY_BITS, (1,), generator=generator))


class Passes(NamedTuple):
    """How an update goes through its rollout."""

    by_segments: bool
    """Whether minibatches are whole segments, not single steps."""
    epochs: int = 1
    shuffles: bool = False
    """Whether each epoch has an order of its own."""


class DeviceEpochs(Learner):
    """A learner of rollouts with its entire update on the device, without a loss.

    Args:
        policy: Trained in place; its parameters become views of one flat tensor.
        config: With gamma, adam_eps and max_grad_norm; minibatch_size, unless `minibatch_sizes` does without it.
        setup: Seed, graphs, precision.
        passes: How an update goes through its rollout.
        return_lambda: λ of GAE.
        optimizer: Its name.
        weight_decay: That of the optimizer.

    Attributes:
        METRICS: What `gradients` returns, and the norm of the gradient.
        REPORTED: Those of them that the user sees; empty: all.
        DONE: What of the postprocessing is not needed.
        parameters: All of the policy's, flat.

    Raises:
        UnsupportedError: The optimizer has no flat version.
    """

    METRICS: tuple[str, ...] = ()
    REPORTED: tuple[str, ...] = ()
    DONE = Done.NOTHING
    rank_state = ("generator", "postprocess")

    def __init__(
        self,
        policy: Policy,
        config: Any,
        setup: LearnerSetup,
        passes: Passes,
        return_lambda: float,
        optimizer: str = "adam",
        weight_decay: float = 0.0,
    ):
        if optimizer not in MOMENTS:
            raise UnsupportedError(f"its optimizer is {optimizer}")
        self.policy, self.config, self.passes, self.updates = policy, config, passes, 0
        self.ranks: Ranks = setup.ranks or ALONE
        self.parameters = FlatParameters(policy)
        self.device = self.parameters.values.device
        self.graphs = setup.graphs or Graphs(self.device, self.ranks.capturable)
        self.half = AUTOCAST[setup.precision]
        self.postprocess = Postprocess(policy, config.gamma, return_lambda, setup.rewards, self.half)
        self.generator = shuffle_generator(setup.drawing_seed)
        self.optimizer = FlatOptimizer(
            self.parameters, optimizer, config.adam_eps, weight_decay, config.max_grad_norm, self.ranks
        )
        self.kernels = RowKernels(self.device)
        self._readback = Readback(self.device)
        self._buffers = tuple(policy.buffers())
        self._rollout: Rollout | None = None
        self._bound_to: Any = None  # the rollout, and what the graphs assume about it
        self._rates: deque[dict[str, float]] = deque()  # of updates that the device has not yet reported
        self.key = torch.zeros(1, dtype=torch.int64, device=self.device)  # of the minibatches; set before an update
        self.sums = torch.zeros(len(self.METRICS) + 1, device=self.device)  # over the minibatches so far, and their number
        self._one = torch.ones(1, device=self.device)
        self.explained = torch.zeros(1, device=self.device)

    # For subclasses.

    @abstractmethod
    def rates(self, progress: float) -> dict[str, float]:
        """What is annealed, for reports, `learning_rate` among it; called before each update."""

    @abstractmethod
    def gradients(self, batch: Minibatch, valid: Tensor | None, chosen: Tensor) -> Tensor:
        """Leave the gradients of one minibatch in the flat tensor, which is zero; captured.

        Args:
            batch: Of whole segments if `passes.by_segments`.
            valid: Which of its steps count; None: all.
            chosen: What `draw` returned.

        Returns:
            The METRICS but the last.
        """

    def minibatch_sizes(self, rollout: Rollout) -> list[int]:
        """The number of steps, or of segments, in each minibatch of an epoch.

        Raises:
            HurtleError: They would not all be of one size.
        """
        size, items = self.config.minibatch_size, rollout.num_steps * rollout.num_rows
        if self.passes.by_segments:
            size, items = segments_per_minibatch(size, rollout.num_steps), rollout.num_rows
        if items % size:
            raise HurtleError(
                f"minibatch_size={self.config.minibatch_size} does not divide the rollout of {rollout.num_steps} steps of "
                f"{rollout.num_rows} rows; minibatches on a device are all of one size."
            )
        return [size] * (items // size)

    def begin(self) -> None:
        """What an update needs first, after postprocessing; captured."""
        self.explained.copy_(explained_variance_on_device(self.rollout, ranks=self.ranks))

    def begin_epoch(self) -> None:
        """What an epoch needs first; captured."""
        if self.passes.shuffles:
            self.kernels("shuffle_rows", len(self.items), len(self.items), self.key, self.items)

    def end_epoch(self) -> None:
        """What an epoch needs last; captured."""

    def draw(self, k: int) -> tuple[Tensor, Tensor | None]:
        """Flat indices of the steps of minibatch k, or rows of its segments; with priorities, their importance weights."""
        return self.minibatches[k], None

    def goes_too_far(self) -> bool:
        """Whether the update ends after this epoch."""
        return False

    # What a runner calls.

    def prepare(self, rollout: Rollout) -> None:
        """Capture the update; see `Learner.prepare`."""
        done = rollout.done
        weights, state = copy.deepcopy(self.policy.state_dict()), copy.deepcopy(self.state_dict())
        for _ in range(WARM_UPS + 1):
            rollout.done = done
            self.update(rollout)
        self.pending(wait=True)
        self.policy.load_state_dict(weights)
        self.load_state_dict(state)

    def update(self, rollout: Rollout, progress: float = 0.0) -> Metrics:
        """Learn from one rollout; see `Learner.update`.

        Raises:
            NonFiniteError: The loss or a gradient of an earlier minibatch was not finite; such minibatches change nothing.
        """
        self.parameters.check()
        if self._bound_to != (id(rollout), rollout.all_valid, rollout.done):
            self._bind(rollout)
        self.key.fill_(draw_key(self.generator))
        rates = self.rates(progress)
        self.optimizer.set_learning_rate(rates["learning_rate"])
        self._prepare()
        for _ in range(self.passes.epochs):
            self._epoch()
            if self.goes_too_far():
                break
        if self.ranks.several:
            self.ranks.mean_(self.sums)
        rollout.done = Done.NOTHING
        self.updates += 1
        self._rates.append(rates)
        self._readback.send(torch.cat([self.sums, self.explained]))
        return self.pending()

    def pending(self, wait: bool = False) -> Metrics:
        """See `Learner.pending`.

        Raises:
            NonFiniteError: The loss or a gradient of one of these updates was not finite.
        """
        metrics: dict[str, float] = {}
        for numbers in self._readback.arrived(wait):
            *sums, count, explained = numbers.tolist()
            metrics = {name: total / count if count else np.nan for name, total in zip(self.METRICS, sums, strict=True)}
            if count and not np.isfinite(sums).all():
                raise not_finite(metrics)
            if self.REPORTED:
                metrics = {name: metrics[name] for name in self.REPORTED}
            metrics |= {"explained_variance": explained, **self._rates.popleft()}
        return metrics

    def weights(self) -> Weights:
        """See `Learner.weights`; shares the learner's memory, unless some parameters are frozen."""
        if not self.parameters.is_whole:
            return Weights.of(self.policy, self.updates)
        return Weights(self.parameters.values, self.updates, self._buffers, self.policy)

    def seconds(self) -> dict[str, float]:
        """See `Learner.seconds`."""
        return self.graphs.seconds("learn")

    def state_dict(self) -> dict[str, Any]:
        """The optimizer, the minibatch stream and the reward statistics, as the learners in torch save them."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "postprocess": self.postprocess.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.optimizer.load_state_dict(saved["optimizer"])
        self.generator.set_state(saved["generator"].cpu())
        self.postprocess.load_state_dict(saved["postprocess"])
        self.updates = saved["updates"]

    def close(self) -> None:
        """Release the graphs and the rollout."""
        self.graphs.close()
        self._rollout = self._bound_to = None
        self.__dict__.pop("_prepare", None)
        self.__dict__.pop("_epoch", None)

    def _bind(self, rollout: Rollout) -> None:
        """Prepare to learn from this rollout repeatedly."""
        sizes = self.minibatch_sizes(rollout)
        self.items = torch.arange(sum(sizes), device=self.device)
        self.minibatches = self.items.split(sizes)  # the same memory
        self._rollout, self._done = rollout, rollout.done
        self._bound_to = (id(rollout), rollout.all_valid, rollout.done)
        self._prepare = self.graphs.wrap(self._prepare_update, "learn")
        self._epoch = self.graphs.wrap(self._learn_epoch, "learn")

    # Everything below is captured: the same launches on the same memory, regardless of the data.

    @torch.no_grad()
    def _prepare_update(self) -> None:
        rollout = self.rollout
        rollout.done = self._done | self.DONE  # a plain run after a capture would find it cleared
        self.postprocess(rollout)
        self.sums.zero_()
        self.begin()

    def _learn_epoch(self) -> None:
        self.begin_epoch()
        for k in range(len(self.minibatches)):
            self.learn(*self.draw(k))
        self.end_epoch()
        self.key.add_(NEXT_KEY)

    def learn(self, chosen: Tensor, weights: Tensor | None) -> None:
        """Learn from one minibatch."""
        rollout, whole, valid = self.rollout, self.passes.by_segments, self.valid(chosen)
        batch = rollout.segments(chosen, weights, keep_all=True) if whole else rollout.steps(chosen)
        self.parameters.zero_gradients()
        if self.ranks.several:
            self._learn_together(batch, valid, chosen)
            return
        means, any_valid = self.gradients(batch, valid, chosen), None if valid is None else valid.any()
        with torch.no_grad():
            if any_valid is not None:  # without valid steps nothing happens: the optimizer skips gradients that are not finite
                flat = self.parameters.gradients
                flat.copy_(torch.where(any_valid, flat, torch.nan))
            seen = torch.cat([means, self.optimizer.step().view(1), self._one])
            self.count(seen if any_valid is None else torch.where(any_valid, seen, 0.0))

    def _learn_together(self, batch: Minibatch, valid: Tensor | None, chosen: Tensor) -> None:
        """The same, the minibatch being this rank's part of all ranks'."""
        size = len(chosen) * (self.rollout.num_steps if self.passes.by_segments else 1)
        means, weight = self.gradients(batch, valid, chosen), self.weight(valid, size)
        with torch.no_grad():
            flat = self.parameters.gradients  # without valid steps they are not finite, and count for nothing
            flat.copy_(torch.where(weight > 0, flat * weight, torch.where(weight.isnan(), torch.nan, 0.0)))
            seen = torch.cat([torch.where(weight > 0, means * weight, 0.0), self.optimizer.step().view(1), self._one])
            self.count(torch.where(weight.isnan(), 0.0, seen))

    def weight(self, valid: Tensor | None, size: int) -> Tensor:
        """Valid steps of this rank's part of a minibatch, relative to the mean over the ranks; NaN if none has any."""
        own = self._one[0] * size if valid is None else valid.sum().float()
        return own / self.ranks.mean_(own.clone())

    def valid(self, chosen: Tensor) -> Tensor | None:
        """Which steps of a minibatch count, flat; None: all."""
        rollout = self.rollout
        if rollout.all_valid:
            return None
        return rollout.valid[:, chosen].flatten() if self.passes.by_segments else rollout.valid.flatten()[chosen]

    def count(self, seen: Tensor) -> None:
        """Add a minibatch's METRICS and number, 1 or 0, to the sums."""
        self.sums.add_(seen)

    @property
    def rollout(self) -> Rollout:
        """The rollout that the update learns from."""
        assert self._rollout is not None
        return self._rollout
