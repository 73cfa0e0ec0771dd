"""Which gear a run takes: compiled code where envs and policy allow it, torch everywhere else; and why.

settings, envs, policy → collector and algorithm. One meaning: a run may change gears at any checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hurtle.algorithms.a2c import A2C, A2CConfig
from hurtle.algorithms.native import NativeA2C, NativePPO
from hurtle.algorithms.ppo import PPO, PPOConfig
from hurtle.collect.general import GeneralCollector
from hurtle.collect.inference import Actor
from hurtle.collect.native import NativeCollector, vector_obstacle
from hurtle.collect.pool import PoolCollector
from hurtle.collect.rewards import RewardRule
from hurtle.errors import HurtleError
from hurtle.policies.native_plan import UnsupportedError, plan_for
from hurtle.policies.policy import Policy
from hurtle.runners.config import TrainConfig
from hurtle.tracking.timing import Timer

AUTOCAST = {"float32": None, "tf32": None, "bf16": torch.bfloat16}
Collector = GeneralCollector | PoolCollector | NativeCollector
Algorithm = PPO | A2C


@dataclass
class Gear:
    """How a run collects and learns.

    Attributes:
        name: "native" or "general".
        why: What decided it, for the user.
    """

    name: str
    why: str
    collector: Collector
    algorithm: Algorithm

    def close(self, envs: bool = True) -> None:
        """End all threads and workers; the envs only if they are the run's own."""
        if envs:
            self.collector.close()
        elif isinstance(self.collector, NativeCollector):
            self.collector.stop_threads()
        if isinstance(self.algorithm, NativePPO | NativeA2C):
            self.algorithm.native.close()


def choose_gear(
    train: TrainConfig,
    config: PPOConfig | A2CConfig,
    vec: Any,
    policy: Policy,
    rewards: RewardRule,
    seed: int,
    timer: Timer,
) -> Gear:
    """The fastest gear that can do what is asked for, or the one that is.

    Raises:
        HurtleError: gear="native" was asked for and is not possible; says why.
    """
    obstacle = native_obstacle(train, vec, policy)
    if train.gear == "native" and obstacle:
        raise HurtleError(f"gear='native' is not possible here: {obstacle}. Use gear='auto', which then takes the general one.")
    if train.gear == "general" or obstacle:
        why = obstacle or "as asked for"
        return Gear("general", why, *_general(train, config, vec, policy, rewards, seed, timer))
    collector = NativeCollector(
        vec, policy, rewards, seed, timer, num_threads=train.num_workers, gamma=config.gamma, gae_lambda=config.gae_lambda
    )
    algorithm: Algorithm
    try:
        if isinstance(config, PPOConfig):
            algorithm = NativePPO(policy, config, train.seed, train.num_workers)
        else:
            algorithm = NativeA2C(policy, config, train.seed, train.num_workers)
        collector.follow(algorithm.native.current_weights)
        why = "envs, policy and update run compiled"
    except UnsupportedError as error:
        algorithm = _torch_algorithm(train, config, policy)
        why = f"envs and policy run compiled; the update stays in torch, many times slower, since {error}"
    return Gear("native", why, collector, algorithm)


def native_obstacle(train: TrainConfig, vec: Any, policy: Policy) -> str | None:
    """Why compiled code cannot collect for this run; None if it can."""
    if (obstacle := vector_obstacle(vec)) is not None:
        return obstacle
    try:
        plan_for(policy)
    except UnsupportedError as error:
        return str(error)
    return "compile=True asks for torch's own code" if train.compile else None


def _general(
    train: TrainConfig,
    config: PPOConfig | A2CConfig,
    vec: Any,
    policy: Policy,
    rewards: RewardRule,
    seed: int,
    timer: Timer,
) -> tuple[GeneralCollector | PoolCollector, Algorithm]:
    num_rows = int(vec.num_envs) * int(getattr(vec, "num_agents", 1))
    actor = Actor(policy, num_rows, seed, compiled=train.compile, autocast=AUTOCAST[train.precision])
    is_pool = getattr(vec, "batch_size", vec.num_envs) < vec.num_envs
    collector = (PoolCollector if is_pool else GeneralCollector)(vec, actor, rewards, seed, timer)
    return collector, _torch_algorithm(train, config, policy)


def _torch_algorithm(train: TrainConfig, config: PPOConfig | A2CConfig, policy: Policy) -> Algorithm:
    how = (train.seed, train.compile, AUTOCAST[train.precision])
    return PPO(policy, config, *how) if isinstance(config, PPOConfig) else A2C(policy, config, *how)
