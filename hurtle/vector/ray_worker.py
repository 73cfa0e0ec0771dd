"""`EnvHost`: the class of the Ray actors: a `Shard` of envs in the actor's memory, one remote call per step.

action bytes → Shard → changed rows and infos, pickled into one frame. Imports neither torch nor Ray.
"""

from __future__ import annotations

import os
import pickle
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from hurtle.errors import EnvFailedError
from hurtle.vector.description import describe
from hurtle.vector.env_rows import Rows, private_rows
from hurtle.vector.pickling import dumps, load, portable
from hurtle.vector.shard import Shard

DONE, FAILED, STUCK = range(3)  # kinds of frames
_FIELDS = ("obs", "rewards", "terminated", "truncated", "over", "agent_mask", "action_mask")


class EnvHost:
    """Some envs of a vector. All methods but `hello` and `close` take pickled requests and return a pickled (kind, content).

    Ray passes bytes on unchanged; arrays would arrive read-only and take 1.5 times as long.
    """

    def __init__(self) -> None:
        self._shard: Shard | None = None
        self._watch: _Watch | None = None

    def hello(self, paths: list[str]) -> tuple[int, str]:
        """Add the learner's import paths; returns process id and machine."""
        sys.path += [path for path in paths if path not in sys.path]
        return os.getpid(), platform.node()

    def describe(self, payload: bytes) -> bytes:
        """The `Description` of the envs, from a throw-away instance."""
        maker, flat, check = load(payload)
        return self._answer(lambda: describe(maker, flat, check))

    def set_up(self, maker: bytes, payload: bytes) -> bytes:
        """Make the envs."""
        make, _, check = load(maker)
        envs, description, plan, autoreset_mode, step_timeout = pickle.loads(payload)

        def build() -> None:
            self._rows = private_rows(plan)  # rows of all envs, so that indices agree; unused rows take no memory
            self._envs = envs
            self._fields = row_fields(self._rows)
            self._same_step = autoreset_mode is AutoresetMode.SAME_STEP
            self._shard = Shard([make] * len(envs), envs.start, description, self._rows, autoreset_mode, check=check)
            if step_timeout is not None:
                self._watch = _Watch(step_timeout, self._rows.current)

        return self._answer(build)

    def step(self, ids: Sequence[int] | None, actions: bytes) -> bytes:
        """Step these envs, or all, with their rows of actions."""
        shard = self._open_shard()
        chosen = slice(self._envs.start, self._envs.stop) if ids is None else np.asarray(ids)
        rows = self._rows.actions
        rows[chosen] = np.frombuffer(actions, rows.dtype).reshape(-1, *rows.shape[1:])

        def run() -> Any:
            if ids is None:
                shard.step_all()
            else:
                for index in ids:
                    shard.step(index)
            return self._changes(chosen)

        return self._answer(run)

    def reset(self, payload: bytes) -> bytes:
        """Start episodes: a list of (index, seed, options)."""
        shard, resets = self._open_shard(), load(payload)

        def run() -> Any:
            for index, seed, options in resets:
                shard.reset(index, seed, options)
            return self._changes(np.array([index for index, *_ in resets]))

        return self._answer(run)

    def call(self, payload: bytes) -> bytes:
        """Call a method of some envs, or read an attribute."""
        shard, (ids, name, args, kwargs) = self._open_shard(), load(payload)
        return self._answer(lambda: [shard.call(index, name, args, kwargs) for index in ids])

    def set_attr(self, payload: bytes) -> bytes:
        """Set an attribute of some envs, one value for each."""
        shard, (ids, name, values) = self._open_shard(), load(payload)

        def run() -> list[None]:
            for index, value in zip(ids, values, strict=True):
                shard.set_attr(index, name, value)
            return [None] * len(ids)

        return self._answer(run)

    def close(self) -> None:
        """Close the envs."""
        if self._shard is not None:
            self._shard.close()

    def _open_shard(self) -> Shard:
        assert self._shard is not None
        return self._shard

    def _changes(self, chosen: Any) -> tuple[list[np.ndarray], np.ndarray | None, list[Any]]:
        """The data for the learner: rows, final observations of ended episodes, and non-empty infos."""
        rows, collected = self._rows, self._open_shard().infos
        over = rows.over[chosen]
        final = rows.final_obs[chosen][over] if self._same_step and over.any() else None
        infos = collected.copy()
        collected.clear()
        return [getattr(rows, name)[chosen] for name in self._fields], final, infos

    def _answer(self, work: Callable[[], Any]) -> bytes:
        try:
            with self._watch or nullcontext():
                content = work()
        except _Stuck:
            return dumps((STUCK, (int(self._rows.current[0]), traceback.format_exc().rstrip())))
        except EnvFailedError as error:
            return dumps((FAILED, (str(error), error.env_index, error.seed, portable(error.__cause__))))
        return dumps((DONE, content))


class _Stuck(BaseException):
    """Raised inside an env that takes too long; not an `Exception`, so that `except Exception` in the env does not catch it."""


class _Watch:
    """Interrupts an env that takes longer than `timeout` seconds, so that the traceback shows where it is stuck.

    A thread checks that the shard makes progress. If not, it signals the main thread, where Ray runs the envs; that interrupts
    waits and loops in Python. Native code that never returns is left to the learner, which kills the process.
    """

    def __init__(self, timeout: float, current: np.ndarray):
        self._timeout, self._current = timeout, current
        self._turn = 0  # odd while envs run
        self._late: tuple[int, int] | None = None
        signal.signal(signal.SIGUSR1, self._interrupt)
        threading.Thread(target=self._look, daemon=True).start()

    def __enter__(self) -> None:
        self._turn += 1

    def __exit__(self, *error: object) -> None:
        self._turn += 1

    def _position(self) -> tuple[int, int]:
        return self._turn, int(self._current[0])

    def _look(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        seen, since = self._position(), time.monotonic()
        while True:
            time.sleep(self._timeout / 4)
            now, position = time.monotonic(), self._position()
            if position != seen or position[0] % 2 == 0:
                seen, since = position, now
            elif now - since >= self._timeout:
                self._late = position
                signal.pthread_kill(main, signal.SIGUSR1)

    def _interrupt(self, number: int, frame: Any) -> None:
        if self._late == self._position():  # else it has made progress since
            raise _Stuck


def row_fields(rows: Rows) -> list[str]:
    """The arrays that are sent with each step; both sides use this list."""
    return [name for name in _FIELDS if getattr(rows, name).size]
