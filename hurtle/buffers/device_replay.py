"""`DeviceReplay`: a replay buffer in a device's memory, whose sampling is launches only, so that a CUDA graph can hold it.

rollout → `add` → rings of all rows in step → `sample` → `Transitions`. Runs on the CPU as well, where `Replay` is faster and
stores more. Knows nothing of policies or losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hurtle.buffers.replay import Transitions
from hurtle.buffers.rollout import Rollout, gathered
from hurtle.errors import HurtleError
from hurtle.kernels.triton import has_triton

FINALS_SHARE = 16
"""There is room for the final observations of one truncation in so many steps; those of more frequent ones are forgotten."""


class DeviceReplay:
    """The last steps of all rows, `[length, rows, …]`, and the final observations of truncated episodes in a ring of their own.

    A transition whose successor is not known (an agent was absent, a final observation was forgotten) is drawn with weight 0,
    since a graph cannot draw again. Stacks of frames are stored whole.

    Args:
        like: A rollout that gives shapes, dtypes and the device.
        capacity: Steps in all.
        n_step: Rewards that are summed before bootstrapping.
        gamma: Discount of future rewards.
        priority_alpha: Exponent of priorities; 0 draws uniformly.
        seed: Seed of uniform draws on a GPU; elsewhere, and by priority, torch's own generator draws.
        groups: Seeds that learn side by side, each from its own share of the rows, one after the other. Samples then have an
            axis of groups first.

    Attributes:
        fused: Whether a Triton kernel reads transitions; else torch does, one operation at a time.

    Raises:
        HurtleError: A setting is impossible, or rollouts come from a pool.

    Example:
        >>> from gymnasium import spaces
        >>> from hurtle.policies.build import PolicyConfig, build_policy
        >>> policy = build_policy(PolicyConfig(), spaces.Box(-1, 1, (4,)), spaces.Discrete(2))
        >>> replay = DeviceReplay(Rollout(policy, num_steps=8, num_rows=2), capacity=1000, n_step=3)
        >>> replay.add(Rollout(policy, num_steps=8, num_rows=2))
        >>> replay.sample(32).obs.shape, len(replay)
        (torch.Size([32, 4]), 16)
    """

    def __init__(
        self,
        like: Rollout,
        capacity: int,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        priority_alpha: float = 0.0,
        seed: int = 0,
        groups: int | None = None,
    ):
        self.num_rows, self.n_step, self.gamma, self.priority_alpha = like.num_rows, n_step, gamma, priority_alpha
        self.groups, self.group_rows = groups, self.num_rows // (groups or 1)
        if groups is not None and self.group_rows * groups != self.num_rows:
            raise HurtleError(f"{self.num_rows} rows cannot be shared evenly by {groups} seeds.")
        self.length = capacity // self.num_rows
        if self.length < like.num_steps + n_step + 1:
            least, given = (like.num_steps + n_step + 1) * self.group_rows, capacity // (groups or 1)
            raise HurtleError(f"capacity={given} is too small for rollouts of {like.num_steps} steps: use at least {least}.")
        self.device, lead = like.device, (self.length, self.num_rows)

        def ring(field: Tensor) -> Tensor:
            return torch.zeros((*lead, *field.shape[2:]), dtype=field.dtype, device=self.device)

        self.rings = {name: ring(getattr(like, name)) for name in ("obs", "actions", "rewards", "terminated", "truncated")}
        if like.masks is not None:
            self.rings["masks"] = ring(like.masks)
        self.rings["valid"], self.rings["final"] = ring(like.valid), ring(like.actions.new_zeros(1, 1, dtype=torch.int64))
        self.num_finals = capacity // FINALS_SHARE + like.num_steps * self.num_rows
        self.group_finals = capacity // (groups or 1) // FINALS_SHARE + like.num_steps * self.group_rows
        self.finals = torch.zeros((self.num_finals + 1, *like.obs.shape[2:]), dtype=like.obs.dtype, device=self.device)
        self.counts = torch.zeros(3, dtype=torch.int64, device=self.device)
        """Steps written to each row, final observations written, and those steps whose successor is known."""
        self.written = 0  # the former, on the host
        self.priorities = torch.zeros(self.length * self.num_rows if priority_alpha else 0, device=self.device)
        self.highest = torch.ones(groups or 1, device=self.device)  # of each group
        self.draws = torch.full((1,), seed, dtype=torch.int64, device=self.device)
        self.fused = self.device.type == "cuda" and has_triton() and like.masks is None

    @property
    def capacity(self) -> int:
        """Steps in all."""
        return self.length * self.num_rows

    def __len__(self) -> int:
        """Steps in use."""
        return min(self.written, self.length - 1) * self.num_rows

    @torch.no_grad()
    def add(self, rollout: Rollout) -> None:
        """Append the steps of a rollout; the oldest ones make room. Does not synchronize."""
        steps, rings = rollout.num_steps, self.rings
        if rollout.columns is not None:
            raise HurtleError("A replay buffer on a device takes rollouts of all envs in step, not those of a pool.")
        if (rollout.num_rows, rollout.device.type) != (self.num_rows, self.device.type):
            raise HurtleError(f"The rollout has {rollout.num_rows} rows on {rollout.device}, the buffer {self.num_rows}.")
        if self.written:
            last = (self.written - 1) % self.length
            going_on = ~(rings["terminated"][last] | rings["truncated"][last])
            rings["valid"][last] &= ~(going_on & rollout.starts[0])  # the episode was abandoned
        for first, count, into in self._parts(steps):
            part = slice(first, first + count)
            for name, ring in rings.items():
                if name != "final":
                    ring[into : into + count] = getattr(rollout, name)[part]
        self._add_finals(rollout)
        self.written += steps
        rings["obs"][self.written % self.length] = rollout.last_obs
        rings["valid"][self.written % self.length] = False
        knows_next = rollout.all_valid and rollout.masks is None  # of the newest step
        self.counts[0], self.counts[2] = self.written, self.written - (not knows_next)
        if self.priority_alpha:
            self._add_priorities(steps, knows_next)

    def _parts(self, steps: int) -> list[tuple[int, int, int]]:
        """The first step, number of steps and place of what is written in one piece."""
        at = self.written % self.length
        first = min(steps, self.length - at)
        return [(0, first, at)] + ([(first, steps - first, 0)] if first < steps else [])

    def _add_finals(self, rollout: Rollout) -> None:
        """Store final observations, and their numbers at the steps they belong to; unused slots go to the last place."""
        finals, steps = rollout.finals, rollout.num_steps
        numbers = torch.full((steps + 1, self.num_rows), -1, dtype=torch.int64, device=self.device)
        if len(finals.steps):
            used = finals.steps >= 0
            number = self.counts[1] + used.cumsum(0) - 1
            self.finals[torch.where(used, number % self.num_finals, self.num_finals)] = finals.obs
            numbers[torch.where(used, finals.steps, steps).long(), finals.rows.long()] = number
            self.counts[1] += used.sum()
        for first, count, into in self._parts(steps):
            self.rings["final"][into : into + count] = numbers[first : first + count]

    def _add_priorities(self, steps: int, knows_next: bool) -> None:
        """Give new steps the highest priority, the newest one only once its successor is known."""
        table = self.priorities.view(self.length, self.num_rows)
        table[self.written % self.length] = 0.0
        for back in range(1, min(steps + 1, self.written) + 1):
            at = (self.written - back) % self.length
            new = (self.highest.unsqueeze(1) * self.rings["valid"][at].view(-1, self.group_rows)).flatten()
            if back == 1 and not knows_next:
                table[at] = 0.0
            elif back <= steps:
                table[at] = new
            else:  # the last one of the rollout before, which may have waited
                table[at] = torch.where(table[at] > 0, table[at], new)

    @torch.no_grad()
    def sample(self, batch_size: int, beta: float | Tensor = 1.0) -> Transitions:
        """Draw transitions, with replacement. Launches only, once there is a rollout.

        Args:
            batch_size: How many; of each group, if there are any.
            beta: Exponent of the importance weights, if they are drawn by priority.
        """
        drawn = self._draw(batch_size, beta) if self.priority_alpha or not self.fused else None
        if not self.fused:
            assert drawn is not None
            found = self._read(*drawn)
        else:
            from hurtle.kernels.triton.replay import sample

            self.draws += 1
            given = None if drawn is None else (drawn[0], drawn[1])
            obs, actions, rewards, next_obs, discounts, known, ids = sample(
                self.counts, self.draws, given, self.rings, self.finals, self.n_step, self.gamma, batch_size, self.groups or 1
            )
            weights = known if drawn is None else known * drawn[2]
            found = Transitions(obs, actions, rewards, next_obs, discounts, None, None, weights, ids)
        if self.groups is None:
            return found
        parts: list[Any] = [part if part is None else part.unflatten(0, (self.groups, -1)) for part in found]
        return Transitions(*parts)

    def _read(self, slots: Tensor, rows: Tensor, weights: Tensor) -> Transitions:
        """What the Triton kernel computes, spelled out; with masks, which it does not know."""
        rings, length, head, usable = self.rings, self.length, self.counts[0], self.counts[2]
        batch_size = len(slots)
        total, factor = torch.zeros(batch_size, device=self.device), torch.ones(batch_size, device=self.device)
        going, last, known = torch.ones_like(slots, dtype=torch.bool), slots, torch.ones_like(slots, dtype=torch.bool)
        for k in range(self.n_step):
            at = slots + k
            place = at % length
            ends = rings["terminated"][place, rows] | rings["truncated"][place, rows]
            going = going & ((at < usable) | ((at < head) & ends)) if k else going
            total += torch.where(going, factor * rings["rewards"][place, rows], 0.0)
            factor = torch.where(going, factor * self.gamma, factor)
            known = known & (rings["valid"][place, rows] | ~going)
            last = torch.where(going, at, last)
            going = going & ~ends
        place, after = last % length, (last + 1) % length
        ended, cut = rings["terminated"][place, rows], rings["truncated"][place, rows] & ~rings["terminated"][place, rows]
        number = rings["final"][place, rows]
        known &= (
            ended
            | (cut & (number >= 0) & (number >= self.counts[1] - self.num_finals))
            | ~(ended | cut) & (rings["valid"][after, rows] | (last + 1 == head))
        )
        masks = next_masks = None
        if "masks" in rings:
            masks = rings["masks"][slots % length, rows]
            next_masks = rings["masks"][after, rows] | cut.unsqueeze(-1)
        obs = rings["obs"].flatten(0, 1)
        start, following = (slots % length) * self.num_rows + rows, torch.where(ended, place, after) * self.num_rows + rows
        next_obs = gathered(obs, following)
        shape = (-1, *(1,) * (next_obs.ndim - 1))
        final = gathered(self.finals, torch.where(cut, number % self.num_finals, self.num_finals))
        next_obs = torch.where(cut.view(shape), final, next_obs)
        actions = rings["actions"].flatten(0, 1)[start]
        return Transitions(
            gathered(obs, start), actions, total, next_obs, torch.where(ended, 0.0, factor), masks, next_masks, weights * known,
            start,
        )  # fmt: skip

    def _draw(self, batch_size: int, beta: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Steps, counted from the first one ever, their rows, and importance weights; one group after the other."""
        usable, groups, group_rows = self.counts[2], self.groups or 1, self.group_rows
        before = torch.arange(groups, device=self.device).unsqueeze(1) * group_rows  # rows of earlier groups
        if not self.priority_alpha:
            drawn = torch.rand(2, groups, batch_size, device=self.device, dtype=torch.float64)
            slots = usable - 1 - (drawn[0] * usable.clamp(max=self.length - 1)).long()
            rows = (before + (drawn[1] * group_rows).long()).flatten()
            return slots.flatten(), rows, torch.ones(len(rows), device=self.device)
        table = self.priorities.view(self.length, groups, group_rows).transpose(0, 1)
        found, weights = draw_by_priority(table.reshape(groups, -1), batch_size, beta)
        place, rows = found // group_rows, before + found % group_rows
        slots = usable - 1 - (usable - 1 - place) % self.length
        return slots.flatten(), rows.flatten(), weights.flatten()

    @torch.no_grad()
    def update_priorities(self, ids: Tensor, errors: Tensor) -> None:
        """Give transitions the priority (|error| + 1e-6) ^ alpha; both are as sampled, with an axis of groups if there are any.

        Errors that are not finite change nothing.
        """
        if self.priority_alpha:
            priorities = new_priorities(self.priorities, ids, errors, self.priority_alpha)
            self.highest.copy_(torch.maximum(self.highest, priorities.view(len(self.highest), -1).amax(1)))

    def ages(self, ids: Tensor) -> Tensor:
        """The age of transitions: steps written to their row since."""
        return (self.counts[0] - 1 - ids // self.num_rows) % self.length

    def state_dict(self) -> dict[str, Any]:
        """All that is used. The tensors share the buffer's memory, so save them before the next `add`."""
        used = self.written + 1
        return {
            "length": self.length,
            "rings": {name: ring if used >= self.length else ring[:used].clone() for name, ring in self.rings.items()},
            "finals": self.finals,
            "counts": self.counts,
            "priorities": self.priorities,
            "highest": self.highest,
            "draws": self.draws,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with what was saved.

        Raises:
            HurtleError: It was saved with other settings, or is a buffer of the CPU.
        """
        fits = saved.get("length") == self.length and saved["rings"].keys() == self.rings.keys()
        others = {"finals": self.finals, "priorities": self.priorities}
        fits = fits and all(saved["rings"][name].shape[1:] == ring.shape[1:] for name, ring in self.rings.items())
        if not fits or any(saved[name].shape != own.shape for name, own in others.items()):
            raise HurtleError(
                "The saved one has another size or layout: continue with the settings that it was saved with, on the same kind "
                "of device, to use it."
            )
        for name, ring in self.rings.items():
            ring[: len(saved["rings"][name])].copy_(saved["rings"][name])
        for name in ("finals", "counts", "priorities", "highest", "draws"):
            getattr(self, name).copy_(saved[name])
        self.written = int(self.counts[0])


def draw_by_priority(table: Tensor, count: int, beta: float | Tensor) -> tuple[Tensor, Tensor]:
    """Indices drawn by priority, with replacement, and importance weights. Launches only.

    Args:
        table: Priorities; 0 is never drawn. [N, size]
        count: Draws from each row.
        beta: Exponent of the weights.

    Returns:
        Indices and weights, [N, count] each; the largest weight of a row is 1.
    """
    sums = table.double().cumsum(1)
    drawn = torch.rand(len(table), count, device=table.device, dtype=torch.float64) * sums[:, -1:]
    found = torch.searchsorted(sums, drawn, right=True).clamp(max=sums.shape[1] - 1)
    weights = (table.gather(1, found) / sums[:, -1:]).clamp(min=1e-30).float() ** -beta
    return found, weights / weights.amax(1, keepdim=True)


def new_priorities(table: Tensor, ids: Tensor, errors: Tensor, alpha: float) -> Tensor:
    """Set priorities to (|error| + 1e-6) ^ alpha, in place, and return these; 0 where an error is not finite.

    Those that are 0, or whose error is not finite, stay as they are.
    """
    known, old = errors.isfinite(), table[ids]
    priorities = torch.where(known, (errors.abs() + 1e-6) ** alpha, 0.0)
    table[ids] = torch.where(known & (old > 0), priorities, old)
    return priorities
