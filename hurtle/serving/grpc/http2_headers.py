"""`HeaderDecoder`: HPACK header blocks → whatever the server makes of their fields, with a cache. Knows nothing of frames.

A client's calls differ little: most blocks are the same few indexes into the table that both sides keep. Such a block does not
change the table, and until another block does, the same bytes mean the same headers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from hpack import Decoder, HPACKDecodingError
from hpack.huffman_table import decode_huffman  # not public: pyproject.toml bounds hpack's version, and a test compares it

from hurtle.serving.grpc.http2_frames import ConnectionFailed, ErrorCode

Field = tuple[bytes, bytes]
Fields = list[Field]
Head = TypeVar("Head")
MAX_LIST_SIZE = 1 << 16
"""Bytes of a decoded header list (plus 32 per field) beyond which the connection fails."""
TABLE_SIZE = 4096
"""Size of the table that a client may fill, counted the same way."""
CACHED_BLOCKS = 64
CACHED_SIZE = 1024
_STATICS = 61
_STATIC: tuple[Field, ...] = tuple(
    (name, value) for name, value in Decoder().decode(bytes(0x80 | n for n in range(1, _STATICS + 1)), raw=True)
)
"""RFC 7541's static table."""


class HeaderDecoder(Generic[Head]):
    """Decodes the header blocks of one connection, in order.

    Args:
        make: Converts the fields; not called again for a block that is cached.
    """

    def __init__(self, make: Callable[[Fields], Head]):
        self._make = make
        self._heads: dict[bytes, Head] = {}
        self._entries: Fields = []
        """The dynamic table, newest entry last."""
        self._size, self._max_size = 0, TABLE_SIZE

    def decode(self, block: bytes) -> Head:
        """Decode a block, and convert its fields.

        Raises:
            ConnectionFailed: It cannot be decoded, and so neither can any later block.
        """
        head = self._heads.get(block)
        if head is not None:
            return head
        try:
            fields, changed = self._decode(block)
        except (IndexError, HPACKDecodingError):
            raise ConnectionFailed(ErrorCode.COMPRESSION_ERROR, "a header block that cannot be decoded") from None
        head = self._make(fields)
        if changed:
            self._heads.clear()
        elif len(block) <= CACHED_SIZE:
            if len(self._heads) >= CACHED_BLOCKS:
                self._heads.clear()
            self._heads[block] = head
        return head

    def _decode(self, block: bytes) -> tuple[Fields, bool]:
        """The fields, and whether they changed the table. Raises IndexError if the block ends too early."""
        fields: Fields = []
        at, end, size, changed = 0, len(block), 0, False
        entries = self._entries
        while at < end:
            first = block[at]
            if first & 0x80:
                if first < 0xFF:
                    index = first & 0x7F
                    at += 1
                else:
                    index, at = _integer(block, at, 0x7F)
                field = _STATIC[index - 1] if 0 < index <= _STATICS else entries[self._place(index)]
            elif first & 0xE0 == 0x20:
                if fields:
                    raise ConnectionFailed(ErrorCode.COMPRESSION_ERROR, "a header table's new size amid headers")
                limit, at = _integer(block, at, 0x1F)
                if limit > TABLE_SIZE:
                    raise ConnectionFailed(ErrorCode.COMPRESSION_ERROR, f"a header table of {limit} bytes")
                self._max_size, changed = limit, True
                self._evict()
                continue
            else:
                is_added = first & 0x40 != 0
                index, at = _integer(block, at, 0x3F if is_added else 0x0F)
                if not index:
                    name, at = _string(block, at)
                elif index <= _STATICS:
                    name = _STATIC[index - 1][0]
                else:
                    name = entries[self._place(index)][0]
                value, at = _string(block, at)
                field = (name, value)
                if is_added:
                    changed = True
                    self._add(field)
            fields.append(field)
            size += len(field[0]) + len(field[1]) + 32
            if size > MAX_LIST_SIZE:
                raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, f"headers over {MAX_LIST_SIZE} bytes")
        return fields, changed

    def _place(self, index: int) -> int:
        """The position of an entry; the newest one has the first index after the static table."""
        place = len(self._entries) - (index - _STATICS)
        if place < 0 or not index:
            raise IndexError(index)
        return place

    def _add(self, field: Field) -> None:
        self._entries.append(field)
        self._size += len(field[0]) + len(field[1]) + 32
        self._evict()

    def _evict(self) -> None:
        gone = 0
        while self._size > self._max_size:
            name, value = self._entries[gone]
            self._size -= len(name) + len(value) + 32
            gone += 1
        del self._entries[:gone]


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """An HPACK integer, which begins in the low bits of a byte, and the position after it."""
    value = block[at] & mask
    at += 1
    if value == mask:
        for shift in (0, 7, 14, 21):
            more = block[at]
            at += 1
            value += (more & 0x7F) << shift
            if more < 0x80:
                return value, at
        raise ConnectionFailed(ErrorCode.COMPRESSION_ERROR, "an absurd number in a header block")
    return value, at


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """An HPACK string, and the position after it."""
    is_huffman = block[at] & 0x80
    length, at = _integer(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise IndexError(end)
    text = block[at:end]
    return (decode_huffman(text) if is_huffman else text), end
