"""Tensors as the Open Inference Protocol sends them: datatypes, raw bytes and lists of values ⇄ NumPy arrays.

Everything is checked before an array is made; errors name the tensor, what was expected and what came.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np

from hurtle.serving.status import invalid

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}
"""NumPy dtypes by the protocol's names. The elements of BYTES are `bytes`."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_DIMENSIONS = 32
"""NumPy's limit for a long time; no real tensor comes close."""
MAX_VALUES = 1 << 40
MAX_EMPTY = 1 << 16
"""The product of the nonzero sizes of a tensor without values: no data bounds what such a shape may claim."""


def datatype_of(dtype: Any) -> str:
    """The protocol's name of a NumPy dtype; strings and objects are BYTES.

    Example:
        >>> datatype_of("float32")
        'FP32'
    """
    dtype = np.dtype(dtype)
    if dtype.kind in "SUO":
        return "BYTES"
    try:
        return _NAMES[dtype.newbyteorder("<") if dtype.kind in "iuf" else dtype]
    except KeyError:
        raise invalid(f"The Open Inference Protocol has no datatype for NumPy's {dtype}.") from None


def dtype_of(name: str, datatype: str) -> np.dtype:
    """The NumPy dtype of tensor `name` from the protocol's name for it."""
    try:
        return DTYPES[datatype]
    except (KeyError, TypeError):
        raise invalid(f"Tensor {name!r}: datatype {datatype!r:.60} is not one of {', '.join(DTYPES)}.") from None


def count_values(name: str, shape: Sequence[int]) -> int:
    """The number of values in a tensor of this shape."""
    if len(shape) > MAX_DIMENSIONS:
        raise invalid(f"Tensor {name!r}: a shape has at most {MAX_DIMENSIONS} dimensions, got {len(shape)}.")
    count = math.prod(shape)
    if not count and min(shape) >= 0 and math.prod(size for size in shape if size) > MAX_EMPTY:
        raise invalid(f"Tensor {name!r}: a tensor without values has sizes of at most {MAX_EMPTY:,}, got {list(shape)}.")
    if count < 0 or count > MAX_VALUES or (shape and min(shape) < 0):
        raise invalid(f"Tensor {name!r}: expected a shape of sizes ≥ 0, got {list(shape)}.")
    return count


def from_raw(name: str, datatype: str, shape: Sequence[int], data: Any) -> np.ndarray:
    """An array from raw bytes, row-major and little-endian; it shares their memory, except BOOL and BYTES."""
    dtype, count = dtype_of(name, datatype), count_values(name, shape)
    if datatype == "BYTES":
        return _read_bytes(name, shape, count, data)
    if len(data) != count * dtype.itemsize:
        raise invalid(
            f"Tensor {name!r}: {datatype} of shape {list(shape)} takes {count * dtype.itemsize:,} bytes, got {len(data):,}."
        )
    if datatype == "BOOL":
        return (np.frombuffer(data, np.uint8) != 0).reshape(shape)
    return np.frombuffer(data, dtype).reshape(shape)


def _read_bytes(name: str, shape: Sequence[int], count: int, data: Any) -> np.ndarray:
    """Parse BYTES: each value is preceded by its length in four bytes."""
    if count * 4 > len(data):
        raise invalid(f"Tensor {name!r}: BYTES of shape {list(shape)} takes {count * 4:,} bytes or more, got {len(data):,}.")
    view, at = memoryview(data), 0
    values: list[bytes] = []
    for n in range(count):
        length = int.from_bytes(view[at : at + 4], "little")
        if at + 4 + length > len(view):
            raise invalid(f"Tensor {name!r}: element {n} claims {length:,} bytes, {max(len(view) - at - 4, 0):,} follow.")
        values.append(bytes(view[at + 4 : at + 4 + length]))
        at += 4 + length
    if at != len(view):
        raise invalid(f"Tensor {name!r}: BYTES of shape {list(shape)} ends after {at:,} bytes, got {len(view):,}.")
    return as_bytes_array(values, shape)


def as_bytes_array(values: Sequence[bytes], shape: Sequence[int]) -> np.ndarray:
    """An object array of bytes, which NumPy would otherwise try to interpret."""
    array = np.empty(len(values), object)
    array[:] = values
    return array.reshape(shape)


def to_raw(array: np.ndarray) -> bytes:
    """Raw bytes, as `from_raw` reads them."""
    if array.dtype.kind in "SUO":
        values = [_as_bytes(value) for value in array.ravel().tolist()]
        return b"".join(chain.from_iterable((len(value).to_bytes(4, "little"), value) for value in values))
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.tobytes()


def _as_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def from_values(name: str, datatype: str, shape: Sequence[int], values: Any) -> np.ndarray:
    """An array from a list, flat or nested like the shape, as in JSON and protobuf's typed contents.

    Values must match the datatype: no 1.5 for INT32 (1.0 is accepted: some clients write every number as a float), no 300 for
    INT8, no string for a number.
    """
    dtype, count = dtype_of(name, datatype), count_values(name, shape)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise invalid(f"Tensor {name!r}: expected a list of {datatype} values, got {type(values).__name__}.")
    flat = _flattened(name, values, count)
    if len(flat) != count:
        raise invalid(f"Tensor {name!r}: shape {list(shape)} takes {count:,} values, got {len(flat):,}.")
    if datatype == "BYTES":
        return as_bytes_array([_text(name, value) for value in flat], shape)
    wanted: set[type] = {bool} if dtype.kind == "b" else {int} if dtype.kind in "iu" else {int, float}
    kinds = set(map(type, flat))
    if dtype.kind in "iu" and float in kinds:
        flat = [int(value) if type(value) is float and value.is_integer() else value for value in flat]
        kinds = set(map(type, flat))
    for kind in kinds - wanted:
        bad = next(value for value in flat if type(value) is kind)
        raise invalid(f"Tensor {name!r}: expected {datatype} values, got {kind.__name__} {bad!r:.60}.")
    try:
        array = np.array(flat, np.float64 if dtype.kind not in "biu" else dtype)
    except OverflowError:
        raise invalid(f"Tensor {name!r}: a value is out of the range of {datatype}.") from None
    if dtype.kind not in "biu":
        array = _narrowed(name, datatype, array)
    return array.reshape(shape)


def _narrowed(name: str, datatype: str, array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        narrow = array.astype(DTYPES[datatype])
    if narrow.dtype != np.float64 and not np.array_equal(np.isinf(narrow), np.isinf(array)):
        raise invalid(f"Tensor {name!r}: a value is out of the range of {datatype}.")
    return narrow


def _flattened(name: str, values: Sequence[Any], count: int) -> list[Any]:
    """Flatten nested lists, no deeper than a tensor and no longer than its shape."""
    flat: list[Any] = list(values)
    for _ in range(MAX_DIMENSIONS):
        if not flat or not any(isinstance(value, list) for value in flat):
            return flat
        if not all(isinstance(value, list) for value in flat):
            raise invalid(f"Tensor {name!r}: its data mixes lists and values.")
        if len({len(value) for value in flat}) > 1:
            raise invalid(f"Tensor {name!r}: its data is ragged: lists side by side have different lengths.")
        flat = list(chain.from_iterable(flat))
        if len(flat) > count:
            break
    raise invalid(f"Tensor {name!r}: its data is nested deeper or is longer than its shape.")


def _text(name: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    raise invalid(f"Tensor {name!r}: expected BYTES values (text), got {type(value).__name__} {value!r:.60}.")


def to_values(array: np.ndarray) -> list[Any]:
    """A flat list of Python values for JSON; BYTES must be UTF-8."""
    if array.dtype.kind in "SUO":
        return [_decoded(value) for value in array.ravel().tolist()]
    if array.dtype == DTYPES["BF16"]:
        array = array.astype(np.float32)
    return array.ravel().tolist()


def _decoded(value: Any) -> str:
    try:
        return _as_bytes(value).decode()
    except UnicodeDecodeError:
        raise invalid("A BYTES output is not UTF-8, which JSON cannot hold; ask for it as binary data.") from None


def rows_of(arrays: Iterable[np.ndarray]) -> int:
    """The size of the first array's first dimension; 1 if there is none."""
    first = next(iter(arrays), None)
    return int(first.shape[0]) if first is not None and first.ndim else 1
