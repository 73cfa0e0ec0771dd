"""The kinds of call: `UnaryCall`, `InferCall` (the one that must be fast), `StreamingCall`, `StreamInferCall`.

message → codec → `InferenceService` → reply → codec → message. `methods` has the functions of the unary methods.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from inspect import isawaitable
from time import monotonic
from typing import Any

from google.protobuf.message import DecodeError

from hurtle.errors import ServingError
from hurtle.serving.compression import PACKER, pays
from hurtle.serving.grpc.call import Call
from hurtle.serving.grpc.codec import decode_request, encode_response, varint
from hurtle.serving.memory import FULL
from hurtle.serving.messages import InferRequest, InferResponse
from hurtle.serving.protos import ModelStreamInferResponse
from hurtle.serving.status import invalid

log = logging.getLogger("hurtle.serving")
MAX_PENDING = 64
"""Requests of one stream that may run at the same time."""
MAX_UNSENT = 1 << 20
"""Bytes of unread answers on one stream beyond which its requests wait."""


def parse(call: Call, payload: bytes) -> Any:
    """Parse the call's request."""
    kind = call.head.method.request  # type: ignore[union-attr]
    try:
        return kind.FromString(payload)
    except DecodeError:
        raise invalid(f"The request is not a {kind.DESCRIPTOR.name}: its protobuf encoding is damaged.") from None


def internal_error(call: Call, error: Exception) -> ServingError:
    """The client's version of an unexpected error; the log gets the traceback."""
    log.exception("%s failed", call.head.path, exc_info=error)
    return ServingError("internal", f"{call.head.path} failed: {type(error).__name__}.")


def limit(request: InferRequest) -> None:
    """Apply Triton's parameter `timeout`, in microseconds, to the deadline; 0 means none."""
    timeout = request.parameters.get("timeout")
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout < 0:
        raise invalid(f"Parameter 'timeout': expected microseconds, a whole number ≥ 0, got {timeout!r:.60}.")
    if timeout:
        end = monotonic() + timeout * 1e-6
        request.deadline = end if request.deadline is None else min(end, request.deadline)


class UnaryCall(Call):
    """One message in, one out: the method's function returns the answer or a coroutine."""

    payload: bytes | None = None
    task: asyncio.Task[Any] | None = None
    timer: asyncio.TimerHandle | None = None

    def on_message(self, payload: bytes) -> None:
        """Keep it until the client has ended the call: a second message is an error."""
        if self.payload is not None:
            raise ServingError("unimplemented", f"{self.head.path} takes one message, got more.")
        self.hold(len(payload))
        self.payload = payload

    def on_half_close(self) -> None:
        """Run the method."""
        if self.payload is None:
            raise ServingError("unimplemented", f"{self.head.path} takes one message, got none.")
        self.on_only_message(self.payload)

    def on_only_message(self, payload: bytes) -> None:
        """Run the method."""
        try:
            request = parse(self, payload)
            self.model = getattr(request, "model_name", "") or getattr(request, "name", "")
            self.version = getattr(request, "version", "")
            result = self.head.method.run(self.connection.service, request)  # type: ignore[union-attr,misc]
        except ServingError as error:
            self.fail(error)
        except Exception as error:
            self.fail(internal_error(self, error))
        else:
            if not isawaitable(result):
                self.answer(result.SerializeToString())
                return
            self.task = asyncio.ensure_future(result)
            self.task.add_done_callback(self._on_done)
            if self.deadline is not None:
                self.timer = self.connection.loop.call_later(self.deadline - monotonic(), self._expire)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            if not self.ended:
                self.fail(ServingError("cancelled", f"{self.head.path} was cancelled."))
            return
        error = task.exception()
        if error is None:
            self.answer(task.result().SerializeToString())
        elif isinstance(error, ServingError):
            self.fail(error)
        else:
            self.fail(internal_error(self, error))  # type: ignore[arg-type]

    def _expire(self) -> None:
        self.fail(ServingError("deadline_exceeded", f"The deadline passed while {self.head.path} ran."))

    def on_finish(self) -> None:
        """Cancel the method if it still runs."""
        if self.timer is not None:
            self.timer.cancel()
        if self.task is not None:
            self.task.cancel()
        super().on_finish()


class InferCall(UnaryCall):
    """ModelInfer, without task, future or timer."""

    is_inference = True
    ticket: Any = None

    def on_only_message(self, payload: bytes) -> None:
        """Run the inference."""
        self.payload = None
        if self.deadline is not None and self.deadline <= monotonic():
            self.fail(ServingError("deadline_exceeded", "The deadline passed before the request had arrived; it was not run."))
            return
        try:
            request = decode_request(payload)
            request.deadline, request.trace_parent = self.deadline, self.head.trace_parent
            self.model, self.request_id = request.model, request.id
            if request.version:
                self.version = request.version
            if request.parameters:
                limit(request)
            self.ticket = self.connection.service.infer(request, self.on_reply)
        except ServingError as error:  # the request is bad; `infer` itself raises none
            self.fail(error)
        except Exception as error:
            self.fail(internal_error(self, error))

    def on_reply(self, response: InferResponse | ServingError) -> None:
        """Send the answer."""
        self.ticket = None
        if isinstance(response, InferResponse):
            try:
                self.answer(encode_response(response))
            except ServingError as error:
                self.lose(error)
            except Exception as error:
                self.lose(internal_error(self, error))
        else:
            self.fail(response)

    def count_end(self, error: ServingError) -> None:
        """Count the error with the model."""
        self.count(error, self.model, self.version)

    def on_cancel(self) -> None:
        """Cancel the inference."""
        if self.ticket is not None:
            self.ticket.cancel()
            self.ticket = None
        super().on_cancel()


class StreamingCall(Call):
    """A call with many answers; it ends at its deadline or when the server stops."""

    timer: asyncio.TimerHandle | None = None

    def limit(self) -> None:
        """End the call at its deadline."""
        if self.deadline is not None:
            self.timer = self.connection.loop.call_later(max(self.deadline - monotonic(), 0), self._expire)

    def _expire(self) -> None:
        self.fail(ServingError("deadline_exceeded", f"The deadline of {self.head.path} passed."))

    def on_half_close(self) -> None:
        """End the call."""
        self.end()

    def on_drain(self) -> None:
        """End the call: the server stops."""
        self.fail(ServingError("unavailable", "The server is shutting down."))

    def on_finish(self) -> None:
        """Cancel the timer."""
        if self.timer is not None:
            self.timer.cancel()
        super().on_finish()


def _missing(buffer: bytes | bytearray, more: bytes) -> int:
    """Bytes that the last message in a buffer lacks; `more` is what comes next, as a message's head may be split."""
    at, size = 0, len(buffer)
    while at < size:
        head = (buffer[at : at + 5] + more)[:5]
        at += 5 + int.from_bytes(head[1:], "big") if len(head) == 5 else 5
    return at - size


class Slot:
    """The place of an answer in a stream."""

    __slots__ = ("held", "is_compressed", "message", "request", "ticket")

    def __init__(self, held: int) -> None:
        self.held = held
        """Bytes of its request, later of its answer."""
        self.request: InferRequest | None = None
        self.message: bytes | None = None
        self.is_compressed = False
        self.ticket: Any = None


class StreamInferCall(StreamingCall):
    """ModelStreamInfer: requests run concurrently, are answered in order, and fail one by one."""

    is_inference = True

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.slots: deque[Slot] = deque()
        self.draining = self.is_cut = False
        """Whether the server stops; whether requests that came after it said so were left out."""
        self.limit()

    def is_full(self) -> bool:
        """Whether too many requests run, or too many answers are unread."""
        return len(self.slots) >= MAX_PENDING or self.queued > MAX_UNSENT

    def is_running(self) -> bool:
        """Whether requests run."""
        return bool(self.slots)

    def on_data(self, data: bytes, start: int, stop: int, ended: bool) -> None:
        """Take requests; while the server stops, only the rest of one that has begun to arrive."""
        if self.draining:
            end = min(stop, start + _missing(self.buffer or b"", data[start : min(stop, start + 5)]))
            self.is_cut = self.is_cut or end < stop
            stop = end
        super().on_data(data, start, stop, ended)

    def on_message(self, payload: bytes) -> None:
        """Run a request."""
        slot = Slot(len(payload))
        self.slots.append(slot)
        try:
            self.hold(slot.held)
            slot.request = request = decode_request(payload)
            request.deadline, request.trace_parent = self.deadline, self.head.trace_parent
            self.model, self.version, self.request_id = request.model, request.version, request.id
            if request.parameters:
                limit(request)
            slot.ticket = self.connection.service.infer(request, partial(self._on_reply, slot))
        except ServingError as error:
            self._on_reply(slot, error)
        except Exception as error:
            self._on_reply(slot, internal_error(self, error))

    def _on_reply(self, slot: Slot, response: InferResponse | ServingError) -> None:
        slot.ticket = None
        if self.ended:
            return
        self.release(slot.held)
        message = self._encode(slot, response)
        slot.request, slot.held = None, len(message)
        self.held += slot.held
        self.connection.memory.used += slot.held
        if self.head.coding is not None and pays(message):
            PACKER.pack(message, self.head.coding, partial(self._fill, slot))
        else:
            self._fill(slot, message, False)

    def _fill(self, slot: Slot, message: bytes, is_compressed: bool) -> None:
        """Store an answer as it will be sent, and send those whose turn it is."""
        if self.ended:
            return
        self.release(slot.held - len(message))
        slot.message, slot.is_compressed, slot.held = message, is_compressed, len(message)
        slots = self.slots
        while slots and slots[0].message is not None:
            first = slots.popleft()
            self.release(first.held)
            self.send(first.message, first.is_compressed)  # type: ignore[arg-type]
        self.take_messages()
        self._end_if_done()

    def _encode(self, slot: Slot, response: InferResponse | ServingError) -> bytes:
        if isinstance(response, InferResponse):
            try:
                response.parameters = {**response.parameters, "triton_final_response": True}
                body = encode_response(response)
                if slot is not self.slots[0] and not self.may_keep(body):  # it would have to wait for earlier ones
                    raise ServingError("resource_exhausted", FULL)
                return b"".join((b"\x12", varint(len(body)), body))  # as the field infer_response
            except ServingError as error:
                return self._encode_error(slot, error)
            except Exception as error:
                return self._encode_error(slot, internal_error(self, error))
        if slot.request is not None:
            self.count(response, slot.request.model, slot.request.version)
            response.is_counted = True
        return self._encode_error(slot, response)

    def _encode_error(self, slot: Slot, error: ServingError) -> bytes:
        """Encode an error and count it, unless its model has."""
        self.count(error)
        message = ModelStreamInferResponse(error_message=str(error) or error.reason)
        if slot.request is not None:
            message.infer_response.id, message.infer_response.model_name = slot.request.id, slot.request.model
        return message.SerializeToString()

    def _end_if_done(self) -> None:
        if self.slots or self.ended or self.unpacking is not None:
            return
        if self._all_taken and not self.is_cut:
            self.end()
        elif self.draining and not self.buffer and (self._all_taken or not self.remote_closed):
            super().on_drain()

    def on_half_close(self) -> None:
        """End once every request has its answer."""
        self._end_if_done()

    def on_drained(self) -> None:
        """Go on with requests: the client has read its answers."""
        self.take_messages()

    def on_drain(self) -> None:
        """Answer the requests that have arrived, then end."""
        self.draining = True
        self._end_if_done()

    def on_finish(self) -> None:
        """Cancel what still runs."""
        for slot in self.slots:
            if slot.ticket is not None:
                slot.ticket.cancel()
            slot.ticket = slot.request = None  # slot and ticket refer to each other: break the cycle
        self.slots.clear()
        super().on_finish()
