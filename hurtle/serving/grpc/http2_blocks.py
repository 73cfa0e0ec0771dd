"""Header blocks before decoding: strips padding and priority, joins CONTINUATION frames. Knows no HPACK."""

from __future__ import annotations

from hurtle.serving.grpc.http2_frames import LARGEST_WINDOW, PADDED, WITH_PRIORITY, ConnectionFailed, ErrorCode

MAX_BLOCK = 1 << 15
"""Bytes of a header block, continuations included."""
MAX_CONTINUATIONS = 8


class HeaderBlock:
    """A header block that goes on in CONTINUATION frames."""

    def __init__(self, stream_id: int, flags: int, first: bytes):
        self.stream_id, self.flags = stream_id, flags
        self.parts = [first]
        self._size = len(first)

    def add(self, part: bytes) -> None:
        """Add a CONTINUATION frame's payload.

        Raises:
            ConnectionFailed: The block is too large, or in too many frames.
        """
        self.parts.append(part)
        self._size += len(part)
        if len(self.parts) > MAX_CONTINUATIONS + 1 or self._size > MAX_BLOCK:
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, f"a header block over {MAX_BLOCK} bytes or in too many frames")


def unpad(data: bytes, start: int, stop: int) -> tuple[int, int]:
    """The bounds of a padded frame's content."""
    if start == stop or start + 1 + data[start] > stop:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
    return start + 1, stop - data[start]


def strip_headers(data: bytes, start: int, stop: int, flags: int, stream_id: int) -> tuple[int, int]:
    """The bounds of the header block in a HEADERS frame with padding or priority."""
    if flags & PADDED:
        start, stop = unpad(data, start, stop)
    if flags & WITH_PRIORITY:
        if stop - start < 5 or int.from_bytes(data[start : start + 4], "big") & LARGEST_WINDOW == stream_id:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "bad priority in HEADERS")
        start += 5
    return start, stop
