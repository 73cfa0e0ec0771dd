"""Advantage actor–critic: one gradient step per short rollout, on all of it; where it differs from PPO.

rollout → advantages (not normalized) → one loss → one step of RMSprop. Knows no env, process or device.
"""

from __future__ import annotations

from typing import Any

import torch

from hurtle.algorithms.configs import A2CConfig
from hurtle.algorithms.optimizers import Optimizers
from hurtle.algorithms.ppo import evaluate_actions, explained_variance
from hurtle.buffers.rollout import Rollout
from hurtle.errors import NonFiniteError
from hurtle.policies.policy import Policy

METRICS = ("policy_loss", "value_loss", "entropy", "grad_norm")


class A2C:
    """The learner.

    Args:
        policy: Trained in place.
        config: The options above.
        seed: Unused: nothing is drawn at random.
        compiled: Run the policy's view of the rollout through `torch.compile`.
        autocast: A dtype for mixed precision, or None.
    """

    def __init__(
        self,
        policy: Policy,
        config: A2CConfig,
        seed: int = 0,
        compiled: bool = False,
        autocast: torch.dtype | None = None,
    ):
        self.policy, self.config = policy, config
        self.optimizer = Optimizers(config.optimizer, policy, config.learning_rate, config.adam_eps, config.weight_decay)
        self._autocast = autocast
        self._evaluate = torch.compile(evaluate_actions) if compiled else evaluate_actions

    def update(self, rollout: Rollout, remaining: float = 1.0) -> dict[str, float]:
        """Learn from one rollout; see `PPO.update`."""
        config = self.config
        learning_rate = config.learning_rate * (remaining if config.anneal_learning_rate else 1.0)
        self.optimizer.set_learning_rate(learning_rate)
        rollout.use_advantages(config.gamma, config.gae_lambda)

        metrics = self._learn(rollout) if rollout.num_valid else dict.fromkeys(METRICS, float("nan"))
        return {**metrics, "explained_variance": explained_variance(rollout), "learning_rate": learning_rate}

    def _learn(self, rollout: Rollout) -> dict[str, float]:
        """One gradient step; returns the METRICS."""
        config = self.config
        if self.policy.is_recurrent:
            batch = rollout.segments(torch.arange(rollout.num_rows, device=rollout.device))
        else:
            batch = rollout.steps(rollout.valid_steps())
        with torch.autocast(batch.advantages.device.type, self._autocast, enabled=self._autocast is not None):
            log_probs, entropies, values = self._evaluate(self.policy, batch)
        advantages = batch.advantages
        if config.normalize_advantages and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -(advantages * log_probs.float()).mean()
        value_loss = 0.5 * ((values.float() - batch.returns) ** 2).mean()
        entropy = entropies.float().mean()
        total = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        grad_norm = self.optimizer.step(total, config.max_grad_norm)

        seen = torch.stack([policy_loss.detach(), value_loss.detach(), entropy.detach(), grad_norm])
        metrics = dict(zip(METRICS, seen.tolist(), strict=True))
        if not seen.isfinite().all():
            raise NonFiniteError(f"The loss or its gradient is not finite: {metrics}. Try a lower learning_rate.")
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The optimizer; the policy is saved by who owns it."""
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.optimizer.load_state_dict(saved["optimizer"])
