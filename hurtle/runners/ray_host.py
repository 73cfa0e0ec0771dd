"""`CollectorHost`: the class of the Ray actors that collect: a collector, whose rollouts go out as one block of bytes each.

recipe → envs; job → policy and collector; weights → rollout → block. Imports torch only when it is told what to collect.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium

import hurtle
from hurtle.contracts import Collector, Episodes, Weights
from hurtle.errors import DeviceError, HurtleError
from hurtle.runners.shares import Share
from hurtle.vector.pickling import load, portable

PATIENCE = 0.05
"""The share of a rollout's time for which a collector with a free lag waits for weights that are still on their way."""


class About(NamedTuple):
    """Where a host is, and with what."""

    pid: int
    machine: str
    node: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Recipe:
    """How a collector's envs are made.

    Attributes:
        env: The name, class or callable.
        own_actions: Returns the env's own action space if it has to be emulated.
        make: Makes the vector of a share: `make(env, emulate, share)`.
        source: The text of the file that `env` names, as "my_env.py:MyEnv".
    """

    env: Any
    own_actions: Callable[[Any], gymnasium.spaces.Space | None]
    make: Callable[[Any, bool, Share], Any]
    source: str = ""


@dataclass(frozen=True)
class EnvFacts:
    """What the learner has to know of the envs, which it does not make itself: attributes of a vector, and a few more."""

    num_envs: int
    num_agents: int
    batch_size: int
    single_observation_space: gymnasium.spaces.Space
    single_action_space: gymnasium.spaces.Space
    agent_observation_space: gymnasium.spaces.Space
    agent_action_space: gymnasium.spaces.Space
    layout: Any
    drawn: Mapping[str, Any]
    own_actions: gymnasium.spaces.Space | None
    has_masks: bool
    resumes_exactly: bool
    vector_obstacle: str | None


@dataclass(frozen=True)
class Job:
    """What all collectors of a run have in common.

    Attributes:
        recipe: Of the envs.
        policy: The learner's, which gives the shapes; its weights come with each rollout.
        config: The algorithm's, if it makes policies differ.
        plan: Makes the collector.
        teaching: The curriculum.
        seed: The first env's.
        num_agents: Agents per env.
        num_collectors: How many there are.
        num_steps: Steps of a rollout.
        threads: Of torch.
        device: Where the policies act.
    """

    recipe: Recipe
    policy: Any
    config: Any
    plan: Any
    teaching: Any
    seed: int
    num_agents: int
    num_collectors: int
    num_steps: int
    threads: int
    device: str


class Ready(NamedTuple):
    """What a host says when its collector is made."""

    warning: str


class Header(NamedTuple):
    """What comes with the bytes of a rollout."""

    contents: Any  # `packed_rollout.Contents`
    episodes: Episodes
    metrics: dict[str, float]
    state: dict[str, Any]  # without the envs
    idle: float  # seconds in all
    seconds: float  # of this rollout


class Failure(NamedTuple):
    """An exception of a host, as it travels."""

    text: str
    trace: str
    error: bytes | None
    is_ours: bool


class CollectorHost:
    """A collector and its envs. Methods return what they are asked for, or a `Failure`; Ray calls one at a time."""

    def __init__(self) -> None:
        import ray

        self._node = ray.get_runtime_context().get_node_id()
        self._inbox = _Inbox(ray.get)
        self._collector: Collector | None = None
        self._vec: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._loaded = -1  # number of the weights
        self._idle, self._ended, self._seconds = 0.0, 0.0, 0.0

    def hello(self, paths: list[str]) -> About:
        """Add the learner's import paths; says where this is."""
        sys.path += [path for path in paths if path not in sys.path]
        return About(os.getpid(), platform.node(), self._node, versions())

    def warm_up(self) -> None:
        """Import what collecting needs; all hosts at once, while one of them makes its first envs."""
        import hurtle.runners.collector_plan  # noqa: F401

    def describe(self, recipe: bytes, share: Share) -> EnvFacts | Failure:
        """The facts of the envs, from a vector that is closed again."""

        def look() -> EnvFacts:
            made: Recipe = load(recipe)
            env = self._env_of(made)
            own = made.own_actions(env)
            vec = made.make(env, own is not None, share)
            try:
                return _facts_of(vec, own)
            finally:
                vec.close()

        return _answer(look)

    def set_up(self, job: bytes, number: int, share: Share, emulate: bool, saved: dict[str, Any] | None) -> Ready | Failure:
        """Make the envs and the collector; they continue from a saved state if there is one."""
        return _answer(lambda: self._build(load(job), number, share, emulate, saved))

    def _build(self, job: Job, number: int, share: Share, emulate: bool, saved: dict[str, Any] | None) -> Ready:
        import torch

        from hurtle.buffers.packed_rollout import Packing
        from hurtle.runners.collector_plan import Part
        from hurtle.tracking.timing import Timer

        torch.set_num_threads(job.threads)
        if job.device != "cpu" and not torch.cuda.is_available():
            raise DeviceError("collector_gpus is for GPUs, and torch finds none here: install a build of torch with CUDA.")
        self._vec = vec = job.recipe.make(self._env_of(job.recipe), emulate, share)
        policy = job.policy.to(job.device)
        if job.config is not None:
            job.config.diversify(policy, number, job.num_collectors)
        first = share.first_env
        part = Part(vec, policy, job.seed + first, job.seed + first * job.num_agents, Timer(), share.num_workers)
        self._collector = job.teaching.taught(job.plan.collector(part), vec, part.seed)
        self._rollout = self._collector.new_rollout(job.num_steps)
        self._packing = Packing(self._rollout)
        self._block = self._packing.move_into_block(self._rollout)
        if saved is not None:
            self._collector.load_state_dict(saved)
        self._collector.prepare(self._rollout)
        return Ready(self._collector.warning)

    def _env_of(self, recipe: Recipe) -> Any:
        """The env, or its name; a file that is only on the learner's machine is written to a folder of this process."""
        if not recipe.source:
            return recipe.env
        path, _, name = recipe.env.rpartition(":")
        if Path(path).is_file() and Path(path).read_text(encoding="utf-8") == recipe.source:
            return recipe.env
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="hurtle-env-")
        file = Path(self._folder.name) / Path(path).name
        file.write_text(recipe.source, encoding="utf-8")
        return f"{file}:{name}"

    def collect(self, name: str, number: int, weights: list[Any], exactly: bool) -> tuple[Header, Any] | Failure:
        """A rollout as a block of bytes.

        Args:
            name: Of the rollout.
            number: Of the weights.
            weights: A reference to them, in a list so that Ray does not wait for them before it calls.
            exactly: Collect with these; otherwise with the newest that are here, while others may be on their way.
        """
        began = time.perf_counter()
        self._idle += began - self._ended if self._ended else 0.0

        def fill() -> tuple[Header, Any]:
            collector, rollout = self._collector, self._rollout
            assert collector is not None
            patience = None if exactly or self._loaded < 0 else PATIENCE * self._seconds
            newest, found = self._inbox.take(number, weights[0], patience)
            if newest != self._loaded and found is not None:
                collector.load_weights(found)
                self._loaded = newest
            rollout.ids = (name,)
            episodes = collector.collect(rollout)
            assert episodes is not None
            contents, sent = self._packing.packed(rollout, self._block)
            self._ended = time.perf_counter()
            self._seconds = self._ended - began
            header = Header(contents, episodes, collector.metrics(), collector.state_dict(False), self._idle, self._seconds)
            return header, sent

        return _answer(fill)

    def state(self) -> dict[str, Any] | Failure:
        """The collector's state, with the envs."""
        assert self._collector is not None
        return _answer(self._collector.state_dict)

    def close(self) -> None:
        """Close the envs."""
        if self._collector is not None:
            self._collector.close()
        elif self._vec is not None:
            self._vec.close()


class _Inbox:
    """The newest weights: fetched in a thread of its own, so that collecting goes on while they travel."""

    def __init__(self, fetch: Callable[[Any], Any]):
        self._fetch = fetch
        self._changed = threading.Condition()
        self._wanted: tuple[int, Any] | None = None
        self._here: tuple[int, Weights | None] = (-1, None)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def take(self, number: int, reference: Any, seconds: float | None) -> tuple[int, Weights | None]:
        """The weights of this number; after `seconds`, the newest that are here, with theirs."""
        with self._changed:
            if self._here[0] != number:
                self._wanted = (number, reference)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="hurtle weights", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._wanted is None or self._error, seconds)
            if self._error is not None:
                raise self._error
            return self._here

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None)
                wanted = self._wanted
            assert wanted is not None
            try:
                weights = unpacked(self._fetch(wanted[1]))
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._here = wanted[0], weights
                if self._wanted is wanted:
                    self._wanted = None
                self._changed.notify_all()


def packed(weights: Weights) -> tuple[int, Any, list[Any]]:
    """Weights as arrays, which travel without being pickled."""
    return weights.version, weights.flat.detach().cpu().numpy(), [part.detach().cpu().numpy() for part in weights.buffers]


def unpacked(arrays: tuple[int, Any, list[Any]]) -> Weights:
    """The weights of arrays that may be read-only."""
    import torch

    number, flat, buffers = arrays
    return Weights(torch.from_numpy(flat.copy()), number, tuple(torch.from_numpy(part.copy()) for part in buffers))


def versions() -> dict[str, str]:
    """The versions that learner and collectors must share, of this process."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"hurtle": hurtle.__version__, "python": python, **{name: _release(name) for name in ("numpy", "torch")}}


def _release(package: str) -> str:
    """The version of a package, without what tells builds for CPUs and GPUs apart."""
    return version(package).partition("+")[0]


def _answer(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        return Failure(str(error), traceback.format_exc().rstrip(), portable(error), isinstance(error, HurtleError))


def _facts_of(vec: Any, own_actions: gymnasium.spaces.Space | None) -> EnvFacts:
    from hurtle.collect.native_collector import vector_obstacle
    from hurtle.runners.collector_plan import is_pool

    obstacle = vector_obstacle(vec)
    if obstacle is None:
        has_masks = bool(vec.native_spec.has_mask)
    else:
        from hurtle.collect.rows import VecRows

        _, infos = vec.reset(seed=0)
        has_masks = VecRows(vec).mask(infos) is not None
    num_envs = int(vec.num_envs)
    return EnvFacts(
        num_envs,
        int(getattr(vec, "num_agents", 1)),
        int(getattr(vec, "batch_size", num_envs)),
        vec.single_observation_space,
        vec.single_action_space,
        getattr(vec, "agent_observation_space", vec.single_observation_space),
        getattr(vec, "agent_action_space", vec.single_action_space),
        getattr(vec, "layout", None) if own_actions is not None else None,
        dict(getattr(vec, "drawn", {})),
        own_actions,
        has_masks,
        not is_pool(vec) and bool(getattr(vec, "resumes_exactly", hasattr(vec, "state_dict"))),
        obstacle,
    )
