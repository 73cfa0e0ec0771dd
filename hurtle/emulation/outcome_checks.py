"""Type checks of the values a step returns besides the observation: reward, flags and info.

reward, terminated, truncated, info → nothing, or an EmulationError that names the value. Fast enough for every step.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from hurtle.errors import EmulationError

CHECKED_STEPS = 3
"""Number of steps of each emulated env that are checked after its first reset."""


def check_outcome(reward: Any, terminated: Any, truncated: Any, info: Any, of_agent: str = "") -> None:
    """Check the values a step returns besides the observation.

    Args:
        reward: Must be a real number, not NaN.
        terminated: Must be a bool, or equal to one.
        truncated: Must be a bool, or equal to one.
        info: Must be a dict.
        of_agent: Appended to the names in messages, such as `["agent_0"]`.
    """
    check_kinds(reward, terminated, truncated, info, of_agent)
    if math.isnan(reward):
        raise EmulationError(f"reward{of_agent}: expected a number, got NaN.")


USUAL_REWARDS = frozenset((float, int, bool, np.float64, np.float32, np.int64, np.bool_))
USUAL_FLAGS = (bool, np.bool_)
"""Types that are accepted at once, for speed; anything else goes through `check_kinds`."""


def check_kinds(reward: Any, terminated: Any, truncated: Any, info: Any, of_agent: str = "") -> None:
    """Like `check_outcome`, without the NaN check; runs on every step."""
    number = isinstance(reward, numbers.Real | np.integer | np.floating | np.bool_)
    if not number and not (isinstance(reward, np.ndarray) and reward.shape == () and reward.dtype.kind in "biuf"):
        raise EmulationError(f"reward{of_agent}: expected a number, got {_described(reward)}.")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if np.shape(flag) != () or flag not in (False, True):
            raise EmulationError(f"{name}{of_agent}: expected a bool, got {_described(flag)}. Return bool({name}).")
    check_info(info, of_agent)


def check_info(info: Any, of_agent: str = "") -> None:
    """Check that an info is a dict."""
    if not isinstance(info, dict):
        raise EmulationError(f"info{of_agent}: expected a dict, got {_described(info)}.")


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return f"{type(value).__name__} {value!r}"
