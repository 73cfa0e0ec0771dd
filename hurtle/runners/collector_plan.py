"""`CollectorPlan`: how the collectors of a run are made, the same in this thread, in actors' threads and on other machines.

a gear's choices → plan → (envs, policy, seeds) → collector. Plans can be pickled; they know neither learners nor runners.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from hurtle.algorithms.ppo import AUTOCAST
from hurtle.collect.compiled_actor import CompiledActor
from hurtle.collect.curriculum import make_rules
from hurtle.collect.curriculum_collector import CurriculumCollector
from hurtle.collect.general_collector import GeneralCollector
from hurtle.collect.inference import Actor
from hurtle.collect.native_collector import NativeCollector
from hurtle.collect.pool_collector import PoolCollector
from hurtle.collect.postprocess import Postprocess
from hurtle.contracts import Collector
from hurtle.policies.policy import Policy
from hurtle.tracking.timing import Timer


class Part(NamedTuple):
    """What one collector is built from: the whole run's parts, or an actor's."""

    vec: Any
    policy: Policy
    seed: int
    action_seed: int
    timer: Timer
    num_threads: int | None


@dataclass(frozen=True)
class CollectorPlan:
    """How a gear collects.

    Attributes:
        compiled_policy: Whether the policy acts in compiled code.
        compiled_envs: Whether whole rollouts run in compiled code.
        discounts: gamma and GAE's λ, where advantages are computed with the rollout.
        bootstraps: Whether the values of what follows a rollout are those of the policy that acts.
        compiles: Whether torch compiles the policy.
        precision: Of torch's inference.
    """

    compiled_policy: bool = False
    compiled_envs: bool = False
    discounts: tuple[float, float] | None = None
    bootstraps: bool = False
    compiles: bool = False
    precision: str = "float32"

    def collector(self, part: Part) -> Collector:
        """The collector of these envs."""
        if self.compiled_envs:
            stage = None if self.discounts is None else Postprocess(part.policy, *self.discounts)
            return NativeCollector(
                part.vec,
                part.policy,
                part.seed,
                part.timer,
                postprocess=stage,
                num_threads=part.num_threads,
                action_seed=part.action_seed,
            )
        rows = int(part.vec.num_envs) * int(getattr(part.vec, "num_agents", 1))
        make: Any = partial(Actor, compiled=self.compiles, autocast=AUTOCAST[self.precision])
        if self.compiled_policy:
            make = partial(CompiledActor, bootstraps=self.bootstraps)
        kind = PoolCollector if is_pool(part.vec) else GeneralCollector
        return kind(part.vec, make(part.policy, rows, part.action_seed), part.seed, part.timer)


@dataclass(frozen=True)
class Teaching:
    """The curriculum of a run.

    Attributes:
        texts: How its rules are written; none: there is no curriculum.
        num_rows: Rows of the whole run.
        total_steps: Steps of the whole run.
    """

    texts: Mapping[str, Any] = field(default_factory=dict)
    num_rows: int = 1
    total_steps: int = 1

    def taught(self, collector: Collector, vec: Any, seed: int) -> Collector:
        """The collector of a vector, under the run's curriculum if there is one."""
        if not self.texts:
            return collector
        share = int(vec.num_envs) * int(getattr(vec, "num_agents", 1)) / self.num_rows
        rules = make_rules(self.texts, vec.drawn)
        return CurriculumCollector(collector, vec, rules, self.texts, seed, share * self.total_steps, share)


def is_pool(vec: Any) -> bool:
    """Whether envs step in batches of those that are ready."""
    return bool(getattr(vec, "batch_size", vec.num_envs) < vec.num_envs)
