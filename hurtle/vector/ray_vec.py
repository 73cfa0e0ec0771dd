"""`RayVecEnv`: Python envs in Ray actors, anywhere in a cluster.

actions → one remote call per actor → frames → the learner's rows → views. A dead or stuck actor raises an error or is replaced.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hurtle.errors import EnvFailedError, EnvTimeoutError, HurtleError, WorkerDiedError
from hurtle.vector import ray_worker
from hurtle.vector.description import EnvMaker
from hurtle.vector.env_rows import private_rows
from hurtle.vector.options import VecOptions
from hurtle.vector.pickling import dumps_by_value, refuse_inside_import
from hurtle.vector.python_vec import PythonVecEnv
from hurtle.vector.ray_cluster import ray
from hurtle.vector.ray_fleet import Fleet, Worker
from hurtle.vector.revival import Revival
from hurtle.vector.vec_env import VecEnvClosedError

_GRACE = 1.0  # seconds beyond step_timeout after which a silent actor is given up
_MAX_RESTARTS = 3  # restarts of one worker without a step in between

_Reset = tuple[int, int | None, dict[str, Any] | None]


@dataclass
class _Call:
    """A running remote call; `resets` is None for a step."""

    worker: Worker
    ids: Sequence[int]
    resets: list[_Reset] | None = None
    posted: float = field(default_factory=time.monotonic)


class RayVecEnv(PythonVecEnv):
    """Envs in Ray actors that use one CPU each; starts Ray if it is not running, and `close` then shuts it down.

    In a pool, the envs of one actor that are sent together come back together.

    Args:
        maker: Makes one env; pickled by value if needed, so that lambdas and closures work.
        options: Settings of the vector.
    """

    steps_elsewhere = True
    resumes_exactly = False

    def __init__(self, maker: EnvMaker, options: VecOptions):
        refuse_inside_import("ray")
        self._options = options
        self._calls: dict[Any, _Call] = {}  # by ObjectRef, oldest first
        self._next_check = 0.0
        self._fleet = Fleet(options)
        self._stop = weakref.finalize(self, self._fleet.stop)
        atexit.register(self._stop)  # runs before Ray's own handler, which would leave the envs open
        try:
            description, plan = self._fleet.start(maker)
        except BaseException:
            self._abort()
            raise
        self._owner = [worker for worker in self._fleet.workers for _ in worker.envs]
        self._num_workers = len(self._fleet.workers)
        rows = private_rows(plan)
        self._fields = [getattr(rows, name) for name in ray_worker.row_fields(rows)]
        super().__init__(description, options, rows)
        self._revival = Revival(rows, self._episodes, options)

    @property
    def num_workers(self) -> int:
        """Number of Ray actors."""
        return self._num_workers

    # Steps and resets.

    def _step_all(self) -> None:
        self._post_steps(range(self.num_envs))
        refs = list(self._calls)
        try:
            frames = ray.get(refs, timeout=self._longest_silence(max(len(call.ids) for call in self._calls.values())))
        except ray.exceptions.RayError:  # the loop below finds out which call failed
            frames = []
        done = 0
        for ref, frame in zip(refs, frames, strict=False):
            if ref in self._calls:  # unless its worker has just been replaced
                done += len(self._receive(ref, frame))
        while done < self.num_envs:
            done += len(self._wait())

    def _post_steps(self, ids: Sequence[int]) -> None:
        back = [index for index in ids if self._revival.needs_reset(index)] if self._revival else []
        for worker, chosen in self._by_worker([index for index in ids if index not in back] if back else ids).items():
            whole = len(chosen) == len(worker.envs)
            envs = worker.envs if whole else chosen
            actions = self._rows.actions[_rows_of(envs)].tobytes()
            self._calls[worker.actor.step.remote(None if whole else chosen, actions)] = _Call(worker, envs)
        self._post([(index, None, None) for index in back])

    def _post_resets(self, resets: list[_Reset]) -> None:
        self.check_open()
        for index, *_ in resets:
            self._revival.cancel(index)
        self._post(resets)

    def _post(self, resets: list[_Reset]) -> None:
        of = {}
        for index, seed, options in resets:
            fallback = self._revival.prepare_reset(index)
            if seed is None and fallback is not None:
                seed = self._env_seeds[index] = fallback
            of[index] = (index, seed, options)
        for worker, chosen in self._by_worker(list(of)).items():
            share = [of[index] for index in chosen]
            self._calls[worker.actor.reset.remote(dumps_by_value(share))] = _Call(worker, chosen, share)

    def _by_worker(self, ids: Sequence[int]) -> dict[Worker, list[int]]:
        shares: dict[Worker, list[int]] = {}
        for index in ids:
            shares.setdefault(self._owner[index], []).append(index)
        return shares

    def _wait(self) -> list[int]:
        timeout = self._options.step_timeout
        while True:
            if timeout is not None and time.monotonic() > self._next_check:
                self._check_silent()
                self._next_check = time.monotonic() + timeout / 2
            ready, _ = ray.wait(list(self._calls), num_returns=1, timeout=None if timeout is None else min(timeout, _GRACE))
            if ready and (finished := self._receive(ready[0])):
                return finished

    def _receive(self, ref: Any, frame: bytes | None = None) -> list[int]:
        """Store the results of a call; returns the envs that are done, none if their worker had to be replaced."""
        call = self._calls[ref]
        try:
            changes = self._fleet.unpack(call.worker, self._fleet.fetch(call.worker, ref) if frame is None else frame)
        except (WorkerDiedError, EnvTimeoutError) as error:
            self._handle_death(call.worker, error)
            return []
        except EnvFailedError:
            self._abort()
            raise
        del self._calls[ref]
        call.worker.last_answer = time.monotonic()
        self._take(call.ids, *changes)
        if call.resets is None:
            call.worker.restarts = 0
        else:
            for index in call.ids:
                self._revival.was_reset(index, self._pending_infos)
        return list(call.ids)

    def _take(self, ids: Sequence[int], arrays: list[np.ndarray], final: np.ndarray | None, infos: list[Any]) -> None:
        rows = _rows_of(ids)
        for mine, theirs in zip(self._fields, arrays, strict=True):
            mine[rows] = theirs
        if final is not None:
            self._rows.final_obs[np.array(ids)[self._rows.over[rows]]] = final
        self._pending_infos.update(infos)

    # Faults.

    def _longest_silence(self, num_envs: int) -> float | None:
        """Seconds within which an actor that steps this many envs reports which of them is stuck."""
        timeout = self._options.step_timeout
        return None if timeout is None else timeout * (num_envs + 0.5) + _GRACE

    def _check_silent(self) -> None:
        now, seen = time.monotonic(), set()
        for call in list(self._calls.values()):
            if call.worker.index in seen:  # queued behind an earlier call
                continue
            seen.add(call.worker.index)
            limit = self._longest_silence(len(call.ids))
            if limit is not None and now - max(call.posted, call.worker.last_answer) > limit:
                who = f"Env {call.ids[0]}" if len(call.ids) == 1 else f"One of the envs {list(call.ids)}"
                message = f"{self._fleet.stuck(who, call.worker)} It cannot be interrupted."
                self._handle_death(call.worker, EnvTimeoutError(message))

    def _handle_death(self, worker: Worker, error: HurtleError) -> None:
        """Handle a dead or stuck actor: raise, or replace it."""
        ray.kill(worker.actor)
        try:
            if not self._options.restart_workers:
                raise error
            self._replace(worker, error)
        except BaseException:
            self._abort()
            raise

    def _replace(self, worker: Worker, error: HurtleError) -> None:
        orphans = [call for call in self._calls.values() if call.worker is worker]
        self._calls = {ref: call for ref, call in self._calls.items() if call.worker is not worker}
        while True:
            worker.restarts += 1
            if worker.restarts > _MAX_RESTARTS:
                raise type(error)(f"Gave up after {_MAX_RESTARTS} restarts in a row. {error}")
            try:
                self._fleet.restart(worker)
                break
            except WorkerDiedError as again:
                error = again
        repeated = [reset for call in orphans for reset in call.resets or ()]
        begun: list[_Reset] = [(index, None, None) for call in orphans if call.resets is None for index in call.ids]
        self._revival.lose(worker.envs, {index for index, *_ in repeated})
        self._post(repeated + begun)

    def _abort(self) -> None:
        self._fleet.hurry = True
        self._stop()

    def check_open(self) -> None:
        """Check that the envs can still be stepped."""
        if not self._stop.alive:
            raise VecEnvClosedError("This vector env is closed, or was ended by an earlier error; make a new one.")
        if not ray.is_initialized():
            raise HurtleError("Ray was shut down, and the envs in it are gone; make a new vector env.")

    # Single envs.

    def _call(self, ids: Sequence[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        answers = self._ask(ids, lambda actor, share: actor.call.remote(dumps_by_value((share, name, args, kwargs))))
        return [answers[index] for index in ids]

    def _set_attr(self, ids: Sequence[int], name: str, values: Sequence[Any]) -> None:
        of = dict(zip(ids, values, strict=True))
        self._ask(ids, lambda actor, share: actor.set_attr.remote(dumps_by_value((share, name, [of[i] for i in share]))))

    def _ask(self, ids: Sequence[int], post: Callable[[Any, list[int]], Any]) -> dict[int, Any]:
        self.check_open()
        shares = self._by_worker(ids)
        if not shares:
            return {}
        refs = {post(worker.actor, share): worker for worker, share in shares.items()}
        limit = self._longest_silence(2 * max(len(worker.envs) for worker in shares))  # a running step, and this call
        late = f"an env has been busy for over {self._options.step_timeout} s (step_timeout)"
        try:
            answers = self._fleet.gather(refs, limit, late)
        except (WorkerDiedError, EnvTimeoutError):
            if not self._options.restart_workers:  # else the next step replaces it
                self._abort()
            raise
        pairs = zip(shares.values(), answers, strict=True)
        return {index: answer for share, given in pairs for index, answer in zip(share, given, strict=True)}

    def close_extras(self, **kwargs: Any) -> None:
        """Close the envs and end the actors, killing those that do not respond; then shut down Ray if we started it."""
        self._stop()


def _rows_of(ids: Sequence[int]) -> Any:
    return slice(ids.start, ids.stop) if isinstance(ids, range) else ids
