"""`ActionHead`: what a network's last layer must give for an action space, and how raw actions become the env's.

action space → num_outputs; outputs → Distribution → raw actions → `env_actions` → what the env takes. Raw actions are what is
stored and trained on; clipping and scaling are for the env alone. Knows no network.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import softplus

from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
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
    """The actions of one row.

    Args:
        action_space: Discrete, MultiDiscrete, MultiBinary or Box.
        distribution: For Box: "gaussian" (what "auto" means; raw actions are clipped for the env), "squashed_gaussian"
            (through a tanh) or "beta"; the last two need bounds. Discrete kinds have but one distribution: "auto".

    Attributes:
        kind: "categorical", "multi_categorical", "gaussian", "squashed_gaussian" or "beta".
        num_outputs: Numbers per row that `distribution` takes.
        action_shape: Of a raw action: (), (k,) or (D,).
        action_dtype: int64 or float32.
        num_uniforms: Uniforms per row to sample from.
        mask_size: Entries of an action mask; None for Box.
        log_std_size: Entries of the network's log_std; 0 where the distribution has none.

    Raises:
        HurtleError: A space of another kind, or a distribution that does not fit it.

    Example:
        >>> head = ActionHead(spaces.Box(-2.0, 2.0, (1,)))
        >>> distribution = head.distribution(torch.tensor([[3.0]]), log_std=torch.zeros(1))
        >>> head.env_actions(distribution.mode().numpy())
        array([[2.]], dtype=float32)
    """

    def __init__(self, action_space: spaces.Space, distribution: str = "auto"):
        if distribution not in DISTRIBUTIONS:
            raise UnknownNameError(f"No distribution {distribution!r}. {did_you_mean(distribution, DISTRIBUTIONS)}")
        self.action_space = action_space
        self.action_shape: tuple[int, ...] = ()
        self.nvec: tuple[int, ...] = ()
        self.mask_size: int | None = None
        self.log_std_size = 0
        self._on_device: dict[torch.device, tuple[Tensor, ...]] = {}
        if isinstance(action_space, spaces.Box):
            self._continuous(action_space, distribution)
        elif isinstance(action_space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            if distribution != "auto":
                raise HurtleError(
                    f"distribution={distribution!r} is for Box actions, and those of this env are {action_space}; "
                    "leave it at 'auto', which is categorical here."
                )
            self._discrete(action_space)
        else:
            raise HurtleError(
                f"Actions must be Discrete, MultiDiscrete, MultiBinary or Box, got {action_space}; "
                "hurtle.emulate(env) makes one of these out of a structured space."
            )

    def _discrete(self, space: spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary) -> None:
        self.action_dtype = torch.int64
        self._start: np.ndarray | int = 0
        if isinstance(space, spaces.Discrete):
            self.kind, self.num_uniforms = "categorical", 1
            self.num_outputs = int(space.n)
            self._start = int(space.start)
        else:
            nvec = space.nvec if isinstance(space, spaces.MultiDiscrete) else np.full(space.shape, 2)
            self.nvec = tuple(int(n) for n in nvec.flat)
            self.kind, self.action_shape, self.num_uniforms = "multi_categorical", (len(self.nvec),), len(self.nvec)
            self.num_outputs = sum(self.nvec)
            if isinstance(space, spaces.MultiDiscrete):
                self._start = space.start.astype(np.int64)
        self.mask_size = self.num_outputs

    def _continuous(self, space: spaces.Box, distribution: str) -> None:
        size = math.prod(space.shape)
        self.kind = "gaussian" if distribution == "auto" else distribution
        if self.kind != "gaussian" and not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise HurtleError(
                f"distribution={distribution!r} needs a Box with finite bounds, got {space}; use 'gaussian', "
                "or bound the actions with gymnasium.wrappers.RescaleAction."
            )
        self.action_shape, self.action_dtype = (size,), torch.float32
        self.num_outputs = 2 * size if self.kind == "beta" else size
        self.num_uniforms = size * (2 * GAMMA_TRIES * 3 if self.kind == "beta" else 2)
        self.log_std_size = 0 if self.kind == "beta" else size
        self._low, self._range = space.low.astype(np.float64), space.high.astype(np.float64) - space.low.astype(np.float64)

    def distribution(self, outputs: Tensor, log_std: Tensor | None = None) -> Distribution:
        """The distribution of raw actions.

        Args:
            outputs: Logits, means, or what alpha and beta are made from, [B, num_outputs].
            log_std: [log_std_size] or [B, log_std_size], where that is not 0.
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
        """`env_actions` of a tensor, on its device and without a word to the host; flat, [B, …]."""
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
        """What `env_tensor` computes with, flat, on a device: the first choices, or low and range, and the bounds."""
        if device not in self._on_device:
            space, numbers = self.action_space, [np.atleast_1d(getattr(self, "_start", 0))]
            if isinstance(space, spaces.Box):
                dtype = space.dtype if space.dtype.kind == "f" else np.float64
                numbers = [self._low, self._range, space.low.astype(dtype), space.high.astype(dtype)]
            with torch.inference_mode(False):
                self._on_device[device] = tuple(torch.from_numpy(part.ravel().copy()).to(device) for part in numbers)
        return self._on_device[device]

    def env_actions(self, raw: np.ndarray) -> np.ndarray:
        """Raw actions [B, *action_shape] as the env takes them, [B, *action_space.shape] in the space's dtype."""
        space = self.action_space
        shape = (len(raw), *(space.shape or ()))
        if not isinstance(space, spaces.Box):
            return (raw.reshape(shape) + self._start).astype(space.dtype, copy=False)
        actions = raw.reshape(shape)
        if self.kind == "squashed_gaussian":
            actions = self._low + (np.tanh(actions, dtype=np.float64) + 1.0) / 2.0 * self._range
        elif self.kind == "beta":
            actions = self._low + actions * self._range
        if space.dtype.kind != "f":
            actions = np.rint(actions, dtype=np.float64)
            return np.clip(actions, space.low, space.high).astype(space.dtype)
        return np.clip(actions.astype(space.dtype), space.low, space.high)
