"""HTTP/1.1 on the event loop: bytes → `RequestReader` → `Exchange` → `routes.begin` → answers, in the order of requests.

Bounds the number of requests that a client may have pending, and the time it may take. Knows nothing of tensors and models.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from time import perf_counter
from typing import Any

from hurtle.errors import ServingError
from hurtle.serving.client_connection import ClientConnection
from hurtle.serving.lifecycle import Event, State
from hurtle.serving.rest import routes
from hurtle.serving.rest.exchange import RETRY, Exchange, HttpError, memory_error, with_close
from hurtle.serving.rest.reader import BODY, HEAD, IDLE, RequestReader
from hurtle.serving.rest.watch import Watch
from hurtle.serving.unpacking import DEFLATE, GZIP, Unpacker

log = logging.getLogger("hurtle.serving")
MAX_PENDING = 32
"""Requests of one connection that may be pending; no more are read until some are answered."""
BURST = 64
"""Requests of one connection that are read before other connections get their turn."""
SLICE = 16 << 10
"""Bytes given to the parser at a time, so that one read cannot become many thousand requests."""
HEAD_SECONDS = 20
"""Seconds for a request's head to arrive."""
BODY_SECONDS = 30
"""Seconds before a body must arrive at `BODY_RATE` bytes per second."""
BODY_RATE = 16 << 10
IDLE_SECONDS = 300
"""Seconds that a connection may be idle."""
WRITE_SECONDS = 60
"""Seconds that a client may read nothing of an answer."""
LINGER_SECONDS = 5
"""Seconds that the rest of a refused request is read and dropped; closing at once would lose the answer."""
DRAIN_CUT = 1.0
"""Seconds after the grace for a client that pipelines without waiting for answers. Requests that arrive later are not run."""

_TOO_MANY = b'{"error":"The server has too many connections; retry later or use another server."}'
GOODBYE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_TOO_MANY), _TOO_MANY)
)
"""Sent to clients that cannot even be refused request by request."""
OPEN, ENDING, LAST_CALL = State.OPEN, State.ENDING, State.LAST_CALL
_DRAINING = (State.DRAINING, State.CLOSE_IDLE, State.LAST_CALL, State.DRAINED)


class HttpConnection(ClientConnection):
    """One client's connection.

    A connection with a `refusal` answers its first request with that error, health checks excepted, then closes.

    Args:
        service: What answers.

    Attributes:
        is_congested: Whether the client does not read its answers.
        pending: Requests in order; the last one may still be arriving.
    """

    def __init__(self, service: Any):
        super().__init__(service, State.OPEN)
        self.watch: Watch = Watch.of(service)
        self.is_congested = False
        self.pending: deque[Exchange] = deque()
        self.max_body: int = service.config.max_message_bytes
        self._reader = RequestReader(self, self.max_body)
        self._held = b""
        """Bytes that were read but must wait, because too much is pending."""
        self._is_paused = False
        """Whether nothing is read from the transport, because too much is pending."""
        self._is_pipelined = False
        """Whether the client sends requests before it has the answers to earlier ones."""
        self._completed = self._completed_at_drain = 0
        """Requests that arrived, in all and until draining began."""
        self._cut_at = 0.0
        """When the last call is made, on the event loop's clock."""
        self._unsent = self._counted = 0
        self._since = self.watch.tick
        """The tick at which the current wait began."""

    @property
    def is_ending(self) -> bool:
        """Whether nothing more is read."""
        return self.lifecycle.state >= ENDING

    def is_draining(self) -> bool:
        """Whether the server stops."""
        return self.lifecycle.state in _DRAINING

    def is_idle(self) -> bool:
        """Whether every request has its answer."""
        return not self.pending

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for requests."""
        self.watch.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Drop what is pending."""
        super().connection_lost(exc)
        self._held, self.is_congested = b"", False
        self._count_held()
        self._reader.close()
        self.watch.discard(self)
        self._forget_pending()

    def eof_received(self) -> bool:
        """The client sends no more. If it waits for a model it counts as gone; other answers come soon, and it gets them."""
        if not self.pending or self._reader.phase != IDLE or any(exchange.ticket is not None for exchange in self.pending):
            return False
        self.pending[-1].close = True
        self._end_reading()
        return self.transport.can_write_eof()

    def _end_reading(self) -> None:
        if self.lifecycle.state is not State.CLOSED:
            self.lifecycle.fire(Event.END)

    def pause_writing(self) -> None:
        """Read no further requests: the client does not read its answers."""
        self.is_congested, self._unsent, self._since = True, 0, self.watch.tick
        self._count_held()

    def resume_writing(self) -> None:
        """Read requests again."""
        self.is_congested, self._since = False, self.watch.tick
        self._count_held()
        self._resume_soon()

    def _count_held(self) -> None:
        """Count unread answers, and requests that wait because too many came at once."""
        held = len(self._held) + (self.transport.get_write_buffer_size() if self.is_congested else 0)
        self.service.memory.used += held - self._counted
        self._counted = held

    def data_received(self, data: bytes) -> None:
        """Read requests."""
        if self.lifecycle.state >= ENDING:
            return
        if self._held:
            self._held += data
        elif len(data) <= SLICE and not self._is_blocked():
            self._feed(data)
        else:
            self._feed_in_slices(data)

    # Reading.

    def _is_blocked(self) -> bool:
        return self.is_congested or len(self.pending) >= MAX_PENDING

    def _feed(self, data: bytes | memoryview) -> None:
        completed = self._completed
        error = self._reader.feed(data)
        if self._completed > completed + 1:
            self._is_pipelined = True
        if error is not None and not self.is_ending:
            self._refuse(error)

    def _feed_in_slices(self, data: bytes) -> None:
        view, at, burst = memoryview(data), 0, self._completed + BURST
        while at < len(view) and not self.is_ending:
            if self._is_blocked() or self._completed >= burst:
                self._held = bytes(view[at:])
                self._count_held()
                if not self._is_paused:
                    self._is_paused = True
                    self.transport.pause_reading()
                self._resume_soon()
                return
            size = max(SLICE, self._reader.body_left) if self._reader.phase == BODY else SLICE
            self._feed(view[at : at + size])
            at += size

    def _resume_soon(self) -> None:
        if self._is_paused and not self._is_blocked():
            self.loop.call_soon(self._resume)

    def _resume(self) -> None:
        if not self._is_paused or self._is_blocked() or self.is_ending:
            return
        held, self._held = self._held, b""
        self._feed_in_slices(held)
        if not self._held:
            self._count_held()
            if self.lifecycle.state is State.LAST_CALL:
                self._end_when_whole()
        if not self._held and not self.is_ending:
            self._is_paused = False
            self._since = self.watch.tick
            self.transport.resume_reading()

    # The reader's calls.

    def began(self) -> None:
        """A request began to arrive."""
        self._since = self.watch.tick

    def admitted(self, exchange: Exchange) -> None:
        """A request's head has arrived; its body may follow."""
        self.pending.append(exchange)
        if len(self.pending) > 1:
            self._is_pipelined = True
        if self.refusal is not None:
            exchange.close = True
            if exchange.refusal is None and not (exchange.route is not None and exchange.route.is_free):
                exchange.refusal = HttpError(503, str(self.refusal), RETRY)
        if exchange.wants_continue and self.pending[0] is exchange:
            self._say_continue(exchange)

    def completed(self, exchange: Exchange) -> None:
        """A request has arrived."""
        self._since = self.watch.tick
        self._completed += 1
        state = self.lifecycle.state
        if exchange.close or (state is LAST_CALL and not self._is_paused):  # ignore what follows
            self._end_reading()
        if state is not OPEN and self.is_draining():  # first read what came with it: only the last answer may say `close`
            self.loop.call_soon(self._begin, exchange)
        elif exchange.refusal is not None or b"content-encoding" in exchange.headers:
            self._begin(exchange)
        else:
            routes.begin(self.service, exchange)

    def _begin(self, exchange: Exchange) -> None:
        if not exchange.is_waited_for():
            return
        if exchange.refusal is not None:
            exchange.fail(exchange.refusal)
        elif exchange.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            self.spawn(exchange, self._begin_unpacked(exchange))
        else:
            routes.begin(self.service, exchange)

    async def _begin_unpacked(self, exchange: Exchange) -> None:
        coding = exchange.headers[b"content-encoding"].lower()
        if coding not in (b"gzip", b"x-gzip", b"deflate"):
            raise HttpError(415, f"Content-Encoding: expected gzip or deflate, got {coding[:40]!r}.")
        unpacker = Unpacker(exchange.body, DEFLATE if coding == b"deflate" else GZIP, self.max_body, "The body")
        exchange.unpacker = unpacker

        def hold(size: int) -> bool:
            if not exchange.is_waited_for():
                return False
            if not exchange.charge(size):
                raise memory_error()
            return True

        try:
            is_whole = unpacker.begin()
            if not hold(unpacker.size if is_whole else unpacker.claimed):
                return
            body = unpacker.join() if is_whole else await unpacker.finish(hold)
        except ServingError as error:
            raise HttpError(413 if error.reason == "resource_exhausted" else 400, str(error)) from None
        finally:
            exchange.unpacker = None
        if body is not None and exchange.is_waited_for():
            exchange.body = body
            routes.begin(self.service, exchange)

    # Answering.

    def spawn(self, exchange: Exchange, work: Any) -> None:
        """Run a coroutine that answers an exchange; its error becomes the answer."""
        self.watch.spawn(self._guard(exchange, work))

    async def _guard(self, exchange: Exchange, work: Any) -> None:
        try:
            await work
        except (ServingError, HttpError) as error:
            exchange.fail(error)
        except Exception:
            log.exception("serving HTTP failed")
            exchange.fail(HttpError(500, "The server failed; see its log."))

    def flush(self) -> None:
        """Write the answers whose turn it is."""
        pending = self.pending
        while pending and (answer := pending[0].answer) is not None:
            exchange = pending.popleft()
            if exchange.charged:
                self.service.memory.used -= exchange.charged
            if not exchange.close and self.lifecycle.state is not OPEN and self.is_draining() and self._is_last_answer():
                exchange.close, answer = True, with_close(answer)
            if isinstance(answer, bytes):
                self.transport.write(answer)
            else:
                self.transport.writelines(answer)
            if exchange.close:
                self._end(exchange)
                return
        if self.is_congested:
            self._count_held()
        if self._reader.phase == IDLE:
            self._since = self.watch.tick
        if pending and pending[0].wants_continue:
            self._say_continue(pending[0])
        if self._is_paused:
            self._resume_soon()
        if self.lifecycle.state is not OPEN and self.lifecycle.state in (State.CLOSE_IDLE, LAST_CALL):
            self._drain_on()

    def _say_continue(self, exchange: Exchange) -> None:
        exchange.wants_continue = False
        if not exchange.is_complete:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def write_log(self, exchange: Exchange, status: int, size: int) -> None:
        """Write a line of the access log."""
        route = exchange.route
        version = {"version": route.version} if route is not None and route.version else {}
        self.service.access_log.write(
            transport="http",
            method=f"{exchange.method.decode()} {route.name if route else '?'}",
            path=exchange.url.partition(b"?")[0].decode("utf-8", "replace"),
            model=route.model if route else "",
            **version,
            status=status,
            peer=self.peer,
            duration_ms=round((perf_counter() - exchange.started) * 1e3, 3),
            request_bytes=len(exchange.body),
            response_bytes=size,
            id=exchange.id,
        )

    # Ending.

    def _refuse(self, error: HttpError | ServingError) -> None:
        """Answer a request that cannot be read any further, after the answers before it, and read no more."""
        self.service.notices.count("HTTP connections closed for a request that cannot be read", f"{error} from {self.peer}")
        self._end_reading()
        self._held = b""
        exchange = self._reader.exchange if self._reader.phase == BODY else None
        if exchange is None:
            exchange = Exchange(self, b"?", self._reader.url, {}, True, False)
        if exchange not in self.pending:
            self.pending.append(exchange)
        exchange.close, exchange.wants_continue, exchange.body = True, False, b""
        exchange.fail(error)

    def _end(self, last: Exchange) -> None:
        """Close after the last answer; not at once if the client may still be sending."""
        self._forget_pending()
        self._end_reading()
        self._since = self.watch.tick
        has_eof = self.transport.can_write_eof()
        if self.is_draining() and (has_eof or not last.is_complete):
            self.linger()
        elif last.is_complete:
            self._close()
            return
        elif has_eof:
            self.transport.write_eof()  # `check` closes
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()

    def _forget_pending(self) -> None:
        for exchange in self.pending:
            release = partial(self.service.memory.release, exchange.charged)
            if exchange.unpacker is not None:
                exchange.unpacker.close(release)
            else:
                release()
            if exchange.ticket is not None:
                exchange.ticket.cancel()
        self.pending.clear()

    def hang_up(self) -> None:
        """Close an idle connection without waiting for requests that may be on their way."""
        self._end_reading()
        self.close()

    def ask_to_go(self) -> None:
        """HTTP/1 can say `Connection: close` only with an answer: note what has arrived before the grace."""
        self._completed_at_drain = self._completed
        self._cut_at = self.loop.time() + self.grace + DRAIN_CUT

    def on_grace_over(self) -> None:
        """Close if idle; a client that has asked meanwhile gets as long again, for its next answer to say `close`."""
        if not self.lifecycle.allows(Event.GRACE_OVER):
            return
        self.lifecycle.fire(Event.GRACE_OVER)
        if self._completed == self._completed_at_drain:
            self._close_if_idle()
        else:
            self.set_timer(self.grace, self._close_if_idle)

    def on_last_call(self) -> None:
        """Serve only what has been read."""
        self._end_when_whole()

    def _is_last_answer(self) -> bool:
        """Whether nothing is pending behind the answer that is written, while the server stops."""
        if self._is_pipelined and self.lifecycle.state is State.DRAINING:
            return False
        return not self.pending and not self._held and self._reader.phase == IDLE

    def _drain_on(self) -> None:
        """After an answer that was not the last one, because more has arrived."""
        if not self.pending:
            self.loop.call_later(self.grace, self._close_if_idle)
        if self.loop.time() >= self._cut_at:
            self.call_last()

    def _end_when_whole(self) -> None:
        """Read no more, unless bytes that were read are still to be parsed or end within a request, which is then the last."""
        if self._held or self._reader.phase != IDLE or self.is_ending:
            return
        self._end_reading()
        if not self.pending:
            self._close()

    def _close_if_idle(self) -> None:
        if not self.pending and self._reader.phase == IDLE and not self._held and not self.is_ending:
            self._close()

    def _close(self) -> None:
        if self.is_draining():
            self.close()
        else:
            self.transport.close()

    def check(self, tick: int) -> None:
        """End the connection if the client takes too long; called every second."""
        spent, phase = tick - self._since, self._reader.phase
        if self.is_congested or self.transport.is_closing():
            unsent = self.transport.get_write_buffer_size()
            if unsent != self._unsent:
                self._unsent, self._since = unsent, tick
                self._count_held()
            elif spent > WRITE_SECONDS:
                self.transport.abort()
        elif self.is_ending:
            if not self.pending and spent > LINGER_SECONDS:
                self.transport.close()
        elif self._is_paused:
            pass  # the client waits for us
        elif phase == HEAD and spent > HEAD_SECONDS:
            self._refuse(HttpError(408, f"Expected a request's head within {HEAD_SECONDS} seconds."))
        elif phase == BODY and self._reader.received < (spent - BODY_SECONDS) * BODY_RATE:
            self._refuse(HttpError(408, f"Expected the body at {BODY_RATE:,} bytes a second or more."))
        elif phase == IDLE and not self.pending and spent > (IDLE_SECONDS if self.refusal is None else LINGER_SECONDS):
            self.transport.close()
