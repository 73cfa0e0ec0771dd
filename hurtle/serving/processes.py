"""Several processes that share the ports: a parent that starts, watches and connects them, and a `Hub` in each child.

child ⇄ socket ⇄ parent ⇄ socket ⇄ every child: a load, unload or count that one child is asked for runs in all of them. The
kernel spreads connections over them (SO_REUSEPORT).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hurtle.errors import HurtleError, ServingError
from hurtle.serving.config import ServeConfig
from hurtle.serving.overrides import Overrides
from hurtle.serving.server import Server, bound, run_server
from hurtle.serving.service import InferenceService
from hurtle.serving.statistics import add, past_counts

log = logging.getLogger("hurtle.serving")
MOST_DEATHS = 5
"""Deaths within a minute, with no process left, after which restarting is given up."""
PATIENCE = {"snapshot_here": 5.0}
"""Seconds that a call to all processes may take, by method; `LOADING` for the others."""
LOADING = 120.0


async def receive(reader: asyncio.StreamReader) -> Any:
    """Read a message from another of our processes.

    Raises:
        EOFError: The process is gone.
    """
    try:
        length = int.from_bytes(await reader.readexactly(4), "little")
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError):
        raise EOFError from None


def framed(message: Any) -> bytes:
    """Encode a message for `receive`."""
    content = pickle.dumps(message)
    return len(content).to_bytes(4, "little") + content


class Hub:
    """A child's link to all processes.

    Args:
        link: Socket to the parent.
        is_first: Whether this child logs what should be logged once.
    """

    def __init__(self, link: socket.socket, is_first: bool):
        self._link, self.is_first = link, is_first
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[list[Any]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter

    async def attach(self, service: InferenceService, stop: asyncio.Event) -> None:
        """Listen to the parent; stop when it is gone."""
        reader, self._writer = await asyncio.open_connection(sock=self._link)
        self._spawn(self._listen(reader, service, stop))

    def report_ready(self) -> None:
        """Tell the parent that this child accepts clients."""
        self._writer.write(framed(("ready",)))

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every process's service."""
        number, patience = next(self._numbers), PATIENCE.get(method, LOADING)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        self._writer.write(framed(("ask", number, method, arguments)))
        try:
            results = await asyncio.wait_for(future, patience)
        except TimeoutError:
            raise ServingError("unavailable", f"Not all processes answered within {patience:g} s.") from None
        finally:
            self._calls.pop(number, None)
        for result in results:
            if isinstance(result, Failure):
                raise ServingError(result.reason, result.message)
        return results

    async def _listen(self, reader: asyncio.StreamReader, service: InferenceService, stop: asyncio.Event) -> None:
        try:
            while True:
                kind, number, *arguments = await receive(reader)
                if kind == "do":
                    self._spawn(self._do(service, number, *arguments))
                elif (future := self._calls.get(number)) is not None and not future.done():
                    future.set_result(arguments[0])
        except EOFError:
            stop.set()

    async def _do(self, service: InferenceService, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            result = await getattr(service, method)(*arguments)
        except ServingError as error:
            result = Failure(error.reason, str(error))
        except Exception as error:
            result = Failure("internal", f"{type(error).__name__}: {error}")
        self._writer.write(framed(("done", number, result)))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(frozen=True)
class Failure:
    """A `ServingError` on its way between processes."""

    reason: str
    message: str


@dataclass
class Call:
    """A call of one child to all."""

    asker: int
    number: int
    method: str
    arguments: tuple[Any, ...]
    waiting: set[int]
    results: dict[int, Any] = field(default_factory=dict)
    """Results by child."""


@dataclass
class Child:
    """A child process."""

    process: Any
    writer: asyncio.StreamWriter
    changes: int
    """Number of loads and unloads before it was started."""
    is_ready: bool = False
    counts: dict[str, Any] | None = None
    """Its counts when they were last asked for."""


class Parent:
    """Starts and watches the processes.

    Args:
        config: Settings of each process.
        started: Called with the ports when all are ready.

    Raises:
        HurtleError: A port is in use.
    """

    def __init__(self, config: ServeConfig, started: Callable[[int | None, int | None], None]):
        self._started = started
        self._held: list[socket.socket] = []
        ports = {}
        for name in ("http_port", "grpc_port"):
            port = getattr(config, name)
            if port:
                bound(config.host, port, shared=False).close()  # otherwise we would share it with another such server
            if port is not None:  # kept bound, so that nobody takes it while a child restarts
                self._held.append(bound(config.host, port, shared=True))
                port = self._held[-1].getsockname()[1]
            ports[name] = port
        self._config = replace(config, **ports)
        self._children: dict[int, Child] = {}
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count()
        self._changes: list[tuple[str, tuple[Any, ...]]] = []
        """Loads and unloads by clients, which a restarted child must repeat."""
        self._past: dict[str, Any] | None = None
        """Counts of children that are gone: totals must not decrease."""
        self._deaths: list[float] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusal: str | None = None
        self._ended = asyncio.Event()
        self._is_announced = self._stopping = self._failed = False

    def run(self) -> bool:
        """Run until SIGTERM or Ctrl-C; returns whether all children ended well.

        Raises:
            HurtleError: The children cannot start.
        """
        return asyncio.run(self._main())

    async def _main(self) -> bool:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        for index in range(self._config.processes):
            await self._start(index)
        await self._ended.wait()
        for held in self._held:
            held.close()
        if self._refusal is not None:
            raise HurtleError(self._refusal)
        return not self._failed

    async def _start(self, index: int) -> None:
        ours, theirs = socket.socketpair()
        arguments = (self._config, theirs, index == 0, *_last_changes(self._changes))
        process = multiprocessing.get_context("spawn").Process(target=_child, args=arguments, name=f"hurtle-serve-{index}")
        process.start()
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        self._children[index] = Child(process, writer, len(self._changes))
        task = asyncio.create_task(self._listen(index, reader))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, index: int, reader: asyncio.StreamReader) -> None:
        child = self._children[index]
        try:
            while True:
                kind, *arguments = await receive(reader)
                if kind == "ready":
                    self._welcome(child)
                elif kind == "ask":
                    self._ask(index, *arguments)
                elif kind == "done":
                    self._done(index, *arguments)
                elif kind == "failed":
                    self._on_refusal(arguments[0])
        except EOFError:
            await self._on_death(index)

    def _on_refusal(self, why: str) -> None:
        """A child cannot start: `run` raises the reason, once for all of them, unless others serve."""
        if self._is_announced:
            log.error("%s", why)
        else:
            self._refusal = why

    def _welcome(self, child: Child) -> None:
        child.is_ready = True
        for method, arguments in self._changes[child.changes :]:  # those that came while it was starting
            child.writer.write(framed(("do", -1, method, arguments)))
        if not self._is_announced and sum(child.is_ready for child in self._children.values()) == self._config.processes:
            self._is_announced = True
            self._started(self._config.http_port, self._config.grpc_port)

    def _ask(self, asker: int, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        ready = [index for index, child in self._children.items() if child.is_ready]
        question = next(self._numbers)
        self._calls[question] = Call(asker, number, method, arguments, set(ready))
        for index in ready:
            self._children[index].writer.write(framed(("do", question, method, arguments)))

    def _done(self, index: int, number: int, result: Any) -> None:
        call = self._calls.get(number)
        if call is not None and index in call.waiting:
            call.waiting.discard(index)
            call.results[index] = result
            if call.method == "snapshot_here" and not isinstance(result, Failure):
                self._children[index].counts = result
            self._settle(number)

    def _settle(self, number: int) -> None:
        call = self._calls[number]
        if call.waiting:
            return
        del self._calls[number]
        results = list(call.results.values())
        if call.method == "snapshot_here" and self._past is not None:
            results.append(self._past)
        if call.method in ("load_here", "unload_here") and not any(isinstance(result, Failure) for result in results):
            self._changes.append((call.method, call.arguments))
        if call.asker in self._children:
            self._children[call.asker].writer.write(framed(("answer", call.number, results)))

    async def _on_death(self, index: int) -> None:
        """Answer calls that waited for a dead child, and start another unless we are stopping."""
        child = self._children.pop(index)
        child.writer.close()
        if child.counts is not None:
            self._past = add(self._past, past_counts(child.counts))
        for number, call in list(self._calls.items()):
            call.waiting.discard(index)
            if call.method == "snapshot_here":
                call.results.pop(index, None)  # it is part of the past now
            self._settle(number)
        await asyncio.to_thread(child.process.join)
        code = child.process.exitcode
        now = time.monotonic()
        self._deaths = [*(at for at in self._deaths if now - at < 60), now]
        if not self._stopping and (not self._is_announced or (len(self._deaths) > MOST_DEATHS and not self._children)):
            if self._refusal is None:
                print(f"hurtle: error: process {index} ended with {code}; stopping all.", file=sys.stderr, flush=True)
            self._failed = True
            self._stop()
        if self._stopping:
            self._failed = self._failed or code != 0
            if not self._children:
                self._ended.set()
            return
        log.error("process %d ended with %s; starting another", index, code)
        await asyncio.sleep(min(30.0, 0.1 * 2 ** len(self._deaths)))  # a child that cannot start must not keep the others busy
        if not self._stopping:
            await self._start(index)
        elif not self._children:
            self._ended.set()

    def _on_signal(self) -> None:
        if self._stopping:
            for child in self._children.values():
                child.process.kill()
        self._stop()

    def _stop(self) -> None:
        self._stopping = True
        for child in self._children.values():
            child.process.terminate()
        if not self._children:
            self._ended.set()


def _last_changes(changes: list[tuple[str, tuple[Any, ...]]]) -> tuple[frozenset[str], dict[str, Overrides]]:
    """The models that clients have unloaded, and the changes they made when loading the others."""
    last = {name: (method, more) for method, (name, *more) in changes}
    unloaded = frozenset(name for name, (method, _) in last.items() if method == "unload_here")
    return unloaded, {name: more[0] for name, (method, more) in last.items() if method == "load_here" and more}


def _child(
    config: ServeConfig, link: socket.socket, is_first: bool, unloaded: frozenset[str], overrides: dict[str, Overrides]
) -> None:
    """The main function of a child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent stops us
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    hub, spare = Hub(link, is_first), link.dup()

    def started(server: Server) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        hub.report_ready()

    try:
        clean = run_server(Server(config, hub, unloaded, overrides), started)
    except HurtleError as error:
        spare.setblocking(True)
        spare.sendall(framed(("failed", str(error))))
        os._exit(1)
    os._exit(0 if clean else 1)
