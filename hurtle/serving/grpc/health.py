"""grpc.health.v1 for the whole server (""), its inference service, and each model by its name."""

from __future__ import annotations

import asyncio
from typing import Any

from hurtle.errors import ServingError
from hurtle.serving.grpc.calls import StreamingCall, parse
from hurtle.serving.protos import INFERENCE

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
WATCH_INTERVAL = 0.25
"""Seconds between looks."""


class WatchCall(StreamingCall):
    """Health's Watch: the status now and whenever it changes."""

    service: str | None = None
    last: int | None = None
    poll: asyncio.TimerHandle | None = None

    def on_message(self, payload: bytes) -> None:
        """Begin."""
        if self.service is not None:
            raise ServingError("unimplemented", f"{self.head.path} takes one message, got more.")
        self.service = parse(self, payload).service
        self.limit()
        self._look()

    def on_only_message(self, payload: bytes) -> None:
        """Begin."""
        try:
            self.on_message(payload)
        except ServingError as error:
            self.fail(error)

    def on_half_close(self) -> None:
        """Go on: the client listens."""
        if self.service is None:
            raise ServingError("unimplemented", f"{self.head.path} takes one message, got none.")

    def _look(self) -> None:
        status = health_of(self.connection.shell, self.service or "") or SERVICE_UNKNOWN
        if status != self.last:
            self.last = status
            self.send(b"\x08" + bytes([status]))
        self.poll = self.connection.loop.call_later(WATCH_INTERVAL, self._look)

    def on_drain(self) -> None:
        """Say so before the end."""
        if self.last == SERVING:
            self.send(b"\x08" + bytes([NOT_SERVING]))
        super().on_drain()

    def on_finish(self) -> None:
        """Look no more."""
        if self.poll is not None:
            self.poll.cancel()
        super().on_finish()


def health_of(shell: Any, service: str) -> int | None:
    """The health protocol's status of the server, its inference service or a model; None: there is nothing of that name."""
    if service and service != INFERENCE:
        if not shell.has_model(service):
            return None
        return SERVING if shell.is_model_ready(service) else NOT_SERVING
    return SERVING if shell.is_ready() else NOT_SERVING
