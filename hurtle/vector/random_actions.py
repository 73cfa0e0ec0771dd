"""Random actions for stepping envs without a policy; legal ones if the envs have action masks.

action space, masks → actions of a batch. For measuring only: training samples from policies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces


def batch_actions(vec: Any) -> Callable[[int, Any, dict[str, Any]], Any]:
    """A function that returns the actions of a batch: sampled beforehand, or legal ones if the envs have masks."""
    space = copy.deepcopy(vec.action_space)
    space.seed(0)
    ready = [space.sample() for _ in range(16)]
    rng = np.random.default_rng(0)
    layout = getattr(vec, "layout", None)  # the structure of observations, which may be flat
    observed = layout is not None and has_action_mask(layout.space)

    def actions(turn: int, obs: Any, infos: dict[str, Any]) -> Any:
        mask = infos.get("action_mask")
        if mask is None and observed:
            mask = (obs if isinstance(obs, dict) else vec.unflatten(obs))["action_mask"]
        if mask is not None and not mask.all():
            legal = legal_actions(_masked_space(vec.single_action_space, mask), mask, rng)
            if legal is not None:
                return legal
        return ready[turn % len(ready)]

    return actions


def legal_actions(space: spaces.Space, masks: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
    """A random legal action for each row of masks, bool [..., n]; None if masks do not apply to this space.

    Example:
        >>> masks = np.array([[False, True, False], [False, False, True]])
        >>> legal_actions(spaces.Discrete(3), masks, np.random.default_rng(0))
        array([1, 2])
    """
    if isinstance(space, spaces.Discrete):
        counts = np.array([space.n])
    elif isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        counts = space.nvec
    else:
        return None
    if masks.shape[-1] < counts.sum():
        return None
    scores = masks * (1 - rng.random(masks.shape))  # (0, 1] where legal, 0 where not
    parts = np.split(scores, np.cumsum(counts), axis=-1)[:-1]
    chosen = np.stack([part.argmax(-1) for part in parts], -1)
    return (chosen[..., 0] if isinstance(space, spaces.Discrete) else chosen) + space.start


def has_action_mask(space: spaces.Space) -> bool:
    """Whether observations contain an action mask."""
    return isinstance(space, spaces.Dict) and "action_mask" in space.spaces


def _masked_space(space: spaces.Space, mask: np.ndarray) -> spaces.Space:
    """The space that one row of a mask applies to: one agent's if there are several."""
    if mask.ndim == 3 and isinstance(space, spaces.MultiDiscrete):
        return spaces.Discrete(int(space.nvec[0])) if space.nvec.ndim == 1 else spaces.MultiDiscrete(space.nvec[0])
    return space
