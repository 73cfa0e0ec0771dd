"""`Structured`: a network built from a structured observation space; takes the emulated env's flat observations.

flat obs → `layout.unflatten` → an encoder for every leaf → concatenated → hidden layers → features. Knows nothing of envs; the
leaf encoders are in leaf_encoders.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.policies.action_head import ActionHead
from hurtle.policies.actor_critic import ActorCritic
from hurtle.policies.layers import hidden_layers
from hurtle.policies.leaf_encoders import encoder_of


class StructuredBody(nn.Module):
    """Flat observations [B, ...] → the tree of the space → features."""

    def __init__(
        self,
        layout: SpaceLayout,
        hidden_sizes: Sequence[int],
        activation: str,
        orthogonal_init: bool,
        layer_norm: bool = False,
    ):
        super().__init__()
        self.layout = layout
        self.tree = encoder_of(layout.space, activation, orthogonal_init)
        self.hidden = hidden_layers(self.tree.num_features, hidden_sizes, activation, orthogonal_init, layer_norm)
        self.num_features = hidden_sizes[-1] if hidden_sizes else self.tree.num_features

    def forward(self, obs: Tensor) -> Tensor:
        """[B, *flat_space.shape] → [B, num_features]."""
        return self.hidden(self.tree(self.layout.unflatten(obs)))


class Structured(ActorCritic):
    """The policy for nested observations: embeddings for discrete leaves, linear layers for vectors, convolutions for images.

    The padding of a Text, Sequence, Graph or OneOf never reaches the features.

    Args:
        layout: Where each leaf of the space is in a flat observation.
        head: The action head.
        hidden_sizes: Width of each layer after the leaves' features are concatenated.
        activation: "tanh" or "relu".
        separate_networks: Actor and critic share no parameters.
        orthogonal_init: PPO's initialization.
        log_std_init: Initial value of a Gaussian's log_std.
        layer_norm: Layer norm before each activation after the leaves.
    """

    def __init__(
        self,
        layout: SpaceLayout,
        head: ActionHead,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        separate_networks: bool = False,
        orthogonal_init: bool = True,
        log_std_init: float = 0.0,
        layer_norm: bool = False,
    ):
        def make_body() -> StructuredBody:
            return StructuredBody(layout, hidden_sizes, activation, orthogonal_init, layer_norm)

        super().__init__(head, make_body, separate_networks, orthogonal_init, log_std_init)
