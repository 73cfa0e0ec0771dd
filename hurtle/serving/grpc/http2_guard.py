"""Limits on what a peer may ask of one HTTP/2 connection: empty frames, resets, and memory for unfinished messages."""

from __future__ import annotations

from collections import deque
from time import monotonic

from hurtle.serving.grpc.http2_frames import ConnectionFailed, ErrorCode, window_update
from hurtle.serving.grpc.http2_stream import Loan, Stream

NOISE_STEP = 2000
RESET_STEP = 2048


class Guard:
    """Counters of one connection.

    Frames that carry nothing (PING, SETTINGS, empty DATA …) are counted, and so are resets, whether the peer sent them or
    forced them by breaking a rule. Each time a counter reaches its step, enough time or enough work must have passed;
    otherwise the connection fails with ENHANCE_YOUR_CALM. Memory for messages larger than a stream's first window is lent
    first come, first served, so that a message once begun can be finished.

    Args:
        budget: Bytes to lend at most, though a single stream always gets what it asks for.
    """

    def __init__(self, budget: int):
        self.budget = budget
        self.worked = self.answered = 0
        """DATA frames in both directions and streams opened; streams that ended normally."""
        self._lent = 0
        self._waiting: deque[Stream] = deque()
        self._noise = self._resets = 0
        self._noise_since = self._resets_since = (monotonic(), 0)

    def count_noise(self) -> None:
        """Count a frame that carries nothing.

        Raises:
            ConnectionFailed: There were too many of them.
        """
        self._noise += 1
        if self._noise >= NOISE_STEP:
            then, worked = self._noise_since
            self._noise, self._noise_since = 0, (monotonic(), self.worked)
            if (monotonic() - then) * 200 + (self.worked - worked) * 4 < NOISE_STEP:
                raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that bring nothing")

    def count_reset(self) -> None:
        """Count a stream that the peer reset, or made us reset.

        Raises:
            ConnectionFailed: There were too many of them.
        """
        self._resets += 1
        if self._resets >= RESET_STEP:
            then, answered = self._resets_since
            self._resets, self._resets_since = 0, (monotonic(), self.answered)
            if (monotonic() - then) * 100 + (self.answered - answered) < RESET_STEP:
                raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many streams reset")

    def lend(self, stream: Stream, size: int) -> None:
        """Let a stream send `size` bytes more, now or once others have given theirs back."""
        if stream.loan is not None:
            return
        stream.loan = Loan(size)
        self._waiting.append(stream)
        self._grant()

    def give_back(self, stream: Stream) -> None:
        """Take back a stream's loan: it has its message, or is gone."""
        loan = stream.loan
        if loan is None:
            return
        stream.loan = None
        if loan.granted:
            self._lent -= loan.size
            self._grant()
        else:
            self._waiting.remove(stream)

    def _grant(self) -> None:
        while self._waiting:
            stream = self._waiting[0]
            loan = stream.loan
            if loan is None or (self._lent and self._lent + loan.size > self.budget):
                return
            self._waiting.popleft()
            loan.granted = True
            self._lent += loan.size
            stream.receive_window += loan.size
            stream.connection.output.write(window_update(stream.id, loan.size))
