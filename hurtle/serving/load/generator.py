"""`Generator`: sends one request over many connections and times the answers, on one event loop.

Closed loop: each connection sends its next request when it has the answer to the last. Open loop: requests are due at random
times (Poisson) whatever the server does, and latency counts from the due time, not from when a connection was free: a slow
server cannot hide by being asked less. Knows nothing of protocols; a `Client` does.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from hurtle.errors import HurtleError
from hurtle.serving.load.timer import PreciseTimer

CONNECT_TIMEOUT = 10.0
PATIENCE = 1.0
"""Seconds to wait for answers after the end of an open loop; later ones count as unanswered."""
RECONNECT_AFTER = 0.05
KINDS_OF_ERRORS = 20
PERCENTILES = (50.0, 90.0, 99.0, 99.9)


class Client(Protocol):
    """A connection with one request at a time."""

    waiting: bool
    closing: bool
    began: float

    def send(self) -> None:
        """Send the request."""

    def close(self) -> None:
        """Close now."""


MakeClient = Callable[[Callable[[Any, str | None], None], Callable[[Any], None]], Any]
"""Makes a `Client`, an asyncio protocol, from two callbacks: for each answer, and for the loss of its connection."""


@dataclass(frozen=True)
class Setting:
    """One point of a curve."""

    connections: int = 1
    rate: float | None = None
    """Requests per second over all connections; None: closed loop."""
    seconds: float = 5.0
    warm_up: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("connections", self.connections), ("rate", self.rate), ("seconds", self.seconds)):
            if value is not None and not 0 < value < 1e9:
                raise HurtleError(f"{name} must be more than 0, got {value}.")
        if not 0 <= self.warm_up < 1e9:
            raise HurtleError(f"warm_up must be at least 0, got {self.warm_up}.")


@dataclass(frozen=True)
class Result:
    """The measurement of a setting."""

    setting: Setting
    rows: int
    """Rows of each request."""
    seconds: float
    """Measured time."""
    answers: int
    """Successful requests within the measured time."""
    latencies: np.ndarray
    """Seconds of each, sorted; in an open loop also of later answers, and the waiting times of unanswered requests."""
    errors: dict[str, int]
    """Counts by error message."""
    unanswered: int = 0
    """Requests of an open loop that got no answer."""
    stopped: bool = False
    """Whether it ended early."""

    @property
    def requests_per_second(self) -> float:
        """Successful requests per second."""
        return self.answers / self.seconds if self.seconds else 0.0

    @property
    def rows_per_second(self) -> float:
        """Rows of successful requests per second."""
        return self.requests_per_second * self.rows

    @property
    def failed(self) -> int:
        """Number of failed or unanswered requests."""
        return sum(self.errors.values()) + self.unanswered

    def latency_ms(self, percentile: float) -> float:
        """A percentile of the latency in milliseconds; NaN if there are none."""
        if not len(self.latencies):
            return float("nan")
        rank = math.ceil(round(percentile * len(self.latencies) / 100, 6))  # 99.9 % of 1000 is exactly 999
        return float(self.latencies[max(rank, 1) - 1]) * 1e3

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        count = len(self.latencies)
        named = {f"p{q:g}": self.latency_ms(q) if count else None for q in PERCENTILES}
        return {
            **asdict(self.setting),
            "measured_seconds": self.seconds,
            "requests": self.answers,
            "requests_per_second": self.requests_per_second,
            "rows_per_second": self.rows_per_second,
            "latency_ms": {**named, "max": self.latency_ms(100) if count else None},
            "errors": self.errors,
            "unanswered": self.unanswered,
            "stopped": self.stopped,
        }


def merged(results: list[Result], setting: Setting) -> Result:
    """Merge the results of processes that shared a setting."""
    errors: Counter[str] = Counter()
    for result in results:
        errors.update(result.errors)
    return Result(
        setting,
        results[0].rows,
        sum(result.seconds for result in results) / len(results),
        sum(result.answers for result in results),
        np.sort(np.concatenate([result.latencies for result in results])),
        dict(errors.most_common()),
        sum(result.unanswered for result in results),
        any(result.stopped for result in results),
    )


class Generator:
    """Loads a server.

    Args:
        host: The server's name or address.
        port: The server's port.
        make: Makes the clients.
        setting: Number of connections, and rate.
        rows: Rows of each request.
        seed: Seed of the due times.
    """

    def __init__(self, host: str, port: int, make: MakeClient, setting: Setting, rows: int = 1, seed: int = 0):
        self._host, self._port, self._make, self._setting, self._rows = host, port, make, setting, rows
        self._clients: set[Any] = set()
        self._idle: deque[Any] = deque()
        self._due: deque[float] = deque()
        """Due times of the requests that wait for a connection."""
        self._random = random.Random(seed)
        self._latencies = array("d")
        self._errors: Counter[str] = Counter()
        self._answers = 0
        self._start = self._stop = 0.0
        self._next = 0.0
        self._running = False
        self._draining = False  # its time is over: an open loop waits for the last answers
        self._done = asyncio.Event()
        self._chores: set[asyncio.Task[None]] = set()
        self._is_open = setting.rate is not None
        self._stopped = False
        self._timer = PreciseTimer(self._tick)

    async def connect(self) -> None:
        """Open all connections.

        Raises:
            OSError: One could not be opened.
        """
        for first in range(0, self._setting.connections, 64):
            count = min(64, self._setting.connections - first)
            await asyncio.gather(*(self._open() for _ in range(count)))

    async def run(self) -> Result:
        """Send for the setting's duration, then close all connections."""
        begin = time.perf_counter()
        self._start = begin + self._setting.warm_up
        self._stop = self._start + self._setting.seconds
        self._running = True
        try:
            for _ in range(self._setting.connections - len(self._clients)):
                self._start_replacing()
            if self._is_open:
                self._idle.extend(self._clients)
                self._next = begin
                self._tick()
            else:
                for client in [client for client in self._clients if not client.closing]:
                    client.began = begin
                    client.send()
            await self._wait(self._stop - begin)
            end = min(self._stop, time.perf_counter())
            if self._is_open and not self._stopped:
                self._draining = True
                self._done.clear()
                self._look_whether_done()
                await self._wait(PATIENCE)
            return self._result(end)
        finally:
            self._running = False
            self.close()

    def stop(self) -> None:
        """End early; `run` returns the results so far."""
        self._stopped = True
        self._done.set()

    def close(self) -> None:
        """Close all connections."""
        self._timer.close()
        for chore in self._chores:
            chore.cancel()
        for client in list(self._clients):
            client.close()

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._done.wait(), seconds)

    def _result(self, end: float) -> Result:
        now = time.perf_counter()
        missing = [] if not self._is_open else [*self._due, *(client.began for client in self._clients if client.waiting)]
        missing = [due for due in missing if self._start <= due < end]
        found = np.sort(np.concatenate([np.frombuffer(self._latencies), now - np.array(missing)]))
        seconds = max(end - self._start, 0.0)
        answers = self._answers if seconds else 0
        errors = dict(self._errors.most_common())
        return Result(self._setting, self._rows, seconds, answers, found, errors, len(missing), self._stopped)

    # Connections.

    async def _open(self) -> Any:
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(lambda: self._make(self._answered, self._lost), self._host, self._port)
        _, client = await asyncio.wait_for(connecting, CONNECT_TIMEOUT)
        if not client.closing:  # otherwise `_lost` replaces it
            self._clients.add(client)
        return client

    def _lost(self, client: Any) -> None:
        self._clients.discard(client)
        if not self._running:
            return
        if client.waiting:
            self._record(client.began, time.perf_counter(), "the server closed the connection before it answered")
        self._start_replacing()

    def _start_replacing(self) -> None:
        chore = asyncio.get_running_loop().create_task(self._replace())
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)

    async def _replace(self) -> None:
        """Replace a lost connection; without any the run is over."""
        await asyncio.sleep(RECONNECT_AFTER)
        try:
            client = await self._open()
        except OSError as error:
            self._record(self._start, time.perf_counter(), f"the server is gone: {error.strerror or error}")
            if not self._clients:
                self.stop()
            return
        if client.closing:
            return
        if self._is_open:
            self._idle.append(client)
            self._feed()
        else:
            client.began = time.perf_counter()
            client.send()

    # Requests and answers.

    def _answered(self, client: Any, error: str | None) -> None:
        now = time.perf_counter()
        self._record(client.began, now, error)
        if not self._is_open:
            if self._running and now < self._stop and not client.closing:
                client.began = now
                client.send()
            return
        if client.closing:
            return
        if self._due and self._running:
            client.began = self._due.popleft()
            client.send()
            return
        self._idle.append(client)
        if self._draining:
            self._look_whether_done()

    def _record(self, began: float, now: float, error: str | None) -> None:
        if not self._running:
            return
        within = self._start <= now < self._stop
        if error is not None:
            if within or (self._is_open and self._start <= began < self._stop):
                known = error in self._errors or len(self._errors) < KINDS_OF_ERRORS
                self._errors[error if known else "other errors"] += 1
            return
        if within:
            self._answers += 1
        if self._start <= began < self._stop if self._is_open else within:
            self._latencies.append(now - began)

    def _tick(self) -> None:
        """Send what is due, and set the timer for the next."""
        if not self._running or self._stopped:
            return
        now = time.perf_counter()
        while self._next <= now and self._next < self._stop:
            self._due.append(self._next)
            self._next += self._random.expovariate(self._setting.rate or 1.0)
        if self._due and self._idle:
            self._feed()
        if self._next >= self._stop:
            return
        self._timer.set(self._next - time.perf_counter())

    def _feed(self) -> None:
        while self._due and self._idle:
            client = self._idle.popleft()
            if not client.closing:
                client.began = self._due.popleft()
                client.send()

    def _look_whether_done(self) -> None:
        if not self._due and not any(client.waiting for client in self._clients):
            self._done.set()
