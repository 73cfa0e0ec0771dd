"""`MLP`: linear layers for observations that are vectors, integers, or anything that can be flattened.

obs → float32 or one-hot → flat [B, inputs] → hidden layers → features. Knows nothing of envs.
"""

from __future__ import annotations

from collections.abc import Sequence

from gymnasium import spaces
from torch import Tensor, nn

from hurtle.policies.action_head import ActionHead
from hurtle.policies.actor_critic import ActorCritic
from hurtle.policies.layers import hidden_layers, layers_output, vector_input


class VectorBody(nn.Module):
    """Flattened observations through hidden layers."""

    def __init__(
        self,
        space: spaces.Space,
        hidden_sizes: Sequence[int],
        activation: str,
        orthogonal_init: bool,
        layer_norm: bool = False,
    ):
        super().__init__()
        self.input = vector_input(space)
        self.hidden = hidden_layers(self.input.num_features, hidden_sizes, activation, orthogonal_init, layer_norm)
        self.num_features = hidden_sizes[-1] if hidden_sizes else self.input.num_features

    def forward(self, obs: Tensor) -> Tensor:
        """[B, ...] → [B, num_features]."""
        return layers_output(self.hidden, self.input(obs).reshape(obs.shape[0], self.input.num_features))


class MLP(ActorCritic):
    """The default policy for vector observations.

    Args:
        obs_space: Box, Discrete, MultiDiscrete or MultiBinary; the integers of Discrete kinds become one-hot vectors.
        head: The action head.
        hidden_sizes: Width of each hidden layer.
        activation: "tanh" or "relu".
        separate_networks: Actor and critic share no parameters.
        orthogonal_init: PPO's initialization.
        log_std_init: Initial value of a Gaussian's log_std.
        layer_norm: Layer norm before each activation.
    """

    def __init__(
        self,
        obs_space: spaces.Space,
        head: ActionHead,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        separate_networks: bool = True,
        orthogonal_init: bool = True,
        log_std_init: float = 0.0,
        layer_norm: bool = False,
    ):
        def make_body() -> VectorBody:
            return VectorBody(obs_space, hidden_sizes, activation, orthogonal_init, layer_norm)

        super().__init__(head, make_body, separate_networks, orthogonal_init, log_std_init)
