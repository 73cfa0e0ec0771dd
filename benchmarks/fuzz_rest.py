"""Malformed REST requests, made from good ones at random: JSON, binary tensors, headers and framing. Knows no server."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from copy import deepcopy
from functools import cache
from random import Random
from typing import Any, NamedTuple

from fuzz_bytes import bytes_mutated

NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, -(2**31) - 1, 2**63, -(2**63) - 1, 2**64, 2**200, 1.5, -0.0, 1e308, "", "x", "\x00",
    "FP32", "INT4", "ü" * 40, "\ud800", "a" * 5000, [], [[]], [None], [-1], [2**62, 2**62], [2**40, 2**40, 0],
    [0] * 40, [1] * 500,
    {}, {"a": {"b": {"c": 1}}}, {"x": [1]}, {"binary_data_size": -1}, {"binary_data_size": 2**70},
    {"shared_memory_region": "r"}, {"classification": 3}, {"sequence_id": 1}, {"sequence_id": [1]}, {"timeout": -1},
    {"priority": 2**64}, [[[[[[[[1]]]]]]]],
)  # fmt: skip
RAW = (b"NaN", b"Infinity", b"1e999", b"-1e999", b"9" * 5000, b"0x10", b"01", b"'x'", b"\xff\xfe", b"\xed\xa0\x80",
       b'"\\ud800"', b'"\\u12"', b"[" * 3000, b"[" * 200 + b"]" * 200, b'{"a":' * 2000, b"\x00", b"//", b",,",
       b"tru")  # fmt: skip
PATHS = (
    b"/v2/models/good/infer", b"/v2/models/text/infer", b"/v2/models/pair/infer", b"/v2/models/total/infer",
    b"/v2/models/good/versions/1/infer", b"/v2/models/good/versions/99999999999999999999/infer", b"/v2/models/nobody/infer",
    b"/v2/models/%ff/infer", b"/v2/models/..%2f..%2fetc/infer", b"/v2/repository/index", b"/v2/repository/models/other/load",
    b"/v2/repository/models/other/unload", b"/v2/repository/models/%2e%2e/load", b"/v2/models/good", b"/v2/models/good/config",
    b"/v2/models/stats", b"/v2/nothing", b"/v2/systemsharedmemory/region/r/register", b"/v2/models/" + b"m" * 3000 + b"/infer",
)  # fmt: skip


class RestCase(NamedTuple):
    """One malformed request."""

    kind: str
    data: bytes
    is_framed: bool
    """Whether the server can tell where it ends, so that it must answer."""
    is_head: bool = False


def make_rest_case(rng: Random) -> RestCase:
    """A random malformed request."""
    kind = rng.choice(("json", "json", "json", "bytes", "bytes", "binary", "binary", "headers", "framing", "encoding"))
    return globals()[f"_{kind}"](rng)


def good_body(rng: Random) -> tuple[bytes, dict[str, Any]]:
    """The path and the JSON of a good request."""
    which = rng.randrange(4)
    request: dict[str, Any] = {"id": str(rng.randrange(10**6))}
    if which == 0:
        rows = rng.randrange(1, 5)
        request["inputs"] = [_tensor("x", "FP32", [rows, 3], [rng.random() for _ in range(rows * 3)])]
        return b"/v2/models/good/infer", request
    if which == 1:
        request["inputs"] = [_tensor("x", "BYTES", [1, 2], ["a", "ü"])]
        return b"/v2/models/text/infer", request
    if which == 2:
        request["inputs"] = [_tensor(name, "INT32", [1, 4], [[1, 2, 3, 4]]) for name in ("a", "b")]
        request["outputs"] = [{"name": "sum"}, {"name": "difference"}]
        return b"/v2/models/pair/infer", request
    request["inputs"] = [_tensor("x", "FP32", [1, 1], [1])]
    request["parameters"] = {"sequence_id": rng.randrange(100), "sequence_start": True, "sequence_end": rng.random() < 0.9}
    return b"/v2/models/total/infer", request


def _tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        found += [(value, key), *_places(part)]
    return found


def _mutated(rng: Random, request: dict[str, Any]) -> bytes:
    """JSON with values replaced, removed, duplicated or not JSON at all."""
    marks: list[bytes] = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = _places(request)
        if not places:
            break
        owner, key = rng.choice(places)
        how = rng.randrange(8)
        if how == 0:
            del owner[key]
        elif how == 1 and isinstance(owner, list):
            owner.extend([owner[key]] * rng.choice((1, 3, 100)))
        elif how == 2:
            owner[key] = f"@@{len(marks)}@@"
            marks.append(rng.choice(RAW))
        elif how == 3 and isinstance(owner, dict):
            owner[rng.choice(("parameters", "outputs", "inputs", "data", "shape", "name", "x"))] = deepcopy(rng.choice(NASTY))
        else:
            owner[key] = deepcopy(rng.choice(NASTY))
    text = json.dumps(request).encode()
    for n, mark in enumerate(marks):
        text = text.replace(b'"@@%d@@"' % n, mark)
    if rng.random() < 0.1:
        text = text.replace(b'"name"', b'"name": "twice", "name"')
    return text


def _framed(path: bytes, body: bytes, headers: tuple[bytes, ...] = (), method: bytes = b"POST") -> bytes:
    lines = [method + b" " + path + b" HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _json(rng: Random) -> RestCase:
    path, request = good_body(rng)
    if rng.random() < 0.1:
        path = rng.choice(PATHS)
    return RestCase("json", _framed(path, _mutated(rng, request)), True)


def _bytes(rng: Random) -> RestCase:
    path, request = good_body(rng)
    return RestCase("bytes", _framed(path, bytes_mutated(rng, json.dumps(request).encode())), True)


def _binary(rng: Random) -> RestCase:
    """Binary tensors with wrong sizes and contents."""
    if rng.random() < 0.5:
        path, datatype, raw = b"/v2/models/good/infer", "FP32", rng.randbytes(12)
    else:
        words = [rng.randbytes(rng.randrange(5)) for _ in range(3)]
        path, datatype, raw = b"/v2/models/text/infer", "BYTES", b"".join(struct.pack("<I", len(w)) + w for w in words)
    tensor = {"name": "x", "datatype": datatype, "shape": [1, 3], "parameters": {"binary_data_size": len(raw)}}
    request: dict[str, Any] = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    how = rng.randrange(6)
    if how == 0:
        raw = bytes_mutated(rng, raw)
    elif how == 1:
        tensor["parameters"] = {"binary_data_size": rng.choice((0, 1, 11, 13, 2**31, 2**63, -1, 1.5, "12", None))}
    elif how == 2:
        tensor["shape"] = rng.choice(([3], [-1, 3], [2**31, 2**31], [0], [], [1, 3, 1], [1] * 33, [2**63]))
    elif how == 3 and datatype == "BYTES":
        raw = struct.pack("<I", rng.choice((2**32 - 1, 2**31, 5, 1000))) + raw[4:]
    elif how == 4:
        tensor["data"] = [1, 2, 3]
    text = json.dumps(request).encode() if rng.random() < 0.8 else _mutated(rng, request)
    length = rng.choice((len(text),) * 6 + (0, 1, len(text) - 1, len(text) + 1, 10**9, -1, 2**64))
    header = b"Inference-Header-Content-Length: " + (
        str(length).encode() if rng.random() < 0.95 else rng.randbytes(4).hex().encode()
    )
    return RestCase("binary", _framed(path, text + raw, (header,)), True)


def _headers(rng: Random) -> RestCase:
    """Wrong headers and request lines; the end of the request may be undefined."""
    path, request = good_body(rng)
    body = json.dumps(request).encode()
    bad: tuple[bytes, ...] = (
        b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Content-Length: 0x10",
        b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity", b"no colon",
        b": empty", b"Bad\x00Header: 1", b"Header: \x01\x7f", b" folded: x", b"Header\xff: x", b"X: " + b"y" * 100_000,
        b"Host: second",
        b"Connection: upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: x", b"Expect: 200-ok", b"Content-Encoding: br",
        b"Accept-Encoding: gzip;q=x, *;q=9", b"Inference-Header-Content-Length: 1e3", b"traceparent: 00-zz", b"Range: bytes=0-",
        b"\r\n".join(b"H%d: x" % n for n in range(300)), b"Content-Type: multipart/form-data", b"Sec-Fetch-Site: cross-site",
    )  # fmt: skip
    method = rng.choice((b"POST", b"POST", b"GET", b"HEAD", b"PUT", b"DELETE", b"CONNECT", b"post", b"", b"P" * 500, b"\xff"))
    path = rng.choice((path, rng.choice(PATHS), b"*", b"", b"http://x/v2", b"/\x00", b"/v2 /x", b"/" + b"a" * 70_000, b"/%zz"))
    data = _framed(path, body, (rng.choice(bad),), method)
    if rng.random() < 0.2:
        data = data.replace(b"HTTP/1.1", rng.choice((b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"HTTP", b"", b"FTP/1.1")), 1)
    return RestCase("headers", data, False)


def _framing(rng: Random) -> RestCase:
    """Truncated requests, wrong chunk sizes, requests that run into each other."""
    path, request = good_body(rng)
    body = json.dumps(request).encode()
    how = rng.randrange(5)
    if how == 0:
        data = bytes_mutated(rng, _framed(path, body))
    elif how == 1:
        data = _framed(path, body)
        data = data[: rng.randrange(1, len(data))]
    elif how == 2:
        size = rng.choice(
            (b"%x" % len(body), b"0", b"-1", b"ffffffffffffffffff", b"zz", b"", b"%x;ext=1" % len(body), b"1" * 5000)
        )
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path
        data = head + size + b"\r\n" + body + b"\r\n0\r\n\r\n"
    elif how == 3:
        data = _framed(path, body) * rng.randrange(2, 8) + rng.randbytes(20)
    else:
        data = rng.randbytes(rng.randrange(1, 300))
    return RestCase("framing", data, False)


def _encoding(rng: Random) -> RestCase:
    """Compressed bodies: damaged, truncated, bombs."""
    path, request = good_body(rng)
    body = json.dumps(request).encode()
    name, packed = rng.choice(((b"gzip", gzip.compress(body, 1, mtime=0)), (b"deflate", zlib.compress(body, 1))))
    how = rng.randrange(5)
    if how == 0:
        packed = bytes_mutated(rng, packed)
    elif how == 1:
        packed = packed[: rng.randrange(len(packed))]
    elif how == 2:
        packed = body
    elif how == 3:
        packed += rng.randbytes(30)
    elif rng.random() < 0.1:
        packed = _bomb(name)
    return RestCase("encoding", _framed(path, packed, (b"Content-Encoding: " + name,)), True)


@cache
def _bomb(encoding: bytes) -> bytes:
    """A few KiB that decompress to 30 MiB."""
    return gzip.compress(bytes(30 << 20), mtime=0) if encoding == b"gzip" else zlib.compress(bytes(30 << 20))
