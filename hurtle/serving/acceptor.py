"""`Acceptor`: accepts clients up to a limit, and refuses the others with a reason. Knows nothing of protocols.

listening socket → accept → TLS → connection. Event loops can accept on their own, but uvloop closes connections silently when
the process runs out of file descriptors.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hurtle.errors import ServingError
from hurtle.serving.address import peer_name
from hurtle.serving.service import Connection, InferenceService

log = logging.getLogger("hurtle.serving")
BACKLOG = 1024
BURST = 64
"""Connections that are accepted before other work on the event loop gets its turn."""
MOST_REFUSALS = 64
"""Connections over the limit that may wait for their refusal; further ones are closed at once."""
RESERVED = 64
"""File descriptors kept for everything else: models, logs, other processes."""
HANDSHAKE_SECONDS = 5.0
"""Seconds for a TLS handshake."""
PAUSE_SECONDS = 1.0
"""Seconds until the next attempt after accepting failed."""
CLOSE_SECONDS = 0.2
"""Seconds for clients that were being accepted when the server began to stop."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def default_limit() -> int:
    """The number of connections that one process has file descriptors for."""
    try:
        import resource
    except ImportError:  # Windows
        return 1 << 14
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    return max(soft - RESERVED - MOST_REFUSALS, soft // 2)


@dataclass
class Listener:
    """A port that is listened on."""

    socket: socket.socket
    make: Callable[[InferenceService], Any]
    """Makes a connection: an asyncio protocol with the attribute `refusal`."""
    tls: ssl.SSLContext | None
    goodbye: bytes
    """Sent to clients that are closed at once."""


class Acceptor:
    """Accepts the clients of one process.

    Args:
        service: What answers them.
        limit: The most connections at a time, over all ports.
    """

    def __init__(self, service: InferenceService, limit: int):
        self._service, self._limit = service, limit
        self._loop = asyncio.get_running_loop()
        self._listeners: list[Listener] = []
        self._arriving: dict[asyncio.Task[None], bool] = {}
        """Clients in their handshake, and whether they will be refused."""
        self._refused: list[Connection] = []
        """Refused connections that are open, oldest first."""
        self._spare: int | None = _open_spare()
        """A file descriptor to give up when none is left, so that a client can be accepted and refused with a reason."""
        self._is_closed = False

    def listen(self, listener: Listener) -> None:
        """Accept clients on a port."""
        listener.socket.listen(BACKLOG)
        listener.socket.setblocking(False)
        self._listeners.append(listener)
        self._loop.add_reader(listener.socket, self._accept, listener)

    async def close(self) -> None:
        """Accept clients that have connected already, which the kernel would reset; nobody else."""
        self._is_closed = True
        for listener in self._listeners:
            self._loop.remove_reader(listener.socket)
            self._accept(listener, BACKLOG)
            listener.socket.close()
        if self._spare is not None:
            os.close(self._spare)
        if self._arriving:
            await asyncio.wait(self._arriving, timeout=CLOSE_SECONDS)

    def _accept(self, listener: Listener, most: int = BURST) -> None:
        for _ in range(most):
            try:
                client, address = listener.socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # the client is gone
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    log.error("accepting a connection failed: %s", error)
                try:
                    is_dismissed = error.errno in (errno.EMFILE, errno.ENFILE) and self._dismiss_by_spare(listener)
                except BlockingIOError:
                    return  # the client is gone
                if not is_dismissed:
                    self._service.notices.count(f"pauses of {PAUSE_SECONDS:g} s in accepting connections", f"{error}")
                    self._pause(listener)
                    return
                continue
            self._let_in(listener, client, peer_name(address))

    def _let_in(self, listener: Listener, client: socket.socket, peer: str) -> None:
        client.setblocking(False)
        refused = 0
        is_refused = len(self._service.connections) + len(self._arriving) >= self._limit
        if is_refused:  # perhaps: refused connections do not count
            refused = sum(connection.refusal is not None for connection in self._service.connections)
            refused += sum(self._arriving.values())
            is_refused = len(self._service.connections) + len(self._arriving) - refused >= self._limit
        if is_refused:
            self._service.notices.count(
                f"connections refused: limit of {self._limit} reached (--max-connections)", f"from {peer}"
            )
            if refused >= MOST_REFUSALS and not self._hang_up_oldest():
                _dismiss(client, listener)
                return
        task = self._loop.create_task(self._welcome(listener, client, peer, is_refused))
        self._arriving[task] = is_refused
        task.add_done_callback(lambda task: self._arriving.pop(task, None))

    def _hang_up_oldest(self) -> bool:
        """Close the oldest idle refused connection, as the new one may be a health check; returns whether there was one."""
        self._refused = [connection for connection in self._refused if connection in self._service.connections]
        for at, connection in enumerate(self._refused):
            if connection.is_idle():
                del self._refused[at]
                connection.hang_up()
                return True
        return False

    async def _welcome(self, listener: Listener, client: socket.socket, peer: str, is_refused: bool) -> None:
        task = asyncio.current_task()

        def make() -> Any:
            connection = listener.make(self._service)
            connection.on_made = on_made
            if is_refused:
                text = f"The server has too many connections (its limit is {self._limit}); retry later or use another server."
                connection.refusal = ServingError("unavailable", text)
            return connection

        def on_made(connection: Connection) -> None:
            """Count it as one of the service's connections only."""
            connection.on_made = None
            self._arriving.pop(task, None)  # type: ignore[arg-type]
            if is_refused:
                self._refused = [other for other in self._refused if other in self._service.connections]
                self._refused.append(connection)

        timeout = {} if listener.tls is None else {"ssl_handshake_timeout": HANDSHAKE_SECONDS}
        try:
            await self._loop.connect_accepted_socket(make, client, ssl=listener.tls, **timeout)
        except (OSError, TimeoutError) as error:
            if listener.tls is not None:
                self._service.notices.count("TLS handshakes failed", f"{str(error) or type(error).__name__}, from {peer}")
        except Exception:
            log.exception("accepting %s failed", peer)

    def _dismiss_by_spare(self, listener: Listener) -> bool:
        """Accept one client with the spare file descriptor, and close it; returns whether that worked.

        Raises:
            BlockingIOError: No client is waiting any more.
        """
        if self._spare is None:
            self._spare = _open_spare()
            return False
        os.close(self._spare)
        try:
            client, _ = listener.socket.accept()
            _dismiss(client, listener)
            self._service.notices.count("connections closed: the process has no file descriptors left (ulimit -n)")
        except BlockingIOError:
            raise
        except OSError:
            return False
        finally:
            self._spare = _open_spare()
        return True

    def _pause(self, listener: Listener) -> None:
        """Accept nobody for a moment: the socket stays readable, so the event loop would spin."""
        if not self._is_closed:
            self._loop.remove_reader(listener.socket)
            self._loop.call_later(PAUSE_SECONDS, self._resume, listener)

    def _resume(self, listener: Listener) -> None:
        if not self._is_closed:
            self._loop.add_reader(listener.socket, self._accept, listener)


def _open_spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return None


def _dismiss(client: socket.socket, listener: Listener) -> None:
    """Send the reason, unless that needs a TLS handshake, then close; unread data is read first, or it would cause a reset."""
    with client, suppress(OSError):
        client.setblocking(False)
        if listener.tls is None:
            client.send(listener.goodbye)
            client.shutdown(socket.SHUT_WR)
            client.recv(1 << 16)
