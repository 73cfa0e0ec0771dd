"""PPO with its entire update on the device: on a GPU, replays of two CUDA graphs. Loss and annealing are those of ppo.py.

rollout → postprocessing → epochs of random minibatches → gradients, flat → clipped → optimizer. Everything that changes from
update to update is in device tensors, and metrics are read once they have arrived. Knows no env.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.ppo import (
    AUTOCAST,
    METRICS,
    MinibatchOrder,
    anneal,
    evaluate_actions,
    explained_variance_on_device,
    importance_weights,
    not_finite,
    ppo_loss,
    segment_probabilities,
    use_vtrace,
)
from hurtle.algorithms.ppo_config import PPOConfig, segments_per_minibatch
from hurtle.buffers.rollout import Done, Minibatch, Rollout
from hurtle.collect.postprocess import Postprocess
from hurtle.contracts import Learner, Metrics, Weights
from hurtle.errors import HurtleError, UnsupportedError
from hurtle.kernels.cuda_graphs import WARM_UPS, Graphs, Readback, autocast
from hurtle.kernels.device_rows import Draw
from hurtle.kernels.optimizers import MOMENTS, FlatOptimizer, FlatParameters
from hurtle.kernels.row_kernels import RowKernels
from hurtle.kernels.triton import has_triton
from hurtle.policies.cnn import GridCNN
from hurtle.policies.native_plan import grid_cnn_shape, mlp_shape
from hurtle.policies.policy import Policy

KEY_BITS = 62
SHARED_BYTES = 227 * 1024
"""Shared memory of a block that the larger fused kernels were made for."""
NEXT_KEY = 0x9E3779B97F4A7C15 - (1 << 64)  # as an int64; from one epoch's key to the next


class DevicePPO(Learner):
    """PPO with the update on the device.

    Args:
        policy: Trained in place; its parameters become views of one flat tensor.
        config: The settings of PPO.
        setup: Seed, graphs, precision. With CUDA graphs, fused kernels replace the policy in the update if they support it.

    Attributes:
        parameters: All of the policy's, flat.
        acting_kernels: The fused kernels, which also replace the policy in acting; None if they do not support it.
        note: Whether fused kernels are used, and if not, why; for the user.

    Raises:
        UnsupportedError: The optimizer has no flat version.
    """

    def __init__(self, policy: Policy, config: PPOConfig, setup: LearnerSetup | None = None):
        setup = setup or LearnerSetup()
        if config.optimizer not in MOMENTS:
            raise UnsupportedError(f"its optimizer is {config.optimizer}")
        self.policy, self.config, self.updates = policy, config, 0
        self.parameters = FlatParameters(policy)
        self.device = self.parameters.values.device
        self.graphs = setup.graphs or Graphs(self.device)
        self.postprocess = Postprocess(policy, config.gamma, config.gae_lambda, setup.rewards, AUTOCAST[setup.precision])
        self.order = MinibatchOrder(config, policy.is_recurrent, setup.seed)
        self.acting_kernels, self.note = None, ""
        self._optimizer = FlatOptimizer(
            self.parameters, config.optimizer, config.adam_eps, config.weight_decay, config.max_grad_norm
        )
        self._half = AUTOCAST[setup.precision]
        self._evaluate = torch.compile(evaluate_actions) if setup.compiled else evaluate_actions
        self._kernels = RowKernels(self.device)
        self._readback = Readback(self.device)
        self._buffers = tuple(policy.buffers())
        self._rollout: Rollout | None = None
        self._bound_to: Any = None  # the rollout, and what the graphs assume about it
        self._rates: deque[dict[str, float]] = deque()  # of updates that the device has not yet reported
        # Set by the host before an update: clip range and exponent of the importance weights; and the key of the minibatches.
        self._knobs = torch.zeros(2, device=self.device)
        self._key = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._sums = torch.zeros(len(METRICS) + 1, device=self.device)  # over the minibatches so far, and their number
        self._epoch_kl = torch.zeros(2, device=self.device)  # sum over the epoch's minibatches, and their number
        self._kl_and_count = torch.tensor([METRICS.index("approx_kl"), len(METRICS)], device=self.device)
        self._one = torch.ones(1, device=self.device)
        self._explained = torch.zeros(1, device=self.device)
        self._no_steps = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._has_loss_kernel = self.device.type == "cuda" and has_triton()
        if self.graphs.enabled:
            try:
                kernels = self._fused_kernels(setup)
                self.fuse(kernels)
                in_use = "" if kernels.precision == setup.precision else f" (in {kernels.precision})"
                self.note = f", with fused kernels for this policy{in_use}"
            except UnsupportedError as error:
                self.note = f" (no fused kernels: {error})"

    def fuse(self, kernels: Any) -> None:
        """Train with fused kernels (a `FusedMLP` or `FusedGridCNN`, made from the flat parameters) instead of the policy."""
        self.acting_kernels = kernels

    def _fused_kernels(self, setup: LearnerSetup) -> Any:
        """Kernels that act for and train this policy.

        Raises:
            UnsupportedError: The kernels do not support it; says why.
        """
        if not has_triton():
            raise UnsupportedError("triton is not installed")
        if setup.compiled:
            raise UnsupportedError("compile=True asks for torch's code")
        capability, memory = torch.cuda.get_device_capability(self.device), shared_memory(self.device)
        if type(self.policy.network) is GridCNN:
            from hurtle.kernels.triton.grid_cnn import FusedGridCNN

            if setup.precision != "bf16" or memory < SHARED_BYTES:
                raise UnsupportedError("those for a CNN need precision='bf16' and a GPU like an H100")
            return FusedGridCNN(grid_cnn_shape(self.policy), self.parameters.values)
        from hurtle.kernels.triton.mlp import FusedMLP

        shape = mlp_shape(self.policy)
        if capability < (8, 0) or (shape.hidden > 64 and memory < SHARED_BYTES):
            raise UnsupportedError("this GPU is too old or too small for them")
        return FusedMLP(shape, self.parameters.values, setup.precision)

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
        config, now = self.config, anneal(self.config, progress)
        self.parameters.check()
        if self._bound_to != (id(rollout), rollout.all_valid, rollout.done):
            self._bind(rollout)
        self._key.fill_(int(torch.randint(1 << KEY_BITS, (1,), generator=self.order.generator)))
        self._optimizer.set_learning_rate(now.learning_rate)
        self._knobs[0].fill_(now.clip_range)
        self._knobs[1].fill_(now.priority_beta)
        self._prepare()
        for _ in range(config.num_epochs):
            self._epoch()
            if config.target_kl is not None and self._epoch_is_too_far(config.target_kl):
                break
        rollout.done = Done.NOTHING
        self.updates += 1
        self._rates.append({"learning_rate": now.learning_rate, "clip_range": now.clip_range})
        self._readback.send(torch.cat([self._sums, self._explained]))
        return self.pending()

    def _epoch_is_too_far(self, target: float) -> bool:
        """Whether the mean KL of the epoch's minibatches exceeds the target; this synchronizes with the device."""
        total, count = self._epoch_kl.tolist()
        return count > 0 and total / count > target

    def pending(self, wait: bool = False) -> Metrics:
        """See `Learner.pending`.

        Raises:
            NonFiniteError: The loss or a gradient of one of these updates was not finite.
        """
        metrics: dict[str, float] = {}
        for numbers in self._readback.arrived(wait):
            *sums, count, explained = numbers.tolist()
            metrics = {name: total / count if count else np.nan for name, total in zip(METRICS, sums, strict=True)}
            if count and not np.isfinite(sums).all():
                raise not_finite(metrics)
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
        """The optimizer, the minibatch stream and the reward statistics, as `PPO` saves them."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "generator": self.order.generator.get_state(),
            "postprocess": self.postprocess.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._optimizer.load_state_dict(saved["optimizer"])
        self.order.generator.set_state(saved["generator"].cpu())
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
        config = self.config
        if self.order.by_segments:
            self._size = segments_per_minibatch(config.minibatch_size, rollout.num_steps)
            items = rollout.num_rows
        else:
            self._size, items = config.minibatch_size, rollout.num_steps * rollout.num_rows
        if items % self._size:
            raise HurtleError(
                f"minibatch_size={config.minibatch_size} does not divide the rollout of {rollout.num_steps} steps of "
                f"{rollout.num_rows} rows; minibatches on a device are all of one size."
            )
        self._minibatches_per_epoch = items // self._size
        self._order = torch.arange(items, device=self.device)
        self._uniforms = torch.zeros((self._size, 1), device=self.device)
        self._probability = torch.zeros(rollout.num_rows, dtype=torch.float64, device=self.device)
        self._places = torch.arange(self._size, device=self.device)
        self._all_rows = torch.arange(rollout.num_rows, device=self.device)
        self._rollout, self._done = rollout, rollout.done
        self._bound_to = (id(rollout), rollout.all_valid, rollout.done)
        self._prepare = self.graphs.wrap(self._prepare_update, "learn")
        self._epoch = self.graphs.wrap(self._learn_epoch, "learn")

    # Everything below is captured: the same launches on the same memory, regardless of the data.

    @torch.no_grad()
    def _prepare_update(self) -> None:
        rollout = self._bound
        rollout.done = self._done  # a plain run after a capture would find it cleared
        self.postprocess(rollout)
        self._explained.copy_(explained_variance_on_device(rollout))
        self._sums.zero_()
        if self.acting_kernels is not None and not self.config.vtrace:
            self._begin_fused()

    def _learn_epoch(self) -> None:
        config, rollout = self.config, self._bound
        if config.vtrace:
            self._correct_advantages(rollout)
            if self.acting_kernels is not None:
                self._begin_fused()
        if config.priority_alpha:
            with torch.no_grad():
                magnitude = (rollout.advantages.abs() * rollout.valid).sum(0).double()
                self._probability.copy_(segment_probabilities(magnitude, config.priority_alpha))
        elif config.shuffle:
            self._kernels("shuffle_rows", len(self._order), len(self._order), self._key, self._order)
        self._epoch_kl.zero_()
        for k in range(self._minibatches_per_epoch):
            chosen, weights = self._draw_minibatch(k)
            if self.acting_kernels is not None:
                self._learn_fused(chosen, weights)
            else:
                means = self._learn_minibatch(chosen, weights)
                self._count(means, self._optimizer.step())
        self._key.add_(NEXT_KEY)

    @torch.no_grad()
    def _count(self, means: Tensor, norm: Tensor) -> None:
        """Add a minibatch to the metrics, unless none of its steps is valid."""
        seen = torch.cat([means, norm.view(1), self._one])
        if not self._bound.all_valid:
            seen = torch.where(self._any_valid, seen, 0.0)
        self._sums.add_(seen)
        self._epoch_kl.add_(seen[self._kl_and_count])

    def _draw_minibatch(self, k: int) -> tuple[Tensor, Tensor | None]:
        """Flat indices of steps, or rows of segments; with priorities, their importance weights."""
        if not self.config.priority_alpha:
            return self._order[k * self._size : (k + 1) * self._size], None
        with torch.no_grad():
            draw = Draw(self._places + (self._key + k * self._size), self._no_steps)
            self._kernels("uniform_rows", self._size, 0, draw, self._uniforms)
            cumulative = self._probability.cumsum(0)  # not multinomial, which is limited to 2^24 rows
            rows = torch.searchsorted(cumulative, self._uniforms[:, 0].double() * cumulative[-1], right=True)
            rows = rows.clamp_max(len(cumulative) - 1)
            return rows, importance_weights(self._probability, rows, self._knobs[1]).float()

    def _learn_minibatch(self, chosen: Tensor, weights: Tensor | None) -> Tensor:
        """Leave the gradients of one minibatch in the flat tensor; returns the first five METRICS."""
        config, rollout = self.config, self._bound
        whole = self.order.by_segments
        batch = rollout.segments(chosen, weights, keep_all=True) if whole else rollout.steps(chosen)
        valid = None
        if not rollout.all_valid:
            valid = (rollout.valid[:, chosen] if whole else rollout.valid.flatten()[chosen]).flatten()
            self._any_valid = valid.any()
        self.parameters.zero_gradients()
        with autocast(self.device, self._half):
            found = self._evaluate(self.policy, batch)
        log_probs, entropies, values = (part.float() for part in found)
        if not self._has_loss_kernel:
            if valid is not None:
                log_probs, entropies, values, batch = _valid_part(log_probs, entropies, values, batch, valid)
            losses = ppo_loss(log_probs, entropies, values, batch, self._knobs[0], config)
            losses.total.backward()
            self._skip_if_empty(valid)
            return torch.stack(losses[1:])
        from hurtle.kernels.triton.loss import ppo_gradients

        now = [part.detach().contiguous() for part in (log_probs, entropies, values)]
        gradients = ppo_gradients(
            now[0], now[1], now[2], batch.log_probs, batch.values, batch.advantages, batch.returns, self._knobs[:1],
            value_coef=config.value_coef, entropy_coef=config.entropy_coef, clip_values=config.clip_values,
            normalize_advantages=config.normalize_advantages, weights=batch.weights, valid=valid,
        )  # fmt: skip
        pairs = [(x, g) for x, g in zip((log_probs, entropies, values), gradients[:3], strict=True) if x.requires_grad]
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
        self._skip_if_empty(valid)
        return gradients.metrics

    def _skip_if_empty(self, valid: Tensor | None) -> None:
        """Make a minibatch without valid steps a no-op: the optimizer skips gradients that are not finite."""
        if valid is not None:
            flat = self.parameters.gradients
            flat.copy_(torch.where(self._any_valid, flat, torch.nan))

    def _begin_fused(self) -> None:
        """Pass the rollout to the fused kernels."""
        from hurtle.kernels.triton.loss import LossSettings, Steps

        config, rollout = self.config, self._bound
        fields = (rollout.inputs, rollout.actions, rollout.log_probs, rollout.values, rollout.advantages, rollout.returns)
        masks = None if rollout.masks is None else rollout.masks.flatten(0, 1)
        valid = None if rollout.all_valid else rollout.valid.flatten()
        steps = Steps(*(field.flatten(0, 1) for field in fields))._replace(masks=masks, valid=valid)
        self.acting_kernels.begin(
            steps, LossSettings(config.value_coef, config.entropy_coef, config.clip_values, config.normalize_advantages)
        )

    @torch.no_grad()
    def _learn_fused(self, chosen: Tensor, weights: Tensor | None) -> None:
        """Learn from one minibatch with fused kernels."""
        from hurtle.kernels.triton.loss import add_metrics

        fused, rollout = self.acting_kernels, self._bound
        if self.order.by_segments:
            steps = torch.arange(rollout.num_steps, device=self.device)
            chosen = (steps[:, None] * rollout.num_rows + chosen).flatten()
            weights = None if weights is None else weights.repeat(rollout.num_steps)
        stats, moments = fused.gradients(chosen, self._knobs[:1], weights)
        norm = self._optimizer.step(fused.partials)
        add_metrics(stats, moments, norm, self._sums, self._epoch_kl)

    @torch.no_grad()
    def _correct_advantages(self, rollout: Rollout) -> None:
        """V-trace with the current policy's ratios."""
        with autocast(self.device, self._half):
            log_probs, _, _ = self._evaluate(self.policy, rollout.segments(self._all_rows, keep_all=True))
        use_vtrace(rollout, log_probs.float().view_as(rollout.log_probs) - rollout.log_probs, self.config)

    @property
    def _bound(self) -> Rollout:
        assert self._rollout is not None
        return self._rollout


def shared_memory(device: torch.device) -> int:
    """The most bytes of shared memory that a block may ask for."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def _valid_part(
    log_probs: Tensor, entropies: Tensor, values: Tensor, batch: Minibatch, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor, Minibatch]:
    """The arguments of `ppo_loss`, without invalid steps."""
    kept = batch._replace(
        log_probs=batch.log_probs[valid],
        values=batch.values[valid],
        advantages=batch.advantages[valid],
        returns=batch.returns[valid],
        weights=None if batch.weights is None else batch.weights[valid],
    )
    return log_probs[valid], entropies[valid], values[valid], kept
