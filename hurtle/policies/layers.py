"""Building blocks of networks: observations as vectors, and linear layers with PPO's initialization or by fused kernels.

space → input layer with `num_features`; (inputs, outputs, gain) → layer; layers, x → output. Knows nothing of policies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from hurtle.errors import HurtleError, UnknownNameError, did_you_mean

HIDDEN_GAIN = math.sqrt(2.0)
POLICY_GAIN = 0.01
VALUE_GAIN = 1.0
ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}
MIN_CAPABILITY = (8, 0)
"""The first compute capability with bfloat16 products."""
_NAMES = {module: name for name, module in ACTIVATIONS.items()}


def initialized(layer: nn.Module, gain: float, orthogonal_init: bool) -> nn.Module:
    """The layer with orthogonal weights and zero biases, or as torch made it."""
    if orthogonal_init:
        assert isinstance(layer.weight, Tensor)
        assert isinstance(layer.bias, Tensor)
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return layer


def hidden_layers(
    inputs: int, sizes: Sequence[int], activation: str, orthogonal_init: bool, layer_norm: bool = False
) -> nn.Sequential:
    """Linear layers of these sizes, each with its activation, and layer norm in between if asked for.

    Raises:
        UnknownNameError: No such activation.
    """
    if activation not in ACTIVATIONS:
        raise UnknownNameError(f"No activation {activation!r}. {did_you_mean(activation, ACTIVATIONS)}")
    layers: list[nn.Module] = []
    for size in sizes:
        norm = [nn.LayerNorm(size)] if layer_norm else []
        layers += [initialized(nn.Linear(inputs, size), HIDDEN_GAIN, orthogonal_init), *norm, ACTIVATIONS[activation]()]
        inputs = size
    return nn.Sequential(*layers)


def layers_output(layers: nn.Sequential, x: Tensor) -> Tensor:
    """What the layers make of x [B, inputs]; with fused kernels where those can be used."""
    modules = list(layers)
    pairs = list(zip(modules[::2], modules[1::2], strict=False))
    if not takes_dense(x) or len(modules) % 2 or not all(_is_pair(*pair) for pair in pairs):
        return layers(x)
    for layer, activation in pairs:
        x = layer_output(layer, x, _NAMES[type(activation)])
    return x


def layer_output(layer: nn.Module, x: Tensor, activation: str = "none") -> Tensor:
    """What a linear layer and its activation make of x [..., inputs]; with a fused kernel where that can be used."""
    if takes_dense(x) and _is_plain(layer):
        from hurtle.kernels.triton.dense import dense

        return dense(x, layer.weight, layer.bias, activation)  # type: ignore[arg-type]
    z = layer(x)
    return torch.tanh(z) if activation == "tanh" else torch.relu(z) if activation == "relu" else z


def takes_kernels(x: Tensor) -> bool:
    """Whether fused kernels can be used: on a GPU, under bfloat16 autocast, unless torch compiles or maps them."""
    if not x.is_cuda or torch.compiler.is_compiling() or is_mapped():
        return False
    from hurtle.kernels.triton import has_triton

    is_half = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    return is_half and has_triton() and torch.cuda.get_device_capability(x.device) >= MIN_CAPABILITY


def is_mapped() -> bool:
    """Whether `torch.func` transforms what runs now, for which our kernels have no rules."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def takes_dense(x: Tensor) -> bool:
    """Whether fused kernels replace linear layers: where gradients are computed, since only their backward pass differs."""
    return torch.is_grad_enabled() and takes_kernels(x)


def _is_plain(layer: nn.Module) -> bool:
    """Whether it is a float32 Linear that nobody hooked into, as `weight_norm` and pruning do."""
    is_linear = type(layer) is nn.Linear and layer.bias is not None and layer.weight.dtype == torch.float32
    return is_linear and not layer._forward_pre_hooks and not layer._forward_hooks


def _is_pair(layer: nn.Module, activation: nn.Module) -> bool:
    return _is_plain(layer) and type(activation) in _NAMES


class Numbers(nn.Module):
    """Observations of a Box or MultiBinary as float32, in their shape.

    Bytes (8-bit integers) are scaled from the space's bounds to [0, 1], as images are; others are unchanged.
    """

    low: Tensor
    range: Tensor

    def __init__(self, space: spaces.Space):
        super().__init__()
        self.num_features = math.prod(space.shape or ())
        self.scaled = isinstance(space, spaces.Box) and space.dtype in (np.uint8, np.int8)
        self._changes = False  # scaling bytes from 0 to 1 changes nothing
        if self.scaled:
            assert isinstance(space, spaces.Box)
            low, high = space.low.astype(np.float32), space.high.astype(np.float32)
            low, span = _one_if_all_equal(low), _one_if_all_equal(np.maximum(high - low, 1.0))
            self._changes = bool((low != 0.0).any() or (span != 1.0).any())
            self.register_buffer("low", torch.from_numpy(low), persistent=False)
            self.register_buffer("range", torch.from_numpy(span), persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        """[B, *shape] of any dtype → float32 [B, *shape]; unscaled bytes → bfloat16 under bfloat16 autocast."""
        if self._changes:
            return (obs.float() - self.low) / self.range
        place = obs.device.type
        is_exact = obs.dtype in (torch.bool, torch.uint8, torch.int8) and torch.is_autocast_enabled(place)
        return obs.to(torch.bfloat16) if is_exact and torch.get_autocast_dtype(place) == torch.bfloat16 else obs.float()


class OneHot(nn.Module):
    """Observations of a Discrete or MultiDiscrete as concatenated one-hot vectors.

    A value outside the space, such as the zeros of an absent agent, counts as the nearest valid one.
    """

    starts: Tensor
    last: Tensor
    offsets: Tensor

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete):
        super().__init__()
        nvec, start = choices(space)
        self.num_features = int(nvec.sum())
        self.register_buffer("starts", torch.from_numpy(start), persistent=False)
        self.register_buffer("last", torch.from_numpy(nvec - 1), persistent=False)
        self.register_buffer("offsets", torch.from_numpy(np.cumsum(nvec) - nvec), persistent=False)

    def places(self, obs: Tensor) -> Tensor:
        """Indices of the ones: [B, ...] → int64 [B, k]."""
        index = obs.reshape(obs.shape[0], len(self.starts)).long() - self.starts
        return torch.minimum(index.clamp_min(0), self.last) + self.offsets

    def forward(self, obs: Tensor) -> Tensor:
        """[B, ...] integers → float32 [B, num_features]."""
        ones = torch.zeros(obs.shape[0], self.num_features, device=obs.device)
        return ones.scatter_(1, self.places(obs), 1.0)


def vector_input(space: spaces.Space) -> Numbers | OneHot:
    """The layer that turns observations of a flat space into vectors, except for flattening.

    Raises:
        HurtleError: The space is structured.
    """
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return OneHot(space)
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return Numbers(space)
    raise HurtleError(
        f"This network takes Box, Discrete, MultiDiscrete or MultiBinary observations, got {space}. "
        "hurtle.emulate(env) flattens structured ones, and policy='structured' takes them."
    )


def choices(space: spaces.Discrete | spaces.MultiDiscrete) -> tuple[np.ndarray, np.ndarray]:
    """The number of values of each entry, and the first one: int64 [k] each."""
    if isinstance(space, spaces.Discrete):
        return np.array([space.n], np.int64), np.array([space.start], np.int64)
    return space.nvec.astype(np.int64).ravel(), space.start.astype(np.int64).ravel()


def _one_if_all_equal(values: np.ndarray) -> np.ndarray:
    """A scalar in place of an array of equal entries: adding a scalar to images is faster."""
    same = values.size > 0 and bool((values == values.flat[0]).all())
    return values.reshape(-1)[:1].reshape(()) if same else values
