"""Networks with batch norm and weights of unit norm: `BatchNormBody` of an actor, and `BatchNormCritics`.

x → batch norm → (linear → batch norm → activation) per layer. Calling a module uses running statistics; `by_batch` uses the
batch's and returns them for `settle`, so that losses change no buffer. Modes of `training` make no difference. Knows no losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hurtle.errors import HurtleError
from hurtle.policies.critics import DEFAULT_SIZES, StackedLinear
from hurtle.policies.layers import ACTIVATIONS
from hurtle.policies.mlp import VectorBody

EPS = 1e-5
"""Added to variances."""
STATISTICS_RATE = 0.01
"""How far running statistics move toward those of a batch; the first 100 batches are averaged instead."""


class BatchNormLayers(nn.Module):
    """`count` stacks of hidden layers side by side. The batch norms of all layers share one tensor of each kind.

    Scaling a neuron's weights changes nothing, since batch norm follows: `settle` keeps their norm at 1, so that a step of the
    optimizer always turns them by as much. Nor would a scale and bias of the inputs' batch norm change anything: it has none.

    Args:
        count: How many.
        inputs: Numbers that go in.
        sizes: Width of each layer.
        activation: Follows each layer's batch norm.

    Attributes:
        statistics: Running means and variances. [2, count, 1, inputs + sum(sizes)]
        batches: Batches in the statistics. float32 []
    """

    statistics: Tensor
    batches: Tensor

    def __init__(self, count: int, inputs: int, sizes: Sequence[int], activation: nn.Module):
        super().__init__()
        self.sizes, self.activation = [inputs, *sizes], activation
        self.weights = nn.ParameterList(torch.randn(count, *shape) for shape in pairwise(self.sizes))  # [count, in, out]
        self.scale, self.bias = (nn.Parameter(torch.full((count, 1, sum(sizes)), value)) for value in (1.0, 0.0))
        total = (count, 1, sum(self.sizes))
        self.register_buffer("statistics", torch.stack([torch.zeros(total), torch.ones(total)]))
        self.register_buffer("batches", torch.zeros(()))
        self.project()

    def forward(self, x: Tensor) -> Tensor:
        """By running statistics, [count, B, inputs] → [count, B, sizes[-1]]."""
        (scale, bias), *others = self.affine()
        x = torch.addcmul(bias, x, scale)
        for weight, (scale, bias) in zip(self.weights, others, strict=True):
            x = self.activation(torch.addcmul(bias, torch.bmm(x, weight), scale))
        return x

    def affine(self) -> list[tuple[Tensor, Tensor]]:
        """What each batch norm does by running statistics: multiply by the first, add the second, [count, 1, size] each."""
        mean, variance = self.statistics.unbind()
        scale, bias = self._trained()
        scale = scale * (variance + EPS).rsqrt()
        bias = bias - mean * scale
        return list(zip(scale.split(self.sizes, -1), bias.split(self.sizes, -1), strict=True))

    def by_batch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """By the batch's statistics, through which gradients flow; as `forward`, and the statistics, of the shape of ours."""
        given = zip(*(part.split(self.sizes, -1) for part in self._trained()), strict=True)
        found = []
        for layer, (scale, bias) in enumerate(given):
            x = (torch.bmm(x, self.weights[layer - 1]) if layer else x).float()
            variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
            x = torch.addcmul(bias, x - mean, scale * (variance + EPS).rsqrt())
            x = self.activation(x) if layer else x
            found.append(torch.stack([mean.detach(), variance.detach()]))
        return x, torch.cat(found, -1)

    def _trained(self) -> tuple[Tensor, Tensor]:
        """Scale and bias of all batch norms, 1 and 0 for the inputs'."""
        inputs = (self.sizes[0], 0)
        return functional.pad(self.scale, inputs, value=1.0), functional.pad(self.bias, inputs)

    @torch.no_grad()
    def settle(self, found: Tensor, good: Tensor) -> None:
        """After a gradient step: move running statistics toward a batch's, and weights back to norm 1. Launches only.

        Args:
            found: The batch's statistics.
            good: If False, bool [], the step was left out, and statistics stay as they are.
        """
        settle(list(self.weights), self.statistics, self.batches, found, good)

    @torch.no_grad()
    def project(self) -> None:
        """Scale each neuron's weights to norm 1, in place."""
        project(list(self.weights))


def settle(weights: Sequence[Tensor], statistics: Tensor, batches: Tensor, found: Tensor, good: Tensor) -> None:
    """`BatchNormLayers.settle`, also of several modules at once: all tensors may have the same further axes first."""
    batches.add_(good)
    rate = batches.clamp(min=1.0).reciprocal().clamp(min=STATISTICS_RATE)
    good, rate = (part.view(*part.shape, 1, 1, 1, 1) for part in (good, rate))
    statistics.lerp_(torch.where(good, found, statistics), rate)
    project(weights)


def project(weights: Sequence[Tensor]) -> None:
    """Scale each neuron's weights to norm 1, in place: […, in, out] each."""
    for weight in weights:
        weight.div_(torch.linalg.vector_norm(weight, dim=-2, keepdim=True))


class BatchNormBody(nn.Module):
    """A body with batch norm: observations → features, by running statistics; `by_batch` by the batch's.

    Args:
        make_body: Makes a plain body. A `VectorBody` gives the widths and the activation; any other encodes observations first,
            without batch norm.

    Raises:
        HurtleError: The body has no hidden layers, or layer norms.
    """

    def __init__(self, make_body: Callable[[], nn.Module]):
        super().__init__()
        self.make_body = make_body
        self.encoder, sizes, activation = _parts(make_body())
        self.layers = BatchNormLayers(1, int(self.encoder.num_features), sizes, activation)  # type: ignore[arg-type]
        self.num_features = sizes[-1]

    def forward(self, obs: Tensor) -> Tensor:
        """[B, …] → [B, num_features]."""
        return self.layers(self.encoder(obs).flatten(1).unsqueeze(0)).squeeze(0)

    def by_batch(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Features by the batch's statistics, and these, for `settle`."""
        features, found = self.layers.by_batch(self.encoder(obs).flatten(1).unsqueeze(0))
        return features.squeeze(0), found

    @torch.no_grad()
    def folded(self) -> nn.Module:
        """A body of linear layers and activations that returns the same features: batch norm is part of the weights."""
        (scale, bias), *others = [(scale.flatten(), bias.flatten()) for scale, bias in self.layers.affine()]
        layers: list[nn.Module] = []
        for weight, (after, shift) in zip(self.layers.weights, others, strict=True):
            linear = nn.Linear(weight.shape[1], weight.shape[2], device=weight.device)
            linear.weight.copy_((weight[0] * after).T * scale)
            linear.bias.copy_(bias @ weight[0] * after + shift)
            layers += [linear, type(self.layers.activation)()]
            scale, bias = torch.ones_like(after), torch.zeros_like(after)
        plain = self.make_body()
        if not isinstance(plain, VectorBody):
            return nn.Sequential(self.encoder, nn.Flatten(), *layers)
        plain.input, plain.hidden = self.encoder, nn.Sequential(*layers)  # type: ignore[assignment]
        return plain


class BatchNormCritics(nn.Module):
    """Critics of observation and action that return logits over fixed values; they differ only in their initial weights.

    Args:
        actor: A `TanhActor` with a `BatchNormBody`: observations are encoded as there.
        sizes: Widths of the hidden layers.
        num_atoms: Logits of each critic.
        bound: The values are evenly spaced from −bound to bound.
        count: How many.

    Attributes:
        support: The values. [num_atoms]
    """

    support: Tensor

    def __init__(self, actor: Any, sizes: Sequence[int], num_atoms: int, bound: float, count: int = 2):
        super().__init__()
        self.encoder, _, activation = _parts(actor.body.make_body())
        inputs = int(self.encoder.num_features) + actor.num_actions  # type: ignore[arg-type]
        self.layers = BatchNormLayers(count, inputs, sizes, activation)
        self.last, self.count = StackedLinear(count, self.layers.sizes[-1], num_atoms), count
        self.register_buffer("support", torch.linspace(-bound, bound, num_atoms), persistent=False)

    @property
    def num_stacked(self) -> int:
        """See `Critics.num_stacked`."""
        return self.count if next(self.encoder.parameters(), None) is None else 1

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """By running statistics: [B, …], [B, D] in (-1, 1) → logits [E, B, num_atoms]."""
        return self.last(self.layers(self._inputs(obs, actions))).float()

    def by_batch(self, obs: Tensor, actions: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """By the statistics of the whole batch: the logits of some rows, and the statistics, for `layers.settle`."""
        features, found = self.layers.by_batch(self._inputs(obs, actions))
        return self.last(features[:, rows]).float(), found

    def expected(self, logits: Tensor) -> Tensor:
        """The mean values of distributions, [..., num_atoms] → [...]."""
        return (logits.softmax(-1) * self.support).sum(-1)

    def _inputs(self, obs: Tensor, actions: Tensor) -> Tensor:
        x = torch.cat([self.encoder(obs).flatten(1), actions], -1)
        return x.expand(self.count, *x.shape)


def _parts(plain: nn.Module) -> tuple[nn.Module, Sequence[int], nn.Module]:
    """What encodes observations, and the widths and the activation of the layers with batch norm, from a body without."""
    if not isinstance(plain, VectorBody):
        return plain, DEFAULT_SIZES, nn.ReLU()
    sizes = [layer.out_features for layer in plain.hidden if isinstance(layer, nn.Linear)]
    if not sizes:
        raise HurtleError("hidden_sizes=() leaves no layer for batch norm: give at least one width, such as (256, 256).")
    if any(isinstance(layer, nn.LayerNorm) for layer in plain.hidden):
        raise HurtleError("This algorithm's networks have batch norm in place of layer norm: set layer_norm=False.")
    return plain.input, sizes, next(layer for layer in plain.hidden if type(layer) in ACTIVATIONS.values())
