"""An algorithm of your own: REINFORCE with a learned baseline, on Hurtle's collectors, runs and exports.

hurtle train cartpole --algorithm examples/own_algorithm.py:Reinforce
python examples/own_algorithm.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch.nn.utils import clip_grad_norm_

import hurtle
from hurtle.algorithms.algorithm import AlgorithmConfig, LearnerSetup
from hurtle.buffers.rollout import Rollout
from hurtle.collect.postprocess import Postprocess
from hurtle.contracts import Learner, Metrics, Weights
from hurtle.policies.policy import Policy
from hurtle.ranges import positive


@dataclass(frozen=True)
class ReinforceConfig(AlgorithmConfig):
    """REINFORCE."""

    learning_rate: Annotated[float, positive()] = 3e-3
    """Step size of Adam."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus (exploration)."""


class Reinforce(Learner):
    """One policy-gradient step per rollout: rewards to go minus a baseline that is learned beside the policy."""

    Config = ReinforceConfig

    def __init__(self, policy: Policy, config: ReinforceConfig, setup: LearnerSetup):
        self.policy, self.config, self.updates = policy, config, 0
        # Bootstraps where the rollout ends and where episodes are truncated; λ = 1: returns are rewards to go.
        self.postprocess = Postprocess(policy, config.gamma, 1.0, setup.rewards)
        self.optimizer = torch.optim.Adam(policy.parameters(), config.learning_rate)

    def update(self, rollout: Rollout, progress: float = 0.0) -> Metrics:
        """One gradient step on all of the rollout."""
        self.postprocess(rollout)
        batch = rollout.steps(rollout.valid_steps())  # for recurrent policies: rollout.segments
        distribution, values, _ = self.policy(batch.inputs, mask=batch.masks)
        advantages = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
        policy_loss = -(advantages * distribution.log_prob(batch.actions)).mean()
        value_loss = 0.5 * (values - batch.returns).square().mean()
        entropy = distribution.entropy().mean()
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * (1 - progress)
        self.optimizer.zero_grad()
        (policy_loss + 0.5 * value_loss - self.config.entropy_coef * entropy).backward()
        clip_grad_norm_(self.policy.parameters(), 0.5)
        self.optimizer.step()
        self.updates += 1
        return {"policy_loss": policy_loss.item(), "value_loss": value_loss.item(), "entropy": entropy.item()}

    def weights(self) -> Weights:
        """What the collector acts with next."""
        return Weights.of(self.policy, self.updates)

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs besides the policy."""
        parts = {"optimizer": self.optimizer.state_dict(), "postprocess": self.postprocess.state_dict()}
        return {**parts, "updates": self.updates}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.optimizer.load_state_dict(saved["optimizer"])
        self.postprocess.load_state_dict(saved["postprocess"])
        self.updates = saved["updates"]


if __name__ == "__main__":
    hurtle.train("cartpole", algorithm=Reinforce, total_steps=300_000, num_envs=32, num_steps=32)
