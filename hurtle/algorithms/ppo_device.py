"""PPO with its entire update on the device, see device_epochs.py. Loss and annealing are those of ppo.py.

minibatch → log-probs, entropies, values → gradients of the loss: by autograd, by a kernel for the loss, or by fused kernels for
the whole policy. Priorities and V-trace are drawn and computed on the device too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.device_epochs import DeviceEpochs
from hurtle.algorithms.ppo import (
    METRICS,
    anneal,
    evaluate_actions,
    importance_weights,
    ppo_loss,
    segment_probabilities,
    use_vtrace,
)
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.buffers.rollout import Minibatch, Rollout
from hurtle.errors import UnsupportedError
from hurtle.kernels.cuda_graphs import autocast
from hurtle.kernels.device_rows import Draw
from hurtle.kernels.triton import has_triton
from hurtle.policies.cnn import GridCNN
from hurtle.policies.native_plan import grid_cnn_shape, mlp_shape
from hurtle.policies.policy import Policy

SHARED_BYTES = 227 * 1024
"""Shared memory of a block that the larger fused kernels were made for."""


class DevicePPO(DeviceEpochs):
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

    METRICS = METRICS

    def __init__(self, policy: Policy, config: PPOConfig, setup: LearnerSetup | None = None):
        setup = setup or LearnerSetup()
        super().__init__(policy, config, setup, config.gae_lambda, config.optimizer, config.weight_decay)
        self.acting_kernels, self.note = None, ""
        self._evaluate = torch.compile(evaluate_actions) if setup.compiled else evaluate_actions
        # Set by the host before an update: clip range and exponent of the importance weights.
        self._knobs = torch.zeros(2, device=self.device)
        self._epoch_kl = torch.zeros(2, device=self.device)  # sum over the epoch's minibatches, and their number
        self._kl_and_count = torch.tensor([METRICS.index("approx_kl"), len(METRICS)], device=self.device)
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

    def rates(self, progress: float) -> dict[str, float]:
        """See `DeviceEpochs.rates`."""
        now = anneal(self.config, progress)
        self._knobs[0].fill_(now.clip_range)
        self._knobs[1].fill_(now.priority_beta)
        return {"learning_rate": now.learning_rate, "clip_range": now.clip_range}

    def goes_too_far(self) -> bool:
        """Whether the mean KL of the epoch's minibatches exceeds target_kl; this synchronizes with the device."""
        if self.config.target_kl is None:
            return False
        total, count = self._epoch_kl.tolist()
        return count > 0 and total / count > self.config.target_kl

    def _bind(self, rollout: Rollout) -> None:
        super()._bind(rollout)
        self._uniforms = torch.zeros((self.size, 1), device=self.device)
        self._probability = torch.zeros(rollout.num_rows, dtype=torch.float64, device=self.device)
        self._places = torch.arange(self.size, device=self.device)
        self._all_rows = torch.arange(rollout.num_rows, device=self.device)

    # Everything below is captured: the same launches on the same memory, regardless of the data.

    def begin(self) -> None:
        """See `DeviceEpochs.begin`."""
        if self.acting_kernels is not None and not self.config.vtrace:
            self._begin_fused()

    def begin_epoch(self) -> None:
        """See `DeviceEpochs.begin_epoch`."""
        config, rollout = self.config, self.rollout
        if config.vtrace:
            self._correct_advantages(rollout)
            if self.acting_kernels is not None:
                self._begin_fused()
        if config.priority_alpha:
            with torch.no_grad():
                magnitude = (rollout.advantages.abs() * rollout.valid).sum(0).double()
                self._probability.copy_(segment_probabilities(magnitude, config.priority_alpha))
        else:
            super().begin_epoch()
        self._epoch_kl.zero_()

    @torch.no_grad()
    def draw(self, k: int) -> tuple[Tensor, Tensor | None]:
        """See `DeviceEpochs.draw`."""
        if not self.config.priority_alpha:
            return super().draw(k)
        draw = Draw(self._places + (self.key + k * self.size), self._no_steps)
        self.kernels("uniform_rows", self.size, 0, draw, self._uniforms)
        cumulative = self._probability.cumsum(0)  # not multinomial, which is limited to 2^24 rows
        rows = torch.searchsorted(cumulative, self._uniforms[:, 0].double() * cumulative[-1], right=True)
        rows = rows.clamp_max(len(cumulative) - 1)
        return rows, importance_weights(self._probability, rows, self._knobs[1]).float()

    def count(self, seen: Tensor) -> None:
        """See `DeviceEpochs.count`."""
        super().count(seen)
        self._epoch_kl.add_(seen[self._kl_and_count])

    def gradients(self, batch: Minibatch, valid: Tensor | None) -> Tensor:
        """See `DeviceEpochs.gradients`."""
        config = self.config
        with autocast(self.device, self.half):
            found = self._evaluate(self.policy, batch)
        log_probs, entropies, values = (part.float() for part in found)
        if not self._has_loss_kernel:
            if valid is not None:
                log_probs, entropies, values, batch = _valid_part(log_probs, entropies, values, batch, valid)
            losses = ppo_loss(log_probs, entropies, values, batch, self._knobs[0], config)
            losses.total.backward()
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
        return gradients.metrics

    def _begin_fused(self) -> None:
        """Pass the rollout to the fused kernels."""
        from hurtle.kernels.triton.loss import LossSettings, Steps

        config, rollout = self.config, self.rollout
        fields = (rollout.inputs, rollout.actions, rollout.log_probs, rollout.values, rollout.advantages, rollout.returns)
        masks = None if rollout.masks is None else rollout.masks.flatten(0, 1)
        valid = None if rollout.all_valid else rollout.valid.flatten()
        steps = Steps(*(field.flatten(0, 1) for field in fields))._replace(masks=masks, valid=valid)
        self.acting_kernels.begin(
            steps, LossSettings(config.value_coef, config.entropy_coef, config.clip_values, config.normalize_advantages)
        )

    def learn(self, chosen: Tensor, weights: Tensor | None) -> None:
        """See `DeviceEpochs.learn`."""
        if self.acting_kernels is None:
            super().learn(chosen, weights)
        else:
            self._learn_fused(chosen, weights)

    @torch.no_grad()
    def _learn_fused(self, chosen: Tensor, weights: Tensor | None) -> None:
        """Learn from one minibatch with fused kernels."""
        from hurtle.kernels.triton.loss import add_metrics

        fused, rollout = self.acting_kernels, self.rollout
        if self.order.by_segments:
            steps = torch.arange(rollout.num_steps, device=self.device)
            chosen = (steps[:, None] * rollout.num_rows + chosen).flatten()
            weights = None if weights is None else weights.repeat(rollout.num_steps)
        stats, moments = fused.gradients(chosen, self._knobs[:1], weights)
        norm = self.optimizer.step(fused.partials)
        add_metrics(stats, moments, norm, self.sums, self._epoch_kl)

    @torch.no_grad()
    def _correct_advantages(self, rollout: Rollout) -> None:
        """V-trace with the current policy's ratios."""
        with autocast(self.device, self.half):
            log_probs, _, _ = self._evaluate(self.policy, rollout.segments(self._all_rows, keep_all=True))
        use_vtrace(rollout, log_probs.float().view_as(rollout.log_probs) - rollout.log_probs, self.config)


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
