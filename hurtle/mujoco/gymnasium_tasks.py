"""Gymnasium's v5 MuJoCo tasks as array functions: names, defaults and numbers are Gymnasium's.

An id of Gymnasium's registry → the task here that computes the same. Gymnasium's docs describe the tasks and their options.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.envs.registration import EnvSpec

from hurtle.errors import HurtleError
from hurtle.mujoco.state import State
from hurtle.mujoco.task import Task

Range = tuple[float, float]
Arrays = dict[str, np.ndarray]
STANDING = {"trackbodyid": 2, "lookat": np.array((0.0, 0.0, 1.15)), "elevation": -20.0}


class GymnasiumTask(Task):
    """What Gymnasium's tasks have in common."""

    default_camera_config: dict[str, Any] | None = {"distance": 4.0}

    def find_file(self) -> Path:
        """A path that begins with `.`, `/` or `~`, or a file of Gymnasium's."""
        import gymnasium.envs.mujoco

        assets = Path(str(gymnasium.envs.mujoco.__file__)).parent / "assets"
        path = Path(self.xml_file).expanduser() if self.xml_file[:1] in ("~", ".", "/") else assets / self.xml_file
        if not path.is_file():
            raise HurtleError(f"{type(self).__name__}: no file {path}. Write ./my_model.xml for a file of your own.")
        return path

    def control_cost(self, s: State, weight: float) -> np.ndarray:
        """The squares of the actions, summed."""
        return weight * np.add.reduce(np.square(s.action), axis=1)


class _Runner(GymnasiumTask):
    """Runs along x: HalfCheetah, Hopper and Walker2d."""

    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 0.1
    reset_noise_scale: float = 0.1
    exclude_current_positions_from_observation: bool = True

    def observe(self, s: State) -> Sequence[np.ndarray]:
        return s.qpos[:, 1:] if self.exclude_current_positions_from_observation else s.qpos, s.qvel

    def reward(self, s: State) -> tuple[np.ndarray, Arrays]:
        velocity = (s.qpos[:, 0] - s.before.qpos[:, 0]) / self.dt
        forward, cost = self.forward_reward_weight * velocity, self.control_cost(s, self.ctrl_cost_weight)
        return forward - cost, {"x_velocity": velocity, "reward_forward": forward, "reward_ctrl": -cost}

    def infos(self, s: State) -> Arrays:
        return {"x_position": s.qpos[:, 0]}


class HalfCheetah(_Runner):
    xml_file: str = "half_cheetah.xml"
    frame_skip: int = 5

    def reset(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return self.init_qpos + self.noise(rng, self.model.nq), self.reset_noise_scale * rng.standard_normal(self.model.nv)


class _Walker(_Runner):
    """Falls: Hopper and Walker2d."""

    frame_skip: int = 4
    ctrl_cost_weight: float = 1e-3
    healthy_reward: float = 1.0
    terminate_when_unhealthy: bool = True
    healthy_z_range: Range = (0.8, 2.0)
    healthy_angle_range: Range = (-1.0, 1.0)
    reset_noise_scale: float = 5e-3

    def healthy(self, s: State) -> np.ndarray:
        return _between(s.qpos[:, 1], self.healthy_z_range) & _between(s.qpos[:, 2], self.healthy_angle_range)

    def terminated(self, s: State) -> np.ndarray | None:
        s.healthy = self.healthy(s)
        return ~s.healthy if self.terminate_when_unhealthy else None

    def observe(self, s: State) -> Sequence[np.ndarray]:
        position, velocity = super().observe(s)
        return position, velocity.clip(-10, 10)

    def reward(self, s: State) -> tuple[np.ndarray, Arrays]:
        velocity = (s.qpos[:, 0] - s.before.qpos[:, 0]) / self.dt
        forward, survive = self.forward_reward_weight * velocity, s.healthy * self.healthy_reward
        cost = self.control_cost(s, self.ctrl_cost_weight)
        terms = {"reward_forward": forward, "reward_ctrl": -cost, "reward_survive": survive}
        return forward + survive - cost, {"x_velocity": velocity, **terms}

    def infos(self, s: State) -> Arrays:
        return {"x_position": s.qpos[:, 0], "z_distance_from_origin": s.qpos[:, 1] - self.init_qpos[1]}


class Hopper(_Walker):
    xml_file: str = "hopper.xml"
    default_camera_config: dict[str, Any] | None = STANDING | {"distance": 3.0}
    healthy_state_range: Range = (-100.0, 100.0)
    healthy_z_range: Range = (0.7, math.inf)
    healthy_angle_range: Range = (-0.2, 0.2)

    def healthy(self, s: State) -> np.ndarray:
        low, high = self.healthy_state_range
        state = np.concatenate((s.qpos[:, 2:], s.qvel), axis=1)
        return super().healthy(s) & (state.min(1) > low) & (state.max(1) < high)  # False with NaN


class Walker2d(_Walker):
    xml_file: str = "walker2d_v5.xml"
    default_camera_config: dict[str, Any] | None = STANDING | {"distance": 4.0}


class Swimmer(GymnasiumTask):
    xml_file: str = "swimmer.xml"
    frame_skip: int = 4
    default_camera_config: dict[str, Any] | None = None
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 1e-4
    reset_noise_scale: float = 0.1
    exclude_current_positions_from_observation: bool = True

    def observe(self, s: State) -> Sequence[np.ndarray]:
        return s.qpos[:, 2:] if self.exclude_current_positions_from_observation else s.qpos, s.qvel

    def reward(self, s: State) -> tuple[np.ndarray, Arrays]:
        velocity = (s.qpos[:, :2] - s.before.qpos[:, :2]) / self.dt
        forward, cost = self.forward_reward_weight * velocity[:, 0], self.control_cost(s, self.ctrl_cost_weight)
        velocities = {"x_velocity": velocity[:, 0], "y_velocity": velocity[:, 1]}
        return forward - cost, {**velocities, "reward_forward": forward, "reward_ctrl": -cost}

    def infos(self, s: State) -> Arrays:
        return _place(s)


class Ant(GymnasiumTask):
    fields = ("qpos", "qvel", "xpos", "cfrc_ext")
    xml_file: str = "ant.xml"
    frame_skip: int = 5
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 0.5
    contact_cost_weight: float = 5e-4
    healthy_reward: float = 1.0
    main_body: int | str = 1
    terminate_when_unhealthy: bool = True
    healthy_z_range: Range = (0.2, 1.0)
    contact_force_range: Range = (-1.0, 1.0)
    reset_noise_scale: float = 0.1
    exclude_current_positions_from_observation: bool = True
    include_cfrc_ext_in_observation: bool = True

    def terminated(self, s: State) -> np.ndarray | None:
        low, high = self.healthy_z_range
        height = s.qpos[:, 2]
        finite = np.isfinite(s.qpos).all(1) & np.isfinite(s.qvel).all(1)
        s.healthy = finite & (low <= height) & (height <= high)
        return ~s.healthy if self.terminate_when_unhealthy else None

    def observe(self, s: State) -> Sequence[np.ndarray]:
        position = s.qpos[:, 2:] if self.exclude_current_positions_from_observation else s.qpos
        if not self.include_cfrc_ext_in_observation:
            return position, s.qvel
        return position, s.qvel, self._contact_forces(s)[:, 1:]

    def _contact_forces(self, s: State) -> np.ndarray:
        return s.cfrc_ext.clip(*self.contact_force_range)

    def reward(self, s: State) -> tuple[np.ndarray, Arrays]:
        body = self.body(self.main_body)
        velocity = (s.xpos[:, body, :2] - s.before.xpos[:, body, :2]) / self.dt
        forward, survive = velocity[:, 0] * self.forward_reward_weight, s.healthy * self.healthy_reward
        cost = self.control_cost(s, self.ctrl_cost_weight)
        contact = self.contact_cost_weight * _squares(self._contact_forces(s))
        terms = {"reward_forward": forward, "reward_ctrl": -cost, "reward_contact": -contact, "reward_survive": survive}
        velocities = {"x_velocity": velocity[:, 0], "y_velocity": velocity[:, 1]}
        return forward + survive - (cost + contact), {**velocities, **terms}

    def infos(self, s: State) -> Arrays:
        return _place(s)

    def reset(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return self.init_qpos + self.noise(rng, self.model.nq), self.reset_noise_scale * rng.standard_normal(self.model.nv)


class _Humanoid(GymnasiumTask):
    """What Humanoid and HumanoidStandup have in common."""

    frame_skip: int = 5
    ctrl_cost_weight: float = 0.1
    reset_noise_scale: float = 1e-2
    exclude_current_positions_from_observation: bool = True
    include_cinert_in_observation: bool = True
    include_cvel_in_observation: bool = True
    include_qfrc_actuator_in_observation: bool = True
    include_cfrc_ext_in_observation: bool = True

    @property
    def fields(self) -> tuple[str, ...]:
        more = [name for name in ("cinert", "cvel", "qfrc_actuator") if getattr(self, f"include_{name}_in_observation")]
        return ("qpos", "qvel", "ctrl", "cfrc_ext", "ten_length", "ten_velocity", *more)

    def observe(self, s: State) -> Sequence[np.ndarray]:
        parts = [s.qpos[:, 2:] if self.exclude_current_positions_from_observation else s.qpos, s.qvel]
        for name, first in (("cinert", 1), ("cvel", 1), ("qfrc_actuator", 6), ("cfrc_ext", 1)):  # without the world
            if getattr(self, f"include_{name}_in_observation"):
                parts.append(s.fields[name][:, first:])
        return parts

    def _impact(self, s: State, weight: float, allowed: Range) -> np.ndarray:
        return (weight * _squares(s.cfrc_ext)).clip(*allowed)

    def _tendons(self, s: State) -> Arrays:
        return {"tendon_length": s.ten_length, "tendon_velocity": s.ten_velocity}


class Humanoid(_Humanoid):
    xml_file: str = "humanoid.xml"
    default_camera_config: dict[str, Any] | None = {
        "trackbodyid": 1,
        "distance": 4.0,
        "lookat": np.array((0.0, 0.0, 2.0)),
        "elevation": -20.0,
    }
    forward_reward_weight: float = 1.25
    contact_cost_weight: float = 5e-7
    contact_cost_range: Range = (-math.inf, 10.0)
    healthy_reward: float = 5.0
    terminate_when_unhealthy: bool = True
    healthy_z_range: Range = (1.0, 2.0)

    @property
    def fields(self) -> tuple[str, ...]:
        return (*super().fields, "xipos")

    def terminated(self, s: State) -> np.ndarray | None:
        s.healthy = _between(s.qpos[:, 2], self.healthy_z_range)
        return ~s.healthy if self.terminate_when_unhealthy else None

    def _center(self, s: State) -> np.ndarray:
        """The center of mass, x and y. Matrix products of single envs: the same bits for any number of envs."""
        mass = self.model.body_mass
        return np.matmul(mass, s.xipos)[:, :2] / mass.sum()

    def reward(self, s: State) -> tuple[np.ndarray, Arrays]:
        velocity = (self._center(s) - self._center(s.before)) / self.dt
        forward, survive = self.forward_reward_weight * velocity[:, 0], s.healthy * self.healthy_reward
        cost = self.ctrl_cost_weight * _squares(s.ctrl)
        contact = self._impact(s, self.contact_cost_weight, self.contact_cost_range)
        terms = {"reward_survive": survive, "reward_forward": forward, "reward_ctrl": -cost, "reward_contact": -contact}
        velocities = {"x_velocity": velocity[:, 0], "y_velocity": velocity[:, 1]}
        return forward + survive - (cost + contact), {**velocities, **terms}

    def infos(self, s: State) -> Arrays:
        return {**_place(s), **self._tendons(s)}


class HumanoidStandup(_Humanoid):
    xml_file: str = "humanoidstandup.xml"
    default_camera_config: dict[str, Any] | None = {
        "trackbodyid": 1,
        "distance": 4.0,
        "lookat": np.array((0.0, 0.0, 0.8925)),
        "elevation": -20.0,
    }
    uph_cost_weight: float = 1.0
    impact_cost_weight: float = 5e-7
    impact_cost_range: Range = (-math.inf, 10.0)

    def reward(self, s: State) -> tuple[np.ndarray, Arrays]:
        up = s.qpos[:, 2] / self.model.opt.timestep  # uph_cost_weight changes nothing: Gymnasium does not use it
        cost = self.ctrl_cost_weight * _squares(s.ctrl)
        impact = self._impact(s, self.impact_cost_weight, self.impact_cost_range)
        return up - cost - impact + 1, {"reward_linup": up, "reward_quadctrl": -cost, "reward_impact": -impact}

    def infos(self, s: State) -> Arrays:
        x, y, z = s.qpos[:, :3].T
        return {"x_position": x, "y_position": y, "z_distance_from_origin": z - self.init_qpos[2], **self._tendons(s)}


class InvertedPendulum(GymnasiumTask):
    xml_file: str = "inverted_pendulum.xml"
    frame_skip: int = 2
    default_camera_config: dict[str, Any] | None = {"trackbodyid": 0, "distance": 2.04}
    reset_noise_scale: float = 0.01

    def terminated(self, s: State) -> np.ndarray:
        finite = np.isfinite(s.qpos).all(1) & np.isfinite(s.qvel).all(1)
        s.healthy = finite & ~(np.abs(s.qpos[:, 1]) > 0.2)
        return ~s.healthy

    def reward(self, s: State) -> tuple[np.ndarray, Arrays]:
        survive = s.healthy.astype(np.int64)
        return survive, {"reward_survive": survive}


class InvertedDoublePendulum(GymnasiumTask):
    fields = ("qpos", "qvel", "site_xpos", "qfrc_constraint")
    xml_file: str = "inverted_double_pendulum.xml"
    frame_skip: int = 5
    default_camera_config: dict[str, Any] | None = None
    healthy_reward: float = 10.0
    reset_noise_scale: float = 0.1

    def terminated(self, s: State) -> np.ndarray:
        s.fallen = s.site_xpos[:, 0, 2] <= 1
        return s.fallen

    def observe(self, s: State) -> Sequence[np.ndarray]:
        angles = s.qpos[:, 1:]
        return s.qpos[:, :1], np.sin(angles), np.cos(angles), s.qvel.clip(-10, 10), s.qfrc_constraint[:, :1].clip(-10, 10)

    def reward(self, s: State) -> tuple[np.ndarray, Arrays]:
        x, y = s.site_xpos[:, 0, 0], s.site_xpos[:, 0, 2]
        distance = 0.01 * x**2 + (y - 2) ** 2
        velocity = 1e-3 * s.qvel[:, 1] ** 2 + 5e-3 * s.qvel[:, 2] ** 2
        survive = self.healthy_reward * ~s.fallen
        terms = {"reward_survive": survive, "distance_penalty": -distance, "velocity_penalty": -velocity}
        return survive - distance - velocity, terms

    def reset(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return self.init_qpos + self.noise(rng, self.model.nq), rng.standard_normal(self.model.nv) * self.reset_noise_scale


class Reacher(GymnasiumTask):
    fields = ("qpos", "qvel", "xpos")
    xml_file: str = "reacher.xml"
    frame_skip: int = 2
    max_episode_steps: int | None = 50
    default_camera_config: dict[str, Any] | None = {"trackbodyid": 0}
    reward_dist_weight: float = 1.0
    reward_control_weight: float = 1.0

    def _to_target(self, s: State) -> np.ndarray:
        return s.xpos[:, self.body("fingertip")] - s.xpos[:, self.body("target")]

    def observe(self, s: State) -> Sequence[np.ndarray]:
        angles = s.qpos[:, :2]
        return np.cos(angles), np.sin(angles), s.qpos[:, 2:], s.qvel[:, :2], self._to_target(s)[:, :2]

    def reward(self, s: State) -> tuple[np.ndarray, Arrays]:
        distance = -_length(self._to_target(s)) * self.reward_dist_weight
        control = -np.add.reduce(np.square(s.action), axis=1) * self.reward_control_weight
        return distance + control, {"reward_dist": distance, "reward_ctrl": control}

    def reset(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        qpos = rng.uniform(-0.1, 0.1, self.model.nq) + self.init_qpos
        goal = rng.uniform(-0.2, 0.2, 2)
        while not np.linalg.norm(goal) < 0.2:
            goal = rng.uniform(-0.2, 0.2, 2)
        qpos[-2:] = goal
        qvel = rng.uniform(-0.005, 0.005, self.model.nv)
        qvel[-2:] = 0
        return qpos, qvel


class Pusher(GymnasiumTask):
    fields = ("qpos", "qvel", "xpos")
    xml_file: str = "pusher_v5.xml"
    frame_skip: int = 5
    max_episode_steps: int | None = 100
    default_camera_config: dict[str, Any] | None = {"trackbodyid": -1, "distance": 4.0}
    reward_near_weight: float = 0.5
    reward_dist_weight: float = 1.0
    reward_control_weight: float = 0.1

    def observe(self, s: State) -> Sequence[np.ndarray]:
        places = (s.xpos[:, self.body(name)] for name in ("tips_arm", "object", "goal"))
        return s.qpos[:, :7], s.qvel[:, :7], *places

    def reward(self, s: State) -> tuple[np.ndarray, Arrays]:
        thing = s.xpos[:, self.body("object")]
        near = -_length(thing - s.xpos[:, self.body("tips_arm")]) * self.reward_near_weight
        distance = -_length(thing - s.xpos[:, self.body("goal")]) * self.reward_dist_weight
        control = -np.add.reduce(np.square(s.action), axis=1) * self.reward_control_weight
        return distance + control + near, {"reward_dist": distance, "reward_ctrl": control, "reward_near": near}

    def reset(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        cylinder = self._cylinder(rng)
        while not np.linalg.norm(cylinder) > 0.17:
            cylinder = self._cylinder(rng)
        qpos = self.init_qpos.copy()
        qpos[-4:-2], qpos[-2:] = cylinder, 0
        qvel = rng.uniform(-0.005, 0.005, self.model.nv)
        qvel[-4:] = 0
        return qpos, qvel

    def _cylinder(self, rng: np.random.Generator) -> np.ndarray:
        return np.concatenate([rng.uniform(-0.3, 0, 1), rng.uniform(-0.2, 0.2, 1)])


def _between(values: np.ndarray, allowed: Range) -> np.ndarray:
    return (allowed[0] < values) & (values < allowed[1])


def _squares(values: np.ndarray) -> np.ndarray:
    return np.add.reduce(np.square(values).reshape(len(values), -1), axis=1)


def _length(vectors: np.ndarray) -> np.ndarray:
    return np.sqrt(np.add.reduce(np.square(vectors), axis=1))


def _place(s: State) -> Arrays:
    return {"x_position": s.qpos[:, 0], "y_position": s.qpos[:, 1], "distance_from_origin": _length(s.qpos[:, :2])}


_TASKS = {
    "ant_v5:AntEnv": Ant,
    "half_cheetah_v5:HalfCheetahEnv": HalfCheetah,
    "hopper_v5:HopperEnv": Hopper,
    "humanoid_v5:HumanoidEnv": Humanoid,
    "humanoidstandup_v5:HumanoidStandupEnv": HumanoidStandup,
    "inverted_double_pendulum_v5:InvertedDoublePendulumEnv": InvertedDoublePendulum,
    "inverted_pendulum_v5:InvertedPendulumEnv": InvertedPendulum,
    "pusher_v5:PusherEnv": Pusher,
    "reacher_v5:ReacherEnv": Reacher,
    "swimmer_v5:SwimmerEnv": Swimmer,
    "walker2d_v5:Walker2dEnv": Walker2d,
}


def task_of(spec: EnvSpec, options: dict[str, Any]) -> Task | None:
    """The task that steps like `gymnasium.make(spec, **options)`, or None if there is none here.

    Raises:
        UnknownNameError: The task has no such option; the message suggests the closest.
    """
    entry = spec.entry_point
    found = _TASKS.get(entry.removeprefix("gymnasium.envs.mujoco.")) if isinstance(entry, str) else None
    if found is None or spec.additional_wrappers or not {"additional_wrappers", "disable_env_checker"}.isdisjoint(options):
        return None
    settings = {"max_episode_steps": spec.max_episode_steps, **spec.kwargs, **options}
    if settings["max_episode_steps"] == -1:  # Gymnasium's way to say: no limit
        settings["max_episode_steps"] = None
    elif settings["max_episode_steps"] is None:
        settings["max_episode_steps"] = spec.max_episode_steps
    return found(**settings)
