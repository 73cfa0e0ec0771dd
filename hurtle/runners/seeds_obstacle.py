"""Whether the seeds of a run can be trained as one learner, from its settings alone. Imports no torch."""

from __future__ import annotations

from typing import Any

from hurtle.algorithms.algorithm import find_algorithm, short_name
from hurtle.algorithms.replay_settings import ReplayConfig
from hurtle.envs.registry import resolve
from hurtle.native.env import Env, EnvSpec
from hurtle.references import is_reference
from hurtle.runners.settings import Settings, TrainConfig


def together_obstacle(settings: Settings) -> str | None:
    """Why seeds with these settings cannot learn side by side in one process; None if they can.

    Example:
        >>> from hurtle.runners.settings import make_settings
        >>> together_obstacle(make_settings("cartpole", {"recurrent": "lstm"}))
        'the policy has a memory'
        >>> together_obstacle(make_settings("cartpole", {}))
    """
    train, algorithm = settings.train, find_algorithm(settings.train.algorithm)
    name = short_name(train.algorithm)
    if settings.policy.recurrent != "none":
        return "the policy has a memory"
    if "device" not in algorithm.learners:
        return f"{name} has no version whose gradient steps are a CUDA graph"
    if train.curriculum:
        return "a curriculum is not kept for each seed"
    if train.num_learners > 1:
        return "each has several learners"
    if train.runner != "local":
        return f"runner={train.runner!r} collects with actors"
    if train.pool_batch_size is not None:
        return "the envs of a pool are not in step"
    if train.gear not in ("auto", "device"):
        return f"gear={train.gear!r} is for single runs"
    if isinstance(settings.algorithm, ReplayConfig):
        return _obstacle_with_replay(train, settings.algorithm)
    return _obstacle_on_device(train, settings, name) if algorithm.side_by_side else f"{name} has no version for many seeds"


def _obstacle_with_replay(train: TrainConfig, config: ReplayConfig) -> str | None:
    if getattr(config, "noisy", False):
        return "all seeds would have the same noise in noisy layers"
    if train.normalize_observations or train.reward_mode == "normalize":
        return "running statistics of observations and rewards are not kept for each seed"
    return None


def _obstacle_on_device(train: TrainConfig, settings: Settings, name: str) -> str | None:
    """That of actor–critics, whose envs step on their device."""
    config: Any = settings.algorithm
    if getattr(config, "priority_alpha", 0.0) or getattr(config, "vtrace", False):
        return "priorities and V-trace have no version for many seeds"
    if config.optimizer == "muon":
        return "optimizer='muon' has no version whose steps are a CUDA graph"
    if train.compile:
        return "compile=True is for single runs of it"
    if is_reference(settings.policy.policy):
        return "the policy is not one of Hurtle's own"
    env = resolve(train.env, train.env_parameters)
    if not isinstance(env, Env) or train.backend not in ("auto", "native"):
        return f"{name} steps its envs on the GPU for that, and these step on the CPU"
    return "agents may be absent" if EnvSpec.of(env).has_present else None
