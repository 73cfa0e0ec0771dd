"""`ProcessVecEnv`: Python envs in worker processes with shared memory.

actions → shared rows → a command in each worker's pipe → workers step → shared rows → done messages → views. Workers block on
their pipe and the learner on the done pipe, so they can share cores. A dead or stuck worker raises an error or is restarted.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import time
import weakref
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from hurtle.errors import EnvFailedError, EnvTimeoutError, HurtleError, WorkerDiedError
from hurtle.native.threads import free_cores
from hurtle.vector import wire
from hurtle.vector.description import Description, EnvMaker
from hurtle.vector.env_rows import RowPlan, map_shared
from hurtle.vector.fleet import Fleet
from hurtle.vector.options import VecOptions
from hurtle.vector.pickling import dumps_by_value, refuse_inside_import
from hurtle.vector.python_vec import PythonVecEnv
from hurtle.vector.revival import Revival
from hurtle.vector.vec_env import VecEnvClosedError
from hurtle.vector.worker_process import WorkerProcess

_STEP_ALL = wire.frame(wire.STEP_ALL)
_SPINS = 20  # polls of the pipe before the learner sleeps
_MAX_RESTARTS = 3  # restarts of one worker without a step in between

_yield = getattr(os, "sched_yield", lambda: None)  # give this core to a worker
_Reset = tuple[int, int | None, dict[str, Any] | None]  # env, seed, options


class ProcessVecEnv(PythonVecEnv):
    """Envs in worker processes.

    Args:
        maker: Makes one env; pickled by value if needed, so that lambdas and closures work.
        options: Settings of the vector.
    """

    steps_elsewhere = True

    def __init__(self, maker: EnvMaker, options: VecOptions):
        refuse_inside_import("process")
        count = options.num_workers or min(options.num_envs, free_cores())
        bounds = np.linspace(0, options.num_envs, count + 1).astype(int).tolist()
        self._options = options
        self._fleet = Fleet([range(a, b) for a, b in pairwise(bounds)])
        self._stop = weakref.finalize(self, self._fleet.stop)
        self._restarts = [0] * count
        self._resetting: dict[int, _Reset] = {}  # running resets
        self._early: list[int] = []  # envs whose done messages were read early
        try:
            pickled = dumps_by_value((maker, options.emulate, options.check))
            for k in range(count):
                self._fleet.start(k)
            description = self._ask_description(pickled)
            plan = RowPlan.of(description, options.num_envs, count)
            rows = map_shared(self._fleet.memory, plan)
            self._setup = (maker, description, plan)
            for worker in self._fleet.workers:
                self._send_setup(worker)
            for worker in self._fleet.workers:
                self._expect(worker, wire.READY, options.start_timeout, rows.current)
        except BaseException:
            self._abort()
            raise
        self._owner = [worker.index for worker in self._fleet.workers for _ in worker.envs]
        self._next_check = 0.0
        super().__init__(description, options, rows)
        self._revival = Revival(rows, self._episodes, options)

    @property
    def num_workers(self) -> int:
        """Number of worker processes."""
        return len(self._fleet.shares)

    @property
    def worker_pids(self) -> list[int]:
        """The process id of each worker."""
        return [worker.process.pid for worker in self._fleet.workers]

    # Start-up.

    def _ask_description(self, pickled: bytes) -> Description:
        first = self._fleet.workers[0]
        first.send(wire.DESCRIBE, pickled)
        return pickle.loads(self._expect(first, wire.DESCRIPTION, self._options.start_timeout, None))

    def _send_setup(self, worker: WorkerProcess) -> None:
        maker, description, plan = self._setup
        options = self._options
        share = (len(worker.envs), worker.envs.start)
        worker.send(wire.SETUP, dumps_by_value((maker, *share, description, plan, options.autoreset_mode, options.check)))

    def _expect(self, worker: WorkerProcess, kind: int, timeout: float | None, current: Any) -> bytes:
        """Wait for the next frame of this kind, during set-up or a call; `timeout` applies to each env."""
        poll = select.poll()
        for fd in worker.watched:
            poll.register(fd, select.POLLIN)
        since, busy_with = time.monotonic(), -1
        while True:
            frame = worker.frames.pop()
            if frame is not None and frame[0] == kind:
                return frame[1]
            if frame is not None:
                self._handle(worker, *frame)
                continue
            if poll.poll(200):
                dead = worker.is_dead
                worker.frames.drain() if dead else worker.frames.feed()
                if dead and not worker.frames:
                    raise self._death_error(worker)
            if current is not None and current[worker.index] != busy_with:
                since, busy_with = time.monotonic(), int(current[worker.index])
            if timeout is not None and time.monotonic() - since > timeout:
                doing = f"Env {busy_with}" if current is not None else "The env's constructor or start-up check"
                raise EnvTimeoutError(f"{doing} did not answer within {timeout} s.{worker.request_stack_trace()}")

    # Steps and resets.

    def _step_all(self) -> None:
        if self._revival:
            self._post_steps(range(self.num_envs))
            self._collect(self.num_envs)
            return
        now = time.monotonic()
        for worker in list(self._fleet.workers):
            worker.since, worker.seen = now, -1
            worker.busy.update(worker.envs)
            try:
                os.write(worker.commands, _STEP_ALL)
            except BrokenPipeError:
                self._handle_death(worker)
        self._collect(self.num_envs)

    def _post_steps(self, ids: Sequence[int]) -> None:
        orders: dict[int, array[int]] = {}
        resets: list[_Reset] = []
        for index in ids:
            if self._revival.needs_reset(index):
                resets.append((index, None, None))
            else:
                orders.setdefault(self._owner[index], array("i")).append(index)
        for owner, order in orders.items():
            self._order(self._fleet.workers[owner], order, wire.STEP, order.tobytes())
        self._order_resets(resets)

    def _post_resets(self, resets: list[_Reset]) -> None:
        for index, *_ in resets:
            self._revival.cancel(index)
        self._order_resets(resets)

    def _order_resets(self, resets: Iterable[_Reset]) -> None:
        orders: dict[int, list[_Reset]] = {}
        for index, seed, options in resets:
            fallback = self._revival.prepare_reset(index)
            if seed is None and fallback is not None:
                seed = self._env_seeds[index] = fallback
            self._resetting[index] = reset = (index, seed, options)
            orders.setdefault(self._owner[index], []).append(reset)
        for owner, order in orders.items():
            self._order(self._fleet.workers[owner], [reset[0] for reset in order], wire.RESET, dumps_by_value(order))

    def _order(self, worker: WorkerProcess, ids: Sequence[int], kind: int, payload: bytes) -> None:
        worker.busy.update(ids)
        worker.since, worker.seen = time.monotonic(), -1
        try:
            worker.send(kind, payload)
        except BrokenPipeError:
            self._handle_death(worker)

    def _wait(self) -> list[int]:
        return self._collect(1)

    def _collect(self, count: int) -> list[int]:
        """Block until `count` envs are done; poll a few times before sleeping, since waking up takes long."""
        finished, self._early = self._early, []
        spins, limit = _SPINS, self._options.step_timeout
        nap = 1000.0 if limit is None else min(limit * 250, 1000)  # milliseconds
        while len(finished) < count:
            done, workers = self._fleet.poll(0 if spins else nap)
            if done:
                self._read_done(finished)
            for worker in workers:
                self._read_worker(worker)
            if spins and not (done or workers):
                spins -= 1
                _yield()
            if limit is not None and time.monotonic() > self._next_check:
                self._check_stuck(limit)
            if self._early:
                finished, self._early = finished + self._early, []
        return finished

    def _read_worker(self, worker: WorkerProcess) -> None:
        """Read a worker's frames, or handle its death."""
        if not self._read_frames(worker) or worker.is_dead:
            self._handle_death(worker)

    def _read_done(self, finished: list[int]) -> None:
        for message in memoryview(os.read(self._fleet.done, 1 << 16)).cast("i"):
            index = message & wire.INDEX
            worker = self._fleet.workers[index if message & wire.ALL else self._owner[index]]
            if message & wire.WITH_INFOS:
                worker.infos_due += 1
                while worker.infos_due > 0 and self._read_frames(worker):  # already written: this never waits
                    pass
            if message & wire.ALL:
                finished.extend(worker.envs)
                worker.busy.clear()
                self._restarts[worker.index] = 0
            else:
                worker.busy.discard(index)
                finished.append(index)
                if self._resetting.pop(index, None) is None:
                    self._restarts[worker.index] = 0
                else:
                    self._revival.was_reset(index, self._pending_infos)

    def _read_frames(self, worker: WorkerProcess) -> bool:
        alive = worker.frames.feed()
        self._handle_frames(worker)
        return alive

    def _handle_frames(self, worker: WorkerProcess) -> None:
        while (frame := worker.frames.pop()) is not None:
            self._handle(worker, *frame)

    def _handle(self, worker: WorkerProcess, kind: int, payload: bytes) -> None:
        if kind == wire.INFOS:
            for index, info in pickle.loads(payload):  # a restart may have been reported already
                self._pending_infos[index] = {**info, **self._pending_infos.get(index, {})}
            worker.infos_due -= 1
        elif kind == wire.ERROR:
            self._abort()
            _raise(*pickle.loads(payload))
        else:
            raise HurtleError(f"Worker {worker.index} sent an unexpected frame of kind {kind}.")

    # Faults.

    def _handle_death(self, worker: WorkerProcess) -> None:
        """Handle a dead worker: raise, or replace it."""
        error = self._death_error(worker)
        worker.process.kill()
        while self._fleet.has_done():  # envs that it finished before it died count
            self._read_done(self._early)
        worker.frames.drain()
        self._handle_frames(worker)  # raises the error that it wrote before it died, if any
        if not self._options.restart_workers:
            self._abort()
            raise error
        self._replace(worker, error)

    def _death_error(self, worker: WorkerProcess) -> WorkerDiedError:
        envs = f"envs {worker.envs.start} … {worker.envs.stop - 1}" if len(worker.envs) > 1 else f"env {worker.envs.start}"
        more = "" if self._options.restart_workers else " Pass restart_workers=True to replace such workers and continue."
        return WorkerDiedError(
            f"Worker {worker.index} (pid {worker.process.pid}, {envs}) {worker.cause_of_death()}.{more}{worker.stack_trace()}"
        )

    def _replace(self, worker: WorkerProcess, error: WorkerDiedError) -> None:
        index = worker.index
        while True:
            self._fleet.discard(worker)
            self._restarts[index] += 1
            if self._restarts[index] > _MAX_RESTARTS:
                self._abort()
                raise WorkerDiedError(f"Gave up after {_MAX_RESTARTS} restarts in a row. {error}")
            fresh = self._fleet.start(index)
            try:
                self._send_setup(fresh)
                self._expect(fresh, wire.READY, self._options.start_timeout, self._rows.current)
                break
            except (WorkerDiedError, BrokenPipeError):
                error = self._death_error(fresh)
                fresh.busy, worker = worker.busy, fresh
        resetting = worker.busy & self._resetting.keys()
        self._revival.lose(fresh.envs, resetting)
        again = [self._resetting[env] for env in sorted(resetting)]
        self._order_resets(again + [(env, None, None) for env in sorted(worker.busy - resetting)])

    def _check_stuck(self, timeout: float) -> None:
        now = time.monotonic()
        self._next_check = now + timeout / 4
        for worker in self._fleet.workers:
            if not worker.busy:
                continue
            env = int(self._rows.current[worker.index])
            if env != worker.seen:
                worker.seen, worker.since = env, now
            elif now - worker.since > timeout:
                where = worker.request_stack_trace()
                message = f"Env {env} (worker {worker.index}) has been busy for over {timeout} s (step_timeout).{where}"
                worker.process.kill()
                if not self._options.restart_workers:
                    self._abort()
                    raise EnvTimeoutError(message)
                self._handle_death(worker)

    def _abort(self) -> None:
        self._fleet.hurry()
        self._stop()

    def check_open(self) -> None:
        """Check that the envs can still be stepped."""
        if not self._stop.alive:
            raise VecEnvClosedError("This vector env is closed, or was ended by an earlier error; make a new one.")

    # Single envs.

    def _call(self, ids: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        answers = self._ask(ids, lambda chosen, positions: (wire.CALL, (chosen, name, args, kwargs)))
        return [answers[index] for index in ids]

    def _set_attr(self, ids: Sequence[int], name: str, values: Sequence[Any]) -> None:
        self._ask(ids, lambda chosen, positions: (wire.SET_ATTR, (chosen, name, [values[p] for p in positions])))

    def _ask(self, ids: Sequence[int], make: Any) -> dict[int, Any]:
        self.check_open()
        shares: dict[int, list[int]] = {}
        for position, index in enumerate(ids):
            shares.setdefault(self._owner[index], []).append(position)
        requests = {}
        for owner, positions in shares.items():
            kind, request = make([ids[p] for p in positions], positions)
            requests[owner] = (kind, dumps_by_value(request))
        try:
            return self._exchange(ids, shares, requests)
        except (EnvFailedError, WorkerDiedError):
            raise
        except BaseException:  # a timeout or Ctrl-C: late answers would be mistaken for those of later calls
            self._abort()
            raise

    def _exchange(self, ids: Sequence[int], shares: dict[int, list[int]], requests: dict[int, Any]) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        failure, dead = None, []
        for owner, request in requests.items():
            with contextlib.suppress(BrokenPipeError):  # noticed below
                self._fleet.workers[owner].send(*request)
        for owner, positions in shares.items():
            worker = self._fleet.workers[owner]
            try:
                frame = self._expect(worker, wire.RESULT, self._options.step_timeout, self._rows.current)
            except WorkerDiedError as error:
                dead.append((worker, error))
                continue
            values, failed = pickle.loads(frame)
            failure = failure or failed
            answers.update(zip([ids[p] for p in positions], values or [None] * len(positions), strict=True))
        for worker, died in dead:
            self._handle_death(worker)  # raises, unless the worker is replaced for the next call
            raise died
        if failure is not None:
            _raise(*failure)
        return answers

    def close_extras(self, **kwargs: Any) -> None:
        """Close the envs and end the workers; those that do not respond are killed."""
        self._stop()


def _raise(message: str, index: int, seed: int | None, cause: bytes | None) -> NoReturn:
    """Raise the error of an env in a worker, or the error that the request itself caused."""
    if index < 0 and cause:
        raise pickle.loads(cause)
    raise EnvFailedError(message, index, seed) from (pickle.loads(cause) if cause else None)
