"""`Watch`: shared by the HTTP connections of one server: a clock that ticks every second, and a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from typing import Any, ClassVar, Protocol, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class Watched(Protocol):
    """A connection."""

    def check(self, tick: int) -> None:
        """End the connection if the client takes too long."""


class Watch:
    """One per server. It ticks while there are connections, so that none of them needs a timer of its own.

    Attributes:
        tick: Seconds, roughly; cheaper to read than the time.
        date: The value of the Date header.
    """

    _of_services: ClassVar[WeakKeyDictionary[Any, Watch]] = WeakKeyDictionary()

    @classmethod
    def of(cls, service: Any) -> Watch:
        """The watch of a service; call it on its event loop."""
        found = cls._of_services.get(service)
        if found is None:
            found = cls._of_services[service] = cls()
        return found

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.tick = 0
        self.date = b""
        self._connections: set[Watched] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ticking = False
        # One thread, so that only one large JSON body is in memory in parsed form.
        self._pool = ThreadPoolExecutor(1, "hurtle-http")

    def add(self, connection: Watched) -> None:
        """Check a connection every second."""
        self._connections.add(connection)
        if not self._is_ticking:
            self._is_ticking = True
            self.date = formatdate(usegmt=True).encode()
            self.loop.call_later(1.0, self._beat)

    def discard(self, connection: Watched) -> None:
        """Check a connection no more."""
        self._connections.discard(connection)

    def _beat(self) -> None:
        self.tick += 1
        self.date = formatdate(usegmt=True).encode()
        for connection in list(self._connections):
            connection.check(self.tick)
        if self._connections:
            self.loop.call_later(1.0, self._beat)
        else:
            self._is_ticking = False

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that handles its own errors."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aside(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run in the thread what would hold up the event loop."""
        return await self.loop.run_in_executor(self._pool, work, *arguments)
