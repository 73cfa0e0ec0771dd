"""Advantage actor–critic: one full-batch gradient step per short rollout (settings: a2c_config.py).

rollout → postprocessing → one loss (advantages are not normalized) → one RMSprop step. Knows no env, process or device.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hurtle.algorithms.a2c_config import A2CConfig
from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.ppo import (
    AUTOCAST,
    Losses,
    annealed,
    evaluate_actions,
    explained_variance,
    joined_minibatch,
    not_finite,
)
from hurtle.buffers.rollout import Minibatch, Rollout
from hurtle.collect.postprocess import Postprocess
from hurtle.contracts import Learner, Metrics, Weights
from hurtle.kernels.cuda_graphs import autocast
from hurtle.kernels.optimizers import Optimizers
from hurtle.kernels.ranks import ALONE, Ranks, merged_means
from hurtle.policies.policy import Policy

METRICS = ("policy_loss", "value_loss", "entropy", "grad_norm")


def a2c_loss(log_probs: Tensor, entropies: Tensor, values: Tensor, batch: Minibatch, config: Any) -> Losses:
    """The loss of one minibatch; config: A2C's, or IMPALA's. No ratio is clipped."""
    advantages, log_ratio = batch.advantages, (log_probs - batch.log_probs).detach()
    if config.normalize_advantages and len(advantages) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = -(advantages * log_probs).mean()
    value_loss, entropy = 0.5 * (values - batch.returns).square().mean(), entropies.mean()
    total = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    approx_kl = (log_ratio.exp() - 1 - log_ratio).mean()
    return Losses(total, policy_loss.detach(), value_loss.detach(), entropy.detach(), approx_kl, torch.zeros_like(approx_kl))


class A2C(Learner):
    """The learner.

    Args:
        policy: Trained in place.
        config: The settings.
        setup: Reward preprocessing, precision.
    """

    rank_state = ("postprocess",)

    def __init__(self, policy: Policy, config: A2CConfig, setup: LearnerSetup | None = None):
        setup = setup or LearnerSetup()
        self.ranks: Ranks = setup.ranks or ALONE
        self.policy, self.config, self.updates = policy, config, 0
        self._autocast = AUTOCAST[setup.precision]
        self.postprocess = Postprocess(policy, config.gamma, config.gae_lambda, setup.rewards, self._autocast)
        self.optimizer: Any = Optimizers(
            config.optimizer, policy, config.learning_rate, config.adam_eps, config.weight_decay, self.ranks
        )
        self._evaluate = torch.compile(evaluate_actions) if setup.compiled else evaluate_actions

    def update(self, rollout: Rollout, progress: float = 0.0) -> Metrics:
        """Learn from one rollout; see `Learner.update`."""
        learning_rate = annealed(self.config.learning_rate, self.config.anneal_learning_rate, progress)
        self.optimizer.set_learning_rate(learning_rate)
        self.postprocess(rollout)
        explained = self.explained(rollout)
        self.updates += 1
        metrics = dict.fromkeys(METRICS, float("nan"))
        if self.ranks.sums(rollout.num_valid)[0] if self.ranks.several else rollout.num_valid:
            metrics = dict(zip(METRICS, self.step(rollout), strict=True))
            if not all(map(math.isfinite, metrics.values())):
                raise not_finite(metrics)
        return {**metrics, "explained_variance": explained, "learning_rate": learning_rate}

    def explained(self, rollout: Rollout) -> float:
        """See `explained_variance`."""
        return explained_variance(rollout, ranks=self.ranks)

    def step(self, rollout: Rollout) -> list[float]:
        """One gradient step; returns the METRICS."""
        config = self.config
        if self.policy.is_recurrent:
            batch = rollout.segments(torch.arange(rollout.num_rows, device=rollout.device))
        else:
            batch = rollout.steps(rollout.valid_steps())
        if self.ranks.several:
            return self._step_together(batch)
        with autocast(batch.advantages.device, self._autocast):
            log_probs, entropies, values = (part.float() for part in self._evaluate(self.policy, batch))
        losses = a2c_loss(log_probs, entropies, values, batch, config)
        grad_norm = self.optimizer.step(losses.total, config.max_grad_norm)
        return torch.stack([losses.policy_loss, losses.value_loss, losses.entropy, grad_norm]).tolist()

    def _step_together(self, batch: Minibatch) -> list[float]:
        """The same on the steps of all ranks."""
        batch, weight = joined_minibatch(self.ranks, batch, self.config.normalize_advantages)
        found, loss = torch.zeros(len(METRICS) - 1, device=batch.advantages.device), None
        if weight:
            with autocast(batch.advantages.device, self._autocast):
                log_probs, entropies, values = (part.float() for part in self._evaluate(self.policy, batch))
            losses = a2c_loss(log_probs, entropies, values, batch, replace(self.config, normalize_advantages=False))
            found, loss = torch.stack([losses.policy_loss, losses.value_loss, losses.entropy]), losses.total * weight
        norm = self.optimizer.step(loss, self.config.max_grad_norm)
        merged = merged_means(self.ranks, found.unsqueeze(0), found.new_tensor([weight]))[0]
        return [*merged.tolist(), norm.item()]

    def weights(self) -> Weights:
        """See `Learner.weights`."""
        return Weights.of(self.policy, self.updates)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer and the reward statistics."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "postprocess": self.postprocess.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.optimizer.load_state_dict(saved["optimizer"])
        self.postprocess.load_state_dict(saved["postprocess"])
        self.updates = saved["updates"]
