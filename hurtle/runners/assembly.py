"""Builds the parts of a run from its settings: device, envs, policy, gear, rollout. Knows nothing of the loop that uses them.

settings → vector env → policy for its spaces → collector and learner → rollout
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from hurtle.algorithms.algorithm import find_algorithm
from hurtle.collect.pool_collector import double_buffered_batch
from hurtle.collect.rewards import RewardRule
from hurtle.contracts import Collector, Experience, Learner
from hurtle.envs.registry import EnvLike, make, resolve
from hurtle.errors import HurtleError
from hurtle.kernels.ranks import ALONE, Ranks
from hurtle.native.batch_arrays import check_fits
from hurtle.native.cuda_support import import_cuda
from hurtle.native.env import Env
from hurtle.native.rng import stream_state
from hurtle.policies.build import build_policy
from hurtle.policies.policy import Policy
from hurtle.policies.saved_spaces import layout_to_dict, space_to_dict
from hurtle.policies.torch_device import find_device
from hurtle.runners.actors import Actors, actors_on_cluster, local_or_actors
from hurtle.runners.gears import Gear, Request, choose_gear
from hurtle.runners.ray_host import Recipe
from hurtle.runners.settings import Settings, TrainConfig
from hurtle.runners.shares import Share
from hurtle.tracking.timing import Timer
from hurtle.vector.factory import make_vec

PLAIN_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
RUN_STREAM = 3


@dataclass(frozen=True)
class Parts:
    """Everything a training loop connects."""

    policy: Policy
    gear: Gear
    rollout: Experience
    spaces: dict[str, Any]  # as stored in a checkpoint
    timer: Timer
    owns_envs: bool  # users close vectors that they made
    runner: str = ""  # who collects, for the user; empty where there was nothing to choose

    @property
    def device(self) -> torch.device:
        """Where the policy is trained."""
        return next(self.policy.parameters()).device

    @property
    def collector(self) -> Collector:
        """The collector, which fills rollouts."""
        return self.gear.collector

    @property
    def learner(self) -> Learner:
        """The learner, which trains on them."""
        return self.gear.learner

    def close(self) -> None:
        """Close the learner, the collector, and the envs unless they are the user's."""
        self.gear.close(envs=self.owns_envs)


Module = nn.Module | type[nn.Module] | None


def assemble(
    settings: Settings, env: EnvLike | gymnasium.vector.VectorEnv, module: Module = None, ranks: Ranks = ALONE
) -> Parts:
    """Build all parts of a run.

    Args:
        settings: The settings of the run.
        env: The env to train on; a vector env is used as is.
        module: The user's own policy module or class, or None.
        ranks: The learners that train together; this one's envs have the seeds after those of the ranks before it.

    Raises:
        HurtleError: Settings conflict with each other, the env or the machine.
    """
    train = settings.train
    device = find_device(train.device)
    if ranks.several:
        check_several(train, env)
        device = ranks.device_of(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        train = replace(train, runner="local")
        settings = replace(settings, train=train)
    if train.precision != "float32" and device.type != "cuda":
        raise HurtleError(f"precision={train.precision!r} is for GPUs; on {device.type} use float32.")
    seed = run_seed(train.seed)
    if device.type == "cuda":
        import_cuda()  # needed by the advantage kernels: fail now, not after the first rollout
    own_actions: spaces.Space | None = None
    if isinstance(env, gymnasium.vector.VectorEnv):
        if train.curriculum and train.curriculum.keys() != (drawn := getattr(env, "drawn", {})).keys():
            raise HurtleError(
                f"The curriculum is for {', '.join(train.curriculum)}, and your vector draws {', '.join(drawn) or 'nothing'}: "
                f"name the env instead, or make the vector with hurtle.make_vec(…, drawn={tuple(train.curriculum)})."
            )
        if train.runner == "ray":
            raise HurtleError(
                "A vector of your own is in this process, and runner='ray' collects elsewhere: name the env instead."
            )
        if train.runner == "async" and (train.num_actors or 1) > 1:
            raise HurtleError(f"A vector of your own belongs to one actor: leave out num_actors={train.num_actors}.")
        reason = "the vector is your own"
        actors = Actors([env], train.allowed_lag if train.runner == "async" else "", "" if train.runner == "local" else reason)
        if (layout := getattr(env, "layout", None)) is not None and not layout.is_plain:
            own_actions = row_spaces(env)[1]
    elif train.runner == "ray":
        make_elsewhere = partial(_make_elsewhere, train, seed)
        actors = actors_on_cluster(
            train, Recipe(env, partial(structured_actions, parameters=train.env_parameters), make_elsewhere)
        )
        own_actions = actors.vecs[0].own_actions
    else:
        own_actions = structured_actions(env, train.env_parameters)
        first_seed = seed + ranks.rank * train.num_envs
        actors = local_or_actors(train, partial(_make_share, train, env, first_seed, device, own_actions is not None))
    owns_envs = not isinstance(env, gymnasium.vector.VectorEnv)
    try:
        return _join(settings, actors, module, own_actions, seed, device, owns_envs, ranks)
    except BaseException:
        if owns_envs:
            actors.close()
        raise


def _make_elsewhere(train: TrainConfig, seed: int, env: EnvLike, emulate: bool, share: Share) -> Any:
    """The vector of a collector on a cluster; called there."""
    return _make_share(train, env, seed, torch.device("cpu"), emulate, share)


def _make_share(train: TrainConfig, env: EnvLike, seed: int, device: torch.device, emulate: bool, share: Share) -> Any:
    """The vector of a run's envs, or of an actor's."""
    on_device = train.runner not in ("async", "ray") and _runs_on(device, train, env)
    batch_size = share.pool_batch_size
    if batch_size is None and share.num_envs == train.num_envs and not train.curriculum:
        batch_size = double_buffered_batch(share.num_envs, share.num_workers, share.backend, str(device))
    return make_vec(
        env,
        share.num_envs,
        backend=share.backend,
        num_workers=share.num_workers,
        batch_size=batch_size,
        seed=seed + share.first_env,
        emulate=emulate,
        step_timeout=train.step_timeout,
        restart_workers=train.restart_workers,
        device=str(device) if on_device else "cpu",
        unsafe=train.unsafe,
        drawn=tuple(train.curriculum),
        **train.env_parameters,
    )


def _runs_on(device: torch.device, train: TrainConfig, env: EnvLike) -> bool:
    """Whether the envs run on the GPU: native ones do, unless a setting requires the CPU."""
    if device.type != "cuda" or train.gear not in ("auto", "device") or train.backend not in ("auto", "native"):
        return False
    return train.pool_batch_size is None and isinstance(resolve(env, train.env_parameters), Env)


def _join(
    settings: Settings,
    actors: Actors,
    module: Module,
    own_actions: spaces.Space | None,
    seed: int,
    device: torch.device,
    owns_envs: bool,
    ranks: Ranks,
) -> Parts:
    train, config, algorithm = settings.train, settings.algorithm, find_algorithm(settings.train.algorithm)
    vec = actors.vecs[0]
    observation_space, action_space = row_spaces(vec)
    num_envs = sum(int(each.num_envs) for each in actors.vecs)
    num_rows = num_envs * int(getattr(vec, "num_agents", 1))
    policy = build_policy(
        settings.policy,
        observation_space,
        action_space,
        layout=vec.layout if own_actions is not None else None,
        normalize_observations=train.normalize_observations,
        observation_clip=train.observation_clip,
        module=module,
        seed=train.seed,
        make_network=algorithm.network_maker(config),
    ).to(device)
    config.check(num_rows, policy.is_recurrent)
    row = math.prod(observation_space.shape or ()) * np.dtype(observation_space.dtype).itemsize
    check_fits(f"A rollout of num_envs={num_envs} × num_steps={config.num_steps}", config.num_steps * num_rows * row)
    timer = Timer()
    rewards = RewardRule(train.reward_mode, num_rows, config.gamma, train.reward_clip, ranks)
    request = Request(train, algorithm, config, actors.vecs, policy, rewards, seed, timer, actors.lag, ranks, actors.squad)
    gear = choose_gear(request)
    if ranks.several and not gear.learner.rank_state:
        gear.close(envs=owns_envs)
        raise HurtleError(
            f"{train.algorithm} trains with one learner only, since it does not average gradients: set num_learners=1."
        )
    rollout = gear.collector.new_rollout(config.num_steps)
    described = {**describe_spaces(vec, own_actions), "masked": gear.collector.has_masks}
    return Parts(policy, gear, rollout, described, timer, owns_envs, actors.described)


def check_several(train: TrainConfig, env: Any) -> None:
    """Refuse what several learners cannot share.

    Raises:
        HurtleError: Names the setting.
    """
    several = f"num_learners={train.num_learners}"
    if isinstance(env, gymnasium.vector.VectorEnv):
        raise HurtleError(f"{several}: a vector of your own belongs to one process; name the env, or pass a callable.")
    if train.curriculum:
        raise HurtleError(
            f"{several}: a curriculum adapts to the episodes of one learner; leave it out, or set num_learners=1."
        )
    if why := find_algorithm(train.algorithm).why_alone:
        raise HurtleError(f"{train.algorithm} trains with one learner only, since {why}: set num_learners=1.")
    if train.runner in ("async", "ray"):
        raise HurtleError(f"{several}: learners collect in turn with learning; set runner='local' instead of {train.runner!r}.")


def row_spaces(vec: Any) -> tuple[spaces.Space, spaces.Space]:
    """The spaces of one row, that is, of one agent."""
    observation = getattr(vec, "agent_observation_space", vec.single_observation_space)
    return observation, getattr(vec, "agent_action_space", vec.single_action_space)


def describe_spaces(vec: Any, own_actions: spaces.Space | None) -> dict[str, Any]:
    """The spaces as stored in a checkpoint: a row's, and the layout of the env's own spaces if it is emulated."""
    observation, action = row_spaces(vec)
    structure: dict[str, Any] | None = None
    if own_actions is not None:
        structure = {"observation": layout_to_dict(vec.layout), "action": space_to_dict(own_actions)}
    return {"observation": space_to_dict(observation), "action": space_to_dict(action), "structure": structure}


def run_seed(seed: int) -> int:
    """The base seed of a run's envs: a hash of the run's seed, so that runs 0 … 4 share no env seeds."""
    return stream_state(seed, RUN_STREAM) >> 34  # 30 bits; evaluation seeds have the next higher bit set


def structured_actions(env: EnvLike, parameters: dict[str, Any]) -> spaces.Space | None:
    """The env's own action space if it has structured spaces and must be emulated, else None."""
    if isinstance(resolve(env, parameters), Env):
        return None
    made = make(env, **parameters)
    try:
        if callable(made.observation_space):  # multi-agent
            agent = made.possible_agents[0]
            observation, action = made.observation_space(agent), made.action_space(agent)
        else:
            observation, action = made.observation_space, made.action_space
    finally:
        made.close()
    if hasattr(made, "action_layout") and not made.layout.is_plain:  # already emulated by the user
        return made.action_layout.space
    if isinstance(observation, PLAIN_SPACES) and isinstance(action, PLAIN_SPACES):
        return None
    return action
