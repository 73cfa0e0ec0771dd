"""`Watch`: what the HTTP connections of one server share: a clock that ticks each second, and a thread."""

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
        """See whether the client takes too long."""


class Watch:
    """One per server; it ticks while there are connections, so that none of them needs a timer.

    Attributes:
        tick: Seconds, about; cheaper to ask for than the time.
        date: For the header of that name.
    """

    _of_shells: ClassVar[WeakKeyDictionary[Any, Watch]] = WeakKeyDictionary()

    @classmethod
    def of(cls, shell: Any) -> Watch:
        """The watch of a server; call it on its event loop."""
        found = cls._of_shells.get(shell)
        if found is None:
            found = cls._of_shells[shell] = cls()
        return found

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.tick = 0
        self.date = b""
        self._connections: set[Watched] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ticking = False
        # One thread: what large JSON takes while it is read, it takes once.
        self._pool = ThreadPoolExecutor(1, "hurtle-http")

    def add(self, connection: Watched) -> None:
        """Look after a connection."""
        self._connections.add(connection)
        if not self._is_ticking:
            self._is_ticking = True
            self.date = formatdate(usegmt=True).encode()
            self.loop.call_later(1.0, self._beat)

    def discard(self, connection: Watched) -> None:
        """It has ended."""
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
        """Run a coroutine, which looks after its own errors."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aside(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do in a thread what would hold up the event loop."""
        return await self.loop.run_in_executor(self._pool, work, *arguments)
