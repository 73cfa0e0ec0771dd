"""`ClientConnection`: what both transports' connections have in common: their lifecycle, and how they drain and close.

drain: ask the client to go → grace → last call → every answer sent → linger → closed. A transport says how it asks (GOAWAY,
`Connection: close`) and when nothing is left to answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hurtle.errors import ServingError
from hurtle.serving.address import peer_name
from hurtle.serving.lifecycle import Event, Lifecycle, State

DRAIN_GRACE = 0.2
"""Seconds for requests that were sent before the client could know that the server stops."""
LINGER = 1.0
"""Seconds for a client to read its last answers: closing while it still sends would reset the connection and lose them."""
CLOSE_TIMEOUT = 5.0
"""Seconds without progress after which unsent bytes are given up, once the connection is to close."""


class ClientConnection(asyncio.Protocol):
    """A client's connection to an `InferenceService`.

    Args:
        service: What answers its requests.
        state: The state that its transport begins in.

    Attributes:
        refusal: The error that requests get, except health checks, where there are too many connections.
        on_made: Called once the connection is one of the service's.
    """

    refusal: ServingError | None = None
    on_made: Callable[[Any], None] | None = None
    grace = DRAIN_GRACE
    """Seconds between asking the client to go and `on_grace_over`."""
    transport: asyncio.Transport

    def __init__(self, service: Any, state: State):
        self.service, self.lifecycle = service, Lifecycle(state)
        self.loop = asyncio.get_running_loop()
        self.peer = ""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register with the service."""
        self.transport = transport  # type: ignore[assignment]
        self.peer = peer_name(transport.get_extra_info("peername"))
        self.service.connections.add(self)
        if self.on_made is not None:
            self.on_made(self)
        if self.service.draining:
            self.drain()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Drop what is pending."""
        self.finish()
        self.service.connections.discard(self)

    def is_idle(self) -> bool:
        """Whether every request has its answer."""
        raise NotImplementedError

    def drain(self) -> None:
        """Ask the client to go, answer what it has sent, then close."""
        if self.refusal is not None and self.service.draining and self.is_idle():
            self.hang_up()
        elif self.lifecycle.allows(Event.DRAIN):
            state = self.lifecycle.fire(Event.DRAIN)
            if state is State.DRAINING:
                self.start_draining()
            elif state is not State.DRAINED:  # the handshake, and a first request, may be on their way
                self.set_timer(DRAIN_GRACE, self.abort)

    def start_draining(self) -> None:
        """Ask the client to go, and give it a moment to find out."""
        self.ask_to_go()
        self.set_timer(self.grace, self.on_grace_over)

    def ask_to_go(self) -> None:
        """Tell the client that the server stops, where the protocol can say so before the last answer."""

    def on_grace_over(self) -> None:
        """The client knows that the server stops, or has had time enough."""
        self.call_last()

    def call_last(self) -> None:
        """Take no further request; close when the last one has its answer."""
        if self.lifecycle.allows(Event.CUT):
            self.lifecycle.fire(Event.CUT)
            self.on_last_call()

    def on_last_call(self) -> None:
        """Finish what was taken."""
        raise NotImplementedError

    def finish(self) -> None:
        """Enter `CLOSED` and drop what is pending; does nothing the second time."""
        if self.lifecycle.state is not State.CLOSED:
            self.lifecycle.fire(Event.CLOSE)
            self.set_timer(None)
            self.on_finish()

    def on_finish(self) -> None:
        """Drop what is pending."""

    def hang_up(self) -> None:
        """Close an idle connection without waiting for requests that may be on their way."""
        self.close()

    def abort(self) -> None:
        """Close now; what was not sent is lost."""
        self.finish()
        self.transport.abort()

    def linger(self) -> None:
        """Close after a moment, so that the client can read its last answers."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER, self.close)

    def close(self) -> None:
        """Close once everything is written. TLS waits for the client to close too, though not for long."""
        self.transport.close()
        delay = min(LINGER, CLOSE_TIMEOUT)
        self.loop.call_later(delay, self._abort_when_sent, self.transport.get_write_buffer_size(), self.loop.time())

    def _abort_when_sent(self, unsent: int, since: float) -> None:
        """Abort once everything is sent, or the client has read nothing for `CLOSE_TIMEOUT`."""
        left, now = self.transport.get_write_buffer_size(), self.loop.time()
        if left < unsent:
            since = now
        if left and now - since < CLOSE_TIMEOUT:
            self.loop.call_later(min(LINGER, CLOSE_TIMEOUT), self._abort_when_sent, left, since)
        else:
            self.transport.abort()

    def set_timer(self, seconds: float | None, then: Callable[[], None] | None = None) -> None:
        """Call a function later, instead of the one before; None: cancel that only."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None or then is None else self.loop.call_later(seconds, then)
