"""Whether the seeds of a run can be trained as one learner, from its settings alone. Imports no torch."""

from __future__ import annotations

from hurtle.algorithms.algorithm import find_algorithm, short_name
from hurtle.algorithms.replay_settings import ReplayConfig
from hurtle.runners.settings import Settings


def together_obstacle(settings: Settings) -> str | None:
    """Why seeds with these settings cannot learn side by side in one process; None if they can.

    Example:
        >>> from hurtle.runners.settings import make_settings
        >>> together_obstacle(make_settings("cartpole", {}))
        'ppo has no replay buffer'
        >>> together_obstacle(make_settings("cartpole", {"algorithm": "dqn"}))
    """
    train, algorithm = settings.train, find_algorithm(settings.train.algorithm)
    name = short_name(train.algorithm)
    if not isinstance(settings.algorithm, ReplayConfig):
        return f"{name} has no replay buffer"
    if settings.policy.recurrent != "none":
        return "the policy has a memory"
    if "device" not in algorithm.learners:
        return f"{name} has no version whose gradient steps are a CUDA graph"
    if getattr(settings.algorithm, "noisy", False):
        return "all seeds would have the same noise in noisy layers"
    if train.normalize_observations or train.reward_mode == "normalize":
        return "running statistics of observations and rewards are not kept for each seed"
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
    return None
