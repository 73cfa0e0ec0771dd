"""Compression of answers for both transports: which coding a client accepts, when it pays, and where it runs.

message → `pays` → `deflate`, on the event loop if short, else in a thread of `Packer`. Knows no transport.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

MIN_COMPRESSED = 4 << 10
"""Bytes up to which answers are not compressed: it takes about 20 µs per KiB, and many clients always ask for it."""
COMPRESSED_ASIDE = 32 << 10
"""Bytes above which answers are compressed in a thread."""
SAMPLE = 512
"""Bytes from the middle of a message that predict whether it will shrink; noise takes about 30 µs."""
_LEVEL = 1
_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
Done = Callable[[bytes, bool], None]
"""Takes the message to send, and whether it is compressed."""


def accepted_coding(accepted: bytes | None) -> bytes | None:
    """The coding that a client accepts, from its header Accept-Encoding or grpc-accept-encoding, or None.

    Example:
        >>> accepted_coding(b"identity, deflate, gzip"), accepted_coding(b"gzip;q=0")
        (b'deflate', None)
    """
    if accepted is None:
        return None
    for option in accepted.lower().split(b","):
        name, *parameters = option.replace(b" ", b"").split(b";")
        if name in _WINDOW_BITS and not any(p.startswith(b"q=0") and not p.strip(b"q=0.") for p in parameters):
            return name
    return None


def deflate(parts: Sequence[bytes], coding: bytes) -> bytes:
    """Join and compress the parts of a message."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS[coding])
    return b"".join([*map(packer.compress, parts), packer.flush()])


def pays(message: bytes) -> bool:
    """Whether a message is long enough, and a sample shrinks by a quarter; noise, like most floats, does not."""
    if len(message) <= MIN_COMPRESSED:
        return False
    middle = len(message) // 2
    return len(zlib.compress(message[middle : middle + SAMPLE], _LEVEL)) <= SAMPLE * 3 // 4


class Packer:
    """Compresses messages, large ones on as many threads as there are cores.

    When every thread is busy and as many messages wait, further ones are sent uncompressed, as waiting would not pay.
    """

    def __init__(self) -> None:
        self._threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._pool: ThreadPoolExecutor | None = None
        self._waiting = 0

    def pack(self, message: bytes, coding: bytes, done: Done) -> None:
        """Compress a message; `done` is called on the event loop, perhaps before this returns."""
        if len(message) <= COMPRESSED_ASIDE:
            _finish(message, deflate([message], coding), done)
        elif self._waiting >= 2 * self._threads:
            done(message, False)
        else:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "hurtle-pack")
            loop = asyncio.get_running_loop()
            self._waiting += 1

            def settle(future: Future[bytes]) -> None:
                self._waiting -= 1
                _finish(message, message if future.exception() is not None else future.result(), done)

            def hand_over(future: Future[bytes]) -> None:
                try:
                    loop.call_soon_threadsafe(settle, future)
                except RuntimeError:  # the event loop is closed: nobody waits for the answer
                    self._waiting -= 1

            self._pool.submit(deflate, [message], coding).add_done_callback(hand_over)


def _finish(message: bytes, packed: bytes, done: Done) -> None:
    is_smaller = len(packed) < len(message)
    done(packed if is_smaller else message, is_smaller)


PACKER = Packer()
"""The packer of this process."""
