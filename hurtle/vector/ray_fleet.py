"""`Fleet`: the Ray actors of one vector env: starts them, calls them, finds out why they died, ends them.

requests → remote calls → frames → contents, or errors that name worker and envs. Knows nothing of rows or the order of steps.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hurtle.errors import EnvFailedError, EnvTimeoutError, HurtleError, WorkerDiedError
from hurtle.vector import ray_worker
from hurtle.vector.description import Description, EnvMaker
from hurtle.vector.env_rows import RowPlan
from hurtle.vector.options import VecOptions
from hurtle.vector.pickling import dumps_by_value
from hurtle.vector.ray_cluster import cluster_cpus, free_cpus, join, leave, ray

_PATIENCE = 3.0  # seconds that stop() gives the envs to close
_PATIENCE_AFTER_FAULT = 0.3  # the same after a fault, whose error must not be delayed

_Host = ray.remote(num_cpus=1)(ray_worker.EnvHost)


@dataclass(eq=False)
class Worker:
    """The learner's handle on an actor."""

    index: int
    envs: range
    actor: Any
    pid: int = 0
    machine: str = ""
    last_answer: float = 0.0  # when it last answered
    restarts: int = 0  # since it last made a step

    def __str__(self) -> str:
        envs = f"envs {self.envs.start} … {self.envs.stop - 1}" if len(self.envs) > 1 else f"env {self.envs.start}"
        return f"Worker {self.index} ({f'pid {self.pid} on {self.machine}' if self.pid else 'not yet placed'}, {envs})"


class Fleet:
    """The actors of one vector env; outlives the vector env just long enough to end them.

    Args:
        options: Settings of the vector env.

    Attributes:
        hurry: Whether stop() follows a fault.
    """

    def __init__(self, options: VecOptions):
        self._options = options
        self._owner = os.getpid()
        self.workers: list[Worker] = []
        self.hurry = False
        join(options.num_workers or 1)

    def start(self, maker: EnvMaker) -> tuple[Description, RowPlan]:
        """Start the actors and make the envs; returns the description of the envs and the plan of their rows."""
        options = self._options
        count = options.num_workers or max(1, min(options.num_envs, int(cluster_cpus())))
        bounds = np.linspace(0, options.num_envs, count + 1).astype(int).tolist()
        self.workers = [Worker(k, range(*edges), _Host.remote()) for k, edges in enumerate(pairwise(bounds))]
        self._await_start(self.workers)
        self._maker = ray.put(dumps_by_value((maker, options.emulate, options.check)))
        description = self._ask_new({self.workers[0].actor.describe.remote(self._maker): self.workers[0]})[0]
        plan = RowPlan.of(description, options.num_envs)
        self._setup = (description, plan, options.autoreset_mode, options.step_timeout)
        self._set_up(self.workers)
        return description, plan

    def restart(self, worker: Worker) -> None:
        """Replace a dead actor by one with new envs."""
        worker.actor = _Host.remote()
        self._await_start([worker])
        self._set_up([worker])

    def stop(self) -> None:
        """End all actors: let them close their envs, then kill those that take too long, and leave Ray."""
        if os.getpid() != self._owner:  # a forked copy must not end its parent's actors
            return
        workers, self.workers = self.workers, []
        if not ray.is_initialized():  # the actors are gone, and a call would start a new Ray
            workers = []
        with contextlib.suppress(Exception):  # Ray may have been shut down in between
            closing = [worker.actor.close.remote() for worker in workers]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=_PATIENCE_AFTER_FAULT if self.hurry else _PATIENCE)
            for worker in workers:
                ray.kill(worker.actor)
        leave()

    # Answers.

    def gather(self, refs: dict[Any, Worker], timeout: float | None, late: str) -> list[Any]:
        """The results of these calls, or the first error as soon as there is one; actors that take too long are killed.

        Args:
            refs: The calls and their workers.
            timeout: Seconds to wait; None waits forever.
            late: The reason in the error message of an actor that took too long.
        """
        with contextlib.suppress(ray.exceptions.RayError):  # the loop below finds out which call failed
            ray.get(list(refs), timeout=timeout)
        ready, missing = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        answers = {ref: self.unpack(refs[ref], self.fetch(refs[ref], ref)) for ref in ready}
        for ref in missing:
            ray.kill(refs[ref].actor)
        if missing:
            raise EnvTimeoutError(f"{refs[missing[0]]} does not answer: {late}.")
        return [answers[ref] for ref in refs]

    def fetch(self, worker: Worker, ref: Any) -> Any:
        """Wait for a call and return its result.

        Raises:
            WorkerDiedError: The actor died.
            EnvFailedError: The call itself failed, for example because a module is missing there.
        """
        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            raise EnvFailedError(f"{worker} failed.\n\n{error}", -1) from error
        except ray.exceptions.RayError as error:
            more = "" if self._options.restart_workers else " Pass restart_workers=True to replace such workers and continue."
            raise WorkerDiedError(f"{worker} died.{more}\n\nRay says: {error}") from error

    def unpack(self, worker: Worker, frame: bytes) -> Any:
        """The content of a frame.

        Raises:
            EnvTimeoutError: An env was stuck.
            EnvFailedError: An env raised.
        """
        kind, content = pickle.loads(frame)
        if kind == ray_worker.STUCK:
            index, trace = content
            raise EnvTimeoutError(f"{self.stuck(f'Env {index}', worker)}\n\nWhere it was:\n{trace}")
        if kind == ray_worker.FAILED:
            message, index, seed, cause = content
            raise EnvFailedError(message, index, seed) from (pickle.loads(cause) if cause else None)
        return content

    def stuck(self, who: str, worker: Worker) -> str:
        """The message for an env that takes too long."""
        return f"{who} (worker {worker.index}) has been busy for over {self._options.step_timeout} s (step_timeout)."

    # Start-up.

    def _await_start(self, workers: list[Worker]) -> None:
        """Wait until Ray has placed these actors."""
        timeout, asked = self._options.start_timeout, len(workers)
        refs = {worker.actor.hello.remote(sys.path): worker for worker in workers}
        if asked > cluster_cpus():
            short = f"{asked} Ray workers need {asked} CPUs and the cluster has {cluster_cpus():g}"
            print(f"hurtle: {short}; waiting up to {timeout:g} s (start_timeout) for more.", file=sys.stderr)
        ready, late = ray.wait(list(refs), num_returns=asked, timeout=timeout)
        for ref in late:
            ray.kill(refs[ref].actor)
        if late:
            raise HurtleError(
                f"Ray started {len(ready)} of {asked} workers within {timeout:g} s (start_timeout). They need {asked} CPUs, "
                f"one each; the cluster has {cluster_cpus():g}, of which {free_cpus():g} are free. "
                "Pass a smaller num_workers, add nodes, or raise start_timeout."
            )
        for ref, worker in refs.items():
            worker.pid, worker.machine = self.fetch(worker, ref)

    def _set_up(self, workers: list[Worker]) -> None:
        requests = [pickle.dumps((worker.envs, *self._setup)) for worker in workers]
        self._ask_new({w.actor.set_up.remote(self._maker, r): w for w, r in zip(workers, requests, strict=True)})

    def _ask_new(self, refs: dict[Any, Worker]) -> list[Any]:
        timeout = self._options.start_timeout
        return self.gather(refs, timeout, f"the env's constructor took over {timeout:g} s (start_timeout)")
