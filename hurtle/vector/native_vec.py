"""`NativeVecEnv`: many native envs behind `gymnasium.vector.VectorEnv`.

actions → one compiled call over all envs → arrays written in place → views. Does not know how the code was compiled.
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
from hurtle.native.batch import CpuBatch
from hurtle.native.drawn import Ranges
from hurtle.native.env import Env, EnvSpec
from hurtle.native.rng import MASK, seed_range
from hurtle.native.single_env import RENDER_MODES, check_render_mode, render_env
from hurtle.native.spaces import env_action_space, env_observation_space, infos_of
from hurtle.vector.options import autoreset_mode_of, check_count, check_reset_mask, check_seed
from hurtle.vector.vec_env import Results, Seed, VecEnv

SENT = ("", "reset", "step", "ended")
"""What `recv` is waiting to return: nothing, a reset, a step, or a step that ended episodes."""


class NativeVecEnv(VecEnv):
    """A vector of native envs.

    The arrays that `reset` and `step` return are **reused**: the next step overwrites them. Copy what you keep, or pass
    `copy=True`. Ended episodes leave `infos["episode"]` (`r`, `l`, the env's metrics) where `infos["_episode"]` is True and,
    with SAME_STEP autoreset, `infos["final_obs"]` where `infos["_final_obs"]` is True; other rows of both are stale.

    Args:
        env: The native env, with its parameters.
        num_envs: Number of copies; env i behaves like a single env reset with `seed + i`.
        num_workers: The most threads to use, None for all free cores; what steps take decides how many.
        seed: Base seed of the first reset, if that is called without one.
        autoreset_mode: SAME_STEP or NEXT_STEP.
        copy: Return copies instead of the reused arrays.
        render_mode: "rgb_array", "ansi" or None; `render()` returns one picture per env.
        debug: Run the author's code uncompiled.
    """

    def __init__(
        self,
        env: Env,
        num_envs: int,
        *,
        num_workers: int | None = None,
        seed: int = 0,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        copy: bool = False,
        render_mode: str | None = None,
        debug: bool = False,
    ):
        check_count("num_envs", num_envs)
        if num_workers is not None:
            check_count("num_workers", num_workers)
        check_seed(seed)
        check_render_mode(render_mode)
        mode = autoreset_mode_of(autoreset_mode, (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP))
        self.native_spec = EnvSpec.of(env)
        self.num_envs = int(num_envs)
        self.batch_size = self.num_envs
        self.num_agents = self.native_spec.num_agents
        self.render_mode = render_mode
        self.metadata = {"autoreset_mode": mode, "render_modes": RENDER_MODES}
        self.single_observation_space = env_observation_space(self.native_spec)
        self.single_action_space = env_action_space(self.native_spec)
        self._same_step = mode is AutoresetMode.SAME_STEP
        self._copy = copy
        self._first_seed: int | None = seed
        self._env_seeds = seed_range(seed, self.num_envs)
        self._sent: tuple[str, Results] | None = None  # the results recv() will return, and their kind, one of SENT
        self._all = np.ones(self.num_envs, np.bool_)
        self._batch = self._make_batch(num_workers, debug)
        self._actions = self._batch.actions
        self._outcome = self._views()
        self._step_infos = infos_of(self.native_spec, self._batch.arrays)
        if (mask := self._step_infos.get("action_mask")) is not None:  # NumPy or torch; every env has a mask
            self._step_infos["_action_mask"] = mask.reshape(self.num_envs, -1).any(1) | True
        self._episode_infos = self._make_episode_infos()

    @property
    def agent_observation_space(self) -> spaces.Space:
        """The space of one agent's observation."""
        return self.native_spec.observation_space

    @property
    def agent_action_space(self) -> spaces.Space:
        """The space of one agent's action."""
        return self.native_spec.action_space

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each env's last reset; before the first reset, the seed that it will get."""
        return tuple(self._env_seeds.tolist())

    @property
    def batch(self) -> Any:
        """The compiled engine: a `CpuBatch` or `CudaBatch` whose arrays `step` reads and writes."""
        return self._batch

    @property
    def same_step(self) -> bool:
        """Whether an ended episode is reset within the step that ends it."""
        return self._same_step

    def _make_batch(self, num_workers: int | None, debug: bool) -> Any:
        return CpuBatch(self.native_spec, self.num_envs, num_workers, debug)

    def reset(self, *, seed: Seed = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start new episodes.

        Args:
            seed: Env i gets `seed + i`; or one seed (or None) per env. None continues the random streams.
            options: Values of runtime parameters, one for all or an array with one per env; `reset_mask` (bool[num_envs])
                selects the envs to reset.
        """
        self.check_open()
        self._sent = None
        options = dict(options or {})
        chosen = self._chosen(options.pop("reset_mask", None))
        if self._first_seed is not None:  # the first reset seeds every env, whatever the mask
            chosen = self._all
            self._apply_seed(self._first_seed, chosen)
        if seed is not None:
            self._apply_seed(seed, chosen)
        if options:
            self._batch.set_options(options, chosen)
        self._batch.reset(chosen)
        self._first_seed = None
        obs = self._outcome[0]
        return (self._copied(obs), self._copied(dict(self._step_infos))) if self._copy else (obs, dict(self._step_infos))

    @property
    def drawn(self) -> dict[str, np.dtype | None]:
        """See `VecEnv.drawn`."""
        return {name: self.native_spec.fields[name].dtype for name in self.native_spec.env.drawn}

    def set_ranges(self, ranges: Ranges) -> None:
        """See `VecEnv.set_ranges`."""
        self.check_open()
        self._batch.set_ranges(ranges)

    def step(self, actions: Any) -> Results:
        """Step every env with its row of `actions`; with SAME_STEP autoreset, ended envs are already in their next episode.

        Raises:
            ActionError: Wrong shape, dtype or value; no env was stepped.
        """
        if self.closed or self._first_seed is not None or self._sent is not None:
            self._refuse_to_begin("the first step()")
        if type(actions) is not np.ndarray or actions.dtype != self._actions.dtype or not actions.flags.carray:
            actions = self._convert(actions)
        if actions.shape != self._actions.shape:
            self._refuse(actions)
        ended = self._batch.step(actions, self._same_step)
        infos = dict(self._episode_infos if ended else self._step_infos)
        if self._copy:
            return (*(self._copied(array) for array in self._outcome), self._copied(infos))
        return (*self._outcome, infos)

    def async_reset(self, seed: Seed = None, options: dict[str, Any] | None = None) -> None:
        """Like `reset`, but `recv` returns the first observations."""
        self.reset(seed=seed, options=options)
        self._sent = "reset", self._results("reset")

    def send(self, actions: Any, env_id: Any = None) -> None:
        """Step every env; `recv` returns the results. Native envs step together, so `env_id` can only name all of them."""
        self.check_open()
        if env_id is not None and not np.array_equal(env_id, np.arange(self.num_envs)):
            raise HurtleError("Native envs step together: leave out env_id, or make a pool with batch_size.")
        if self._sent is not None:
            raise HurtleError("send() twice: call recv() first.")
        results = self.step(actions)
        self._sent = "ended" if "episode" in results[4] else "step", results

    def recv(self) -> Results:
        """Return the results of the last `send` or `async_reset`, with the index of each env in `infos["env_id"]`."""
        self.check_open()
        if self._sent is None:
            raise HurtleError("recv() would wait forever: call async_reset() or send() first.")
        (_, (*outcome, infos)), self._sent = self._sent, None
        return (*outcome, {**infos, "env_id": np.arange(self.num_envs)})

    def discard_pending(self) -> None:
        """Forget results that `recv` has not returned yet."""
        self._sent = None

    def play(self, num_steps: int, seed: int = 0) -> int:
        """Take `num_steps` steps of uniformly random actions in compiled code; returns the number of episodes that ended."""
        if self.closed or self._first_seed is not None:
            self._refuse_to_begin("play()")
        return self._batch.play(num_steps, seed)

    def render(self) -> tuple[Any, ...] | None:
        """Render every env in the `render_mode`."""
        return None if self.render_mode is None else self._render_records(self._records())

    def _render_records(self, records: np.ndarray) -> tuple[Any, ...]:
        return tuple(render_env(self.native_spec, record, self.render_mode) for record in records)

    def _records(self) -> np.ndarray:
        return self._batch.arrays.envs

    @property
    def actions(self) -> Any:
        """The array that `step(vec.actions)` reads without copying."""
        return self._actions

    @property
    def states(self) -> np.ndarray:
        """The State records of all envs as one structured array; writing to it changes the envs."""
        return self._batch.arrays.envs[list(self.native_spec.fields)]

    def load_states(self, states: np.ndarray) -> None:
        """Replace the State records of all envs."""
        for name in self.native_spec.fields:
            self._batch.arrays.envs[name] = states[name]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of everything needed to continue bitwise: after `load_state_dict`, steps return what they would have here.

        The state holds the records with their random streams ("envs", as bytes), all arrays that steps read or return, and
        whether a reset or `recv` is due. "about" identifies the vector, as JSON in bytes. All arrays hold plain numbers.
        """
        self.check_open()
        state = {name: np.array(self._batch.to_numpy(array)) for name, array in self._arrays().items()}
        state["envs"] = np.array(self._records().view(np.uint8).reshape(self.num_envs, -1))
        state["about"] = np.frombuffer(json.dumps(self._about()).encode(), np.uint8).copy()
        first_seed = 0 if self._first_seed is None else int(self._first_seed) & MASK
        state["first_seed"] = np.array([self._first_seed is not None, first_seed], np.uint64).view(np.int64)
        state["sent"] = np.array([SENT.index("" if self._sent is None else self._sent[0])])
        state["played"] = np.array([self._batch.played])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, here or in another process; the number of threads may differ.

        Raises:
            HurtleError: The state is incomplete or belongs to another env or vector; the message says what differs. Nothing
                was changed.
        """
        self.restore(self.check_state(state))

    def reset_env(
        self, index: int, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset one env, for example with other runtime parameters; returns copies of its observation and its masks.

        Its row of the reused arrays belongs to the new episode from now on; no other row changes.
        """
        (index,) = self._idle(index)
        if self._first_seed is not None:
            raise ResetNeeded("Call reset() before reset_env().")
        chosen = ~self._all
        chosen[index] = True
        if seed is not None:
            self._seed_envs(seed_range(seed, 1).repeat(self.num_envs), chosen)
        if options:
            self._batch.set_options(options, chosen)
        self._batch.reset(chosen)
        own = {name: array[index] for name, array in self._step_infos.items() if name != "_action_mask"}
        return self._copied(self._outcome[0][index]), self._copied(own)

    def get_attr(self, name: str, indices: Any = None) -> tuple[Any, ...]:
        """A State field, or a parameter or attribute of the env class, of every env or of those in `indices`."""
        ids = self._idle(indices)
        if name in self.native_spec.fields:
            states = self.states[name]
            return tuple(states[i] for i in ids)
        if not hasattr(self.native_spec.env, name):
            raise UnknownNameError(f"{self.native_spec.name} has no {name!r}. {did_you_mean(name, self._attributes())}")
        return (getattr(self.native_spec.env, name),) * len(ids)

    def set_attr(self, name: str, values: Any, indices: Any = None) -> None:
        """Set a State field of every env, or of those in `indices`: one value for all, or a list or tuple with one for each."""
        if name not in self.native_spec.fields:
            if name in self._attributes():
                raise UnknownNameError(f"{name!r} is a parameter, a compile-time constant: make a new vector to change it.")
            raise UnknownNameError(f"set_attr sets State fields. {did_you_mean(name, self.native_spec.fields)}")
        ids, states = self._idle(indices), self.states.copy()
        field = states[name]
        for i, value in zip(ids, self._value_of_each(name, values, len(ids)), strict=True):
            try:
                field[i] = value
            except (TypeError, ValueError):
                raise HurtleError(f"{name!r} of one env is {field.dtype} of shape {field.shape[1:]}, got {value!r}.") from None
        self.load_states(states)

    def call(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        """`call("render")` renders every env, or those in `indices`; other names are read like `get_attr`."""
        return self._render_records(self._records()[self._idle(indices)]) if name == "render" else self.get_attr(name, indices)

    def _attributes(self) -> list[str]:
        return [*self.native_spec.fields, *self.native_spec.env.parameters()]

    def _idle(self, indices: Any) -> list[int]:
        """Indices as a list, checked: none of these envs may be running."""
        self.check_open()
        ids = self._indices(indices)
        if self._sent is not None and ids:
            raise HurtleError(f"Envs {sorted(set(ids))} are still running: call recv() until they are back.")
        return ids

    def _refuse_to_begin(self, what: str) -> None:
        self.check_open()
        if self._sent is not None:
            raise HurtleError("step() between send() and recv(): call recv() first.")
        raise ResetNeeded(f"Call reset() before {what}.")

    @property
    def num_workers(self) -> int:
        """Threads in use."""
        return self._batch.num_threads

    def close_extras(self, **kwargs: Any) -> None:
        """End the helper threads."""
        self._batch.close()

    def _chosen(self, mask: Any) -> np.ndarray:
        if mask is None:
            return self._all
        return check_reset_mask(mask, self.num_envs)

    def _apply_seed(self, seed: int | Sequence[int | None], chosen: np.ndarray) -> None:
        if not isinstance(seed, Sequence | np.ndarray):
            self._seed_envs(seed_range(seed, self.num_envs), chosen)
            return
        if len(seed) != self.num_envs:
            raise HurtleError(f"seed has {len(seed)} entries for {self.num_envs} envs.")
        given = np.array([s is not None for s in seed])
        seeds = np.concatenate([seed_range(0 if s is None else s, 1) for s in seed])
        self._seed_envs(seeds, chosen & given)

    def _seed_envs(self, seeds: np.ndarray, chosen: np.ndarray) -> None:
        self._batch.seed(seeds, chosen)
        self._env_seeds[chosen] = seeds[chosen]

    def _convert(self, actions: Any) -> np.ndarray:
        given = np.asarray(actions)
        if given.shape != self._actions.shape or not np.can_cast(given.dtype, self._actions.dtype, "same_kind"):
            self._refuse(given)
        self._actions[...] = given
        return self._actions

    def _refuse(self, actions: np.ndarray) -> None:
        raise ActionError(
            f"Actions must be {self._actions.dtype} of shape {self._actions.shape} (one row per env), "
            f"got {actions.dtype} of shape {actions.shape}."
        )

    def _views(self) -> tuple[Any, Any, Any, Any]:
        """The arrays as users see them: a single agent has no agent axis."""
        arrays = self._batch.arrays
        obs = arrays.obs.reshape(self.num_envs, *self.native_spec.obs_shape)
        outcome = (arrays.reward, arrays.terminated, arrays.truncated)
        return (obs, *(outcome if self.num_agents > 1 else (array[:, 0] for array in outcome)))

    def _make_episode_infos(self) -> dict[str, Any]:
        arrays, several = self._batch.arrays, self.num_agents > 1
        returns, lengths, ended = arrays.episode_return, arrays.episode_length, arrays.episode_ended
        episode = {"r": returns, "l": lengths} if several else {"r": returns[:, 0], "l": lengths[:, 0]}
        episode |= {name: arrays.episode_metrics[:, m] for m, name in enumerate(self.native_spec.env.metrics)}
        infos = {**self._step_infos, "episode": episode, "_episode": ended if several else ended[:, 0]}
        if several and self.native_spec.env.metrics:  # metrics are the env's, not an agent's
            infos["_metrics"] = arrays.ended
        if self._same_step:
            final_info = {"episode": episode, "_episode": infos["_episode"]}
            final_obs = arrays.final_obs.reshape(self.num_envs, *self.native_spec.obs_shape)
            infos |= {"final_obs": final_obs, "_final_obs": arrays.ended}
            infos |= {"final_info": final_info, "_final_info": arrays.ended}
        return infos

    def _results(self, sent: str) -> Results:
        """The results that `recv` returns for a finished reset or step."""
        obs, *outcome = self._outcome
        if sent == "reset":
            outcome = [self._copied(array) for array in outcome]
            for array in outcome:
                array[...] = 0
        infos = dict(self._episode_infos if sent == "ended" else self._step_infos)
        results = (obs, *outcome, infos)
        return tuple(self._copied(part) for part in results) if self._copy else results

    # The state, for checkpoints.

    def _about(self) -> dict[str, Any]:
        """What two vectors must have in common to exchange states."""
        env = self.native_spec.env
        return {
            "env": self.native_spec.name,
            "parameters": {name: getattr(env, name) for name in env.parameters()},
            "num_envs": self.num_envs,
            "autoreset_mode": self.metadata["autoreset_mode"].value,
            "state fields": str(self.native_spec.record),
        }

    def _arrays(self) -> dict[str, Any]:
        """All arrays of the batch that steps change, except the records."""
        arrays = {**self._batch.arrays._asdict(), "actions": self._actions}
        del arrays["envs"], arrays["max_steps"]
        return arrays

    def check_state(self, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Check what `load_state_dict` is given, and return it as arrays; changes nothing.

        Raises:
            HurtleError: The state is incomplete or belongs to another env or vector.
        """
        mine, given = self.state_dict(), {name: np.asarray(array) for name, array in state.items()}
        for name in (*mine, *given):
            if name not in given or name not in mine:
                what = "lacks" if name in mine else "has an unknown array"
                raise HurtleError(f"The state {what} {name!r}; pass exactly what state_dict() of such a vector returned.")
        about, theirs = self._about(), json.loads(given["about"].tobytes())
        for name, value in about.items():
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

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace the state of all envs with one returned by `check_state`."""
        for name, array in self._arrays().items():
            self._write(array, state[name])
        self._batch.load_records(np.array(state["envs"]).view(self.native_spec.record).reshape(self.num_envs))
        due, first_seed = state["first_seed"].view(np.uint64).tolist()
        self._first_seed = first_seed if due else None
        sent = SENT[int(state["sent"][0])]
        self._sent = (sent, self._results(sent)) if sent else None
        self._batch.played = int(state["played"][0])

    def _write(self, array: Any, values: np.ndarray) -> None:
        array[...] = values

    def _copied(self, value: Any) -> Any:
        return {k: self._copied(v) for k, v in value.items()} if isinstance(value, dict) else value.copy()
