"""Which gear a run uses, and why: all on the GPU, or compiled, if envs and policy allow it; torch everywhere else.

settings, envs, policy → `Gear`: a collector, or one per actor joined as one, and a learner. Gears are interchangeable: a run
can switch at any checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from hurtle.algorithms.algorithm import Algorithm, LearnerSetup
from hurtle.collect.curriculum import make_rules
from hurtle.collect.device_collector import DeviceCollector, device_obstacle
from hurtle.collect.native_collector import NativeCollector, vector_obstacle
from hurtle.collect.rewards import RewardRule
from hurtle.contracts import Collector, Learner
from hurtle.errors import HurtleError, UnsupportedError
from hurtle.kernels.cuda_graphs import Graphs
from hurtle.kernels.ranks import ALONE, Ranks
from hurtle.policies.native_plan import plan_for
from hurtle.policies.policy import Policy
from hurtle.policies.torch_device import find_device
from hurtle.runners.async_collector import AsyncCollector
from hurtle.runners.collector_plan import CollectorPlan, Part, Teaching, is_pool
from hurtle.runners.native_loop import NativeLoop
from hurtle.runners.settings import TrainConfig
from hurtle.tracking.timing import Timer

if TYPE_CHECKING:
    from hurtle.runners.ray_squad import Squad


@dataclass(frozen=True)
class Gear:
    """How a run collects and learns.

    Attributes:
        name: "device", "native" or "general".
        reason: Why this one, for the user.
        loop: Runs several updates at once, where that is faster.
    """

    name: str
    reason: str
    collector: Collector
    learner: Learner
    loop: NativeLoop | None = None

    def close(self, envs: bool) -> None:
        """Stop threads and release memory; close the envs too unless they belong to the user."""
        if self.loop is not None:
            self.loop.close()
        self.learner.close()
        self.collector.close(envs=envs)


@dataclass(frozen=True)
class Request:
    """What a gear is built from.

    Attributes:
        vecs: A vector of envs for each actor.
        lag: The actors' lag; empty in a local run, which has one vector and no actors.
        ranks: The learners that train together.
        squad: The collectors on a cluster, whose vectors are only descriptions.
    """

    train: TrainConfig
    algorithm: Algorithm
    config: Any
    vecs: list[Any]
    policy: Policy
    rewards: RewardRule
    seed: int
    timer: Timer
    lag: str = ""
    ranks: Ranks = ALONE
    squad: Squad | None = None

    def learner(self, gear: str, **setup: Any) -> Learner:
        """The algorithm's learner for a gear; raises `UnsupportedError` if it has none."""
        train = self.train
        common = LearnerSetup(
            train.seed,
            self.rewards,
            train.compile,
            train.precision,
            train.num_workers,
            num_rows=self.num_rows,
            is_pool=self.is_pool,
            lags=self.lag not in ("", "0"),
            ranks=self.ranks if self.ranks.several else None,
            **setup,
        )
        return self.algorithm.make_learner(gear, self.policy, self.config, common)

    def collector(self, plan: CollectorPlan) -> Collector:
        """The run's collector, or all of its actors'."""
        most = self.train.num_workers
        if not self.lag:
            part = Part(self.vec, self.policy, self.first_seed, self.first_action_seed, self.timer, most)
            return self.taught(plan.collector(part), self.vec, self.seed)
        lag = None if self.lag == "free" else int(self.lag)
        if self.squad is not None:
            return AsyncCollector(self.squad.collectors(self, plan), self.policy, lag, self.timer)
        if most is not None:
            most = max(1, most // len(self.vecs))
        collectors, first = [], 0
        for number, vec in enumerate(self.vecs):
            policy = copy.deepcopy(self.policy).to(self.actor_device(number))  # its weights come from the learner
            self.config.diversify(policy, number, len(self.vecs))
            part = Part(vec, policy, self.seed + first, self.seed + first * self.num_agents, Timer(), most)
            collectors.append(self.taught(plan.collector(part), vec, part.seed))
            first += vec.num_envs
        return AsyncCollector(collectors, self.policy, lag, self.timer)

    @property
    def teaching(self) -> Teaching:
        """The run's curriculum."""
        return Teaching(self.train.curriculum, self.num_rows, self.train.total_steps)

    def taught(self, collector: Collector, vec: Any, seed: int) -> Collector:
        """The collector of a vector, under the run's curriculum if there is one."""
        return self.teaching.taught(collector, vec, seed)

    @property
    def vec(self) -> Any:
        """The envs, or the first actor's."""
        return self.vecs[0]

    @property
    def is_pool(self) -> bool:
        """Whether any column of a rollout may be of any row."""
        return is_pool(self.vec) or (self.lag == "free" and len(self.vecs) > 1)

    @property
    def first_seed(self) -> int:
        """The seed of the first env of this rank: envs are counted over all ranks."""
        return self.seed + self.ranks.rank * self.train.num_envs

    @property
    def first_action_seed(self) -> int:
        """The seed of the actions of its first row."""
        return self.seed + self.ranks.rank * self.num_rows

    @property
    def num_agents(self) -> int:
        """Agents of each env."""
        return int(getattr(self.vec, "num_agents", 1))

    @property
    def num_rows(self) -> int:
        """Envs times agents, of all actors."""
        return sum(int(vec.num_envs) for vec in self.vecs) * self.num_agents

    @property
    def device(self) -> torch.device:
        """The policy's device."""
        return next(self.policy.parameters()).device

    def actor_device(self, number: int) -> torch.device:
        """Where an actor acts."""
        names = self.train.actor_devices
        return find_device(names[number % len(names)]) if names and self.lag else self.device

    @property
    def acts_elsewhere(self) -> bool:
        """Whether an actor acts on another device than the learner's."""
        own = self.device
        if self.squad is not None:
            return self.squad.on_gpu != (own.type == "cuda")
        others = [self.actor_device(number) for number in range(len(self.vecs))]
        return any((other.type, other.index or 0) != (own.type, own.index or 0) for other in others)


class _Kind(NamedTuple):
    name: str
    obstacle: Callable[[Request], str | None]
    make: Callable[[Request], Gear]
    hint: str


def choose_gear(request: Request) -> Gear:
    """The first gear of `GEARS` that can run the request, or the one the user named.

    Raises:
        HurtleError: The named gear cannot run it; says why.
    """
    asked, why_not = request.train.gear, ""
    for kind in GEARS:
        if asked not in ("auto", kind.name):
            continue
        obstacle = kind.obstacle(request)
        if obstacle is None:
            gear = kind.make(request)
            return replace(gear, reason=gear.reason or why_not)
        if asked == kind.name:
            raise HurtleError(f"gear={asked!r} is not possible here: {obstacle}. {kind.hint}")
        why_not = obstacle
    raise AssertionError("the general gear has no obstacles")


# The device gear: envs, policy and update on one device; on a GPU in CUDA graphs, with fused kernels where they fit the policy.


def _device_obstacle(request: Request) -> str | None:
    if request.lag:
        return "actors collect on the CPU, or launch their policy op by op"
    if request.train.gear == "auto" and request.device.type != "cuda":
        return "the networks are on the CPU"
    return device_obstacle(request.vec, request.device)


def _device(request: Request) -> Gear:
    graphs = Graphs(request.device, enabled=request.ranks.capturable)
    where = "on the GPU, in CUDA graphs" if graphs.enabled else "as on a GPU, but on the CPU"
    try:
        learner = request.learner("device", graphs=graphs)
        reason = f"envs, policy and update run {where}{learner.note}"
    except UnsupportedError:
        learner = request.learner("general")
        reason = f"envs and policy run {where}; the update is launched by torch, op by op"
    rules = make_rules(request.train.curriculum, request.vec.drawn)
    collector = DeviceCollector(
        request.vec,
        request.policy,
        request.first_seed,
        request.timer,
        action_seed=request.first_action_seed,
        postprocess=learner.postprocess,
        graphs=graphs,
        fused=learner.acting_kernels,
        precision=request.train.precision,
        compiled=request.train.compile,
        edges={name: rule.edges for name, rule in rules.items() if rule.edges is not None},
    )
    return Gear("device", reason, request.taught(collector, request.vec, request.seed), learner)


# The native gear: the policy, native envs, and the update if the algorithm has a compiled one, run in compiled code.


def _native_obstacle(request: Request) -> str | None:
    """The reason the policy can neither act nor learn in compiled code, or None."""
    try:
        plan_for(request.policy)
    except UnsupportedError as error:
        return str(error)
    if request.acts_elsewhere:
        return "actors act on another device than the learner's"
    return "compile=True asks for torch's own code" if request.train.compile else None


def _native(request: Request) -> Gear:
    in_python = vector_obstacle(request.vec) if request.squad is None else request.squad.vector_obstacle
    try:
        learner = request.learner("native")
        reason = "policy and update run compiled" if in_python else "envs, policy and update run compiled"
    except UnsupportedError as error:
        learner = request.learner("general")
        reason = "the policy runs compiled" if in_python else "envs and policy run compiled"
        reason += f"; the update stays in torch, many times slower, since {error}"
    stage, loop = learner.postprocess, None
    if in_python:
        reason += f"; {in_python}"
        plan = CollectorPlan(compiled_policy=True, bootstraps=stage is not None and stage.policy is request.policy)
        collector = request.collector(plan)
    else:
        in_rollout = stage is not None and stage.rewards.mode == "raw"
        discounts = (stage.gamma, stage.gae_lambda) if in_rollout else None
        collector = request.collector(CollectorPlan(compiled_policy=True, compiled_envs=True, discounts=discounts))
        steps_alone = request.lag or request.train.curriculum  # Python acts between updates
        if not steps_alone and NativeLoop.fits(cast("NativeCollector", collector), learner.planner):
            loop = NativeLoop(cast("NativeCollector", collector), learner.planner)
    return Gear("native", reason, collector, learner, loop)


# The general gear: any env, any torch module.


def _no_obstacle(request: Request) -> None:
    return None


def _general(request: Request) -> Gear:
    train = request.train
    collector = request.collector(CollectorPlan(compiles=train.compile, precision=train.precision))
    return Gear("general", "as asked for" if train.gear == "general" else "", collector, request.learner("general"))


GEARS = (
    _Kind("device", _device_obstacle, _device, "Use gear='auto', which falls back to the general one."),
    _Kind(
        "native",
        _native_obstacle,
        _native,
        "The native gear needs one of Hurtle's own networks on the CPU, with or without memory: an MLP (observations may be "
        "nested vectors and choices) or a CNN for small grids; gear='auto' uses the general one elsewhere.",
    ),
    _Kind("general", _no_obstacle, _general, ""),
)
"""Fastest first: why it cannot run a request, what builds it, and advice for when it was requested but cannot run."""
