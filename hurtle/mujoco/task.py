"""`Task`: what to do with a MuJoCo model, written as array functions over all envs; the vector does everything else.

XML → model → state of all envs → observations, terminations, rewards, infos. Steps nothing itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from hurtle.envs.extras import load_module
from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.mujoco.state import State

RENDER_MODES = ["rgb_array", "depth_array", "rgbd_tuple"]


class Task:
    """A task for a MuJoCo model.

    Derive from it, set `xml_file` and write `observe` and `reward`; docs/mujoco.md shows how. Annotated class attributes are
    options: `Reach(reach=0.3)`. Functions get a `State` and work on all envs at once.

    Example:
        >>> from hurtle.mujoco import Task
        >>> class Pole(Task):
        ...     xml_file = "inverted_pendulum.xml"
        >>> Pole(reset_noise_scale=0.2)
        Pole(reset_noise_scale=0.2)
        >>> Pole(reset_noise=0.2)
        Traceback (most recent call last):
        hurtle.errors.UnknownNameError: Pole has no option 'reset_noise'. Did you mean reset_noise_scale?
    """

    fields: Any = ("qpos", "qvel")
    """The float64 arrays of MjData that the functions read from the state; may be a property."""
    observation_dtype: ClassVar[Any] = np.float64

    xml_file: str = ""
    """A path, seen from the current folder or the file of the class; or the XML itself."""
    frame_skip: int = 1
    """Steps of MuJoCo for each step of the env."""
    max_episode_steps: int | None = 1000
    """An episode of so many steps is truncated; None: never."""
    reset_noise_scale: float = 0.01
    """The start differs from the model's by up to so much, in every position and velocity."""
    default_camera_config: dict[str, Any] | None = None
    width: int = 480
    height: int = 480
    camera_id: int | None = None
    camera_name: str | None = None
    max_geom: int = 1000
    visual_options: dict[int, bool] | None = None

    def __init__(self, **options: Any):
        known = self.options()
        for name, value in options.items():
            if name not in known:
                raise UnknownNameError(f"{type(self).__name__} has no option {name!r}. {did_you_mean(name, known)}")
            setattr(self, name, value)
        if not isinstance(self.frame_skip, int) or self.frame_skip < 1:
            raise HurtleError(f"frame_skip must be an int of at least 1, got {self.frame_skip!r}.")
        limit = self.max_episode_steps
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise HurtleError(f"max_episode_steps must be None or an int of at least 1, got {limit!r}.")

    # What a task may define.

    def observe(self, s: State) -> np.ndarray | Sequence[np.ndarray]:
        """The observations `[num_envs, …]`, or their parts, which are joined."""
        return [s.fields[name] for name in self.fields]

    def terminated(self, s: State) -> np.ndarray | None:
        """Which episodes end here, bool `[num_envs]`; called before `reward`. None: no episode terminates."""
        return None

    def reward(self, s: State) -> np.ndarray | tuple[np.ndarray, dict[str, np.ndarray]]:
        """The rewards `[num_envs]`; also a dict of arrays for the infos, if you like."""
        raise NotImplementedError(f"{type(self).__name__} has no rewards. Write: def reward(self, s), returning [num_envs].")

    def infos(self, s: State) -> dict[str, np.ndarray]:
        """Infos of a state, after a reset as after a step: arrays `[num_envs, …]`."""
        return {}

    def reset(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Positions and velocities in which one env begins an episode."""
        return self.init_qpos + self.noise(rng, self.model.nq), self.init_qvel + self.noise(rng, self.model.nv)

    # What its functions may use.

    def noise(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Uniform numbers from -reset_noise_scale to reset_noise_scale."""
        return rng.uniform(-self.reset_noise_scale, self.reset_noise_scale, size)

    @cached_property
    def model(self) -> Any:
        """The MjModel.

        Raises:
            HurtleError: MuJoCo is not installed, or cannot load the file; the message has its reason.
        """
        load_module("mujoco", type(self).__name__)
        import mujoco

        try:
            if self.xml_file.lstrip().startswith("<"):
                model = mujoco.MjModel.from_xml_string(self.xml_file)
            else:
                model = mujoco.MjModel.from_xml_path(str(self.find_file()))
        except ValueError as error:
            named = "its XML" if self.xml_file.lstrip().startswith("<") else self.xml_file
            raise HurtleError(f"{type(self).__name__}: MuJoCo cannot load {named}: {error}") from error
        size = model.vis.global_  # of the off-screen buffer
        size.offwidth, size.offheight = max(size.offwidth, self.width), max(size.offheight, self.height)
        return model

    @cached_property
    def dt(self) -> float:
        """Seconds of a step."""
        return self.model.opt.timestep * self.frame_skip

    @cached_property
    def init_qpos(self) -> np.ndarray:
        """The model's positions."""
        return self.model.qpos0.copy()

    @cached_property
    def init_qvel(self) -> np.ndarray:
        """The model's velocities: none."""
        return np.zeros(self.model.nv)

    def body(self, name: str | int) -> int:
        """The index of a body."""
        return self._index("body", name)

    def site(self, name: str | int) -> int:
        """The index of a site."""
        return self._index("site", name)

    def geom(self, name: str | int) -> int:
        """The index of a geom."""
        return self._index("geom", name)

    def _index(self, kind: str, name: str | int) -> int:
        found = self._indices.get((kind, name))
        return self._look_up(kind, name) if found is None else found

    @cached_property
    def _indices(self) -> dict[tuple[str, str | int], int]:
        return {}

    def _look_up(self, kind: str, name: str | int) -> int:
        try:
            return self._indices.setdefault((kind, name), int(getattr(self.model, kind)(name).id))
        except (KeyError, IndexError):
            known = [getattr(self.model, kind)(k).name for k in range(getattr(self.model, f"n{kind}"))]
            raise UnknownNameError(
                f"The model has no {kind} {name!r}. {did_you_mean(str(name), filter(None, known))}"
            ) from None

    # What the vector asks.

    @classmethod
    def options(cls) -> dict[str, Any]:
        """The options and their defaults."""
        return {
            name: getattr(cls, name)
            for base in reversed(cls.__mro__)
            for name, annotation in inspect.get_annotations(base).items()
            if "ClassVar" not in str(annotation) and name != "fields"
        }

    @cached_property
    def action_space(self) -> spaces.Box:
        """The ranges of the model's actuators.

        Raises:
            HurtleError: An actuator has no range.
        """
        if self.model.nu == 0 or not self.model.actuator_ctrllimited.all():
            free = [self.model.actuator(k).name or str(k) for k in np.flatnonzero(self.model.actuator_ctrllimited == 0)]
            what = f"actuators without a ctrlrange: {', '.join(free)}" if free else "no actuators"
            raise HurtleError(f"{type(self).__name__}: the model has {what}. Actions need ranges.")
        low, high = self.model.actuator_ctrlrange.astype(np.float32).T
        return spaces.Box(low, high, dtype=np.float32)

    @property
    def metadata(self) -> dict[str, Any]:
        """The render modes, and pictures per second."""
        return {"render_modes": RENDER_MODES, "render_fps": round(1 / self.dt)}

    def find_file(self) -> Path:
        """Where the XML is.

        Raises:
            HurtleError: It is nowhere.
        """
        given = Path(self.xml_file).expanduser()
        module = sys.modules.get(type(self).__module__)
        beside = Path(getattr(module, "__file__", None) or ".").parent / given
        for path in (given, beside):
            if self.xml_file and path.is_file():
                return path
        raise HurtleError(
            f"{type(self).__name__}: no file {self.xml_file!r}, neither {given.absolute()} nor {beside.absolute()}."
        )

    def changed_options(self) -> dict[str, Any]:
        """The options whose values are not their defaults."""
        return {name: getattr(self, name) for name, default in self.options().items() if getattr(self, name) is not default}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name in self.options()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.changed_options().items())})"
