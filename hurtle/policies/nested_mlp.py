"""`nested_mlp`: detects whether a network for nested observations consists of embeddings and linear layers, and returns them.

`Structured` → the parts of an observation, each with its layers → hidden layers; or the reason it is not one. For flat
observations: plain_mlp.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from hurtle.emulation.leaves import Leaf
from hurtle.errors import UnsupportedError
from hurtle.kernels.cpu.policy_table import DTYPES
from hurtle.policies.leaf_encoders import Branch, Choices, Encoder, Vector
from hurtle.policies.plain_mlp import Dense, layers_of
from hurtle.policies.structured import Structured

MOST_INPUTS = 512
"""Inputs of all parts, ones and zeros of choices included: learning keeps them as float32 for every step of a rollout."""


@dataclass(frozen=True, eq=False)
class Part:
    """A leaf of the observation and what encodes it.

    Attributes:
        leaf: Where it is in the flat observation.
        num_inputs: Its numbers, or ones and zeros.
        encoder: One linear layer with its activation, or an embedding of each choice.
        compressed: Whether numbers x are replaced by sign(x) log(1 + |x|).
    """

    leaf: Leaf
    num_inputs: int
    encoder: Dense | Choices
    compressed: bool = False


@dataclass(frozen=True, eq=False)
class NestedMLP:
    """The layers of a policy for nested observations; `actor`, `critic` and `is_shared` as in `PlainMLP`, without the parts."""

    parts: tuple[Part, ...]
    actor: tuple[Dense, ...]
    critic: tuple[Dense, ...]
    is_shared: bool


def nested_mlp(net: Structured) -> NestedMLP:
    """The layers of a network for nested observations.

    Raises:
        UnsupportedError: It has other layers, or a body for the critic alone; gives the reason.
    """
    if net.critic_body is not None:
        raise UnsupportedError("its observations are nested, and actor and critic have encoders of their own")
    body: Any = net.actor_body
    parts = tuple(_parts(body.tree, body.layout.tree))
    actor, critic = layers_of(body, net.actor), layers_of(None, net.critic)
    if len(actor) < 2:
        raise UnsupportedError("its observations are nested, and there is no hidden layer")
    odd = [part.leaf for part in parts if body.layout.is_bytes and part.leaf.dtype not in DTYPES]
    if odd:
        raise UnsupportedError(f"{odd[0].path} is {odd[0].dtype}")
    if sum(part.num_inputs for part in parts) > MOST_INPUTS:
        raise UnsupportedError(f"its nested observations have more than {MOST_INPUTS} numbers and choices")
    return NestedMLP(parts, actor, critic, True)


def _parts(encoder: Encoder | nn.Module, tree: Any) -> Iterator[Part]:
    if type(encoder) is Branch:
        for key, entry in zip(encoder.keys, encoder.entries, strict=True):
            yield from _parts(entry, tree[key])
    elif not isinstance(tree, Leaf) or not tree.size:
        raise UnsupportedError(f"a part of its observations is a {type(encoder).__name__}")
    elif type(encoder) is Choices:
        yield Part(tree, encoder.one_hot.num_features, encoder)
    elif type(encoder) is Vector:
        (dense,) = layers_of(encoder)
        yield Part(tree, encoder.input.num_features, dense, encoder.compressed)
    else:
        raise UnsupportedError(f"{tree.path} is encoded by a {type(encoder).__name__}")
