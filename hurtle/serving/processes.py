"""Several processes on the same ports: a parent that starts, watches and connects them, and a `Hub` in each child.

child ⇄ pipe ⇄ parent ⇄ pipe ⇄ every child: what one child is asked (load, unload, counts) all of them do. The kernel spreads
connections (SO_REUSEPORT).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from hurtle.errors import HurtleError, ServingError
from hurtle.serving.config import ServeConfig
from hurtle.serving.server import Server, bound, run_server
from hurtle.serving.shell import Shell

log = logging.getLogger("hurtle.serving")
MOST_RESTARTS = 5
"""Of children that die, within a minute; then something is wrong that starting again will not mend."""
PATIENCE = 120.0
"""Seconds that a call to all processes may take: loading a model may be slow."""


class Hub:
    """A child's way to all processes.

    Args:
        pipe: To the parent.
    """

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[list[Any]]] = {}
        self._shell: Shell | None = None
        self._stop: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def attach(self, shell: Shell, stop: asyncio.Event) -> None:
        """Listen to the parent; when it is gone, stop."""
        self._shell, self._stop = shell, stop
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._read)

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every process's shell."""
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        self._pipe.send(("ask", number, method, arguments))
        try:
            results = await asyncio.wait_for(future, PATIENCE)
        except TimeoutError:
            raise ServingError("unavailable", f"Not all processes answered within {PATIENCE:g} s.") from None
        finally:
            self._calls.pop(number, None)
        for result in results:
            if isinstance(result, _Failure):
                raise ServingError(result.reason, result.message)
        return results

    def _read(self) -> None:
        try:
            while self._pipe.poll():
                kind, number, *rest = self._pipe.recv()
                if kind == "do":
                    task = asyncio.create_task(self._do(number, *rest))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                elif (future := self._calls.get(number)) is not None and not future.done():
                    future.set_result(rest[0])
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            if self._stop is not None:
                self._stop.set()

    async def _do(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            result = await getattr(self._shell, method)(*arguments)
        except ServingError as error:
            result = _Failure(error.reason, str(error))
        except Exception as error:
            result = _Failure("internal", f"{type(error).__name__}: {error}")
        self._pipe.send(("done", number, result))


@dataclass(frozen=True)
class _Failure:
    reason: str
    message: str


@dataclass
class _Call:
    """A question of one child to all."""

    asker: int
    number: int
    waiting: set[int]
    results: list[Any] = field(default_factory=list)


@dataclass
class _Child:
    process: Any
    pipe: Connection
    is_ready: bool = False


class Parent:
    """Starts and watches the processes.

    Args:
        config: Of each.
        started: Called with the ports when all are ready.
    """

    def __init__(self, config: ServeConfig, started: Callable[[int | None, int | None], None]):
        self._started = started
        self._held: list[socket.socket] = []
        ports = {}
        for name in ("http_port", "grpc_port"):
            port = getattr(config, name)
            if port is not None:  # held open, so that nobody takes it while a child is started again
                self._held.append(bound(config.host, port, shared=True))
                port = self._held[-1].getsockname()[1]
            ports[name] = port
        self._config = replace(config, **ports)
        self._children: dict[int, _Child] = {}
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count()
        self._deaths: list[float] = []
        self._unloaded: set[str] = set()
        """By clients: a child that is started again must not bring these back."""
        self._stopping = False
        self._failed = False

    def run(self) -> bool:
        """Until SIGTERM or Ctrl-C; whether all children ended well."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        for index in range(self._config.processes):
            self._start(index)
        announced = False
        while self._children:
            watched = {child.pipe: index for index, child in self._children.items()}
            for pipe in wait(list(watched), timeout=0.5):
                self._read(watched[pipe])  # type: ignore[index]
            if not announced and self._children and all(child.is_ready for child in self._children.values()):
                announced = True
                self._started(self._config.http_port, self._config.grpc_port)
        for held in self._held:
            held.close()
        return not self._failed

    def _start(self, index: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=_child, args=(self._config, theirs, frozenset(self._unloaded)), name=f"hurtle-serve-{index}"
        )
        process.start()
        theirs.close()
        self._children[index] = _Child(process, ours)

    def _read(self, index: int) -> None:
        child = self._children[index]
        try:
            kind, *rest = child.pipe.recv()
        except (EOFError, OSError):
            self._bury(index)
            return
        if kind == "ready":
            child.is_ready = True
        elif kind == "ask":
            self._ask(index, *rest)
        elif kind == "done":
            self._done(index, *rest)
        elif kind == "failed":
            print(f"Error: {rest[0]}", file=sys.stderr, flush=True)
            self._failed = True
            self._stop()

    def _ask(self, asker: int, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        if method in ("load_here", "unload_here"):
            (self._unloaded.discard if method == "load_here" else self._unloaded.add)(arguments[0])
        call = next(self._numbers)
        ready = [index for index, child in self._children.items() if child.is_ready]
        self._calls[call] = _Call(asker, number, set(ready))
        for index in ready:
            self._send(index, ("do", call, method, arguments))

    def _done(self, index: int, number: int, result: Any) -> None:
        call = self._calls.get(number)
        if call is None:
            return
        if index in call.waiting:
            call.waiting.discard(index)
            call.results.append(result)
        self._settle(number)

    def _settle(self, number: int) -> None:
        call = self._calls[number]
        if not call.waiting:
            del self._calls[number]
            self._send(call.asker, ("answer", call.number, call.results))

    def _send(self, index: int, message: Any) -> None:
        child = self._children.get(index)
        if child is not None:
            try:
                child.pipe.send(message)
            except OSError:  # it died; `_read` will see the end of its pipe
                return

    def _bury(self, index: int) -> None:
        """A child is gone: answer what waited for it, and start another unless we are stopping."""
        child = self._children.pop(index)
        child.pipe.close()
        child.process.join()
        for number, call in list(self._calls.items()):
            call.waiting.discard(index)
            self._settle(number)
        code = child.process.exitcode
        if self._stopping:
            self._failed = self._failed or code != 0
            return
        now = time.monotonic()
        self._deaths = [*(at for at in self._deaths if now - at < 60), now]
        if len(self._deaths) > MOST_RESTARTS or not child.is_ready:
            print(f"Error: process {index} ended with {code}; stopping all.", file=sys.stderr, flush=True)
            self._failed = True
            self._stop()
            return
        log.error("process %d ended with %s; starting another", index, code)
        self._start(index)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._stopping:
            for child in self._children.values():
                child.process.kill()
        self._stop()

    def _stop(self) -> None:
        self._stopping = True
        for child in self._children.values():
            if child.process.is_alive():
                child.process.terminate()


def _child(config: ServeConfig, pipe: Connection, unloaded: frozenset[str]) -> None:
    """What a child runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent tells us
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    def started(server: Server) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pipe.send(("ready",))

    try:
        clean = run_server(Server(config, Hub(pipe), unloaded), started)
    except HurtleError as error:
        pipe.send(("failed", str(error)))
        os._exit(1)
    os._exit(0 if clean else 1)
