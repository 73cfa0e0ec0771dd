"""`NativeEnv`: one native env behind `gymnasium.Env`, for scripts, checks, rendering and the debugger."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded

from hurtle.errors import ActionError, HurtleError
from hurtle.native.batch import CpuBatch
from hurtle.native.env import Env, EnvSpec
from hurtle.native.python_target import StateView
from hurtle.native.render import to_ansi
from hurtle.native.rng import seed_range
from hurtle.native.spaces import env_action_space, env_observation_space, infos_of

RENDER_MODES = ["rgb_array", "ansi"]


def render_env(spec: EnvSpec, record: Any, mode: str | None) -> Any:
    """A picture of one env's state in a render mode, or None without a mode."""
    if mode is None:
        return None
    if spec.method("render") is None:
        raise HurtleError(f"{spec.name} has no render method. Write: def render(self, state), returning an RGB array or text.")
    picture = spec.env.render(StateView(record.copy()))  # type: ignore[attr-defined]
    if isinstance(picture, str):
        if mode == "rgb_array":
            raise HurtleError(f"{spec.name}.render returns text; use render_mode='ansi'.")
        return picture
    return to_ansi(picture) if mode == "ansi" else picture


def check_render_mode(mode: str | None) -> None:
    """Raise if a render mode does not exist."""
    if mode is not None and mode not in RENDER_MODES:
        raise HurtleError(f"render_mode must be one of {RENDER_MODES} or None, got {mode!r}.")


class NativeEnv(gymnasium.Env):
    """A native env as a Gymnasium env.

    With several agents, observations, actions, rewards and the flags have a leading axis `num_agents`.

    Args:
        env: The native env.
        render_mode: "rgb_array", "ansi" (coloured text) or None.
        debug: Run the author's code uncompiled, for pdb; every array access is checked.
    """

    metadata: dict[str, Any] = {"render_modes": RENDER_MODES, "render_fps": 30}  # noqa: RUF012 (Gymnasium's name)

    def __init__(self, env: Env, render_mode: str | None = None, debug: bool = False):
        check_render_mode(render_mode)
        self.render_mode = render_mode
        self.native_spec = EnvSpec.of(env)
        self.observation_space = env_observation_space(self.native_spec)
        self.action_space = env_action_space(self.native_spec)
        self.num_agents = self.native_spec.num_agents
        self._batch = CpuBatch(self.native_spec, 1, num_threads=1, debug=debug)
        self._all = np.ones(1, np.bool_)
        self._running = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a new episode; a seed restarts the env's random stream, options set its runtime parameters."""
        never_seeded = self._np_random is None
        super().reset(seed=seed)
        if seed is None and never_seeded:
            seed = int(self.np_random.integers(2**31))
        if seed is not None:
            self._batch.seed(seed_range(seed, 1), self._all)
        if options:
            self._batch.set_options(options, self._all)
        self._batch.reset(self._all)
        self._running = True
        return self._obs(), self._info()

    def step(self, action: Any) -> tuple[np.ndarray, Any, Any, Any, dict[str, Any]]:
        """Take one step; `info["episode"]` has the episode's statistics when it ends."""
        if not self._running:
            raise ResetNeeded("The episode is over (or has not begun): call reset() before step().")
        given, buffer = np.asarray(action), self._batch.actions
        if given.shape != buffer.shape[1:] or not np.can_cast(given.dtype, buffer.dtype, "same_kind"):
            raise ActionError(f"Action {action!r} does not fit {self.action_space}.")
        buffer[0] = given
        self._batch.step(self._batch.actions, same_step=False)
        arrays = self._batch.arrays
        self._running = not arrays.ended[0]
        if self.num_agents > 1:
            outcome = (arrays.reward[0].copy(), arrays.terminated[0].copy(), arrays.truncated[0].copy())
        else:
            outcome = (float(arrays.reward[0, 0]), bool(arrays.terminated[0, 0]), bool(arrays.truncated[0, 0]))
        return self._obs(), *outcome, self._info()

    def render(self) -> Any:
        """A picture of the current state in the env's `render_mode`."""
        return render_env(self.native_spec, self._batch.arrays.envs[0], self.render_mode)

    @property
    def state(self) -> np.void:
        """The env's State record; writing to its fields changes the env."""
        return self._batch.arrays.envs[list(self.native_spec.fields)][0]

    def _obs(self) -> np.ndarray:
        return self._batch.arrays.obs[0].reshape(self.native_spec.obs_shape).copy()

    def _info(self) -> dict[str, Any]:
        arrays = self._batch.arrays
        info = {name: array[0].copy() for name, array in infos_of(self.native_spec, arrays).items()}
        if arrays.episode_ended[0].any():
            returns, lengths = arrays.episode_return[0].copy(), arrays.episode_length[0].copy()
            if self.num_agents > 1:
                info["episode"], info["_episode"] = {"r": returns, "l": lengths}, arrays.episode_ended[0].copy()
            else:
                info["episode"] = {"r": float(returns[0]), "l": int(lengths[0])}
            if arrays.ended[0]:
                metrics = arrays.episode_metrics[0].tolist()
                info["episode"] |= dict(zip(self.native_spec.env.metrics, metrics, strict=False))
        return info

    def close(self) -> None:
        """Do nothing; Gymnasium's API asks for it."""
