"""`Replay`: the last steps of every row, from which n-step transitions are drawn, uniformly or by priority. On the CPU.

rollout → `add` → rings → `sample` → `Transitions`. Each observation is stored once, in its own dtype: the next one is in the
next slot. Knows nothing of policies or losses. sequences.py draws whole sequences instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hurtle.buffers.rollout import Rollout
from hurtle.buffers.storage import Storage, gib
from hurtle.errors import HurtleError
from hurtle.kernels import replay as kernels
from hurtle.kernels.sum_tree import new_tree
from hurtle.native.rng import stream_state

REPLAY_STREAM = 11
"""Of the seed: what is drawn must not depend on what else is random."""


class Transitions(NamedTuple):
    """A batch of n-step transitions. The tensors are overwritten by the next `sample` of the same size."""

    obs: Tensor
    """[B, …], as the env returned them."""
    actions: Tensor
    """[B, …], what the policy chose."""
    rewards: Tensor
    """Discounted sums of up to n rewards. [B]"""
    next_obs: Tensor
    """What followed the last of these steps; the episode's last observation where it was truncated. [B, …]"""
    discounts: Tensor
    """Factors of V(next_obs): γ to the number of steps, 0 after a termination. [B]"""
    masks: Tensor | None
    """Legal actions, bool [B, A]; None if the envs report none."""
    next_masks: Tensor | None
    """The same for `next_obs`."""
    weights: Tensor
    """Importance weights, at most 1; all 1 without priorities. [B]"""
    slots: Tensor
    """Where they are, for `update_priorities`. int64 [B]"""


class Replay:
    """A ring of slots for each row; a slot is an observation and the step taken there.

    Two kinds of slots have no step. After the last step of a truncated episode there is one with its final observation, so
    that what follows a step is always in the next slot. With stacked frames, slots hold one frame each, and an episode begins
    with those that its first observation shows besides its newest. Steps of absent agents, and resets that take a step, are not
    stored. The newest step can be drawn at once, since the slot after it holds the next observation, unless agents come and
    go or actions have masks: then it waits for the next step.

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
        self.n_step, self.gamma, self.frames = n_step, gamma, frame_stack
        self._check(like)
        self._obs_shape, self._action_shape = tuple(like.obs.shape[2:]), tuple(like.actions.shape[2:])
        self._obs_dtype, self._action_dtype = like.obs.dtype, like.actions.dtype
        self._mask_size = 0 if like.masks is None else like.masks.shape[-1]
        obs, actions = (_Words.of(part) for part in (like.obs[0, 0], like.actions[0, 0]))
        self._obs_words, self._action_words = obs.split(frame_stack), actions
        lead = (self.num_rows, self.length)
        layout: dict[str, tuple[tuple[int, ...], Any]] = {
            "obs": ((*lead, self._obs_words.count), self._obs_words.dtype),
            "actions": ((*lead, actions.count), actions.dtype),
            "masks": ((*lead, self._mask_size), np.bool_),
            "rewards": (lead, np.float32),
            "flags": (lead, np.uint8),
        }
        self.nbytes = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in layout.values())
        self.storage = Storage(self.nbytes, folder)
        self._rings = {name: self.storage.zeros(shape, dtype) for name, (shape, dtype) in layout.items()}
        self._rings["flags"][:] = kernels.GAP
        self._heads = np.zeros(self.num_rows, np.int64)
        self._pending = np.zeros(self.num_rows, np.bool_)
        self._seed, self._drawn = np.uint64(stream_state(seed, REPLAY_STREAM)), 0
        self._checked_stack = frame_stack == 1
        self.priority_alpha = priority_alpha or 0.0
        if self.priority_alpha < 0:
            raise HurtleError(f"priority_alpha must be at least 0, got {priority_alpha}.")
        self._tree = new_tree(self._num_leaves) if self.priority_alpha else None
        self._highest = 1.0
        self._outs: dict[int, Any] = {}

    @property
    def _num_leaves(self) -> int:
        """Things that have a priority."""
        return self.num_rows * self.length

    def _check(self, like: Rollout) -> None:
        if not 0 <= self.gamma <= 1:
            raise HurtleError(f"gamma must be between 0 and 1, got {self.gamma}.")
        shape = tuple(like.obs.shape[2:])
        if self.frames > 1 and (not shape or shape[0] != self.frames):
            raise HurtleError(f"frame_stack={self.frames} needs observations of so many frames; theirs have the shape {shape}.")

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
        before, firsts, rings = self._heads.copy(), np.empty(columns, np.int64), self._rings
        rows = np.arange(columns) if rows is None else np.ascontiguousarray(rows, np.int64)
        kernels.push(
            *(host[name] for name in ("obs", "last_obs", "finals", "final_of", "actions", "masks", "rewards", "terminated")),
            host["truncated"], host["starts"], host["valid"], rows, rollout.all_valid and not self._mask_size,
            rings["obs"], rings["actions"], rings["masks"], rings["rewards"], rings["flags"], self._heads, self._pending, firsts,
        )  # fmt: skip
        self._added(rollout, before, rows, firsts)

    def _added(self, rollout: Rollout, before: np.ndarray, rows: np.ndarray, firsts: np.ndarray) -> None:
        """Keep the books of what can be drawn.

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
        """The fields of a rollout as arrays of words."""
        expected = (self._obs_shape, self._action_shape, self._obs_dtype, self._action_dtype, self._mask_size)
        masks = 0 if rollout.masks is None else rollout.masks.shape[-1]
        found = (tuple(rollout.obs.shape[2:]), tuple(rollout.actions.shape[2:]), rollout.obs.dtype, rollout.actions.dtype, masks)
        if found != expected:
            names = ("observations", "actions", "the observations' dtype", "the actions' dtype", "the size of masks")
            what, own, given = next(trio for trio in zip(names, expected, found, strict=True) if trio[1] != trio[2])
            raise HurtleError(f"The rollout does not fit the replay buffer: {what}: {given}, expected {own}.")
        lead, steps = (rollout.num_steps, rollout.num_rows), rollout.finals.steps.cpu().numpy()
        used = steps >= 0
        final_of = np.full(lead, -1, np.int64)
        final_of[steps[used], rollout.finals.rows.cpu().numpy()[used]] = used.nonzero()[0]
        whole = self._obs_words.join(self.frames)
        flags = {name: getattr(rollout, name).cpu().numpy() for name in ("terminated", "truncated", "starts", "valid")}
        return flags | {
            "obs": whole.view(rollout.obs, lead),
            "last_obs": whole.view(rollout.last_obs, lead[1:]),
            "finals": whole.view(rollout.finals.obs, (len(steps),)),
            "final_of": final_of,
            "actions": self._action_words.view(rollout.actions, lead),
            "masks": np.zeros((*lead, 0), np.bool_) if rollout.masks is None else rollout.masks.cpu().numpy(),
            "rewards": rollout.rewards.cpu().numpy(),
        }

    def _check_stack(self, host: dict[str, np.ndarray]) -> None:
        """Whether the first rollout's observations are stacks; once, since it reads all of it."""
        if self._checked_stack or len(host["obs"]) < 2:
            return
        frame, obs = self._obs_words.count, host["obs"]
        goes_on = host["valid"][:-1] & host["valid"][1:] & ~host["starts"][1:]
        if (obs[:-1, :, frame:] != obs[1:, :, :-frame]).any(-1)[goes_on].any():
            raise HurtleError(
                f"frame_stack={self.frames}, but the observations are not stacks of frames whose last {self.frames - 1} are the "
                "first of the next one: use frame_stack=1."
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
        out = self._out(batch_size)
        rings, slots = self._rings, out.slots.numpy()
        if self._tree is None:
            drawn = kernels.draw(self._seed, self._drawn, self._heads, self._pending, rings["flags"], self.frames, slots)
        else:
            chances = np.empty(batch_size)
            drawn = kernels.draw_by_priority(self._seed, self._drawn, self._tree, slots, chances)
        if drawn < 0:
            raise HurtleError("The replay buffer has no transitions to sample from yet: add a rollout first.")
        self._drawn = int(drawn)
        if self._tree is not None:
            out.weights.copy_(importance(chances, beta))
        no_masks = np.zeros((batch_size, 0), np.bool_)
        whole = self._obs_words.join(self.frames)
        kernels.gather(
            slots, rings["obs"], rings["actions"], rings["masks"], rings["rewards"], rings["flags"], self._heads, self._pending,
            self.frames, self.n_step, np.float32(self.gamma), whole.view(out.obs, (batch_size,)),
            self._action_words.view(out.actions, (batch_size,)), out.rewards.numpy(), whole.view(out.next_obs, (batch_size,)),
            out.discounts.numpy(), *(no_masks if part is None else part.numpy() for part in (out.masks, out.next_masks)),
        )  # fmt: skip
        return out

    def _out(self, size: int) -> Transitions:
        if size < 1:
            raise HurtleError(f"batch_size must be at least 1, got {size}.")
        if size not in self._outs:

            def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
                return torch.zeros((size, *shape), dtype=dtype)

            masks = [zeros(self._mask_size, dtype=torch.bool) if self._mask_size else None for _ in range(2)]
            obs, next_obs = (zeros(*self._obs_shape, dtype=self._obs_dtype) for _ in range(2))
            actions = zeros(*self._action_shape, dtype=self._action_dtype)
            weights, slots = zeros() + 1, zeros(dtype=torch.int64)
            self._outs[size] = Transitions(obs, actions, zeros(), next_obs, zeros(), *masks, weights, slots)
        return self._outs[size]

    def update_priorities(self, slots: Tensor, errors: Tensor) -> None:
        """Give transitions the priority (|error| + 1e-6) ^ alpha; those overwritten since are left alone.

        Raises:
            HurtleError: An error is not finite.
        """
        if self._tree is None:
            return
        priorities = (errors.detach().abs().double().cpu() + 1e-6).pow(self.priority_alpha).numpy()
        if not np.isfinite(priorities).all():
            raise HurtleError("A TD error is not finite: it cannot be a priority.")
        self._highest = max(self._highest, float(priorities.max(initial=0.0)))
        kernels.set_priorities(self._tree, np.ascontiguousarray(slots.cpu().numpy(), np.int64), priorities)

    def ages(self, slots: Tensor) -> np.ndarray:
        """How many slots were written to a transition's row since it was."""
        row, slot = np.divmod(slots.cpu().numpy(), self.length)
        return (self._heads[row] - slot - 1) % self.length

    def state_dict(self) -> dict[str, Any]:
        """Everything, to be saved at once: the tensors are the buffer's own memory."""
        saved = {name: torch.from_numpy(ring) for name, ring in self._rings.items()}
        return {
            "rings": saved,
            "heads": torch.from_numpy(self._heads.copy()),
            "pending": torch.from_numpy(self._pending.copy()),
            "drawn": self._drawn,
            "highest": self._highest,
            "tree": None if self._tree is None else torch.from_numpy(self._tree),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with what was saved.

        Raises:
            HurtleError: It was saved with other settings.
        """
        for name, ring in saved["rings"].items():
            own = self._rings[name]
            if tuple(ring.shape) != own.shape or ring.numpy().dtype != own.dtype:
                raise HurtleError(
                    f"The saved replay buffer has other {name}, {tuple(ring.shape)}, than this one, {own.shape}: use its capacity, "
                    "num_envs and frame_stack, or leave it out."
                )
        if (saved["tree"] is None) != (self._tree is None):
            raise HurtleError("The saved replay buffer was sampled in another way: use its priority_alpha, or leave it out.")
        for name, ring in saved["rings"].items():
            self._rings[name][:] = ring.numpy()
        self._heads[:], self._pending[:] = saved["heads"].numpy(), saved["pending"].numpy()
        self._drawn, self._highest = saved["drawn"], saved["highest"]
        if self._tree is not None:
            self._tree[:] = saved["tree"].numpy()

    def __repr__(self) -> str:
        where = "" if self.storage.folder is None else f" in {self.storage.folder}"
        return f"{type(self).__name__}({len(self):,} of {self.capacity:,} slots, {gib(self.nbytes)}{where})"


def importance(chances: np.ndarray, beta: float) -> Tensor:
    """The importance weights of what was drawn with these probabilities; the largest is 1."""
    weights = chances**-beta
    return torch.from_numpy(weights / weights.max())


class _Words(NamedTuple):
    """How an item is copied: as so many machine words."""

    count: int
    dtype: Any

    @classmethod
    def of(cls, item: Tensor) -> _Words:
        size = item.numel() * item.element_size()
        return cls._of_size(size)

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
