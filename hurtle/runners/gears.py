"""Which gear a run takes: all on the GPU, or compiled, where envs and policy allow it; torch everywhere else; and why.

settings, envs, policy → collector and algorithm. One meaning: a run may change gears at any checkpoint.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from hurtle.algorithms.a2c import A2C
from hurtle.algorithms.configs import A2CConfig, PPOConfig
from hurtle.algorithms.device import DevicePPO
from hurtle.algorithms.native import NativeA2C, NativePPO
from hurtle.algorithms.ppo import PPO
from hurtle.buffers.rollout import EpisodeTotals, Rollout
from hurtle.collect.device import DeviceCollector, device_obstacle
from hurtle.collect.general import GeneralCollector
from hurtle.collect.inference import Actor
from hurtle.collect.native import NativeCollector, vector_obstacle
from hurtle.collect.pool import PoolCollector
from hurtle.collect.rewards import RewardRule
from hurtle.errors import HurtleError
from hurtle.native.graphs import WARM_UPS, Graphs
from hurtle.native.triton import has_triton
from hurtle.policies.native_plan import UnsupportedError, plan_for
from hurtle.policies.policy import Policy
from hurtle.runners.config import TrainConfig
from hurtle.tracking.timing import Timer

AUTOCAST = {"float32": None, "tf32": None, "bf16": torch.bfloat16}
Collector = GeneralCollector | PoolCollector | NativeCollector | DeviceCollector
Algorithm = PPO | A2C


@dataclass
class Gear:
    """How a run collects and learns.

    Attributes:
        name: "device", "native" or "general".
        why: What decided it, for the user.
    """

    name: str
    why: str
    collector: Collector
    algorithm: Algorithm

    def prepare(self, rollout: Rollout) -> None:
        """Compile and capture what the run will use, and leave everything as it was; only the device gear needs that."""
        if not isinstance(self.collector, DeviceCollector):
            return
        collector, algorithm, policy = self.collector, self.algorithm, self.collector.policy
        weights, *saved = (copy.deepcopy(part.state_dict()) for part in (policy, collector, algorithm))
        for _ in range(WARM_UPS + 1):
            collector.collect(rollout)
            algorithm.update(rollout)
        self.rest()
        collector.overflow = 0
        policy.load_state_dict(weights)
        collector.load_state_dict(saved[0])
        algorithm.load_state_dict(saved[1])

    def rest(self) -> tuple[EpisodeTotals, dict[str, float]]:
        """Episodes and metrics that a GPU has not told of yet: they come an update or two late."""
        episodes, metrics = EpisodeTotals(), {}
        if isinstance(self.collector, DeviceCollector):
            episodes = self.collector.arrived(wait=True)
        if isinstance(self.algorithm, DevicePPO):
            metrics = self.algorithm.arrived(wait=True)
        return episodes, metrics

    def gpu_seconds(self) -> dict[str, float]:
        """What a GPU that does all the work was busy with since the last call, by stage; else nothing."""
        if isinstance(self.collector, DeviceCollector) and isinstance(self.algorithm, DevicePPO):
            return self.collector.graphs.seconds()
        return {}

    @property
    def warning(self) -> str:
        """What is not as it should be, for the user; empty if all is well."""
        if isinstance(self.collector, DeviceCollector) and self.collector.graphs.failure:
            return f"no CUDA graphs, so it is slower: {self.collector.graphs.failure}"
        return ""

    def close(self, envs: bool = True) -> None:
        """End all threads and workers, and give memory back; the envs only if they are the run's own."""
        if isinstance(self.algorithm, DevicePPO):
            self.algorithm.close()
        if envs:
            self.collector.close()
        elif isinstance(self.collector, NativeCollector):
            self.collector.stop_threads()
        elif isinstance(self.collector, DeviceCollector):
            self.collector.release()
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
        HurtleError: gear="native" or gear="device" was asked for and is not possible; says why.
    """
    on_gpu = next(policy.parameters()).is_cuda
    if train.gear == "device" or (train.gear == "auto" and on_gpu):
        why_not = device_obstacle(vec, next(policy.parameters()).device)
        if why_not is None:
            return _device(train, config, vec, policy, rewards, seed, timer)
        if train.gear == "device":
            raise HurtleError(
                f"gear='device' is not possible here: {why_not}. Use gear='auto', which then takes the general one."
            )
    obstacle = native_obstacle(train, vec, policy)
    if train.gear == "native" and obstacle:
        raise HurtleError(
            f"gear='native' is not possible here: {obstacle}. The native gear needs a native env, policy='mlp' and "
            "recurrent='none'; gear='auto' takes the general one where these are missing."
        )
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


def _device(
    train: TrainConfig,
    config: PPOConfig | A2CConfig,
    vec: Any,
    policy: Policy,
    rewards: RewardRule,
    seed: int,
    timer: Timer,
) -> Gear:
    """Envs, policy and update on one device; on a GPU in CUDA graphs, and in kernels of our own where they know the policy."""
    graphs = Graphs(next(policy.parameters()).device)
    options: dict[str, Any] = {"graphs": graphs, "precision": train.precision, "compiled": train.compile}
    where = "on the GPU, in CUDA graphs" if graphs.enabled else "as on a GPU, but on the CPU"
    algorithm: Algorithm
    if isinstance(config, PPOConfig) and config.optimizer != "muon":
        algorithm = DevicePPO(policy, config, train.seed, **options)
        why = f"envs, policy and update run {where}"
    else:
        algorithm = _torch_algorithm(train, config, policy)
        why = f"envs and policy run {where}; the update is launched by torch, operation by operation"
    collector = DeviceCollector(vec, policy, rewards, seed, timer, **options)
    if isinstance(algorithm, DevicePPO) and graphs.enabled:
        try:
            _fuse(train, collector, algorithm)
            why += ", with fused kernels for this policy"
        except UnsupportedError as error:
            why += f" (no fused kernels: {error})"
    return Gear("device", why, collector, algorithm)


def _fuse(train: TrainConfig, collector: DeviceCollector, algorithm: DevicePPO) -> None:
    """Let kernels of our own act and learn for the policy.

    Raises:
        UnsupportedError: They cannot; says why.
    """
    if not has_triton():
        raise UnsupportedError("triton is not installed")
    from hurtle.native.triton.mlp import FusedMLP, mlp_shape

    if train.compile:
        raise UnsupportedError("compile=True asks for torch's own")
    if collector.has_masks or collector.vec.native_spec.has_present:
        raise UnsupportedError("actions are masked, or agents come and go")
    if algorithm.learns_from_segments or algorithm.config.vtrace:
        raise UnsupportedError("minibatches are whole segments, or V-trace is on")
    shape = mlp_shape(algorithm.policy)
    capability = torch.cuda.get_device_capability(algorithm.device)
    if capability < (8, 0) or (shape.hidden > 64 and capability < (9, 0)):
        raise UnsupportedError("this GPU is too old or too small for them")
    fused = FusedMLP(shape, algorithm.parameters.values, train.precision)
    collector.follow(fused)
    algorithm.fuse(fused)


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
