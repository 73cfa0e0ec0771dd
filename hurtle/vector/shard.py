"""`Shard`: some Python envs, stepped one after the other, that write into their `Rows`; serial, process and ray all run it.

action row → env.step → observation, reward, flags written in place; non-empty infos collected. Knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gymnasium.vector import AutoresetMode

from hurtle.emulation.flat_layout import SpaceLayout, same_layout
from hurtle.errors import EmulationError, EnvFailedError
from hurtle.vector.description import CONSTRUCTOR, Description, EnvMaker, env_failure, prepare
from hurtle.vector.env_rows import Rows
from hurtle.vector.slots import AgentsSlot, EnvSlot


class Shard:
    """Envs `first … first + len(makers) - 1` of a vector.

    Args:
        makers: One callable per env.
        first: Index of the first env in the whole vector; `rows` are those of the whole vector.
        description: The description of these envs.
        rows: The arrays that results are written to and actions are read from.
        autoreset_mode: What to do when an episode ends.
        worker: The entry of `rows.current` that shows which env this shard is stepping.

    Attributes:
        infos: Pairs (env, info) of the non-empty infos since the list was last cleared.
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
        self._steps = [0] * len(makers)  # steps of each env alone …
        self._rounds = 0  # … and steps of all envs together
        self.slots: list[Any] = []
        try:
            for index, maker in enumerate(makers, first):
                self._current[worker] = index
                make = partial(_make, maker, description, check)
                made = self._guarded(index, None, CONSTRUCTOR, make)
                slot = EnvSlot if description.agents is None else AgentsSlot
                self.slots.append(slot(made, index, description, rows, autoreset_mode, self.infos, check))
        except BaseException:
            self.close()
            raise
        self._readers = [] if self._plain_actions else [description.actions.reader(row) for row in own]

    def reset(self, index: int, seed: int | None, options: dict[str, Any] | None) -> None:
        """Start an episode of env `index`."""
        slot = self.slots[index - self.first]
        self._current[self._worker] = index
        if seed is not None:
            slot.seed = seed
        self._steps[index - self.first] = -self._rounds
        self._guarded(index, slot.seed, "reset", lambda: slot.reset(seed, options))

    def step_all(self) -> None:
        """Step every env with its row of actions."""
        # A copy, since an env may keep its action and the rows are overwritten.
        actions = self._actions.copy() if self._plain_actions else [read() for read in self._readers]
        current, worker, index = self._current, self._worker, self.first
        self._rounds += 1
        try:
            for slot, action in zip(self.slots, actions):  # noqa: B905 (strict is slower, and both have one entry per env)
                current[worker] = index
                slot.step(action)
                index += 1
        except Exception as error:
            raise self._failure(index, "step", error) from error

    def step(self, index: int) -> None:
        """Step env `index` with its row of actions."""
        local = index - self.first
        self._current[self._worker] = index
        self._steps[local] += 1
        try:
            self.slots[local].step(self._actions[local].copy() if self._plain_actions else self._readers[local]())
        except Exception as error:
            raise self._failure(index, "step", error) from error

    def call(self, index: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of an env, or read an attribute if it is not callable."""
        env = self.slots[index - self.first].env
        self._current[self._worker] = index

        def run() -> Any:
            found = _attribute(env, name)
            return found(*args, **kwargs) if callable(found) else found

        return self._guarded(index, self.slots[index - self.first].seed, f"the call of {name!r}", run)

    def set_attr(self, index: int, name: str, value: Any) -> None:
        """Set an attribute on the wrapper that already has it, else on the env itself."""
        env = self.slots[index - self.first].env

        def run() -> None:
            if hasattr(env, "set_wrapper_attr"):
                env.set_wrapper_attr(name, value)
            else:
                setattr(getattr(env, "unwrapped", env), name, value)

        slot = self.slots[index - self.first]
        self._guarded(index, slot.seed, f"set_attr {name!r}", run)
        if name == "saved_state":
            slot.resume()

    def close(self) -> None:
        """Close every env, then raise the first error, if any."""
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
        local = index - self.first
        return env_failure(index, self.slots[local].seed, doing, error, self._steps[local] + self._rounds)


def _make(maker: EnvMaker, description: Description, check: bool) -> Any:
    env = prepare(maker(), description.flat, check)
    if description.agents is None:
        for what, wanted in (("observation", description.observation_space), ("action", description.action_space)):
            space = getattr(env, f"{what}_space")
            # Custom spaces may not implement equality; what counts is that their layouts are the same.
            if space != wanted and not same_layout(SpaceLayout(space), SpaceLayout(wanted)):
                env.close()
                raise EmulationError(f"{what}_space: expected {wanted}, like the first env, got {space}.")
    return env


def _attribute(env: Any, name: str) -> Any:
    return env.get_wrapper_attr(name) if hasattr(env, "get_wrapper_attr") else getattr(env, name)
