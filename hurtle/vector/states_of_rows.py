"""Saved states of a vector env, taken apart by envs and put together again: each of several runs saves its own envs.

`vec.state_dict()` → the state of some envs, as a vector of these alone would save it → the state of all. Knows the layout of
states of native, MuJoCo and Python vectors: a row for each env in all arrays and lists but those named here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

COMMON = ("first_seed", "sent", "played", "first_reset_due")
"""What is one for all envs."""
ABOUT = "about"
"""JSON in bytes, with the number of envs."""


def state_of_envs(state: Mapping[str, Any], first: int, count: int) -> dict[str, Any]:
    """The state of envs `first` … `first + count - 1`.

    Example:
        >>> import hurtle
        >>> with hurtle.make_vec("cartpole", 4) as vec, hurtle.make_vec("cartpole", 2) as two:
        ...     obs, _ = vec.reset(seed=7)
        ...     two.load_state_dict(state_of_envs(vec.state_dict(), 2, 2))
        >>> [name for name, array in state_of_envs({"obs": np.arange(4), "played": np.array([9])}, 1, 2).items()]
        ['obs', 'played']
    """
    found: dict[str, Any] = {}
    num_envs = _num_envs(state)
    for name, values in state.items():
        if name == ABOUT:
            found[name] = _counted(values, count)
        elif name in COMMON:
            found[name] = values
        else:  # MuJoCo's "seeds" end with one that is common
            part, rest = values[first : first + count], values[num_envs:]
            found[name] = np.concatenate([part, rest]) if isinstance(values, np.ndarray) else [*part, *rest]
    return found


def joined_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of all envs, from those of some; what is common is that of the first. Inverse of `state_of_envs`."""
    found: dict[str, Any] = {}
    counts = [_num_envs(state) for state in states]
    for name, values in states[0].items():
        if name == ABOUT:
            found[name] = _counted(values, sum(counts))
        elif name in COMMON:
            found[name] = values
        else:
            parts = [state[name][:count] for state, count in zip(states, counts, strict=True)]
            rest = values[counts[0] :]
            if isinstance(values, np.ndarray):
                found[name] = np.concatenate([*parts, rest])
            else:
                found[name] = [row for part in (*parts, rest) for row in part]
    return found


def _num_envs(state: Mapping[str, Any]) -> int:
    return len(state["envs"] if "envs" in state else state["obs"])


def _counted(about: np.ndarray, num_envs: int) -> np.ndarray:
    """The description of a vector with another number of envs."""
    described = {**json.loads(about.tobytes()), "num_envs": num_envs}
    return np.frombuffer(json.dumps(described).encode(), np.uint8).copy()
