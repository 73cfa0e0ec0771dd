"""grpc.health.v1: the health of the server (""), of its inference service, and of each model by name."""

from __future__ import annotations

import asyncio
from typing import Any

from hurtle.errors import ServingError
from hurtle.serving.grpc.calls import StreamingCall, parse
from hurtle.serving.protos import INFERENCE

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
WATCH_INTERVAL = 0.25
"""Seconds between two looks at the status."""


class WatchCall(StreamingCall):
    """Health/Watch: sends the status now and whenever it changes."""

    watched: str | None = None
    last: int | None = None
    poll: asyncio.TimerHandle | None = None

    def on_message(self, payload: bytes) -> None:
        """Send the status, and watch it."""
        if self.watched is not None:
            raise ServingError("unimplemented", f"{self.head.path} takes one message, got more.")
        self.watched = parse(self, payload).service
        self.limit()
        self._look()

    def on_only_message(self, payload: bytes) -> None:
        """Send the status, and watch it."""
        try:
            self.on_message(payload)
        except ServingError as error:
            self.fail(error)

    def on_half_close(self) -> None:
        """Go on watching: the client still listens."""
        if self.watched is None:
            raise ServingError("unimplemented", f"{self.head.path} takes one message, got none.")

    def _look(self) -> None:
        status = health_of(self.connection.service, self.watched or "") or SERVICE_UNKNOWN
        if status != self.last:
            self.last = status
            self.send(b"\x08" + bytes([status]))
        self.poll = self.connection.loop.call_later(WATCH_INTERVAL, self._look)

    def on_drain(self) -> None:
        """Report NOT_SERVING before the end."""
        if self.last == SERVING:
            self.send(b"\x08" + bytes([NOT_SERVING]))
        super().on_drain()

    def on_finish(self) -> None:
        """Stop watching."""
        if self.poll is not None:
            self.poll.cancel()
        super().on_finish()


def health_of(service: Any, name: str) -> int | None:
    """The status of the server, its inference service or a model, or None if there is nothing of that name."""
    if name and name != INFERENCE:
        if not service.has_model(name):
            return None
        return SERVING if service.is_model_ready(name) else NOT_SERVING
    return SERVING if service.is_ready() else NOT_SERVING
