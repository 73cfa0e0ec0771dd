"""`plain_cnn`: detects whether a policy is a CNN for small grids, and returns its layers.

network → convolution, linear layers; or the reason it is not one. Larger convolutions stay in torch, where little of
their time is overhead. Knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hurtle.errors import UnsupportedError
from hurtle.policies.cnn import GridCNN, image_shape
from hurtle.policies.layers import Numbers
from hurtle.policies.plain_mlp import Dense, dense

FILTERS = 16
"""The kernels take a multiple of this many."""
MOST_FEATURES = 4096
"""Outputs of the convolution."""


@dataclass(frozen=True, eq=False)
class Convolution:
    """A convolution over observations, followed by ReLU.

    Attributes:
        layer: Torch's module.
        taps: The element of a flat observation that weight k of a filter meets at pixel p, -1 for padding; weights are in the
            order in which their inputs are stored. [pixels, weights]
        flat: The index of weight k in a filter of torch's. [weights]
    """

    layer: nn.Conv2d
    taps: np.ndarray
    flat: np.ndarray

    @property
    def num_features(self) -> int:
        """Outputs: pixels times filters."""
        return len(self.taps) * self.layer.out_channels


@dataclass(frozen=True, eq=False)
class PlainCNN:
    """The layers of a CNN; as in `PlainMLP`, but the first one of each body is a convolution."""

    input: Numbers
    actor: tuple[Convolution | Dense, ...]
    critic: tuple[Convolution | Dense, ...]
    is_shared: bool


def plain_cnn(net: GridCNN, shape: tuple[int, ...]) -> PlainCNN:
    """The layers of a network for observations of that shape.

    Raises:
        UnsupportedError: Its layers were changed after it was built, or there are too many features; gives the reason.
    """
    body: Any = net.actor_body
    actor, head = _layers(body, shape), dense(net.actor, nn.Identity())
    critic = () if net.critic_body is None else _layers(net.critic_body, shape)
    return PlainCNN(body.input, (*actor, head), (*critic, dense(net.critic, nn.Identity())), net.critic_body is None)


def _layers(body: Any, shape: tuple[int, ...]) -> tuple[Convolution | Dense, ...]:
    modules, linear = list(body.convolutions.children()), list(body.linear.children())
    kinds = [type(module) for module in (*modules, *linear)]
    if kinds != [nn.Conv2d, nn.ReLU, nn.Flatten, nn.Linear, nn.ReLU]:
        raise UnsupportedError("its layers were changed after it was built")
    layer = modules[0]
    parameters = dict(layer.named_parameters())
    is_known = parameters.keys() == {"weight", "bias"} and parameters["weight"].dtype == torch.float32
    if (
        not is_known
        or layer.out_channels % FILTERS
        or layer.padding_mode != "zeros"
        or isinstance(layer.padding, str)
        or layer.groups != 1
        or layer.dilation != (1, 1)
    ):
        raise UnsupportedError("its convolution is not a plain one")
    found = Convolution(layer, *_taps(layer, shape, body.channels_first))
    if found.num_features > MOST_FEATURES:
        raise UnsupportedError(f"its convolution has more than {MOST_FEATURES} outputs")
    return found, dense(*linear)


def _taps(layer: nn.Conv2d, shape: tuple[int, ...], channels_first: bool) -> tuple[np.ndarray, np.ndarray]:
    """See `Convolution`."""
    channels, height, width = image_shape(shape)
    (tall, wide), (down, right) = layer.kernel_size, layer.stride
    top, left = (int(side) for side in layer.padding)
    weights = np.arange(channels * tall * wide).reshape(channels, tall, wide)  # torch's order
    order = weights.ravel() if channels_first else weights.transpose(1, 2, 0).ravel()
    c, ky, kx = np.unravel_index(order, weights.shape)
    y, x = np.indices(((height + 2 * top - tall) // down + 1, (width + 2 * left - wide) // right + 1)).reshape(2, -1, 1)
    row, column = y * down + ky - top, x * right + kx - left
    at = (c * height + row) * width + column if channels_first else (row * width + column) * channels + c
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return np.where(inside, at, -1), order
