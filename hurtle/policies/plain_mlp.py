"""`plain_mlp`: detects whether a policy is a plain MLP actor–critic, and returns its layers.

policy → input layer, linear layers with their activations; or the reason it is not one. The native gear, the compiled
runtime and the fused GPU kernels each add their own conditions. Knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hurtle.errors import UnsupportedError
from hurtle.policies.greedy import GreedyNetwork
from hurtle.policies.layers import Numbers, OneHot
from hurtle.policies.mlp import MLP, VectorBody
from hurtle.policies.off_policy_actors import TanhActor
from hurtle.policies.policy import Policy
from hurtle.policies.q_network import QNetwork

ACTIVATIONS: dict[type[nn.Module], str] = {nn.Tanh: "tanh", nn.ReLU: "relu", nn.Identity: "none"}


@dataclass(frozen=True, eq=False)
class Dense:
    """A float32 linear layer with a bias, and the name of the activation that follows: tanh, relu or none."""

    linear: nn.Linear
    activation: str


@dataclass(frozen=True, eq=False)
class PlainMLP:
    """The layers of a plain MLP actor–critic.

    Attributes:
        input: Turns observations into vectors.
        actor: Layers from that vector to the policy's outputs; the last one is linear.
        critic: Likewise to the value; if `is_shared`, only the last layer, which follows the actor's hidden ones.
        is_shared: Whether actor and critic share the hidden layers.
    """

    input: Numbers | OneHot
    actor: tuple[Dense, ...]
    critic: tuple[Dense, ...]
    is_shared: bool


def plain_mlp(policy: Policy) -> PlainMLP:
    """The layers of a policy.

    Raises:
        UnsupportedError: It is not a plain MLP; gives the reason.
    """
    if policy.is_recurrent:
        raise UnsupportedError("it has a memory")
    if type(policy.network) is GreedyNetwork and isinstance(policy.network.body, VectorBody):
        body = policy.network.body
        return PlainMLP(body.input, layers_of(body, policy.network.last), (), False)
    if type(policy.network) is not MLP:
        raise UnsupportedError(f"its network is a {type(policy.network).__name__}, not an MLP (policy='mlp' asks for one)")
    return mlp_layers(policy.network)


def mlp_layers(net: MLP) -> PlainMLP:
    """The layers of a network.

    Raises:
        UnsupportedError: They were changed after it was built; gives the reason.
    """
    actor = layers_of(net.actor_body, net.actor)
    critic = layers_of(net.critic_body, net.critic)
    return PlainMLP(net.actor_body.input, actor, critic, net.critic_body is None)  # type: ignore[arg-type]


def acting_layers(net: QNetwork | TanhActor) -> PlainMLP:
    """The layers of an off-policy network, which has no critic.

    Raises:
        UnsupportedError: They are not plain ones; gives the reason.
    """
    if not isinstance(net.body, VectorBody):
        raise UnsupportedError(f"its observations are encoded by a {type(net.body).__name__}")
    if isinstance(net, QNetwork) and (net.kind != "mean" or net.state_value is not None):
        raise UnsupportedError("it is dueling, or has distributions of values")
    last = net.advantage if isinstance(net, QNetwork) else net.last
    return PlainMLP(net.body.input, layers_of(net.body, last), (), True)


def layers_of(body: nn.Module | None, last: nn.Module | None = None) -> tuple[Dense, ...]:
    """The hidden layers of a body, then a last one without activation.

    Raises:
        UnsupportedError: One of them is of another kind.
    """
    modules: list[nn.Module] = [] if body is None else list(body.hidden.children())  # type: ignore[union-attr]
    if len(modules) % 2:
        raise UnsupportedError("its layers were changed after it was built")
    modules += [] if last is None else [last, nn.Identity()]
    return tuple(dense(linear, activation) for linear, activation in zip(modules[::2], modules[1::2], strict=True))


def dense(linear: nn.Module, activation: nn.Module) -> Dense:
    """A layer and its activation, if both are of a known kind."""
    parameters = dict(linear.named_parameters())  # weight_norm and the like have other parameters
    is_known = parameters.keys() == {"weight", "bias"} and parameters["weight"].dtype == torch.float32
    if type(linear) is not nn.Linear or not is_known:
        raise UnsupportedError(f"it has a {type(linear).__name__} where a float32 Linear with a bias is expected")
    if type(activation) not in ACTIVATIONS:
        raise UnsupportedError(f"its activation is {type(activation).__name__}")
    return Dense(linear, ACTIVATIONS[type(activation)])
