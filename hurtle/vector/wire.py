"""The protocol between learner and workers: small frames over pipes, and one int per finished env.

Frames carry what is rare (set-up, resets, calls, infos, errors). Everything else is in shared memory. A done message passes
through the kernel and so orders the writes of one side before the reads of the other on every CPU.
"""

from __future__ import annotations

import os
import struct
from collections import deque

_HEADER = struct.Struct("=II")  # kind, bytes that follow

# learner → worker
DESCRIBE, SETUP, RESET, STEP, STEP_ALL, CALL, SET_ATTR = range(7)
# worker → learner
DESCRIPTION, READY, INFOS, RESULT, ERROR = range(16, 21)

# A done message is an env index (a worker index with ALL), plus a flag if a frame of infos was written before it.
WITH_INFOS, ALL = 1 << 29, 1 << 30
INDEX = WITH_INFOS - 1


def frame(kind: int, payload: bytes = b"") -> bytes:
    """A frame as bytes."""
    return _HEADER.pack(kind, len(payload)) + payload


class FrameReader:
    """Reads frames from a pipe, in the order in which they were written."""

    def __init__(self, fd: int):
        self.fd = fd
        self._buffer = bytearray()
        self._received = 0
        self._frames: deque[tuple[int, bytes]] = deque()

    def drain(self) -> None:
        """Read all that is left in a non-blocking pipe whose writer is gone."""
        before = -1
        while self._received != before:
            before = self._received
            if not self.feed():
                return

    def feed(self) -> bool:
        """Read once (a blocking pipe waits); returns False when the other side is gone."""
        try:
            data = os.read(self.fd, 1 << 20)
        except BlockingIOError:
            return True
        if not data:
            return False
        self._received += len(data)
        if not self._buffer and len(data) == _HEADER.size:  # the common case: one frame without payload
            kind, size = _HEADER.unpack(data)
            if size == 0:
                self._frames.append((kind, b""))
                return True
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            kind, size = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + size
            if len(self._buffer) < end:
                break
            self._frames.append((kind, bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
        return True

    def __bool__(self) -> bool:
        return bool(self._frames)

    def pop(self) -> tuple[int, bytes] | None:
        """The next complete frame, or None."""
        return self._frames.popleft() if self._frames else None


def write_all(fd: int, data: bytes) -> None:
    """Write to a blocking pipe until all is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
