"""`CallHead`: a gRPC call's headers, parsed: method, timeout, compression, authorization. Knows nothing of messages.

HTTP/2 header fields → `Heads` → `CallHead`, which also holds the error of a bad header.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hurtle.errors import ServingError
from hurtle.serving.compression import accepted_coding
from hurtle.serving.grpc.http2_headers import Field, Fields
from hurtle.serving.status import invalid, unsupported
from hurtle.serving.unpacking import DEFLATE, GZIP

_WINDOW_BITS = {b"gzip": GZIP, b"deflate": DEFLATE}
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_CONTENT_TYPE = re.compile(rb"application/grpc(\+proto)?\s*(;.*)?")
_CONNECTION_FIELDS = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_PSEUDO = {b":method", b":scheme", b":authority", b":path"}
_NAME = re.compile(rb"[!-9;-@\[-~]+")
"""Printable characters except colons and capitals."""
_BREAKS = re.compile(rb"[\0\r\n]")
"""Characters that no value may contain. RFC 9113 forbids spaces around a value too, but gRPC's own clients send them."""
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHANGING = {b"grpc-timeout", b"traceparent"}
KNOWN_HEADS = 64
MAX_METADATA = 1 << 14
"""Bytes that a call's headers may have."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a service, and the kind of call that handles it."""

    path: str
    call: Any
    """The class of its calls."""
    request: Any
    run: Callable[..., Any] | None = None
    public: bool = False
    """Whether it needs no token."""
    unsupported: str = ""
    """The Triton extension it belongs to, if the server lacks that extension."""


@dataclass(slots=True)
class CallHead:
    """A call's parsed headers; calls with the same headers share one object."""

    method: Method | None = None
    path: str = ""
    timeout: float | None = None
    bits: int | None = None
    """zlib's window bits if messages may be compressed."""
    authorization: bytes | None = None
    trace_parent: str = ""
    content_length: int | None = None
    malformed: bool = False
    is_trailers: bool = False
    """Whether these are well-formed trailers."""
    http_status: int = 200
    error: ServingError | None = None
    coding: bytes | None = None
    """The compression that the client accepts."""


class Heads:
    """Parses headers, and caches the result without the fields that change from call to call.

    Args:
        methods: By path.
    """

    def __init__(self, methods: Mapping[bytes, Method]):
        self._methods = methods
        self._known: dict[tuple[Field, ...], CallHead] = {}

    def read(self, fields: Fields) -> CallHead:
        """Parse a call's headers."""
        fixed = tuple([field for field in fields if field[0] not in _CHANGING])
        head = self._known.get(fixed)
        if head is None:
            head = read_head(fixed, self._methods)
            if len(self._known) >= KNOWN_HEADS:
                self._known.clear()
            self._known[fixed] = head
        return head if len(fixed) == len(fields) else _with_changing(head, fields)


def _with_changing(head: CallHead, fields: Fields) -> CallHead:
    head = CallHead(
        head.method,
        head.path,
        None,
        head.bits,
        head.authorization,
        "",
        head.content_length,
        head.malformed,
        head.is_trailers,
        head.http_status,
        head.error,
        head.coding,
    )
    is_late = False
    for name, value in fields:
        if name in _CHANGING:
            is_late = True
        elif is_late and name[:1] == b":":
            head.malformed = True
        if name == b"traceparent":
            head.trace_parent = value.decode("ascii", "replace")
            head.malformed = head.malformed or _BREAKS.search(value) is not None
        elif name == b"grpc-timeout":
            match = _TIMEOUT.fullmatch(value)
            if match is not None:
                head.timeout = int(match[1]) * _SECONDS[match[2]]
            else:
                text = value.decode("ascii", "replace")
                head.error = head.error or invalid(f"Expected a grpc-timeout such as 100m, got {text!r:.60}.")
    return head


def read_head(fields: Sequence[Field], methods: Mapping[bytes, Method]) -> CallHead:
    """Parse a call's headers. Errors are stored in the head, not raised."""
    head = CallHead()
    values: dict[bytes, bytes] = {}
    regular = False
    for name, value in fields:
        if name[:1] == b":":
            well_formed = name in _PSEUDO and not regular and name not in values
        else:
            regular = True
            well_formed = _NAME.fullmatch(name) is not None and name not in _CONNECTION_FIELDS
            if name == b"te":
                well_formed = value.lower() == b"trailers"
            elif name == b"content-length":
                well_formed = _LENGTH.fullmatch(value) is not None and values.get(name, value) == value
        if not well_formed or _BREAKS.search(value):
            head.malformed = True
        values[name] = value
    head.is_trailers = not head.malformed and not _PSEUDO & values.keys()
    if b"content-length" in values and not head.malformed:
        head.content_length = int(values[b"content-length"])
    path = values.get(b":path", b"")
    if not path or b":method" not in values or b":scheme" not in values:
        head.malformed = True
    head.path = path.decode("ascii", "replace")
    head.method = methods.get(path)
    head.authorization = values.get(b"authorization")
    head.coding = accepted_coding(values.get(b"grpc-accept-encoding"))
    if values.get(b":method") != b"POST":
        head.http_status = 405
    elif not _CONTENT_TYPE.fullmatch(values.get(b"content-type", b"")):
        head.http_status = 415
    try:
        _read_values(head, fields, values)
    except ServingError as error:
        head.error = error
    return head


def _read_values(head: CallHead, fields: Sequence[Field], values: dict[bytes, bytes]) -> None:
    if head.method is None:
        raise ServingError("unimplemented", f"Method {head.path[:200]!r} is not known.")
    if head.method.unsupported:
        raise unsupported(head.method.unsupported)
    if sum(len(name) + len(value) + 32 for name, value in fields) > MAX_METADATA:
        raise ServingError("resource_exhausted", f"The call's metadata is larger than {MAX_METADATA:,} bytes.")
    encoding = values.get(b"grpc-encoding", b"identity")
    if encoding != b"identity":
        head.bits = _WINDOW_BITS.get(encoding)
        if head.bits is None:
            text = encoding.decode("ascii", "replace")
            raise ServingError("unimplemented", f"Expected grpc-encoding identity, gzip or deflate, got {text!r:.60}.")
