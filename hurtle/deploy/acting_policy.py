"""`ActingPolicy`: the part that all loaded policies share: the env's observations in, the env's actions out.

observation (array, int, dict …) → flat rows → [the policy] → action for `env.step`. Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from gymnasium import spaces

from hurtle.emulation.action_layout import ActionLayout
from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.emulation.leaves import tree_leaves
from hurtle.emulation.nan import nan_rows
from hurtle.errors import EmulationError, HurtleError, NonFiniteError

State = tuple[Any, ...]


class ActingPolicy(ABC):
    """A trained policy, ready to act.

    A recurrent policy keeps its state between calls of `act`; call `reset()` when an episode begins. Or carry the state
    yourself: `action, state = policy.act(obs, state)`, with `policy.initial_state()` at the start of an episode.

    Args:
        flat_spaces: The flat spaces of observations and actions.
        layouts: How the env's own spaces lie in the flat ones; None where they are the same.
        mask_size: Entries of an action mask; None if the policy takes none.

    Attributes:
        observation_space: The env's own observation space (of one agent, if it has several).
        action_space: The env's own action space, likewise.
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
        self._memory: State | None = None  # the state of `act` calls without one; None: an episode begins

    def act(self, obs: Any, state: State | None = None, mask: Any = None, deterministic: bool | None = None) -> Any:
        """Choose an action for one observation, or actions for a batch of them.

        Args:
            obs: An observation as `env.reset()` returns it, or a batch [B, …] as a vector env does.
            state: The recurrent state to act with; None uses the state that the policy keeps.
            mask: Legal actions, bool [n] or [B, n].
            deterministic: True (or None) takes the most likely action; False samples, from a stream seeded by the run's seed.
                An exported file does one of the two, and None accepts either.

        Returns:
            An action for `env.step`, or a batch of them; with `state`, the pair (action, next state).

        Raises:
            HurtleError: The observation, mask or state does not fit the policy.
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
        """The value estimate: a float for one observation, float32 [B] for a batch.

        A recurrent policy uses the state it keeps, and does not change it.
        """
        rows, single = self._rows(obs)
        found = self._values(rows, self._own_memory(len(rows)))
        return float(found[0]) if single else found

    def reset(self, mask: Any = None) -> None:
        """Clear the recurrent state, at the start of an episode.

        Args:
            mask: The rows of the batch whose episode begins, bool [B]; None: all.
        """
        if mask is None or self._memory is None:
            self._memory = None
            return
        chosen = np.asarray(mask)
        batch = len(self._memory[0]) if self._memory else len(chosen)
        if chosen.dtype != np.bool_ or chosen.shape != (batch,):
            raise HurtleError(f"reset takes a mask of bool [{batch}], got {chosen.dtype} {list(chosen.shape)}.")
        self._memory = tuple(self._forgotten(part, chosen) for part in self._memory)

    # Implemented by each kind of policy.

    @abstractmethod
    def initial_state(self, batch: int = 1) -> State:
        """The recurrent state at the start of an episode; () for a policy without recurrence."""

    @abstractmethod
    def _choose(
        self, rows: np.ndarray, memory: State, mask: np.ndarray | None, deterministic: bool | None
    ) -> tuple[np.ndarray, State]:
        """Actions [B, …] of the flat action space, and the next state."""

    @abstractmethod
    def _values(self, rows: np.ndarray, memory: State) -> np.ndarray:
        """Value estimates, float32 [B]."""

    @abstractmethod
    def _forgotten(self, part: Any, rows: np.ndarray) -> Any:
        """A part of a recurrent state, cleared in the given rows, bool [B]."""

    @abstractmethod
    def _as_memory(self, part: Any) -> Any:
        """A part of a state that the user carried, converted to what the policy takes."""

    # Inputs.

    def _rows(self, obs: Any) -> tuple[np.ndarray, bool]:
        """Observations as rows [B, …] of the flat space, and whether it was a single observation."""
        flat_space = self._flat_space
        structured = self._layout is not None and not isinstance(self._layout.space, spaces.Box)
        if structured and not _is_flat(obs, flat_space):
            rows, single = self._flattened(obs)
        else:
            rows, single = _plain_rows(obs, flat_space)
        if nan_rows(rows, self._layout).any():
            raise NonFiniteError("The observation contains NaN.")
        return rows, single

    def _flattened(self, obs: Any) -> tuple[np.ndarray, bool]:
        """Flat rows of a structured observation, or of a batch of them as a vector env returns it."""
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
                raise error from None  # it was meant as a single observation
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
                f"The policy keeps the state of {len(self._memory[0])} episodes and got {batch} observations: call reset() "
                "before a batch of another size, or carry the state yourself, from state=policy.initial_state(batch)."
            )
        return self._memory

    def _given_memory(self, state: State, batch: int) -> State:
        expected = [list(part.shape) for part in self.initial_state(batch)]
        got = [list(getattr(part, "shape", ())) for part in state] if isinstance(state, tuple | list) else None
        if got != expected:
            raise HurtleError(f"state: expected tensors {expected} for {batch} observations (see initial_state), got {got}.")
        return tuple(self._as_memory(part) for part in state)

    def _no_mask(self) -> str:
        """The reason that it takes no mask, for errors."""
        return f"actions in {self.action_space} have no masks"

    # Outputs.

    def _env_action(self, action: Any) -> Any:
        """One action for `env.step`."""
        if self._action_layout is not None:
            return self._action_layout.decode(action)
        return int(action) if isinstance(self.action_space, spaces.Discrete) else action.copy()

    def _env_batch(self, actions: np.ndarray) -> Any:
        """Actions [B, …] for the `step` of a vector env."""
        if self._action_layout is None or isinstance(self.action_space, spaces.Box):
            return actions
        return _stacked([self._action_layout.decode(action) for action in actions])


def _is_flat(obs: Any, space: spaces.Space) -> bool:
    """Whether a structured observation is flat already, as an emulated env returns it."""
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
    """The number of observations in a structured batch: the length of its first leaf that has one."""
    for leaf in tree_leaves(obs):
        if np.ndim(leaf) > 0:
            return len(leaf)
    return None


def _stacked(actions: list[Any]) -> Any:
    """Structured actions as one Gymnasium batch: a dict or tuple of arrays."""
    first = actions[0]
    if isinstance(first, dict):
        return {key: _stacked([action[key] for action in actions]) for key in first}
    if isinstance(first, tuple):
        return tuple(_stacked([action[i] for action in actions]) for i in range(len(first)))
    return np.stack(actions)
