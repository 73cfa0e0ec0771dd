"""`Rollout`: the preallocated `[steps, rows, …]` memory between collecting and learning.

collector writes steps → `compute_advantages` → algorithm reads minibatches. Knows nothing of envs or losses.
A row is one agent of one env; in an asynchronous pool it is a segment, a run of steps of one agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hurtle.errors import HurtleError
from hurtle.native.gae import gae, gae_cuda

if TYPE_CHECKING:
    from hurtle.policies.policy import Policy


@dataclass
class EpisodeStats:
    """Of the episodes that ended during a rollout."""

    returns: np.ndarray
    lengths: np.ndarray
    metrics: dict[str, np.ndarray]


@dataclass
class EpisodeTotals:
    """Of many episodes at once, where each by itself would be too many to tell.

    Attributes:
        count: How many ended.
        returns: Sum of their returns.
        best_return: The highest.
        lengths: Sum of their lengths.
        best_length: The longest.
        metrics: Means of the env's metrics.
    """

    count: int = 0
    returns: float = 0.0
    best_return: float = -np.inf
    lengths: float = 0.0
    best_length: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Sequence[EpisodeTotals]) -> EpisodeTotals:
        """The totals of several rollouts."""
        total = cls()
        told = [(part.metrics, max(1, part.count)) for part in parts if part.metrics]
        for name in told[0][0] if told else ():
            total.metrics[name] = sum(metrics[name] * count for metrics, count in told) / sum(count for _, count in told)
        for part in parts:
            total.count += part.count
            total.returns += part.returns
            total.lengths += part.lengths
            total.best_return = max(total.best_return, part.best_return)
            total.best_length = max(total.best_length, part.best_length)
        return total


class Minibatch(NamedTuple):
    """Some steps of a rollout, flat `[batch, …]`.

    Of whole segments, `obs`, `masks` and `starts` are `[steps, segments, …]`; all else is flat, time-major.
    """

    obs: Tensor
    masks: Tensor | None
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    weights: Tensor | None = None  # importance weights of prioritized segments
    starts: Tensor | None = None
    state: tuple[Tensor, ...] = ()  # at the first step of each segment
    kept: Tensor | None = None  # which of the flat steps are valid; the fields from `actions` on hold only these


class Rollout:
    """Steps of all rows, as torch tensors; on the CPU, `.numpy()` of each is the same memory.

    Args:
        policy: Gives the shapes and dtypes of observations, actions and recurrent state.
        num_steps: Steps per row.
        num_rows: Envs times agents.
        has_masks: Whether the env tells which actions are legal.
        device: Where the tensors live.

    Attributes:
        obs: What the policy saw (normalized, if it normalizes).
        actions: What the policy chose, before clipping or rescaling for the env.
        final_values: V(final observation) of truncated episodes.
        valid: False for steps that nobody decided: absent agents, and resets that a step did (NEXT_STEP).
        starts: True where an episode begins with this step.
        last_values: V of the observation after the last step.
        advantages_for: The gamma and gae_lambda for which the collector has filled `advantages` and `returns` already, or None.

    Raises:
        HurtleError: It would have no step or no row.
    """

    def __init__(self, policy: Policy, num_steps: int, num_rows: int, has_masks: bool = False, device: str = "cpu"):
        if num_steps < 1 or num_rows < 1:
            raise HurtleError(f"A rollout has at least one step and one row; got num_steps={num_steps}, num_rows={num_rows}.")
        self.num_steps, self.num_rows, self.device = num_steps, num_rows, torch.device(device)
        lead = (num_steps, num_rows)

        def zeros(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        space, head = policy.observation_space, policy.head
        assert space.shape is not None
        obs_dtype = torch.float32 if policy.normalizer is not None else torch_dtype(space.dtype)
        self.obs = zeros((*lead, *space.shape), obs_dtype)
        self.actions = zeros((*lead, *head.action_shape), head.action_dtype)
        self.masks = zeros((*lead, head.mask_size), torch.bool) if has_masks and head.mask_size else None
        self.log_probs, self.values, self.rewards = zeros(lead), zeros(lead), zeros(lead)
        self.terminated, self.truncated = zeros(lead, torch.bool), zeros(lead, torch.bool)
        self.starts, self.valid = zeros(lead, torch.bool), ~zeros(lead, torch.bool)
        self.final_values, self.last_values = zeros(lead), zeros((num_rows,))
        self.advantages, self.returns = zeros(lead), zeros(lead)
        self.initial_state = tuple(part.clone() for part in policy.initial_state(num_rows, self.device))
        self.all_valid = True  # spares the learner looking for steps to leave out
        self.advantages_for: tuple[float, float] | None = None

    @property
    def num_valid(self) -> int:
        """Steps that count."""
        return self.valid.numel() if self.all_valid else int(self.valid.sum())

    def use_advantages(self, gamma: float, gae_lambda: float) -> None:
        """`compute_advantages`, unless the collector has just done so; what it did counts once."""
        done, self.advantages_for = self.advantages_for == (gamma, gae_lambda), None
        if not done:
            self.compute_advantages(gamma, gae_lambda)

    def compute_advantages(self, gamma: float, gae_lambda: float) -> None:
        """Fill `advantages` by GAE, and `returns` = advantages + values."""
        self.advantages_for = None
        compute, arrays = self.kernel(gae, gae_cuda)
        if self.device.type == "cuda":
            compute(*arrays, gamma, gae_lambda, self.kernel_valid(), self.advantages, self.returns)
            return
        compute(*arrays, gamma, gae_lambda, self.kernel_valid(), self.kernel_array(self.advantages))
        torch.add(self.advantages, self.values, out=self.returns)

    def kernel(self, on_cpu: Callable[..., Any], on_gpu: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
        """The version of an advantage kernel for this device, and the fields that all of them take."""
        fields = (self.rewards, self.values, self.terminated, self.truncated, self.final_values, self.last_values)
        return on_gpu if self.device.type == "cuda" else on_cpu, [self.kernel_array(field) for field in fields]

    def kernel_array(self, field: Tensor) -> Any:
        """A field as kernels take it: NumPy's view of it on the CPU."""
        return field if self.device.type == "cuda" else field.numpy()

    def kernel_valid(self) -> Any:
        """Which steps count, as kernels take it: None for all."""
        return None if self.all_valid else self.kernel_array(self.valid)

    def check_fields(self, policy: Policy, names: Iterable[str]) -> None:
        """See that fields are what compiled code, which gets nothing but addresses, takes them for.

        Raises:
            HurtleError: One of them has another shape or dtype, or is not contiguous memory of the CPU.
        """
        model = Rollout(policy, 1, self.num_rows, self.masks is not None)
        for name in names:
            own, like = getattr(self, name), getattr(model, name)
            if own is None or like is None:
                continue
            shape = tuple(like.shape) if name == "last_values" else (self.num_steps, *like.shape[1:])
            if (tuple(own.shape), own.dtype, own.device.type) != (shape, like.dtype, "cpu") or not own.is_contiguous():
                raise HurtleError(
                    f"The rollout's {name} must be {like.dtype} of shape {shape}, contiguous and on the CPU, got {own.dtype} "
                    f"of shape {tuple(own.shape)} on {own.device}: make it with Rollout(policy, …)."
                )

    def steps(self, chosen: Tensor) -> Minibatch:
        """Single steps by their flat indices, `step * num_rows + row`."""

        def flat(field: Tensor) -> Tensor:
            return field.flatten(0, 1)[chosen]

        return Minibatch(
            gathered(self.obs.flatten(0, 1), chosen),
            None if self.masks is None else flat(self.masks),
            flat(self.actions),
            flat(self.log_probs),
            flat(self.values),
            flat(self.advantages),
            flat(self.returns),
        )

    def segments(self, rows: Tensor, weights: Tensor | None = None, keep_all: bool = False) -> Minibatch:
        """All steps of some rows, for policies that remember and for priorities.

        Args:
            rows: Which.
            weights: One per row, or None.
            keep_all: Those that do not count too, so that how many there are does not depend on the numbers.
        """
        kept = None if self.all_valid or keep_all else self.valid[:, rows].flatten().nonzero()[:, 0]

        def flat(field: Tensor) -> Tensor:
            steps = field[:, rows].flatten(0, 1)
            return steps if kept is None else steps[kept]

        return Minibatch(
            gathered(self.obs, rows, dim=1),
            None if self.masks is None else self.masks[:, rows],
            flat(self.actions),
            flat(self.log_probs),
            flat(self.values),
            flat(self.advantages),
            flat(self.returns),
            weights=None if weights is None else flat_weights(weights, self.num_steps, kept),
            starts=self.starts[:, rows],
            state=tuple(part[rows] for part in self.initial_state),
            kept=kept,
        )

    def valid_steps(self) -> Tensor:
        """The flat indices of the steps that count."""
        if self.all_valid:
            return torch.arange(self.valid.numel(), device=self.device)
        return self.valid.flatten().nonzero()[:, 0]


def gathered(field: Tensor, where: Tensor, dim: int = 0) -> Tensor:
    """`field` at some places of one dimension. Bytes are moved by eight: a gather pays for elements, not for bytes.

    Example:
        >>> gathered(torch.arange(12, dtype=torch.uint8).view(3, 4), torch.tensor([2, 0])).tolist()
        [[8, 9, 10, 11], [0, 1, 2, 3]]
    """
    index = (slice(None),) * dim + (where,)
    shape = field.shape[dim + 1 :]
    bytes_each = shape.numel() * field.element_size()
    if field.element_size() > 1 or not bytes_each or bytes_each % 8 or not field.is_contiguous() or field.storage_offset() % 8:
        return field[index]
    words = field.view(*field.shape[: dim + 1], -1).view(torch.int64)
    return words[index].view(field.dtype).unflatten(-1, shape)


def flat_weights(weights: Tensor, num_steps: int, kept: Tensor | None) -> Tensor:
    """Weights of segments as weights of their steps, time-major. [b] -> [steps * b]."""
    steps = weights.repeat(num_steps)
    return steps if kept is None else steps[kept]


def torch_dtype(dtype: Any) -> torch.dtype:
    """The dtype in which observations of a NumPy dtype are stored: floats as float32, integers as they are."""
    numpy_dtype = np.dtype(dtype)
    if numpy_dtype.kind == "f":
        return torch.float32
    if numpy_dtype.kind == "u" and numpy_dtype.itemsize > 1:
        return torch.int64  # torch cannot compute with wider unsigned integers
    return torch.from_numpy(np.zeros(0, numpy_dtype)).dtype
