"""`ActionHead`: the network outputs an action space needs, and the distribution and actions made from them.

action space → num_outputs; outputs → Distribution → raw actions → `env_actions` → what the env expects. Raw actions are stored
and trained on; clipping and scaling (`ActionTransform`) happen only on the way to the env. Knows no network.
"""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import softplus

from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.policies.action_transform import ActionTransform, kinds_for
from hurtle.policies.distributions import (
    GAMMA_TRIES,
    Beta,
    Categorical,
    Distribution,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
)

DISTRIBUTIONS = ("auto", "gaussian", "squashed_gaussian", "beta")


class ActionHead:
    """Maps network outputs to the actions of one row.

    Args:
        action_space: Discrete, MultiDiscrete, MultiBinary or Box.
        distribution: For Box: "gaussian" (the default, "auto"; raw actions are clipped for the env), "squashed_gaussian"
            (through a tanh) or "beta"; the last two need finite bounds. Discrete spaces have only one distribution: "auto".

    Attributes:
        kind: "categorical", "multi_categorical", "gaussian", "squashed_gaussian" or "beta".
        transform: Turns raw actions into the env's.
        num_outputs: Network outputs per row.
        action_shape: Shape of a raw action: (), (k,) or (D,).
        action_dtype: Dtype of a raw action: int64 or float32.
        num_uniforms: Uniforms per row that sampling needs.
        nvec: Number of options of each choice of a MultiDiscrete or MultiBinary space, else ().
        mask_size: Entries of an action mask; None for Box.
        log_std_size: Entries of the network's log_std; 0 if the distribution has none.

    Raises:
        HurtleError: The space's type is not supported, or the distribution does not fit it.

    Example:
        >>> head = ActionHead(spaces.Box(-2.0, 2.0, (1,)))
        >>> distribution = head.distribution(torch.tensor([[3.0]]), log_std=torch.zeros(1))
        >>> head.env_actions(distribution.mode().numpy())
        array([[2.]], dtype=float32)
    """

    def __init__(self, action_space: spaces.Space, distribution: str = "auto"):
        if distribution not in DISTRIBUTIONS:
            raise UnknownNameError(f"No distribution {distribution!r}. {did_you_mean(distribution, DISTRIBUTIONS)}")
        fitting = kinds_for(action_space)
        if distribution not in ("auto", *fitting):
            raise HurtleError(
                f"distribution={distribution!r} is for Box actions, but this env's are {action_space}; "
                "leave it at 'auto', which is categorical here."
            )
        self.action_space = action_space
        self.kind = fitting[0] if distribution == "auto" else distribution
        self.transform = ActionTransform.of(action_space, self.kind)
        self.num_outputs, size = self.transform.num_outputs, self.transform.size
        self._on_device: dict[torch.device, tuple[Tensor, ...]] = {}
        self.nvec: tuple[int, ...] = ()
        self.log_std_size = 0
        if isinstance(action_space, spaces.Box):
            self.action_shape: tuple[int, ...] = (size,)
            self.action_dtype = torch.float32
            self.mask_size: int | None = None
            self.num_uniforms = size * (2 * GAMMA_TRIES * 3 if self.kind == "beta" else 2)
            self.log_std_size = 0 if self.kind == "beta" else size
        else:
            self.action_shape = () if self.kind == "categorical" else (size,)
            self.action_dtype = torch.int64
            self.mask_size, self.num_uniforms = self.num_outputs, size
            self.nvec = () if self.kind == "categorical" else tuple(self.transform.nvec.tolist())

    def distribution(self, outputs: Tensor, log_std: Tensor | None = None) -> Distribution:
        """The distribution of raw actions.

        Args:
            outputs: Logits, means, or alpha and beta before the softplus, [B, num_outputs].
            log_std: [log_std_size] or [B, log_std_size]; None if that is 0.
        """
        if self.kind == "categorical":
            return Categorical(outputs)
        if self.kind == "multi_categorical":
            return MultiCategorical(outputs, self.nvec)
        if self.kind == "beta":
            alpha, beta = (1.0 + softplus(outputs)).chunk(2, -1)
            return Beta(alpha, beta)
        assert log_std is not None
        return (Gaussian if self.kind == "gaussian" else SquashedGaussian)(outputs, log_std)

    def env_tensor(self, raw: Tensor) -> Tensor:
        """Like `env_actions`, on the tensor's device and without synchronizing with the host; flat, [B, size]."""
        space, flat = self.action_space, raw.reshape(raw.shape[0], -1)
        if not isinstance(space, spaces.Box):
            (start,) = self._constants(raw.device)
            return flat + start
        low, width, least, greatest = self._constants(raw.device)
        actions = flat
        if self.kind == "squashed_gaussian":
            actions = low + (flat.double().tanh() + 1.0) / 2.0 * width
        elif self.kind == "beta":
            actions = low + flat * width
        if space.dtype.kind != "f":
            actions = actions.double().round()
        return torch.minimum(torch.maximum(actions.to(least.dtype), least), greatest)

    def _constants(self, device: torch.device) -> tuple[Tensor, ...]:
        """The transform's arrays as tensors: start, or low, range, least and greatest."""
        if device not in self._on_device:
            used, dtype = self.transform, self.action_space.dtype
            arrays = [used.start]
            if isinstance(self.action_space, spaces.Box):
                bounds = dtype if dtype.kind == "f" else np.dtype(np.float64)  # type: ignore[union-attr]
                arrays = [used.low, used.range, used.least.astype(bounds), used.greatest.astype(bounds)]
            with torch.inference_mode(False):
                self._on_device[device] = tuple(torch.from_numpy(array.copy()).to(device) for array in arrays)
        return self._on_device[device]

    def env_actions(self, raw: np.ndarray) -> np.ndarray:
        """Raw actions [B, *action_shape] as the env expects them, [B, *action_space.shape] in the space's dtype."""
        return self.transform.apply(raw)
