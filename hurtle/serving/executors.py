"""Who runs a model, and when: `Inline` at once, `Queued` on lanes (`worker`: one request each; `batch`: requests fused).

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
"""After so many passes of the event loop in turn with one request each, only every ninth is followed by a look at whether it
came alone: looking takes a pass of its own, which one client alone would notice."""


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
        """Jobs and rows that wait; `_jobs` may also hold some that nobody waits for any more."""
        self._planned = False
        """Whether `_dispatch` will be called soon."""
        self._is_crowded = False
        """Whether the last pass of the event loop brought more than one job: then the next is worth waiting for."""
        self._taken_at_once = False
        """Whether this pass has given a lane its first job already."""
        self._lone_passes = self._not_looked_at = 0
        """How many passes in turn had one request; and how many requests since were taken without looking for others."""
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
        if (self.lanes or not self._idle) and job.request.deadline is not None:
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
        if self._lone_passes >= LONE_PASSES and self._not_looked_at < LONE_PASSES:
            self._not_looked_at += 1
            return True
        self._not_looked_at = 0
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
        self._lone_passes = 0 if self._is_crowded else self._lone_passes + 1
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
