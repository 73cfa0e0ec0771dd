"""HPACK for requests: header blocks → whatever a server makes of them, with a cache in front. Knows nothing of frames.

A client's calls differ in little: their blocks are mostly the same few indexes into the table that both sides keep. Such a
block leaves the table as it is, so as long as nothing changes the table the same bytes mean the same headers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from hpack.exceptions import HPACKDecodingError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from hurtle.serving.grpc.http2_frames import ConnectionFailed, ErrorCode

Field = tuple[bytes, bytes]
Fields = list[Field]
Head = TypeVar("Head")
MAX_LIST_SIZE = 1 << 16
"""Bytes of a decoded header list (plus 32 a field), beyond which the connection ends."""
TABLE_SIZE = 4096
"""Of the table that a client may fill, in the same measure."""
CACHED_BLOCKS = 64
CACHED_SIZE = 1024
_STATIC: tuple[Field, ...] = tuple(HeaderTable.STATIC_TABLE)
_STATICS = len(_STATIC)


class HeaderDecoder(Generic[Head]):
    """Decodes the header blocks of one connection, in order.

    Args:
        make: Makes of the fields what the server needs; called again only when a block is not one of the last.
    """

    def __init__(self, make: Callable[[Fields], Head]):
        self._make = make
        self._heads: dict[bytes, Head] = {}
        self._entries: Fields = []
        """The table, its newest entry last."""
        self._size, self._max_size = 0, TABLE_SIZE

    def decode(self, block: bytes) -> Head:
        """What `make` made of a block.

        Raises:
            ConnectionFailed: It cannot be decoded; then nothing after it can be either.
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
        """The fields, and whether they changed the table. Raises IndexError where the block ends too early."""
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
        """Where an entry of the table stands; the newest has the first index after the static ones."""
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
    """HPACK's integer, which begins in the low bits of a byte; and where it ends."""
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
    """HPACK's string, and where it ends."""
    is_huffman = block[at] & 0x80
    length, at = _integer(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise IndexError(end)
    text = block[at:end]
    return (decode_huffman(text) if is_huffman else text), end
