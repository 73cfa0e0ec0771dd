"""`Pictures`: pictures of the envs of a batch, by Gymnasium's renderer."""

from __future__ import annotations

from typing import Any

from hurtle.errors import HurtleError
from hurtle.mujoco.physics import Physics
from hurtle.mujoco.task import RENDER_MODES, Task


def check_render_mode(mode: str | None) -> None:
    """Raise if a render mode does not exist."""
    if mode is not None and mode not in RENDER_MODES:
        raise HurtleError(f"render_mode must be one of {RENDER_MODES} or None, got {mode!r}.")


class Pictures:
    """Draws one env after the other with one renderer, which is made for the first picture."""

    def __init__(self, task: Task, physics: Physics, mode: str):
        self._task, self._physics, self._mode = task, physics, mode
        self._renderer: Any = None

    def of(self, env: int) -> Any:
        """A picture of an env.

        Raises:
            HurtleError: This machine cannot draw.
        """
        import mujoco

        try:
            if self._renderer is None:
                self._renderer, self._shown = self._new_renderer(), mujoco.MjData(self._physics.model)
                self._renderer.data = self._shown
            mujoco.mj_copyData(self._shown, self._physics.model, self._physics.data[env])
            return self._renderer.render(self._mode)
        except (ImportError, RuntimeError, AttributeError, mujoco.FatalError) as error:
            raise HurtleError(
                f"MuJoCo cannot draw here: {type(error).__name__}: {error}. Without a display, set the environment variable "
                "MUJOCO_GL to egl (with a GPU) or osmesa before Python starts."
            ) from error

    def _new_renderer(self) -> Any:
        from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

        task = self._task
        settings = (task.width, task.height, task.max_geom, task.camera_id, task.camera_name, task.visual_options)
        return MujocoRenderer(self._physics.model, self._physics.data[0], task.default_camera_config, *settings)

    def close(self) -> None:
        """Free what the renderer holds."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
