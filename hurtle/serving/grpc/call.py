"""`Call`: one gRPC call on an HTTP/2 stream: bytes → messages → subclass; answers, status and trailers back.

Knows no service: `methods` lists the methods, `calls` has the kinds of call.
"""

from __future__ import annotations

import asyncio
import logging
import re
from functools import partial
from time import monotonic
from typing import Any, Protocol

from hurtle.errors import ServingError
from hurtle.serving.compression import PACKER, pays
from hurtle.serving.grpc.head import CallHead
from hurtle.serving.grpc.http2_frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    encode_headers,
    frame,
    frame_head,
    window_update,
)
from hurtle.serving.grpc.http2_limits import STREAM_WINDOW
from hurtle.serving.grpc.http2_stream import HALF_CLOSED_LOCAL, LOCAL_END, Stream, StreamConnection
from hurtle.serving.memory import FULL
from hurtle.serving.status import CODES, invalid
from hurtle.serving.unpacking import Unpacker

log = logging.getLogger("hurtle.serving")
_HEAD = encode_headers([(b":status", b"200"), (b"content-type", b"application/grpc")])
_HEADS: dict[bytes | None, bytes] = {
    None: _HEAD,
    **{name: _HEAD + encode_headers([(b"grpc-encoding", name)]) for name in (b"gzip", b"deflate")},
}
"""The answer's header block, by the compression of its messages."""
_OK = encode_headers([(b"grpc-status", b"0")])
_HEAD_START = frame_head(len(_HEAD), HEADERS, END_HEADERS, 0)[:5]
_TAIL_START = frame_head(len(_OK), HEADERS, END_HEADERS | END_STREAM, 0)[:5]
_UNPRINTABLE = re.compile(rb"[^ -$&-~]")
MAX_MESSAGE_TEXT = 1000
SMALL = 4096
"""Bytes that a management call and its answer may hold even when memory is full: operators need them most then."""


class CallConnection(StreamConnection, Protocol):
    """A gRPC connection as its calls see it."""

    service: Any
    refusal: ServingError | None
    max_message: int

    def drain(self) -> None:
        """Ask the client to go, answer what it has sent, then close."""


class Call(Stream):
    """One call. Subclasses handle messages in `on_message`, or in `on_only_message` if one came whole and alone."""

    is_inference = False
    """Inference is refused when memory is full; management is not."""
    connection: CallConnection
    head: CallHead
    buffer: bytearray | None = None
    headers_sent = False
    started = 0.0
    deadline: float | None = None
    code = 0
    received = sent = held = 0
    """Bytes; `held` count against the limit of all connections together."""
    model = version = request_id = ""
    _all_taken = False
    """Whether the subclass knows that no message follows."""
    _taking = False
    """Whether `take_messages` runs: it must not be re-entered."""
    unpacking: asyncio.Task[None] | None = None
    """Decompresses a message in a thread; later messages wait."""
    unpacker: Unpacker | None = None
    _unpacking_held = 0
    """Bytes of `held` that belong to that message."""

    def __init__(self, connection: CallConnection, stream_id: int, head: CallHead):
        super().__init__(connection, stream_id, head)
        if head.timeout is not None:
            self.deadline = monotonic() + head.timeout

    def on_open(self) -> None:
        """Refuse what can be refused before a message comes."""
        head, service, connection, memory = self.head, self.connection.service, self.connection, self.connection.memory
        if service.access_log is not None:
            self.started = monotonic()
        if head.http_status != 200:
            self.refuse(head.http_status)
        elif head.error is not None:
            self.fail(head.error)
        elif connection.refusal is not None and not head.method.public:  # type: ignore[union-attr]
            self.fail(connection.refusal)
        elif not head.method.public and (error := service.authorize(head.authorization)) is not None:  # type: ignore[union-attr]
            self.fail(error)
        elif connection.output.queued > connection.guard.budget:
            self.fail(ServingError("resource_exhausted", "Too many answers wait for this connection to take them."))
        elif memory.used > memory.limit and self.is_inference:
            self.fail(ServingError("resource_exhausted", FULL))
        if connection.refusal is not None:
            connection.drain()

    def hold(self, size: int) -> None:
        """Count bytes that the call holds until `release`, or until it ends.

        Raises:
            ServingError: All connections together hold too much.
        """
        if not size:
            return
        self.held += size
        if not self.connection.memory.hold(size) and (self.is_inference or self.held > SMALL):
            raise ServingError("resource_exhausted", FULL)

    def release(self, size: int) -> None:
        """Stop counting bytes that were held."""
        if not self.ended:
            self.held -= size
            self.connection.memory.used -= size

    def on_message(self, payload: bytes) -> None:
        """Handle a message."""
        raise NotImplementedError

    def on_only_message(self, payload: bytes) -> None:
        """Handle the call's only message."""
        self.on_message(payload)
        if not self.ended:
            self.on_half_close()

    def on_half_close(self) -> None:
        """The client has sent its last message."""
        raise NotImplementedError

    def is_full(self) -> bool:
        """Whether messages must wait for now; call `take_messages` when that changes."""
        return False

    def on_data(self, data: bytes, start: int, stop: int, ended: bool) -> None:
        """Split the data into messages."""
        self.received += stop - start
        if self.buffer is None:
            size = stop - start - 5
            if (
                ended
                and size >= 0
                and not data[start]
                and int.from_bytes(data[start + 1 : start + 5], "big") == size <= self.connection.max_message
                and self.state < HALF_CLOSED_LOCAL
            ):
                self._all_taken = True
                self.on_only_message(data[start + 5 : stop])
                return
            self.buffer = bytearray()
        if not self.ended:
            self.buffer += memoryview(data)[start:stop]
            try:
                self.hold(stop - start)
            except ServingError as error:
                self.fail(error)
            self.take_messages()

    def take_messages(self) -> None:
        """Handle the messages that have arrived."""
        if self._taking or self.buffer is None:
            return
        self._taking = True
        try:
            while not self.ended and not self._is_blocked() and len(self.buffer) >= 5:
                payload = self._next_message(self.buffer)
                if payload is None:
                    break
                self.on_message(payload)
            else:
                if self.remote_closed and not (self.ended or self._is_blocked() or self.buffer or self._all_taken):
                    self._all_taken = True
                    self.on_half_close()
        except ServingError as error:
            self.fail(error)
        finally:
            self._taking = False
        if self.ended:
            self.buffer.clear()
        elif self.remote_closed and self.buffer and not self._is_blocked():
            self.fail(invalid(f"The call ended within a message, after {len(self.buffer):,} bytes of it."))
        elif not self.remote_closed:
            room = STREAM_WINDOW - len(self.buffer) - self.receive_window
            if room >= STREAM_WINDOW // 2:
                self.receive_window += room
                self.connection.output.write(window_update(self.id, room))

    def _is_blocked(self) -> bool:
        return self.unpacking is not None or self.is_full()

    def _next_message(self, buffer: bytearray) -> bytes | None:
        size, largest = int.from_bytes(buffer[1:5], "big"), self.connection.max_message
        if size > largest:
            raise ServingError("resource_exhausted", f"Expected messages of at most {largest:,} bytes, got {size:,}.")
        missing = size + 5 - len(buffer)
        if missing > 0:
            if missing > self.receive_window and not self.remote_closed:
                self.connection.guard.lend(self, missing - self.receive_window)
            return None
        compressed = buffer[0]
        with memoryview(buffer) as view:
            payload = bytes(view[5 : size + 5])
        del buffer[: size + 5]
        self.release(size + 5)
        self.connection.guard.give_back(self)
        return self._unpack(compressed, payload) if compressed else payload

    def _unpack(self, flag: int, packed: bytes) -> bytes | None:
        """The decompressed message, or None if a thread has to decompress it first."""
        if flag != 1 or self.head.bits is None:
            raise ServingError("internal", "A message is flagged as compressed, but grpc-encoding names no compression.")
        unpacker = Unpacker(packed, self.head.bits, self.connection.max_message)
        if unpacker.begin():
            return unpacker.join()
        self.hold(len(packed) + unpacker.claimed)
        self._unpacking_held = len(packed) + unpacker.claimed
        self.unpacker, self.unpacking = unpacker, self.connection.loop.create_task(self._unpack_aside(unpacker))
        return None

    async def _unpack_aside(self, unpacker: Unpacker) -> None:
        """Decompress a message in a thread, then handle it and those after it. Cancelled when the call ends."""

        def hold(size: int) -> bool:
            self._unpacking_held += size
            self.hold(size)
            return True

        try:
            payload = await unpacker.finish(hold)
            self.unpacking = self.unpacker = None
            self.release(self._unpacking_held)  # whoever holds the message counts it
            assert payload is not None
            self.on_message(payload)
        except ServingError as error:
            self.unpacking = self.unpacker = None
            self.fail(error)
        except Exception:
            log.exception("unpacking a message of %s failed", self.head.path)
            self.unpacking = self.unpacker = None
            self.fail(ServingError("internal", f"{self.head.path} failed."))
        self.take_messages()

    def answer(self, message: bytes) -> None:
        """Send the only answer, and status OK."""
        if self.state >= HALF_CLOSED_LOCAL:
            return
        if self.head.coding is not None and pays(message) and self.may_keep(message):
            self.release(self.held)
            self.hold(len(message))
            PACKER.pack(message, self.head.coding, self._on_packed)
            return
        output, size = self.connection.output, len(message) + 5
        if not self.headers_sent and not output.table_update and output.fits(self, size):
            output.window -= size
            stream = self.id.to_bytes(4, "big")
            parts = (
                _HEAD_START, stream, _HEAD,
                size.to_bytes(3, "big"), b"\0\0", stream, b"\0", (size - 5).to_bytes(4, "big"), message,
                _TAIL_START, stream, _OK,
            )  # fmt: skip
            output.write(b"".join(parts))
            self.sent += size
            self.connection.close_stream(self)
            self.on_finish()
        else:
            self.release(self.held)  # the request is done with, and its answer may need the room
            self.send(message)
            self.end()

    def _on_packed(self, message: bytes, is_compressed: bool) -> None:
        if not self.ended:
            self.release(self.held)
            self.send(message, is_compressed)
            self.end()

    def send(self, message: bytes, is_compressed: bool = False) -> None:
        """Send one of several answers."""
        if self.ended:
            return
        output = self.connection.output
        fits = output.fits(self, len(message) + 5)
        if not fits and not self.may_keep(message):
            self.lose(ServingError("resource_exhausted", FULL))
            return
        if not self.headers_sent:
            self.headers_sent = True
            output.write(self._headers_frame(_HEADS[self.head.coding], END_HEADERS))
        data = b"".join((b"\1" if is_compressed else b"\0", len(message).to_bytes(4, "big"), message))
        self.sent += len(data)
        if fits:
            output.window -= len(data)
            self.send_window -= len(data)
            self.connection.guard.worked += 1
            output.write(frame(DATA, 0, self.id, data))
        else:
            output.send(self, data)

    def may_keep(self, answer: bytes) -> bool:
        """Whether there is room for an answer that cannot be sent at once."""
        memory = self.connection.memory
        return memory.used + len(answer) <= memory.limit or not (self.is_inference or len(answer) > SMALL)

    def count(self, error: ServingError, model: str = "", version: str = "") -> None:
        """Count an error that the client gets, unless a model has counted it."""
        if not error.is_counted:
            self.connection.service.count_failure(error.reason, model, version)

    def count_end(self, error: ServingError) -> None:
        """Count the error that the call ends with; only inference errors belong to a model."""
        self.count(error)

    def lose(self, error: ServingError) -> None:
        """End the call with the server's error instead of an answer, which the model has counted as a success."""
        if not self.ended:
            self.count(error)
            error.is_counted = True
            self.fail(error)

    def fail(self, error: ServingError) -> None:
        """End the call with an error."""
        if self.ended:
            return
        self.count_end(error)
        extra = ((b"grpc-accept-encoding", b"identity,deflate,gzip"),) if error is self.head.error else ()
        self.end(CODES[error.reason].grpc, str(error), extra)

    def end(self, code: int = 0, text: str = "", extra: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Send the status; nothing may follow it."""
        if self.ended:
            return
        self.fire(LOCAL_END)
        self.code = code
        fields = [(b"grpc-status", b"%d" % code)]
        if text:
            plain = text[:MAX_MESSAGE_TEXT].encode("utf-8", "replace")
            fields.append((b"grpc-message", _UNPRINTABLE.sub(lambda byte: b"%%%02X" % byte[0][0], plain)))
        block = encode_headers([*fields, *extra])
        if not self.headers_sent:
            block = _HEAD + block
        self.connection.output.end(self, self._headers_frame(block, END_HEADERS | END_STREAM))
        self.on_finish()

    def refuse(self, http_status: int) -> None:
        """Answer a request that is not gRPC."""
        self.connection.service.count_failure("invalid_argument")
        self.fire(LOCAL_END)
        self.code = http_status
        block = encode_headers([(b":status", b"%d" % http_status)])
        self.connection.output.end(self, self._headers_frame(block, END_HEADERS | END_STREAM))
        self.on_finish()

    def _headers_frame(self, block: bytes, flags: int) -> bytes:
        output = self.connection.output
        if output.table_update:
            block, output.table_update = output.table_update + block, b""
        return frame(HEADERS, flags, self.id, block)

    def is_running(self) -> bool:
        """Whether requests of the call are running, so that it is not the client's turn."""
        return False

    def moved(self) -> int | None:
        """Bytes sent and received so far if answers are unread, or a message or the call is incomplete; else None."""
        is_ours = self.unpacking is not None or self.is_running() or (self.loan is not None and not self.loan.granted)
        if self.queued or (self.held and not is_ours and not self.remote_closed):
            return self.received + self.sent - self.queued
        return None

    def on_stall(self) -> None:
        """Fail the call; reset it if the error would wait behind unread answers."""
        if self.queued:
            super().on_stall()
        else:
            self.fail(ServingError("deadline_exceeded", "The rest of the request took too long to arrive."))

    def on_cancel(self) -> None:
        """End without a status: the client is gone."""
        if not self.ended:
            self.fire(LOCAL_END)
            self.code = CODES["cancelled"].grpc
            self.on_finish()

    def on_finish(self) -> None:
        """Release what the call holds, and write the access log. Called once."""
        memory = self.connection.memory
        if self.unpacking is not None and self.unpacker is not None:
            self.unpacking.cancel()
            self.unpacker.close(partial(memory.release, self._unpacking_held))
            self.held -= self._unpacking_held
            self.unpacking = self.unpacker = None  # call and task refer to each other: break the cycle
        if self.held:
            memory.release(self.held)
            self.held = 0
        log = self.connection.service.access_log
        if log is not None:
            version = {"version": self.version} if self.version else {}
            log.write(
                transport="grpc",
                method=self.head.path,
                path=self.head.path,
                model=self.model,
                **version,
                status=self.code,
                peer=self.connection.peer,
                duration_ms=(monotonic() - self.started) * 1e3,
                request_bytes=self.received,
                response_bytes=self.sent,
                id=self.request_id,
            )
