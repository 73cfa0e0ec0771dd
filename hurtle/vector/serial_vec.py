"""`SerialVecEnv`: Python envs stepped one after the other in this process: the baseline for the other back ends."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from hurtle.vector.description import EnvMaker, describe
from hurtle.vector.env_rows import RowPlan, private_rows
from hurtle.vector.options import VecOptions
from hurtle.vector.python_vec import PythonVecEnv
from hurtle.vector.shard import Shard
from hurtle.vector.vec_env import VecEnvClosedError


class SerialVecEnv(PythonVecEnv):
    """All envs in this process. As a pool, it steps envs when `recv` needs them, in the order in which they were sent.

    Args:
        maker: Makes one env.
        options: Settings of the vector.
    """

    def __init__(self, maker: EnvMaker, options: VecOptions):
        description = describe(maker, options.emulate, options.check)
        plan = RowPlan.of(description, options.num_envs)
        rows = private_rows(plan)
        self._shard = Shard([maker] * options.num_envs, 0, description, rows, options.autoreset_mode, check=options.check)
        self._ended = False
        self._posted: deque[tuple[int, Any]] = deque()
        super().__init__(description, options, rows)

    @property
    def num_workers(self) -> int:
        """Always 1: this process."""
        return 1

    def _post_resets(self, resets: list[tuple[int, int | None, dict[str, Any] | None]]) -> None:
        self._posted.extend((index, (seed, options)) for index, seed, options in resets)

    def _post_steps(self, ids: Sequence[int]) -> None:
        self._posted.extend((index, None) for index in ids)

    def _wait(self) -> list[int]:
        index, reset = self._posted.popleft()
        if reset is None:
            self._shard.step(index)
        else:
            self._shard.reset(index, *reset)
        self._take_infos()
        return [index]

    def _step_all(self) -> None:
        self._shard.step_all()
        self._take_infos()

    def _take_infos(self) -> None:
        if self._shard.infos:
            self._pending_infos.update(self._shard.infos)
            self._shard.infos.clear()

    def _call(self, ids: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        return [self._shard.call(index, name, args, kwargs) for index in ids]

    def _set_attr(self, ids: Sequence[int], name: str, values: Sequence[Any]) -> None:
        for index, value in zip(ids, values, strict=True):
            self._shard.set_attr(index, name, value)

    def _abort(self) -> None:
        self._ended = True
        with contextlib.suppress(Exception):  # the original error matters more
            self._shard.close()

    def check_open(self) -> None:
        """Check that the envs can still be stepped."""
        if self._ended:
            raise VecEnvClosedError("This vector env is closed, or was ended by an earlier error; make a new one.")

    def close_extras(self, **kwargs: Any) -> None:
        """Close the envs."""
        self._ended = True
        self._shard.close()
