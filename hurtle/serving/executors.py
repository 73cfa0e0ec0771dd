"""Executors run models: `Inline` at once, `Queued` on lanes (`worker`: one request per call; `batch`: requests fused).

job → queue → lane (the event loop itself, or a thread that owns a backend) → `Job.done` on the event loop. Knows no transport.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Sequence
from time import monotonic, perf_counter_ns

from hurtle.errors import ServingError
from hurtle.serving.backends.base import Backend
from hurtle.serving.lanes import (
    DONE,
    QUEUED,
    RUNNING,
    Job,
    Lane,
    LoopLane,
    MakeBackend,
    ThreadLane,
    finish_job,
    run_jobs,
)

LONE_PASSES = 8
"""After this many passes of the event loop with a single request each, only every ninth request is followed by a check whether
it came alone: the check takes a pass of its own, which slows down a lone client."""


class Executor:
    """Runs the jobs of one model."""

    backend: Backend
    """A backend to ask for metadata and rows; lanes may have their own."""
    lanes: int
    """Number of threads; 0: the event loop itself."""

    def submit(self, job: Job) -> None:
        """Run a job, now or later.

        Raises:
            ServingError: The queue is full.
        """
        raise NotImplementedError

    def cancel(self, job: Job) -> None:
        """Give up a job: `done` is not called, and a job that has not begun does not run."""
        raise NotImplementedError

    @property
    def queued(self) -> int:
        """Number of jobs that wait."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the lanes; nothing may be queued or running."""
        raise NotImplementedError


class Inline(Executor):
    """Runs each request at once, on the event loop: fastest for one client and a small model."""

    lanes = 0

    def __init__(self, make: MakeBackend):
        self.backend = make()

    def submit(self, job: Job) -> None:
        """Run a job."""
        job.state = RUNNING
        run_jobs(self.backend, (job,))
        job.state = DONE
        job.done(job)

    def cancel(self, job: Job) -> None:
        """Do nothing: the job has run."""

    @property
    def queued(self) -> int:
        """Always 0."""
        return 0

    def close(self) -> None:
        """Close the backend."""
        self.backend.close()


class Queued(Executor):
    """A queue in front of lanes.

    An idle lane takes a request at once if the last one came alone, else everything that the event loop reads in one pass. A
    lane that returns from a call and finds fewer than `batch_size` rows waits for more, until the oldest request is
    `batch_timeout` old.

    Args:
        make: Makes a backend; called once per lane, in its thread.
        lanes: Number of threads; 0 runs on the event loop.
        batch_size: Most rows in one call; a larger request runs alone. None: one request per call (`worker`).
        batch_timeout: Seconds that a batch may wait to fill up.
        max_queue: Requests that may wait; further ones are refused.
        large: Rows above which a request does not run on the event loop.
    """

    def __init__(
        self,
        make: MakeBackend,
        lanes: int = 1,
        batch_size: int | None = None,
        batch_timeout: float = 0.0,
        max_queue: int = 1024,
        large: int = sys.maxsize,
    ):
        self.lanes, self.batch_size, self.batch_timeout, self.max_queue = lanes, batch_size, batch_timeout, max_queue
        self._jobs: deque[Job] = deque()
        self._queued = self._rows = 0
        """Jobs and rows that wait; `_jobs` may also hold cancelled ones."""
        self._planned = False
        """Whether `_dispatch` is scheduled."""
        self._is_crowded = False
        """Whether the last pass of the event loop brought several jobs, so that waiting for the next pays."""
        self._taken_at_once = False
        """Whether a lane has taken a job in this pass already."""
        self._lone_passes = self._not_looked_at = 0
        """Consecutive passes with one request; requests taken since then without checking for others."""
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lanes: list[Lane] = [ThreadLane(make) for _ in range(lanes)] or [LoopLane(make, large)]
        try:
            for lane in self._lanes:
                lane.wait_until_made()
        except BaseException:
            self.close()
            raise
        self._idle = list(self._lanes)
        self.backend = self._lanes[0].backend

    def submit(self, job: Job) -> None:
        """Queue a job; it is dispatched once the event loop has read what else has arrived."""
        if self._queued >= self.max_queue + len(self._idle):  # idle lanes will take theirs in a moment
            raise ServingError(
                "resource_exhausted",
                f"Model {job.request.model!r} is busy: {self.max_queue} requests are waiting already; retry later.",
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
        if (self.lanes or not self._idle) and job.request.deadline is not None:
            job.timer = self._loop.call_later(job.request.deadline - monotonic(), self._expire, job)

    def cancel(self, job: Job) -> None:
        """Give up a job."""
        self._drop(job)

    @property
    def queued(self) -> int:
        """Number of jobs that wait."""
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
        """End a job that nobody waits for, and purge the queue once most of it is dead."""
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
        """Whether an idle lane should take the job without waiting for what else this pass brings."""
        if job.request.deadline is not None and job.request.deadline <= monotonic():
            return False
        if self.batch_size is None:
            return True
        if self._is_crowded or self._planned:
            return False
        if self._lone_passes >= LONE_PASSES and self._not_looked_at < LONE_PASSES:
            self._not_looked_at += 1
            return True
        self._not_looked_at = 0
        self._taken_at_once = True
        self._plan()  # to see after this pass whether it came alone
        return True

    def _plan(self) -> None:
        self._planned = True
        self._loop.call_soon(self._dispatch)  # type: ignore[union-attr]

    def _dispatch(self) -> None:
        """Give each idle lane a call."""
        self._planned = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_crowded = self._queued + self._taken_at_once > 1
        self._lone_passes = 0 if self._is_crowded else self._lone_passes + 1
        self._taken_at_once = False
        for _ in range(len(self._idle)):
            jobs = self._take()
            if not jobs:
                break
            self._idle.pop().run(jobs, self._finish)

    def _take(self) -> list[Job]:
        """The oldest live jobs that fit into one call."""
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
        """A lane has returned from a call; runs on the event loop."""
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
        """Whether the waiting jobs are few and young enough to wait for more; starts the timer if so."""
        if not self.batch_timeout or self._is_full():
            return False
        oldest = next(job for job in self._jobs if job.state == QUEUED)
        left = self.batch_timeout - (perf_counter_ns() - oldest.arrived) / 1e9
        if left <= 0:
            return False
        self._timer = self._loop.call_later(left, self._dispatch)  # type: ignore[union-attr]
        return True
