"""Fast vectors of MuJoCo models: physics in compiled threads, everything else as array functions over all envs."""

from hurtle.mujoco.state import State
from hurtle.mujoco.task import Task

__all__ = ["State", "Task"]
