"""`ActorCritic`: one or two bodies, a policy head and a value head; `encode` and `decode` for all built-in networks.

obs → body → features → actor → Distribution, critic → value. Knows nothing about what is inside a body.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hurtle.policies.action_head import ActionHead
from hurtle.policies.distributions import Distribution
from hurtle.policies.layers import POLICY_GAIN, VALUE_GAIN, initialized, layer_output


class ActorCritic(nn.Module):
    """A network with the two methods of `TorchPolicy`.

    Args:
        head: The action head.
        make_body: Makes a module that maps observations to features [B, F] and has the attribute `num_features`.
        separate_networks: Give the critic its own body, so that it shares no parameters with the actor.
        orthogonal_init: Gain 0.01 for the policy head and 1 for the value head, zero biases; else torch's default.
        log_std_init: Initial value of a Gaussian's log_std, a parameter that does not depend on the observation.

    Attributes:
        num_features: Width of what `encode` returns: both bodies' features if they are separate.
    """

    def __init__(
        self,
        head: ActionHead,
        make_body: Callable[[], nn.Module],
        separate_networks: bool = False,
        orthogonal_init: bool = True,
        log_std_init: float = 0.0,
    ):
        super().__init__()
        self.head = head
        self.actor_body = make_body()
        self.critic_body = make_body() if separate_networks else None
        size = int(self.actor_body.num_features)  # type: ignore[arg-type]
        self.num_features = 2 * size if separate_networks else size
        self.actor = initialized(nn.Linear(size, head.num_outputs), POLICY_GAIN, orthogonal_init)
        self.critic = initialized(nn.Linear(size, 1), VALUE_GAIN, orthogonal_init)
        self.log_std = nn.Parameter(torch.full((head.log_std_size,), log_std_init)) if head.log_std_size else None

    def encode(self, obs: Tensor) -> Tensor:
        """Features [B, num_features]; with separate networks, the actor's and then the critic's."""
        features = self.actor_body(obs)
        return features if self.critic_body is None else torch.cat([features, self.critic_body(obs)], -1)

    def decode(self, features: Tensor) -> tuple[Distribution, Tensor]:
        """The distribution of actions and the values [B]."""
        for_actor = for_critic = features
        if self.critic_body is not None:
            for_actor, for_critic = features.chunk(2, -1)
        outputs, values = layer_output(self.actor, for_actor), layer_output(self.critic, for_critic)
        return self.head.distribution(outputs, self.log_std), values.squeeze(-1)
