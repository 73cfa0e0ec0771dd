"""REST bodies, JSON with or without binary tensors after it ⇄ `InferRequest` and `InferResponse`. Checks everything it reads.

Knows nothing of HTTP except the number in the header Inference-Header-Content-Length.

Where the protocol leaves a choice: FP16 and BF16 are read as binary data only, and written as binary data or JSON numbers; NaN
and infinities, which JSON lacks, are written as null; a BYTES output that is not UTF-8 is written as binary data only.
"""

from __future__ import annotations

from itertools import chain
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import orjson

from hurtle.errors import ServingError
from hurtle.serving.messages import InferRequest, InferResponse, Parameter
from hurtle.serving.status import invalid
from hurtle.serving.tensors import DTYPES, count_values, datatype_of, dtype_of, from_raw, from_values, to_raw, to_values

MAX_NAME = 1024
MAX_ID = 4096
MAX_TENSORS = 1024
MAX_SHOWN = 60
MAX_LISTS = 1_000_000
"""Lists in a request's JSON: each takes dozens of times the memory of its two bytes."""
MAX_JSON_VALUES = 4_000_000
"""Values in a request's JSON, for the same reason; besides, parsing blocks the event loop for 60 ns per value."""
_CACHED = 256
"""Parsed JSON heads of binary requests in the cache: clients send the same head again and again."""
_CACHED_BYTES = 2048
_SMALL = 4096
"""Bytes up to which tensors are copied out of the body: cheaper than checking their alignment."""
_JSON_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_DATATYPES = {dtype: name for name, dtype in DTYPES.items()}
_KINDS: dict[str, frozenset[type]] = {name: frozenset((int,)) for name, dtype in DTYPES.items() if dtype.kind in "iu"}
_KINDS |= {"FP32": frozenset((int, float)), "FP64": frozenset((int, float)), "BOOL": frozenset((bool,))}
"""The Python types of a datatype's JSON values."""
_LIMITS = {"FP32": float(np.finfo(np.float32).max)}
_INTEGERS = frozenset((int,))
_SCALARS = frozenset((bool, int, float, str))
_UNSUPPORTED = ("classification", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")

Wanted = bool | dict[str, bool]
"""The outputs to send as binary data: all or none, or by name."""


class BinaryTensor(NamedTuple):
    """An input whose values follow the JSON."""

    name: str
    datatype: str
    dtype: np.dtype
    shape: list[int]
    size: int
    """Bytes."""


class Description(NamedTuple):
    """The parsed JSON of a request; inputs with JSON values are arrays."""

    inputs: tuple[BinaryTensor | tuple[str, np.ndarray], ...]
    binary_bytes: int
    id: str
    outputs: tuple[str, ...]
    wanted: Wanted
    parameters: dict[str, Parameter]
    timeout: float | None
    """Seconds."""


_descriptions: dict[bytes, Description] = {}


def decode(
    body: bytes | bytearray, header_length: int | None, model: str, version: str = "", arrived: float | None = None
) -> tuple[InferRequest, Wanted]:
    """Decode the body of a request.

    Args:
        body: The complete body.
        header_length: Bytes of JSON before the binary tensors; None: everything is JSON.
        model: Name of the model, from the path.
        version: Version of the model, from the path.
        arrived: Time of arrival on the clock of `time.monotonic`, where the client's timeout starts; now by default.

    Returns:
        The request, and an argument for `encode`.

    Raises:
        ServingError: It is bad; the message names the tensor, what was expected and what came.
    """
    if header_length is None:
        description, at = describe(body), len(body)
    else:
        at = header_length
        if at > len(body):
            raise invalid(f"Inference-Header-Content-Length: expected at most the body's {len(body):,} bytes, got {at:,}.")
        if at == 0:
            raise invalid(
                "Inference-Header-Content-Length is 0: a body without JSON, which would say what it is, is not taken."
            )
        key = bytes(body[:at])
        found = _descriptions.get(key)
        if found is None:
            found = describe(key)
            if at <= _CACHED_BYTES and all(type(tensor) is BinaryTensor for tensor in found.inputs):
                _remember(key, found)
        description = found
    if description.binary_bytes != len(body) - at:
        raise invalid(
            f"Binary data: the inputs' binary_data_size add up to {description.binary_bytes:,} bytes, {len(body) - at:,} came."
        )
    inputs: dict[str, np.ndarray] = {}
    for tensor in description.inputs:
        if isinstance(tensor, BinaryTensor):
            name, datatype, dtype, shape, size = tensor
            end = at + size
            if dtype.kind in "fiu":
                # The JSON before it has any length: what lies unaligned is copied, for code that cannot read it there.
                raw = body[at:end] if size <= _SMALL or at % dtype.itemsize else memoryview(body)[at:end]
                array = np.frombuffer(raw, dtype)
                inputs[name] = array.reshape(shape)
            else:
                inputs[name] = from_raw(name, datatype, shape, body[at:end])
            at = end
        else:
            inputs[tensor[0]] = tensor[1]
    request = InferRequest(
        model,
        inputs,
        version,
        description.id,
        description.outputs,
        dict(description.parameters) if description.parameters else {},
    )
    if description.timeout is not None:
        request.deadline = (monotonic() if arrived is None else arrived) + description.timeout
    return request, description.wanted


def _remember(key: bytes, description: Description) -> None:
    if len(_descriptions) >= _CACHED:
        del _descriptions[next(iter(_descriptions))]
    _descriptions[key] = description


def parse_json(text: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object."""
    if len(text) > MAX_LISTS:
        if text.count(b"[") + text.count(b"{") > MAX_LISTS:
            raise invalid(f"The body: expected at most {MAX_LISTS:,} lists and objects; send data flat, or as binary data.")
        if text.count(b",") > MAX_JSON_VALUES:
            raise invalid(f"The body: expected at most {MAX_JSON_VALUES:,} values as JSON; send more as binary data.")
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise invalid(f"The body is not JSON: {str(error)[:200]}.") from None
    if not isinstance(found, dict):
        raise invalid(f"The body: expected a JSON object, got {_kind(found)}.")
    return found


def describe(text: bytes | bytearray) -> Description:
    """Parse the JSON of a request."""
    found = parse_json(text)
    parameters: dict[str, Parameter] = {}
    all_binary, timeout = False, None
    if "parameters" in found:
        parameters = _parameters("The request", found["parameters"])
        wish = parameters.pop("binary_data_output", False)
        if not isinstance(wish, bool):
            raise invalid(f"Parameter 'binary_data_output': expected true or false, got {_kind(wish)}.")
        all_binary = wish
        timeout = _timeout(parameters)
    outputs, wanted = _outputs(_list(found, "outputs"), all_binary) if "outputs" in found else ((), all_binary)
    request_id = found.get("id", "")
    if not isinstance(request_id, str) or len(request_id) > MAX_ID:
        raise invalid(f"'id': expected text of at most {MAX_ID:,} characters, got {_kind(request_id)}.")
    inputs: list[BinaryTensor | tuple[str, np.ndarray]] = []
    names: set[str] = set()
    binary_bytes = 0
    for n, entry in enumerate(_list(found, "inputs")):
        tensor = _input(n, entry)
        if tensor[0] in names:
            raise invalid(f"Tensor {tensor[0]!r} came twice; expected each input once.")
        names.add(tensor[0])
        inputs.append(tensor)
        if isinstance(tensor, BinaryTensor):
            binary_bytes += tensor.size
    return Description(tuple(inputs), binary_bytes, request_id, outputs, wanted, parameters, timeout)


def _timeout(parameters: dict[str, Parameter]) -> float | None:
    """Triton's parameter `timeout`, given in microseconds, in seconds; 0 means none."""
    timeout = parameters.get("timeout")
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout < 0:
        raise invalid(f"Parameter 'timeout': expected microseconds, a whole number ≥ 0, got {timeout!r:.{MAX_SHOWN}}.")
    return timeout * 1e-6 if timeout else None


def _list(found: dict[str, Any], key: str) -> list[Any]:
    value = found.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid(f"{key!r}: expected a list of tensors, got {_kind(value)}.")
    if len(value) > MAX_TENSORS:
        raise invalid(f"{key!r}: expected at most {MAX_TENSORS:,} tensors, got {len(value):,}.")
    return value


def _name(what: str, n: int, entry: Any) -> str:
    if not isinstance(entry, dict):
        raise invalid(f"{what} {n}: expected a JSON object, got {_kind(entry)}.")
    name = entry.get("name")
    if not isinstance(name, str) or not name or len(name) > MAX_NAME:
        raise invalid(f"{what} {n}: expected a 'name' of 1 to {MAX_NAME:,} characters, got {_kind(name)}.")
    return name


def _input(n: int, entry: Any) -> BinaryTensor | tuple[str, np.ndarray]:
    name = _name("Input", n, entry)
    datatype, shape, values = entry.get("datatype"), entry.get("shape"), entry.get("data")
    if not isinstance(datatype, str):
        raise invalid(f"Tensor {name!r}: expected a 'datatype' such as FP32, got {_kind(datatype)}.")
    dtype = dtype_of(name, datatype)
    if not isinstance(shape, list) or not _INTEGERS.issuperset(map(type, shape)):
        raise invalid(f"Tensor {name!r}: expected a 'shape' that is a list of whole numbers, got {_shown(shape)}.")
    count = count_values(name, shape)
    size = None
    if "parameters" in entry:
        size = _parameters(f"Tensor {name!r}", entry["parameters"]).get("binary_data_size")
    if size is None:
        if values is None:
            raise invalid(f"Tensor {name!r}: expected 'data' or the parameter 'binary_data_size', got neither.")
        if datatype in ("FP16", "BF16"):
            raise invalid(f"Tensor {name!r}: {datatype} is taken as binary data only (binary_data_size), got JSON data.")
        return name, _array(name, datatype, shape, count, values)
    if values is not None:
        raise invalid(f"Tensor {name!r}: expected 'data' or the parameter 'binary_data_size', got both.")
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise invalid(f"Tensor {name!r}: 'binary_data_size': expected a whole number ≥ 0, got {_shown(size)}.")
    if datatype != "BYTES" and size != count * dtype.itemsize:
        raise invalid(f"Tensor {name!r}: {datatype} of shape {shape} takes {count * dtype.itemsize:,} bytes, got {size:,}.")
    return BinaryTensor(name, datatype, dtype, shape, size)


def _array(name: str, datatype: str, shape: list[int], count: int, values: Any) -> np.ndarray:
    """Like `from_values`, with a fast path for valid data; `from_values` words the errors."""
    if isinstance(values, list) and len(values) > max(count, 1):
        raise invalid(f"Tensor {name!r}: shape {shape} takes {count:,} values, got {len(values):,} or more.")
    kinds, flat = _KINDS.get(datatype), values
    if kinds is not None and type(values) is list:
        for _ in shape[1:]:
            if not flat or type(flat[0]) is not list:
                break
            if set(map(type, flat)) != {list} or len(set(map(len, flat))) != 1:
                return from_values(name, datatype, shape, values)
            flat = list(chain.from_iterable(flat))
        if len(flat) == count and kinds.issuperset(map(type, flat)):
            limit = _LIMITS.get(datatype)
            if limit is None or not flat or (-limit < min(flat) and max(flat) < limit):
                try:
                    return np.array(flat, DTYPES[datatype]).reshape(shape)
                except OverflowError:
                    pass
    return from_values(name, datatype, shape, values)


def _outputs(entries: list[Any], all_binary: bool) -> tuple[tuple[str, ...], Wanted]:
    if not entries:
        return (), all_binary
    wanted: dict[str, bool] = {}
    for n, entry in enumerate(entries):
        name = _name("Output", n, entry)
        if name in wanted:
            raise invalid(f"Output {name!r} is asked for twice; expected each output once.")
        binary = _parameters(f"Output {name!r}", entry.get("parameters")).get("binary_data", all_binary)
        if not isinstance(binary, bool):
            raise invalid(f"Output {name!r}: 'binary_data': expected true or false, got {_kind(binary)}.")
        wanted[name] = binary
    return tuple(wanted), wanted


def _parameters(what: str, found: Any) -> dict[str, Parameter]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise invalid(f"{what}: expected 'parameters' that are a JSON object, got {_kind(found)}.")
    for key, value in found.items():
        if type(value) not in _SCALARS:
            raise invalid(f"{what}: parameter {_shown(key)}: expected text, a number, true or false, got {_kind(value)}.")
        if key in _UNSUPPORTED:
            raise ServingError("unimplemented", f"{what}: the parameter {key!r} is not supported here; leave it out.")
    return found


def _kind(value: Any) -> str:
    """The kind of a JSON value, for messages; the value itself may be large."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    if value == "":
        return "nothing"
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    """The beginning of a value, for messages."""
    if isinstance(value, list):
        value = value[:MAX_SHOWN]
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def encode(response: InferResponse, wanted: Wanted) -> tuple[list[bytes], int | None]:
    """Encode the body of an answer.

    Returns:
        Its parts, and the length of the JSON if binary tensors follow it.

    Raises:
        ServingError: An output cannot be written as JSON.
    """
    parts: list[bytes] = [b""]
    outputs: list[dict[str, Any]] = []
    for name, array in response.outputs.items():
        datatype = _DATATYPES.get(array.dtype) or datatype_of(array.dtype)
        output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": array.shape}
        if wanted is True or (wanted and wanted.get(name, False)):
            raw = to_raw(array)
            output["parameters"] = {"binary_data_size": len(raw)}
            parts.append(raw)
        else:
            output["data"] = _json_values(array)
        outputs.append(output)
    found: dict[str, Any] = {"model_name": response.model, "model_version": response.version, "outputs": outputs}
    if response.id:
        found["id"] = response.id
    if response.parameters:
        found["parameters"] = response.parameters
    parts[0] = orjson.dumps(found, option=_JSON_NUMPY)
    return parts, len(parts[0]) if len(parts) > 1 or wanted is True else None


def _json_values(array: np.ndarray) -> Any:
    """What orjson writes as a flat list: arrays if it knows their type, which is many times faster than lists."""
    if array.dtype.kind not in "biuf":
        values = to_values(array)
        return values if array.dtype.kind in "SUO" else np.array(values, np.float32)
    if array.dtype == np.float16:
        return array.ravel().astype(np.float32)
    return np.ascontiguousarray(array.ravel(), array.dtype.newbyteorder("="))
