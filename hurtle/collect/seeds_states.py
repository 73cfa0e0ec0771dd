"""What a collector of many seeds saves: the state of each seed, as a collector of its own would save it, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hurtle.vector.states_of_rows import joined_states, state_of_envs


def states_of_seeds(whole: Mapping[str, Any], seeds: int, envs: int, rows: int) -> list[dict[str, Any]]:
    """The state of each seed.

    Args:
        whole: What the collector's `state_dict` returned; with its envs or without.
        seeds: How many.
        envs: Envs of each.
        rows: Envs times agents of each.
    """
    found = []
    for k in range(seeds):
        own = slice(k * rows, (k + 1) * rows)
        part = {"actor": {"steps": whole["actor"]["steps"][own].clone(), "state": []}, "steps": whole["steps"]}
        if "envs" in whole:
            part["envs"] = state_of_envs(whole["envs"], k * envs, envs)
            part |= {name: whole[name][own].copy() for name in ("starts", "resetting")}
        found.append(part)
    return found


def state_of_all(states: Sequence[Mapping[str, Any]], envs: int) -> dict[str, Any]:
    """The inverse of `states_of_seeds`; also of the states of single runs."""
    whole: dict[str, Any] = {
        "actor": {"steps": torch.cat([state["actor"]["steps"] for state in states]), "state": []},
        "steps": max(int(state["steps"]) for state in states),
        "num_envs": envs,  # so that new episodes have the seeds that they would have alone
    }
    if all("envs" in state for state in states):
        whole["envs"] = joined_states([state["envs"] for state in states])
        whole |= {name: np.concatenate([state[name] for state in states]) for name in ("starts", "resetting")}
    return whole
