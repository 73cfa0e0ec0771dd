"""`DeviceActorCritic`: gradients of actor–critics on the device, see device_epochs.py. PPO, A2C and IMPALA are made of it.

minibatch → log-probs, entropies, values → gradients of the loss: by autograd, by a kernel for the loss, or by fused kernels for
the whole policy. Advantages and targets are the rollout's, unless an algorithm has its own.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.device_epochs import DeviceEpochs, Passes
from hurtle.algorithms.ppo import METRICS, Losses, evaluate_actions
from hurtle.buffers.rollout import Minibatch, Rollout
from hurtle.errors import UnsupportedError
from hurtle.kernels.cuda_graphs import autocast
from hurtle.kernels.triton import has_triton
from hurtle.policies.cnn import GridCNN
from hurtle.policies.native_plan import grid_cnn_shape, mlp_shape
from hurtle.policies.policy import Policy

SHARED_BYTES = 227 * 1024
"""Shared memory of a block that the larger fused kernels were made for."""


class DeviceActorCritic(DeviceEpochs):
    """An actor–critic with the update on the device, without its loss in torch.

    Args:
        policy: Trained in place; its parameters become views of one flat tensor.
        config: The settings of PPO, A2C or IMPALA.
        setup: Seed, graphs, precision. With CUDA graphs, fused kernels replace the policy in the update if they support it.
        passes: How an update goes through its rollout.
        return_lambda: λ of the rollout's advantages.

    Attributes:
        CLIPS: Whether the loss is PPO's, which clips ratios, or A2C's.
        acting_kernels: The fused kernels, which also replace the policy in acting; None if they do not support it.
        note: Whether fused kernels are used, and if not, why; for the user.
        clip_range: Of PPO's loss, set before an update. [1]
        epoch_kl: Sum of the KL over the epoch's minibatches, and their number. [2]

    Raises:
        UnsupportedError: The optimizer has no flat version.
    """

    METRICS = METRICS
    CLIPS = False

    def __init__(self, policy: Policy, config: Any, setup: LearnerSetup, passes: Passes, return_lambda: float):
        super().__init__(policy, config, setup, passes, return_lambda, config.optimizer, config.weight_decay)
        self.acting_kernels, self.note = None, ""
        self.evaluate = torch.compile(evaluate_actions) if setup.compiled else evaluate_actions
        # Of several learners' minibatches, advantages are normalized together, before the loss.
        self.loss_config = replace(config, normalize_advantages=False) if self.ranks.several else config
        self.clip_range, self.epoch_kl = torch.zeros(1, device=self.device), torch.zeros(2, device=self.device)
        self._kl_and_count = torch.tensor([METRICS.index("approx_kl"), len(METRICS)], device=self.device)
        self._has_loss_kernel = self.device.type == "cuda" and has_triton()
        if self.graphs.enabled:
            try:
                kernels = self.fused_kernels(self.parameters.values, setup)
                self.fuse(kernels)
                in_use = "" if kernels.precision == setup.precision else f" (in {kernels.precision})"
                self.note = f", with fused kernels for this policy{in_use}"
            except UnsupportedError as error:
                self.note = f" (no fused kernels: {error})"

    def fuse(self, kernels: Any) -> None:
        """Train with fused kernels (a `FusedMLP` or `FusedGridCNN`, made from the flat parameters) instead of the policy."""
        self.acting_kernels = kernels

    def fused_kernels(self, weights: Tensor, setup: LearnerSetup) -> Any:
        """Kernels that act for and train this policy, or several of its shape.

        Args:
            weights: Its parameters, flat; or a row for each seed.
            setup: Precision.

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

            if weights.ndim > 1:
                raise UnsupportedError("those for a CNN are for a single seed")
            if setup.precision != "bf16" or memory < SHARED_BYTES:
                raise UnsupportedError("those for a CNN need precision='bf16' and a GPU like an H100")
            return FusedGridCNN(grid_cnn_shape(self.policy), weights)
        from hurtle.kernels.triton.mlp import FusedMLP

        shape = mlp_shape(self.policy)
        if capability < (8, 0) or (shape.hidden > 64 and memory < SHARED_BYTES):
            raise UnsupportedError("this GPU is too old or too small for them")
        return FusedMLP(shape, weights, setup.precision)

    # For subclasses; captured.

    @abstractmethod
    def loss(self, log_probs: Tensor, entropies: Tensor, values: Tensor, batch: Minibatch) -> Losses:
        """The loss of a minibatch in torch, which the kernels compute too."""

    def minibatch_loss(self, batch: Minibatch) -> Losses:
        """The loss of a minibatch under the policy as it is."""
        log_probs, entropies, values = evaluate_actions(self.policy, batch)
        return self.loss(log_probs.float(), entropies.float(), values.float(), batch)

    def targets(self, batch: Minibatch, chosen: Tensor, log_probs: Tensor, values: Tensor) -> Minibatch:
        """The minibatch with the advantages and returns to learn from.

        Args:
            batch: With those of the rollout.
            chosen: What `draw` returned.
            log_probs: Of the batch's actions now, [batch].
            values: Of its observations now, [batch].
        """
        return batch

    # Everything below is captured: the same launches on the same memory, regardless of the data.

    def begin(self) -> None:
        """See `DeviceEpochs.begin`."""
        super().begin()
        self.begin_fused()

    def begin_epoch(self) -> None:
        """See `DeviceEpochs.begin_epoch`."""
        super().begin_epoch()
        self.epoch_kl.zero_()

    def count(self, seen: Tensor) -> None:
        """See `DeviceEpochs.count`."""
        super().count(seen)
        self.epoch_kl.add_(seen[self._kl_and_count])

    def gradients(self, batch: Minibatch, valid: Tensor | None, chosen: Tensor) -> Tensor:
        """See `DeviceEpochs.gradients`."""
        with autocast(self.device, self.half):
            found = self.evaluate(self.policy, batch)
        log_probs, entropies, values = (part.float() for part in found)
        now = [part.detach().contiguous() for part in (log_probs, entropies, values)]
        batch = self.targets(batch, chosen, now[0], now[2])
        if self.ranks.several:
            batch = batch._replace(advantages=self.joined(batch.advantages, valid))
        if not self._has_loss_kernel:
            if valid is not None:
                log_probs, entropies, values, batch = _valid_part(log_probs, entropies, values, batch, valid)
            losses = self.loss(log_probs, entropies, values, batch)
            losses.total.backward()
            return torch.stack(losses[1:])
        from hurtle.kernels.triton.loss import loss_gradients

        gradients = loss_gradients(
            now[0], now[1], now[2], batch.log_probs, batch.values, batch.advantages, batch.returns, self.clip_range,
            self.loss_settings(), batch.weights, valid,
        )  # fmt: skip
        pairs = [(x, g) for x, g in zip((log_probs, entropies, values), gradients[:3], strict=True) if x.requires_grad]
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
        return gradients.metrics

    def learn(self, chosen: Tensor, weights: Tensor | None) -> None:
        """See `DeviceEpochs.learn`."""
        if self.acting_kernels is None:
            super().learn(chosen, weights)
            return
        if self.passes.by_segments:
            rollout = self.rollout
            steps = torch.arange(rollout.num_steps, device=self.device)
            chosen = (steps[:, None] * rollout.num_rows + chosen).flatten()
            weights = None if weights is None else weights.repeat(rollout.num_steps)
        valid = None
        if self.ranks.several:
            valid = None if self.rollout.all_valid else self.rollout.valid.flatten()[chosen]
            self._advantages[chosen] = self.joined(self.rollout.advantages.flatten()[chosen], valid)
        self.learn_fused(chosen, weights, valid)

    def _bind(self, rollout: Rollout) -> None:
        super()._bind(rollout)
        self._advantages = torch.zeros(rollout.advantages.numel() if self.ranks.several else 0, device=self.device)

    @torch.no_grad()
    def joined(self, advantages: Tensor, valid: Tensor | None) -> Tensor:
        """Advantages of this rank's part of a minibatch, normalized over all ranks' if the settings say so; [batch]."""
        if not self.config.normalize_advantages:
            return advantages
        kept = (advantages if valid is None else torch.where(valid, advantages, 0.0)).double()
        own = kept.new_full((), len(kept)) if valid is None else valid.sum().double()
        count, total, squares = self.ranks.sum_(torch.stack([own, kept.sum(), kept.square().sum()])).unbind()
        mean = total / count.clamp_min(1.0)
        variance = (squares - count * mean.square()).clamp_min(0.0) / (count - 1.0).clamp_min(1.0)
        return torch.where(count > 1, (advantages - mean) / (variance.sqrt() + 1e-8), advantages).float()

    def begin_fused(self) -> None:
        """Pass the rollout to the fused kernels, if there are any."""
        if self.acting_kernels is None:
            return
        steps = steps_of(self.rollout)
        if self.ranks.several:
            steps = steps._replace(advantages=self._advantages)  # of each minibatch, once they are joined
        self.acting_kernels.begin(steps, self.loss_settings())

    def take_steps(self, *fields: Any) -> None:
        """Pass steps to the fused kernels: the fields of `Steps`."""
        from hurtle.kernels.triton.loss import Steps

        self.acting_kernels.begin(Steps(*fields), self.loss_settings())

    def loss_settings(self) -> Any:
        """The constants of the loss, for kernels."""
        from hurtle.kernels.triton.loss import LossSettings

        config, clips = self.loss_config, self.CLIPS
        clip_values = clips and config.clip_values
        return LossSettings(config.value_coef, config.entropy_coef, clip_values, config.normalize_advantages, clips)

    @torch.no_grad()
    def learn_fused(self, order: Tensor, weights: Tensor | None = None, valid: Tensor | None = None) -> None:
        """Learn from one minibatch with fused kernels: some of the steps that they took, and their importance weights.

        `valid` tells several ranks which of these steps count; None: all.
        """
        from hurtle.kernels.triton.loss import add_metrics

        stats, moments = self.acting_kernels.gradients(order, self.clip_range, weights)
        if self.ranks.several:
            own = self.parameters.gradients
            torch.sum(self.acting_kernels.partials, 0, out=own)
            weight = self.weight(valid, len(order))
            own.copy_(torch.where(weight > 0, own * weight, torch.where(weight.isnan(), torch.nan, 0.0)))
            norm = self.optimizer.step()
        else:
            norm = self.optimizer.step(self.acting_kernels.partials)
        add_metrics(stats, moments, norm, self.sums, self.epoch_kl)


def steps_of(rollout: Rollout) -> Any:
    """A rollout as the fused kernels take it, flat."""
    from hurtle.kernels.triton.loss import Steps

    fields = (rollout.inputs, rollout.actions, rollout.log_probs, rollout.values, rollout.advantages, rollout.returns)
    obs, actions, log_probs, values, advantages, returns = (field.flatten(0, 1) for field in fields)
    masks = None if rollout.masks is None else rollout.masks.flatten(0, 1)
    valid = None if rollout.all_valid else rollout.valid.flatten()
    return Steps(obs, actions, log_probs, values, advantages, returns, masks, valid)


def shared_memory(device: torch.device) -> int:
    """The most bytes of shared memory that a block may ask for."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def _valid_part(
    log_probs: Tensor, entropies: Tensor, values: Tensor, batch: Minibatch, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor, Minibatch]:
    """The arguments of the loss, without invalid steps."""
    kept = batch._replace(
        log_probs=batch.log_probs[valid],
        values=batch.values[valid],
        advantages=batch.advantages[valid],
        returns=batch.returns[valid],
        weights=None if batch.weights is None else batch.weights[valid],
    )
    return log_probs[valid], entropies[valid], values[valid], kept
