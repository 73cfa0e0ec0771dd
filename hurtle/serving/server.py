"""`Server`: sockets, TLS and signals around an `InferenceService`; `run_server` runs one until a signal stops it.

ports → connections (gRPC, HTTP) → InferenceService. Knows nothing of protocols.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from hurtle.errors import HurtleError
from hurtle.serving import heap
from hurtle.serving.acceptor import Acceptor, Listener, default_limit
from hurtle.serving.address import joined
from hurtle.serving.config import ServeConfig
from hurtle.serving.event_loop import new_event_loop
from hurtle.serving.grpc.connection import GOODBYE as GRPC_GOODBYE
from hurtle.serving.grpc.connection import GrpcConnection
from hurtle.serving.overrides import Overrides
from hurtle.serving.rest.connection import GOODBYE as HTTP_GOODBYE
from hurtle.serving.rest.connection import HttpConnection
from hurtle.serving.service import InferenceService, Peers

log = logging.getLogger("hurtle.serving")


class Server:
    """A server in this process.

    Args:
        config: The server's settings.
        peers: The processes that share the ports.
        unloaded: Models that clients have unloaded since the server started.
        overrides: Changes that clients made when loading the others, by name.
    """

    def __init__(
        self,
        config: ServeConfig,
        peers: Peers | None = None,
        unloaded: Collection[str] = (),
        overrides: Mapping[str, Overrides] | None = None,
    ):
        self.config, self._unloaded, self._overrides = config, unloaded, overrides
        self.service = InferenceService(config)
        self.service.peers = peers
        self.is_started = False
        self.http_port: int | None = None
        self.grpc_port: int | None = None
        self._acceptor: Acceptor | None = None

    async def start(self) -> None:
        """Bind the ports, load the models, and only then accept clients.

        Raises:
            HurtleError: A port is in use, a certificate cannot be read, or a model cannot be loaded.
        """
        context = tls_context(self.config)
        kinds: list[tuple[int | None, Callable[[InferenceService], Any], str, bytes]] = [
            (self.config.http_port, HttpConnection, "http/1.1", HTTP_GOODBYE),
            (self.config.grpc_port, GrpcConnection, "h2", GRPC_GOODBYE),
        ]
        sockets: list[tuple[socket.socket, Callable[[InferenceService], Any], str, bytes]] = []
        try:
            for port, connection, protocol, goodbye in kinds:
                if port is not None:
                    taken = bound(self.config.host, port, self.config.processes > 1)
                    sockets.append((taken, connection, protocol, goodbye))
            await self.service.start(self._unloaded, self._overrides)
        except BaseException:
            for taken, *_ in sockets:
                taken.close()
            raise
        self._acceptor = Acceptor(self.service, self._limit_connections())
        for taken, connection, protocol, goodbye in sockets:
            if protocol == "h2":
                self.grpc_port = taken.getsockname()[1]
            else:
                self.http_port = taken.getsockname()[1]
            ours = tls_context(self.config) if context is not None else None
            if ours is not None:
                ours.set_alpn_protocols([protocol])
            self._acceptor.listen(Listener(taken, connection, ours, goodbye))
        self.is_started = True

    def _limit_connections(self) -> int:
        possible, asked = default_limit(), self.config.max_connections
        if asked is not None and asked > possible and (self.service.peers is None or self.service.peers.is_first):
            log.warning("--max-connections %d: there are file descriptors for about %d only (ulimit -n)", asked, possible)
        return possible if asked is None else asked

    async def stop(self) -> bool:
        """Accept nobody, answer what was sent, close; returns whether everything finished in time."""
        self.service.draining = True
        if self._acceptor is not None:
            await self._acceptor.close()
        return await self.service.stop(self.config.drain)


def bound(host: str, port: int, shared: bool) -> socket.socket:
    """A socket bound to a port, not yet listening; `shared`: our other processes may bind it too."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        taken = socket.socket(found[0], found[1])
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            taken.bind(found[4])
        except OSError:
            taken.close()
            raise
    except UnicodeError:
        raise HurtleError(f"Cannot listen on {host!r:.100}: this is no host name or address.") from None
    except OSError as error:
        raise HurtleError(f"Cannot listen on {joined(host, port)}: {_what_is_wrong(host, error)}") from None
    return taken


def _what_is_wrong(host: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return (
            f"the host {host!r} cannot be found ({error.strerror}). Use an address of this machine, or 0.0.0.0 for all of them."
        )
    if error.errno == errno.EADDRINUSE:
        return f"{error.strerror}. Is another server running?"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host!r} is not an address of this machine. Use one that is, or 0.0.0.0 for all of them."
    return f"{error.strerror}."


def tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    """The TLS settings, with client certificates if configured; None without TLS.

    Raises:
        HurtleError: A file cannot be read, or is not a certificate.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
        if config.tls_client_ca is not None:
            context.load_verify_locations(config.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        files = ", ".join(filter(None, (config.tls_cert, config.tls_key, config.tls_client_ca)))
        raise HurtleError(f"The certificates cannot be used ({files}): {error}.") from None
    return context


def run_server(server: Server, started: Callable[[Server], None] = lambda server: None) -> bool:
    """Serve until SIGTERM or Ctrl-C; returns whether every request was finished. A second signal stops at once.

    Raises:
        HurtleError: The server cannot start.
    """
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_serve(server, started))


async def _serve(server: Server, started: Callable[[Server], None]) -> bool:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, server, stop, number)
    if server.service.peers is not None:
        await server.service.peers.attach(server.service, stop)
    await server.start()
    heap.freeze()
    started(server)
    await stop.wait()
    return await server.stop()


def _on_signal(server: Server, stop: asyncio.Event, number: int) -> None:
    if stop.is_set() or not server.is_started:  # the second signal, or nothing to finish yet
        os._exit(128 + number)
    stop.set()
    with suppress(OSError):  # standard error may be closed
        print(f"{signal.Signals(number).name}: finishing requests (again to stop at once)", file=sys.stderr, flush=True)


class ServerThread:
    """A server in a thread, for tests, notebooks and benchmarks: `with ServerThread(config) as server: server.http_port`.

    Attributes:
        clean: Whether every request was finished when it stopped.
    """

    def __init__(self, config: ServeConfig):
        self._config, self._error = config, None
        self._ready, self._loop = threading.Event(), new_event_loop()
        self._stop = asyncio.Event()
        self.clean = False
        self._thread = threading.Thread(target=self._run, name="hurtle-server", daemon=True)
        self.server: Server

    @property
    def http_port(self) -> int:
        """The REST port."""
        assert self.server.http_port is not None
        return self.server.http_port

    @property
    def grpc_port(self) -> int:
        """The gRPC port."""
        assert self.server.grpc_port is not None
        return self.server.grpc_port

    def call(self, function: Callable[[], Any], timeout: float = 30.0) -> Any:
        """Run a function, or the coroutine it returns, on the server's event loop."""

        async def run() -> Any:
            found = function()
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout)

    def __enter__(self) -> ServerThread:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=self._config.drain + 10)

    def _run(self) -> None:
        async def main() -> None:
            try:
                self.server = Server(self._config)
                await self.server.start()
            except BaseException as error:
                self._error = error  # type: ignore[assignment]
                return
            finally:
                self._ready.set()
            await self._stop.wait()
            self.clean = await self.server.stop()

        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(main())
        finally:
            self._ready.set()
