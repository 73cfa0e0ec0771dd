"""`Job`, and the lanes that run jobs: `LoopLane` is the event loop itself, `ThreadLane` a thread that owns a backend.

jobs of one call → lane → backend → results → `finish` on the event loop. Knows nothing of queues.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

from hurtle.errors import ServingError
from hurtle.serving.backends.base import Backend
from hurtle.serving.messages import InferRequest, Outputs

log = logging.getLogger("hurtle.serving")
MakeBackend = Callable[[], Backend]
QUEUED, RUNNING, DONE = range(3)
CLOSE_SECONDS = 30.0
"""Seconds that closing a lane waits for its thread; after a longer call the thread closes the backend itself."""


class Job:
    """A request on its way through an executor.

    Args:
        request: The request to run.
        done: Called once with this job, on the event loop, when `result` is set; never after `Executor.cancel`.
        rows: Rows that it adds to a batch.
    """

    __slots__ = (
        "arrived",
        "batch",
        "done",
        "finished",
        "leads",
        "phases",
        "reply",
        "request",
        "result",
        "rows",
        "started",
        "state",
        "timer",
    )

    def __init__(self, request: InferRequest, done: Callable[[Job], None], rows: int = 1):
        self.request, self.done, self.rows = request, done, rows
        self.arrived = perf_counter_ns()
        self.started = self.finished = self.arrived
        self.batch = rows
        """Rows of the backend call that it ran in."""
        self.state = QUEUED
        self.timer: asyncio.TimerHandle | None = None
        self.result: Outputs | ServingError | None = None
        self.leads = False
        """Whether it is the first job of its call, which counts the call."""
        self.phases: tuple[int, int] | None = None
        """Nanoseconds of its call for preparing inputs and extracting outputs, if the backend measures them."""
        self.reply: Any = None
        """Free for the maker of the job, for what `done` needs."""


def run_jobs(backend: Backend, jobs: Sequence[Job]) -> None:
    """Run jobs in one call and set their results. If the call fails, each runs alone, so that only the bad request fails."""
    if backend.phases is not None:
        backend.phases.take()  # discard the phases of earlier calls, such as the warm-up
    started = perf_counter_ns()
    results: Sequence[Outputs | ServingError]
    if len(jobs) == 1:
        results = [_run_alone(backend, jobs[0].request)]
    else:
        try:
            results = backend.infer_batch([job.request for job in jobs])
            if len(results) != len(jobs):
                raise ValueError(f"infer_batch gave {len(results)} results for {len(jobs)} requests")
        except BaseException:
            results = [_run_alone(backend, job.request) for job in jobs]
    finished, rows = perf_counter_ns(), sum(job.rows for job in jobs)
    phases = None if backend.phases is None else backend.phases.take()
    jobs[0].leads = True
    for job, result in zip(jobs, results, strict=True):
        job.result, job.started, job.finished, job.batch, job.phases = result, started, finished, rows, phases


def _run_alone(backend: Backend, request: InferRequest) -> Outputs | ServingError:
    try:
        return backend.infer(request)
    except ServingError as error:
        return error
    except BaseException as error:  # an extension's panic or a backend's sys.exit must not stop the server
        log.exception("model %r failed on request %r", request.model, request.id)
        return ServingError("internal", f"Model {request.model!r} failed: {type(error).__name__}: {str(error)[:500]}")


def finish_job(job: Job) -> None:
    """Hand over a result. An error affects this client only: the other jobs of the call still need theirs."""
    try:
        job.done(job)
    except Exception:
        log.exception("the answer to request %r of model %r was lost", job.request.id, job.request.model)


class Lane:
    """Runs calls one after another, with a backend of its own."""

    backend: Backend

    def wait_until_made(self) -> None:
        """Wait for the backend; raises the error of making it."""

    def run(self, jobs: list[Job], finish: Callable[[Lane, Sequence[Job]], None]) -> None:
        """Run jobs in one call, then call `finish` on the event loop."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop, and close the backend. Blocks until the running call ends, so call it off the event loop."""
        raise NotImplementedError


def run_calls(lane: Lane, calls: queue.SimpleQueue[Any]) -> None:
    """The loop of a lane's thread: run calls until one is None, then close the backend."""
    while (call := calls.get()) is not None:
        jobs, finish, loop = call
        run_jobs(lane.backend, jobs)
        try:
            loop.call_soon_threadsafe(finish, lane, jobs)
        except RuntimeError:  # the event loop is closed: the server stopped without waiting
            break
    lane.backend.close()


class LoopLane(Lane):
    """The event loop itself: no hand-over to a thread, which costs more than a small model's call.

    Args:
        make: Makes the backend.
        large: Rows above which a call runs on a thread after all, so that others need not wait for it.
    """

    def __init__(self, make: MakeBackend, large: int = sys.maxsize):
        self.backend, self._large = make(), large
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        """Started by the first large call. A daemon thread of its own: neither exit nor other work waits for such a call."""

    def run(self, jobs: list[Job], finish: Callable[[Lane, Sequence[Job]], None]) -> None:
        """Run jobs now, or on the thread if they are large."""
        if len(jobs) == 1 and jobs[0].rows > self._large:
            if self._thread is None:
                self._thread = threading.Thread(target=run_calls, args=(self, self._calls), name="hurtle-large", daemon=True)
                self._thread.start()
            self._calls.put((jobs, finish, asyncio.get_running_loop()))
        else:
            run_jobs(self.backend, jobs)
            finish(self, jobs)

    def close(self) -> None:
        """Close the backend once no large call runs."""
        if self._thread is None:
            self.backend.close()
        else:
            self._calls.put(None)
            self._thread.join(timeout=CLOSE_SECONDS)


class ThreadLane(Lane):
    """A thread that owns a backend."""

    def __init__(self, make: MakeBackend):
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._made = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, args=(make,), name="hurtle-lane", daemon=True)
        self._thread.start()

    def wait_until_made(self) -> None:
        """Wait for the backend; raises the error of making it."""
        self._made.wait()
        if self._error is not None:
            raise self._error

    def run(self, jobs: list[Job], finish: Callable[[Lane, Sequence[Job]], None]) -> None:
        """Hand jobs to the thread."""
        self._calls.put((jobs, finish, asyncio.get_running_loop()))

    def close(self) -> None:
        """Stop the thread after its queued calls."""
        self._calls.put(None)
        self._thread.join(timeout=CLOSE_SECONDS)

    def _work(self, make: MakeBackend) -> None:
        try:
            self.backend = make()
        except BaseException as error:
            self._error = error
            return
        finally:
            self._made.set()
        run_calls(self, self._calls)
