"""The REST paths of the Open Inference Protocol and of Triton's extensions: path → `Route` → service → JSON.

Knows HTTP methods, headers and statuses; knows nothing of connections.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from functools import partial
from time import monotonic
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson

from hurtle.errors import ServingError
from hurtle.serving.messages import InferRequest, InferResponse
from hurtle.serving.rest import page
from hurtle.serving.rest.codec import decode, encode, parse_json
from hurtle.serving.rest.exchange import Exchange, HttpError, Route, memory_error
from hurtle.serving.status import UNSUPPORTED, invalid, unsupported

log = logging.getLogger("hurtle.serving")
JSON_ASIDE = 256 << 10
"""Bytes of JSON above which a request is parsed in a thread."""
_CACHED = 1024
_SAFE = b"X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\n"
_READ = frozenset((b"GET", b"HEAD"))
_WRITE = frozenset((b"POST",))
_ours = (b"same-origin", b"none")


_routes: dict[bytes, Route] = {}


def find_route(method: bytes, url: bytes) -> Route:
    """The route of a request.

    Raises:
        HttpError: The path does not exist, or does not take this method.
    """
    route = _routes.get(url)
    if route is None:
        route = _match(url)
        if len(_routes) >= _CACHED:
            del _routes[next(iter(_routes))]
        _routes[url] = route
    if method not in route.methods:
        allowed = ", ".join(sorted(name.decode() for name in route.methods))
        shown = method.decode("latin-1")
        raise HttpError(405, f"{route.name}: expected {allowed}, got {shown}.", b"Allow: %b\r\n" % allowed.encode())
    return route


def _match(url: bytes) -> Route:
    path = url.partition(b"?")[0].partition(b"#")[0]
    if path[:7].lower() == b"http://" or path[:8].lower() == b"https://":
        path = b"/" + path.split(b"/", 3)[3] if path.count(b"/") > 2 else b"/"
    if not path.startswith(b"/"):
        raise HttpError(404, f"No such path: {path[:80]!r}.")
    try:
        parts = [unquote_to_bytes(part).decode() for part in path[1:].removesuffix(b"/").split(b"/")]
    except UnicodeDecodeError:
        raise HttpError(400, "The path: expected percent-encoded UTF-8, got something else.") from None
    if any("/" in part or "\0" in part for part in parts):
        raise HttpError(404, "No such path: names contain no slash and no NUL.")
    match parts:
        case [""]:
            return Route("/", _READ, _page, is_free=True)
        case ["favicon.ico" | "favicon.svg"]:
            return Route("/favicon", _READ, _icon, is_free=True)
        case ["metrics"]:
            return Route("/metrics", _READ, _metrics)
        case ["v2"]:
            return Route("/v2", _READ, _server_metadata)
        case ["v2", "health", "live"]:
            return Route("/v2/health/live", _READ, _live, is_free=True)
        case ["v2", "health", "ready"]:
            return Route("/v2/health/ready", _READ, _ready, is_free=True)
        case ["v2", "models", "stats"]:
            return Route("/v2/models/stats", _READ, _statistics)
        case ["v2", "repository", "index"]:
            return Route("/v2/repository/index", _WRITE, _index)
        case ["v2", "repository", "models", model, "load"] if model:
            return Route("/v2/repository/models/load", _WRITE, _load, model)
        case ["v2", "repository", "models", model, "unload"] if model:
            return Route("/v2/repository/models/unload", _WRITE, _unload, model)
        case ["v2", "models", model, "versions", version, *rest] if model and version:
            found = _of_model(model, version, rest)
        case ["v2", "models", model, *rest] if model:
            found = _of_model(model, "", rest)
        case ["v2", group, *_] if group in UNSUPPORTED:
            raise unsupported(group)
        case _:
            found = None
    if found is None:
        raise HttpError(404, f"No such path: {path[:80].decode('latin-1')!r}.")
    return found


def _of_model(model: str, version: str, rest: list[str]) -> Route | None:
    match rest:
        case ["infer"]:
            return Route("/v2/models/infer", _WRITE, None, model, version)
        case []:
            return Route("/v2/models", _READ, _model_metadata, model, version)
        case ["ready"]:
            return Route("/v2/models/ready", _READ, _model_ready, model, version)
        case ["config"]:
            return Route("/v2/models/config", _READ, _model_config, model, version)
        case ["stats"]:
            return Route("/v2/models/stats", _READ, _statistics, model, version)
    return None


def admit(service: Any, route: Route, exchange: Exchange) -> None:
    """Refuse requests that are not allowed, before the body is read.

    Raises:
        ServingError: The token is missing or wrong, or the request comes from another site's page.
        HttpError: Memory is full, and the request is not management.
    """
    if not route.is_free:
        error = service.authorize(exchange.headers.get(b"authorization"))
        if error is not None:
            raise error
        if route.handle is None and service.memory.used > service.memory.limit:
            raise memory_error()
    # Another site's page can make a browser POST to us, though not read the answer: it must not unload models.
    site = exchange.headers.get(b"sec-fetch-site")
    if site is not None and site not in _ours and route.methods is _WRITE:
        raise ServingError("permission_denied", "Requests from other sites' pages are not served.")


def begin(service: Any, exchange: Exchange) -> None:
    """Serve a complete request; the exchange gets its answer now or later."""
    route = exchange.route
    assert route is not None
    if route.handle is not None:
        exchange.connection.spawn(exchange, _without_model(service, route.handle(service, exchange, route)))
        return
    try:
        length = _json_length(exchange)
        body = exchange.body
        if len(body) > JSON_ASIDE and (length is None or length > JSON_ASIDE):
            exchange.connection.spawn(exchange, _infer_large(service, exchange, length, route))
            return
        request, exchange.wanted = decode(body, length, route.model, route.version)
        _infer(service, exchange, request)
    except ServingError as error:  # the request is bad; `infer` itself raises none
        exchange.fail(error)
    except Exception:
        _fail_unexpectedly(exchange)


async def _without_model(service: Any, work: Coroutine[Any, Any, None]) -> None:
    """Run a management request, whose errors do not count as the model's."""
    try:
        await work
    except ServingError as error:
        _count(service, error)
        raise


def _count(service: Any, error: ServingError) -> None:
    """Count an error once, for no model."""
    if not error.is_counted:
        service.count_failure(error.reason)
        error.is_counted = True


def _json_length(exchange: Exchange) -> int | None:
    """The length of the body's JSON, which binary tensors follow; None if everything is JSON."""
    length = exchange.headers.get(b"inference-header-content-length")
    if length is None:
        return None
    if not length.isdigit() or len(length) > 15:
        raise invalid(f"Inference-Header-Content-Length: expected a whole number, got {length[:40].decode('latin-1')!r}.")
    return int(length)


async def _infer_large(service: Any, exchange: Exchange, length: int | None, route: Route) -> None:
    arrived = monotonic()
    watch = exchange.connection.watch
    request, exchange.wanted = await watch.aside(decode, exchange.body, length, route.model, route.version, arrived)
    if exchange.is_waited_for():
        _infer(service, exchange, request)


def _infer(service: Any, exchange: Exchange, request: InferRequest) -> None:
    exchange.id = request.id
    trace_parent = exchange.headers.get(b"traceparent")
    if trace_parent is not None:
        request.trace_parent = trace_parent.decode("ascii", "replace")
    exchange.ticket = service.infer(request, partial(_reply, exchange))


def _reply(exchange: Exchange, result: InferResponse | ServingError) -> None:
    if isinstance(result, ServingError):
        exchange.fail(result)
        return
    try:
        parts, length = encode(result, exchange.wanted)
    except ServingError as error:
        _count(exchange.connection.service, error)  # the model has counted a success
        exchange.fail(error)
        return
    except Exception:
        _fail_unexpectedly(exchange)
        return
    if length is None:
        exchange.respond(200, parts)
    else:
        exchange.respond(200, parts, b"application/octet-stream", b"Inference-Header-Content-Length: %d\r\n" % length)


def _fail_unexpectedly(exchange: Exchange) -> None:
    log.exception("serving %s failed", exchange.route)
    if exchange.answer is None:
        error = ServingError("internal", "The server failed; see its log.")
        _count(exchange.connection.service, error)
        exchange.fail(error)


# Management.


def _json(exchange: Exchange, found: Any, status: int = 200) -> None:
    exchange.respond(status, [orjson.dumps(found)], extra=_SAFE)


async def _live(service: Any, exchange: Exchange, route: Route) -> None:
    is_live = service.is_live()
    _json(exchange, {"live": is_live}, 200 if is_live else 503)


async def _ready(service: Any, exchange: Exchange, route: Route) -> None:
    is_ready = service.is_ready()
    _json(exchange, {"ready": is_ready}, 200 if is_ready else 503)


async def _model_ready(service: Any, exchange: Exchange, route: Route) -> None:
    """Answer 400 for a model that is unknown or not ready, as Triton does; 503 while the server itself is not ready."""
    found: dict[str, Any] = {"name": route.model, "ready": service.is_model_ready(route.model, route.version)}
    if found["ready"]:
        _json(exchange, found)
        return
    name = f"Model {route.model!r:.80}" + (f" version {route.version!r:.40}" if route.version else "")
    _json(exchange, {**found, "error": f"{name} is not ready."}, 400 if service.is_ready() else 503)


async def _server_metadata(service: Any, exchange: Exchange, route: Route) -> None:
    _json(exchange, service.server_metadata())


async def _model_metadata(service: Any, exchange: Exchange, route: Route) -> None:
    _json(exchange, service.model_metadata(route.model, route.version))


async def _model_config(service: Any, exchange: Exchange, route: Route) -> None:
    _json(exchange, service.model_config(route.model, route.version))


async def _statistics(service: Any, exchange: Exchange, route: Route) -> None:
    _json(exchange, await service.statistics(route.model, route.version))


async def _metrics(service: Any, exchange: Exchange, route: Route) -> None:
    text = await service.metrics()
    exchange.respond(200, [text.encode()], b"text/plain; version=0.0.4; charset=utf-8", _SAFE)


def _asked(exchange: Exchange) -> dict[str, Any]:
    """The JSON body of a repository request; it may be empty."""
    return parse_json(exchange.body) if exchange.body.strip() else {}


async def _index(service: Any, exchange: Exchange, route: Route) -> None:
    ready = _asked(exchange).get("ready", False)
    if not isinstance(ready, bool):
        raise invalid("'ready': expected true or false, got something else.")
    _json(exchange, await service.index(ready))


async def _load_parameters(exchange: Exchange) -> dict[str, Any]:
    if len(exchange.body) > JSON_ASIDE:  # it may contain model files
        asked = await exchange.connection.watch.aside(_asked, exchange)
    else:
        asked = _asked(exchange)
    found = asked.get("parameters")
    if found is not None and not isinstance(found, dict):
        raise invalid("'parameters': expected a JSON object, got something else.")
    return found or {}


async def _load(service: Any, exchange: Exchange, route: Route) -> None:
    await service.load(route.model, await _load_parameters(exchange))
    _json(exchange, {})


async def _unload(service: Any, exchange: Exchange, route: Route) -> None:
    await service.unload(route.model, await _load_parameters(exchange))
    _json(exchange, {})


async def _page(service: Any, exchange: Exchange, route: Route) -> None:
    exchange.respond(200, [page.HTML], b"text/html; charset=utf-8", page.HEADERS)


async def _icon(service: Any, exchange: Exchange, route: Route) -> None:
    exchange.respond(200, [page.ICON], b"image/svg+xml", _SAFE)
