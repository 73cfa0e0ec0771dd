"""`Replay`: the last steps of every row, from which n-step transitions are drawn, uniformly or by priority. On the CPU.

rollout → `add` → rings → `sample` → `Transitions`. Each observation is stored once, in its own dtype: the next one is in the
next slot. Knows nothing of policies or losses. sequences.py draws whole sequences instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter, is_
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hurtle.buffers.rollout import Rollout
from hurtle.buffers.storage import Storage, gib
from hurtle.errors import HurtleError
from hurtle.kernels import replay as kernels
from hurtle.native.rng import stream_state

ROLLOUT_FIELDS = ("obs", "last_obs", "actions", "masks", "rewards", "terminated", "truncated", "starts", "valid")
_FIELDS_OF = attrgetter(*ROLLOUT_FIELDS)
REPLAY_STREAM = 11
"""The random stream that samples are drawn from, independent of all others of the same seed."""


class Transitions(NamedTuple):
    """A batch of n-step transitions. The tensors are overwritten by the next `sample` of the same size."""

    obs: Tensor
    """[B, …], as the env returned them."""
    actions: Tensor
    """[B, …], what the policy chose."""
    rewards: Tensor
    """Discounted sums of up to n rewards. [B]"""
    next_obs: Tensor
    """What followed the last of these steps; the episode's final observation where it was truncated. Where it was terminated,
    `discounts` is 0 and this is `obs` again. [B, …]"""
    discounts: Tensor
    """Factors of V(next_obs): γ to the number of steps, 0 after a termination. [B]"""
    masks: Tensor | None
    """Legal actions, bool [B, A]; None if the envs report none."""
    next_masks: Tensor | None
    """The same for `next_obs`; all True for the final observation of a truncated episode, whose masks envs do not report."""
    weights: Tensor
    """Importance weights, at most 1; all 1 without priorities. [B]"""
    ids: Tensor
    """What to pass to `update_priorities`. int64 [B]"""


class Replay:
    """A ring of slots for each row; a slot is an observation and the step taken there.

    Two kinds of slots have no step. After the last step of a truncated episode there is one with its final observation, so
    that what follows a step is always in the next slot. With stacked frames, slots hold one frame each, and an episode begins
    with those that its first observation shows besides its newest. Steps of absent agents, and resets that take a step, are not
    stored. The newest step can be sampled at once, since the slot after it holds the next observation, unless the rollout has
    steps that are not stored, or masks: then it waits for the next rollout. An episode that is not continued where the last
    rollout ended counts as truncated there.

    Args:
        like: A rollout that gives shapes and dtypes.
        capacity: Slots in all, divided equally among rows.
        num_rows: Envs times agents; None: the rollout's. They differ in pools.
        n_step: Rewards that are summed before bootstrapping.
        gamma: Discount of future rewards.
        frame_stack: Frames along the first axis of observations, each of which moves up by one in every step; 1: no stack.
        priority_alpha: Exponent of priorities; None or 0 draws uniformly.
        seed: Seed of what is drawn.
        folder: Where to keep it: a folder, "memory", or None for memory if it fits and else the system's temporary folder.

    Raises:
        HurtleError: A setting is impossible, or there is not enough memory or room on the disk.

    Example:
        >>> import hurtle
        >>> from hurtle.collect import NativeCollector
        >>> from hurtle.policies.policy_config import PolicyConfig
        >>> collector = NativeCollector(hurtle.make_vec("cartpole", num_envs=8), PolicyConfig())
        >>> rollout = collector.new_rollout(num_steps=16)
        >>> replay = Replay(rollout, capacity=10_000, n_step=3, gamma=0.99)
        >>> episodes = collector.collect(rollout)
        >>> replay.add(rollout)
        >>> batch = replay.sample(32)
        >>> batch.obs.shape, batch.rewards.shape
        (torch.Size([32, 4]), torch.Size([32]))
    """

    def __init__(
        self,
        like: Rollout,
        capacity: int,
        *,
        num_rows: int | None = None,
        n_step: int = 1,
        gamma: float = 0.99,
        frame_stack: int = 1,
        priority_alpha: float | None = None,
        seed: int = 0,
        folder: str | Path | None = None,
    ):
        self.num_rows = num_rows or like.num_rows
        self.length = _length_of(capacity, self.num_rows, n_step, frame_stack)
        self.n_step, self.gamma, self.frames, self.priority_alpha = n_step, gamma, frame_stack, priority_alpha or 0.0
        self._check(like)
        self._obs_shape, self._action_shape = tuple(like.obs.shape[2:]), tuple(like.actions.shape[2:])
        self._obs_dtype, self._action_dtype = like.obs.dtype, like.actions.dtype
        self._mask_size = 0 if like.masks is None else like.masks.shape[-1]
        obs, actions = (_Words.of(part) for part in (like.obs[0, 0], like.actions[0, 0]))
        self._obs_words, self._action_words = obs.split(frame_stack), actions
        record = _Record.of(actions, self._mask_size)
        lead = (self.num_rows, self.length)
        self.nbytes = self.capacity * (self._obs_words.count * self._obs_words.dtype.itemsize + record.size)
        self.storage = Storage(self.nbytes, folder)
        self._memory = {
            "obs": self.storage.zeros((*lead, self._obs_words.count), self._obs_words.dtype),
            "steps": self.storage.zeros((*lead, record.size), np.uint8),
        }
        self._rings = {"obs": self._memory["obs"], **record.views(self._memory["steps"])}
        self._rings["flags"][:] = kernels.GAP
        self._heads, self._head_slots = (np.zeros(self.num_rows, np.int64) for _ in range(2))
        self._pending = np.zeros(self.num_rows, np.bool_)
        self._seed, self._drawn = np.uint64(stream_state(seed, REPLAY_STREAM)), 0
        self._checked_stack = frame_stack == 1
        self._tree = kernels.new_tree(self._num_leaves) if self.priority_alpha else None
        self._highest = 1.0
        self._outs: dict[int, tuple[Transitions, np.ndarray, np.ndarray, list[np.ndarray]]] = {}
        self._views: dict[str, np.ndarray] = {}
        self._fields: tuple[Any, ...] = (None,) * len(ROLLOUT_FIELDS)  # the last rollout's
        self._kept_finals: Any = None
        self._every_row, self._ends = np.arange(self.num_rows), np.zeros(self.num_rows, np.int64)

    @property
    def _num_leaves(self) -> int:
        """Number of leaves of the sum tree."""
        return self.num_rows * self.length

    def _check(self, like: Rollout) -> None:
        if not 0 <= self.gamma <= 1:
            raise HurtleError(f"gamma must be between 0 and 1, got {self.gamma}.")
        if not 0 <= self.priority_alpha < np.inf:
            raise HurtleError(f"priority_alpha must be at least 0, got {self.priority_alpha}.")
        shape = tuple(like.obs.shape[2:])
        if self.frames > 1 and (not shape or shape[0] != self.frames):
            raise HurtleError(f"frame_stack={self.frames} expects observations of shape ({self.frames}, …), got {shape}.")

    def __len__(self) -> int:
        """Slots in use."""
        return int(np.minimum(self._heads, self.length).sum())

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return self.num_rows * self.length

    def add(self, rollout: Rollout) -> None:
        """Append the steps of a rollout; the oldest ones make room.

        Raises:
            HurtleError: Its shapes or dtypes are not those of the buffer, or its observations are not stacks.
        """
        host = self._host(rollout)
        self._check_stack(host)
        columns, rows = rollout.num_rows, rollout.columns
        if rows is None and columns != self.num_rows:
            raise HurtleError(f"The rollout has {columns} rows, the replay buffer {self.num_rows}.")
        if rows is not None and (len(rows) != columns or rows.min() < 0 or rows.max() >= self.num_rows):
            raise HurtleError(f"The rollout's columns must be {columns} rows below {self.num_rows}, got {rows}: set num_rows.")
        before, firsts = self._heads.copy(), np.empty(columns, np.int64)
        rows = self._every_row if rows is None else np.ascontiguousarray(rows, np.int64)
        knows_next = rollout.all_valid and not self._mask_size
        kernels.push(
            *host.values(),
            *self._finals(rollout),
            rows,
            knows_next,
            *self._rings.values(),
            self._heads,
            self._head_slots,
            self._pending,
            firsts,
        )
        self._added(rollout, before, rows, firsts)

    def _added(self, rollout: Rollout, before: np.ndarray, rows: np.ndarray, firsts: np.ndarray) -> None:
        """Update what can be sampled.

        Args:
            rollout: Just stored.
            before: The heads before that.
            rows: The row of each column.
            firsts: The position of each column's first step, or -1.
        """
        if self._tree is not None:
            kernels.weigh(
                self._tree, before, self._heads, self._pending, self._rings["flags"], self.frames, self._highest
            )  # fmt: skip

    def _host(self, rollout: Rollout) -> dict[str, np.ndarray]:
        """The fields of a rollout as arrays, as `push` takes them; those of the last rollout again if it is the same memory."""
        fields = _FIELDS_OF(rollout)
        if all(map(is_, fields, self._fields)) and rollout.device.type == "cpu":
            return self._views
        self._check_fields(rollout)
        lead, whole = (rollout.num_steps, rollout.num_rows), self._obs_words.join(self.frames)
        masks = torch.zeros((*lead, 0), dtype=torch.bool) if rollout.masks is None else rollout.masks
        views = {
            "obs": whole.view(rollout.obs, lead),
            "last_obs": whole.view(rollout.last_obs, lead[1:]),
            "actions": self._action_words.view(rollout.actions, lead),
            "masks": masks.cpu().numpy(),
            **{name: getattr(rollout, name).cpu().numpy() for name in ROLLOUT_FIELDS[4:]},
        }
        in_place = rollout.obs.is_contiguous() and rollout.last_obs.is_contiguous() and rollout.actions.is_contiguous()
        self._fields, self._views = fields if in_place else (None,) * len(fields), views
        return views

    def _finals(self, rollout: Rollout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The last observations of truncated episodes, and the step and column of each, or -1."""
        finals = rollout.finals
        if finals is not self._kept_finals or rollout.device.type != "cpu":
            obs = self._obs_words.join(self.frames).view(finals.obs, (len(finals.steps),))
            self._final_views = obs, finals.steps.cpu().numpy(), finals.rows.cpu().numpy()
            self._kept_finals = finals if finals.obs.is_contiguous() else None
        return self._final_views

    def _check_fields(self, rollout: Rollout) -> None:
        expected = (self._obs_shape, self._action_shape, self._obs_dtype, self._action_dtype, self._mask_size)
        masks = 0 if rollout.masks is None else rollout.masks.shape[-1]
        found = (
            tuple(rollout.obs.shape[2:]),
            tuple(rollout.actions.shape[2:]),
            rollout.obs.dtype,
            rollout.actions.dtype,
            masks,
        )
        if found != expected:
            names = ("observations of shape", "actions of shape", "observations of", "actions of", "masks of size")
            what, own, given = next(trio for trio in zip(names, expected, found, strict=True) if trio[1] != trio[2])
            raise HurtleError(f"The rollout does not fit the replay buffer, which expects {what} {own}; got {given}.")

    def _check_stack(self, host: dict[str, np.ndarray]) -> None:
        """Whether the first rollout's observations are stacks; once, since it reads all of it."""
        if self._checked_stack or len(host["obs"]) < 2:
            return
        frame, obs = self._obs_words.count, host["obs"]
        goes_on = host["valid"][:-1] & host["valid"][1:] & ~host["starts"][1:]
        if (obs[:-1, :, frame:] != obs[1:, :, :-frame]).any(-1)[goes_on].any():
            raise HurtleError(
                f"frame_stack={self.frames}, but the last {self.frames - 1} frames of an observation are not the first ones of "
                "the next: use frame_stack=1."
            )
        self._checked_stack = True

    def sample(self, batch_size: int, beta: float = 1.0) -> Transitions:
        """Draw transitions, with replacement.

        Args:
            batch_size: How many.
            beta: Exponent of the importance weights, if they are drawn by priority.

        Raises:
            HurtleError: There is nothing to draw.
        """
        out, slots, weights, arrays = self._out(batch_size)
        if self._tree is None:
            weights[:], flags = 1.0, self._rings["flags"]
            drawn = kernels.draw(
                self._seed, self._drawn, self._heads, self._head_slots, self._pending, flags, self.frames, self._ends, slots
            )
        else:
            drawn = kernels.draw_by_priority(self._seed, self._drawn, self._tree, beta, slots, weights)
        if drawn < 0:
            raise HurtleError("The replay buffer has no transitions to sample from yet: add a rollout first.")
        self._drawn = int(drawn)
        kernels.gather(
            slots,
            *self._rings.values(),
            self._heads,
            self._head_slots,
            self._pending,
            self.frames,
            self.n_step,
            np.float32(self.gamma),
            *arrays,
        )
        return out

    def _out(self, size: int) -> tuple[Transitions, np.ndarray, np.ndarray, list[np.ndarray]]:
        """Memory for a batch: as tensors; and its slots, its weights, and the rest, as the kernels take them."""
        if size < 1:
            raise HurtleError(f"batch_size must be at least 1, got {size}.")
        if size not in self._outs:

            def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
                return torch.zeros((size, *shape), dtype=dtype)

            masks, next_masks = (zeros(self._mask_size, dtype=torch.bool) if self._mask_size else None for _ in range(2))
            obs, next_obs = (zeros(*self._obs_shape, dtype=self._obs_dtype) for _ in range(2))
            actions = zeros(*self._action_shape, dtype=self._action_dtype)
            weights, ids = zeros() + 1, zeros(dtype=torch.int64)
            out = Transitions(obs, actions, zeros(), next_obs, zeros(), masks, next_masks, weights, ids)
            whole, lead = self._obs_words.join(self.frames), (size,)
            legal = [np.zeros((size, 0), np.bool_) if mask is None else mask.numpy() for mask in (masks, next_masks)]
            arrays = [whole.view(obs, lead), self._action_words.view(actions, lead), out.rewards.numpy()]
            arrays += [whole.view(next_obs, lead), out.discounts.numpy(), *legal, ids.numpy()]
            self._outs[size] = out, np.zeros(size, np.int64), weights.numpy(), arrays
        return self._outs[size]

    def update_priorities(self, ids: Tensor, errors: Tensor) -> None:
        """Give transitions the priority (|error| + 1e-6) ^ alpha; those overwritten since are left alone.

        Args:
            ids: Of a sampled batch. int64 [B]
            errors: Their TD errors. [B]

        Raises:
            HurtleError: An error is not finite, or an id does not belong to this buffer.
        """
        if self._tree is None:
            return
        known, found = ids.cpu().numpy(), np.ascontiguousarray(errors.detach().cpu().float().numpy())
        if known.ndim != 1 or known.dtype != np.int64 or found.shape != known.shape:
            raise HurtleError(
                f"update_priorities takes the ids of a batch, int64 [B], and as many errors; got {ids.dtype} of shape "
                f"{tuple(ids.shape)} and errors of shape {tuple(errors.shape)}."
            )
        highest = kernels.set_priorities(self._tree, self._leaves(known), found, self.priority_alpha)
        if highest < 0:
            raise HurtleError("A TD error is not finite: it cannot be a priority.")
        self._highest = max(self._highest, highest)

    def _leaves(self, ids: np.ndarray) -> np.ndarray:
        """Where these have their priorities; -1 for what has been overwritten."""
        age, rows, positions = self._ages(ids)
        return np.where(age < self.length, rows * self.length + positions % self.length, -1)

    def _ages(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each id: entries written to its row since, the row, and the position."""
        positions, rows = np.divmod(ids, self.num_rows)
        ages = self._written[rows] - 1 - positions
        if len(ids) and (ids.min() < 0 or ages.min() < 0):
            raise HurtleError("These ids do not come from a batch of this replay buffer.")
        return ages, rows, positions

    @property
    def _written(self) -> np.ndarray:
        """Entries written to each row so far; ids count them."""
        return self._heads

    def ages(self, ids: Tensor) -> np.ndarray:
        """The age of transitions: slots written to their row since."""
        return self._ages(ids.cpu().numpy())[0]

    @property
    def _description(self) -> dict[str, Any]:
        """What a saved buffer must have in common with this one."""
        return {
            "class": type(self).__name__,
            "num_rows": self.num_rows,
            "capacity": self.capacity,
            "observations": [list(self._obs_shape), str(self._obs_dtype)],
            "actions": [list(self._action_shape), str(self._action_dtype)],
            "masks": self._mask_size,
            "frame_stack": self.frames,
            "priorities": self._tree is not None,
        }

    def state_dict(self) -> dict[str, Any]:
        """All that is used. The tensors may share the buffer's memory, so save them before the next `add`."""
        used = int(self._heads.max()) + 1
        rings = {name: ring if used >= self.length else ring[:, :used].copy() for name, ring in self._memory.items()}
        return {
            "description": self._description,
            "rings": {name: torch.from_numpy(ring) for name, ring in rings.items()},
            "heads": torch.from_numpy(self._heads.copy()),
            "pending": torch.from_numpy(self._pending.copy()),
            "seed": int(self._seed),
            "drawn": self._drawn,
            "highest": self._highest,
            "tree": None if self._tree is None else torch.from_numpy(self._tree),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with what was saved.

        Raises:
            HurtleError: It was saved with other settings.
        """
        for name, own in self._description.items():
            found = saved.get("description", {}).get(name)
            if found != own:
                raise HurtleError(
                    f"The saved replay buffer has {name}={found}, this one {name}={own}: use the settings that it was saved "
                    "with, or start with an empty one."
                )
        self._rings["flags"][:] = kernels.GAP
        for name, ring in saved["rings"].items():
            self._memory[name][:, : ring.shape[1]] = ring.numpy()
        self._heads[:], self._pending[:] = saved["heads"].numpy(), saved["pending"].numpy()
        self._head_slots[:] = self._heads % self.length
        self._seed, self._drawn, self._highest = np.uint64(saved["seed"]), saved["drawn"], saved["highest"]
        if self._tree is not None:
            self._tree[:] = saved["tree"].numpy()

    def __repr__(self) -> str:
        where = "" if self.storage.folder is None else f" in {self.storage.folder}"
        return f"{type(self).__name__}({len(self):,} of {self.capacity:,} slots, {gib(self.nbytes)}{where})"


@dataclass(frozen=True)
class _Words:
    """How an item is copied: as so many machine words."""

    count: int
    dtype: Any

    @classmethod
    def of(cls, item: Tensor) -> _Words:
        return cls._of_size(item.numel() * item.element_size())

    @classmethod
    def _of_size(cls, size: int) -> _Words:
        width = next(width for width in (8, 4, 2, 1) if size % width == 0)
        return cls(size // width, np.dtype(f"u{width}"))

    def split(self, parts: int) -> _Words:
        """One of so many equal parts."""
        return self._of_size(self.count * self.dtype.itemsize // parts)

    def join(self, parts: int) -> _Words:
        """So many of them."""
        return _Words(self.count * parts, self.dtype)

    def view(self, tensor: Tensor, lead: tuple[int, ...]) -> np.ndarray:
        """A tensor [*lead, …] as words, [*lead, count]."""
        bytes_ = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return bytes_.view(self.dtype).reshape(*lead, self.count)


@dataclass(frozen=True)
class _Record:
    """What a slot has besides its observation, side by side: drawing one then waits for memory once. Offsets in bytes."""

    actions: _Words
    mask_size: int
    rewards_at: int
    size: int

    @classmethod
    def of(cls, actions: _Words, mask_size: int) -> _Record:
        rewards_at = -(-actions.count * actions.dtype.itemsize // 4) * 4
        return cls(actions, mask_size, rewards_at, -(-(rewards_at + 4 + mask_size + 1) // 8) * 8)

    def views(self, steps: np.ndarray) -> dict[str, np.ndarray]:
        """The fields of records `[R, L, size]`, in the order in which kernels take them."""
        masks_at = self.rewards_at + 4
        rewards = steps[..., self.rewards_at : masks_at].view(np.float32)[..., 0]
        actions = steps[..., : self.actions.count * self.actions.dtype.itemsize].view(self.actions.dtype)
        masks = steps[..., masks_at : masks_at + self.mask_size].view(np.bool_)
        return {"actions": actions, "masks": masks, "rewards": rewards, "flags": steps[..., masks_at + self.mask_size]}


def _length_of(capacity: int, num_rows: int, n_step: int, frame_stack: int) -> int:
    """Slots of each row."""
    for name, value in (("capacity", capacity), ("n_step", n_step), ("frame_stack", frame_stack)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise HurtleError(f"{name} must be an int of at least 1, got {value!r}.")
    least = n_step + frame_stack + 1
    if capacity // num_rows < least:
        raise HurtleError(
            f"capacity={capacity} leaves {capacity // num_rows} slots for each of {num_rows} rows, and n_step={n_step} with "
            f"frame_stack={frame_stack} needs {least}: use a capacity of at least {least * num_rows}."
        )
    return capacity // num_rows
