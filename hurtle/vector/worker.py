"""The worker process: reads commands from a pipe, steps its `Shard` of envs in shared memory, reports when they are done.

Started by `ProcessVecEnv` with file descriptors as arguments; imports neither torch nor the user's `__main__`.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import pickle
import signal
import sys
import traceback
from array import array
from collections.abc import Callable
from time import perf_counter
from typing import Any

import gymnasium

from hurtle.errors import EnvFailedError, HurtleError
from hurtle.vector import wire
from hurtle.vector.description import describe
from hurtle.vector.env_rows import map_shared
from hurtle.vector.pickling import dumps, load, portable
from hurtle.vector.shard import Shard

_REPORT_AFTER = 50e-6  # seconds for which finished envs may wait to be reported together
_ATOMIC = 512  # bytes that a pipe writes atomically on every system


def main() -> None:
    """Serve the learner until its end of the command pipe closes."""
    worker, commands, frames, done, life, memory, trace = map(int, sys.argv[1:])
    _die_with_learner(life)
    faulthandler.enable(trace)
    faulthandler.register(signal.SIGUSR1, trace, all_threads=True)
    served = Worker(worker, commands, frames, done, memory)
    try:
        served.run()
    except BrokenPipeError:
        pass  # the learner is gone
    finally:
        served.close()


def _die_with_learner(life: int) -> None:
    """End this process when the learner's end of `life` closes, even inside a step that never returns."""
    if sys.platform == "linux":  # the kernel then sends SIGIO, which ends the process by default; needs no thread or GIL
        fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpid())  # the process group, so that the env's subprocesses end too
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)


class Worker:
    """One process's share of the envs."""

    def __init__(self, index: int, commands: int, frames: int, done: int, memory: int):
        self._index, self._frames, self._done, self._memory = index, frames, done, memory
        self._reader = wire.FrameReader(commands)
        self._shard: Shard | None = None
        self._finished = array("i")

    def run(self) -> None:
        """Execute commands until the learner is gone."""
        handlers = {
            wire.DESCRIBE: self._describe,
            wire.SETUP: self._set_up,
            wire.RESET: self._reset,
            wire.STEP: self._step,
            wire.STEP_ALL: self._step_all,
            wire.CALL: self._call,
            wire.SET_ATTR: self._set_attr,
        }
        while True:
            command = self._reader.pop()
            if command is None:
                if not self._reader.feed():
                    return
                continue
            try:
                handlers[command[0]](command[1])
            except BrokenPipeError:
                raise
            except EnvFailedError as error:
                self._fail(error)
            except HurtleError as error:  # the request itself is wrong
                self._send(wire.ERROR, (str(error), -1, None, portable(error)))
            except Exception as error:
                text = "".join(traceback.format_exception(error))
                self._send(wire.ERROR, (f"Worker {self._index} failed: {error}\n\n{text}", -1, None, None))

    def close(self) -> None:
        """Close the envs."""
        if self._shard is not None:
            self._shard.close()

    def _describe(self, payload: bytes) -> None:
        maker, flat, check = load(payload)
        self._send(wire.DESCRIPTION, describe(maker, flat, check))

    def _set_up(self, payload: bytes) -> None:
        maker, count, first, description, plan, autoreset_mode, check = load(payload)
        rows = map_shared(self._memory, plan)
        self._shard = Shard([maker] * count, first, description, rows, autoreset_mode, self._index, check)
        for slot in self._shard.slots:
            if isinstance(slot.env, gymnasium.Env) and slot.env.has_wrapper_attr("work_ahead"):
                slot.env.get_wrapper_attr("work_ahead")()
        self._all = array("i", [self._index | wire.ALL]).tobytes()
        self._all_with_infos = array("i", [self._index | wire.ALL | wire.WITH_INFOS]).tobytes()
        self._send(wire.READY, None)

    def _reset(self, payload: bytes) -> None:
        assert self._shard is not None
        for index, seed, options in pickle.loads(payload):
            self._shard.reset(index, seed, options)
            self._finished.append(index)
        self._report()

    def _step_all(self, payload: bytes) -> None:
        shard = self._shard
        assert shard is not None
        shard.step_all()
        if shard.infos:
            self._send_infos()
            os.write(self._done, self._all_with_infos)
        else:
            os.write(self._done, self._all)

    def _step(self, payload: bytes) -> None:
        assert self._shard is not None
        since = perf_counter()
        for index in memoryview(payload).cast("i"):
            self._shard.step(index)
            self._finished.append(index)
            now = perf_counter()
            if now - since > _REPORT_AFTER:  # a slow env is reported at once, cheap ones together
                self._report()
                since = now
        self._report()

    def _report(self) -> None:
        """Report the envs that are done. Infos are sent first, so that they have arrived when the report is read."""
        assert self._shard is not None
        finished = self._finished
        if not finished:
            return
        if self._shard.infos:
            self._send_infos()
            finished[-1] |= wire.WITH_INFOS
        data = memoryview(finished.tobytes())
        for start in range(0, len(data), _ATOMIC):
            os.write(self._done, data[start : start + _ATOMIC])
        del finished[:]

    def _send_infos(self) -> None:
        assert self._shard is not None
        infos = self._shard.infos
        self._send(wire.INFOS, infos)
        infos.clear()

    def _call(self, payload: bytes) -> None:
        assert self._shard is not None
        ids, name, args, kwargs = load(payload)
        shard = self._shard
        self._answer(lambda: [shard.call(index, name, args, kwargs) for index in ids])

    def _set_attr(self, payload: bytes) -> None:
        assert self._shard is not None
        ids, name, values = load(payload)
        shard = self._shard
        self._answer(lambda: list(map(shard.set_attr, ids, [name] * len(ids), values)))

    def _answer(self, run: Callable[[], list[Any]]) -> None:
        """Send the results of a call, or the error of an env, which ends neither worker nor vector."""
        try:
            answer = dumps((run(), None))
        except EnvFailedError as error:
            answer = dumps((None, _travelling(error)))
        except Exception as error:
            answer = dumps((None, (f"The env's return value cannot be pickled: {error}", -1, None, None)))
        wire.write_all(self._frames, wire.frame(wire.RESULT, answer))

    def _send(self, kind: int, value: Any) -> None:
        wire.write_all(self._frames, wire.frame(kind, dumps(value)))

    def _fail(self, error: EnvFailedError) -> None:
        self._send(wire.ERROR, _travelling(error))


def _travelling(error: EnvFailedError) -> tuple[str, int, int | None, bytes | None]:
    """An error in parts that can be pickled, even if the exception itself cannot."""
    return str(error), error.env_index, error.seed, portable(error.__cause__)
