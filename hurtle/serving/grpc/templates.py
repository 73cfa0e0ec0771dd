"""`Templates`: recognise requests that differ from earlier ones only in id and data, and so need no parsing.

A template is the bytes around id and data: when the same bytes come again, they mean the same. `codec` parses requests without
a template.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hurtle.errors import ServingError
from hurtle.serving.messages import InferRequest, Parameter
from hurtle.serving.tensors import DTYPES, from_raw

MAX_TEMPLATES = 8
MAX_HEAD = 2048
"""Bytes around the data beyond which a request gets no template."""
LEARN_EVERY = 8
"""One in this many requests without a template becomes one: some clients never send the same twice."""
_ID, _RAW = 0x1A, 0x3A
"""Tags of the fields `id` and `raw_input_contents`."""


class Part(NamedTuple):
    """An input: its description, the bytes before its data, and the size of the data."""

    name: str
    datatype: str
    dtype: np.dtype | None
    """None if the bytes are not simply an array."""
    shape: tuple[int, ...]
    head: bytes
    size: int


class Template(NamedTuple):
    """A request without id and data."""

    prefix: bytes
    """Before the id."""
    middle: bytes
    """From the id to the first input's data."""
    parts: tuple[Part, ...]
    model: str
    version: str
    outputs: tuple[str, ...]
    parameters: dict[str, Parameter]

    def fill(self, payload: bytes) -> InferRequest | None:
        """The request, or None if the bytes do not match this template."""
        at = len(self.prefix)
        if not payload.startswith(self.prefix):
            return None
        request_id = ""
        if payload[at : at + 1] == b"\x1a":
            end = at + 2 + payload[at + 1] if at + 1 < len(payload) else 0
            if payload[at + 1 : at + 2] >= b"\x80" or end > len(payload):
                return None
            try:
                request_id = payload[at + 2 : end].decode()
            except UnicodeDecodeError:
                return None
            at = end
        if not payload.startswith(self.middle, at):
            return None
        inputs = self._read_inputs(payload, at + len(self.middle))
        if inputs is None:
            return None
        parameters = dict(self.parameters) if self.parameters else {}
        return InferRequest(self.model, inputs, self.version, request_id, self.outputs, parameters)

    def _read_inputs(self, payload: bytes, at: int) -> dict[str, np.ndarray] | None:
        inputs = {}
        for name, datatype, dtype, shape, head, size in self.parts:
            if head:
                if not payload.startswith(head, at):
                    return None
                at += len(head)
            data = payload[at : at + size]
            at += size
            if len(data) != size:
                return None
            if dtype is not None:
                inputs[name] = np.frombuffer(data, dtype).reshape(shape)
            else:
                try:
                    inputs[name] = from_raw(name, datatype, shape, data)
                except ServingError:  # parsing reports the first error
                    return None
        return inputs if at == len(payload) else None


class Templates:
    """Templates of recent requests, most recently used first."""

    def __init__(self) -> None:
        self._templates: list[Template] = []
        self._missed = 0

    def find(self, payload: bytes) -> InferRequest | None:
        """The request, or None if the bytes match no template."""
        for n, template in enumerate(self._templates):
            request = template.fill(payload)
            if request is not None:
                if n:
                    self._templates[n], self._templates[n - 1] = self._templates[n - 1], template
                return request
        return None

    def learn(self, payload: bytes, request: InferRequest, datatypes: list[str]) -> None:
        """Take note of a parsed request; now and then it becomes a template."""
        self._missed += 1
        if self._missed < LEARN_EVERY:
            return
        self._missed = 0
        template = make_template(payload, request, datatypes)
        if template is not None:
            self._templates.insert(0, template)
            del self._templates[MAX_TEMPLATES:]


def make_template(payload: bytes, request: InferRequest, datatypes: list[str]) -> Template | None:
    """The template of a request, or None if its fields are in an unusual order or it has no raw data."""
    at = prefix = middle_start = last = 0
    heads: list[tuple[int, int, int]] = []
    while at < len(payload):
        start = at
        tag, (size, at) = payload[at], _read_size(payload, at + 1)
        if tag & 7 != 2 or tag < last or at + size > len(payload) or (start > MAX_HEAD and not heads):
            return None
        if tag < _ID:
            prefix = middle_start = at + size
        elif tag == _ID:
            if tag == last or size > 127 or at - start != 2:
                return None
            middle_start = at + size
        elif tag == _RAW:
            heads.append((start, at, size))
        elif tag > _RAW:
            return None
        last = tag
        at += size
    if not heads or len(heads) != len(request.inputs):
        return None
    parts = []
    for n, ((name, array), datatype, (start, data, size)) in enumerate(
        zip(request.inputs.items(), datatypes, heads, strict=True)
    ):
        dtype = None if datatype in ("BOOL", "BYTES") else DTYPES[datatype]
        parts.append(Part(name, datatype, dtype, array.shape, payload[start:data] if n else b"", size))
    return Template(
        payload[:prefix],
        payload[middle_start : heads[0][1]],
        tuple(parts),
        request.model,
        request.version,
        request.outputs,
        dict(request.parameters),
    )


def _read_size(payload: bytes, at: int) -> tuple[int, int]:
    """A field's length and the position after it; a length beyond the payload if it is malformed."""
    value = 0
    for n in range(5):
        if at + n >= len(payload):
            break
        value |= (payload[at + n] & 0x7F) << (7 * n)
        if payload[at + n] < 0x80:
            return value, at + n + 1
    return len(payload) + 1, at
