"""PPO whose whole update stays on the device: on a GPU, replays of two CUDA graphs; the same minibatch losses as `PPO`.

rollout → advantages → epochs of random minibatches → gradients, flat → clipped → optimizer. Everything that changes from update
to update lies in device tensors, and metrics are read when they have come. Knows no env.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hurtle.algorithms.configs import PPOConfig
from hurtle.algorithms.flat import FlatOptimizer, FlatParameters
from hurtle.algorithms.ppo import (
    METRICS,
    PPO,
    evaluate_actions,
    explained_variance_on_device,
    ppo_loss,
    segment_probabilities,
    segments_per_minibatch,
)
from hurtle.buffers.rollout import Minibatch, Rollout
from hurtle.errors import HurtleError, NonFiniteError
from hurtle.native.device_rows import Draw
from hurtle.native.graphs import Graphs, Readback, autocast
from hurtle.native.row_kernels import RowKernels
from hurtle.native.triton import has_triton
from hurtle.policies.policy import Policy

KEY_BITS = 62
NEXT_KEY = 0x9E3779B97F4A7C15 - (1 << 64)  # as an int64; from one epoch's key to the next


class DevicePPO(PPO):
    """PPO with the update on the device; see `PPO`.

    Args:
        policy: Trained in place; its parameters become views of one flat tensor.
        config: The options of PPO.
        seed: Of the minibatches.
        graphs: Captures epochs; None makes one for the policy's device.
        precision: "float32", "tf32" or "bf16", of the matrix products.
        compiled: Run the policy's view of minibatches through `torch.compile`.

    Attributes:
        parameters: All of the policy's, flat.
    """

    def __init__(
        self,
        policy: Policy,
        config: PPOConfig,
        seed: int = 0,
        *,
        graphs: Graphs | None = None,
        precision: str = "float32",
        compiled: bool = False,
    ):
        super().__init__(policy, config, seed)
        self.parameters = FlatParameters(policy)
        self.device = self.parameters.values.device
        self.graphs = graphs or Graphs(self.device)
        self.fused: Any = None
        self._flat = FlatOptimizer(
            self.parameters, config.optimizer, config.adam_eps, config.weight_decay, config.max_grad_norm
        )
        self.optimizer = self._flat  # type: ignore[assignment]
        self._half = torch.bfloat16 if precision == "bf16" else None
        self._evaluate = torch.compile(evaluate_actions) if compiled else evaluate_actions
        self._kernels = RowKernels(self.device)
        self._readback = Readback(self.device)
        self._rollout: Rollout | None = None
        self._all_valid = True
        self._rates: deque[dict[str, float]] = deque()  # of the updates that the device has not told of
        # What the host sets before an update: clip range, exponent of the importance weights; and the key of the minibatches.
        self._knobs = torch.zeros(2, device=self.device)
        self._key = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._sums = torch.zeros(len(METRICS) + 1, device=self.device)  # of the minibatches so far, and how many they are
        self._epoch_kl = torch.zeros(2, device=self.device)  # sum over the epoch's minibatches, and how many they are
        self._kl_and_count = torch.tensor([METRICS.index("approx_kl"), len(METRICS)], device=self.device)
        self._one = torch.ones(1, device=self.device)
        self._explained = torch.zeros(1, device=self.device)
        self._no_steps = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._unchanged = torch.tensor([0.0, 1.0], device=self.device)  # advantages that are not normalized
        self._has_loss_kernel = self.device.type == "cuda" and has_triton()

    def fuse(self, fused: Any) -> None:
        """Let kernels (`native.triton.mlp.FusedMLP`, made of the flat parameters) learn in the policy's stead."""
        self.fused = fused

    def update(self, rollout: Rollout, remaining: float = 1.0) -> dict[str, float]:
        """Learn from one rollout; see `PPO.update`. On a GPU the metrics are those of an earlier update, if one is known.

        Raises:
            NonFiniteError: The loss or a gradient of an earlier minibatch was not finite; such minibatches change nothing.
        """
        config = self.config
        self.parameters.check()
        if rollout is not self._rollout or rollout.all_valid != self._all_valid:
            self._bind(rollout)
        learning_rate = config.learning_rate * (remaining if config.anneal_learning_rate else 1.0)
        clip_range = config.clip_range * (remaining if config.anneal_clip_range else 1.0)
        beta = config.priority_beta + (1 - config.priority_beta) * (1 - remaining)
        self._key.fill_(int(torch.randint(1 << KEY_BITS, (1,), generator=self._generator)))
        self._flat.set_learning_rate(learning_rate)
        self._knobs[0].fill_(clip_range)
        self._knobs[1].fill_(-beta)
        self._prepare()
        for _ in range(config.num_epochs):
            self._epoch()
            if config.target_kl is not None and self._epoch_is_too_far(config.target_kl):
                break
        self._rates.append({"learning_rate": learning_rate, "clip_range": clip_range})
        self._readback.send(torch.cat([self._sums, self._explained]))
        return self.arrived()

    def _epoch_is_too_far(self, target: float) -> bool:
        """Whether the mean KL of the epoch's minibatches is beyond the target; this waits for the device."""
        total, count = self._epoch_kl.tolist()
        return count > 0 and total / count > target

    def arrived(self, wait: bool = False) -> dict[str, float]:
        """The newest metrics of those that the device has told since the last call, or none; `wait` for all.

        Raises:
            NonFiniteError: The loss or a gradient of one of these updates was not finite.
        """
        metrics: dict[str, float] = {}
        for numbers in self._readback.arrived(wait):
            *sums, count, explained = numbers.tolist()
            metrics = {name: total / count if count else np.nan for name, total in zip(METRICS, sums, strict=True)}
            if count and not np.isfinite(sums).all():
                raise NonFiniteError(
                    f"The loss or its gradient is not finite: {metrics}. Go on from a checkpoint, with a lower learning_rate."
                )
            metrics |= {"explained_variance": explained, **self._rates.popleft()}
        return metrics

    def _bind(self, rollout: Rollout) -> None:
        """Get ready to learn from this rollout, again and again."""
        config = self.config
        if self.learns_from_segments:
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
        self._rollout, self._all_valid = rollout, rollout.all_valid
        self._prepare = self.graphs.wrap(self._prepare_update, "learn")
        self._epoch = self.graphs.wrap(self._learn_epoch, "learn")

    # What follows is captured: the same launches on the same memory, whatever the numbers are.

    @torch.no_grad()
    def _prepare_update(self) -> None:
        rollout = self._bound
        rollout.compute_advantages(self.config.gamma, self.config.gae_lambda)
        self._explained.copy_(explained_variance_on_device(rollout))
        self._sums.zero_()

    def _learn_epoch(self) -> None:
        config, rollout = self.config, self._bound
        if config.vtrace:
            self._correct_advantages(rollout)
        if config.priority_alpha:
            with torch.no_grad():
                magnitude = (rollout.advantages.abs() * rollout.valid).sum(0).double()
                self._probability.copy_(segment_probabilities(magnitude, config.priority_alpha))
        elif config.shuffle:
            self._kernels("shuffle_rows", len(self._order), len(self._order), self._key, self._order)
        self._epoch_kl.zero_()
        for k in range(self._minibatches_per_epoch):
            chosen, weights = self._draw_minibatch(k)
            means = self._learn_fused(chosen) if self.fused is not None else self._learn_minibatch(chosen, weights)
            norm = self._flat.step(self.fused.partials if self.fused is not None else None)
            self._count(means, norm)
        self._key.add_(NEXT_KEY)

    @torch.no_grad()
    def _count(self, means: Tensor, norm: Tensor) -> None:
        """Add a minibatch to the metrics, unless no step of it is valid."""
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
            cumulative = self._probability.cumsum(0)  # not multinomial, which knows no more than 2^24 rows
            rows = torch.searchsorted(cumulative, self._uniforms[:, 0].double() * cumulative[-1], right=True)
            rows = rows.clamp_max(len(cumulative) - 1)
            weights = (len(cumulative) * self._probability[rows]) ** self._knobs[1]
            return rows, weights.float()

    def _learn_minibatch(self, chosen: Tensor, weights: Tensor | None) -> Tensor:
        """Leave the gradients of one minibatch in the flat tensor; returns the first five METRICS."""
        config, rollout = self.config, self._bound
        whole = self.learns_from_segments
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
        from hurtle.native.triton.loss import ppo_gradients

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
        """A minibatch without a step that counts changes nothing: the optimizer leaves out gradients that are not finite."""
        if valid is not None:
            flat = self.parameters.gradients
            flat.copy_(torch.where(self._any_valid, flat, torch.nan))

    @torch.no_grad()
    def _learn_fused(self, chosen: Tensor) -> Tensor:
        """The same by kernels that know the policy; the gradients are in their partial sums."""
        config, rollout = self.config, self._bound
        fields = (rollout.actions, rollout.log_probs, rollout.values, rollout.advantages, rollout.returns)
        if config.normalize_advantages and len(chosen) > 1:
            std, mean = torch.std_mean(rollout.advantages.flatten()[chosen])
            moments = torch.stack([mean, 1.0 / (std + 1e-8)])
        else:
            moments = self._unchanged
        return self.fused.gradients(
            rollout.obs.flatten(0, 1), chosen, *(field.flatten(0, 1) for field in fields), moments, self._knobs[:1],
            config.value_coef, config.entropy_coef, config.clip_values,
        )  # fmt: skip

    @torch.no_grad()
    def _correct_advantages(self, rollout: Rollout) -> None:
        """V-trace with the ratios of the policy as it is now."""
        with autocast(self.device, self._half):
            log_probs, _, _ = self._evaluate(self.policy, rollout.segments(self._all_rows, keep_all=True))
        self._use_vtrace(rollout, log_probs.float().view_as(rollout.log_probs) - rollout.log_probs)

    def close(self) -> None:
        """Let go of the graphs and of the rollout."""
        self.graphs.close()
        self._rollout = None
        self.__dict__.pop("_prepare", None)
        self.__dict__.pop("_epoch", None)

    @property
    def _bound(self) -> Rollout:
        assert self._rollout is not None
        return self._rollout


def _valid_part(
    log_probs: Tensor, entropies: Tensor, values: Tensor, batch: Minibatch, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor, Minibatch]:
    """What `ppo_loss` takes, without the steps that do not count."""
    kept = batch._replace(
        log_probs=batch.log_probs[valid],
        values=batch.values[valid],
        advantages=batch.advantages[valid],
        returns=batch.returns[valid],
        weights=None if batch.weights is None else batch.weights[valid],
    )
    return log_probs[valid], entropies[valid], values[valid], kept
