"""Header blocks before they are decoded: padding and priority taken off, CONTINUATION put together. Knows no HPACK."""

from __future__ import annotations

from hurtle.serving.grpc.http2_frames import LARGEST_WINDOW, PADDED, WITH_PRIORITY, ConnectionFailed, ErrorCode

MAX_BLOCK = 1 << 15
"""Bytes of a header block, its continuations included."""
MAX_CONTINUATIONS = 8


class HeaderBlock:
    """A header block that goes on in CONTINUATION frames."""

    def __init__(self, stream_id: int, flags: int, first: bytes):
        self.stream_id, self.flags = stream_id, flags
        self.parts = [first]
        self._size = len(first)

    def add(self, part: bytes) -> None:
        """What a CONTINUATION frame brings.

        Raises:
            ConnectionFailed: Too much, or in too many frames.
        """
        self.parts.append(part)
        self._size += len(part)
        if len(self.parts) > MAX_CONTINUATIONS + 1 or self._size > MAX_BLOCK:
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, f"a header block over {MAX_BLOCK} bytes or in too many frames")


def unpad(data: bytes, start: int, stop: int) -> tuple[int, int]:
    """Where a padded frame's content begins and ends."""
    if start == stop or start + 1 + data[start] > stop:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
    return start + 1, stop - data[start]


def strip_headers(data: bytes, start: int, stop: int, flags: int, stream_id: int) -> tuple[int, int]:
    """Where the header block of a HEADERS frame with padding or priority begins and ends."""
    if flags & PADDED:
        start, stop = unpad(data, start, stop)
    if flags & WITH_PRIORITY:
        if stop - start < 5 or int.from_bytes(data[start : start + 4], "big") & LARGEST_WINDOW == stream_id:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "bad priority in HEADERS")
        start += 5
    return start, stop
