"""HTTP/1.1 on the event loop: bytes → `RequestReader` → `Exchange` → `routes.begin` → answers, in the order of requests.

Knows nothing of tensors and models. How many requests a client may have, and how long it may take, is bounded here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, cast

from hurtle.errors import ServingError
from hurtle.serving.address import peer_name
from hurtle.serving.rest import routes
from hurtle.serving.rest.exchange import RETRY, Exchange, HttpError, memory_error, with_close
from hurtle.serving.rest.reader import BODY, HEAD, IDLE, RequestReader
from hurtle.serving.rest.watch import Watch
from hurtle.serving.unpacking import DEFLATE, GZIP, Unpacker

log = logging.getLogger("hurtle.serving")
MAX_PENDING = 32
"""Requests of one connection that may wait for their answers; then it is not read from until some have gone."""
BURST = 64
"""Requests of one connection after which the others get their turn."""
SLICE = 16 << 10
"""Bytes that the parser gets at a time, so that it cannot make many thousand requests out of what was read at once."""
HEAD_SECONDS = 20
"""For a request's head to arrive."""
BODY_SECONDS = 30
"""For a body to begin to arrive at `BODY_RATE` bytes a second."""
BODY_RATE = 16 << 10
IDLE_SECONDS = 300
"""That a connection may wait for its next request."""
WRITE_SECONDS = 60
"""That a client may read nothing of an answer."""
LINGER_SECONDS = 5
"""That we read on, and forget it, after refusing a request: a client that still sends would else never see the answer."""
DRAIN_GRACE = 0.2
"""Seconds that an idle connection stays when the server stops: what was sent before the client could know is answered."""
DRAIN_CUT = 1.0
"""Seconds after the grace in which a client that never waits for its answers may come to an end. Then what has been read is
the last that is served; requests that come after it are not run."""
DRAIN_LINGER = 1.0
"""Seconds for a client to close after its last answer while the server stops."""

_TOO_MANY = b'{"error":"The server has too many connections; retry later or use another server."}'
GOODBYE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_TOO_MANY), _TOO_MANY)
)
"""What a client hears that cannot even be refused request by request."""


class HttpConnection(asyncio.Protocol):
    """One client's connection.

    Args:
        shell: What answers.

    Attributes:
        refusal: What its first request gets, unless it is a health check, where the connection is one too many. Then it closes.
        on_made: Called when it is among the shell's connections.
        is_ending: No more requests are read; what comes is forgotten.
        is_draining: The server is about to stop: the next answer is the last, or, where the client does not wait for answers
            before it sends, the next after `DRAIN_GRACE`.
        is_congested: The client does not read its answers.
        pending: Requests in their order; the last may still be arriving.
    """

    refusal: ServingError | None = None
    on_made: Callable[[Any], None] | None = None

    def __init__(self, shell: Any):
        self.shell = shell
        self.watch: Watch = Watch.of(shell)
        self.is_ending = self.is_draining = self.is_congested = False
        self.pending: deque[Exchange] = deque()
        self.max_body: int = shell.config.max_message_bytes
        self._reader = RequestReader(self, self.max_body)
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._peer = ""
        self._held = b""
        """What was read and must wait, because too much is pending."""
        self._is_paused = False
        self._is_pipelined = self._is_grace_over = False
        """Whether more than one request came at once; whether it has waited long enough for what was on its way."""
        self._is_cut, self._cut_at = False, 0.0
        """Whether, and since when on the loop's clock, no request may begin but those that have been read."""
        self._completed = self._unsent = self._counted = 0
        self._since = self.watch.tick
        """When what we wait for began."""

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came."""
        self._transport = cast("asyncio.Transport", transport)
        self._peer = peer_name(transport.get_extra_info("peername"))
        self.watch.add(self)
        self.shell.connections.add(self)
        if self.on_made is not None:
            self.on_made(self)
        if self.shell.draining:
            self.drain()

    def connection_lost(self, exc: Exception | None) -> None:
        """It went."""
        self.is_ending, self._held, self.is_congested = True, b"", False
        self._count_held()
        self._reader.close()
        self.watch.discard(self)
        self.shell.connections.discard(self)
        self._forget_pending()

    def eof_received(self) -> bool:
        """It will send no more. If it waits for a model it is taken for gone; other answers are near, and it gets them."""
        if not self.pending or self._reader.phase != IDLE or any(exchange.ticket is not None for exchange in self.pending):
            return False
        self.pending[-1].close = self.is_ending = True
        return self._transport.can_write_eof()

    def pause_writing(self) -> None:
        """It does not read its answers: nor do we read its requests."""
        self.is_congested, self._unsent, self._since = True, 0, self.watch.tick
        self._count_held()

    def resume_writing(self) -> None:
        """It does again."""
        self.is_congested, self._since = False, self.watch.tick
        self._count_held()
        self._resume_soon()

    def _count_held(self) -> None:
        """Count what waits here: answers that the client does not read, and requests that came too many at once."""
        held = len(self._held) + (self._transport.get_write_buffer_size() if self.is_congested else 0)
        self.shell.memory.used += held - self._counted
        self._counted = held

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self.is_ending:
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
                    self._transport.pause_reading()
                self._resume_soon()
                return
            size = max(SLICE, self._reader.body_left) if self._reader.phase == BODY else SLICE
            self._feed(view[at : at + size])
            at += size

    def _resume_soon(self) -> None:
        if self._is_paused and not self._is_blocked():
            self.watch.loop.call_soon(self._resume)

    def _resume(self) -> None:
        if not self._is_paused or self._is_blocked() or self.is_ending:
            return
        held, self._held = self._held, b""
        self._feed_in_slices(held)
        if not self._held:
            self._count_held()
            if self._is_cut:
                self._end_when_whole()
        if not self._held and not self.is_ending:
            self._is_paused = False
            self._since = self.watch.tick
            self._transport.resume_reading()

    # The reader's calls.

    def began(self) -> None:
        """The first byte of a request came."""
        self._since = self.watch.tick

    def admitted(self, exchange: Exchange) -> None:
        """A request's head came, and its body may."""
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
        """A request is whole."""
        self._since = self.watch.tick
        self._completed += 1
        if exchange.close or (self._is_cut and not self._is_paused):  # what may follow is none of ours
            self.is_ending = True
        if self.is_draining:  # when all that came with it is known: only the last answer may say that it is
            self.watch.loop.call_soon(self._begin, exchange)
        elif exchange.refusal is not None or b"content-encoding" in exchange.headers:
            self._begin(exchange)
        else:
            routes.begin(self.shell, exchange)

    def _begin(self, exchange: Exchange) -> None:
        if not exchange.is_waited_for():
            return
        if exchange.refusal is not None:
            exchange.fail(exchange.refusal)
        elif exchange.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            self.spawn(exchange, self._begin_unpacked(exchange))
        else:
            routes.begin(self.shell, exchange)

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
            routes.begin(self.shell, exchange)

    # Answering.

    def spawn(self, exchange: Exchange, work: Any) -> None:
        """Run a coroutine that answers an exchange; what it raises becomes the answer."""
        self.watch.spawn(self._guard(exchange, work))

    async def _guard(self, exchange: Exchange, work: Any) -> None:
        try:
            await work
        except (ServingError, HttpError) as error:
            exchange.fail(error)
        except Exception:
            log.exception("serving HTTP failed")
            exchange.fail(HttpError(500, "The server failed; its log says why."))

    def flush(self) -> None:
        """Write the answers that are next."""
        pending = self.pending
        while pending and (answer := pending[0].answer) is not None:
            exchange = pending.popleft()
            if exchange.charged:
                self.shell.memory.used -= exchange.charged
            if self.is_draining and not exchange.close and self._is_all():
                exchange.close, answer = True, with_close(answer)
            if isinstance(answer, bytes):
                self._transport.write(answer)
            else:
                self._transport.writelines(answer)
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
        if self._is_grace_over:
            self._drain_on()

    def _say_continue(self, exchange: Exchange) -> None:
        exchange.wants_continue = False
        if not exchange.is_complete:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def write_log(self, exchange: Exchange, status: int, size: int) -> None:
        """A line of the access log."""
        route = exchange.route
        version = {"version": route.version} if route is not None and route.version else {}
        self.shell.access_log.write(
            transport="http",
            method=f"{exchange.method.decode()} {route.name if route else '?'}",
            path=exchange.url.partition(b"?")[0].decode("utf-8", "replace"),
            model=route.model if route else "",
            **version,
            status=status,
            peer=self._peer,
            duration_ms=round((perf_counter() - exchange.started) * 1e3, 3),
            request_bytes=len(exchange.body),
            response_bytes=size,
            id=exchange.id,
        )

    # Ending.

    def _refuse(self, error: HttpError | ServingError) -> None:
        """Answer what cannot be gone on with, after the answers before it, and read no more."""
        self.shell.notices.count("HTTP connections closed for a request that cannot be read", f"{error} from {self._peer}")
        self.is_ending, self._held = True, b""
        exchange = self._reader.exchange if self._reader.phase == BODY else None
        if exchange is None:
            exchange = Exchange(self, b"?", self._reader.url, {}, True, False)
        if exchange not in self.pending:
            self.pending.append(exchange)
        exchange.close, exchange.wants_continue, exchange.body = True, False, b""
        exchange.fail(error)

    def _end(self, last: Exchange) -> None:
        """After the last answer."""
        self._forget_pending()
        self.is_ending, self._since = True, self.watch.tick
        if last.is_complete and not (self.is_draining and self._transport.can_write_eof()):
            self._close()
            return
        if self.is_draining:
            self.watch.loop.call_later(DRAIN_LINGER, self._close)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def _forget_pending(self) -> None:
        for exchange in self.pending:
            release = partial(self.shell.memory.release, exchange.charged)
            if exchange.unpacker is not None:
                exchange.unpacker.close(release)
            else:
                release()
            if exchange.ticket is not None:
                exchange.ticket.cancel()
        self.pending.clear()

    def drain(self) -> None:
        """Answer what was sent, tell the client that this was the last answer, and close."""
        if self.refusal is not None and self.is_idle():
            self.hang_up()
        elif not self.is_draining:
            self.is_draining, self._cut_at = True, self.watch.loop.time() + DRAIN_GRACE + DRAIN_CUT
            self.watch.loop.call_later(DRAIN_GRACE, self._end_grace, self._completed)

    def is_idle(self) -> bool:
        """Whether no request has come that has no answer yet."""
        return not self.pending

    def hang_up(self) -> None:
        """Close an idle connection without waiting for what may be on its way."""
        self.is_ending = True
        self._transport.close()
        self.watch.loop.call_later(DRAIN_LINGER, self._abort_when_sent)

    def _is_all(self) -> bool:
        """While the server stops: whether nothing is behind the answer that is next, so that it is the one to close with."""
        if self._is_pipelined and not self._is_grace_over:
            return False
        return not self.pending and not self._held and self._reader.phase == IDLE

    def _end_grace(self, completed: int) -> None:
        """Close, unless it was used meanwhile: then the next answer says so first, if there is one."""
        self._is_grace_over = True
        if self._completed == completed:
            self._close_if_idle()
        else:
            self.watch.loop.call_later(DRAIN_GRACE, self._close_if_idle)

    def _drain_on(self) -> None:
        """After an answer that was not the last, since more has come."""
        if not self.pending:
            self.watch.loop.call_later(DRAIN_GRACE, self._close_if_idle)
        if not self._is_cut and not self.is_ending and self.watch.loop.time() >= self._cut_at:
            self._is_cut = True
            self._end_when_whole()

    def _end_when_whole(self) -> None:
        """Read no more, unless what has been read is still to be fed or ends within a request, which then is the last."""
        if self._held or self._reader.phase != IDLE or self.is_ending:
            return
        self.is_ending = True
        if not self.pending:
            self._close()

    def _close_if_idle(self) -> None:
        if not self.pending and self._reader.phase == IDLE and not self._held and not self.is_ending:
            self._close()

    def _close(self) -> None:
        """Once all is written. TLS waits for the client to say goodbye too: when the server stops, not for long."""
        self._transport.close()
        if self.is_draining:
            self.watch.loop.call_later(DRAIN_LINGER, self._abort_when_sent)

    def _abort_when_sent(self) -> None:
        if self._transport.get_write_buffer_size():
            self.watch.loop.call_later(DRAIN_LINGER, self._abort_when_sent)
        else:
            self._transport.abort()

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()

    def check(self, tick: int) -> None:
        """Called each second: end it if the client takes too long."""
        spent, phase = tick - self._since, self._reader.phase
        if self.is_congested or self._transport.is_closing():
            unsent = self._transport.get_write_buffer_size()
            if unsent != self._unsent:
                self._unsent, self._since = unsent, tick
                self._count_held()
            elif spent > WRITE_SECONDS:
                self._transport.abort()
        elif self.is_ending:
            if not self.pending and spent > LINGER_SECONDS:
                self._transport.close()
        elif self._is_paused:
            pass  # it waits for us
        elif phase == HEAD and spent > HEAD_SECONDS:
            self._refuse(HttpError(408, f"Expected a request's head within {HEAD_SECONDS} seconds."))
        elif phase == BODY and self._reader.received < (spent - BODY_SECONDS) * BODY_RATE:
            self._refuse(HttpError(408, f"Expected the body at {BODY_RATE:,} bytes a second or more."))
        elif phase == IDLE and not self.pending and spent > (IDLE_SECONDS if self.refusal is None else LINGER_SECONDS):
            self._transport.close()
