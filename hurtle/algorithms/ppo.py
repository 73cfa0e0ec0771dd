"""Proximal policy optimization, top to bottom: the loss, the update (the settings: configs.py).

rollout → advantages → epochs of minibatches → clipped loss → clipped gradients → optimizer. Knows no env, process or device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hurtle.algorithms.configs import PPOConfig
from hurtle.algorithms.optimizers import Optimizers
from hurtle.buffers.rollout import Minibatch, Rollout
from hurtle.errors import HurtleError, NonFiniteError
from hurtle.native.rng import stream_state
from hurtle.native.vtrace import vtrace, vtrace_cuda
from hurtle.policies.policy import Policy

SHUFFLE_STREAM = 2
METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
"""Of each minibatch."""


class Losses(NamedTuple):
    """What one minibatch gave; all scalars."""

    total: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor


def evaluate_actions(policy: Policy, batch: Minibatch) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and entropies of the batch's actions, and values, under the policy as it is now: three times `[batch]`."""
    if batch.starts is None:
        distribution, values, _ = policy(batch.obs, mask=batch.masks)
        return distribution.log_prob(batch.actions), distribution.entropy(), values
    distribution, values, _ = policy.forward_sequence(batch.obs, batch.state, batch.starts, batch.masks)
    if batch.kept is None:
        return distribution.log_prob(batch.actions), distribution.entropy(), values
    # Steps that nobody decided were fed to the memory, and end here. As their actions, which are never looked at, they get the
    # first of the others': a legal one, since even an unused log-prob of an impossible action would make gradients NaN.
    filler = batch.actions[:1].expand(len(values), *batch.actions.shape[1:])
    actions = filler.index_copy(0, batch.kept, batch.actions)
    log_probs, entropies = distribution.log_prob(actions), distribution.entropy()
    return log_probs[batch.kept], entropies[batch.kept], values[batch.kept]


def ppo_loss(
    log_probs: Tensor, entropies: Tensor, values: Tensor, batch: Minibatch, clip_range: Any, config: PPOConfig
) -> Losses:
    """PPO's loss of one minibatch, from the policy's view of it now and when it acted; clip_range may be a tensor."""
    advantages = batch.advantages
    if config.normalize_advantages and len(advantages) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    if batch.weights is not None:
        advantages = advantages * batch.weights

    log_ratio = log_probs - batch.log_probs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    policy_loss = -torch.min(advantages * ratio, advantages * clipped).mean()

    value_error = (values - batch.returns) ** 2
    if config.clip_values:
        near = batch.values + (values - batch.values).clamp(-clip_range, clip_range)
        value_error = torch.max(value_error, (near - batch.returns) ** 2)
    value_loss = 0.5 * value_error.mean()

    entropy = entropies.mean()
    total = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    with torch.no_grad():
        approx_kl = (ratio - 1 - log_ratio).mean()  # Schulman's low-variance estimate of KL(old || new)
        clip_fraction = ((ratio - 1).abs() > clip_range).float().mean()
    return Losses(total, policy_loss.detach(), value_loss.detach(), entropy.detach(), approx_kl, clip_fraction)


class PPO:
    """The learner: holds the optimizer and the stream of minibatches.

    Args:
        policy: Trained in place.
        config: The options above.
        seed: Of the minibatches, which have a random stream of their own.
        compiled: Run the loss and its gradients through `torch.compile`.
        autocast: A dtype for mixed precision, or None.
    """

    def __init__(
        self,
        policy: Policy,
        config: PPOConfig,
        seed: int = 0,
        compiled: bool = False,
        autocast: torch.dtype | None = None,
    ):
        self.policy, self.config = policy, config
        self.optimizer = Optimizers(config.optimizer, policy, config.learning_rate, config.adam_eps, config.weight_decay)
        self._generator = torch.Generator().manual_seed(stream_state(seed, SHUFFLE_STREAM) >> 1)
        self._autocast = autocast
        self._minibatch_loss = torch.compile(self._loss) if compiled else self._loss
        self._compiled = compiled

    def update(self, rollout: Rollout, remaining: float = 1.0) -> dict[str, float]:
        """Learn from one rollout.

        Args:
            rollout: Filled by a collector.
            remaining: The part of the run that is still to come, from 1 down to 0, for everything that is annealed.

        Returns:
            Metrics; losses are means over the minibatches.

        Raises:
            NonFiniteError: The loss or a gradient is not finite.
        """
        config = self.config
        learning_rate = config.learning_rate * (remaining if config.anneal_learning_rate else 1.0)
        clip_range = config.clip_range * (remaining if config.anneal_clip_range else 1.0)
        self.optimizer.set_learning_rate(learning_rate)
        rollout.use_advantages(config.gamma, config.gae_lambda)
        explained = explained_variance(rollout)

        seen = self._epochs(rollout, remaining, clip_range)
        metrics = dict(zip(METRICS, seen.mean(0).tolist(), strict=True))
        if len(seen) and not seen.isfinite().all():
            raise NonFiniteError(
                f"The loss or its gradient is not finite: {metrics}. Go on from a checkpoint, with a lower learning_rate."
            )
        return {**metrics, "explained_variance": explained, "learning_rate": learning_rate, "clip_range": clip_range}

    def _epochs(self, rollout: Rollout, remaining: float, clip_range: float) -> Tensor:
        """Learn from the rollout, epoch by epoch; returns the METRICS of each minibatch, `[minibatches, 6]`."""
        config = self.config
        # Compiled code would be compiled again for every new number, but not for a tensor.
        limit: Any = torch.tensor(clip_range, device=rollout.device) if self._compiled else clip_range
        seen: list[Tensor] = []
        for _ in range(config.num_epochs):
            if config.vtrace:
                self._correct_advantages(rollout)
            first = len(seen)
            for batch in self._minibatches(rollout, remaining):
                if not len(batch.actions):  # steps of absent agents alone
                    continue
                losses = self._minibatch_loss(batch, limit)
                grad_norm = self.optimizer.step(losses.total, config.max_grad_norm)
                seen.append(torch.stack([*losses[1:], grad_norm]))
            if seen[first:] and self._went_too_far(torch.stack(seen[first:])):
                break
        return torch.stack(seen) if seen else torch.zeros(0, len(METRICS))

    def _went_too_far(self, seen: Tensor) -> bool:
        """Whether the mean KL of an epoch's minibatches is beyond the target."""
        return self.config.target_kl is not None and bool(seen[:, METRICS.index("approx_kl")].mean() > self.config.target_kl)

    def _loss(self, batch: Minibatch, clip_range: Any) -> Losses:
        with self._mixed_precision(batch.advantages.device):
            log_probs, entropies, values = evaluate_actions(self.policy, batch)
        return ppo_loss(log_probs.float(), entropies.float(), values.float(), batch, clip_range, self.config)

    def _mixed_precision(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, self._autocast, enabled=self._autocast is not None)

    def _minibatches(self, rollout: Rollout, remaining: float) -> Iterator[Minibatch]:
        """One epoch."""
        for chosen, weights in self._draw(rollout, remaining):
            if self.learns_from_segments:
                yield rollout.segments(chosen.to(rollout.device), None if weights is None else weights.to(rollout.device))
            else:
                yield rollout.steps(chosen)

    @property
    def learns_from_segments(self) -> bool:
        """Whether minibatches are whole segments: where the policy remembers or priorities are asked for."""
        return self.policy.is_recurrent or self.config.priority_alpha > 0

    def _draw(self, rollout: Rollout, remaining: float) -> Iterator[tuple[Tensor, Tensor | None]]:
        """What the minibatches of one epoch are made of: flat indices of steps, or rows of segments with their weights."""
        config = self.config
        if not self.learns_from_segments:
            steps = rollout.valid_steps()
            if config.shuffle:
                steps = steps[torch.randperm(len(steps), generator=self._generator).to(rollout.device)]
            count = max(1, -(-len(steps) // config.minibatch_size))
            for chosen in steps.tensor_split(count):  # absent agents leave odd numbers: parts as equal as can be
                yield chosen, None
            return
        size = segments_per_minibatch(config.minibatch_size, rollout.num_steps)
        rows = torch.arange(rollout.num_rows)
        if not config.priority_alpha:
            order = rows[torch.randperm(len(rows), generator=self._generator)] if config.shuffle else rows
            for chosen in order.split(size):
                yield chosen, None
            return
        beta = config.priority_beta + (1 - config.priority_beta) * (1 - remaining)
        magnitude = (rollout.advantages.abs() * rollout.valid).sum(0).cpu()
        probability = segment_probabilities(magnitude, config.priority_alpha)
        for _ in range(rollout.num_rows // size):
            chosen = torch.multinomial(probability, size, replacement=True, generator=self._generator)
            yield chosen, (rollout.num_rows * probability[chosen]) ** -beta

    @torch.no_grad()
    def _correct_advantages(self, rollout: Rollout) -> None:
        """V-trace with the ratios of the policy as it is now."""
        batch = rollout.segments(torch.arange(rollout.num_rows, device=rollout.device))._replace(kept=None)
        batch = batch._replace(actions=rollout.actions.flatten(0, 1))
        with self._mixed_precision(rollout.device):
            log_probs, _, _ = evaluate_actions(self.policy, batch)
        self._use_vtrace(rollout, log_probs.float().view_as(rollout.log_probs) - rollout.log_probs)

    def _use_vtrace(self, rollout: Rollout, log_ratios: Tensor) -> None:
        config = self.config
        settings = (config.gamma, config.gae_lambda, config.rho_clip, config.c_clip)
        compute, arrays = rollout.kernel(vtrace, vtrace_cuda)
        targets, advantages = compute(rollout.kernel_array(log_ratios), *arrays, *settings, rollout.kernel_valid())
        rollout.returns.copy_(torch.as_tensor(targets))
        rollout.advantages.copy_(torch.as_tensor(advantages))

    def state_dict(self) -> dict[str, Any]:
        """The optimizer and the stream of minibatches; the policy is saved by who owns it."""
        return {"optimizer": self.optimizer.state_dict(), "generator": self._generator.get_state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.optimizer.load_state_dict(saved["optimizer"])
        self._generator.set_state(saved["generator"].cpu())


def segment_probabilities(magnitude: Tensor, alpha: float) -> Tensor:
    """Probabilities ∝ magnitude^alpha of segments; none is ever left out for good. [N] -> [N]."""
    weight = magnitude**alpha + 1e-6
    return weight / weight.sum()


def segments_per_minibatch(minibatch_size: int, num_steps: int) -> int:
    """How many whole segments make a minibatch.

    Raises:
        HurtleError: They do not fit.
    """
    if minibatch_size % num_steps:
        raise HurtleError(
            f"Recurrent policies and priorities learn from whole segments: minibatch_size={minibatch_size} must be a "
            f"multiple of num_steps={num_steps}, such as {max(1, round(minibatch_size / num_steps)) * num_steps}."
        )
    return minibatch_size // num_steps


def explained_variance(rollout: Rollout) -> float:
    """1 − Var(returns − values) / Var(returns): 1 is a perfect critic, 0 is no better than a constant."""
    if rollout.device.type != "cpu":
        return explained_variance_on_device(rollout).item()
    returns, errors = rollout.returns.cpu().numpy().ravel(), rollout.advantages.cpu().numpy().ravel()
    if not rollout.all_valid:
        valid = rollout.valid.cpu().numpy().ravel()
        returns, errors = returns[valid], errors[valid]
    if len(returns) < 2:
        return math.nan
    with np.errstate(all="ignore"):  # what is not finite is the update's to refuse
        returns, errors = returns - returns.mean(), errors - errors.mean()
        variance = np.dot(returns, returns)
        return float(1 - np.dot(errors, errors) / variance) if variance else math.nan


def explained_variance_on_device(rollout: Rollout) -> Tensor:
    """The same without a word to the host: [1]."""
    returns, errors = rollout.returns.double(), rollout.advantages.double()
    if rollout.all_valid:
        return (1 - errors.var() / returns.var()).float().view(1)
    count = rollout.valid.sum()

    def spread(numbers: Tensor) -> Tensor:
        mean = torch.where(rollout.valid, numbers, 0.0).sum() / count
        return torch.where(rollout.valid, (numbers - mean).square(), 0.0).sum()

    return (1 - spread(errors) / spread(returns)).float().view(1)
