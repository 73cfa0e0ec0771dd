"""The replay of seeds that learn side by side, saved and loaded seed by seed, and the memory that it takes.

`DeviceReplay` with groups → the state of one group, as a buffer of its own would save it → the buffer. One group at a time is
copied: all of them together may fill a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hurtle.buffers.device_replay import FINALS_SHARE, DeviceReplay
from hurtle.buffers.rollout import Rollout
from hurtle.errors import HurtleError


@torch.no_grad()
def state_of_group(replay: DeviceReplay, group: int) -> dict[str, Any]:
    """What a buffer with the rows of this group alone would save, on the CPU. See `DeviceReplay.state_dict`."""
    used, rows = min(replay.written + 1, replay.length), _rows(replay, group)
    rings = {name: ring[:used, rows].contiguous().cpu() for name, ring in replay.rings.items()}
    kept, rings["final"] = _renumbered(rings["final"], int(replay.counts[1]), replay.num_finals, replay.group_finals)
    finals = torch.zeros((replay.group_finals + 1, *replay.finals.shape[1:]), dtype=replay.finals.dtype)
    finals[: len(kept)] = replay.finals[(kept % replay.num_finals).to(replay.device)].cpu()
    counts = replay.counts.cpu().clone()
    counts[1] = len(kept)
    table = replay.priorities.view(replay.length, -1) if replay.priority_alpha else None
    return {
        "length": replay.length,
        "rings": rings,
        "finals": finals,
        "counts": counts,
        "priorities": torch.zeros(0) if table is None else table[:, rows].flatten().cpu(),
        "highest": replay.highest[group : group + 1].cpu().clone(),
        "draws": replay.draws.cpu().clone(),
    }


@torch.no_grad()
def load_group(replay: DeviceReplay, group: int, saved: dict[str, Any]) -> None:
    """Load the state of one group. Load all, one after the other: the buffer is used as the last one says.

    Raises:
        HurtleError: It was saved with other settings, or is a buffer of the CPU.
    """
    rows = _rows(replay, group)
    fits = saved.get("length") == replay.length and saved["rings"].keys() == replay.rings.keys()
    fits = fits and all(
        part.shape[1:] == replay.rings[name][:, rows].shape[1:] and len(part) <= replay.length
        for name, part in saved["rings"].items()
    )
    if not fits or bool(len(saved["priorities"])) != bool(replay.priority_alpha):
        raise HurtleError("The saved one has another size or layout: continue with the settings that it was saved with.")
    before = int(replay.counts[1]) if group else 0
    room = len(saved["finals"]) - 1
    kept, numbers = _renumbered(saved["rings"]["final"], int(saved["counts"][1]), room, room)
    for name, part in saved["rings"].items():
        moved = torch.where(numbers < 0, -1, numbers + before) if name == "final" else part
        replay.rings[name][: len(part), rows] = moved.to(replay.device)
    into = (before + torch.arange(len(kept))) % replay.num_finals
    replay.finals[into.to(replay.device)] = saved["finals"][kept % room].to(replay.device)
    replay.counts.copy_(saved["counts"])
    replay.counts[1] = before + len(kept)
    replay.written = int(saved["counts"][0])
    replay.draws.copy_(saved["draws"])
    replay.highest[group : group + 1].copy_(saved["highest"])
    if replay.priority_alpha:
        replay.priorities.view(replay.length, -1)[:, rows] = saved["priorities"].view(replay.length, -1).to(replay.device)


def forget(replay: DeviceReplay) -> None:
    """Begin with an empty buffer, whatever was loaded."""
    replay.written = 0
    replay.counts.zero_()
    replay.priorities.zero_()
    replay.highest.fill_(1.0)


def replay_bytes(like: Rollout, capacity: int) -> int:
    """The memory that a `DeviceReplay` takes for the rows of this rollout."""
    fields = [like.obs, like.actions, like.rewards, like.terminated, like.truncated, like.valid]
    fields += [] if like.masks is None else [like.masks]
    obs = _row_bytes(like.obs)
    step = sum(map(_row_bytes, fields)) + 8 + 4  # the number of a final observation, and a priority
    return capacity * step + (capacity // FINALS_SHARE + like.num_steps * like.num_rows + 1) * obs


def _renumbered(numbers: Tensor, written: int, room: int, most: int) -> tuple[Tensor, Tensor]:
    """The sorted numbers of the newest final observations that are still known; and where each step's is among them, or -1."""
    kept = numbers[(numbers >= 0) & (numbers >= written - room)].sort().values[-most:]
    if not len(kept):
        return kept, torch.full_like(numbers, -1)
    places = torch.searchsorted(kept, numbers).clamp(max=len(kept) - 1)
    return kept, torch.where(kept[places] == numbers, places, -1)


def _row_bytes(field: Tensor) -> int:
    return field[0, 0].numel() * field.element_size()


def _rows(replay: DeviceReplay, group: int) -> slice:
    return slice(group * replay.group_rows, (group + 1) * replay.group_rows)
