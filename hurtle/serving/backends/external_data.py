"""Finds the files in which an .onnx file keeps weights, from its bytes, without the onnx package. Loads nothing.

A model is protobuf: fields of (number, kind, value). Only those that can lead to a tensor are followed; weights are skipped.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError

MAX_FIELDS = 1 << 22
"""Most fields that are read; more would take many seconds."""
MAX_DEPTH = 64
"""Levels of graphs nested in nodes; real models have two or three."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TENSOR_LOCATION, _LOCATION_KEY = 13, b"location"
_INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
"""By kind of message, the field numbers of nested messages in onnx.proto."""


def check_external_data(path: Path) -> None:
    """Refuse a model with weights in files outside its own folder.

    Raises:
        HurtleError: It has such weights, or is not ONNX.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            locations = set(external_files(content))
    except OSError as error:
        raise HurtleError(f"Cannot read {path}: {error.strerror or error}.") from None
    except ValueError as error:  # an empty file has no memory to map
        raise HurtleError(f"{path} is not ONNX, or it is damaged or cut off ({error}).") from None
    folder = path.parent.resolve()
    for location in sorted(locations):
        if "\0" in location or not (folder / location).resolve().is_relative_to(folder):
            raise HurtleError(f"{path} keeps weights in {location!r}, outside its own folder, which is not allowed.")


def external_files(content: Any) -> Iterator[str]:
    """The names of the files that hold a model's tensors, with repetitions.

    Raises:
        ValueError: The bytes are not such a message.
    """
    todo = [("model", 0, len(content), 0)]
    seen = count(1)
    while todo:
        kind, start, end, depth = todo.pop()
        inside = _INSIDE.get(kind, {})
        if depth > MAX_DEPTH:
            raise ValueError("its graphs are nested too deeply")
        for number, first, last in _fields(content, start, end, seen):
            if number in inside:
                todo.append((inside[number], first, last, depth + 1))
            elif kind == "tensor" and number == _TENSOR_LOCATION:
                entry = {key: bytes(content[a:b]) for key, a, b in _fields(content, first, last, seen)}
                if entry.get(1) == _LOCATION_KEY:
                    yield entry.get(2, b"").decode()


def _fields(content: Any, at: int, end: int, seen: Iterator[int]) -> Iterator[tuple[int, int, int]]:
    """The length-delimited fields of a message: number, start and end. `seen` counts all fields."""
    while at < end:
        tag, at = _varint(content, at, end)
        number, kind = tag >> 3, tag & 7
        if not number:
            raise ValueError("a field without a number")
        if next(seen) > MAX_FIELDS:
            raise ValueError(f"it has more than {MAX_FIELDS:,} fields")
        if kind == _BYTES:
            size, at = _varint(content, at, end)
            if size > end - at:
                raise ValueError("a field ends behind its message")
            yield number, at, at + size
            at += size
        elif kind == _VARINT:
            _, at = _varint(content, at, end)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
    if at != end:
        raise ValueError("a field ends behind its message")


def _varint(content: Any, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = content[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("a number is cut off")
