"""Who runs a model, and when: `Inline` at once, `Queued` on lanes (`worker`: one request each; `batch`: requests fused).

job → queue → lane (the event loop itself, or a thread that owns a backend) → `Job.done` on the event loop. Knows no transport.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter_ns
from typing import Any

from hurtle.errors import ServingError
from hurtle.serving.backends.base import Backend
from hurtle.serving.messages import InferRequest, Outputs

log = logging.getLogger("hurtle.serving")
MakeBackend = Callable[[], Backend]
QUEUED, RUNNING, DONE = range(3)


class Job:
    """A request on its way through an executor.

    Args:
        request: What to run.
        done: Called once, on the event loop, with this job when `result` is there; never after `Executor.cancel`.
        rows: What it adds to a batch.
    """

    __slots__ = (
        "arrived",
        "batch",
        "done",
        "finished",
        "leads",
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
        """Rows of the call that it ran in."""
        self.state = QUEUED
        self.timer: asyncio.TimerHandle | None = None
        self.result: Outputs | ServingError | None = None
        self.leads = False
        """Whether it is the first of its call, the one to count it by."""
        self.reply: Any = None
        """Whoever made the job may keep here what `done` needs."""


def run_jobs(backend: Backend, jobs: Sequence[Job]) -> None:
    """Run jobs in one call and give each its result. When the call fails, each runs alone: one bad request fails by itself."""
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
    jobs[0].leads = True
    for job, result in zip(jobs, results, strict=True):
        job.result, job.started, job.finished, job.batch = result, started, finished, rows


def _run_alone(backend: Backend, request: InferRequest) -> Outputs | ServingError:
    try:
        return backend.infer(request)
    except ServingError as error:
        return error
    except BaseException as error:  # panics of extensions and sys.exit of a backend are no reason to stop serving
        log.exception("model %r failed on request %r", request.model, request.id)
        return ServingError("internal", f"Model {request.model!r} failed: {type(error).__name__}: {str(error)[:500]}")


def finish_job(job: Job) -> None:
    """Hand over a result. What goes wrong there is this client's loss alone: others of the call wait for theirs."""
    try:
        job.done(job)
    except Exception:
        log.exception("the answer to request %r of model %r was lost", job.request.id, job.request.model)


class Executor:
    """What the shell asks of either kind."""

    backend: Backend
    """One to ask for metadata and rows; lanes may have their own."""
    lanes: int
    """Threads; 0: the event loop itself."""

    def submit(self, job: Job) -> None:
        """Run a job, now or later.

        Raises:
            ServingError: The queue is full.
        """
        raise NotImplementedError

    def cancel(self, job: Job) -> None:
        """Nobody waits for it any more: `done` will not be called, and if it has not begun it will not be run."""
        raise NotImplementedError

    @property
    def queued(self) -> int:
        """Jobs that wait."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the lanes; call it when nothing is queued or running."""
        raise NotImplementedError


class Inline(Executor):
    """Runs each request at once, on the event loop: nothing is faster for one client and a small model."""

    lanes = 0

    def __init__(self, make: MakeBackend):
        self.backend = make()

    def submit(self, job: Job) -> None:
        """Run it."""
        job.state = RUNNING
        run_jobs(self.backend, (job,))
        job.state = DONE
        job.done(job)

    def cancel(self, job: Job) -> None:
        """Too late: it has run."""

    @property
    def queued(self) -> int:
        """Never any."""
        return 0

    def close(self) -> None:
        """Give the backend's memory back."""
        self.backend.close()


class Queued(Executor):
    """A queue in front of lanes.

    A lane that is idle takes a request at once if it came alone the last time, else all that the event loop reads in one pass.
    A lane that comes back from a call and finds fewer rows than `batch_size` waits for more, until the oldest request is
    `batch_timeout` old.

    Args:
        make: Makes a backend; called once per lane, in its thread.
        lanes: Threads; 0 runs on the event loop.
        batch_size: Rows of one call at most; a larger request is run alone. None: one request a call (`worker`).
        batch_timeout: Seconds.
        max_queue: Requests that may wait; more are refused.
    """

    def __init__(
        self,
        make: MakeBackend,
        lanes: int = 1,
        batch_size: int | None = None,
        batch_timeout: float = 0.0,
        max_queue: int = 1024,
    ):
        self.lanes, self.batch_size, self.batch_timeout, self.max_queue = lanes, batch_size, batch_timeout, max_queue
        self._jobs: deque[Job] = deque()
        self._queued = self._rows = 0
        """Jobs and rows that wait; `_jobs` may also hold some that nobody waits for any more."""
        self._planned = False
        """Whether `_dispatch` will be called soon."""
        self._is_crowded = False
        """Whether the last pass of the event loop brought more than one job: then the next is worth waiting for."""
        self._taken_at_once = False
        """Whether this pass has given a lane its first job already."""
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lanes: list[Lane] = [ThreadLane(make) for _ in range(lanes)] or [LoopLane(make)]
        try:
            for lane in self._lanes:
                lane.wait_until_made()
        except BaseException:
            self.close()
            raise
        self._idle = list(self._lanes)
        self.backend = self._lanes[0].backend

    def submit(self, job: Job) -> None:
        """Queue it; the lanes are looked after when the loop has read what else is there."""
        if self._queued >= self.max_queue + len(self._idle):  # idle lanes take theirs in a moment
            raise ServingError(
                "resource_exhausted", f"Model {job.request.model!r} is busy: {self.max_queue} requests wait already; try later."
            )
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        if self._idle and not self._queued and self._can_take_at_once(job):
            job.state = RUNNING
            self._idle.pop().run([job], self._finish)
            return
        self._jobs.append(job)
        self._queued += 1
        self._rows += job.rows
        if self._idle and not self._planned and (self._timer is None or self._is_full()):
            self._plan()
        if self.lanes and job.request.deadline is not None:
            job.timer = self._loop.call_later(job.request.deadline - monotonic(), self._expire, job)

    def cancel(self, job: Job) -> None:
        """Forget it."""
        self._drop(job)

    @property
    def queued(self) -> int:
        """Jobs that wait."""
        return self._queued

    def close(self) -> None:
        """Stop the lanes."""
        if self._timer is not None:
            self._timer.cancel()
        for lane in self._lanes:
            lane.close()

    def _leave_queue(self, job: Job) -> None:
        if job.state == QUEUED:
            self._queued -= 1
            self._rows -= job.rows

    def _end(self, job: Job) -> None:
        job.state = DONE
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None

    def _expire(self, job: Job) -> None:
        if job.state == QUEUED:
            self._fail_late(job)

    def _drop(self, job: Job) -> None:
        """End a job that nobody waits for. What is dead in the queue must not outgrow what lives there."""
        was_queued = job.state == QUEUED
        self._leave_queue(job)
        self._end(job)
        if was_queued:
            job.request.inputs = {}
            if len(self._jobs) > 2 * self._queued + 64:
                self._jobs = deque(job for job in self._jobs if job.state == QUEUED)

    def _fail_late(self, job: Job) -> None:
        self._drop(job)
        job.started = job.finished = perf_counter_ns()
        job.result = ServingError(
            "deadline_exceeded",
            f"The deadline passed while the request waited for model {job.request.model!r}; it was not run.",
        )
        job.done(job)

    def _can_take_at_once(self, job: Job) -> bool:
        """Whether an idle lane should not wait for what else this pass of the event loop brings."""
        if job.request.deadline is not None and job.request.deadline <= monotonic():
            return False
        if self.batch_size is None:
            return True
        if self._is_crowded or self._planned:
            return False
        self._taken_at_once = True
        self._plan()  # after this pass, to see whether it came alone
        return True

    def _plan(self) -> None:
        self._planned = True
        self._loop.call_soon(self._dispatch)  # type: ignore[union-attr]

    def _dispatch(self) -> None:
        """Give each idle lane a call; then the event loop reads what has come meanwhile."""
        self._planned = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_crowded = self._queued + self._taken_at_once > 1
        self._taken_at_once = False
        for _ in range(len(self._idle)):
            jobs = self._take()
            if not jobs:
                break
            self._idle.pop().run(jobs, self._finish)

    def _take(self) -> list[Job]:
        """The oldest jobs that fit in one call, without those that nobody waits for any more."""
        jobs: list[Job] = []
        rows, now = 0, 0.0
        while self._jobs:
            job = self._jobs[0]
            if job.state != QUEUED:
                self._jobs.popleft()
                continue
            if job.request.deadline is not None:
                now = now or monotonic()
                if job.request.deadline <= now:
                    self._jobs.popleft()
                    self._fail_late(job)
                    continue
            if jobs and (self.batch_size is None or rows + job.rows > self.batch_size):
                break
            self._jobs.popleft()
            self._leave_queue(job)
            job.state = RUNNING
            jobs.append(job)
            rows += job.rows
        return jobs

    def _finish(self, lane: Lane, jobs: Sequence[Job]) -> None:
        """On the event loop: a lane is back."""
        self._idle.append(lane)
        for job in jobs:
            if job.state == RUNNING:
                self._end(job)
                finish_job(job)
        if self._queued and not self._planned and self._timer is None and not self._waits_for_more():
            self._plan()

    def _is_full(self) -> bool:
        return self.batch_size is None or self._rows >= self.batch_size

    def _waits_for_more(self) -> bool:
        """Whether what waits is little and young enough for a lane that just came back to wait for more."""
        if not self.batch_timeout or self._is_full():
            return False
        oldest = next(job for job in self._jobs if job.state == QUEUED)
        left = self.batch_timeout - (perf_counter_ns() - oldest.arrived) / 1e9
        if left <= 0:
            return False
        self._timer = self._loop.call_later(left, self._dispatch)  # type: ignore[union-attr]
        return True


class Lane:
    """Runs calls one after the other with a backend of its own."""

    backend: Backend

    def wait_until_made(self) -> None:
        """Until the backend is there; raises what its making raised."""

    def run(self, jobs: list[Job], finish: Callable[[Lane, Sequence[Job]], None]) -> None:
        """Run jobs, then call `finish` on the event loop."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop, and close the backend."""
        raise NotImplementedError


class LoopLane(Lane):
    """The event loop itself: no hand-over to a thread, which costs more than a small model's call."""

    def __init__(self, make: MakeBackend):
        self.backend = make()

    def run(self, jobs: list[Job], finish: Callable[[Lane, Sequence[Job]], None]) -> None:
        """Run them now."""
        run_jobs(self.backend, jobs)
        finish(self, jobs)

    def close(self) -> None:
        """Close the backend."""
        self.backend.close()


class ThreadLane(Lane):
    """A thread with a backend."""

    def __init__(self, make: MakeBackend):
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._made = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, args=(make,), name="hurtle-lane", daemon=True)
        self._thread.start()

    def wait_until_made(self) -> None:
        """Until the backend is there; raises what its making raised."""
        self._made.wait()
        if self._error is not None:
            raise self._error

    def run(self, jobs: list[Job], finish: Callable[[Lane, Sequence[Job]], None]) -> None:
        """Hand them over."""
        self._calls.put((jobs, finish, asyncio.get_running_loop()))

    def close(self) -> None:
        """Stop the thread when it has done what it was given."""
        self._calls.put(None)
        self._thread.join(timeout=30)

    def _work(self, make: MakeBackend) -> None:
        try:
            self.backend = make()
        except BaseException as error:
            self._error = error
            return
        finally:
            self._made.set()
        while (call := self._calls.get()) is not None:
            jobs, finish, loop = call
            run_jobs(self.backend, jobs)
            try:
                loop.call_soon_threadsafe(finish, self, jobs)
            except RuntimeError:  # the loop is closed: the server was stopped without waiting
                break
        self.backend.close()
