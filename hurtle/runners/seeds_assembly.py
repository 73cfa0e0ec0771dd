"""Builds the parts of many seeds that train together: one vector env, a learner for each seed and one for all, one collector.

settings → vector env → how many seeds fit into memory → policies, learners → `SideBySide`, `SeedsCollector`, replay buffer.
Knows nothing of the loop that uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hurtle.algorithms.algorithm import LearnerSetup, find_algorithm
from hurtle.algorithms.epochs_together import EpochsTogether
from hurtle.algorithms.replay_settings import ReplayConfig
from hurtle.algorithms.side_by_side import SideBySide
from hurtle.buffers.replay_groups import replay_bytes
from hurtle.buffers.rollout import Rollout
from hurtle.buffers.storage import available_memory, gib
from hurtle.collect.rewards import RewardRule
from hurtle.collect.seeds_actor import SeedsActor
from hurtle.collect.seeds_collector import SeedsCollector
from hurtle.collect.seeds_device_collector import SeedsDeviceCollector
from hurtle.errors import HurtleError
from hurtle.kernels.cuda_graphs import Graphs
from hurtle.native.cuda_support import import_cuda
from hurtle.policies.build import build_policy
from hurtle.policies.policy import Policy
from hurtle.policies.torch_device import find_device
from hurtle.runners.assembly import describe_spaces, row_spaces, run_seed, structured_actions
from hurtle.runners.settings import Settings
from hurtle.tracking.timing import Timer
from hurtle.vector.factory import make_vec

REPLAY_SHARE = 0.8
"""The part of the free memory that replay may take; networks, batches and graphs take the rest."""


@dataclass(frozen=True)
class SeedsParts:
    """What the loop of many seeds connects: off-policy learners step any envs, actor–critics native ones on their device.

    Attributes:
        seeds: The seeds, of which the memory may hold fewer than were asked for.
        spaces: As stored in a checkpoint.
    """

    seeds: list[int]
    vec: Any
    learner: SideBySide | EpochsTogether
    collector: SeedsCollector | SeedsDeviceCollector
    rollout: Rollout
    spaces: dict[str, Any]
    timer: Timer

    @property
    def policies(self) -> list[Policy]:
        """The policy of each seed."""
        return [learner.policy for learner in self.learner.learners]

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return self.learner.device

    def close(self) -> None:
        """Close the learner, the collector and the envs."""
        self.learner.close()
        self.collector.close()


def assemble_seeds(settings: Settings, seeds: Sequence[int]) -> SeedsParts:
    """Build all parts, for as many of the seeds as there is memory for their replay.

    Args:
        settings: Those of every seed; `seed` is ignored.
        seeds: The seeds.

    Raises:
        HurtleError: Settings conflict with the env or the machine, or not even one seed's replay buffer fits.
    """
    train = settings.train
    device = find_device(train.device)
    if train.precision != "float32" and device.type != "cuda":
        raise HurtleError(f"precision={train.precision!r} is for GPUs; on {device.type} use float32.")
    if device.type == "cuda":
        import_cuda()
    own_actions = structured_actions(train.env, train.env_parameters)
    vec = _make_envs(settings, len(seeds), own_actions is not None)
    try:
        policy = _make_policy(settings, vec, own_actions, seeds[0])
        if not isinstance(settings.algorithm, ReplayConfig):
            policies = [policy, *(_make_policy(settings, vec, own_actions, seed) for seed in seeds[1:])]
            return _join_actor_critics(settings, vec, [each.to(device) for each in policies], list(seeds))
        fit = seeds_that_fit(settings, policy, vec, len(seeds), device)
        if fit < len(seeds):
            vec.close()
            seeds = seeds[:fit]
            vec = _make_envs(settings, fit, own_actions is not None)
        policies = [policy, *(_make_policy(settings, vec, own_actions, seed) for seed in seeds[1:])]
        return _join(settings, vec, [each.to(device) for each in policies], list(seeds), own_actions)
    except BaseException:
        vec.close()
        raise


def seeds_that_fit(settings: Settings, policy: Policy, vec: Any, count: int, device: torch.device) -> int:
    """How many of `count` seeds to train at a time: in as few turns as memory allows, and equally many in each.

    Raises:
        HurtleError: There is no memory for one.
    """
    rows = int(vec.num_envs) * int(getattr(vec, "num_agents", 1)) // count
    like = Rollout(policy, settings.algorithm.num_steps, rows)
    capacity = settings.algorithm.capacity  # type: ignore[attr-defined]
    each = replay_bytes(like, capacity)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    most = int(REPLAY_SHARE * free) // each
    if not most:
        raise HurtleError(
            f"The replay buffer of one seed takes {gib(each)}, and {gib(free)} of memory are free on {device}: "
            f"use a smaller capacity than {capacity:,}."
        )
    turns = -(-count // most)
    return -(-count // turns)


def _make_envs(settings: Settings, seeds: int, emulate: bool) -> Any:
    train = settings.train
    return make_vec(
        train.env,
        seeds * train.num_envs,
        backend=train.backend,
        device=_device_of_envs(settings),
        num_workers=train.num_workers,
        emulate=emulate,
        step_timeout=train.step_timeout,
        restart_workers=train.restart_workers,
        unsafe=train.unsafe,
        **train.env_parameters,
    )


def _device_of_envs(settings: Settings) -> str:
    """Where native envs step: beside actor–critics, on the CPU for others."""
    return "cpu" if isinstance(settings.algorithm, ReplayConfig) else str(find_device(settings.train.device))


def _make_policy(settings: Settings, vec: Any, own_actions: Any, seed: int) -> Policy:
    return build_policy(
        settings.policy,
        *row_spaces(vec),
        layout=vec.layout if own_actions is not None else None,
        normalize_observations=settings.train.normalize_observations,
        observation_clip=settings.train.observation_clip,
        seed=seed,
        make_network=find_algorithm(settings.train.algorithm).network_maker(settings.algorithm),
    )


def _join(settings: Settings, vec: Any, policies: list[Policy], seeds: list[int], own_actions: Any) -> SeedsParts:
    train, config = settings.train, settings.algorithm
    algorithm, device = find_algorithm(train.algorithm), next(policies[0].parameters()).device
    graphs, timer, rows = Graphs(device), Timer(), train.num_envs * int(getattr(vec, "num_agents", 1))
    config.check(rows, policies[0].is_recurrent)
    learners: list[Any] = []
    for seed, policy in zip(seeds, policies, strict=True):
        rewards = RewardRule(train.reward_mode, rows, config.gamma, train.reward_clip)
        setup = LearnerSetup(seed, rewards, train.compile, train.precision, train.num_workers, graphs, num_rows=rows)
        learners.append(algorithm.make_learner("device", policy, config, setup))
    together, bases = SideBySide(learners), [run_seed(seed) for seed in seeds]
    actor = SeedsActor(policies, rows * len(seeds), bases, graphs)
    collector = SeedsCollector(vec, actor, bases, seeds, timer)
    if collector.has_masks:
        raise HurtleError("Envs that report legal actions do not train side by side: train the seeds with side_by_side=False.")
    described = {**describe_spaces(vec, own_actions), "masked": False}
    return SeedsParts(seeds, vec, together, collector, collector.new_rollout(config.num_steps), described, timer)


def _join_actor_critics(settings: Settings, vec: Any, policies: list[Policy], seeds: list[int]) -> SeedsParts:
    train, config = settings.train, settings.algorithm
    algorithm, device = find_algorithm(train.algorithm), next(policies[0].parameters()).device
    graphs, timer, rows = Graphs(device), Timer(), train.num_envs * int(vec.num_agents)
    config.check(rows, policies[0].is_recurrent)
    learners: list[Any] = []
    for seed, policy in zip(seeds, policies, strict=True):
        rewards = RewardRule(train.reward_mode, rows, config.gamma, train.reward_clip)
        setup = LearnerSetup(seed, rewards, precision=train.precision, graphs=Graphs(device, enabled=False), num_rows=rows)
        learners.append(algorithm.make_learner("device", policy, config, setup))
    setup = LearnerSetup(precision=train.precision, graphs=graphs)
    together, bases = EpochsTogether(learners, setup), [run_seed(seed) for seed in seeds]
    collector = SeedsDeviceCollector(
        vec, together.policy, bases, seeds, timer=timer, postprocess=together.postprocess, graphs=graphs,
        fused=together.acting_kernels, precision=train.precision,
    )  # fmt: skip
    rollout = collector.new_rollout(config.num_steps)
    described = {**describe_spaces(vec, None), "masked": collector.has_masks}
    return SeedsParts(seeds, vec, together, collector, rollout, described, timer)
