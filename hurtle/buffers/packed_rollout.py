"""`Packing`: a rollout as one block of bytes, for its way to another process; fields that nobody filled are left out.

rollout whose fields lie in a block → `Contents` and bytes → views of these bytes in a rollout of the same shape. Knows nothing
of how they travel.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hurtle.buffers.rollout import Done, Finals, Rollout
from hurtle.errors import HurtleError

ALWAYS = (
    *("obs", "masks", "rewards", "terminated", "truncated", "starts", "inputs", "actions", "log_probs", "values"),
    *("last_obs", "last_starts", "initial_state", "last_state"),
)
"""Fields that every collector fills."""
SOMETIMES = ((Done.BOOTSTRAP, ("final_values", "last_values")), (Done.ADVANTAGES, ("advantages", "returns")))
"""Fields that a collector has filled if it says so, in the order in which they are left out from the end."""
ALIGNMENT = 64


class Contents(NamedTuple):
    """What the bytes are of, apart from them."""

    size: int
    """Bytes of the rollout's own fields; those of `finals` follow."""
    num_finals: int
    version: int
    done: int
    all_valid: bool
    columns: np.ndarray | None
    ids: tuple[str, ...]


class _Place(NamedTuple):
    """Where an array lies in a block."""

    name: str
    part: int  # of a tuple of tensors
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def view(self, block: np.ndarray) -> np.ndarray:
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        return block[self.offset : self.offset + size].view(self.dtype).reshape(self.shape)


class Packing:
    """Where the fields of rollouts of one shape lie in a block of bytes.

    Args:
        rollout: One of them.

    Example:
        >>> from gymnasium import spaces
        >>> from hurtle.policies.build import PolicyConfig, build_policy
        >>> policy = build_policy(PolicyConfig(hidden_sizes=(4,)), spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
        >>> sent, received = (Rollout(policy, num_steps=5, num_rows=2) for _ in range(2))
        >>> packing = Packing(sent)
        >>> block = packing.move_into_block(sent)
        >>> sent.rewards[4, 1] = 7.0
        >>> packing.lend(received, *packing.packed(sent, block))
        >>> received.rewards[4].tolist()
        [0.0, 7.0]
    """

    def __init__(self, rollout: Rollout):
        self._places: list[_Place] = []
        self._sizes = {Done.NOTHING: 0}
        end = self._lay_out(rollout, ALWAYS, 0)
        self._sizes[Done.NOTHING] = end
        for done, names in SOMETIMES:
            end = self._lay_out(rollout, names, end)
            self._sizes[done] = end
        self.size = self._lay_out(rollout, ("valid",), end)
        self._own = {name: getattr(rollout, name) for name in {place.name for place in self._places}}
        self._own["finals"] = rollout.finals

    def _lay_out(self, rollout: Rollout, names: tuple[str, ...], offset: int) -> int:
        """Give each of these fields a place from `offset` on; returns the end of the last one."""
        for name in names:
            field = getattr(rollout, name)
            if field is None or (name == "inputs" and field is rollout.obs):
                continue
            for number, part in enumerate(field if isinstance(field, tuple) else (field,)):
                dtype = part[:0].cpu().numpy().dtype
                self._places.append(_Place(name, number, offset, tuple(part.shape), dtype))
                offset += _aligned(part.numel() * dtype.itemsize)
        return offset

    # Where it is collected.

    def move_into_block(self, rollout: Rollout) -> np.ndarray:
        """A block; on the CPU the rollout's fields become views of it, so that packing copies nothing."""
        block = _aligned_bytes(self.size)
        if rollout.device.type == "cpu":
            self._write(rollout, block)
            self._set_views(rollout, block, self._places)
        return block

    def packed(self, rollout: Rollout, block: np.ndarray) -> tuple[Contents, np.ndarray]:
        """What to send of a filled rollout: a part of the block, which the next rollout overwrites, or a copy with `finals`."""
        if Done.REWARDS in rollout.done or Done.STATISTICS in rollout.done:
            raise HurtleError("A rollout whose rewards or statistics were processed on a device cannot be packed.")
        if rollout.device.type != "cpu":
            self._write(rollout, block)
        size = self.size if not rollout.all_valid else max(
            [self._sizes[Done.NOTHING], *(self._sizes[done] for done, _ in SOMETIMES if done in rollout.done)]
        )  # fmt: skip
        used = (rollout.finals.steps >= 0).nonzero()[:, 0]
        contents = Contents(
            size, len(used), rollout.version, rollout.done.value, rollout.all_valid, rollout.columns, rollout.ids
        )
        if not len(used):
            return contents, block[:size]
        steps, rows, obs, state = rollout.finals
        finals = [part[used].cpu().numpy() for part in (steps, rows, obs, *state)]
        sent = _aligned_bytes(size + sum(_aligned(part.nbytes) for part in finals))
        sent[:size] = block[:size]
        for place, part in zip(self._final_places(finals, size), finals, strict=True):
            place.view(sent)[...] = part
        return contents, sent

    def _write(self, rollout: Rollout, block: np.ndarray) -> None:
        for place in self._places:
            field = getattr(rollout, place.name)
            place.view(block)[...] = (field[place.part] if isinstance(field, tuple) else field).cpu().numpy()

    # Where it is learned from.

    def lend(self, rollout: Rollout, contents: Contents, received: np.ndarray) -> None:
        """Let the rollout's fields be views of received bytes, which may be read-only: `Rollout.join` copies them."""
        self.take_back(rollout)
        block = received if received.ctypes.data % ALIGNMENT == 0 else _aligned_copy(received)
        views = _as_writable(block)
        self._set_views(rollout, views, [place for place in self._places if place.offset < contents.size])
        rollout.version, rollout.done, rollout.all_valid = contents.version, Done(contents.done), contents.all_valid
        rollout.columns, rollout.ids, rollout.lender = contents.columns, contents.ids, block
        own: Finals = self._own["finals"]
        like = [part.numpy() for part in (own.steps, own.rows, own.obs)]
        states = [part.numpy() for part in rollout.initial_state]
        shapes = [(array.shape[1:], array.dtype) for array in (*like, *states)]
        finals = [np.empty((contents.num_finals, *shape), dtype) for shape, dtype in shapes] if contents.num_finals else []
        if finals:
            found = [torch.from_numpy(place.view(views)) for place in self._final_places(finals, contents.size)]
            rollout.finals = Finals(found[0], found[1], found[2], tuple(found[3:]))

    def take_back(self, rollout: Rollout) -> None:
        """Give the rollout its own memory back, and let go of what was lent."""
        for name, own in self._own.items():
            setattr(rollout, name, own)
        if "inputs" not in self._own:
            rollout.inputs = rollout.obs
        rollout.scaled_rewards, rollout.lender = rollout.rewards, None

    def _set_views(self, rollout: Rollout, block: np.ndarray, places: list[_Place]) -> None:
        found: dict[str, list[Tensor]] = {}
        for place in places:
            found.setdefault(place.name, []).append(torch.from_numpy(place.view(block)))
        for name, parts in found.items():
            setattr(rollout, name, tuple(parts) if isinstance(getattr(rollout, name), tuple) else parts[0])
        if "inputs" not in found:
            rollout.inputs = rollout.obs
        rollout.scaled_rewards = rollout.rewards

    @staticmethod
    def _final_places(finals: list[np.ndarray], offset: int) -> list[_Place]:
        edges = accumulate((_aligned(part.nbytes) for part in finals), initial=offset)
        numbered = enumerate(zip(finals, edges, strict=False))
        return [_Place("finals", k, edge, part.shape, part.dtype) for k, (part, edge) in numbered]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _aligned_bytes(size: int) -> np.ndarray:
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size]


def _aligned_copy(block: np.ndarray) -> np.ndarray:
    copied = _aligned_bytes(block.size)
    copied[:] = block
    return copied


def _as_writable(block: np.ndarray) -> np.ndarray:
    """The same memory without the read-only flag, of which torch warns; the caller keeps `block` alive, and nobody writes."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * block.size).from_address(block.ctypes.data))
