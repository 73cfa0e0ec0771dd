"""What a peer may ask of one HTTP/2 connection: frames that bring nothing, resets, and memory for unfinished messages."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import TYPE_CHECKING

from hurtle.serving.grpc.http2_frames import ConnectionFailed, ErrorCode, window_update

if TYPE_CHECKING:
    from hurtle.serving.grpc.http2_stream import Stream

NOISE_STEP = 2000
RESET_STEP = 2048


class Loan:
    """Bytes that a stream was allowed to send beyond its first window, or waits to be allowed."""

    __slots__ = ("granted", "size")

    def __init__(self, size: int):
        self.size, self.granted = size, False


class Guard:
    """Counts for one connection.

    Frames that bring nothing (PING, SETTINGS, empty DATA …) and resets, by the peer or because it broke a rule, are counted.
    Every so many of them there must have been enough time, or enough work, or the peer is told to calm down. Memory for
    messages beyond a stream's first window is lent in the order asked for, so that what is begun can be finished.

    Args:
        budget: Bytes to lend at most, though one stream may always have what it asks for.
    """

    def __init__(self, budget: int):
        self.budget = budget
        self.worked = self.answered = 0
        """Frames of data that came or went and streams that were opened; streams that ended as they should."""
        self._lent = 0
        self._waiting: deque[Stream] = deque()
        self._noise = self._resets = 0
        self._noise_since = self._resets_since = (monotonic(), 0)

    def count_noise(self) -> None:
        """A frame that brings nothing came.

        Raises:
            ConnectionFailed: Too many of them.
        """
        self._noise += 1
        if self._noise >= NOISE_STEP:
            then, worked = self._noise_since
            self._noise, self._noise_since = 0, (monotonic(), self.worked)
            if (monotonic() - then) * 200 + (self.worked - worked) * 4 < NOISE_STEP:
                raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that bring nothing")

    def count_reset(self) -> None:
        """The peer reset a stream, or broke a rule so that we had to.

        Raises:
            ConnectionFailed: It does so too often.
        """
        self._resets += 1
        if self._resets >= RESET_STEP:
            then, answered = self._resets_since
            self._resets, self._resets_since = 0, (monotonic(), self.answered)
            if (monotonic() - then) * 100 + (self.answered - answered) < RESET_STEP:
                raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many streams reset")

    def lend(self, stream: Stream, size: int) -> None:
        """Let a stream send `size` bytes more, now or when others have given back."""
        if stream.loan is not None:
            return
        stream.loan = Loan(size)
        self._waiting.append(stream)
        self._grant()

    def give_back(self, stream: Stream) -> None:
        """The stream has its message, or is gone."""
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
