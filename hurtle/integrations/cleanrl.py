"""`CleanRLAgent`: adds the two methods that CleanRL-style PPO loops call to a `TorchPolicy`.

The envs need no adapter: such a loop works with `hurtle.make_vec` directly; examples/cleanrl_ppo.py is one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hurtle.policies.contract import checked_policy, evaluate, per_row


class CleanRLAgent(nn.Module):
    """A policy with the interface of the `Agent` in CleanRL's scripts.

    Args:
        policy: A `torch.nn.Module` with `encode` and `decode`, see `TorchPolicy`; it is trained in place.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body, self.actor, self.critic = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)
        ...
        ...     def encode(self, obs):
        ...         return self.body(obs).tanh()
        ...
        ...     def decode(self, features):
        ...         return torch.distributions.Categorical(logits=self.actor(features)), self.critic(features)
        >>> agent = CleanRLAgent(Net())
        >>> action, log_prob, entropy, value = agent.get_action_and_value(torch.zeros(3, 4))
        >>> action.shape, log_prob.shape, entropy.shape, value.shape
        (torch.Size([3]), torch.Size([3]), torch.Size([3]), torch.Size([3, 1]))
    """

    def __init__(self, policy: nn.Module):
        super().__init__()
        self.policy = checked_policy(policy)

    def get_value(self, x: Any) -> torch.Tensor:
        """The values `[batch, 1]` of a batch of observations."""
        return evaluate(self.policy, x)[1]

    def get_action_and_value(
        self, x: Any, action: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Actions (sampled unless given), their log-probabilities and entropies `[batch]`, and values `[batch, 1]`."""
        distribution, value = evaluate(self.policy, x)
        if action is None:
            action = distribution.sample()
        return action, per_row(distribution.log_prob(action)), per_row(distribution.entropy()), value
