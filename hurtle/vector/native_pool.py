"""`NativePool`: native envs in batches, for learners written for asynchronous pools; behind the interface of `VecEnv`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from hurtle.errors import HurtleError
from hurtle.native.drawn import Ranges
from hurtle.native.env import Env
from hurtle.vector.native_vec import NativeVecEnv
from hurtle.vector.options import check_count, check_seed
from hurtle.vector.vec_env import Results, Seed, VecEnv


class NativePool(VecEnv):
    """A pool of `num_envs` native envs; `recv` returns `batch_size` of them at a time, in turn.

    Native envs all take the same time, so the first to be ready are those that were sent first. Each batch has its own
    arrays, which do not change while another batch is stepped.

    Args:
        env: The native env, with its parameters.
        num_envs: Number of envs; env i behaves like a single env reset with `seed + i`.
        batch_size: A divisor of num_envs.
        seed: Base seed of the first reset, if that is called without one.
        **settings: Further arguments of `NativeVecEnv`.
    """

    def __init__(self, env: Env, num_envs: int, batch_size: int, *, seed: int = 0, **settings: Any):
        check_count("num_envs", num_envs)
        check_count("batch_size", batch_size)
        check_seed(seed)
        if num_envs % batch_size:
            raise HurtleError(
                f"Native envs step in equal batches: num_envs={num_envs} is not a multiple of batch_size={batch_size}."
            )
        self.num_envs, self.batch_size = num_envs, batch_size
        firsts = range(0, num_envs, batch_size)
        self._batches = [NativeVecEnv(env, batch_size, seed=seed + first, **settings) for first in firsts]
        self._ids = [np.arange(first, first + batch_size) for first in firsts]
        self._ready: deque[int] = deque()
        self._in_hand: int | None = None
        model = self._batches[0]
        self.num_agents, self.render_mode, self.metadata = model.num_agents, model.render_mode, model.metadata
        self.single_observation_space, self.single_action_space = model.single_observation_space, model.single_action_space

    @property
    def agent_observation_space(self) -> spaces.Space:
        """The space of one agent's observation."""
        return self._batches[0].agent_observation_space

    @property
    def agent_action_space(self) -> spaces.Space:
        """The space of one agent's action."""
        return self._batches[0].agent_action_space

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each env's last reset; before the first reset, the seed that it will get."""
        return tuple(seed for batch in self._batches for seed in batch.np_random_seed)

    @property
    def num_workers(self) -> int:
        """Threads in use."""
        return self._batches[0].num_workers

    @property
    def drawn(self) -> dict[str, np.dtype | None]:
        """See `VecEnv.drawn`."""
        return self._batches[0].drawn

    def set_ranges(self, ranges: Ranges) -> None:
        """See `VecEnv.set_ranges`."""
        whole = {name: [np.broadcast_to(end, self.num_envs) for end in ends] for name, ends in ranges.items()}
        for batch, ids in zip(self._batches, self._ids, strict=True):
            batch.set_ranges({name: (low[ids], high[ids]) for name, (low, high) in whole.items()})

    def async_reset(self, seed: Seed = None, options: dict[str, Any] | None = None) -> None:
        """Reset all envs; `recv` returns their first observations, batch by batch."""
        self.check_open()
        if self._ready:
            raise HurtleError("reset while envs are running: call recv() until all are back.")
        if options and ("reset_mask" in options or any(np.ndim(value) for value in options.values())):
            raise HurtleError("In a pool, options are the same for all envs, and all envs are reset.")
        for batch, own in zip(self._batches, self._seeds(seed), strict=True):
            batch.async_reset(own, options)
        self._ready.extend(range(len(self._batches)))
        self._in_hand = None

    def send(self, actions: Any, env_id: Any = None) -> None:
        """Step the envs of the last `recv`, or those in `env_id`, which must be a batch that `recv` returned."""
        self.check_open()
        if env_id is None:
            index = self._in_hand
        else:
            index = next((k for k, ids in enumerate(self._ids) if np.array_equal(ids, env_id)), None)
        if index is None or index in self._ready:
            raise HurtleError("send() goes with envs that recv() returned: call recv() first, and send once.")
        self._batches[index].send(actions)
        self._ready.append(index)
        self._in_hand = None if index == self._in_hand else self._in_hand

    def recv(self) -> Results:
        """Return the results of the batch sent longest ago, with the index of each env in `infos["env_id"]`."""
        self.check_open()
        if not self._ready:
            raise HurtleError("recv() would wait forever: call async_reset() or send() first.")
        self._in_hand = self._ready.popleft()
        *outcome, infos = self._batches[self._in_hand].recv()
        return (*outcome, {**infos, "env_id": self._ids[self._in_hand].copy()})

    def reset(self, *, seed: Seed = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all envs and return the first batch."""
        self.check_open()
        self._ready.clear()
        for batch in self._batches:
            batch.discard_pending()
        self.async_reset(seed, options)
        obs, _, _, _, infos = self.recv()
        return obs, infos

    def step(self, actions: Any) -> Results:
        """`send`, then `recv`: takes the actions of one batch and returns the results of the next."""
        self.send(actions)
        return self.recv()

    def reset_env(
        self, index: int, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset one env that is not running, like `NativeVecEnv.reset_env`."""
        (index,) = self._idle(index).tolist()
        return self._batches[index // self.batch_size].reset_env(index % self.batch_size, seed=seed, options=options)

    def call(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        """`call("render")` renders every env, or those in `indices`; other names are read like `get_attr`."""
        ids = self._idle(indices)
        given: list[Any] = [None] * len(ids)
        for batch, places, own in self._shares(ids):
            for place, value in zip(places, batch.call(name, *args, indices=own, **kwargs), strict=True):
                given[place] = value
        return tuple(given)

    def get_attr(self, name: str, indices: Any = None) -> tuple[Any, ...]:
        """A State field, or a parameter or attribute of the env class, of every env or of those in `indices`."""
        return self.call(name, indices=indices)

    def set_attr(self, name: str, values: Any, indices: Any = None) -> None:
        """Set a State field of every env, or of those in `indices`: one value for all, or a list or tuple with one for each."""
        ids = self._idle(indices)
        each = self._value_of_each(name, values, len(ids))
        for batch, places, own in self._shares(ids):
            batch.set_attr(name, [each[place] for place in places], own)

    def render(self) -> tuple[Any, ...] | None:
        """Render every env in the `render_mode`."""
        return None if self.render_mode is None else tuple(p for batch in self._batches for p in batch.render() or ())

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of everything needed to continue bitwise, as in `NativeVecEnv.state_dict`.

        Array "envs" of batch 0 is "0.envs", and so on; results that `recv` has not returned yet are part of the state.
        """
        self.check_open()
        state = {f"{k}.{name}": array for k, batch in enumerate(self._batches) for name, array in batch.state_dict().items()}
        state["shape"] = np.array([self.num_envs, self.batch_size])
        state["ready"] = np.array(list(self._ready), np.int64)
        state["in_hand"] = np.array([-1 if self._in_hand is None else self._in_hand])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            HurtleError: The state is incomplete or belongs to other envs or batches; the message says what differs. Nothing
                was changed.
        """
        self.check_open()
        for name in ("shape", "ready", "in_hand"):
            if name not in state:
                raise HurtleError(f"The state of a pool has an array {name!r}; got {', '.join(sorted(state)) or 'nothing'}.")
        saved, mine = np.asarray(state["shape"]).tolist(), [self.num_envs, self.batch_size]
        if saved != mine:
            raise HurtleError(
                "The state is of a pool with num_envs={}, batch_size={}; this one has num_envs={}, batch_size={}.".format(
                    *saved, *mine
                )
            )
        checked = []
        for k, batch in enumerate(self._batches):
            own = {key.removeprefix(f"{k}."): array for key, array in state.items() if key.startswith(f"{k}.")}
            try:
                checked.append(batch.check_state(own))
            except HurtleError as error:
                raise HurtleError(f"Batch {k}: {error}") from None
        for batch, own in zip(self._batches, checked, strict=True):
            batch.restore(own)
        self._ready = deque(np.asarray(state["ready"]).tolist())
        in_hand = int(np.asarray(state["in_hand"])[0])
        self._in_hand = None if in_hand < 0 else in_hand

    def close_extras(self, **kwargs: Any) -> None:
        """End the helper threads."""
        for batch in self._batches:
            batch.close()

    def _idle(self, indices: Any) -> np.ndarray:
        """Indices as an array, checked: none of these envs may be running."""
        self.check_open()
        ids = np.array(self._indices(indices), np.int64)
        busy = np.unique(ids[np.isin(ids // self.batch_size, list(self._ready))]).tolist()
        if busy:
            raise HurtleError(f"Envs {busy} are still running: call recv() until they are back.")
        return ids

    def _shares(self, ids: np.ndarray) -> Iterator[tuple[NativeVecEnv, list[int], np.ndarray]]:
        """For each batch with some of the envs: the batch, their positions in `ids`, and their indices in the batch."""
        for k in np.unique(ids // self.batch_size).tolist():
            places = np.flatnonzero(ids // self.batch_size == k)
            yield self._batches[k], places.tolist(), ids[places] % self.batch_size

    def _seeds(self, seed: Seed) -> list[Seed]:
        """The seeds of each batch, all checked before any env is reset."""
        if seed is None:
            return [None] * len(self._batches)
        if isinstance(seed, str) or not isinstance(seed, Sequence | np.ndarray):
            check_seed(seed)
            return [int(seed) + int(ids[0]) for ids in self._ids]
        if len(seed) != self.num_envs:
            raise HurtleError(f"seed has {len(seed)} entries for {self.num_envs} envs.")
        for own in seed:
            if own is not None:
                check_seed(own)
        return [seed[ids[0] : ids[-1] + 1] for ids in self._ids]
