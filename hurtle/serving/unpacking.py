"""`Unpacker`: decompresses gzip and deflate for both transports, within bounds, in a thread unless it is quick.

packed bytes → a first step on the event loop → limits → further steps in a thread → bytes. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from hurtle.errors import ServingError
from hurtle.serving.status import invalid

GZIP, DEFLATE = 31, 15
"""zlib's window bits."""
MAX_RATIO = 250
"""The highest compression ratio of a message. Deflate reaches 1,032, but only for almost constant data."""
FREE = 4 << 20
"""Unpacked bytes that a message may have at any ratio."""
QUICK = 64 << 10
"""Bytes that are unpacked on the event loop: about as fast as handing them to a thread."""
QUICK_INPUT = 16 << 10
STEP = 1 << 20
"""Bytes that the thread unpacks at a time; then memory is counted, and other messages get their turn."""
_INPUT = 256 << 10
"""Most packed bytes that one step reads: some streams have much input and hardly any output."""

_thread = ThreadPoolExecutor(1, "hurtle-unpack")


class Unpacker:
    """Unpacks one message.

    Args:
        packed: The message.
        bits: `GZIP` or `DEFLATE`.
        most: Most unpacked bytes.
        what: The message's name in errors.

    Attributes:
        size: Bytes unpacked so far.
        claimed: Unpacked bytes according to a gzip message itself; 0 if unknown.

    Example:
        >>> unpacker = Unpacker(zlib.compress(b"abc" * 9), DEFLATE, 1000)
        >>> unpacker.begin(), unpacker.join()
        (True, b'abcabcabcabcabcabcabcabcabc')
    """

    def __init__(self, packed: bytes | bytearray, bits: int, most: int, what: str = "The message"):
        self._packed, self._at = memoryview(packed), 0
        self._most, self._what = most, what
        self._coding = "gzip" if bits == GZIP else "deflate"
        self._inflater = zlib.decompressobj(bits)
        self._parts: list[bytes] = []
        self._running: Future[Any] | None = None
        """The last step given to the thread."""
        self.size = 0
        self.claimed = 0
        self._bound = min(most, max(FREE, MAX_RATIO * len(packed)))

    def begin(self) -> bool:
        """Unpack the first `QUICK` bytes; returns whether that was all.

        Raises:
            ServingError: The message is damaged (invalid_argument), or claims to be too large (resource_exhausted).
        """
        if self._step(QUICK, QUICK_INPUT):
            return True
        if self._coding == "gzip":  # its last four bytes are the size
            self.claimed = int.from_bytes(self._packed[-4:], "little")
            if self.claimed > self._bound:
                raise self._too_large()
        return False

    async def finish(self, hold: Callable[[int], bool]) -> bytes | None:
        """Unpack the rest in a thread.

        Args:
            hold: Counts bytes beyond those that the message claimed; may raise, and returns False to stop.

        Returns:
            The message, or None if `hold` stopped it.

        Raises:
            CancelledError: `close` was called before the next step began.
            ServingError: The message is damaged (invalid_argument) or too large (resource_exhausted).
        """
        counted = self.claimed
        is_done = False
        while True:
            extra = max(0, self.size - counted)
            counted += extra
            if not hold(extra):
                return None
            if is_done:
                return await self._aside(self.join)
            is_done = await self._aside(self._step, STEP, _INPUT)

    async def _aside(self, step: Callable[..., Any], *arguments: Any) -> Any:
        self._running = _thread.submit(step, *arguments)
        return await asyncio.wrap_future(self._running)

    def close(self, released: Callable[[], None]) -> None:
        """Give up: cancel the waiting step, and drop all bytes once no step runs.

        Args:
            released: Called on the event loop when the bytes are gone, perhaps before this returns.
        """
        running = self._running
        if running is None or running.cancel() or running.done():
            self._drop(released)
            return
        loop = asyncio.get_running_loop()

        def on_end(_: Future[Any]) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._drop, released)

        running.add_done_callback(on_end)

    def _drop(self, released: Callable[[], None]) -> None:
        self._parts.clear()
        self._packed, self._running, self._inflater = memoryview(b""), None, zlib.decompressobj()
        released()

    def join(self) -> bytes:
        """The complete message; call it once."""
        message = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        while self._parts:  # one by one, so that the event loop can run in between
            self._parts.pop()
        return message

    def _step(self, room: int, most_input: int) -> bool:
        """Unpack up to `room` more bytes from at most `most_input` packed ones; returns whether that was all."""
        inflater, stop = self._inflater, min(len(self._packed), self._at + most_input)
        room = min(room, self._bound + 1 - self.size)
        while room and not inflater.eof:
            data = inflater.unconsumed_tail
            if not data:
                data = bytes(self._packed[self._at : min(stop, self._at + _INPUT)])
                self._at += len(data)
            try:
                part = inflater.decompress(data, room)
            except zlib.error as error:
                raise invalid(f"{self._what} is not {self._coding}: {error}.") from None
            if part:
                self._parts.append(part)
                self.size += len(part)
                room -= len(part)
            elif not data:
                if self._at < len(self._packed):
                    return False
                raise self._not_whole()
        if self.size > self._bound:
            raise self._too_large()
        if inflater.eof and (inflater.unused_data or self._at < len(self._packed)):
            raise self._not_whole()
        return inflater.eof

    def _not_whole(self) -> ServingError:
        return invalid(f"{self._what}: expected one whole {self._coding} stream, got less or more.")

    def _too_large(self) -> ServingError:
        ratio = f" for {len(self._packed):,} packed ones" if self._bound < self._most else ""
        message = f"{self._what}, unpacked: expected at most {self._bound:,} bytes{ratio}, got more."
        return ServingError("resource_exhausted", message)
