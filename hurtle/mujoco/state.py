"""`State`: the arrays of MuJoCo's data that a task asked for, of all envs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hurtle.errors import UnknownNameError


class State:
    """What the functions of a `Task` read: a field of MjData is an attribute, an array `[num_envs, …]`.

    Functions may keep arrays of their own here for functions that are called later in the same step.

    Attributes:
        num_envs: Number of envs.
        action: The actions of this step, float32 `[num_envs, nu]`.
        terminated: What the task's function of that name returned, bool `[num_envs]`.
        before: The state before this step, or as the episode began, with the same fields.
    """

    action: np.ndarray
    terminated: np.ndarray
    before: State

    def __init__(self, num_envs: int, fields: dict[str, np.ndarray]):
        self.num_envs = num_envs
        self.fields = fields
        self.__dict__.update(fields)

    if TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:  # only if there is no such attribute
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnknownNameError(
            f"The state has no {name!r}. Fields of MjData are here if the task lists them: "
            f"fields = {(*self.__dict__.get('fields', ()), name)}."
        )
