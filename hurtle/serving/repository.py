"""`Repository`: the models and their versions; loads, swaps and retires them while requests go on.

files and folders name/version/model.* → `Model` per version. If a version cannot be loaded, the old one goes on serving. Knows
nothing of transports.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError, ServingError, did_you_mean
from hurtle.serving import heap
from hurtle.serving.backends.registry import backend_for
from hurtle.serving.config import ModelOptions, ServeConfig
from hurtle.serving.layout import (
    NAME,
    Fingerprint,
    Source,
    is_model_folder,
    model_folders,
    problem_of,
    problem_of_root,
    source_of,
    versions_in,
)
from hurtle.serving.model import Model
from hurtle.serving.model_config import check_described
from hurtle.serving.overrides import Overrides, written
from hurtle.serving.statistics import ModelStatistics

log = logging.getLogger("hurtle.serving")
MAX_SENT = 16
"""Models that may be loaded from files sent by clients, at a time."""
KEPT_COUNTS = 64
"""Removed versions whose counts are kept, in case they come back."""


@dataclass
class Entry:
    """All versions of a model."""

    ready: dict[str, Model] = field(default_factory=dict)
    """Loaded versions, newest last."""
    sources: dict[str, Source] = field(default_factory=dict)
    """Sources of the loaded versions."""
    changed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By version, the options that a client set when it was loaded."""
    states: dict[str, tuple[str, str]] = field(default_factory=dict)
    """State and reason of versions that are not loaded."""
    refused: dict[str, str] = field(default_factory=dict)
    """By loaded version, the reason its newer files were refused."""
    tried: dict[str, Fingerprint] = field(default_factory=dict)
    """Fingerprints of the files that were last loaded or refused."""
    is_unloaded: bool = False
    """Whether a client unloaded it; only a client loads it again."""
    overrides: Overrides = field(default_factory=Overrides)
    """Changes of the client that last loaded the model, without its files."""
    is_sent: bool = False
    """Whether it was loaded from files that a client sent, which are gone."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Repository:
    """The models of a server.

    Args:
        config: The files and folders, and how their models run.
        is_used: Whether a retired version is still needed, even if it runs nothing.
    """

    def __init__(self, config: ServeConfig, is_used: Callable[[Model], bool] = lambda model: False):
        self._config, self._is_used = config, is_used
        self._entries: dict[str, Entry] = {}
        self._retiring: set[Model] = set()
        self._statistics: dict[tuple[str, str], ModelStatistics] = {}
        self._files: dict[str, Path] = {}
        self._folders: list[Path] = []
        for text in config.models:
            self._add(text)

    # Lookup.

    def find(self, name: str, version: str = "") -> Model:
        """A model that is loaded.

        Raises:
            ServingError: There is none.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise ServingError("not_found", f"No model {name!r:.80}. {did_you_mean(name[:80], self._entries)}")
        if version:
            model = entry.ready.get(version)
            if model is None:
                known = ", ".join(entry.ready) or "none"
                raise ServingError("not_found", f"Model {name!r} has no version {version!r:.40}; loaded versions: {known}.")
            return model
        for model in reversed(entry.ready.values()):
            return model
        state, reason = next(iter(entry.states.values()), ("UNAVAILABLE", "it was unloaded"))
        raise ServingError("unavailable", f"Model {name!r} is not ready: {reason or state.lower()}.")

    def is_ready(self, name: str, version: str = "") -> bool:
        """Whether a model can answer; an unknown one cannot."""
        try:
            return bool(self.find(name, version))
        except ServingError:
            return False

    def has_model(self, name: str) -> bool:
        """Whether a model of this name was ever loaded; it may not be ready."""
        return name in self._entries

    def versions(self, name: str) -> list[str]:
        """The loaded versions of a model."""
        return list(self._entries[name].ready)

    def models(self) -> list[Model]:
        """All loaded models."""
        return [model for entry in self._entries.values() for model in entry.ready.values()]

    def retiring(self) -> set[Model]:
        """Retired models that still have requests to answer."""
        return self._retiring

    def statistics(self) -> dict[tuple[str, str], ModelStatistics]:
        """Statistics by name and version, over all loads and unloads."""
        return self._statistics

    def has_version(self, name: str, version: str) -> bool:
        """Whether a version is loaded or listed."""
        entry = self._entries.get(name)
        return entry is not None and (version in entry.ready or version in entry.states)

    def index(self, only_ready: bool = False, on_disk: Mapping[str, Mapping[str, str]] | None = None) -> list[dict[str, str]]:
        """All models and versions with their states, as Triton's RepositoryIndex lists them.

        Args:
            only_ready: Leave out versions that are not loaded.
            on_disk: What `on_disk` found, for models and versions that were never loaded.
        """
        found, on_disk = [], on_disk or {}
        for name in sorted({*self._entries, *on_disk}):
            entry = self._entries.get(name, Entry())
            rows = {version: ("UNAVAILABLE", why or "not loaded") for version, why in on_disk.get(name, {}).items()}
            rows |= entry.states | {version: ("READY", entry.refused.get(version, "")) for version in entry.ready}
            for version in sorted(rows, key=lambda version: int(version or 0)):
                state, reason = rows[version]
                if state == "READY" or not only_ready:
                    found.append({"name": name, "version": version, "state": state, "reason": reason})
        return found

    # Loading and unloading.

    def names(self) -> list[str]:
        """Models that can be loaded: the named files, and the subfolders of the folders."""
        found = dict.fromkeys(self._files)
        for folder in self._folders:
            for child in model_folders(folder):
                if NAME.fullmatch(child.name) and self._sources(child.name):
                    found[child.name] = None
        return list(found)

    def on_disk(self) -> dict[str, dict[str, str]]:
        """By model, the versions found on disk; if there are none, version "" with the problem."""
        found = {name: dict.fromkeys(self._sources(name), "") for name in self.names()}
        for folder in self._folders:
            for child in model_folders(folder):
                if NAME.fullmatch(child.name) and child.name not in found:
                    found[child.name] = {"": problem_of(child, folder)}
        return found

    def problems(self) -> list[str]:
        """Problems of the folders, one line each."""
        found = [problem_of(path, path.resolve()) for path in self._files.values() if path.is_dir()]
        for folder in self._folders:
            found += [problem_of_root(folder), *(problem_of(child, folder) for child in model_folders(folder))]
        return [problem for problem in found if problem]

    def _problem_of(self, name: str) -> str:
        """The problem of a model's folder, or an empty string."""
        folders = [folder for folder in self._folders if (folder / name).is_dir()]
        return problem_of(folders[0] / name, folders[0]) if folders else ""

    def may_change(self) -> bool:
        """Whether further models may appear."""
        return bool(self._folders)

    async def load(self, name: str, overrides: Overrides | None = None) -> None:
        """Load the new and changed versions of a model, and retire those that are gone.

        Args:
            name: Name of the model.
            overrides: Changes that a client sent; its files replace those on disk.

        Raises:
            ServingError: There is no such model, or a version cannot be loaded. Other versions are loaded all the same, and the
                old one stays; but a config applies to all versions or to none.
        """
        if not NAME.fullmatch(name):
            raise ServingError("invalid_argument", f"{name!r:.80} cannot be a model's name: letters, digits, _ . - only.")
        overrides = overrides or Overrides()
        try:
            options = replace(self._config.for_model(name), **overrides.options)
        except HurtleError as error:
            raise ServingError("invalid_argument", f"Model {name!r}: config: {error}") from None
        if overrides.files:
            await self._load_sent(name, overrides, options)
            return
        entry = self._entries.get(name)
        if entry is None and not self._sources(name):
            why = self._problem_of(name) or did_you_mean(name, self.names())
            raise ServingError("not_found", f"No model {name!r} to load. {why}")
        entry = self._entries.setdefault(name, Entry())
        async with entry.lock:
            self._check_known(name, entry)
            sources = await asyncio.to_thread(self._sources, name)
            if not sources:
                raise ServingError("not_found", f"The files of model {name!r} are gone; the loaded versions go on serving.")
            if overrides.has_config:
                built = await self._build_all(name, sources, entry, options, overrides)
                problems = [self._install(version, sources[version], built[version], entry, overrides) for version in built]
            else:  # one by one, so that at most one version is in memory twice
                problems = [
                    self._install(
                        version, source, await self._build(name, version, source, entry, options, overrides), entry, overrides
                    )
                    for version, source in sources.items()
                ]
            problems = [problem for problem in problems if problem]
            entry.tried, entry.is_unloaded = _fingerprints(sources), False
            if not (problems and entry.is_sent):  # otherwise the files that the client had sent go on serving
                entry.is_sent = False
                self._remove_others(entry, sources)
            if not problems:
                entry.overrides = Overrides(overrides.options)
        if problems:
            raise ServingError("failed_precondition", f"Model {name!r}: {'; '.join(problems)}")

    async def _load_sent(self, name: str, overrides: Overrides, options: ModelOptions) -> None:
        """Load a model from files that a client sent: all or nothing, and as ONNX only."""
        if options.backend not in (None, "onnx"):
            raise ServingError(
                "failed_precondition",
                f"Model {name!r} uses the backend {options.backend!r}, which takes no files from clients.",
            )
        parameters = {key: value for key, value in options.parameters.items() if key != "runtime"}
        options = replace(options, backend="onnx", parameters=parameters, load_library=())
        sent = {key for key, entry in self._entries.items() if entry.is_sent} | {name}
        if len(sent) > MAX_SENT:
            raise ServingError("resource_exhausted", f"{MAX_SENT} models were loaded from clients' files already; unload one.")
        entry = self._entries.setdefault(name, Entry())
        async with entry.lock:
            self._check_known(name, entry)
            was_sent, entry.is_sent = entry.is_sent, True
            states = dict(entry.states)
            try:
                with ExitStack() as stack:
                    sources = await asyncio.to_thread(stack.enter_context, written(overrides))
                    built = await self._build_all(name, sources, entry, options, overrides)
                self._install(overrides.version, sources[overrides.version], built[overrides.version], entry, overrides)
            except BaseException:
                entry.is_sent, entry.states = was_sent, states
                if not entry.ready and not states:
                    del self._entries[name]
                raise
            entry.is_unloaded, entry.overrides = False, Overrides()
            self._remove_others(entry, sources)

    def _check_known(self, name: str, entry: Entry) -> None:
        """Raise if the entry was dropped while we waited for its lock."""
        if self._entries.get(name) is not entry:
            raise ServingError("unavailable", f"Model {name!r} was unloaded meanwhile; retry.")

    def _remove_others(self, entry: Entry, sources: Mapping[str, Source]) -> None:
        """Retire the versions that a model no longer has."""
        for version in [version for version in entry.ready if version not in sources]:
            self._retire(entry.ready.pop(version), "removed")
            entry.sources.pop(version)
            entry.refused.pop(version, None)
        entry.states = {version: state for version, state in entry.states.items() if version in sources}
        self._forget_counts()

    async def _build_all(
        self, name: str, sources: Mapping[str, Source], entry: Entry, options: ModelOptions, overrides: Overrides
    ) -> dict[str, Model | str]:
        """Build all versions of a model with a client's config.

        Raises:
            ServingError: One of them cannot be loaded; then none is, and the old ones go on serving.
        """
        states = dict(entry.states)
        built = {
            version: await self._build(name, version, source, entry, options, overrides) for version, source in sources.items()
        }
        problems = {version: found for version, found in built.items() if isinstance(found, str)}
        if not problems:
            return built
        text = "; ".join(f"version {version}: {problem}" for version, problem in problems.items())
        why = ("UNAVAILABLE", f"the config was refused: {text}"[:500])
        entry.states = {version: states.get(version, why) for version in entry.states} | {
            version: why for version in problems if version not in entry.ready
        }
        for version, found in built.items():
            if isinstance(found, Model) and found is not entry.ready.get(version):
                await asyncio.to_thread(found.close)
        kept = "; nothing was changed" if entry.ready else ""
        raise ServingError("failed_precondition", f"Model {name!r}: it could not be loaded with this config{kept}. {text}")

    async def _build(
        self, name: str, version: str, source: Source, entry: Entry, options: ModelOptions, overrides: Overrides
    ) -> Model | str:
        """Build a version, or return the loaded one if nothing has changed; a string is the reason it cannot be loaded."""
        ready = entry.ready.get(version)
        is_same = ready is not None and entry.sources[version].fingerprint == source.fingerprint
        try:
            if ready is not None and is_same and entry.changed[version] == overrides.options:
                check_described(overrides.described, ready)
                return ready
            if ready is None:
                entry.states[version] = ("LOADING", "")
            if source.refusal:
                raise HurtleError(f"{source.refusal}.")
            return await asyncio.to_thread(_load, name, version, source.path, options, overrides.described)
        except Exception as error:  # from any backend
            problem = str(error) if isinstance(error, HurtleError) else f"{type(error).__name__}: {error}"
            if overrides.files:  # hide the temporary folder from the client
                for folder in {source.path.parent.resolve(), source.path.parent}:
                    problem = problem.replace(f"{folder}/", "")
            return problem[:500]

    def _install(self, version: str, source: Source, built: Model | str, entry: Entry, overrides: Overrides) -> str:
        """Serve what `_build` returned; returns the error for the client, or an empty string."""
        old = entry.ready.get(version)
        if isinstance(built, str):
            if old is not None:
                entry.refused[version] = f"its newer files were refused, the older ones go on serving: {built}"
                return f"version {version} was refused; the old one goes on serving: {built}"
            entry.states[version] = ("UNAVAILABLE", built)
            return f"version {version} was refused: {built}"
        entry.refused.pop(version, None)
        if built is old:
            return ""
        built.statistics = self._statistics.setdefault((built.name, version), built.statistics)
        entry.ready[version], entry.sources[version], entry.changed[version] = built, source, overrides.options
        entry.ready = dict(sorted(entry.ready.items(), key=lambda item: int(item[0])))
        entry.states.pop(version, None)
        if old is not None:
            self._retire(old, "replaced")
        log.info("%s version %s is ready: %s", built.name, version, describe(built))
        return ""

    def _forget_counts(self) -> None:
        """Drop the oldest counts of removed versions: a server may see thousands."""
        gone = [key for key in self._statistics if not self.has_version(*key)]
        for key in gone[:-KEPT_COUNTS]:
            del self._statistics[key]

    async def unload(self, name: str) -> None:
        """Retire all versions of a model; running requests are finished.

        Raises:
            ServingError: There is no such model.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise ServingError("not_found", f"No model {name!r:.80} to unload. {did_you_mean(name[:80], self._entries)}")
        async with entry.lock:
            self._check_known(name, entry)
            self._retire_all(entry, "unloaded")
            entry.is_unloaded = True
            if entry.is_sent and not self._sources(name):
                del self._entries[name]  # nothing is left to load again

    def leave_out(self, name: str) -> None:
        """List a model as unloaded by a client, without ever loading it."""
        states = dict.fromkeys(self._sources(name), ("UNAVAILABLE", "unloaded"))
        self._entries[name] = Entry(states=states, is_unloaded=True)

    async def refresh(self) -> None:
        """Load new and changed versions, and retire removed ones; a version that failed is retried when its files change."""
        for name in {**dict.fromkeys(await asyncio.to_thread(self.names)), **self._entries}:
            entry = self._entries.get(name)
            sources = await asyncio.to_thread(self._sources, name)
            if entry is not None and (entry.is_unloaded or entry.is_sent or entry.tried == _fingerprints(sources)):
                continue
            try:
                if sources:
                    await self.load(name, entry.overrides if entry is not None else None)
                elif entry is not None:
                    async with entry.lock:
                        self._retire_all(entry, "its files are gone")
                        entry.tried = {}
            except ServingError as error:
                log.error("%s", error)

    def settle(self, model: Model) -> None:
        """Close a retired version once nothing needs it."""
        if model in self._retiring and not model.active and not self._is_used(model):
            self._retiring.discard(model)
            # A thread of its own: closing waits for a running call, and neither loads nor our exit should wait with it.
            threading.Thread(target=_close, args=(model,), name="hurtle-close", daemon=True).start()

    def close(self) -> None:
        """Close all models; they must be idle."""
        for model in [*self.models(), *self._retiring]:
            model.close()
        self._entries.clear()
        self._retiring.clear()

    def _retire_all(self, entry: Entry, why: str) -> None:
        for version, model in entry.ready.items():
            entry.states[version] = ("UNAVAILABLE", why)
            self._retire(model, why)
        entry.ready, entry.sources, entry.refused = {}, {}, {}

    def _retire(self, model: Model, why: str) -> None:
        log.info("%s version %s is retired: %s", model.name, model.version, why)
        self._retiring.add(model)
        model.on_idle = self.settle
        self.settle(model)

    # Files.

    def _add(self, text: str) -> None:
        name, equals, after = text.partition("=")
        path = Path(after if equals and NAME.fullmatch(name) else text)
        if path.is_dir() and not is_model_folder(path):
            self._folders.append(path.resolve())
            return
        if not path.exists():
            raise HurtleError(f"{path} does not exist: give a model file, or a folder of models (name/version/model.onnx).")
        name = (
            name
            if equals and str(path) == after
            else path.resolve().name.split(".")[0]
            if path.is_file()
            else path.resolve().name
        )
        if not NAME.fullmatch(name):
            raise HurtleError(f"{name!r} cannot be a model's name: rename the file, or use NAME={path}.")
        if name in self._files:
            raise HurtleError(f"Two models are called {name!r}: {self._files[name]} and {path}. Use NAME=PATH for one of them.")
        self._files[name] = path

    def _sources(self, name: str) -> dict[str, Source]:
        """The sources of a model, by version."""
        if name in self._files:
            path = self._files[name]
            if path.is_dir():
                return versions_in(path, path.resolve())
            return {"1": source_of(path, [path])} if path.is_file() else {}
        if not NAME.fullmatch(name):
            return {}
        for folder in self._folders:
            found = versions_in(folder / name, folder)
            if found:
                return found
        return {}


def _close(model: Model) -> None:
    """Close a model and free its memory, even if it was frozen for the garbage collector at the start."""
    model.close()
    heap.release()


def _fingerprints(sources: dict[str, Source]) -> dict[str, Fingerprint]:
    return {version: source.fingerprint for version, source in sources.items()}


def _load(name: str, version: str, path: Path, options: ModelOptions, described: dict[str, Any]) -> Model:
    parameters: dict[str, Any] = dict(options.parameters)
    if options.backend is not None:
        parameters["backend"] = options.backend
    if options.load_library:
        parameters["load_library"] = list(options.load_library)
    model = Model(name, version, partial(backend_for(path, parameters), path, parameters), options)
    try:
        check_described(described, model)
    except HurtleError:
        model.close()
        raise
    return model


def describe(model: Model) -> str:
    """How a model runs, in one line."""
    executor, options = model.executor, model.options
    where = f"{executor.lanes} threads" if executor.lanes > 1 else "a thread" if executor.lanes else "the event loop"
    how = f", up to {options.batch_size} rows a call" if options.executor == "batch" else ""
    return f"{model.metadata.platform}, {options.executor} on {where}{how}"
