"""`Rollout`: the preallocated `[steps, rows, …]` memory between collecting and learning.

collector writes steps → `collect.postprocess` → learner reads minibatches. Knows nothing of envs or losses.
A row is one agent of one env; in an asynchronous pool it is a segment, a run of steps of one agent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from enum import Flag, auto
from functools import reduce
from itertools import accumulate
from operator import and_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hurtle.errors import HurtleError
from hurtle.kernels.gae import gae, gae_cuda

if TYPE_CHECKING:
    from hurtle.policies.policy import Policy


OUTCOMES = ("rewards", "terminated", "truncated", "starts", "valid")
"""Fields `[T, N]` that a step of the envs fills; `obs` and `masks` are written before it."""
POLICY_FIELDS = ("inputs", "actions", "log_probs", "values")
"""Fields `[T, N, …]` that acting fills."""
ACTING_FIELDS = ("obs", "masks", *POLICY_FIELDS)
"""What the policy was given and what it did: written on its device, where `OUTCOMES` are written on the host."""
LEARNER_FIELDS = ("final_values", "last_values", "advantages", "returns")
"""Fields that `collect.postprocess` fills."""
FIELDS = ("obs", "masks", *OUTCOMES, *POLICY_FIELDS, *LEARNER_FIELDS)
"""All fields that compiled code writes. `JOB_ARRAYS` in kernels/cpu/rollout_job.py has a place for each."""
ROW_FIELDS = ("last_obs", "last_starts", "last_values")
"""Fields `[N, …]`, of what follows the last step."""
STEP_FIELDS = tuple(name for name in FIELDS if name not in ROW_FIELDS)


class Done(Flag):
    """Which parts of `collect.postprocess` a collector has already done."""

    NOTHING = 0
    BOOTSTRAP = auto()
    """`last_values` and `final_values` are filled."""
    REWARDS = auto()
    """`scaled_rewards` are filled, and their statistics updated."""
    STATISTICS = auto()
    """The policy's observation normalizer was updated with `obs`."""
    ADVANTAGES = auto()
    """`advantages` and `returns` are filled."""


class Finals(NamedTuple):
    """The last observations of truncated episodes, which are not in `obs`: `[K, …]`, one per truncation."""

    steps: Tensor
    """The truncated step, an integer; -1 for an unused preallocated slot."""
    rows: Tensor
    """Its row, an integer."""
    obs: Tensor
    """As the env returned it."""
    state: tuple[Tensor, ...] = ()
    """The policy's memory at that step."""


class Minibatch(NamedTuple):
    """Some steps of a rollout, flat `[batch, …]`.

    For whole segments, `inputs`, `masks` and `starts` are `[steps, segments, …]`; everything else is flat, time-major.
    """

    inputs: Tensor
    masks: Tensor | None
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    weights: Tensor | None = None  # importance weights of prioritized segments
    starts: Tensor | None = None
    state: tuple[Tensor, ...] = ()  # at the first step of each segment
    kept: Tensor | None = None  # which of the flat steps are valid; the fields from `actions` on contain only these


class Rollout:
    """Steps of all rows, as torch tensors; on the CPU, `.numpy()` of each is the same memory.

    Args:
        policy: Gives the shapes and dtypes of observations, actions and recurrent state.
        num_steps: Steps per row.
        num_rows: Envs times agents.
        has_masks: Whether the env reports legal actions.
        device: Where the tensors live.

    Attributes:
        obs: Observations as the env returned them.
        rewards: As the env returned them.
        finals: The last observations of truncated episodes.
        last_obs: The observation after the last step; `last_starts` and `last_state` belong to it.
        starts: True where an episode starts with this step.
        valid: False for steps without a decision: absent agents, and resets that take a step (NEXT_STEP).
        inputs: What the policy saw: `obs`, or its normalized copy.
        actions: What the policy chose, before clipping or rescaling for the env.
        log_probs: Log-probabilities of these actions at the time they were chosen.
        values: V(obs) at the time the action was chosen.
        initial_state: The policy's memory before the first step.
        version: `Weights.version` of the acting policy.
        columns: The row that each column belongs to, int [N], in a pool; None: column n is row n.
        ids: Of the rollouts that it holds, where collectors elsewhere number theirs: "2-17" is the 17th of collector 2.
        lender: What owns the memory of the fields, which then are read-only; None: the rollout itself.
        may_exchange: Whether `exchange` may swap it: not if its memory is lent at times, see `Packing`.
        done: Which parts of the postprocessing the collector has already done.
        scaled_rewards: The rewards used in training: `rewards`, or a scaled copy.
        last_values: V(last_obs).
        final_values: V(final observation) where an episode was truncated.
        advantages: By GAE.
        returns: advantages + values.

    Raises:
        HurtleError: There would be no steps or no rows.
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
        dtype = torch_dtype(space.dtype)
        normalizes = policy.normalizer is not None
        raw_dtype = torch.float64 if normalizes and space.dtype == np.float64 else dtype  # statistics use full precision
        # From the env.
        self.obs = zeros((*lead, *space.shape), raw_dtype)
        self.masks = zeros((*lead, head.mask_size), torch.bool) if has_masks and head.mask_size else None
        self.rewards = zeros(lead)
        self.terminated, self.truncated = zeros(lead, torch.bool), zeros(lead, torch.bool)
        self.starts, self.valid = zeros(lead, torch.bool), ~zeros(lead, torch.bool)
        self.finals = self.new_finals(0, policy)
        self.last_obs, self.last_starts = zeros((num_rows, *space.shape), raw_dtype), zeros((num_rows,), torch.bool)
        # From the policy.
        self.inputs = zeros((*lead, *space.shape)) if normalizes else self.obs
        self.actions = zeros((*lead, *head.action_shape), head.action_dtype)
        self.log_probs, self.values = zeros(lead), zeros(lead)
        self.initial_state = tuple(part.clone() for part in policy.initial_state(num_rows, self.device))
        self.last_state = tuple(part.clone() for part in self.initial_state)
        self.version = 0
        self.columns: np.ndarray | None = None
        self.ids: tuple[str, ...] = ()
        self.lender: Any = None
        self.may_exchange = True
        self.all_valid = True  # spares learners the search for invalid steps
        # From postprocessing.
        self.done = Done.NOTHING
        self.scaled_rewards = self.rewards
        self.final_values, self.last_values = zeros(lead), zeros((num_rows,))
        self.advantages, self.returns = zeros(lead), zeros(lead)

    def new_finals(self, count: int, policy: Policy) -> Finals:
        """Slots for the final observations of `count` truncations, all unused."""
        places = torch.full((count,), -1, dtype=torch.int64, device=self.device)
        state = tuple(part.clone() for part in policy.initial_state(count, self.device)) if count else ()
        obs = torch.zeros((count, *self.obs.shape[2:]), dtype=self.obs.dtype, device=self.device)
        return Finals(places, places.clone(), obs, state)

    @property
    def num_valid(self) -> int:
        """Number of valid steps."""
        return self.valid.numel() if self.all_valid else int(self.valid.sum())

    def compute_advantages(self, gamma: float, gae_lambda: float) -> None:
        """Fill `advantages` by GAE, and `returns` = advantages + values."""
        compute, arrays = self.kernel(gae, gae_cuda)
        if self.device.type == "cuda":
            compute(*arrays, gamma, gae_lambda, self.kernel_valid(), self.advantages, self.returns)
            return
        compute(*arrays, gamma, gae_lambda, self.kernel_valid(), self.kernel_array(self.advantages))
        torch.add(self.advantages, self.values, out=self.returns)

    def kernel(self, on_cpu: Callable[..., Any], on_gpu: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
        """The version of an advantage kernel for this device, and the fields that all versions take."""
        fields = (self.scaled_rewards, self.values, self.terminated, self.truncated, self.final_values, self.last_values)
        return on_gpu if self.device.type == "cuda" else on_cpu, [self.kernel_array(field) for field in fields]

    def kernel_array(self, field: Tensor) -> Any:
        """A field as kernels expect it: a NumPy view on the CPU."""
        return field if self.device.type == "cuda" else field.numpy()

    def kernel_valid(self) -> Any:
        """`valid` as kernels expect it; None if all steps are valid."""
        return None if self.all_valid else self.kernel_array(self.valid)

    def check_fields(self, policy: Policy, names: Iterable[str]) -> None:
        """Check the shapes and dtypes of fields for compiled code, which sees only addresses.

        Raises:
            HurtleError: One has the wrong shape or dtype, or is not contiguous CPU memory.
        """
        model = Rollout(policy, 1, self.num_rows, self.masks is not None)
        for name in names:
            own, like = getattr(self, name), getattr(model, name)
            if own is None or like is None:
                continue
            shape = tuple(like.shape) if name.startswith("last_") else (self.num_steps, *like.shape[1:])
            if (tuple(own.shape), own.dtype, own.device.type) != (shape, like.dtype, "cpu") or not own.is_contiguous():
                raise HurtleError(
                    f"The rollout's {name} must be {like.dtype} of shape {shape}, contiguous and on the CPU, got {own.dtype} "
                    f"of shape {tuple(own.shape)} on {own.device}: make it with Rollout(policy, …)."
                )
        for given in (self.initial_state, self.last_state):
            if not _alike(given, model.initial_state):
                raise HurtleError(
                    f"The rollout has states of shapes {[tuple(part.shape) for part in given]} for the policy's memory, which "
                    f"needs {[tuple(part.shape) for part in model.initial_state]}, float32, contiguous and on the CPU: make it "
                    "with Rollout(policy, …)."
                )

    def steps(self, chosen: Tensor) -> Minibatch:
        """Single steps by their flat indices, `step * num_rows + row`."""

        def flat(field: Tensor) -> Tensor:
            return field.flatten(0, 1)[chosen]

        return Minibatch(
            gathered(self.inputs.flatten(0, 1), chosen),
            None if self.masks is None else flat(self.masks),
            flat(self.actions),
            flat(self.log_probs),
            flat(self.values),
            flat(self.advantages),
            flat(self.returns),
        )

    def segments(self, rows: Tensor, weights: Tensor | None = None, keep_all: bool = False) -> Minibatch:
        """All steps of some rows, for recurrent policies and priorities.

        Args:
            rows: The rows.
            weights: One per row, or None.
            keep_all: Keep invalid steps too, so that shapes do not depend on the data.
        """
        kept = None if self.all_valid or keep_all else self.valid[:, rows].flatten().nonzero()[:, 0]

        def flat(field: Tensor) -> Tensor:
            steps = field[:, rows].flatten(0, 1)
            return steps if kept is None else steps[kept]

        return Minibatch(
            gathered(self.inputs, rows, dim=1),
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

    def of_rows(self, first: int, count: int) -> Rollout:
        """Some of the rows, as a rollout that shares this one's memory; without `finals`."""
        part, rows = copy.copy(self), slice(first, first + count)
        part.num_rows, part.finals = count, Finals(self.finals.steps[:0], self.finals.rows[:0], self.finals.obs[:0])
        for name in (*STEP_FIELDS, "scaled_rewards"):
            if (field := getattr(self, name)) is not None:
                setattr(part, name, field[:, rows])
        for name in ROW_FIELDS:
            setattr(part, name, getattr(self, name)[rows])
        for name in ("initial_state", "last_state"):
            setattr(part, name, tuple(field[rows] for field in getattr(self, name)))
        return part

    def exchange(self, other: Rollout) -> None:
        """Swap memory and contents with another rollout of the same shape; nothing is copied."""
        self.__dict__, other.__dict__ = other.__dict__, self.__dict__

    def join(self, parts: Sequence[Rollout], first_rows: Sequence[int]) -> None:
        """Copy rollouts side by side into this one.

        Args:
            parts: Together they have as many columns as this one.
            first_rows: The row of each part's first column.
        """
        edges = [0, *accumulate(part.num_rows for part in parts)]
        assert edges[-1] == self.num_rows
        for part, begin in zip(parts, edges, strict=False):
            columns = slice(begin, begin + part.num_rows)
            for name in STEP_FIELDS:
                if (own := getattr(self, name)) is not None and (name != "inputs" or own is not self.obs):
                    own[:, columns] = getattr(part, name)
            for name in ROW_FIELDS:
                getattr(self, name)[columns] = getattr(part, name)
            for name in ("initial_state", "last_state"):
                for own, new in zip(getattr(self, name), getattr(part, name), strict=True):
                    own[columns] = new

        def joined(pieces: Iterable[Tensor]) -> Tensor:
            return torch.cat([piece.to(self.device) for piece in pieces])

        rows = joined(part.finals.rows + begin for part, begin in zip(parts, edges, strict=False))
        states = [part.finals.state for part in parts if len(part.finals.steps)]
        steps, obs = (joined(getattr(part.finals, name) for part in parts) for name in ("steps", "obs"))
        self.finals = Finals(steps, rows, obs, tuple(joined(kept) for kept in zip(*states, strict=True)))
        self.version, self.all_valid = min(part.version for part in parts), all(part.all_valid for part in parts)
        self.done, self.scaled_rewards = reduce(and_, (part.done for part in parts)), self.rewards
        self.ids = tuple(name for part in parts for name in part.ids)
        self.columns = None
        if any(part.columns is not None for part in parts) or list(first_rows) != edges[:-1]:
            own_rows = [np.arange(part.num_rows) if part.columns is None else part.columns for part in parts]
            self.columns = np.concatenate([rows + first for rows, first in zip(own_rows, first_rows, strict=True)])

    def state_dict(self) -> dict[str, Any]:
        """A copy of what a collector has filled."""
        tensors = {name: part.clone() for name in (*STEP_FIELDS, *ROW_FIELDS) if (part := getattr(self, name)) is not None}
        states = {name: [part.clone() for part in getattr(self, name)] for name in ("initial_state", "last_state")}
        *finals, state = self.finals
        others: dict[str, Any] = {"version": self.version, "all_valid": self.all_valid, "done": self.done.value}
        others |= {"columns": self.columns, "ids": list(self.ids)}
        return {**tensors, **states, **others, "finals": [*(part.clone() for part in finals), list(state)]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Hold what was saved from a rollout of the same shape.

        Raises:
            HurtleError: It had another shape.
        """
        if saved["rewards"].shape != self.rewards.shape:
            raise HurtleError(f"A rollout of {tuple(self.rewards.shape)} cannot hold one of {tuple(saved['rewards'].shape)}.")
        for name in (*STEP_FIELDS, *ROW_FIELDS):
            if (part := getattr(self, name)) is not None:
                part.copy_(saved[name])
        for name in ("initial_state", "last_state"):
            for own, part in zip(getattr(self, name), saved[name], strict=True):
                own.copy_(part)
        steps, rows, obs, state = saved["finals"]
        steps, rows, obs = (part.to(self.device) for part in (steps, rows, obs))
        self.finals = Finals(steps, rows, obs, tuple(part.to(self.device) for part in state))
        self.version, self.all_valid, self.columns = saved["version"], saved["all_valid"], saved["columns"]
        self.ids = tuple(saved.get("ids", ()))
        self.done, self.scaled_rewards = Done(saved["done"]), self.rewards

    def valid_steps(self) -> Tensor:
        """The flat indices of the valid steps."""
        if self.all_valid:
            return torch.arange(self.valid.numel(), device=self.device)
        return self.valid.flatten().nonzero()[:, 0]


def _alike(states: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    """Whether the parts of a memory's state have the shapes, dtypes and device of others, and are contiguous."""
    kinds = [[(part.shape, part.dtype, part.device) for part in each] for each in (states, others)]
    return kinds[0] == kinds[1] and all(part.is_contiguous() for part in states)


def gathered(field: Tensor, where: Tensor, dim: int = 0) -> Tensor:
    """`field` at some indices of one dimension. Bytes are gathered in groups of eight, since the cost is per element.

    Example:
        >>> gathered(torch.arange(12, dtype=torch.uint8).view(3, 4), torch.tensor([2, 0])).tolist()
        [[8, 9, 10, 11], [0, 1, 2, 3]]
    """
    index = (slice(None),) * dim + (where,)
    shape = field.shape[dim + 1 :]
    bytes_each = shape.numel() * field.element_size()
    if field.element_size() > 1 or not bytes_each or bytes_each % 8 or not field.is_contiguous() or field.storage_offset() % 8:
        return field[index]
    groups = field.view(*field.shape[: dim + 1], -1).view(torch.int64)
    return groups[index].view(field.dtype).unflatten(-1, shape)


def flat_weights(weights: Tensor, num_steps: int, kept: Tensor | None) -> Tensor:
    """Segment weights expanded to their steps, time-major. [b] -> [steps * b]."""
    steps = weights.repeat(num_steps)
    return steps if kept is None else steps[kept]


def torch_dtype(dtype: Any) -> torch.dtype:
    """The dtype in which observations of a NumPy dtype are stored: floats as float32, integers unchanged."""
    numpy_dtype = np.dtype(dtype)
    if numpy_dtype.kind == "f":
        return torch.float32
    if numpy_dtype.kind == "u" and numpy_dtype.itemsize > 1:
        return torch.int64  # torch cannot compute with wider unsigned integers
    return torch.from_numpy(np.zeros(0, numpy_dtype)).dtype
