"""`NatureCNN` and `GridCNN`: convolutions for images and for small grids.

obs [B, C, H, W] or [B, H, W, C] → float32, channels first → convolutions → linear layer → features. Knows nothing of envs.
"""

from __future__ import annotations

import math

import torch
from gymnasium import spaces
from torch import Tensor, nn

from hurtle.errors import HurtleError
from hurtle.policies.action_head import ActionHead
from hurtle.policies.actor_critic import ActorCritic
from hurtle.policies.layers import HIDDEN_GAIN, Numbers, hidden_layers, initialized, is_mapped

NATURE_SIDE = 36
"""The smallest side for which the Nature CNN's three convolutions leave any output."""


class ImageBody(nn.Module):
    """Convolutions and one linear layer, all with ReLU.

    Args:
        space: A Box [C, H, W], [H, W, C] or [H, W]; see `channels_first`.
        convolutions: (filters, kernel, stride, padding) of each layer.
        hidden_size: Width of the linear layer.
        orthogonal_init: Gain sqrt(2), zero biases.
        layer_norm: Layer norm before each ReLU.

    Attributes:
        scaling: Factor and offset of the observations if the fused grid kernels can replace the convolution, else None.
    """

    def __init__(
        self,
        space: spaces.Box,
        convolutions: tuple[tuple[int, int, int, int], ...],
        hidden_size: int,
        orthogonal_init: bool,
        layer_norm: bool = False,
    ):
        super().__init__()
        self.channels_first = channels_first(space.shape)
        channels, height, width = image_shape(space.shape)
        self.input = Numbers(space)
        layers: list[nn.Module] = []
        for filters, kernel, stride, padding in convolutions:
            layer = nn.Conv2d(channels, filters, kernel, stride, padding)
            height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
            norm = [nn.LayerNorm([filters, height, width])] if layer_norm else []
            layers += [initialized(layer, HIDDEN_GAIN, orthogonal_init), *norm, nn.ReLU()]
            channels = filters
        self.convolutions = nn.Sequential(*layers, nn.Flatten())
        self.linear = hidden_layers(channels * height * width, (hidden_size,), "relu", orthogonal_init, layer_norm)
        self.num_features = hidden_size
        is_grid = len(space.shape) == 3 and not self.channels_first and [part[1:] for part in convolutions] == [(3, 1, 0)]
        self.scaling = _scaling(self.input) if is_grid and not layer_norm else None

    def forward(self, obs: Tensor) -> Tensor:
        """[B, ...] of any dtype → [B, num_features]."""
        fused = self._fused(obs, *self.scaling) if obs.is_cuda and self.scaling is not None else None
        return self.linear(self._convolved(obs) if fused is None else fused)

    def _convolved(self, obs: Tensor) -> Tensor:
        planes = self.input(obs)
        if planes.ndim == 3:
            planes = planes.unsqueeze(1)
        elif not self.channels_first:
            planes = planes.permute(0, 3, 1, 2)
        if self.scaling is not None and is_mapped():
            return self._as_product(planes)
        return self.convolutions(planes)

    def _as_product(self, planes: Tensor) -> Tensor:
        """The grid's convolution as one matrix product: mapped over networks, torch's own is a slow one in groups."""
        layer = self.convolutions[0]
        assert isinstance(layer, nn.Conv2d)
        assert layer.bias is not None
        side = layer.kernel_size[0]
        height, width = (length - side + 1 for length in planes.shape[2:])
        shifted = [planes[..., i : i + height, j : j + width] for i in range(side) for j in range(side)]
        patches = torch.stack(shifted, 2).flatten(3).flatten(1, 2)  # [B, channels * side * side, places]
        return torch.relu(layer.weight.flatten(1) @ patches + layer.bias.unsqueeze(1)).flatten(1)

    def _fused(self, obs: Tensor, scale: float, shift: float) -> Tensor | None:
        """`_convolved` by the fused grid kernel; None if that cannot be used."""
        from hurtle.kernels.triton import has_triton

        layer = self.convolutions[0]
        assert isinstance(layer, nn.Conv2d)
        assert layer.bias is not None
        is_known = layer.weight.dtype == torch.float32 and not obs.requires_grad
        if not is_known or torch.compiler.is_compiling() or is_mapped() or not has_triton():
            return None
        from hurtle.kernels.triton.grid_conv import grid_convolution, supports

        if not supports(obs, layer.out_channels):
            return None
        is_half = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
        return grid_convolution(obs, layer.weight, layer.bias, scale, shift, torch.bfloat16 if is_half else torch.float32)


def nature_body(space: spaces.Space, orthogonal_init: bool = True, layer_norm: bool = False) -> ImageBody:
    """The convolutions of Mnih et al. (2015)."""
    box = _image_box(space, "nature_cnn")
    if min(image_shape(box.shape)[1:]) < NATURE_SIDE:
        raise HurtleError(
            f"nature_cnn needs images of at least {NATURE_SIDE} pixels a side, got {box.shape}; use grid_cnn for small ones."
        )
    return ImageBody(box, ((32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)), 512, orthogonal_init, layer_norm)


def grid_body(space: spaces.Space, orthogonal_init: bool = True, layer_norm: bool = False) -> ImageBody:
    """One 3x3 convolution, as in MinAtar (Young and Tian, 2019)."""
    box = _image_box(space, "grid_cnn")
    padding = 1 if min(image_shape(box.shape)[1:]) < 3 else 0
    return ImageBody(box, ((16, 3, 1, padding),), 128, orthogonal_init, layer_norm)


class NatureCNN(ActorCritic):
    """For images of at least 36 pixels a side, such as Atari's 84x84x4; bytes are scaled to [0, 1]."""

    def __init__(
        self,
        obs_space: spaces.Space,
        head: ActionHead,
        separate_networks: bool = False,
        orthogonal_init: bool = True,
        log_std_init: float = 0.0,
        layer_norm: bool = False,
    ):
        def make_body() -> ImageBody:
            return nature_body(obs_space, orthogonal_init, layer_norm)

        super().__init__(head, make_body, separate_networks, orthogonal_init, log_std_init)


class GridCNN(ActorCritic):
    """For small grids with one plane per object type, such as MinAtar's 10x10xC; planes may be bytes, bools or floats."""

    def __init__(
        self,
        obs_space: spaces.Space,
        head: ActionHead,
        separate_networks: bool = False,
        orthogonal_init: bool = True,
        log_std_init: float = 0.0,
        layer_norm: bool = False,
    ):
        def make_body() -> ImageBody:
            return grid_body(obs_space, orthogonal_init, layer_norm)

        super().__init__(head, make_body, separate_networks, orthogonal_init, log_std_init)


def channels_first(shape: tuple[int, ...]) -> bool:
    """Whether a 3-D image is channels-first: the smaller outer axis is the channels, the last one if they are equal.

    Example:
        >>> channels_first((4, 84, 84)), channels_first((10, 10, 4)), channels_first((10, 10, 10))
        (True, False, False)
    """
    return len(shape) == 3 and shape[0] < shape[2]


def image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(channels, height, width) of a 2-D or 3-D image."""
    if len(shape) == 2:
        return 1, *shape
    first, second, third = shape
    return (first, second, third) if channels_first(shape) else (third, first, second)


def _scaling(numbers: Numbers) -> tuple[float, float] | None:
    """Scale and shift applied to observations; None if they differ between elements."""
    if not numbers.scaled:
        return 1.0, 0.0
    if numbers.low.ndim or numbers.range.ndim:
        return None
    low, span = numbers.low.item(), numbers.range.item()
    return 1.0 / span, -low / span


def _image_box(space: spaces.Space, name: str) -> spaces.Box:
    if not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3) or math.prod(space.shape) == 0:
        raise HurtleError(f"{name} needs a Box of shape [C, H, W], [H, W, C] or [H, W], got {space}; use mlp or structured.")
    return space
