"""`SequenceReplay`: replay for policies with a memory: whole sequences of steps, and the memory's state before the first.

rollout → `add` → rings → `sample_sequences` → `Sequences`. A sequence begins where a rollout began: its state is known there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hurtle.buffers.replay import Replay
from hurtle.buffers.rollout import Rollout
from hurtle.errors import HurtleError
from hurtle.kernels import replay as kernels


class Sequences(NamedTuple):
    """A batch of sequences, time-major: [T, B, …]."""

    obs: Tensor
    """As the env returned them."""
    actions: Tensor
    """What the policy chose."""
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    starts: Tensor
    """Where an episode begins: the memory is cleared before this step."""
    valid: Tensor
    """False where there was no step: after the last one of a truncated episode, and at frames before its first stack."""
    masks: Tensor | None
    """Legal actions, or None if the envs report none."""
    state: tuple[Tensor, ...]
    """The memory before the first step. [B, …] each"""
    weights: Tensor
    """Importance weights, at most 1; all 1 without priorities. [B]"""
    ids: Tensor
    """What to pass to `update_priorities`. int64 [B]"""


class SequenceReplay(Replay):
    """A `Replay` of sequences.

    Args:
        like: A rollout that gives shapes, dtypes and the memory's state; sequences begin where such rollouts began.
        capacity: Slots in all, divided equally among rows.
        sequence_length: Steps of a sequence. It may be longer than a rollout, and cross the ends of episodes.
        settings: Those of `Replay`, but for `n_step` and `gamma`; a priority is that of a sequence.

    Example:
        >>> import hurtle
        >>> from hurtle.collect import NativeCollector
        >>> from hurtle.policies.policy_config import PolicyConfig
        >>> collector = NativeCollector(hurtle.make_vec("cartpole", num_envs=4), PolicyConfig(recurrent="gru"))
        >>> rollout = collector.new_rollout(num_steps=8)
        >>> replay = SequenceReplay(rollout, capacity=1000, sequence_length=16)
        >>> for _ in range(3):
        ...     episodes = collector.collect(rollout)
        ...     replay.add(rollout)
        >>> batch = replay.sample_sequences(32)
        >>> batch.obs.shape, batch.state[0].shape
        (torch.Size([16, 32, 4]), torch.Size([32, 64]))
    """

    def __init__(self, like: Rollout, capacity: int, sequence_length: int, **settings: Any):
        if unused := {"n_step", "gamma"} & set(settings):
            raise HurtleError(f"{' and '.join(sorted(unused))} are not settings of sequences: their rewards are not summed.")
        self._entries = 0
        self.sequence_length = sequence_length
        rows = settings.get("num_rows") or like.num_rows
        if isinstance(sequence_length, int) and isinstance(capacity, int):
            self._entries = capacity // rows // like.num_steps + 2
        self._num_steps = like.num_steps
        super().__init__(like, capacity, **settings)
        if isinstance(sequence_length, bool) or not isinstance(sequence_length, int) or sequence_length < 1:
            raise HurtleError(f"sequence_length must be an int of at least 1, got {sequence_length!r}.")
        least = sequence_length + self.frames + like.num_steps
        if self.length < least:
            raise HurtleError(
                f"capacity={capacity} leaves {self.length} slots for each of {rows} rows; sequences of {sequence_length} "
                f"steps from rollouts of {like.num_steps} need {least}: use a capacity of at least {least * rows}."
            )
        lead = (self.num_rows, self._entries)
        self._places = np.full(lead, -1, np.int64)  # positions of the steps that rollouts began with
        self._states = tuple(torch.zeros((*lead, *part.shape[1:]), dtype=part.dtype) for part in like.initial_state)
        self._counts = np.zeros(self.num_rows, np.int64)  # entries written
        self._can_begin = np.zeros(lead, np.bool_)

    @property
    def _num_leaves(self) -> int:
        return self.num_rows * self._entries

    def _added(self, rollout: Rollout, before: np.ndarray, rows: np.ndarray, firsts: np.ndarray) -> None:
        columns = (firsts >= 0).nonzero()[0]
        states = [part.cpu() for part in rollout.initial_state]
        for column in columns if len(np.unique(rows)) < len(rows) else [columns]:  # in order, where a row has several columns
            row = rows[column]
            entry = self._counts[row] % self._entries
            self._places[row, entry] = firsts[column]
            self._can_begin[row, entry] = False  # another sequence than before
            self._weigh(row, entry, 0.0)
            for part, new in zip(self._states, states, strict=True):
                part[torch.as_tensor(row), torch.as_tensor(entry)] = new[torch.as_tensor(column)]
            self._counts[row] += 1
        oldest = np.maximum(0, self._heads + self._pending - self.length) + self.frames - 1
        can = (self._places >= oldest[:, None]) & (self._places + self.sequence_length <= self._heads[:, None])
        for priority, changed in ((self._highest, can & ~self._can_begin), (0.0, ~can & self._can_begin)):
            which = changed.nonzero()
            self._weigh(which[0], which[1], priority)
        self._can_begin = can

    def _weigh(self, rows: Any, entries: Any, priority: float) -> None:
        if self._tree is not None:
            for leaf in np.atleast_1d(rows * self._entries + entries):
                kernels.set_leaf(self._tree, leaf, priority)

    def _leaves(self, ids: np.ndarray) -> np.ndarray:
        age, rows, counts = self._ages(ids)
        return np.where(age < self._entries, rows * self._entries + counts % self._entries, -1)

    @property
    def _written(self) -> np.ndarray:
        return self._counts

    @property
    def _description(self) -> dict[str, Any]:
        return {**super()._description, "sequence_length": self.sequence_length, "num_steps": self._num_steps}

    @property
    def num_sequences(self) -> int:
        """Sequences that can be drawn."""
        return int(self._can_begin.sum())

    def ages(self, ids: Tensor) -> np.ndarray:
        """The age of sequences: steps between their beginnings and that of their row's newest."""
        return self._ages(ids.cpu().numpy())[0] * self._num_steps

    def sample(self, batch_size: int, beta: float = 1.0) -> Any:
        """Not available: this buffer samples whole sequences.

        Raises:
            HurtleError: Always.
        """
        raise HurtleError("A SequenceReplay samples sequences: use sample_sequences, or a Replay for transitions.")

    def sample_sequences(self, batch_size: int, beta: float = 1.0) -> Sequences:
        """Draw sequences, with replacement; see `Replay.sample`.

        Raises:
            HurtleError: There is none of this length yet.
        """
        if batch_size < 1:
            raise HurtleError(f"batch_size must be at least 1, got {batch_size}.")
        chosen, weights = np.empty(batch_size, np.int64), torch.ones(batch_size)
        if self._tree is None:
            found = self._can_begin.ravel().nonzero()[0]
            drawn = kernels.draw_any(self._seed, self._drawn, len(found), chosen) if len(found) else -1
            chosen = found[chosen] if len(found) else chosen
        else:
            drawn = kernels.draw_by_priority(self._seed, self._drawn, self._tree, beta, chosen, weights.numpy())
        if drawn < 0:
            raise HurtleError(
                f"The replay buffer has no sequence of {self.sequence_length} steps yet: add more rollouts first."
            )
        self._drawn = int(drawn)
        rows, entries = np.divmod(chosen, self._entries)
        last = self._counts[rows] - 1
        ids = (last - (last - entries) % self._entries) * self.num_rows + rows  # as many as were written when it was
        return self._sequences(rows, entries, weights, torch.from_numpy(ids))

    def _sequences(self, rows: np.ndarray, entries: np.ndarray, weights: Tensor, ids: Tensor) -> Sequences:
        lead = (self.sequence_length, len(rows))
        obs = torch.zeros((*lead, *self._obs_shape), dtype=self._obs_dtype)
        actions = torch.zeros((*lead, *self._action_shape), dtype=self._action_dtype)
        masks, rewards = torch.zeros((*lead, self._mask_size), dtype=torch.bool), torch.zeros(lead)
        flags, rings = torch.zeros(lead, dtype=torch.uint8), self._rings
        kernels.gather_windows(
            rows, self._places[rows, entries], rings["obs"], rings["actions"], rings["masks"], rings["rewards"], rings["flags"],
            self.frames, self._obs_words.join(self.frames).view(obs, lead), self._action_words.view(actions, lead),
            masks.numpy(), rewards.numpy(), flags.numpy(),
        )  # fmt: skip
        terminated, truncated, starts, gaps = (
            (flags & bit) != 0 for bit in (kernels.TERMINATED, kernels.TRUNCATED, kernels.START, kernels.GAP)
        )
        at = torch.from_numpy(rows), torch.from_numpy(entries)
        state = tuple(part[at] for part in self._states)
        legal = masks if self._mask_size else None
        return Sequences(obs, actions, rewards, terminated, truncated, starts, ~gaps, legal, state, weights, ids)

    def state_dict(self) -> dict[str, Any]:
        """See `Replay.state_dict`."""
        books = {"places": self._places, "counts": self._counts, "can_begin": self._can_begin}
        saved = {name: torch.from_numpy(array.copy()) for name, array in books.items()}
        return {**super().state_dict(), **saved, "states": [part.clone() for part in self._states]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """See `Replay.load_state_dict`."""
        super().load_state_dict(saved)
        self._places[:], self._counts[:] = saved["places"].numpy(), saved["counts"].numpy()
        self._can_begin[:] = saved["can_begin"].numpy()
        for part, own in zip(saved["states"], self._states, strict=True):
            own.copy_(part)
