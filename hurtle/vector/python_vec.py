"""`PythonVecEnv`: many Gymnasium or PettingZoo envs behind `gymnasium.vector.VectorEnv`; the common part of the back ends.

actions → rows → (a back end steps the envs) → rows → views, infos and episode statistics. Knows nothing of processes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from hurtle.errors import ActionError, HurtleError
from hurtle.native.drawn import Ranges, check_ranges
from hurtle.vector.description import Description
from hurtle.vector.drawn_options import INFO
from hurtle.vector.env_rows import ALL, Rows
from hurtle.vector.episode_counts import Ended, Episodes
from hurtle.vector.infos import Infos, merge_infos
from hurtle.vector.options import ORDERS, VecOptions, check_reset_mask, check_seed
from hurtle.vector.vec_env import Results, Seed, VecEnv

_RESUMED = ("obs", "over")
"""Rows that are part of the state."""


class PythonVecEnv(VecEnv):
    """A vector of envs written in Python.

    `step` and `reset` work on all envs at once. With `batch_size < num_envs` the vector is a pool: `recv` (and so `step` and
    `reset`) returns the results of `batch_size` envs, with their indices in `infos["env_id"]`; `send` takes their actions.

    Later calls **reuse** the returned arrays unless `copy=True`. In a pool they are views if the batch is a contiguous range
    of envs, else copies.

    Attributes:
        num_agents: Agents per env; 1 for single-agent envs.
        batch_size: Envs per `recv`.
        layout: The memory layout of observations, which `unflatten` uses.
    """

    def __init__(self, description: Description, options: VecOptions, rows: Rows):
        self._description, self._rows = description, rows
        self.num_envs, self.batch_size = options.num_envs, options.batch_size
        self.num_agents = description.num_agents or 1
        self.agents = description.agents
        self.layout = description.structure
        self.render_mode, self.spec = description.render_mode, description.spec
        self.metadata = {**description.metadata, "autoreset_mode": options.autoreset_mode}
        agents = description.num_agents
        obs, action = description.observation_space, description.action_space
        self.single_observation_space = obs if agents is None else batch_space(obs, agents)
        self.single_action_space = action if agents is None else batch_space(action, agents)
        self._same_step = options.autoreset_mode is AutoresetMode.SAME_STEP
        self._next_step = options.autoreset_mode is AutoresetMode.NEXT_STEP
        self._copy, self._fair = options.copy, options.order == ORDERS[1]
        self._pool = self.batch_size < self.num_envs
        self._first_seed: int | None = options.seed
        self._env_seeds = [options.seed + i for i in range(self.num_envs)]
        self._actions = description.actions.batch(rows.actions) if description.actions.is_plain else None
        self._fixed = description.flat or description.layout.is_fixed
        self._whole = self._views(ALL)
        self._whole_final = self._observations(rows.final_obs)
        self._pending_infos: dict[int, Infos] = {}  # infos of envs that have not been received yet
        self._episodes = Episodes(rows, agents is not None, self._next_step)
        self._running: deque[int] = deque()  # envs sent and not yet received, oldest first
        self._finished: deque[int] = deque()  # those of them that are ready, in order of completion
        self._in_hand = np.zeros(0, np.int64)  # envs of the last recv, the default of send()
        self._taken: list[int] = []  # envs received and not sent again, in the order in which they were sent before

    @property
    def agent_observation_space(self) -> spaces.Space:
        """The observation space of one env, or of one agent; flat with `emulate=True`."""
        return self._description.observation_space

    @property
    def agent_action_space(self) -> spaces.Space:
        """The action space of one env, or of one agent."""
        return self._description.action_space

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each env's last reset; before the first reset, the seed that it will get."""
        return tuple(self._env_seeds)

    @property
    def resumes_exactly(self) -> bool:
        """Whether `state_dict` can hold the states of the envs: not those of a pool, and each must have a `saved_state`."""
        return self._description.resumes_exactly and not self._pool

    @property
    def drawn(self) -> dict[str, np.dtype | None]:
        """See `VecEnv.drawn`."""
        return dict.fromkeys(self._description.drawn)

    def set_ranges(self, ranges: Ranges) -> None:
        """See `VecEnv.set_ranges`. The envs must not be running, and ints are drawn between ints."""
        if self._pool:
            raise HurtleError(
                "Options are not drawn in a pool of Python envs, some of which are always running: leave out the batch size."
            )
        check_ranges("This vector", self._description.drawn, ranges)
        ends = {name: [np.broadcast_to(end, self.num_envs).tolist() for end in pair] for name, pair in ranges.items()}
        each = [{name: (low[i], high[i]) for name, (low, high) in ends.items()} for i in range(self.num_envs)]
        self.set_attr("option_ranges", each)

    # The interface that back ends implement.

    @abstractmethod
    def _abort(self) -> None:
        """End everything quickly."""

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """End the vector if the body fails: an env that raises, or Ctrl-C, leaves envs at different steps."""
        try:
            yield
        except BaseException:
            self._abort()
            raise

    @abstractmethod
    def _post_resets(self, resets: list[tuple[int, int | None, dict[str, Any] | None]]) -> None:
        """Start resets: (index, seed, options)."""

    @abstractmethod
    def _post_steps(self, ids: Sequence[int]) -> None:
        """Start a step of these envs with their rows of actions."""

    @abstractmethod
    def _wait(self) -> list[int]:
        """Block until at least one env is done; returns the envs done since the last call."""

    @abstractmethod
    def _step_all(self) -> None:
        """Step every env with its row of actions and wait for all of them."""

    @abstractmethod
    def _call(self, ids: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call a method of these envs, or read an attribute."""

    @abstractmethod
    def _set_attr(self, ids: Sequence[int], name: str, values: Sequence[Any]) -> None:
        """Set an attribute of each of these envs."""

    def unflatten(self, obs: Any) -> Any:
        """Restore the structure of flat observations, as views: NumPy arrays or torch tensors with any leading axes."""
        return self.layout.unflatten(obs)

    # All envs at once.

    def reset(self, *, seed: Seed = None, options: dict[str, Any] | None = None) -> tuple[Any, Infos]:
        """Start new episodes.

        Args:
            seed: Env i gets `seed + i`; or one seed (or None) per env. None continues the envs' random streams.
            options: Passed to each env's `reset`; `reset_mask` (bool[num_envs]) selects the envs to reset.
        """
        ids = self._begin_reset(seed, options)
        if self._pool:
            obs, _, _, _, infos = self.recv()
            return obs, infos
        with self._all_or_nothing():
            self._await(len(ids))
        self._running.clear()
        self._finished.clear()
        obs, _, _, _, infos = self._results(ALL, range(self.num_envs), np.array(ids, np.int64))
        return obs, infos

    def step(self, actions: Any) -> Results:
        """Step every env with its row of `actions`; in a pool, `send`, then `recv`.

        Raises:
            ActionError: Actions of the wrong shape or type; no env was stepped.
            EnvFailedError: An env raised.
        """
        if self._pool:
            self.send(actions)
            return self.recv()
        self.check_open()
        if self._first_seed is not None:
            raise ResetNeeded("Call reset() before the first step().")
        if self._running:
            raise HurtleError("step() between send() and recv(): call recv() first.")
        self._write_actions(actions, ALL, self.num_envs)
        try:
            self._step_all()
        except BaseException:  # like _all_or_nothing, which would cost a microsecond
            self._abort()
            raise
        return self._results(ALL, range(self.num_envs))

    # A pool: some envs at a time.

    def async_reset(
        self,
        seed: Seed = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Start a reset without waiting; `recv` returns the first observations."""
        self._begin_reset(seed, options)

    def send(self, actions: Any, env_id: Any = None) -> None:
        """Start a step of some envs without waiting.

        Args:
            actions: One row per env.
            env_id: The envs; None means those of the last `recv`, in the same order.
        """
        self.check_open()
        if self._first_seed is not None:
            raise ResetNeeded("Call async_reset() or reset() before the first send().")
        ids = self._in_hand if env_id is None else np.asarray(env_id, np.int64).reshape(-1)
        self._check_free(ids)
        if not len(ids):
            raise HurtleError("send() without envs: call recv() first, or pass env_id.")
        self._write_actions(actions, _selection(ids), len(ids))
        listed = ids.tolist()
        sent = set(listed)
        self._running.extend([i for i in self._taken if i in sent] + [i for i in listed if i not in self._taken])
        self._taken = [i for i in self._taken if i not in sent]
        self._in_hand = self._in_hand[:0] if env_id is None else np.setdiff1d(self._in_hand, ids)
        with self._all_or_nothing():
            self._post_steps(listed)

    def recv(self) -> Results:
        """Wait for `batch_size` envs and return their results, sorted by env index; `infos["env_id"]` has the indices.

        With `order="ready"` these are the first that are done, with `order="fair"` those sent longest ago.
        """
        self.check_open()
        if len(self._running) < self.batch_size:
            raise HurtleError(
                f"recv() would wait forever: {len(self._running)} envs are running and batch_size is {self.batch_size}. "
                "Call async_reset() first, and send() actions for the envs of each recv()."
            )
        with self._all_or_nothing():
            if self._fair:
                ids = [self._running[k] for k in range(self.batch_size)]
                self._await_these(set(ids))
            else:
                self._await(self.batch_size)
                ids = [self._finished.popleft() for _ in range(self.batch_size)]
        taken = set(ids)
        self._taken += ids
        self._running = deque(i for i in self._running if i not in taken)
        self._in_hand = np.array(sorted(ids))
        obs, rewards, terminated, truncated, infos = self._results(_selection(self._in_hand), self._in_hand.tolist())
        infos["env_id"] = self._in_hand.copy()
        return obs, rewards, terminated, truncated, infos

    # Single envs.

    def reset_env(self, index: int, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Infos]:
        """Reset one env, for example to a new map or task; returns its observation and info like the env itself."""
        ids = self._indices(index)
        self._check_free(np.array(ids))
        if self._first_seed is not None:
            raise ResetNeeded("Call reset() before reset_env().")
        self._episodes.expect_reset(ids)
        if seed is not None:
            self._env_seeds[ids[0]] = seed
        with self._all_or_nothing():
            self._post_resets([(ids[0], seed, options)])
            while not self._wait_for(ids[0]):
                pass
        self._episodes.add(np.array(ids))
        memory = self._rows.obs[ids[0]].copy()
        layout, agents = self._description.layout, self._description.agents
        whole = self._observations(memory) if self._description.flat or agents is not None else layout.reader(memory)()
        return whole, self._pending_infos.pop(ids[0], {})

    def call(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method (or read an attribute) of every env, or of those in `indices`, and return the results."""
        ids = self._indices(indices)
        self._check_free(np.array(ids))
        return tuple(self._call(ids, name, args, kwargs))

    def get_attr(self, name: str, indices: Any = None) -> tuple[Any, ...]:
        """An attribute of every env, or of those in `indices`."""
        return self.call(name, indices=indices)

    def set_attr(self, name: str, values: Any, indices: Any = None) -> None:
        """Set an attribute of every env, or of those in `indices`: one value for all, or a list or tuple with one for each."""
        ids = self._indices(indices)
        self._check_free(np.array(ids))
        self._set_attr(ids, name, self._value_of_each(name, values, len(ids)))

    def render(self) -> tuple[Any, ...] | None:
        """Render every env in the `render_mode`."""
        return None if self.render_mode is None else self.call("render")

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly, for envs with a `saved_state`, such as Atari games without sticky actions.

        Raises:
            HurtleError: The envs cannot be saved, or have not been reset.
        """
        self._check_resumable()
        if self._first_seed is not None:
            raise ResetNeeded("Call reset() before state_dict().")
        rows = {name: getattr(self._rows, name).copy() for name in _RESUMED}
        return {
            "envs": list(self.get_attr("saved_state")),
            "seeds": list(self._env_seeds),
            **rows,
            **self._episodes.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, here or in another process; the number of workers may differ.

        Raises:
            HurtleError: The state is of another number of envs, or the envs cannot be saved.
        """
        self._check_resumable()
        if len(state["envs"]) != self.num_envs:
            raise HurtleError(f"The state is of {len(state['envs'])} envs, and this vector has {self.num_envs}.")
        self._rows.over[...] = state["over"]
        self.set_attr("saved_state", list(state["envs"]))
        for name in _RESUMED:
            getattr(self._rows, name)[...] = state[name]
        self._episodes.load_state_dict(state)
        self._env_seeds, self._first_seed = list(state["seeds"]), None
        self._pending_infos.clear()

    def _check_resumable(self) -> None:
        self.check_open()
        if not self.resumes_exactly:
            raise HurtleError("These envs have no state that can be saved: only Atari games without sticky actions have one.")

    # Inputs: seeds, options, actions.

    def _begin_reset(self, seed: Seed, options: dict[str, Any] | None) -> list[int]:
        self.check_open()
        if self._running and not self._pool:
            raise HurtleError("reset between send() and recv(): call recv() first.")
        if options is not None and not isinstance(options, dict):
            raise HurtleError(f"options must be a dict, got {options!r}.")
        if self._pool and options and "reset_mask" in options:
            raise HurtleError("A pool resets all its envs: leave out reset_mask, or reset_env() the ones in hand.")
        given = dict(options) if options is not None else None
        chosen = self._chosen(given.pop("reset_mask", None) if given else None)
        if self._first_seed is not None:  # the first reset seeds every env, whatever the mask
            chosen = list(range(self.num_envs))
            seed = self._first_seed if seed is None else seed
        seeds = self._seeds(seed)
        if self._first_seed is not None:
            seeds = [self._first_seed + i if s is None else s for i, s in enumerate(seeds)]
        with self._all_or_nothing():
            self._await(len(self._running))  # discard the pending results of a pool
        self._running.clear()
        self._finished.clear()
        self._pending_infos.clear()
        self._in_hand, self._taken = self._in_hand[:0], []
        self._episodes.expect_reset(chosen)
        self._running.extend(chosen)
        for i in chosen:
            if (own := seeds[i]) is not None:
                self._env_seeds[i] = own
        with self._all_or_nothing():
            self._post_resets([(i, seeds[i], given) for i in chosen])
        self._first_seed = None
        return chosen

    def _seeds(self, seed: Seed) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if not isinstance(seed, Sequence | np.ndarray) or isinstance(seed, str):
            check_seed(seed)
            return [int(seed) + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise HurtleError(f"seed has {len(seed)} entries for {self.num_envs} envs.")
        return [None if s is None else int(s) for s in seed]

    def _chosen(self, mask: Any) -> list[int]:
        if mask is None:
            return list(range(self.num_envs))
        return np.flatnonzero(check_reset_mask(mask, self.num_envs)).tolist()

    def _write_actions(self, actions: Any, rows: Any, count: int) -> None:
        if self._actions is None:  # a tree of actions
            memory = self._rows.actions[rows]
            try:
                self._description.actions.write_batch(actions, memory)
            except (KeyError, TypeError, IndexError, ValueError) as error:
                raise ActionError(f"Actions must be a batch of {count} of {self._description.action_space}: {error}") from error
            if not isinstance(rows, slice):
                self._rows.actions[rows] = memory
            return
        given = actions if type(actions) is np.ndarray else np.asarray(actions)
        if rows is ALL and given.dtype == self._actions.dtype and given.shape == self._actions.shape:  # the common case
            self._actions[...] = given
            return
        wanted = self._actions.dtype
        expected = (count, *self._actions.shape[1:])
        if given.shape != expected or (given.dtype != wanted and not np.can_cast(given.dtype, wanted, "same_kind")):
            raise ActionError(
                f"Actions must be {wanted} of shape {expected} (one row per env), got {given.dtype} of shape {given.shape}."
            )
        self._actions[rows] = given

    def _check_free(self, ids: np.ndarray) -> None:
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_envs):
            raise HurtleError(f"There are envs 0 … {self.num_envs - 1}, got {ids.tolist()}.")
        if self._running:
            busy = sorted(set(ids.tolist()) & set(self._running))
            if busy:
                raise HurtleError(f"Envs {busy} are still running: call recv() until they are back.")
        if len(np.unique(ids)) != len(ids):
            raise HurtleError(f"Each env at most once, got {ids.tolist()}.")

    # Outputs: results and infos.

    def _await(self, count: int) -> None:
        while len(self._finished) < count:
            self._finished.extend(self._wait())

    def _await_these(self, wanted: set[int]) -> None:
        while not wanted.issubset(self._finished):
            self._finished.extend(self._wait())
        self._finished = deque(i for i in self._finished if i not in wanted)

    def _wait_for(self, index: int) -> bool:
        done = self._wait()
        self._finished.extend(i for i in done if i != index)
        return index in done

    def _results(self, rows: Any, ids: Sequence[int], changed: Any = None) -> Results:
        obs, rewards, terminated, truncated, masks = self._whole if rows is ALL and self._fixed else self._views(rows)
        infos = (
            merge_infos([(k, self._pending_infos.pop(i)) for k, i in enumerate(ids) if i in self._pending_infos], len(ids))
            if self._pending_infos
            else {}
        )
        infos.update(masks)
        ended = self._episodes.add(rows if changed is None else changed)
        if ended is not None:
            self._add_episode_infos(infos, rows, ended)
        if self._copy:
            return (*(_copied(part) for part in (obs, rewards, terminated, truncated, infos)),)
        return obs, rewards, terminated, truncated, infos

    def _views(self, rows: Any) -> Results:
        """The results of these rows: views if they are a slice, else copies."""
        source, masks = self._rows, {}
        if self._description.mask_size:
            masks["action_mask"] = source.action_mask[rows]
            masks["_action_mask"] = np.ones(len(masks["action_mask"]), np.bool_)  # without a mask, all actions are legal
        if self._description.agents is not None:
            masks["agent_mask"] = source.agent_mask[rows]
        return (
            self._observations(source.obs[rows]),
            source.rewards[rows],
            source.terminated[rows],
            source.truncated[rows],
            masks,
        )

    def _observations(self, memory: np.ndarray) -> Any:
        layout = self._description.layout
        return layout.flat(memory) if self._description.flat else layout.batch(memory)

    def _add_episode_infos(self, infos: Infos, rows: Any, ended: Ended) -> None:
        mine = {"episode": ended.statistics, "_episode": ended.episodes}
        if "episode" not in infos:  # statistics of an env's own wrapper take precedence
            infos.update(mine)
        ended_infos = infos.get("final_info", {}) if self._same_step else infos
        if INFO in ended_infos:
            infos["episode"] = {**infos["episode"], **ended_infos[INFO]}
        if self._same_step and b"\x01" in ended.envs.tobytes():
            whole = rows is ALL and self._fixed
            final = self._whole_final if whole else self._observations(self._rows.final_obs[rows])
            infos["final_obs"] = final if isinstance(final, np.ndarray) else self._final_objects(rows, ended.envs)
            infos["_final_obs"] = infos["_final_info"] = ended.envs
            infos["final_info"] = {**mine, **infos.get("final_info", {})}

    def _final_objects(self, rows: Any, over: np.ndarray) -> np.ndarray:
        """Final observations of structured spaces, one object per ended env, as in Gymnasium."""
        memory, gathered = self._rows.final_obs[rows], np.full(len(over), None, object)
        for k in np.flatnonzero(over):
            if self._description.agents is None:
                gathered[k] = self._description.layout.reader(memory[k])()
            else:
                gathered[k] = self._description.layout.batch(memory[k].copy())
        return gathered


def _selection(ids: np.ndarray) -> Any:
    """A slice if the indices are a contiguous range, so that indexing makes views; else the indices."""
    first, count = int(ids[0]) if len(ids) else 0, len(ids)
    if count and int(ids[-1]) - first == count - 1 and (count < 3 or bool((np.diff(ids) == 1).all())):
        return slice(first, first + count)
    return ids


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_copied(item) for item in value)
    return value.copy() if isinstance(value, np.ndarray) else value
