"""`ActingPolicy`: what every loaded policy has in common: observations as the env gives them in, actions as it takes them out.

observation (array, int, dict …) → flat rows → [what the policy computes] → action that `env.step` takes. Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from gymnasium import spaces

from hurtle.emulation.actions import ActionLayout
from hurtle.emulation.layout import SpaceLayout
from hurtle.emulation.leaves import tree_leaves
from hurtle.emulation.nan import nan_rows
from hurtle.errors import EmulationError, HurtleError, NonFiniteError

State = tuple[Any, ...]


class ActingPolicy(ABC):
    """A trained policy, ready to act.

    A recurrent policy remembers between calls of `act`; `reset()` begins an episode. Or carry its memory yourself:
    `action, state = policy.act(obs, state)`, with `policy.initial_state()` at the start of an episode.

    Args:
        flat_spaces: Of the rows that the policy sees, and of its actions.
        layouts: How the env's own spaces lie in them; None where they are the same.
        mask_size: Entries of an action mask; None if it takes none.

    Attributes:
        observation_space: What `act` takes: the env's own space (of one agent, if it has several).
        action_space: What `act` returns.
    """

    def __init__(
        self,
        flat_spaces: tuple[spaces.Space, spaces.Space],
        layouts: tuple[SpaceLayout | None, ActionLayout | None],
        mask_size: int | None,
    ):
        self._flat_space, flat_actions = flat_spaces
        self._layout, self._action_layout = layouts
        self._mask_size = mask_size
        self.observation_space: spaces.Space = self._layout.space if self._layout else self._flat_space
        self.action_space: spaces.Space = self._action_layout.space if self._action_layout else flat_actions
        self._memory: State | None = None  # of `act` without a state; None: an episode begins

    def act(self, obs: Any, state: State | None = None, mask: Any = None, deterministic: bool | None = None) -> Any:
        """Choose an action for one observation, or actions for a batch of them.

        Args:
            obs: As `env.reset()` gives it, or a batch [B, …] as a vector env does.
            state: The memory to act with; None uses the policy's own.
            mask: Legal actions, bool [n] or [B, n].
            deterministic: Take the most likely action, which is what None means; False samples from a stream that the run's
                seed determines. An exported file does one of the two, and None takes that.

        Returns:
            An action that `env.step` takes, or a batch of them; with `state`, the pair (action, next state).

        Raises:
            HurtleError: The observation, mask or state is not what the policy expects.
        """
        rows, single = self._rows(obs)
        memory = self._own_memory(len(rows)) if state is None else self._given_memory(state, len(rows))
        actions, after = self._choose(rows, memory, self._mask(mask, len(rows), single), deterministic)
        action = self._env_action(actions[0]) if single else self._env_batch(actions)
        if state is not None:
            return action, after
        self._memory = after
        return action

    def value(self, obs: Any) -> Any:
        """What the policy expects to gain from here: a float for one observation, float32 [B] for a batch.

        A recurrent policy answers with what it remembers, and remembers nothing new.
        """
        rows, single = self._rows(obs)
        found = self._values(rows, self._own_memory(len(rows)))
        return float(found[0]) if single else found

    def reset(self, mask: Any = None) -> None:
        """Begin a new episode: forget.

        Args:
            mask: bool [B]: the rows of the batch that begin one; None: all.
        """
        if mask is None or self._memory is None:
            self._memory = None
            return
        chosen = np.asarray(mask)
        batch = len(self._memory[0]) if self._memory else len(chosen)
        if chosen.dtype != np.bool_ or chosen.shape != (batch,):
            raise HurtleError(f"reset takes a mask of bool [{batch}], got {chosen.dtype} {list(chosen.shape)}.")
        self._memory = tuple(self._forgotten(part, chosen) for part in self._memory)

    # What a kind of policy does.

    @abstractmethod
    def initial_state(self, batch: int = 1) -> State:
        """The memory at the start of an episode; () for a policy without recurrence."""

    @abstractmethod
    def _choose(
        self, rows: np.ndarray, memory: State, mask: np.ndarray | None, deterministic: bool | None
    ) -> tuple[np.ndarray, State]:
        """Actions [B, …] of the flat action space, and the next memory."""

    @abstractmethod
    def _values(self, rows: np.ndarray, memory: State) -> np.ndarray:
        """Float32 [B]."""

    @abstractmethod
    def _forgotten(self, part: Any, rows: np.ndarray) -> Any:
        """A part of a memory with zeros in some rows, bool [B]."""

    @abstractmethod
    def _as_memory(self, part: Any) -> Any:
        """A part of a memory that the user carried, where and as the policy needs it."""

    # What comes in.

    def _rows(self, obs: Any) -> tuple[np.ndarray, bool]:
        """Observations as rows [B, …] of the space that the policy was trained on, and whether it was a single one."""
        flat_space = self._flat_space
        structured = self._layout is not None and not isinstance(self._layout.space, spaces.Box)
        if structured and not _is_flat(obs, flat_space):
            rows, single = self._flattened(obs)
        else:
            rows, single = _plain_rows(obs, flat_space)
        if nan_rows(rows, self._layout).any():
            raise NonFiniteError("The observation holds NaN; a policy can make nothing of it.")
        return rows, single

    def _flattened(self, obs: Any) -> tuple[np.ndarray, bool]:
        """A structured observation, or a batch of them as vector envs have it."""
        layout = self._layout
        assert layout is not None
        try:
            layout.check(obs)
        except EmulationError as error:
            batch = _batch_size(obs)
            if batch is None:
                raise
            memory = layout.memory(batch)
            try:
                layout.write_batch(obs, memory)
            except (EmulationError, KeyError, TypeError, IndexError, ValueError):
                raise error from None  # it was meant to be a single one
            return layout.flat(memory), False
        memory = layout.memory(1)
        layout.writer(memory[0])(obs)
        return layout.flat(memory), True

    def _mask(self, mask: Any, batch: int, single: bool) -> np.ndarray | None:
        if mask is None:
            return None
        size = self._mask_size
        if size is None:
            raise HurtleError(f"mask: {self._no_mask()}; leave it out.")
        given = np.asarray(mask)
        expected = (size,) if single else (batch, size)
        if given.shape != expected or given.dtype.kind not in "biu":
            raise HurtleError(f"mask: expected bool {list(expected)}, got {given.dtype} {list(given.shape)}.")
        return given.astype(np.bool_).reshape(batch, size)

    def _own_memory(self, batch: int) -> State:
        if self._memory is None:
            return self.initial_state(batch)
        if self._memory and len(self._memory[0]) != batch:
            raise HurtleError(
                f"The policy remembers {len(self._memory[0])} episodes and got {batch} observations: call reset() before "
                "a batch of another size, or carry the memory yourself with state=policy.initial_state(batch)."
            )
        return self._memory

    def _given_memory(self, state: State, batch: int) -> State:
        expected = [list(part.shape) for part in self.initial_state(batch)]
        got = [list(getattr(part, "shape", ())) for part in state] if isinstance(state, tuple | list) else None
        if got != expected:
            raise HurtleError(f"state: expected tensors {expected} for {batch} observations (see initial_state), got {got}.")
        return tuple(self._as_memory(part) for part in state)

    def _no_mask(self) -> str:
        """Why it takes no mask."""
        return f"actions in {self.action_space} have no masks"

    # What goes out.

    def _env_action(self, action: Any) -> Any:
        """One action as `env.step` takes it."""
        if self._action_layout is not None:
            return self._action_layout.decode(action)
        return int(action) if isinstance(self.action_space, spaces.Discrete) else action.copy()

    def _env_batch(self, actions: np.ndarray) -> Any:
        """Actions [B, …] as a vector env takes them."""
        if self._action_layout is None or isinstance(self.action_space, spaces.Box):
            return actions
        return _stacked([self._action_layout.decode(action) for action in actions])


def _is_flat(obs: Any, space: spaces.Space) -> bool:
    """Whether a structured observation comes flat already, as an emulated env gives it."""
    return isinstance(obs, np.ndarray) and obs.dtype == space.dtype and obs.shape[-len(space.shape or ()) :] == space.shape


def _plain_rows(obs: Any, space: spaces.Space) -> tuple[np.ndarray, bool]:
    shape, dtype = space.shape or (), np.dtype(space.dtype)
    try:
        given = np.asarray(obs.cpu() if hasattr(obs, "cpu") else obs)  # a torch tensor, perhaps on a GPU
    except (ValueError, TypeError):  # ragged
        given = np.empty(0, object)
    fits = given.dtype == dtype or (given.dtype.kind in "biuf" and np.can_cast(given.dtype, dtype, "same_kind"))
    if given.shape not in (shape, (*given.shape[:1], *shape)) or not fits or not given.size:
        got = f"{type(obs).__name__} {obs!r}" if given.dtype == object else f"{given.dtype} {list(given.shape)}"
        batch = ["B", *shape]
        raise HurtleError(
            f"observation: expected {dtype} {list(shape)}, or a batch {batch}, as in {space}; got {got[:200]}.".replace("'", "")
        )
    single = given.shape == shape
    rows = given.astype(dtype, copy=False).reshape(-1, *shape)
    if isinstance(space, spaces.Discrete) and not ((rows >= space.start) & (rows < space.start + space.n)).all():
        raise HurtleError(f"observation: expected one of {space}, got {obs!r}.")
    return rows, single


def _batch_size(obs: Any) -> int | None:
    """How many observations a structured batch holds: the length of its first leaf that has one."""
    for leaf in tree_leaves(obs):
        if np.ndim(leaf) > 0:
            return len(leaf)
    return None


def _stacked(actions: list[Any]) -> Any:
    """Structured actions as one batch, as Gymnasium has it: a dict or tuple of arrays."""
    first = actions[0]
    if isinstance(first, dict):
        return {key: _stacked([action[key] for action in actions]) for key in first}
    if isinstance(first, tuple):
        return tuple(_stacked([action[i] for action in actions]) for i in range(len(first)))
    return np.stack(actions)
