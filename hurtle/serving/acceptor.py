"""`Acceptor`: lets clients in, up to a limit; refuses the others so that they know why. Knows nothing of what they say.

listening socket → accept → TLS → connection. Event loops could accept by themselves, but uvloop's closes connections without
a word when the process has no file descriptors left.
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
from hurtle.serving.shell import Connection, Shell

log = logging.getLogger("hurtle.serving")
BACKLOG = 1024
BURST = 64
"""Connections that are accepted before others on the event loop have their turn."""
MOST_REFUSALS = 64
"""Connections over the limit that are told so at a time; more are closed at once."""
RESERVED = 64
"""File descriptors for all but connections: models, logs, other processes."""
HANDSHAKE_SECONDS = 5.0
"""For a TLS handshake."""
PAUSE_SECONDS = 1.0
"""Until the next attempt to accept, where the system could not."""
CLOSE_SECONDS = 0.2
"""For clients that were being let in when the server began to stop."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def default_limit() -> int:
    """The number of connections for which one process has file descriptors."""
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
    """A port."""

    socket: socket.socket
    make: Callable[[Shell], Any]
    """Makes a connection, an asyncio protocol with the attribute `refusal`."""
    tls: ssl.SSLContext | None
    goodbye: bytes
    """What a client hears that is closed at once."""


class Acceptor:
    """Lets the clients of one process in.

    Args:
        shell: What answers them.
        limit: Connections at a time, over all ports.
    """

    def __init__(self, shell: Shell, limit: int):
        self._shell, self._limit = shell, limit
        self._loop = asyncio.get_running_loop()
        self._listeners: list[Listener] = []
        self._arriving: dict[asyncio.Task[None], bool] = {}
        """Clients in their handshake, and whether they will be refused."""
        self._refused: list[Connection] = []
        """Those that are connected, the oldest first."""
        self._spare: int | None = _open_spare()
        """A file descriptor to give up when there is no other, so that a client can be accepted and told."""
        self._is_closed = False

    def listen(self, listener: Listener) -> None:
        """Let clients in at a port."""
        listener.socket.listen(BACKLOG)
        listener.socket.setblocking(False)
        self._listeners.append(listener)
        self._loop.add_reader(listener.socket, self._accept, listener)

    async def close(self) -> None:
        """Let in who has connected already, as the kernel would reset them; nobody else."""
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
                continue  # the client has gone meanwhile
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    log.error("accepting a connection failed: %s", error)
                try:
                    is_dismissed = error.errno in (errno.EMFILE, errno.ENFILE) and self._dismiss_by_spare(listener)
                except BlockingIOError:
                    return  # the client has gone meanwhile
                if not is_dismissed:
                    self._shell.notices.count(f"pauses of {PAUSE_SECONDS:g} s in accepting connections", f"{error}")
                    self._pause(listener)
                    return
                continue
            self._let_in(listener, client, peer_name(address))

    def _let_in(self, listener: Listener, client: socket.socket, peer: str) -> None:
        client.setblocking(False)
        refused = 0
        is_refused = len(self._shell.connections) + len(self._arriving) >= self._limit
        if is_refused:  # perhaps: those that are refused do not count
            refused = sum(connection.refusal is not None for connection in self._shell.connections)
            refused += sum(self._arriving.values())
            is_refused = len(self._shell.connections) + len(self._arriving) - refused >= self._limit
        if is_refused:
            self._shell.notices.count(
                f"connections refused: limit of {self._limit} reached (--max-connections)", f"from {peer}"
            )
            if refused >= MOST_REFUSALS and not self._hang_up_oldest():
                _dismiss(client, listener)
                return
        task = self._loop.create_task(self._welcome(listener, client, peer, is_refused))
        self._arriving[task] = is_refused
        task.add_done_callback(lambda task: self._arriving.pop(task, None))

    def _hang_up_oldest(self) -> bool:
        """Close the refused connection that has been idle for longest, for the next may be a health check; if there is one."""
        self._refused = [connection for connection in self._refused if connection in self._shell.connections]
        for at, connection in enumerate(self._refused):
            if connection.is_idle():
                del self._refused[at]
                connection.hang_up()
                return True
        return False

    async def _welcome(self, listener: Listener, client: socket.socket, peer: str, is_refused: bool) -> None:
        task = asyncio.current_task()

        def make() -> Any:
            connection = listener.make(self._shell)
            connection.on_made = on_made
            if is_refused:
                text = f"The server has too many connections (its limit is {self._limit}); retry later or use another server."
                connection.refusal = ServingError("unavailable", text)
            return connection

        def on_made(connection: Connection) -> None:
            """It is among the shell's connections, and must not count twice."""
            connection.on_made = None
            self._arriving.pop(task, None)  # type: ignore[arg-type]
            if is_refused:
                self._refused = [other for other in self._refused if other in self._shell.connections]
                self._refused.append(connection)

        timeout = {} if listener.tls is None else {"ssl_handshake_timeout": HANDSHAKE_SECONDS}
        try:
            await self._loop.connect_accepted_socket(make, client, ssl=listener.tls, **timeout)
        except (OSError, TimeoutError) as error:
            if listener.tls is not None:
                self._shell.notices.count("TLS handshakes failed", f"{str(error) or type(error).__name__}, from {peer}")
        except Exception:
            log.exception("letting %s in failed", peer)

    def _dismiss_by_spare(self, listener: Listener) -> bool:
        """Accept one client by the spare file descriptor, and close it; returns whether that was possible.

        Raises:
            BlockingIOError: No client waits any more.
        """
        if self._spare is None:
            self._spare = _open_spare()
            return False
        os.close(self._spare)
        try:
            client, _ = listener.socket.accept()
            _dismiss(client, listener)
            self._shell.notices.count("connections closed: the process has no file descriptors left (ulimit -n)")
        except BlockingIOError:
            raise
        except OSError:
            return False
        finally:
            self._spare = _open_spare()
        return True

    def _pause(self, listener: Listener) -> None:
        """Accept nobody for a moment: the socket stays readable, and would else be looked at again and again."""
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
    """Say why, if that needs no handshake, and close. What has come is read, as closing would else reset the connection."""
    with client, suppress(OSError):
        client.setblocking(False)
        if listener.tls is None:
            client.send(listener.goodbye)
            client.shutdown(socket.SHUT_WR)
            client.recv(1 << 16)
