"""`Critics`: several Q-functions of observation and action side by side, each layer one batched matrix product.

obs, action → [obs or its features, action] → hidden layers → [E, B, outputs]. Knows nothing of targets or losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hurtle.policies.layers import ACTIVATIONS
from hurtle.policies.mlp import VectorBody

DEFAULT_SIZES = (256, 256)
"""Hidden layers after an encoder of images or nested observations."""


class Critics(nn.Module):
    """`count` critics that differ only in their initial weights.

    Vectors go straight into the hidden layers, which are those of the actor; images and nested observations have an encoder,
    which all critics share.

    Args:
        actor: A `TanhActor` or `SoftmaxActor`, whose body is copied in shape.
        action_size: Numbers of an action; 0 for critics that return the values of all discrete actions.
        num_outputs: Numbers that each critic returns.
        count: How many.
    """

    def __init__(self, actor: Any, action_size: int, num_outputs: int = 1, count: int = 2):
        super().__init__()
        body = actor.body
        if isinstance(body, VectorBody):
            self.encoder: nn.Module = body.input
            linear = [layer for layer in body.hidden if isinstance(layer, nn.Linear)]
            sizes: Sequence[int] = [layer.out_features for layer in linear]
            activation = next((type(layer) for layer in body.hidden if type(layer) in ACTIVATIONS.values()), nn.ReLU)
            has_norms = any(isinstance(layer, nn.LayerNorm) for layer in body.hidden)
        else:
            self.encoder, sizes, activation, has_norms = actor.make_body(), DEFAULT_SIZES, nn.ReLU, False
        num_features = int(self.encoder.num_features)  # type: ignore[arg-type]
        widths = [num_features + action_size, *sizes, num_outputs]
        self.layers = nn.ModuleList(StackedLinear(count, inputs, outputs) for inputs, outputs in pairwise(widths))
        norms = [StackedLayerNorm(count, size) if has_norms else nn.Identity() for size in sizes]
        self.norms, self.activation, self.count = nn.ModuleList(norms), activation(), count

    @property
    def num_stacked(self) -> int:
        """Networks along the first axis of all parameters; an encoder is only there once."""
        return self.count if next(self.encoder.parameters(), None) is None else 1

    def forward(self, obs: Tensor, actions: Tensor | None = None) -> Tensor:
        """[B, …], [B, action_size] in (-1, 1) → [E, B, num_outputs]."""
        x = self.encoder(obs).flatten(1)
        if actions is not None:
            x = torch.cat([x, actions], -1)
        x = x.expand(self.count, *x.shape)
        for layer, norm in zip(self.layers[:-1], self.norms, strict=True):
            x = self.activation(norm(layer(x)))
        return self.layers[-1](x).float()


class StackedLinear(nn.Module):
    """`count` linear layers side by side, initialized as torch does."""

    def __init__(self, count: int, inputs: int, outputs: int):
        super().__init__()
        bound = 1.0 / math.sqrt(max(1, inputs))
        self.weight = nn.Parameter(torch.empty(count, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(count, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """[count, B, inputs] → [count, B, outputs]."""
        if self.weight.shape[-1] == 1 and torch.compiler.is_compiling():  # fused with what makes x, instead of reading it again
            return (x * self.weight.transpose(1, 2)).sum(-1, keepdim=True) + self.bias
        return torch.bmm(x, self.weight) + self.bias


class StackedLayerNorm(nn.Module):
    """`count` layer norms side by side."""

    def __init__(self, count: int, size: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(count, 1, size)), nn.Parameter(torch.zeros(count, 1, size))

    def forward(self, x: Tensor) -> Tensor:
        """[count, B, size] → the same."""
        return functional.layer_norm(x, x.shape[-1:]) * self.weight + self.bias
