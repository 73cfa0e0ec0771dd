"""`MujocoVecEnv`: many envs of a MuJoCo `Task` behind `gymnasium.vector.VectorEnv`.

actions → physics on threads → arrays of all envs → views and infos. Does not know how the physics is stepped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode

from hurtle.errors import ActionError, HurtleError, UnknownNameError, did_you_mean
from hurtle.mujoco.batch import TaskBatch
from hurtle.mujoco.pictures import Pictures, check_render_mode
from hurtle.mujoco.task import Task
from hurtle.vector.options import autoreset_mode_of, check_count, check_reset_mask, check_seed
from hurtle.vector.vec_env import Results, Seed, VecEnv

Infos = dict[str, Any]


class MujocoVecEnv(VecEnv):
    """A vector of envs of a task.

    The arrays that `reset` and `step` return are **reused** by later steps. Copy what you keep, or pass `copy=True`.

    Args:
        task: The task, with its options.
        num_envs: Number of envs; env i behaves like a single env reset with `seed + i`.
        num_workers: The most threads to use, None for all free cores; what steps take decides how many.
        seed: Base seed of the first reset, if that is called without one.
        autoreset_mode: SAME_STEP or NEXT_STEP.
        copy: Return copies instead of the reused arrays.
        render_mode: "rgb_array", "depth_array", "rgbd_tuple" or None; `render()` returns one picture per env.
        spec: Gymnasium's spec of the env, if it has one.

    Attributes:
        task: The task.
    """

    def __init__(
        self,
        task: Task,
        num_envs: int,
        *,
        num_workers: int | None = None,
        seed: int = 0,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        copy: bool = False,
        render_mode: str | None = None,
        spec: Any = None,
    ):
        check_count("num_envs", num_envs)
        if num_workers is not None:
            check_count("num_workers", num_workers)
        check_seed(seed)
        check_render_mode(render_mode)
        mode = autoreset_mode_of(autoreset_mode, (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP))
        self.num_envs = self.batch_size = int(num_envs)
        self.num_agents, self.task, self.render_mode, self.spec = 1, task, render_mode, spec
        self._batch = TaskBatch(task, self.num_envs, num_workers)
        self.metadata = {**task.metadata, "autoreset_mode": mode}
        self.single_observation_space, self.single_action_space = self._batch.observation_space, self._batch.action_space
        self._same_step, self._copy = mode is AutoresetMode.SAME_STEP, copy
        self._pictures = None if render_mode is None else Pictures(task, self._batch.physics, render_mode)
        self._first_seed: int | None = int(seed)
        self._env_seeds = [int(seed) + i for i in range(self.num_envs)]
        self._actions = self._batch.physics.actions
        self._final_obs = np.zeros_like(self._batch.obs)
        self._all = np.ones(self.num_envs, np.bool_)
        self._sent: Results | None = None  # what recv() will return

    @property
    def agent_observation_space(self) -> spaces.Space:
        """The space of one env's observation."""
        return self.single_observation_space

    @property
    def agent_action_space(self) -> spaces.Space:
        """The space of one env's action."""
        return self.single_action_space

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each env's last reset; before the first reset, the seed that it will get."""
        return tuple(self._env_seeds)

    @property
    def num_workers(self) -> int:
        """Threads in use."""
        return self._batch.physics.num_threads

    def reset(self, *, seed: Seed = None, options: dict[str, Any] | None = None) -> tuple[Any, Infos]:
        """Start new episodes.

        Args:
            seed: Env i gets `seed + i`; or one seed (or None) per env. None continues the random streams.
            options: `reset_mask` (bool[num_envs]) selects the envs to reset.
        """
        self.check_open()
        given = dict(options or {})
        mask = given.pop("reset_mask", None)
        chosen = self._all if mask is None else check_reset_mask(mask, self.num_envs)
        if given:
            raise HurtleError(f"MuJoCo tasks have no options of reset but reset_mask, got {', '.join(given)}.")
        seeds = self._seeds(seed)
        self._sent = None
        if self._first_seed is not None:  # the first reset seeds every env, whatever the mask
            chosen = self._all
            seeds = [self._first_seed + i if own is None else own for i, own in enumerate(seeds)]
        envs = chosen.nonzero()[0]
        for env in envs.tolist():
            self._seed_env(env, seeds[env])
        self._batch.reset(envs)
        for array in (self._batch.rewards, self._batch.terminated, self._batch.truncated):
            array[envs] = 0
        self._first_seed = None
        infos = self._state_infos(chosen)
        return (_copied(self._batch.obs), _copied(infos)) if self._copy else (self._batch.obs, infos)

    def step(self, actions: Any) -> Results:
        """Step every env with its row of `actions`; with SAME_STEP autoreset, ended envs are already in their next episode.

        Raises:
            ActionError: Actions of the wrong shape or type; no env was stepped.
        """
        if self.closed or self._first_seed is not None or self._sent is not None:
            self._refuse_to_step()
        given = actions if type(actions) is np.ndarray else np.asarray(actions)
        if given.shape != self._actions.shape or (
            given.dtype != np.float32 and not np.can_cast(given.dtype, np.float32, "same_kind")
        ):
            self._refuse(given)
        self._actions[...] = given
        batch = self._batch
        stepped = ~batch.reset_due if not self._same_step and b"\x01" in batch.reset_due.tobytes() else self._all
        ended = batch.step()
        infos = _marked(batch.step_infos, stepped) | self._state_infos(self._all)
        if ended:
            infos = self._end_episodes(infos)
        results = (batch.obs, batch.rewards, batch.terminated, batch.truncated, infos)
        return tuple(_copied(part) for part in results) if self._copy else results

    def _end_episodes(self, infos: Infos) -> Infos:
        """Reset the envs whose episodes ended, now or in the next step; returns the infos with what is told about the ends."""
        batch, ended = self._batch, self._batch.ended.copy()
        episode = {"episode": {"r": batch.returns.copy(), "l": batch.lengths.copy()}, "_episode": ended}
        if not self._same_step:
            batch.reset_due[...] = ended
            return infos | episode
        final = {name: ended if name.startswith("_") else array.copy() for name, array in infos.items()}
        self._final_obs[...] = batch.obs
        batch.reset(ended.nonzero()[0])
        told = {"final_obs": self._final_obs, "_final_obs": ended, "final_info": {**final, **episode}, "_final_info": ended}
        return {**_marked(batch.step_infos, ~ended), **self._state_infos(self._all), **episode, **told}

    def _state_infos(self, rows: np.ndarray) -> Infos:
        return _marked(self.task.infos(self._batch.state), rows)

    # One after the other.

    def async_reset(self, seed: Seed = None, options: dict[str, Any] | None = None) -> None:
        """Like `reset`, but `recv` returns the first observations."""
        obs, infos = self.reset(seed=seed, options=options)
        batch = self._batch
        self._sent = obs, *(np.zeros_like(array) for array in (batch.rewards, batch.terminated, batch.truncated)), infos

    def send(self, actions: Any, env_id: Any = None) -> None:
        """Step every env; `recv` returns the results. Envs step together, so `env_id` can only name all of them."""
        self.check_open()
        if env_id is not None and not np.array_equal(env_id, np.arange(self.num_envs)):
            raise HurtleError("These envs step together: leave out env_id, or make a pool with backend='process'.")
        if self._sent is not None:
            raise HurtleError("send() twice: call recv() first.")
        self._sent = self.step(actions)

    def recv(self) -> Results:
        """Return the results of the last `send` or `async_reset`, with the index of each env in `infos["env_id"]`."""
        self.check_open()
        if self._sent is None:
            raise HurtleError("recv() would wait forever: call async_reset() or send() first.")
        (*outcome, infos), self._sent = self._sent, None
        return (*outcome, {**infos, "env_id": np.arange(self.num_envs)})

    # Single envs.

    def reset_env(self, index: int, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Infos]:
        """Reset one env; returns copies of its observation and its infos.

        Its row of the reused arrays belongs to the new episode from now on; no other row changes.
        """
        (env,) = self._idle(index)
        if self._first_seed is not None:
            raise ResetNeeded("Call reset() before reset_env().")
        if options:
            raise HurtleError(f"MuJoCo tasks have no options of reset, got {', '.join(options)}.")
        self._seed_env(env, seed)
        self._batch.reset(np.array([env]))
        infos = self.task.infos(self._batch.state)
        return self._batch.obs[env].copy(), {name: np.copy(array[env])[()] for name, array in infos.items()}

    def call(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        """`call("render")` renders every env, or those in `indices`; other names are read like `get_attr`."""
        if name != "render":
            return self.get_attr(name, indices)
        return tuple(None if self._pictures is None else self._pictures.of(env) for env in self._idle(indices))

    def get_attr(self, name: str, indices: Any = None) -> tuple[Any, ...]:
        """A field of the state of every env, or of those in `indices`; or an attribute of the task, which they share."""
        ids = self._idle(indices)
        if name in self._batch.state.fields:
            return tuple(self._batch.state.fields[name][i].copy() for i in ids)
        if not hasattr(self.task, name):
            known = [*self._batch.state.fields, *self.task.options()]
            raise UnknownNameError(f"{type(self.task).__name__} has no {name!r}. {did_you_mean(name, known)}")
        return (getattr(self.task, name),) * len(ids)

    def set_attr(self, name: str, values: Any, indices: Any = None) -> None:
        """Not for these envs, which share one task and one model."""
        raise HurtleError(f"All envs share one task: make a new vector with another {name!r}, or use backend='process'.")

    def render(self) -> tuple[Any, ...] | None:
        """Render every env in the `render_mode`."""
        return None if self.render_mode is None else self.call("render")

    def close_extras(self, **kwargs: Any) -> None:
        """End the helper threads and the renderer."""
        if self._pictures is not None:
            self._pictures.close()
        self._batch.close()

    # Inputs.

    def _seeds(self, seed: Seed) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if not isinstance(seed, Sequence | np.ndarray) or isinstance(seed, str):
            check_seed(seed)
            return [int(seed) + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise HurtleError(f"seed has {len(seed)} entries for {self.num_envs} envs.")
        for own in seed:
            if own is not None:
                check_seed(own)
        return [None if own is None else int(own) for own in seed]

    def _seed_env(self, env: int, seed: int | None) -> None:
        if seed is not None:
            self._batch.seed(env, seed)
            self._env_seeds[env] = int(seed)

    def _idle(self, indices: Any) -> list[int]:
        """Indices as a list, checked: none of these envs may be running."""
        self.check_open()
        ids = self._indices(indices)
        if self._sent is not None and ids:
            raise HurtleError(f"Envs {sorted(set(ids))} are still running: call recv() until they are back.")
        return ids

    def _refuse_to_step(self) -> None:
        self.check_open()
        if self._sent is not None:
            raise HurtleError("step() between send() and recv(): call recv() first.")
        raise ResetNeeded("Call reset() before the first step().")

    def _refuse(self, actions: np.ndarray) -> None:
        raise ActionError(
            f"Actions must be float32 of shape {self._actions.shape} (one row per env), "
            f"got {actions.dtype} of shape {actions.shape}."
        )

    # The state, for checkpoints.

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of everything needed to continue bitwise: after `load_state_dict`, steps return what they would have here.

        "physics" is MuJoCo's own state, "about" identifies the vector, as JSON in bytes. All arrays hold plain numbers.

        Raises:
            HurtleError: There are results that `recv` has not returned yet.
        """
        self._idle(None)
        state = {name: array.copy() for name, array in self._arrays().items()}
        state["physics"], state["streams"] = self._batch.physics.get_states(), self._batch.get_streams()
        state["about"] = np.frombuffer(json.dumps(self._about()).encode(), np.uint8).copy()
        seeds = [*self._env_seeds, self._first_seed or 0]
        state["seeds"] = np.array([(seed >> 32, seed & 0xFFFFFFFF) for seed in seeds], np.int64)
        state["first_reset_due"] = np.array([self._first_seed is not None])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, here or in another process; the number of threads may differ.

        Raises:
            HurtleError: The state is incomplete or belongs to another task or vector; the message says what differs. Nothing
                was changed.
        """
        self._sent = None
        given = self._checked(state)
        for name, array in self._arrays().items():
            array[...] = given[name]
        self._batch.restored(given["physics"], given["streams"])
        *self._env_seeds, first_seed = [high << 32 | low for high, low in given["seeds"].tolist()]
        self._first_seed = first_seed if given["first_reset_due"][0] else None

    def _checked(self, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
        mine, given = self.state_dict(), {name: np.asarray(array) for name, array in state.items()}
        for name in (*mine, *given):
            if name not in given or name not in mine:
                what = "lacks" if name in mine else "has an unknown array"
                raise HurtleError(f"The state {what} {name!r}; pass exactly what state_dict() of such a vector returned.")
        theirs = json.loads(given["about"].tobytes())
        for name, value in self._about().items():
            if theirs.get(name) != value:
                raise HurtleError(
                    f"The state is of another vector. Its {name}: {theirs.get(name)!r}; here: {value!r}. "
                    "Make the vector with the same settings as when the state was saved."
                )
        for name, array in mine.items():
            if name != "about" and (given[name].shape, given[name].dtype) != (array.shape, array.dtype):
                raise HurtleError(
                    f"The state's {name!r} must be {array.dtype} of shape {array.shape}, "
                    f"got {given[name].dtype} of shape {given[name].shape}."
                )
        return given

    def _arrays(self) -> dict[str, np.ndarray]:
        batch = self._batch
        names = ("obs", "rewards", "terminated", "truncated", "returns", "lengths", "reset_due")
        fields = {f"field {name}": array for name, array in batch.state.fields.items()}
        return {name: getattr(batch, name) for name in names} | {"final_obs": self._final_obs} | fields

    def _about(self) -> dict[str, Any]:
        """What two vectors must have in common to exchange states."""
        import mujoco

        return {
            "task": type(self.task).__name__,
            "options": {name: repr(value) for name, value in self.task.changed_options().items()},
            "num_envs": self.num_envs,
            "autoreset_mode": self.metadata["autoreset_mode"].value,
            "mujoco": mujoco.__version__,
        }


def _marked(infos: Mapping[str, np.ndarray], rows: np.ndarray) -> Infos:
    """Infos of these rows in Gymnasium's format: each array with a mask of its rows; none if there are no rows."""
    marked: Infos = {}
    if b"\x01" not in rows.tobytes():
        return marked
    for name, array in infos.items():
        marked[name] = array
        marked["_" + name] = rows
    return marked


def _copied(value: Any) -> Any:
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value.copy()
