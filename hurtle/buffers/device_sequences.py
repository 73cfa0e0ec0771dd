"""`DeviceSequences`: replay of whole sequences in a device's memory, whose sampling is launches only; see `SequenceReplay`.

rollout → `add` → a ring of rollouts, and the memory's state before each → `sample_sequences` → `Sequences`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hurtle.buffers.device_replay import draw_by_priority, new_priorities
from hurtle.buffers.rollout import Rollout, gathered
from hurtle.buffers.sequences import Sequences
from hurtle.errors import HurtleError

FIELDS = Sequences._fields[: Sequences._fields.index("masks") + 1]
"""Of `Sequences`, those that rollouts have too."""


class DeviceSequences:
    """The last rollouts of all rows, `[rollouts, steps, rows, …]`.

    A sequence begins where a rollout began, and may cross the ends of episodes. The final observation of a truncated episode is
    not kept: nothing is known of what follows such a step.

    Args:
        like: A rollout that gives shapes, dtypes, the device and the memory's state.
        capacity: Steps in all.
        sequence_length: Steps of a sequence.
        priority_alpha: Exponent of priorities; 0 draws uniformly.

    Raises:
        HurtleError: The capacity is too small.

    Example:
        >>> import hurtle
        >>> from hurtle.collect import NativeCollector
        >>> from hurtle.policies.policy_config import PolicyConfig
        >>> collector = NativeCollector(hurtle.make_vec("cartpole", num_envs=4), PolicyConfig(recurrent="gru"))
        >>> rollout = collector.new_rollout(num_steps=8)
        >>> replay = DeviceSequences(rollout, capacity=1000, sequence_length=16)
        >>> for _ in range(3):
        ...     episodes = collector.collect(rollout)
        ...     replay.add(rollout)
        >>> batch = replay.sample_sequences(32)
        >>> batch.obs.shape, replay.num_sequences
        (torch.Size([16, 32, 4]), 8)
    """

    def __init__(self, like: Rollout, capacity: int, sequence_length: int, priority_alpha: float = 0.0):
        self.num_rows, self.num_steps, self.device = like.num_rows, like.num_steps, like.device
        self.sequence_length, self.priority_alpha = sequence_length, priority_alpha
        self.length = capacity // (self.num_rows * self.num_steps)  # rollouts
        self.reach = -(-sequence_length // self.num_steps)  # rollouts that a sequence touches
        if self.length <= self.reach:
            least = (self.reach + 1) * self.num_rows * self.num_steps
            raise HurtleError(
                f"capacity={capacity} is too small for sequences of {sequence_length} steps of {self.num_rows} rows: use at "
                f"least {least}."
            )
        given = {name: getattr(like, name) for name in FIELDS if getattr(like, name) is not None}
        self.rings = {name: field.new_zeros((self.length, *field.shape)) for name, field in given.items()}
        self.states = [part.new_zeros((self.length, *part.shape)) for part in like.initial_state]
        self.priorities = torch.zeros((self.length, self.num_rows), device=self.device)  # 0: cannot be drawn
        self.highest = torch.ones((), device=self.device)
        self.written = 0  # rollouts
        self._steps = torch.arange(sequence_length, device=self.device).unsqueeze(1)

    @property
    def capacity(self) -> int:
        """Steps in all."""
        return self.length * self.num_steps * self.num_rows

    @property
    def num_sequences(self) -> int:
        """Sequences that can be drawn."""
        return max(0, min(self.written, self.length) - self.reach + 1) * self.num_rows

    def __len__(self) -> int:
        """Steps in use."""
        return min(self.written, self.length) * self.num_steps * self.num_rows

    @torch.no_grad()
    def add(self, rollout: Rollout) -> None:
        """Append a rollout; the oldest one makes room. Does not synchronize."""
        if rollout.columns is not None or not rollout.all_valid:
            raise HurtleError("Sequences on a device need envs in step whose agents are always present: use device='cpu'.")
        if (rollout.num_rows, rollout.num_steps, rollout.device.type) != (self.num_rows, self.num_steps, self.device.type):
            raise HurtleError(
                f"The rollout has {rollout.num_rows} rows and {rollout.num_steps} steps on {rollout.device}, the buffer "
                f"{self.num_rows} and {self.num_steps} on {self.device}."
            )
        at, rings = self.written % self.length, self.rings
        if self.written:
            last = (at - 1) % self.length, -1
            rings["truncated"][last] |= rollout.starts[0] & ~rings["terminated"][last]  # also where it was abandoned
        for name, ring in rings.items():
            ring[at].copy_(getattr(rollout, name))
        for kept, part in zip(self.states, rollout.initial_state, strict=True):
            kept[at].copy_(part)
        self.priorities[at] = 0.0
        self.written += 1
        if self.written >= self.reach:
            self.priorities[(self.written - self.reach) % self.length] = self.highest

    @torch.no_grad()
    def sample_sequences(self, batch_size: int, beta: float | Tensor = 1.0) -> Sequences:
        """Draw sequences, with replacement. Launches only, once there is one.

        Args:
            batch_size: How many.
            beta: Exponent of the importance weights, if they are drawn by priority.
        """
        found, weights = draw_by_priority(self.priorities.view(1, -1), batch_size, beta)
        ids, weights = found.squeeze(0), weights.squeeze(0)
        first, row = ids // self.num_rows * self.num_steps, ids % self.num_rows
        steps = (first + self._steps) % (self.length * self.num_steps)
        where = steps * self.num_rows + row
        parts: dict[str, Any] = {name: gathered(ring.flatten(0, 2), where) for name, ring in self.rings.items()}
        state = tuple(part.flatten(0, 1)[ids] for part in self.states)
        return Sequences(masks=parts.pop("masks", None), **parts, state=state, weights=weights, ids=ids)

    @torch.no_grad()
    def update_priorities(self, ids: Tensor, errors: Tensor) -> None:
        """Give sequences the priority (|error| + 1e-6) ^ alpha. Errors that are not finite change nothing."""
        new = new_priorities(self.priorities.view(-1), ids, errors, self.priority_alpha)
        self.highest.copy_(torch.maximum(self.highest, new.amax()))

    def ages(self, ids: Tensor) -> Tensor:
        """The age of sequences: steps between their beginnings and that of the newest rollout."""
        return (self.written - 1 - ids // self.num_rows) % self.length * self.num_steps

    def state_dict(self) -> dict[str, Any]:
        """All that is used. The tensors share the buffer's memory, so save them before the next `add`."""
        used = min(self.written, self.length)
        return {
            "sequences": (self.length, self.sequence_length, self.written),
            "rings": {name: ring[:used] for name, ring in self.rings.items()},
            "states": [part[:used] for part in self.states],
            "priorities": self.priorities,
            "highest": self.highest,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with what was saved.

        Raises:
            HurtleError: It was saved with other settings, or is a buffer of the CPU.
        """
        *sizes, written = saved.get("sequences", (0, 0, 0))
        fits = sizes == [self.length, self.sequence_length] and saved["rings"].keys() == self.rings.keys()
        if not fits or any(saved["rings"][name].shape[1:] != ring.shape[1:] for name, ring in self.rings.items()):
            raise HurtleError(
                "The saved one has another size or layout: continue with the settings that it was saved with, on the same kind "
                "of device, to use it."
            )
        for name, ring in self.rings.items():
            ring[: len(saved["rings"][name])].copy_(saved["rings"][name])
        for part, kept in zip(self.states, saved["states"], strict=True):
            part[: len(kept)].copy_(kept)
        for name in ("priorities", "highest"):
            getattr(self, name).copy_(saved[name])
        self.written = written
