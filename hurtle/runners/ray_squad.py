"""`Squad`: the collectors of a run on a Ray cluster: how many, where, with what; publishes weights, counts losses.

settings, recipe → Ray actors → facts of the envs → `RayCollector`s, which ask it for new actors when theirs are lost.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from hurtle.algorithms.algorithm import AlgorithmConfig
from hurtle.buffers.packed_rollout import Packing
from hurtle.contracts import Weights
from hurtle.errors import HurtleError, UnknownNameError, WorkerDiedError
from hurtle.references import is_reference
from hurtle.runners.ray_answers import cause_of, check_versions, checked, who
from hurtle.runners.ray_collector import LOOK_SECONDS, START_SECONDS, RayCollector
from hurtle.runners.ray_host import About, CollectorHost, EnvFacts, Job, Recipe, packed
from hurtle.runners.settings import TrainConfig
from hurtle.runners.shares import shares_of
from hurtle.vector.pickling import dumps_by_value
from hurtle.vector.ray_cluster import cluster_cpus, free_cpus, is_own, join, leave, ray

if TYPE_CHECKING:
    from hurtle.runners.collector_plan import CollectorPlan
    from hurtle.runners.gears import Request

PUBLISHED = 3
"""How many weights are kept in the object store: those that a lag of 1 needs, and one more."""
MOST_LOSSES = 3
"""Losses per collector, without a finished rollout of any, after which a run ends that has had none, or none for long."""
CLOSE_SECONDS = 3.0
"""What the envs are given to close."""


class Squad:
    """The collectors of a run. Starts or joins Ray, and leaves it when it is closed.

    Args:
        train: The settings.
        recipe: How the envs are made.

    Attributes:
        facts: Of the envs, from the first collector that has a place.
        vecs: A description of each collector's vector of envs.
        lost: Collectors that were lost so far.

    Raises:
        HurtleError: Ray is missing, no collector finds a place, versions differ, or the envs cannot be made.
    """

    def __init__(self, train: TrainConfig, recipe: Recipe):
        if train.backend == "ray":
            raise HurtleError(
                "backend='ray' puts each step on the network; with runner='ray' take 'auto', 'serial' or 'process'."
            )
        if train.actor_devices:
            raise HurtleError("actor_devices is for actors of this machine; with runner='ray' set collector_gpus.")
        if isinstance(recipe.env, str) and is_reference(recipe.env):
            recipe = replace(recipe, source=_text_of(recipe.env))
        self.train, self._recipe = train, recipe
        self.is_free = train.allowed_lag == "free"
        self.on_gpu = train.collector_gpus > 0
        self.lost = 0
        self._in_a_row = 0
        self._last_rollout: float | None = None  # when it came
        self._reason = ""  # of the last loss
        self._lock = threading.Lock()
        self._published: list[tuple[int, Weights, Any]] = []  # number, weights, reference
        self._job: Any = None
        self._hosts: dict[int, Any] = {}  # all actors, by number
        self._collectors: list[RayCollector] = []
        self.is_closed = self._is_gathered = False
        self.packings: dict[int, Packing] = {}  # by the rollouts of all collectors: free ones are lent while one is away
        join((train.num_collectors or 1) * train.collector_cpus, train.address)
        try:
            self.count = self._count()
            workers = train.num_workers or max(1, int(train.collector_cpus))
            shares = shares_of(train, self.count, train.backend, workers)
            self.shares = [share._replace(num_workers=min(workers, share.num_envs)) for share in shares]
            self._ready = {number: self.new_host(number) for number in range(self.count)}
            self._away_since = dict.fromkeys(range(self.count), time.monotonic())
            self.facts = self._find_facts()
        except BaseException:
            self.close()
            raise
        self.vecs = [
            replace(self.facts, num_envs=share.num_envs, batch_size=share.pool_batch_size or share.num_envs)
            for share in self.shares
        ]

    def _count(self) -> int:
        """How many collectors there are to be."""
        train = self.train
        count = train.num_collectors
        if count is None:
            fit = [cluster_cpus() / train.collector_cpus]
            if self.on_gpu:
                fit.append(ray.cluster_resources().get("GPU", 0.0) / train.collector_gpus)
            count = max(1, min(int(min(fit)), train.num_envs))
            while self.is_free and train.num_envs % count:
                count -= 1
        if count > train.num_envs:
            raise HurtleError(f"num_collectors={count} is more than num_envs={train.num_envs}: each collector needs an env.")
        if self.is_free and train.num_envs % count:
            raise HurtleError(
                f"lag='free' needs collectors with as many envs each: make num_envs={train.num_envs} a multiple of "
                f"num_collectors={count}."
            )
        return count

    @property
    def vector_obstacle(self) -> str | None:
        """The reason compiled code cannot step the envs, or None."""
        return self.facts.vector_obstacle

    @property
    def where(self) -> str:
        """Where the collectors are, for the user."""
        nodes = sum(1 for node in ray.nodes() if node["Alive"])
        if is_own():
            return "Ray runs on this machine for as long as the run does"
        return f"a cluster of {nodes} node{'s' * (nodes > 1)}, {cluster_cpus():g} CPUs"

    # Actors.

    def new_host(self, number: int) -> Any:
        """Ask Ray for the actor of a collector; it comes when there is room."""
        train = self.train
        options = {"num_cpus": train.collector_cpus, "num_gpus": train.collector_gpus, "max_restarts": 0}
        with self._lock:
            if self.is_closed:
                raise HurtleError("The run's collectors were closed.")
            host = ray.remote(CollectorHost).options(**options, scheduling_strategy="SPREAD").remote()
            self._hosts[number] = host
        return host

    def first_host(self, number: int) -> Any:
        """The actor that this collector was given at the start, or a new one."""
        return self._ready.pop(number, None) or self.new_host(number)

    def _find_facts(self) -> EnvFacts:
        """Ask the first actor that finds a place."""
        hellos = {host.hello.remote(sys.path): number for number, host in self._ready.items()}
        for host in self._ready.values():
            host.warm_up.remote()
        until = time.monotonic() + self.train.collector_wait
        while not (found := ray.wait(list(hellos), timeout=LOOK_SECONDS)[0]):
            if time.monotonic() > until:
                raise HurtleError(f"Ray has found no place for a collector {self.patience}: {self._room()}")
        number = hellos[found[0]]
        try:
            about: About = ray.get(found[0])
            check_versions(number, about)
            asked = self._ready[number].describe.remote(dumps(self._recipe), self.shares[number])
            return checked(who(number, about), ray.get(asked, timeout=START_SECONDS))
        except ray.exceptions.RayError as error:
            lost = f"Collector {number} was lost while it made its first envs: Ray says: {cause_of(error)}"
            raise WorkerDiedError(lost) from error

    @property
    def patience(self) -> str:
        """For how long there may be no collector, for messages."""
        return f"for {self.train.collector_wait:g} s (collector_wait)"

    def _room(self) -> str:
        """What a collector asks for, and what there is."""
        train = self.train
        asked = f"{train.collector_cpus:g} CPU{'s' * (train.collector_cpus != 1)}"
        asked += f" and {train.collector_gpus:g} GPU{'s' * (train.collector_gpus != 1)}" if self.on_gpu else ""
        gpus = f"; {ray.cluster_resources().get('GPU', 0.0):g} GPUs" if self.on_gpu else ""
        there = f"the cluster has {cluster_cpus():g} CPUs, of which {free_cpus():g} are free{gpus}"
        return f"each asks for {asked}, and {there}. Add machines, or set collector_cpus, num_collectors."

    # Collectors.

    def collectors(self, request: Request, plan: CollectorPlan) -> Sequence[RayCollector]:
        """The collectors of a run; theirs and its policies have the same shape."""
        policy = copy.deepcopy(request.policy).to("cpu")
        differs = type(request.config).diversify is not AlgorithmConfig.diversify
        self._described = Job(
            self._recipe,
            policy,
            request.config if differs else None,
            plan,
            request.teaching,
            request.seed,
            request.num_agents,
            self.count,
            0,
            request.train.threads,
            "cuda" if self.on_gpu else "cpu",
        )
        self._collectors = [RayCollector(self, number, policy) for number in range(self.count)]
        return self._collectors

    def job(self, num_steps: int) -> Any:
        """A reference to the job of all collectors."""
        with self._lock:
            if self._job is None:
                self._job = ray.put(dumps(replace(self._described, num_steps=num_steps)))
            return self._job

    def weights(self, weights: Weights) -> tuple[int, Any]:
        """The number of these weights and a reference to them: they are put into the object store once, for all collectors.

        Numbers, unlike versions, tell apart weights whose normalizer alone has changed.
        """
        with self._lock:
            for number, known, reference in self._published:
                if known is weights:
                    return number, reference
            number = self._published[-1][0] + 1 if self._published else 0
            self._published = [*self._published[1 - PUBLISHED :], (number, weights, ray.put(packed(weights)))]
            return number, self._published[-1][2]

    def gather(self) -> None:
        """Wait, once, until the collectors that have a place are ready: all of them unless the lag is free.

        Raises:
            HurtleError: None is there in time, or one cannot be made.
        """
        if self._is_gathered:
            return
        self._is_gathered = True
        for number in self._away_since:
            self._away_since[number] = time.monotonic()
        until = time.monotonic() + LOOK_SECONDS
        while True:
            here = [collector.is_ready(LOOK_SECONDS / self.count) for collector in self._collectors]
            if all(here):
                return
            coming = any(collector.has_place for collector in self._collectors)
            if self.is_free and any(here) and not coming and time.monotonic() > until:
                print(
                    f"hurtle: {sum(here)} of {self.count} collectors have a place; {self._room()}", file=sys.stderr, flush=True
                )
                return

    def joined(self, number: int) -> None:
        """A collector is ready."""
        with self._lock:
            self._away_since.pop(number, None)

    def finished(self) -> None:
        """A rollout has come."""
        self._in_a_row, self._last_rollout = 0, time.monotonic()

    def left(self, number: int, why: str) -> None:
        """A collector was lost.

        Raises:
            WorkerDiedError: It happens again and again, and nothing was ever finished, or nothing for `collector_wait` seconds.
        """
        with self._lock:
            if self.is_closed:
                return
            self._away_since.setdefault(number, time.monotonic())
            self.lost, self._in_a_row, self._reason = self.lost + 1, self._in_a_row + 1, why
            times, last = self._in_a_row, self._last_rollout
        is_long = last is None or time.monotonic() - last > self.train.collector_wait
        if times > MOST_LOSSES * self.count and is_long:
            raise WorkerDiedError(f"{times} collectors were lost, and none has finished a rollout since. The last one: {why}")
        print(f"hurtle: {why} It is replaced when there is room.", file=sys.stderr, flush=True)

    def check_patience(self, number: int) -> None:
        """Raise if there has been no collector for too long; unless the lag is free, if there has not been this one."""
        with self._lock:
            since = dict(self._away_since)
        if self.is_free and len(since) < self.count:
            return
        began = max(since.values()) if self.is_free else since.get(number, time.monotonic())
        if time.monotonic() - began < self.train.collector_wait:
            return
        missing = (
            "There has been no collector" if self.is_free else f"Collector {number}, which lag={self.train.lag} needs, is away"
        )
        last = f" The last one: {self._reason}" if self._reason else ""
        raise WorkerDiedError(f"{missing} {self.patience}: {self._room()}{last}")

    def end(self, number: int) -> None:
        """End the actor of a collector."""
        with contextlib.suppress(Exception):  # it may be gone
            ray.kill(self._hosts.pop(number))

    def close(self) -> None:
        """Let the envs close, end all actors, and leave Ray."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            hosts, self._hosts = list(self._hosts.values()), {}
        with contextlib.suppress(Exception):  # Ray may have been shut down in between
            if ray.is_initialized():
                closing = [host.close.remote() for host in hosts]
                if closing:
                    ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
                for host in hosts:
                    ray.kill(host)
        self._published, self._job, self._ready = [], None, {}
        leave()


def _text_of(reference: str) -> str:
    """The text of the file of "my_env.py:MyEnv"."""
    file = reference.rpartition(":")[0]
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UnknownNameError(f"{reference!r}: cannot read {file!r}: {error.strerror}.") from None


def dumps(value: Any) -> bytes:
    """Pickle for a host; what was loaded from a file by its path, and cannot be imported there, goes along."""
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith("hurtle_user_")]
    for module in loaded:
        cloudpickle.register_pickle_by_value(module)
    try:
        return dumps_by_value(value)
    finally:
        for module in loaded:
            cloudpickle.unregister_pickle_by_value(module)
