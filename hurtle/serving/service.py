"""`InferenceService`: the server behind its transports: answers requests; describes, loads and counts models.

transport → InferenceService → Model → executor → backend. One per process, used on its event loop's thread only.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

from hurtle import __version__
from hurtle.errors import HurtleError, ServingError, did_you_mean
from hurtle.serving.access_log import AccessLog
from hurtle.serving.config import ServeConfig
from hurtle.serving.layout import NAME
from hurtle.serving.memory import Memory
from hurtle.serving.messages import InferRequest, Reply
from hurtle.serving.model_config import config_of
from hurtle.serving.notices import Notices
from hurtle.serving.overrides import Overrides, read_overrides
from hurtle.serving.repository import Repository
from hurtle.serving.sequences import Sequences
from hurtle.serving.statistics import add, as_prometheus, as_triton, as_triton_metrics
from hurtle.serving.tracing import Tracing

log = logging.getLogger("hurtle.serving")
CLOSE_SECONDS = 1.0
"""Seconds that models get to close, at least, once every request is answered."""
NOTICED = {
    "resource_exhausted": "requests refused (RESOURCE_EXHAUSTED)",
    "unauthenticated": "requests refused (UNAUTHENTICATED)",
}
"""Failures that are logged in aggregate, by reason."""
EXTENSIONS = ("sequence", "model_repository", "model_configuration", "statistics", "binary_tensor_data", "health", "reflection")


class Cancellable(Protocol):
    """A running request."""

    def cancel(self) -> None:
        """Give it up: nobody waits for the answer."""


class Connection(Protocol):
    """A client's connection, over either transport; `client_connection` implements it."""

    refusal: ServingError | None
    """The error that its requests get, if there are too many connections."""
    on_made: Callable[[Any], None] | None
    """Called once it is one of the service's connections."""

    def is_idle(self) -> bool:
        """Whether every request has its answer."""

    def hang_up(self) -> None:
        """Close an idle connection without waiting for requests that may be on their way."""

    def drain(self) -> None:
        """Ask the client to go, answer what it has sent, then close."""

    def abort(self) -> None:
        """Close now."""


class Peers(Protocol):
    """The processes that share the ports."""

    is_first: bool
    """Whether this process writes what should be logged once."""

    async def attach(self, service: InferenceService, stop: asyncio.Event) -> None:
        """Serve the calls of the others on this process's service; set `stop` when it is time to stop."""

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every process's service, including this one's; raises if one of them did."""


class InferenceService:
    """One process's server.

    Args:
        config: The server's settings.

    Attributes:
        draining: Whether it is stopping: no longer ready, but requests that clients have sent are answered.
        stopped: Whether it answers nothing any more.
        connections: The clients' connections.
        memory: Bytes that clients make it hold.
        notices: Events that are logged in aggregate.
        peers: The processes that share the ports, if there are several.
    """

    def __init__(self, config: ServeConfig):
        self.config = config
        self.draining = self.stopped = False
        self.connections: set[Connection] = set()
        self.memory = Memory(config.max_buffered_bytes)
        self.notices = Notices()
        self.peers: Peers | None = None
        self.access_log = (
            AccessLog(config.access_log, int(config.access_log_mib * 2**20), config.access_log_files)
            if config.access_log is not None
            else None
        )
        self.tracing = Tracing(config.otlp_endpoint) if config.otlp_endpoint is not None else None
        self.repository = Repository(config, lambda model: self.sequences.uses(model))
        self.sequences = Sequences(
            config.max_sequences, config.sequence_idle, self.repository.settle, config.max_sequence_bytes
        )
        self._token = config.auth_token
        self._refused: dict[str, int] = {}
        """By reason: requests that failed before their model was known."""
        self._noticed = dict.fromkeys(NOTICED, 0)
        self._warned: set[str] = set()
        """Problems of folders that have been logged."""
        self._doubted: set[str] = set()
        """Problems found at the last look; the folders may have been about to be filled."""
        self._started = False
        self._chores: list[asyncio.Task[None]] = []
        self._changes: set[asyncio.Future[Any]] = set()

    async def start(self, unloaded: Collection[str] = (), overrides: Mapping[str, Overrides] | None = None) -> None:
        """Load all models.

        Args:
            unloaded: Names of models that clients have unloaded since the server started.
            overrides: Changes that clients made when loading the others, by name.

        Raises:
            HurtleError: A model cannot be loaded, or there is none.
        """
        names, problems = self.repository.names(), self.repository.problems()
        if not names:
            found = "\n".join(problems) or "expected NAME/VERSION/model.onnx."
            raise HurtleError(f"No models in {', '.join(self.config.models) or 'nothing'}: {found}")
        problems += self._strangers(names)
        self._warned.update(problems)
        if self.peers is None or self.peers.is_first:
            for problem in problems:
                log.warning("%s", problem)
        for name in names:
            if name in unloaded:
                self.repository.leave_out(name)
            else:
                await self._load_at_start(name, (overrides or {}).get(name))
        self._started = True
        self._chores.append(asyncio.create_task(self._tidy()))

    def _strangers(self, names: list[str]) -> list[str]:
        """Warnings about options for models that are not there.

        Raises:
            HurtleError: These models cannot appear later either.
        """
        found = [
            f"[model.{name}] is for a model that is not served. {did_you_mean(name, names)}"
            for name in self.config.overrides
            if name not in names
        ]
        if found and not self.repository.may_change():
            raise HurtleError(" ".join(found))
        return found

    async def _load_at_start(self, name: str, overrides: Overrides | None) -> None:
        if overrides is not None:  # they were checked before, against files that may have changed since
            overrides = replace(overrides, has_config=False)
        try:
            await self.repository.load(name, overrides)
        except ServingError as error:
            if not self.repository.is_ready(name):
                raise
            log.error("%s", error)  # an older version serves

    async def stop(self, seconds: float) -> bool:
        """Answer what clients have sent, then close; returns whether everything finished in time."""
        self.draining = True
        end = time.monotonic() + seconds
        for connection in list(self.connections):
            connection.drain()
        await asyncio.sleep(0.01)  # those accepted last are among the connections now
        while (self._active() or self.connections) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self.stopped = True
        is_idle = not self._active()
        clean = is_idle and not self.connections
        for connection in list(self.connections):
            connection.abort()
        for chore in self._chores:
            chore.cancel()
        self._notice_refusals()
        self.notices.flush(at_once=True)
        if is_idle:
            await self._close_models(max(end, time.monotonic() + CLOSE_SECONDS))
        if self.access_log is not None:
            self.access_log.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        return clean

    async def _close_models(self, end: float) -> None:
        """Close the models, at most until `end`: a call whose client is gone may still run."""
        closing = threading.Thread(target=self.repository.close, name="hurtle-close", daemon=True)
        closing.start()
        while closing.is_alive() and time.monotonic() < end:
            await asyncio.sleep(0.01)

    def _active(self) -> int:
        return sum(model.active for model in [*self.repository.models(), *self.repository.retiring()])

    async def _tidy(self) -> None:
        """Housekeeping, about once a second."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self.config.watch or 1.0))
            try:
                self.sequences.forget_idle()
                self._notice_refusals()
                self.notices.flush()
                if self.access_log is not None:
                    self.access_log.flush()
                if self.config.watch and time.monotonic() - looked >= self.config.watch:
                    looked = time.monotonic()
                    await self.repository.refresh()
                    self._warn_of(await asyncio.to_thread(self.repository.problems))
            except Exception:
                log.exception("housekeeping failed")

    def _notice_refusals(self) -> None:
        """Log the requests that were refused since the last time."""
        for reason, kind in NOTICED.items():
            of_models = sum(counted.reasons.get(reason, 0) for counted in self.repository.statistics().values())
            total = of_models + self._refused.get(reason, 0)
            if total > self._noticed[reason]:
                self.notices.count(kind, times=total - self._noticed[reason])
            self._noticed[reason] = total

    def _warn_of(self, problems: list[str]) -> None:
        """Log each problem once, if it was there the last time too."""
        for problem in problems:
            if problem in self._doubted and problem not in self._warned and (self.peers is None or self.peers.is_first):
                log.warning("%s", problem)
                self._warned.add(problem)
        self._doubted = set(problems)
        self._warned &= self._doubted

    # Inference.

    def infer(self, request: InferRequest, reply: Reply) -> Cancellable | None:
        """Answer a request: `reply` is called once, perhaps before this returns, which then returns None."""
        if self.tracing is not None:
            reply = self.tracing.traced(request, reply)
        try:
            if self.stopped:
                raise ServingError("unavailable", "The server is shutting down; use another one or retry later.")
            if request.parameters and request.parameters.get("sequence_id"):
                return self._infer_in_sequence(request, reply)
            return self.repository.find(request.model, request.version).infer(request, reply)
        except ServingError as error:
            if not error.is_counted:
                self.count_failure(error.reason, request.model, request.version)
                error.is_counted = True
            reply(error)
            return None

    def _infer_in_sequence(self, request: InferRequest, reply: Reply) -> Cancellable | None:
        if self.config.processes > 1:
            raise ServingError(
                "failed_precondition",
                f"The server runs {self.config.processes} processes, and a sequence's state lives in one of them: send "
                "the state as tensors, or serve with --processes 1.",
            )
        model = self.sequences.find(request)
        if model is None or (request.version and model.version != request.version):
            model = self.repository.find(request.model, request.version)
        return self.sequences.infer(model, request, reply)

    def count_failure(self, reason: str, model: str = "", version: str = "") -> None:
        """Count a request that a transport refused. Unknown names count without a model: they must not become labels."""
        try:
            self.repository.find(model, version).statistics.fail(reason)
        except ServingError:
            self._refused[reason] = self._refused.get(reason, 0) + 1

    def authorize(self, header: str | bytes | None) -> ServingError | None:
        """Check the `authorization` header; returns the error, or None if the token is right."""
        if self._token is None:
            return None
        given = header.encode("utf-8", "replace") if isinstance(header, str) else header or b""
        scheme, _, token = given.partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token.encode()):
            return None
        return ServingError("unauthenticated", "This server requires a token: authorization: Bearer TOKEN.")

    # Health and descriptions.

    def is_live(self) -> bool:
        """Whether the process is alive; it is, if it can answer."""
        return True

    def is_ready(self) -> bool:
        """Whether all models are loaded and requests are accepted."""
        return self._started and not self.draining

    def is_model_ready(self, name: str, version: str = "") -> bool:
        """Whether a model can answer; an unknown one cannot, which is no error (as in Triton)."""
        return self.repository.is_ready(name, version) and not self.draining

    def has_model(self, name: str) -> bool:
        """Whether a model has this name, ready or not."""
        return self.repository.has_model(name)

    def server_metadata(self) -> dict[str, Any]:
        """The server's name, version and extensions."""
        return {"name": "hurtle", "version": __version__, "extensions": list(EXTENSIONS)}

    def model_metadata(self, name: str, version: str = "") -> dict[str, Any]:
        """A model's inputs and outputs."""
        model = self.repository.find(name, version)

        def tensors(specs: Any) -> list[dict[str, Any]]:
            return [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]

        return {
            "name": name,
            "versions": self.repository.versions(name),
            "platform": model.metadata.platform,
            "inputs": tensors(model.metadata.inputs),
            "outputs": tensors(model.metadata.outputs),
        }

    def model_config(self, name: str, version: str = "") -> dict[str, Any]:
        """How a model is run, as Triton's ModelConfig."""
        return config_of(self.repository.find(name, version))

    # Loading and unloading, in all processes.

    async def index(self, ready: bool = False) -> list[dict[str, str]]:
        """All models with their versions and states."""
        return self.repository.index(ready, None if ready else await asyncio.to_thread(self.repository.on_disk))

    async def load(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        """Load a model, or the changed parts of it.

        Args:
            name: Name of the model.
            parameters: Triton's: `config` changes how the model runs until the next load; `file:…` are files to load it from.
        """
        if parameters:
            overrides = await asyncio.to_thread(read_overrides, name, parameters, self.config)
            await self._change("load_here", name, overrides)
        else:
            await self._change("load_here", name)

    async def unload(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        """Unload a model."""
        await self._change("unload_here", name)

    async def load_here(self, name: str, overrides: Overrides | None = None) -> None:
        """Load a model in this process."""
        try:
            await self.repository.load(name, overrides)
        except ServingError as error:
            if error.reason == "failed_precondition":
                log.error("%s", error)
            raise

    async def unload_here(self, name: str) -> None:
        """Unload a model in this process."""
        for model in [model for model in self.repository.models() if model.name == name]:
            self.sequences.forget(model)
        await self.repository.unload(name)

    async def _change(self, method: str, name: str, *more: Any) -> None:
        """Load or unload in all processes, and finish even if the client that asked goes away."""
        if not NAME.fullmatch(name):
            raise ServingError("invalid_argument", f"{name!r:.80} cannot be a model's name: letters, digits, _ . - only.")
        change = asyncio.ensure_future(self._everywhere(method, name, *more))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        await asyncio.shield(change)

    async def _everywhere(self, method: str, *arguments: Any) -> list[Any]:
        if self.peers is not None:
            return await self.peers.call(method, *arguments)
        return [await getattr(self, method)(*arguments)]

    # Counting.

    async def snapshot_here(self) -> dict[str, Any]:
        """The counts of this process, by model and version."""
        found = {f"{name}\n{version}": counted.snapshot() for (name, version), counted in self.repository.statistics().items()}
        for model in self.repository.models():
            found[f"{model.name}\n{model.version}"]["queued"] = model.executor.queued
        return {
            "models": found,
            "refused": dict(self._refused),
            "connections": len(self.connections),
            "sequences": len(self.sequences),
            "buffered": self.memory.used,
            "processes": 1,
        }

    async def _snapshot(self) -> dict[str, Any]:
        found, *others = await self._everywhere("snapshot_here")
        for other in others:
            found = add(found, other)
        return found

    async def statistics(self, name: str = "", version: str = "") -> dict[str, Any]:
        """Counts and times of one model or of all, as Triton's ModelStatistics."""
        if name:
            self.repository.find(name, version)
        counted = (await self._snapshot())["models"]
        wanted = [
            (model.name, model.version)
            for model in self.repository.models()
            if (not name or model.name == name) and (not version or model.version == version)
        ]
        return {"model_stats": [as_triton(*key, counted["\n".join(key)]) for key in wanted if "\n".join(key) in counted]}

    async def metrics(self) -> str:
        """All counts as Prometheus text."""
        found = await self._snapshot()
        others = {
            "connections": ("gauge", "Open connections.", found["connections"]),
            "buffered_bytes": ("gauge", "Bytes held for unfinished requests and answers.", found["buffered"]),
            "sequences": ("gauge", "Sequences whose state is kept.", found["sequences"]),
            "processes": ("gauge", "Processes that share the ports.", found["processes"]),
        }
        models = [(*key.split("\n"), values) for key, values in sorted(found["models"].items())]
        shown = [entry for entry in models if self.repository.has_version(*entry[:2])]
        text = as_prometheus(shown, others, found["refused"])
        return text + as_triton_metrics(shown) if self.config.triton_metrics else text
