"""What learners that train together tell each other besides gradients: commands of the first, steps, episodes, states.

rank 0: command → all collect → `Gathered` → all learn. Rank 0 alone decides what comes next; the others follow (follower.py).
Knows neither how processes are started nor how updates are computed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hurtle.contracts import Episodes
from hurtle.kernels.ranks import Ranks
from hurtle.runners.assembly import Parts
from hurtle.tracking.checkpoints import from_bytes, to_bytes

UPDATE, SAVE, END = 0.0, 1.0, 2.0
"""Commands: take part in an update; send your state; all is done."""
STOPS = ("", "Ctrl-C", "SIGTERM")
"""Why a rank asks to stop, by number."""


@dataclass(frozen=True)
class Gathered:
    """What all ranks have collected for an update.

    Attributes:
        steps: Steps that count.
        episodes: Those that ended; only on rank 0.
        stopped_by: Why a rank asks all to stop, or an empty string.
        is_whole: Whether no rank was interrupted; if not, nobody learns.
    """

    steps: int
    episodes: Episodes
    stopped_by: str
    is_whole: bool


def start_together(ranks: Ranks, parts: Parts) -> None:
    """Begin with the weights and statistics of rank 0."""
    for tensor in (*parts.policy.parameters(), *parts.policy.buffers()):
        tensor.data.copy_(ranks.broadcast_(tensor.detach().clone().contiguous()))


def tell(ranks: Ranks, command: float, number: float = 0.0) -> None:
    """Rank 0: tell the others what comes next, for an update how much of the run is done."""
    ranks.broadcast_(torch.tensor([command, number], dtype=torch.float64))


def listen(ranks: Ranks) -> tuple[float, float]:
    """The others: wait for the next command."""
    command, number = ranks.broadcast_(torch.zeros(2, dtype=torch.float64)).tolist()
    return command, number


def gather(ranks: Ranks, episodes: Episodes | None, steps: int, stopped_by: str = "") -> Gathered:
    """After collecting, on all ranks: what all have collected; episodes are None if this rank was interrupted."""
    message = b"" if episodes is None or ranks.leads else _packed(episodes)
    own = [0 if episodes is None else steps, episodes is None, STOPS.index(stopped_by), len(message)]
    every = ranks.rows(torch.tensor(own, dtype=torch.float64)).tolist()
    found = [episodes or Episodes()]
    for rank, (*_, size) in enumerate(every):
        if size and ranks.leads:
            found.append(_unpacked(ranks.receive(rank)))
        elif size and rank == ranks.rank:
            ranks.send(message)
    reasons = [STOPS[int(reason)] for _, _, reason, _ in every if reason]
    total, interrupted = sum(row[0] for row in every), any(row[1] for row in every)
    return Gathered(int(total), interleaved(found), next(iter(reasons), ""), not interrupted)


def interleaved(parts: Sequence[Episodes]) -> Episodes:
    """The episodes of all ranks, about in the order in which they ended: the newest 100, which are shown, are of all ranks."""

    def merged(arrays: Sequence[np.ndarray]) -> np.ndarray:
        places = [(np.arange(len(array)) + 0.5) / max(1, len(array)) for array in arrays]
        return np.concatenate(arrays)[np.argsort(np.concatenate(places), kind="stable")]

    found, parts = Episodes.join(parts), [part for part in parts if part.count]
    if len(parts) < 2:
        return found
    metrics = {name: merged([part.metrics[name] for part in parts if name in part.metrics]) for name in found.metrics}
    returns, lengths = (merged([getattr(part, name) for part in parts]) for name in ("returns", "lengths"))
    return replace(found, returns=returns, lengths=lengths, metrics=metrics)


def own_state(parts: Parts) -> dict[str, Any]:
    """What a rank has of its own, for a checkpoint."""
    learner = parts.learner.state_dict()
    device = parts.device
    return {
        "learner": {name: learner[name] for name in parts.learner.rank_state if name in learner},
        "collector": parts.collector.state_dict(),
        "torch_rng": torch.get_rng_state(),
        "gpu_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def send_state(ranks: Ranks, parts: Parts) -> None:
    """The others: answer SAVE with the episodes that a device reports late, and this rank's own state."""
    ranks.send(_packed(parts.collector.pending(wait=True)))
    parts.learner.pending(wait=True)
    ranks.send(to_bytes(own_state(parts)))


def receive_states(ranks: Ranks) -> tuple[list[dict[str, Any]], Episodes]:
    """Rank 0: ask for the others' states; returns them, and late episodes."""
    tell(ranks, SAVE)
    states, episodes = [], []
    for rank in range(1, ranks.size):
        episodes.append(_unpacked(ranks.receive(rank)))
        states.append(from_bytes(ranks.receive(rank)))
    return states, Episodes.join(episodes)


def tell_end(ranks: Ranks, result: dict[str, Any]) -> None:
    """Rank 0: all is done; tell the others how it ended."""
    message = json.dumps(result).encode()
    tell(ranks, END, len(message))
    ranks.broadcast_(torch.from_numpy(np.frombuffer(message, np.uint8).copy()))


def hear_end(ranks: Ranks, size: float) -> dict[str, Any]:
    """The others: how it ended."""
    content = ranks.broadcast_(torch.zeros(int(size), dtype=torch.uint8))
    return json.loads(content.numpy().tobytes())


def _packed(episodes: Episodes) -> bytes:
    """A line of JSON, then all numbers; nothing if there are none."""
    if not episodes.count:
        return b""
    head = {
        "sizes": [len(episodes.returns), len(episodes.lengths), *map(len, episodes.metrics.values())],
        "names": list(episodes.metrics),
        "count": int(episodes.count),
        "best_return": float(episodes.best_return),
        "best_length": float(episodes.best_length),
    }
    numbers = [np.asarray(part, np.float64) for part in (episodes.returns, episodes.lengths, *episodes.metrics.values())]
    return json.dumps(head).encode() + b"\n" + np.concatenate(numbers).tobytes()


def _unpacked(message: bytes) -> Episodes:
    if not message:
        return Episodes()
    line, _, content = message.partition(b"\n")
    head = json.loads(line)
    edges = np.cumsum(head["sizes"])[:-1]
    returns, lengths, *metrics = np.split(np.frombuffer(content, np.float64), edges)
    named = dict(zip(head["names"], metrics, strict=True))
    best = head["best_return"] if not math.isnan(head["best_return"]) else -math.inf
    return Episodes(returns, lengths, named, head["count"], best, head["best_length"])
