"""`TaskEnv`: one env of a `Task` behind `gymnasium.Env`, for scripts, checks and rendering."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded

from hurtle.errors import ActionError
from hurtle.mujoco.batch import TaskBatch
from hurtle.mujoco.pictures import Pictures, check_render_mode
from hurtle.mujoco.task import Task

_ENV = np.zeros(1, np.int64)


class TaskEnv(gymnasium.Env):
    """A task as a Gymnasium env.

    Args:
        task: The task.
        render_mode: "rgb_array", "depth_array", "rgbd_tuple" or None.
    """

    def __init__(self, task: Task, render_mode: str | None = None):
        check_render_mode(render_mode)
        self.task, self.render_mode = task, render_mode
        self._batch = TaskBatch(task, 1, 1)
        self.metadata = task.metadata
        self.observation_space, self.action_space = self._batch.observation_space, self._batch.action_space
        self._pictures = None if render_mode is None else Pictures(task, self._batch.physics, render_mode)
        self._running = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a new episode; a seed restarts the env's random stream."""
        super().reset(seed=seed)
        self._batch.rngs[0] = self.np_random
        self._batch.reset(_ENV)
        self._running = True
        return self._batch.obs[0].copy(), self._info({})

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take one step."""
        if not self._running:
            raise ResetNeeded("The episode is over (or has not begun): call reset() before step().")
        given, actions = np.asarray(action), self._batch.physics.actions
        if given.shape != actions.shape[1:] or not np.can_cast(given.dtype, actions.dtype, "same_kind"):
            raise ActionError(f"Action {action!r} does not fit {self.action_space}.")
        actions[0] = given
        batch = self._batch
        self._running = not batch.step()
        flags = bool(batch.terminated[0]), bool(batch.truncated[0])
        return batch.obs[0].copy(), float(batch.rewards[0]), *flags, self._info(batch.step_infos)

    def render(self) -> Any:
        """A picture of the current state in the env's `render_mode`."""
        return None if self._pictures is None else self._pictures.of(0)

    def _info(self, own: dict[str, np.ndarray]) -> dict[str, Any]:
        return {name: np.copy(array[0])[()] for name, array in (self.task.infos(self._batch.state) | own).items()}

    def close(self) -> None:
        """Free the renderer."""
        if self._pictures is not None:
            self._pictures.close()
        self._batch.close()


def make_task_env(task: Task, render_mode: str | None = None) -> TaskEnv:
    """One env of a task; `resolve` returns this for a task, bound to it."""
    return TaskEnv(task, render_mode)
