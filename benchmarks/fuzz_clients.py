"""Clients that send the cases of fuzz_rest and fuzz_grpc and read the answers; no answer in time is an error."""

from __future__ import annotations

import json
import socket
import struct
from contextlib import suppress

from fuzz_grpc import PREFACE, GrpcCase, Headers, frame
from fuzz_rest import RestCase
from hpack import Decoder, Encoder

SECONDS = 15.0
"""Seconds that an answer may take."""
WINDOW = 2**31 - 1


class Unclean(Exception):
    """The server violated the protocol."""


def connect(port: int) -> socket.socket:
    """Connect to a local server."""
    found = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


class RestClient:
    """Sends raw HTTP/1.1; keeps its connection as long as the server does."""

    def __init__(self, port: int):
        self._port = port
        self._socket: socket.socket | None = None

    def run(self, case: RestCase) -> str:
        """The outcome in a word; raises `Unclean` if there is none."""
        if case.is_framed:
            return self._ask(case.data)
        with connect(self._port) as fresh:
            return self._until_closed(fresh, case.data)

    def _ask(self, data: bytes) -> str:
        status, _, body = self.request(data)
        return judge(status, body)

    def request(self, data: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
        """(status, headers, body) of the answer to a well-framed request."""
        for attempt in (1, 2):
            is_fresh = self._socket is None
            if self._socket is None:
                self._socket = connect(self._port)
            try:
                self._socket.sendall(data)
                found = _read_answer(self._socket, b"")
            except (ConnectionError, EOFError):
                self.close()
                if is_fresh or attempt == 2:
                    raise Unclean("the connection was closed without an answer") from None
                continue  # the server may close a connection that waits
            except TimeoutError:
                self.close()
                raise Unclean(f"no answer within {SECONDS:g} s") from None
            status, headers, body, _ = found
            if headers.get(b"connection", b"").lower() == b"close":
                self.close()
            return status, headers, body
        raise AssertionError

    def _until_closed(self, fresh: socket.socket, data: bytes) -> str:
        """The outcome of a request without a defined end: any number of answers, then the end."""
        outcome, rest = "closed", b""
        try:
            fresh.sendall(data)
            fresh.shutdown(socket.SHUT_WR)
        except (ConnectionError, OSError):
            pass  # it had enough; it may still have said why
        try:
            while True:
                status, _, body, rest = _read_answer(fresh, rest)
                outcome = judge(status, body)
        except (ConnectionError, EOFError):
            return outcome
        except TimeoutError:
            raise Unclean(f"still open after {SECONDS:g} s") from None

    def close(self) -> None:
        """Reconnect for the next request."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _read_answer(connection: socket.socket, data: bytes) -> tuple[int, dict[bytes, bytes], bytes, bytes]:
    while True:
        while b"\r\n\r\n" not in data:
            part = connection.recv(65536)
            if not part:
                if data:
                    raise Unclean(f"an answer that is cut short: {data[:100]!r}")
                raise EOFError
            data += part
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        if not first.startswith(b"HTTP/1.1 "):
            raise Unclean(f"not an HTTP answer: {first[:100]!r}")
        status = int(first.split()[1])
        if status >= 200:
            break
    headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
    size = int(headers.get(b"content-length", b"0"))
    while len(data) < size:
        part = connection.recv(65536)
        if not part:
            if not data:  # an answer to HEAD
                return status, headers, b"", b""
            raise Unclean("a body that is cut short")
        data += part
    return status, headers, data[:size], data[size:]


def judge(status: int, body: bytes) -> str:
    """An HTTP answer in a word; raises `Unclean` if it violates the protocol."""
    if status == 500:
        raise Unclean(f"500: {body[:200]!r}")
    if status >= 400 and body and not body.startswith(b"HTTP/1.1 "):  # after HEAD, what follows is the next answer
        try:
            said = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            raise Unclean(f"status {status} without a JSON error: {body[:200]!r}") from None
        if not isinstance(said, str) or not said or len(body) > 20_000 or "Traceback" in said:
            raise Unclean(f"status {status} with a bad message: {body[:200]!r}")
    return f"http {status}"


class GrpcClient:
    """Sends raw HTTP/2; keeps its connection as long as the server does."""

    def __init__(self, port: int):
        self._port = port
        self._socket: socket.socket | None = None

    def run(self, case: GrpcCase) -> str:
        """The outcome in a word; raises `Unclean` if there is none."""
        if case.frames is not None:
            with connect(self._port) as fresh:
                return self._until_closed(fresh, PREFACE + case.frames)
        return self.call(case.headers, case.data)[0]

    def call(self, headers: Headers, data: bytes) -> tuple[str, bytes]:
        """(outcome, data)."""
        if self._socket is None:
            self._open()
        connection = self._socket
        assert connection is not None
        stream, self._stream = self._stream, self._stream + 2
        try:
            block = self._encoder.encode(headers)
            parts = [block[n : n + 16384] for n in range(0, len(block), 16384)]
            for n, part in enumerate(parts):
                flags = 4 if n == len(parts) - 1 else 0
                connection.sendall(frame(9 if n else 1, flags, stream, part))
            connection.sendall(b"".join(frame(0, 0, stream, data[n : n + 16384]) for n in range(0, len(data), 16384)))
            connection.sendall(frame(0, 1, stream))
            outcome, answer = self._wait_for(connection, stream)
        except (ConnectionError, EOFError):
            outcome, answer = "closed", b""
        except TimeoutError:
            self.close()
            raise Unclean(f"no answer within {SECONDS:g} s") from None
        if outcome.startswith(("closed", "goaway")) or self._stream > 2**20:
            self.close()
        return outcome, answer

    def _open(self) -> None:
        self._socket = connect(self._port)
        self._encoder, self._decoder, self._stream, self._data = Encoder(), Decoder(), 1, b""
        self._encoder.header_table_size = 0  # a block that the server refuses must not spoil the next
        settings = struct.pack(">HI", 4, WINDOW)
        with suppress(ConnectionError):
            self._socket.sendall(PREFACE + frame(4, 0, 0, settings) + frame(8, 0, 0, struct.pack(">I", 2**30)))

    def _frames(self, connection: socket.socket) -> tuple[int, int, int, bytes]:
        while True:
            if len(self._data) >= 9:
                size = int.from_bytes(self._data[:3], "big")
                if len(self._data) >= 9 + size:
                    kind, flags = self._data[3], self._data[4]
                    stream = int.from_bytes(self._data[5:9], "big")
                    payload, self._data = self._data[9 : 9 + size], self._data[9 + size :]
                    return kind, flags, stream, payload
            part = connection.recv(65536)
            if not part:
                raise EOFError
            self._data += part

    def _wait_for(self, connection: socket.socket, stream: int) -> tuple[str, bytes]:
        answer, outcome = b"", ""
        while True:
            kind, flags, which, payload = self._frames(connection)
            if kind == 4 and not flags & 1:
                connection.sendall(frame(4, 1, 0))
            elif kind == 7:
                return f"goaway {int.from_bytes(payload[4:8], 'big')}", b""
            elif kind == 1:
                headers = dict(self._decoder.decode(payload))
                if which == stream:
                    status = headers.get("grpc-status")
                    outcome = f"grpc {status}" if status is not None else outcome or f"http {headers.get(':status')}"
                    if len(headers.get("grpc-message", "")) > 20_000 or "Traceback" in headers.get("grpc-message", ""):
                        raise Unclean(f"a bad message: {headers['grpc-message'][:200]}")
            elif kind == 3 and which == stream:
                return outcome if outcome.startswith("grpc") else f"reset {int.from_bytes(payload, 'big')}", answer
            elif kind == 0:
                if payload:
                    connection.sendall(frame(8, 0, 0, struct.pack(">I", len(payload))))
                answer += payload if which == stream else b""
            if which == stream and kind in (0, 1) and flags & 1:
                if not outcome.startswith("grpc") and outcome in ("", "http 200"):
                    raise Unclean("a call that ended without a status")
                return outcome, answer

    def _until_closed(self, fresh: socket.socket, data: bytes) -> str:
        """The outcome of arbitrary frames: any answers, then the end."""
        said = b""
        try:
            fresh.sendall(data + frame(6, 0, 0, b"still ok"))
            fresh.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        try:
            while part := fresh.recv(65536):
                said += part
        except ConnectionError:
            pass
        except TimeoutError:
            raise Unclean(f"still open after {SECONDS:g} s") from None
        outcome = "frames: closed"
        while len(said) >= 9:
            size = int.from_bytes(said[:3], "big")
            kind, payload, said = said[3], said[9 : 9 + size], said[9 + size :]
            if kind == 7:
                return f"frames: goaway {int.from_bytes(payload[4:8], 'big')}"
            if kind == 6:
                outcome = "frames: went on"
        return outcome

    def close(self) -> None:
        """Reconnect for the next call."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
