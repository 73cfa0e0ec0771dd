"""`AgentRows`: the arrays that a multi-agent env writes into, one row per agent; and the order of the agents."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np

Agent = Hashable


@dataclass(eq=False)
class AgentRows:
    """The arrays that one env writes into, one row per agent; they may be views of a larger batch."""

    memory: np.ndarray
    """uint8 [agents, nbytes]: the observations as records of the env's `layout`."""
    rewards: np.ndarray
    """float64 [agents]"""
    terminated: np.ndarray
    """bool [agents]"""
    truncated: np.ndarray
    """bool [agents]"""
    agent_mask: np.ndarray
    """bool [agents]: which agents are present and act on this observation."""
    action_mask: np.ndarray | None = None
    """bool [agents, n]: legal actions; None if the env has no masks."""

    @classmethod
    def zeros(cls, memory: np.ndarray, mask_size: int | None = None) -> AgentRows:
        """Rows that store observations in `memory` (from `layout.memory(agents)`); all other arrays are new and zero."""
        count = len(memory)
        terminated, truncated, agent_mask = np.zeros((3, count), np.bool_)
        action_mask = None if mask_size is None else np.zeros((count, mask_size), np.bool_)
        return cls(memory, np.zeros(count), terminated, truncated, agent_mask, action_mask)


def natural_order(agents: Iterable[Agent]) -> list[Agent]:
    """Sort agents by name, with numbers in names compared by value.

    Example:
        >>> natural_order(["agent_10", "agent_2", "adversary"])
        ['adversary', 'agent_2', 'agent_10']
    """
    return sorted(agents, key=_natural_key)


def _natural_key(agent: Agent) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", str(agent))
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]
