"""IMPALA: an actor–critic for rollouts of policies some updates older (Espeholt et al., 2018; settings: impala_config.py).

rollout → minibatches of whole rows → the policy's ratios and values as they are now → V-trace → one loss → a step each.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hurtle.algorithms.a2c import a2c_loss
from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.impala_config import IMPALAConfig
from hurtle.algorithms.ppo import (
    AUTOCAST,
    annealed,
    evaluate_actions,
    explained_variance,
    joined_minibatch,
    not_finite,
    shuffle_generator,
)
from hurtle.buffers.rollout import Done, Minibatch, Rollout
from hurtle.collect.postprocess import Postprocess
from hurtle.contracts import Learner, Metrics, Weights
from hurtle.kernels.cuda_graphs import autocast
from hurtle.kernels.optimizers import Optimizers
from hurtle.kernels.ranks import ALONE, Ranks, merged_means
from hurtle.kernels.vtrace import vtrace, vtrace_cuda
from hurtle.policies.policy import Policy

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm")
"""Of each minibatch; approx_kl tells how far the policy has moved since it acted."""


class IMPALA(Learner):
    """The learner.

    Args:
        policy: Trained in place.
        config: The settings.
        setup: Seed, reward preprocessing, precision.
    """

    takes_lag = True
    rank_state = ("generator", "postprocess")

    def __init__(self, policy: Policy, config: IMPALAConfig, setup: LearnerSetup | None = None):
        setup = setup or LearnerSetup()
        self.ranks: Ranks = setup.ranks or ALONE
        self.policy, self.config, self.updates = policy, config, 0
        self._autocast = AUTOCAST[setup.precision]
        # Not `postprocess`: what follows a rollout is valued by the policy as it is now, which no collector can do sooner.
        self._postprocess = Postprocess(policy, config.gamma, config.trace_lambda, setup.rewards, self._autocast)
        self._generator = shuffle_generator(setup.drawing_seed)
        self.optimizer: Any = Optimizers(
            config.optimizer, policy, config.learning_rate, config.adam_eps, config.weight_decay, self.ranks
        )
        self._evaluate = torch.compile(evaluate_actions) if setup.compiled else evaluate_actions
        self._values = torch.zeros(0)  # of the rollout's steps, as the policy is now

    def update(self, rollout: Rollout, progress: float = 0.0) -> Metrics:
        """Learn from one rollout; see `Learner.update`. Losses are means over the minibatches."""
        learning_rate = annealed(self.config.learning_rate, self.config.anneal_learning_rate, progress)
        self.optimizer.set_learning_rate(learning_rate)
        rollout.done = (rollout.done & ~Done.BOOTSTRAP) | Done.ADVANTAGES | self.bootstrap(rollout)
        self._postprocess(rollout)
        self._values = torch.zeros_like(rollout.values)
        rows = torch.arange(rollout.num_rows)
        if self.config.num_minibatches > 1:
            rows = torch.randperm(rollout.num_rows, generator=self._generator)
        parts = rows.to(rollout.device).tensor_split(self.config.num_minibatches)
        seen = [losses for part in parts if (losses := self.step(rollout, part)) is not None]
        self.updates += 1
        metrics = dict.fromkeys(METRICS, math.nan)
        if seen:
            metrics = dict(zip(METRICS, torch.stack(seen).mean(0).tolist(), strict=True))
            if not all(map(math.isfinite, metrics.values())):
                raise not_finite(metrics)
        explained = explained_variance(rollout, rollout.returns - self._values, self.ranks)
        return {**metrics, "explained_variance": explained, "learning_rate": learning_rate}

    def bootstrap(self, rollout: Rollout) -> Done:
        """Value what follows the rollout with the policy as it is now, if that is faster here than in `Postprocess`."""
        return Done.NOTHING

    def step(self, rollout: Rollout, rows: Tensor) -> Tensor | None:
        """One gradient step on some rows; returns the METRICS, None if the rows have no valid steps."""
        config, batch = self.config, rollout.segments(rows)
        if not len(batch.actions):
            return self._step_together(batch) if self.ranks.several else None
        with autocast(rollout.device, self._autocast):
            log_probs, entropies, values = (part.float() for part in self._evaluate(self.policy, batch))
        self.correct(rollout, rows, batch, log_probs, values)
        targets, advantages = (field[:, rows].flatten() for field in (rollout.returns, rollout.advantages))
        if batch.kept is not None:
            targets, advantages = targets[batch.kept], advantages[batch.kept]
        batch = batch._replace(returns=targets, advantages=advantages)
        if self.ranks.several:
            return self._step_together(batch, log_probs, entropies, values)
        losses = a2c_loss(log_probs, entropies, values, batch, config)
        grad_norm = self.optimizer.step(losses.total, config.max_grad_norm)
        return torch.stack([losses.policy_loss, losses.value_loss, losses.entropy, losses.approx_kl, grad_norm])

    def _step_together(self, batch: Minibatch, *evaluated: Tensor) -> Tensor | None:
        """The same on the steps of all ranks; None if they have none.

        Args:
            batch: This rank's.
            evaluated: Log-probs, entropies and values of its steps; nothing if it has none.
        """
        batch, weight = joined_minibatch(self.ranks, batch, self.config.normalize_advantages)
        if math.isnan(weight):
            return None
        found, loss = torch.zeros(len(METRICS) - 1, device=batch.advantages.device), None
        if evaluated:
            log_probs, entropies, values = evaluated
            losses = a2c_loss(log_probs, entropies, values, batch, replace(self.config, normalize_advantages=False))
            found = torch.stack([losses.policy_loss, losses.value_loss, losses.entropy, losses.approx_kl])
            loss = losses.total * weight
        norm = self.optimizer.step(loss, self.config.max_grad_norm)
        merged = merged_means(self.ranks, found.unsqueeze(0), found.new_tensor([weight]))[0]
        return torch.cat([merged, norm.view(1)])

    @torch.no_grad()
    def correct(self, rollout: Rollout, rows: Tensor, batch: Minibatch, log_probs: Tensor, values: Tensor) -> None:
        """Write V-trace's targets and advantages of some rows into the rollout.

        Args:
            rollout: With the values of what follows.
            rows: The rows.
            batch: Their steps.
            log_probs: Of the batch's actions now, [batch].
            values: Of its observations now, [batch].
        """
        ratios, now = (torch.zeros(rollout.num_steps * len(rows), device=rollout.device) for _ in range(2))
        kept = slice(None) if batch.kept is None else batch.kept
        ratios[kept], now[kept] = log_probs - batch.log_probs, values
        lead = (rollout.num_steps, len(rows))
        self._values[:, rows] = now.view(lead)
        found = vtrace_of(rollout, rows, ratios.view(lead), now.view(lead), self.config)
        rollout.returns[:, rows], rollout.advantages[:, rows] = found

    def weights(self) -> Weights:
        """See `Learner.weights`."""
        return Weights.of(self.policy, self.updates)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer, the minibatch stream and the reward statistics."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "postprocess": self._postprocess.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.optimizer.load_state_dict(saved["optimizer"])
        self._generator.set_state(saved["generator"].cpu())
        self._postprocess.load_state_dict(saved["postprocess"])
        self.updates = saved["updates"]


def vtrace_of(
    rollout: Rollout, rows: Tensor, log_ratios: Tensor, values: Tensor, config: IMPALAConfig
) -> tuple[Tensor, Tensor]:
    """V-trace's targets and advantages of some rows of a rollout, from ratios and values as they are now; all [T, rows]."""
    names = ("terminated", "truncated", "final_values")
    fields = [log_ratios, rollout.scaled_rewards[:, rows], values]
    fields += [*(getattr(rollout, name)[:, rows] for name in names), rollout.last_values[rows]]
    valid = None if rollout.all_valid else rollout.kernel_array(rollout.valid[:, rows].contiguous())
    compute: Any = vtrace_cuda if rollout.device.type == "cuda" else vtrace
    settings = (config.gamma, config.trace_lambda, config.rho_clip, config.c_clip)
    targets, advantages = compute(*(rollout.kernel_array(field.contiguous()) for field in fields), *settings, valid)
    return torch.as_tensor(targets), torch.as_tensor(advantages)
