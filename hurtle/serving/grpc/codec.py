"""`ModelInferRequest` bytes → `InferRequest`, and `InferResponse` → `ModelInferResponse` bytes. Knows nothing of transports.

Requests are parsed by protobuf unless they match a template of an earlier one; responses, whose shape rarely changes, are put
together from cached parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from hurtle.errors import ServingError
from hurtle.serving.grpc.templates import Templates
from hurtle.serving.messages import InferRequest, InferResponse, Parameter
from hurtle.serving.protos import InferParameter, ModelInferRequest, ModelInferResponse
from hurtle.serving.status import invalid
from hurtle.serving.tensors import DTYPES, as_bytes_array, count_values, datatype_of, dtype_of, from_raw, to_raw

MAX_FIELDS = 20_000
"""Most protobuf fields of one request's tensors, without their data."""
_NESTED: dict[int, Any] = {0x2A: {0x1A: None}, 0x32: {}}
"""Messages in a request that have many fields themselves: `inputs` (whose `shape` counts by bytes) and `outputs`."""
_SMALL = 1 << 16
"""Bytes up to which a message cannot hold enough tensors to hurt."""
_LARGE = 1 << 20
"""Bytes above which a message's data is not copied: protobuf would copy it twice, 2.5 ms per MiB."""
_RAW = 0x3A
"""The tag of `raw_input_contents`."""
_FIELDS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_WIDE = {"uint_contents": np.dtype("u4"), "int_contents": np.dtype("i4")}
"""The contents that several datatypes share, and their dtype."""
_templates = Templates()
_heads: dict[Any, bytes] = {}
"""The part of a response before its data, by everything it depends on."""


def decode_request(payload: bytes) -> InferRequest:
    """Decode a ModelInferRequest.

    Raises:
        ServingError: It is bad; the message names the tensor, what was expected and what came.
    """
    request = _templates.find(payload)
    if request is None:
        request, datatypes = parse_request(payload)
        _templates.learn(payload, request, datatypes)
    return request


def parse_request(payload: bytes) -> tuple[InferRequest, list[str]]:
    """Decode a request without templates; also returns the datatypes of its inputs."""
    if len(payload) > _SMALL:
        _check_size(payload)
    rest, raws = _without_raw(payload) if len(payload) > _LARGE else (payload, None)
    try:
        message = ModelInferRequest.FromString(rest)
    except DecodeError:
        raise invalid("The request is not a ModelInferRequest: its protobuf encoding is damaged.") from None
    raws, inputs = raws or message.raw_input_contents, {}
    if raws:
        if len(raws) != len(message.inputs):
            for tensor in message.inputs:  # a tensor in shared memory has no data here: report that, not the count
                _check_parameters("Tensor", tensor.name, tensor.parameters)
            raise invalid(f"Expected raw_input_contents for {len(message.inputs)} inputs, got {len(raws)}.")
        for tensor, raw in zip(message.inputs, raws, strict=True):
            name = tensor.name
            if tensor.HasField("contents") and tensor.contents.ByteSize():
                raise invalid(f"Tensor {name!r}: expected its data in raw_input_contents or in contents, got both.")
            if tensor.parameters:
                _check_parameters("Tensor", name, tensor.parameters)
            array = from_raw(name, tensor.datatype, tuple(tensor.shape), raw)
            inputs[name] = array if array.flags.aligned else array.copy()
    else:
        for tensor in message.inputs:
            if tensor.parameters:
                _check_parameters("Tensor", tensor.name, tensor.parameters)
            inputs[tensor.name] = _from_contents(tensor)
    if len(inputs) != len(message.inputs):
        raise invalid(f"Expected inputs of different names, got {[tensor.name for tensor in message.inputs][:20]}.")
    request = InferRequest(message.model_name, inputs, message.model_version, message.id)
    if message.outputs:
        for output in message.outputs:
            if output.parameters:
                _check_parameters("Output", output.name, output.parameters)
        request.outputs = tuple(output.name for output in message.outputs)
    if message.parameters:
        request.parameters = {name: parameter_value(name, value) for name, value in message.parameters.items()}
    return request, [tensor.datatype for tensor in message.inputs]


def encode_response(response: InferResponse) -> bytes:
    """Encode a ModelInferResponse, with the data as raw_output_contents."""
    key: list[Any] = [response.model, response.version]
    data: list[Any] = []
    for name, array in response.outputs.items():
        dtype = array.dtype
        key += name, dtype, array.shape
        if dtype.kind in "biuf" and dtype.isnative and array.flags.c_contiguous:
            data += _raw_head(array.nbytes), array
        else:
            raw = to_raw(array)
            data += _raw_head(len(raw)), raw
    cache_key = tuple(key)
    head = _heads.get(cache_key)
    if head is None:
        head = _encode_head(response)
        if len(_heads) >= 512:
            _heads.clear()
        _heads[cache_key] = head
    if response.id:
        text = response.id.encode()
        data.insert(0, b"\x1a" + varint(len(text)) + text)
    if response.parameters:
        message = ModelInferResponse()
        for name, value in response.parameters.items():
            set_parameter(message.parameters[name], value)
        data.insert(0, message.SerializeToString())
    return head + b"".join(data)


def _encode_head(response: InferResponse) -> bytes:
    message = ModelInferResponse(model_name=response.model, model_version=response.version)
    for name, array in response.outputs.items():
        message.outputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
    return message.SerializeToString()


def _raw_head(size: int) -> bytes:
    """The tag and length before an entry of raw_output_contents."""
    return bytes((0x32, size)) if size < 128 else b"\x32" + varint(size)


def varint(value: int) -> bytes:
    """A protobuf varint."""
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def parameter_value(name: str, parameter: Any) -> Parameter:
    """The value of a parameter."""
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise invalid(f"Parameter {name!r}: expected a value, got none.")
    return getattr(parameter, kind)


def set_parameter(parameter: InferParameter, value: Parameter) -> None:
    """Set the field that fits a Python value."""
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        if value < 1 << 63:
            parameter.int64_param = value
        else:
            parameter.uint64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = str(value)


def _check_parameters(kind: str, name: str, parameters: Any) -> None:
    """Refuse parameters that would change the meaning of a tensor."""
    for unknown in ("shared_memory_region", "classification"):
        if unknown in parameters:
            raise ServingError("unimplemented", f"{kind} {name!r}: {unknown} is not supported; send and ask for plain tensors.")


def _from_contents(tensor: Any) -> np.ndarray:
    name, datatype, shape = tensor.name, tensor.datatype, tuple(tensor.shape)
    dtype, count = dtype_of(name, datatype), count_values(name, shape)
    field = _FIELDS.get(datatype)
    if field is None:
        raise invalid(f"Tensor {name!r}: expected {datatype} data in raw_input_contents, the only way to send it.")
    contents = tensor.contents
    filled = [descriptor.name for descriptor, _ in contents.ListFields()]
    if filled and filled != [field]:
        raise invalid(f"Tensor {name!r}: expected {datatype} data in {field}, got {', '.join(filled)}.")
    values = getattr(contents, field)
    if len(values) != count:
        raise invalid(f"Tensor {name!r}: shape {list(shape)} takes {count:,} values, got {len(values):,}.")
    if datatype == "BYTES":
        return as_bytes_array(list(values), shape)
    wide = _WIDE.get(field, dtype)
    array = np.fromiter(values, wide, count)
    if wide.itemsize != dtype.itemsize:
        limits = np.iinfo(dtype)
        if count and (array.min() < limits.min or array.max() > limits.max):
            bad = array[(array < limits.min) | (array > limits.max)][0]
            raise invalid(f"Tensor {name!r}: expected {datatype} values from {limits.min} to {limits.max}, got {bad}.")
        array = array.astype(dtype)
    return array.reshape(shape)


def _without_raw(payload: bytes) -> tuple[bytes, Any]:
    """A message without its raw_input_contents, and those; if malformed, all of it and None, so that protobuf reports it."""
    view, parts, raws = memoryview(payload), [], []
    at, end = 0, len(payload)
    while at < end:
        start = at
        tag, at = _read_varint(payload, at)
        wire, size = tag & 7, 0
        if wire == 2:
            size, at = _read_varint(payload, at)
        elif wire == 0:
            _, at = _read_varint(payload, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            return payload, None
        if at + size > end or (tag == _RAW and not size):  # a size of 0 may also mean that it could not be read
            return payload, None
        if tag == _RAW:
            raws.append(view[at : at + size])
        else:
            parts.append(view[start : at + size])
        at += size
    return b"".join(parts), raws


def _check_size(payload: bytes) -> None:
    """Refuse a large message of very many tiny fields, which would take many times its size in memory."""
    fields = _count_fields(payload, 0, len(payload), MAX_FIELDS, _NESTED)
    if fields > MAX_FIELDS:
        raise invalid(f"Expected at most {MAX_FIELDS:,} names, shapes and parameters of tensors, got more.")


def _count_fields(payload: bytes, at: int, end: int, most: int, nested: Mapping[int, Any]) -> int:
    """Count the fields from `at` to `end`, and those of nested messages whose tags `nested` has; stops beyond `most`."""
    seen = 0
    while at < end and seen <= most:
        seen += 1
        tag, at = _read_varint(payload, at)
        wire = tag & 7
        if wire == 2:
            size, at = _read_varint(payload, at)
            if tag in nested:
                inner = nested[tag]
                seen += size if inner is None else _count_fields(payload, at, min(at + size, end), most - seen, inner)
            at += size
        elif wire == 0:
            _, at = _read_varint(payload, at)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            break  # groups and nonsense: protobuf reports them
    return seen


def _read_varint(payload: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for n in range(at, min(at + 10, len(payload))):
        value |= (payload[n] & 127) << shift
        if payload[n] < 128:
            return value, n + 1
        shift += 7
    return 0, len(payload)


assert set(_FIELDS) | {"FP16", "BF16"} == set(DTYPES)
