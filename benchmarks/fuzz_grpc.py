"""Malformed gRPC calls, made from good ones at random: protobuf, message prefixes, headers, HTTP/2 frames. Knows no server."""

from __future__ import annotations

import gzip
import struct
from functools import cache
from random import Random
from typing import Any, NamedTuple

from fuzz_bytes import bytes_mutated
from hpack import Encoder

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SERVICE = "/inference.GRPCInferenceService/"
UNARY = ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad",
         "RepositoryModelUnload", "ServerLive", "ServerMetadata")  # fmt: skip
DIMS = (0, 1, 3, -1, -(2**63), 2**31, 2**40, 2**62, 2**63 - 1)
Headers = list[tuple[str, str]]
Fields = list[tuple[int, Any]]
"""A protobuf message as field numbers and values (int: varint, float: 64 bits, bytes or str, list: a message)."""


class GrpcCase(NamedTuple):
    """One malformed call, or (`frames`) what a fresh connection sends after the preface."""

    kind: str
    headers: Headers
    data: bytes
    frames: bytes | None = None


def varint(value: int) -> bytes:
    """A protobuf varint."""
    value &= 2**64 - 1
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes((*parts, value))


def encode(fields: Fields) -> bytes:
    """Encode a protobuf message."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        elif isinstance(value, float):
            out += varint(number << 3 | 1) + struct.pack("<d", value)
        else:
            body = encode(value) if isinstance(value, list) else value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(body)) + body
    return bytes(out)


def message(payload: bytes, compressed: int = 0, length: int | None = None) -> bytes:
    """Add gRPC's prefix."""
    return struct.pack(">BI", compressed, len(payload) if length is None else length) + payload


def call_headers(method: str = "ModelInfer", **changed: str) -> Headers:
    """The headers of a good call; underscores in names become hyphens."""
    found = {
        ":method": "POST", ":scheme": "http", ":path": SERVICE + method, ":authority": "x",
        "te": "trailers", "content-type": "application/grpc",
    }  # fmt: skip
    found |= {name.replace("_", "-"): value for name, value in changed.items()}
    return list(found.items())


def good_fields(rng: Random) -> Fields:
    """A good ModelInferRequest."""
    which = rng.randrange(4)
    fields: Fields = [(3, str(rng.randrange(10**6)))]
    if which == 0:
        fields += [(1, "good"), (5, [(1, "x"), (2, "FP32"), (3, 1), (3, 3)]), (7, struct.pack("<3f", 1, 2, 3))]
    elif which == 1:
        fields += [(1, "text"), (5, [(1, "x"), (2, "BYTES"), (3, 1), (3, 2), (5, [(8, b"a"), (8, b"\xff")])])]
    elif which == 2:
        ints = [(2, n) for n in range(4)]
        fields += [
            (1, "pair"),
            *((5, [(1, name), (2, "INT32"), (3, 1), (3, 4), (5, ints)]) for name in "ab"),
            (6, [(1, "sum")]),
        ]
    else:
        fields += [
            (1, "total"), (5, [(1, "x"), (2, "FP32"), (3, 1), (3, 1), (5, [(6, struct.pack("<f", 1))])]),
            (4, [(1, "sequence_id"), (2, [(2, rng.randrange(100))])]), (4, [(1, "sequence_start"), (2, [(1, 1)])]),
            (4, [(1, "sequence_end"), (2, [(1, int(rng.random() < 0.9))])]),
        ]  # fmt: skip
    return fields


def _places(fields: Fields) -> list[tuple[Fields, int]]:
    found: list[tuple[Fields, int]] = []
    for n, (_, value) in enumerate(fields):
        found.append((fields, n))
        if isinstance(value, list):
            found += _places(value)
    return found


def _nested(depth: int) -> bytes:
    body = b""
    for _ in range(depth):
        body = b"\x22" + varint(len(body)) + body
    return body


def _nasty(rng: Random) -> Any:
    return rng.choice((
        *DIMS, 2**64 - 1, 0.5, float("nan"), b"", b"x", b"\xff\xfe", b"\x00" * 50, "ü" * 30, b"a" * 5000, [], [(1, 1)],
        [(2, [(1, 1)])], _nested(rng.choice((5, 150))), b"\x0b" * rng.choice((3, 150)), b"\x80" * 11,
        rng.randbytes(rng.randrange(40)),
        struct.pack("<I", 2**32 - 1), "sequence_id", "shared_memory_region", "FP32", "BF16", "good",
    ))  # fmt: skip


def _mutated(rng: Random, fields: Fields) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = _places(fields)
        if not places:
            break
        owner, n = rng.choice(places)
        number, value = owner[n]
        how = rng.randrange(7)
        if how == 0:
            del owner[n]
        elif how == 1:
            owner.extend([owner[n]] * rng.choice((1, 2, 60)))
        elif how == 2:
            owner[n] = (rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 15, 100, 2**28)), value)
        elif how == 3 and isinstance(value, int):
            owner[n] = (number, rng.choice(DIMS))
        elif how == 4:
            owner.insert(rng.randrange(len(owner) + 1), (rng.randrange(1, 9), _nasty(rng)))
        else:
            owner[n] = (number, _nasty(rng))
    return encode(fields)


def make_grpc_case(rng: Random) -> GrpcCase:
    """A random malformed call."""
    kind = rng.choice((*("protobuf",) * 3, *("bytes", "frames") * 2, "stream", "unary", "prefix", "headers"))
    return globals()[f"_{kind}"](rng)


def _protobuf(rng: Random) -> GrpcCase:
    return GrpcCase("protobuf", call_headers(), message(_mutated(rng, good_fields(rng))))


def _bytes(rng: Random) -> GrpcCase:
    return GrpcCase("bytes", call_headers(), message(bytes_mutated(rng, encode(good_fields(rng)))))


def _stream(rng: Random) -> GrpcCase:
    """Several requests on one stream, good and bad."""
    parts = []
    for _ in range(rng.randrange(5)):
        fields = good_fields(rng)
        parts.append(message(encode(fields) if rng.random() < 0.3 else _mutated(rng, fields)))
    data = b"".join(parts)
    return GrpcCase("stream", call_headers("ModelStreamInfer"), data if rng.random() < 0.8 else bytes_mutated(rng, data))


def _unary(rng: Random) -> GrpcCase:
    """Calls of the other methods; models that the health check needs are not unloaded."""
    name = rng.choice((b"other", b"nobody", b"../../etc/passwd", b"\xff", b"a" * 3000, b"", rng.randbytes(8)))
    if rng.random() < 0.2:
        path = rng.choice(("/grpc.health.v1.Health/Check", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                           "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"))  # fmt: skip
        parts: Fields = [(rng.randrange(1, 8), rng.choice((name, b"inference.GRPCInferenceService", _nasty(rng))))]
        return GrpcCase("unary", [*call_headers()[:2], (":path", path), *call_headers()[3:]], message(encode(parts)))
    method = rng.choice(UNARY)
    fields: Fields = [(1, name), (2, rng.choice((b"1", b"other", b"\xff", b"99999999999999999999")))]
    if method.startswith("RepositoryModel"):
        fields = [
            (1, rng.choice((b"", b"x", b"\xff"))),
            (2, name),
            (3, [(1, rng.choice((b"config", b"file:1/x"))), (2, [(3, b"{}")])]),
        ]
        fields = fields[: rng.randrange(4)]
    if rng.random() < 0.4 and (nasty := _nasty(rng)) != "good":
        fields.append((rng.randrange(1, 9), nasty))
    return GrpcCase("unary", call_headers(method), message(encode(fields)))


def _prefix(rng: Random) -> GrpcCase:
    """Wrong lengths and flags, no message, several messages."""
    payload = encode(good_fields(rng))
    how = rng.randrange(8)
    headers = call_headers()
    if how == 0:
        data = message(payload, length=rng.choice((0, 1, len(payload) - 1, len(payload) + 1, 2**20, 2**31, 2**32 - 1)))
    elif how == 1:
        data = message(payload, compressed=rng.choice((1, 2, 255)))
    elif how == 2:
        headers = call_headers(grpc_encoding=rng.choice(("gzip", "deflate", "identity", "zstd", "\x7f")))
        packed = gzip.compress(payload, 1, mtime=0)
        packed = rng.choice((payload, packed[: rng.randrange(40)], bytes_mutated(rng, packed)))
        data = message(packed, compressed=1)
    elif how == 3 and rng.random() < 0.2:
        headers, data = call_headers(grpc_encoding="gzip"), message(_bomb(), compressed=1)
    elif how == 4:
        data = message(payload) * rng.randrange(2, 4)
    elif how == 5:
        data = b""
    elif how == 6:
        data = message(payload)[: rng.randrange(5 + len(payload))]
    else:
        data = rng.randbytes(rng.randrange(60))
    return GrpcCase("prefix", headers, data)


def _headers(rng: Random) -> GrpcCase:
    """Headers that are missing, duplicated, wrong or too large."""
    headers = call_headers()
    how = rng.randrange(6)
    if how == 0:
        del headers[rng.randrange(len(headers))]
    elif how == 1:
        headers.insert(rng.randrange(len(headers)), rng.choice(headers))
    elif how == 2:
        n = rng.randrange(len(headers))
        headers[n] = (
            headers[n][0],
            rng.choice(("", "x", "GET", "/", "/x/y", "\x00", "ü", "a" * 3000, "application/json", "/" * 500)),
        )
    elif how == 3:
        headers.append(rng.choice((
            *(("grpc-timeout", text) for text in ("1n", "99999999H", "-1S", "x", "")),
            ("grpc-timeout", "9" * 50 + "S"), ("Upper", "x"), ("connection", "close"), (":late", "x"), ("content-length", "5"),
            ("content-length", "-1"), ("x-bin", "%%%"), ("transfer-encoding", "chunked"), ("a b", "x"), ("", ""), ("x", "\r\n"),
            ("traceparent", "zz"), ("authorization", "Bearer \xff"), ("grpc-accept-encoding", "," * 200),
        )))  # fmt: skip
    elif how == 4:
        headers += [(f"h{n}", "v" * rng.choice((1, 50))) for n in range(rng.choice((10, 150)))]
    else:
        headers.append(("big", "z" * rng.choice((4000, 9000, 40_000))))
    return GrpcCase("headers", headers, message(encode(good_fields(rng))))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"", length: int | None = None) -> bytes:
    """An HTTP/2 frame."""
    size = len(payload) if length is None else length
    return struct.pack(">HBBBI", size >> 8, size & 255, kind, flags, stream) + payload


def _frames(rng: Random) -> GrpcCase:
    """The frames of a good call, some changed, left out, duplicated, swapped or invented."""
    block = Encoder().encode(call_headers())
    data = message(encode(good_fields(rng)))
    parts = [frame(4, 0, 0), frame(1, 4, 1, block), frame(0, 1, 1, data)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, how = rng.randrange(len(parts)), rng.randrange(6)
        if how == 0:
            del parts[at]
            if not parts:
                break
        elif how == 1:
            parts[at] = bytes_mutated(rng, parts[at])
        elif how == 2:
            parts.insert(at, parts[rng.randrange(len(parts))])
        elif how == 3:
            parts.append(parts.pop(at))
        else:
            payload = rng.choice(
                (b"", b"\x00" * 4, b"\x00" * 8, b"\xff" * 6, block, rng.randbytes(rng.randrange(30)), b"\x00" * 5)
            )
            length = None if rng.random() < 0.8 else rng.choice((0, 5, 16384, 16385, 2**24 - 1))
            parts.insert(at, frame(rng.choice((*range(11), 255)), rng.choice((0, 1, 4, 5, 8, 32, 255)),
                                   rng.choice((0, 1, 1, 2, 3, 5, 2**31 - 1, 2**32 - 1)), payload, length))  # fmt: skip
    return GrpcCase("frames", [], b"", b"".join(parts))


@cache
def _bomb() -> bytes:
    """30 KiB that decompress to 30 MiB."""
    return gzip.compress(bytes(30 << 20), mtime=0)
