"""`TaskBatch`: many envs of one `Task`: physics, then observations, terminations, rewards and infos of all envs at once.

seeds → starts → reset → actions → step → arrays, written in place. Knows nothing of Gymnasium's API.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils.seeding import np_random

from hurtle.errors import EnvDefinitionError, HurtleError
from hurtle.mujoco.physics import Physics
from hurtle.mujoco.state import State
from hurtle.mujoco.task import Task

_WORD = (1 << 64) - 1


def _try_start(task: Task) -> None:
    """Take a few steps through MuJoCo's Python interface, where a fatal error of the engine is an exception.

    Raises:
        EnvDefinitionError: `reset` returns something else than positions and velocities.
        HurtleError: The engine failed; the message has its reason.
    """
    import mujoco

    name, model = type(task).__name__, task.model
    start = [np.asarray(part, np.float64) for part in task.reset(np_random(0)[0])]
    if [part.shape for part in start] != [(model.nq,), (model.nv,)]:
        raise EnvDefinitionError(
            f"{name}.reset must return {model.nq} positions and {model.nv} velocities; "
            f"got arrays of shape {' and '.join(str(part.shape) for part in start)}."
        )
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = start
    try:
        mujoco.mj_step(model, data, 4 * task.frame_skip)
    except mujoco.FatalError as error:
        raise HurtleError(f"{name}: MuJoCo cannot step this model: {error}") from error


class TaskBatch:
    """Envs of a task in memory.

    Args:
        task: The task.
        num_envs: Number of envs.
        num_threads: The most threads to use, None for all free cores.

    Attributes:
        obs, rewards, terminated, truncated: What the last step or reset wrote, one row per env.
        ended: Which episodes the last step ended, if it ended any.
        returns, lengths: Of the episodes so far.
        step_infos: What the last step's rewards consist of.
        reset_due: Envs that are reset in the next step instead of being stepped.
    """

    def __init__(self, task: Task, num_envs: int, num_threads: int | None = None):
        self.task, self.num_envs = task, num_envs
        self.action_space = task.action_space
        _try_start(task)
        self.physics = Physics(task.model, tuple(task.fields), num_envs, task.frame_skip, num_threads)
        self.rngs = [np_random(0)[0]] * num_envs
        self.rewards, self.returns = np.zeros(num_envs), np.zeros(num_envs)
        self.lengths, self._one = np.zeros(num_envs, np.int64), np.ones(num_envs, np.int64)
        self.terminated, self.truncated, self.ended, self.reset_due = (np.zeros(num_envs, np.bool_) for _ in range(4))
        self.step_infos: dict[str, np.ndarray] = {}
        self._limit = math.inf if task.max_episode_steps is None else task.max_episode_steps
        self._left = self._limit  # steps until the first env reaches the limit
        self.obs, self._views = self._observations()
        self.observation_space = spaces.Box(-np.inf, np.inf, self.obs.shape[1:], self.obs.dtype.type)
        self._check_rewards()

    @property
    def state(self) -> State:
        """The state after the last step or reset."""
        return self.physics.state

    def seed(self, env: int, seed: int) -> None:
        """Restart the random stream of an env."""
        self.rngs[env] = np_random(seed)[0]

    def reset(self, envs: np.ndarray) -> None:
        """Begin a new episode in these envs (indices)."""
        self._start(envs)
        self._observe()
        self.returns[envs] = self.lengths[envs] = 0
        self._left = self._limit - self.lengths.max()
        self.reset_due[envs] = False

    def step(self) -> bool:
        """Step all envs with their rows of `physics.actions`, or reset those that are due; returns whether an episode ended."""
        due = b"\x01" in self.reset_due.tobytes()  # a tenth of the time of any()
        resets = self.reset_due.nonzero()[0] if due else None
        self.physics.step((~self.reset_due).nonzero()[0] if due else None)
        if resets is not None:
            self._start(resets)
        self._judge()
        self._observe()
        self.returns += self.rewards
        self.lengths += self._one
        self._left -= 1
        if resets is not None:
            self.rewards[resets] = self.returns[resets] = self.lengths[resets] = 0
            self.terminated[resets] = self.reset_due[resets] = False
            self._left = self._limit - self.lengths.max()
        if self._left > 0:
            self.truncated.fill(False)
            if b"\x01" not in self.terminated.tobytes():
                return False
        else:
            np.greater_equal(self.lengths, self._limit, out=self.truncated)
        np.logical_or(self.terminated, self.truncated, out=self.ended)
        return True

    def _start(self, envs: np.ndarray) -> None:
        starts, nq = self.physics.starts, self.physics.model.nq
        for env in envs.tolist():
            starts[env, :nq], starts[env, nq:] = self.task.reset(self.rngs[env])
        self.physics.reset(envs)

    def _judge(self) -> None:
        """Write the terminations and rewards of the step."""
        state = self.physics.state
        terminated = self.task.terminated(state)
        if terminated is not None:
            self.terminated[...] = terminated
        state.terminated = self.terminated
        reward = self.task.reward(state)
        if isinstance(reward, tuple):
            self.rewards[...], self.step_infos = reward
        else:
            self.rewards[...] = reward

    def _observe(self) -> None:
        """Write the observations of the state."""
        parts = self.task.observe(self.physics.state)
        if isinstance(parts, np.ndarray):
            parts = (parts,)
        for view, part in zip(self._views, parts, strict=True):
            view[...] = part

    def _observations(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """The array of observations, and its parts in the shapes in which the task returns them."""
        self._start(np.arange(self.num_envs))
        name, parts = type(self.task).__name__, self.task.observe(self.state)
        parts = [parts] if isinstance(parts, np.ndarray) else list(parts)
        for part in parts:
            if np.ndim(part) == 0 or np.shape(part)[0] != self.num_envs:
                raise EnvDefinitionError(
                    f"{name}.observe must return arrays [num_envs, …], here [{self.num_envs}, …]; got {np.shape(part)}."
                )
        sizes = [math.prod(part.shape[1:]) for part in parts]
        obs = np.zeros((self.num_envs, sum(sizes)), self.task.observation_dtype)
        edges = np.cumsum([0, *sizes])
        return obs, [obs[:, a:b].reshape(part.shape) for a, b, part in zip(edges, edges[1:], parts, strict=False)]

    def _check_rewards(self) -> None:
        """Ask for rewards and terminations once.

        Raises:
            EnvDefinitionError: They have the wrong shape.
        """
        state, name, wanted = self.state, type(self.task).__name__, (self.num_envs,)
        terminated, state.terminated = self.task.terminated(state), self.terminated
        reward = self.task.reward(state)
        rewards = reward[0] if isinstance(reward, tuple) else reward
        for function, array in (("terminated", terminated), ("reward", rewards)):
            if array is not None and np.shape(array) != wanted:
                raise EnvDefinitionError(f"{name}.{function} must return [num_envs], here {wanted}; got {np.shape(array)}.")

    # Random streams as arrays, for checkpoints.

    def get_streams(self) -> np.ndarray:
        """The states of all envs' random streams, int64 `[num_envs, 6]`."""
        rows = []
        for rng in self.rngs:
            found: Any = rng.bit_generator.state
            long = (found["state"]["state"], found["state"]["inc"])
            rows.append([*(part for x in long for part in (x >> 64, x & _WORD)), found["has_uint32"], found["uinteger"]])
        return np.array(rows, np.uint64).view(np.int64)

    def restored(self, states: np.ndarray, streams: np.ndarray) -> None:
        """Continue from what `physics.get_states` and `get_streams` returned; the arrays have been restored already."""
        self.physics.set_states(states)
        self._left = self._limit - self.lengths.max()
        for env, row in enumerate(np.ascontiguousarray(streams).view(np.uint64).tolist()):
            self.seed(env, 0)
            state, inc = row[0] << 64 | row[1], row[2] << 64 | row[3]
            self.rngs[env].bit_generator.state = {
                "bit_generator": "PCG64",
                "state": {"state": state, "inc": inc},
                "has_uint32": row[4],
                "uinteger": row[5],
            }

    def close(self) -> None:
        """Stop the helper threads."""
        self.physics.close()
