"""An off-policy algorithm of your own: soft Q-learning with a replay buffer, on Hurtle's collectors, runs and exports.

The policy is its own Q-function: Q(s, a) = V(s) + temperature · log π(a | s), whose soft maximum over actions is V(s). So a TD
step on Q trains both, and sampling from π explores.

hurtle train cartpole --algorithm examples/soft_q.py:SoftQ --num-envs 8
python examples/soft_q.py
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Annotated, Any

import torch

import hurtle
from hurtle.algorithms.algorithm import AlgorithmConfig, LearnerSetup
from hurtle.buffers.replay import Replay
from hurtle.buffers.rollout import Rollout
from hurtle.contracts import Learner, Metrics, Weights
from hurtle.policies.policy import Policy
from hurtle.ranges import at_least, between, positive


@dataclass(frozen=True)
class SoftQConfig(AlgorithmConfig):
    """Soft Q-learning."""

    num_steps: Annotated[int, at_least(1)] = 4
    """Steps per env between updates."""
    learning_rate: Annotated[float, positive()] = 1e-3
    """Step size of Adam."""
    temperature: Annotated[float, positive()] = 0.02
    """Weight of the entropy: higher explores more."""
    capacity: Annotated[int, at_least(1)] = 100_000
    """Steps to remember."""
    batch_size: Annotated[int, at_least(1)] = 128
    """Transitions per gradient step."""
    gradient_steps: Annotated[int, at_least(1)] = 16
    """Gradient steps per update."""
    n_step: Annotated[int, at_least(1)] = 3
    """Rewards that are summed before bootstrapping."""
    priority_alpha: Annotated[float, at_least(0)] = 0.6
    """Exponent of priorities; 0 draws uniformly."""
    target_rate: Annotated[float, between(0, 1)] = 0.01
    """How far the target network moves toward the policy in a gradient step."""


class SoftQ(Learner):
    """TD steps on transitions from a replay buffer, toward a slowly moving copy of the policy."""

    Config = SoftQConfig

    def __init__(self, policy: Policy, config: SoftQConfig, setup: LearnerSetup):
        self.policy, self.config, self.setup, self.updates = policy, config, setup, 0
        self.target = copy.deepcopy(policy).requires_grad_(False)
        self.optimizer = torch.optim.Adam(policy.parameters(), config.learning_rate)
        self.saved_replay: dict[str, Any] | None = None

    def prepare(self, rollout: Rollout) -> None:
        """Make the replay buffer: a rollout tells the shapes."""
        c = self.config
        self.replay = Replay(
            rollout, c.capacity, n_step=c.n_step, gamma=c.gamma, priority_alpha=c.priority_alpha, seed=self.setup.seed
        )
        if self.saved_replay is not None:
            self.replay.load_state_dict(self.saved_replay)

    def update(self, rollout: Rollout, progress: float = 0.0) -> Metrics:
        """Remember the rollout, then learn from what is remembered."""
        self.replay.add(rollout)
        losses = [self._gradient_step(self.replay) for _ in range(self.config.gradient_steps)]
        self.updates += 1
        return {"value_loss": torch.stack(losses).mean().item(), "replay": len(self.replay) / self.replay.capacity}

    def _gradient_step(self, replay: Replay) -> torch.Tensor:
        batch, temperature = replay.sample(self.config.batch_size, beta=0.4), self.config.temperature
        with torch.no_grad():
            _, following, _ = self.target(batch.next_obs, mask=batch.next_masks)
            targets = batch.rewards + batch.discounts * following
        distribution, values, _ = self.policy(batch.obs, mask=batch.masks)
        errors = values + temperature * distribution.log_prob(batch.actions) - targets
        loss = (batch.weights * torch.nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        replay.update_priorities(batch.ids, errors)
        with torch.no_grad():
            for own, new in zip(self.target.parameters(), self.policy.parameters(), strict=True):
                own.lerp_(new, self.config.target_rate)
        return loss.detach()

    def weights(self) -> Weights:
        """What the collector acts with next."""
        return Weights.of(self.policy, self.updates)

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs besides the policy; the replay buffer too, so that it is exact."""
        parts = {"optimizer": self.optimizer, "target": self.target, "replay": self.replay}
        return {**{name: part.state_dict() for name, part in parts.items()}, "updates": self.updates}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.optimizer.load_state_dict(saved["optimizer"])
        self.target.load_state_dict(saved["target"])
        self.saved_replay, self.updates = saved["replay"], saved["updates"]


if __name__ == "__main__":
    hurtle.train("cartpole", algorithm=SoftQ, total_steps=40_000, num_envs=8)
