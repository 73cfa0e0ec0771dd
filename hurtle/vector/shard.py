"""`Shard`: some Python envs stepped one after the other, writing into their `Rows`; what serial, process and ray run.

action row → env.step → observation, reward, flags written in place; non-empty infos collected. Knows no processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from hurtle.emulation.agents import AgentRows
from hurtle.emulation.checks import check_outcome
from hurtle.emulation.single import EmulatedEnv
from hurtle.errors import EmulationError, EnvFailedError
from hurtle.vector.description import CONSTRUCTOR, Description, EnvMaker, env_failure, prepare
from hurtle.vector.rows import Rows

_CHECKED_STEPS = 3


class Shard:
    """Envs `first … first + len(makers) - 1` of a vector.

    Args:
        makers: One callable per env.
        first: Index of the first env in the whole vector; `rows` are those of the whole vector.
        description: Of these envs.
        rows: Where results go and actions come from.
        autoreset_mode: What happens when an episode ends.
        worker: Which entry of `rows.current` says what this shard is doing.

    Attributes:
        infos: Pairs (env, info) of what the envs had to say since the list was last emptied.
    """

    def __init__(
        self,
        makers: Sequence[EnvMaker],
        first: int,
        description: Description,
        rows: Rows,
        autoreset_mode: AutoresetMode,
        worker: int = 0,
        check: bool = True,
    ):
        self.first = first
        self.infos: list[tuple[int, dict[str, Any]]] = []
        self._rows = rows
        self._worker = worker
        self._current: Any = memoryview(rows.current.data)
        self._plain_actions = description.actions.is_plain
        own = rows.actions[first : first + len(makers)]
        self._actions = description.actions.batch(own) if self._plain_actions else own
        self.slots: list[Any] = []
        try:
            for index, maker in enumerate(makers, first):
                self._current[worker] = index
                make = partial(_make, maker, description.flat, check)
                made = self._guarded(index, None, CONSTRUCTOR, make)
                slot = _Slot if description.agents is None else _AgentsSlot
                self.slots.append(slot(made, index, description, rows, autoreset_mode, self.infos, check))
        except BaseException:
            self.close()
            raise
        self._readers = [] if self._plain_actions else [description.actions.reader(row) for row in own]

    def reset(self, index: int, seed: int | None, options: dict[str, Any] | None) -> None:
        """Begin an episode of env `index`."""
        slot = self.slots[index - self.first]
        self._current[self._worker] = index
        if seed is not None:
            slot.seed = seed
        self._guarded(index, slot.seed, "reset", lambda: slot.reset(seed, options))

    def step_all(self) -> None:
        """Step every env with its row of actions."""
        # A copy: an env may keep its action, and the rows are overwritten.
        actions = self._actions.copy() if self._plain_actions else [read() for read in self._readers]
        current, worker, index = self._current, self._worker, self.first
        try:
            for slot, action in zip(self.slots, actions, strict=True):
                current[worker] = index
                slot.step(action)
                index += 1
        except Exception as error:
            raise self._failure(index, "step", error) from error

    def step(self, index: int) -> None:
        """Step env `index` with its row of actions."""
        local = index - self.first
        self._current[self._worker] = index
        try:
            self.slots[local].step(self._actions[local].copy() if self._plain_actions else self._readers[local]())
        except Exception as error:
            raise self._failure(index, "step", error) from error

    def call(self, index: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of an env, or read an attribute that is not callable."""
        env = self.slots[index - self.first].env
        self._current[self._worker] = index

        def run() -> Any:
            found = _attribute(env, name)
            return found(*args, **kwargs) if callable(found) else found

        return self._guarded(index, self.slots[index - self.first].seed, name, run)

    def set_attr(self, index: int, name: str, value: Any) -> None:
        """Set an attribute where the env's wrappers already have it, else on the env itself."""
        env = self.slots[index - self.first].env

        def run() -> None:
            if hasattr(env, "set_wrapper_attr"):
                env.set_wrapper_attr(name, value)
            else:
                setattr(getattr(env, "unwrapped", env), name, value)

        self._guarded(index, self.slots[index - self.first].seed, f"set_attr {name!r}", run)

    def close(self) -> None:
        """Close every env; the first error is raised when all have been tried."""
        slots, self.slots = self.slots, []
        failed: BaseException | None = None
        for slot in slots:
            try:
                slot.env.close()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _guarded(self, index: int, seed: int | None, doing: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:
            raise env_failure(index, seed, doing, error) from error

    def _failure(self, index: int, doing: str, error: Exception) -> EnvFailedError:
        return env_failure(index, self.slots[index - self.first].seed, doing, error)


def _make(maker: EnvMaker, flat: bool, check: bool) -> Any:
    return prepare(maker(), flat, check)


def _attribute(env: Any, name: str) -> Any:
    return env.get_wrapper_attr(name) if hasattr(env, "get_wrapper_attr") else getattr(env, name)


class _Slot:
    """A single-agent env and its rows."""

    def __init__(
        self,
        env: gymnasium.Env,
        index: int,
        description: Description,
        rows: Rows,
        autoreset_mode: AutoresetMode,
        infos: list[tuple[int, dict[str, Any]]],
        check: bool,
    ):
        self.env = env
        self.seed: int | None = None
        self._index = index
        self._layout = description.layout
        self._obs_row, self._final_row = rows.obs[index], rows.final_obs[index]
        self._write = description.layout.writer(self._obs_row)
        self._write_final = description.layout.writer(self._final_row)
        if isinstance(env, EmulatedEnv) and env.layout is not None:  # it writes into the row itself
            env.bind(self._obs_row)
            self._write = _nothing
            self._write_final = self._copy_row
        # memoryviews: half the cost of NumPy's item assignment
        self._rewards: Any = memoryview(rows.rewards.data)
        self._terminated, self._truncated = memoryview(rows.terminated.data), memoryview(rows.truncated.data)
        self._over = memoryview(rows.over.data)
        self._mask = rows.action_mask[index] if description.mask_size else None
        self._infos = infos
        self._same_step = autoreset_mode is AutoresetMode.SAME_STEP
        self._next_step = autoreset_mode is AutoresetMode.NEXT_STEP
        self._ended = False
        self._env_step = env.step
        self._checks_left = _CHECKED_STEPS if check else 0
        self._check_reset = check
        if check:
            self._env_step = self._checked_step

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        obs, info = self.env.reset(seed=seed, options=options)
        if self._check_reset:
            self._layout.check(obs)
            self._check_reset = False
        self._write(obs)
        self._record(0.0, False, False)
        self._ended = False
        if info or self._mask is not None:
            self._tell(info)

    def step(self, action: Any) -> None:
        if self._ended and self._next_step:
            return self.reset(None, None)
        obs, reward, terminated, truncated, info = self._env_step(action)
        i = self._index
        self._rewards[i] = reward
        self._terminated[i] = terminated
        self._truncated[i] = truncated
        if terminated or truncated:
            return self._end(obs, info)
        self._over[i] = False
        self._write(obs)
        if info or self._mask is not None:
            self._tell(info)

    def _end(self, obs: Any, info: dict[str, Any]) -> None:
        self._over[self._index] = self._ended = True
        if not self._same_step:
            self._write(obs)
            return self._tell(info)
        self._write_final(obs)
        obs, next_info = self.env.reset()
        self._ended = False
        self._write(obs)
        self._tell({**next_info, "final_info": info} if info else next_info)

    def _record(self, reward: float, terminated: bool, truncated: bool) -> None:
        i = self._index
        self._rewards[i], self._terminated[i], self._truncated[i] = reward, terminated, truncated
        self._over[i] = False

    def _tell(self, info: dict[str, Any]) -> None:
        if self._mask is not None:
            self._mask[...] = info.get("action_mask", True)
            info = {key: value for key, value in info.items() if key != "action_mask"}
        if info:
            self._infos.append((self._index, info))

    def _copy_row(self, obs: Any) -> None:
        self._final_row[...] = self._obs_row

    def _checked_step(self, action: Any) -> Any:
        outcome = self.env.step(action)
        if not isinstance(outcome, tuple) or len(outcome) != 5:
            raise EmulationError(f"step() must return (obs, reward, terminated, truncated, info), got {outcome!r}.")
        check_outcome(*outcome[1:])
        self._layout.check(outcome[0])
        self._checks_left -= 1
        if self._checks_left == 0:
            self._env_step = self.env.step
        return outcome


class _AgentsSlot:
    """An env of several agents and its rows."""

    def __init__(
        self,
        env: Any,
        index: int,
        description: Description,
        rows: Rows,
        autoreset_mode: AutoresetMode,
        infos: list[tuple[int, dict[str, Any]]],
        check: bool,
    ):
        self.env = env
        self.seed: int | None = None
        self._index = index
        mask = rows.action_mask[index] if description.mask_size else None
        outcome = (rows.rewards[index], rows.terminated[index], rows.truncated[index])
        self._agent_rows = AgentRows(rows.obs[index], *outcome, rows.agent_mask[index], mask)
        # An autoreset writes what the next action is chosen from, and leaves the outcome of the step alone.
        self._next_rows = replace(self._agent_rows, **{k: np.zeros_like(v) for k, v in zip(_OUTCOME, outcome, strict=True)})
        self._final_row, self._obs_row, self._over = rows.final_obs[index], rows.obs[index], rows.over
        self._infos = infos
        self._same_step = autoreset_mode is AutoresetMode.SAME_STEP
        self._next_step = autoreset_mode is AutoresetMode.NEXT_STEP
        self._ended = False

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._tell(self.env.reset_into(self._agent_rows, seed=seed, options=options))
        self._ended = self._over[self._index] = False

    def step(self, actions: np.ndarray) -> None:
        if self._ended and self._next_step:
            return self.reset(None, None)
        over, infos = self.env.step_into(actions, self._agent_rows)
        self._over[self._index] = over
        if over and self._same_step:
            self._final_row[...] = self._obs_row
            next_infos = self.env.reset_into(self._next_rows)
            infos = {**next_infos, "final_info": infos} if infos else next_infos
        else:
            self._ended = over
        self._tell(infos)

    def _tell(self, infos: dict[str, Any]) -> None:
        if infos:
            self._infos.append((self._index, infos))


_OUTCOME = ("rewards", "terminated", "truncated")


def _nothing(obs: Any) -> None:
    pass
