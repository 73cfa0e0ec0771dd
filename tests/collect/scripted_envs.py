"""Envs whose observation encodes seed, episode and step; and policies to act in them."""

import sys
import time

import cloudpickle
import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from hurtle.collect.general_collector import GeneralCollector
from hurtle.collect.inference import Actor
from hurtle.collect.pool_collector import PoolCollector
from hurtle.collect.postprocess import Postprocess
from hurtle.collect.rewards import RewardRule
from hurtle.native import Box, Discrete, Env, float32, int32
from hurtle.policies.build import PolicyConfig, build_policy

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that workers need not import torch, which takes seconds
KINDS = ("terminated", "truncated", "both")


class Script(gymnasium.Env):
    """Episode e of seed s has 2 + (s + 2e) % 5 steps, and ends as KINDS[(s + e) % 3] says.

    The reward encodes the action and its step. `seconds` and `slow` (seed -> seconds) are the time a step takes; `spoil` is
    (what, seed, step of the env's life, value): one number to corrupt.
    """

    observation_space = spaces.Box(-100, 100, (3,), np.float64)
    action_space = spaces.Discrete(3)

    def __init__(self, seconds=0.0, slow=None, spoil=None, masks=False):
        self.seconds, self.slow, self.spoil, self.masks = seconds, slow or {}, spoil, masks
        self.life = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.given, self.episode = seed, -1
        self.episode += 1
        self.now = 0
        return self.observed("observation"), self.told()

    def step(self, action):
        if self.seconds or self.slow:
            time.sleep(self.slow.get(self.given, self.seconds))
        self.now += 1
        self.life += 1
        over = self.now == 2 + (self.given + 2 * self.episode) % 5
        kind = KINDS[(self.given + self.episode) % 3] if over else None
        reward = self.spoiled("reward", self.given + 0.1 * self.now + 0.01 * float(action))
        what = "final observation" if over else "observation"
        return self.observed(what), reward, kind in ("terminated", "both"), kind in ("truncated", "both"), self.told()

    def observed(self, what):
        obs = np.array([self.given, self.episode, self.now]) / 10
        obs[2] = self.spoiled(what, obs[2])
        return obs

    def spoiled(self, what, value):
        if self.spoil is not None and (what, self.given, self.life) == self.spoil[:3]:
            return self.spoil[3]
        return value

    def told(self):
        if not self.masks:
            return {}
        mask = np.ones(3, np.int8)
        mask[(self.given + self.now) % 3] = 0
        return {"action_mask": mask}


class Walk(Env):
    """A native random walk: left or right, ends two cells away, cut off after 5 steps; the start is random."""

    action_space = Discrete(3)
    observation_space = Box(-10, 10, (2,), float32)
    max_steps = 5

    class State:
        where: int32
        steps: int32

    def reset(self, state, rng):
        state.where = rng.integers(-1, 2)

    def step(self, state, action, rng):
        state.where += action - 1
        state.steps += 1
        return float32(state.where) + float32(0.1) * float32(action), state.where <= -3 or state.where >= 3

    def observe(self, state, obs):
        obs[0] = state.where
        obs[1] = state.steps


def sharp_policy(observation_space, action_space, recurrent="none", seed=0, normalize=False, **config):
    """A policy whose log-probs and values depend strongly on what it sees and remembers."""
    policy = build_policy(
        PolicyConfig(hidden_sizes=(16,), recurrent=recurrent, **config),
        observation_space,
        action_space,
        normalize_observations=normalize,
        seed=seed,
    )
    with torch.no_grad():
        for name, parameter in policy.network.named_parameters():
            if name == "actor.weight":
                parameter.mul_(100)
            elif name.startswith("critic."):
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
        if policy.memory is not None:
            for parameter in policy.memory.parameters():
                parameter.mul_(2)
    return policy


class Staged:
    """A collector and the stage that every learner runs first; everything else is delegated to the collector."""

    def __init__(self, collector, postprocess):
        self.collector, self.postprocess = collector, postprocess

    def collect(self, rollout):
        episodes = self.collector.collect(rollout)
        if episodes is not None:
            self.postprocess(rollout)
        return episodes

    def state_dict(self, with_envs=True):
        return {**self.collector.state_dict(with_envs), "postprocess": self.postprocess.state_dict()}

    def load_state_dict(self, saved):
        self.collector.load_state_dict(saved)
        self.postprocess.load_state_dict(saved["postprocess"])

    def __getattr__(self, name):
        return getattr(self.collector, name)


def collector_of(vec, policy, num_steps, mode="raw", seed=0, gamma=0.9, clip=10.0):
    """A collector for the vector, pool or not, and a rollout for it."""
    num_rows = vec.num_envs * getattr(vec, "num_agents", 1)
    kind = PoolCollector if getattr(vec, "batch_size", vec.num_envs) < vec.num_envs else GeneralCollector
    collector = kind(vec, Actor(policy, num_rows, seed), seed)
    stage = Postprocess(policy, gamma, 0.8, RewardRule(mode, num_rows, gamma, clip))
    return Staged(collector, stage), collector.new_rollout(num_steps)


def finals_of(rollout):
    """The final observations in a rollout, by step and row."""
    steps, rows, obs, _ = rollout.finals
    places = list(zip(steps.tolist(), rows.tolist(), strict=True))
    used = [k for k, (step, _) in enumerate(places) if step >= 0]
    assert len({places[k] for k in used}) == len(used)  # one for each truncation
    return {places[k]: obs[k].clone() for k in used}


def assert_finals_of_truncations(rollout):
    """Every truncated episode has its final observation, and nothing else has one."""
    cut = (rollout.truncated & ~rollout.terminated).nonzero().tolist()
    assert sorted(finals_of(rollout)) == sorted(map(tuple, cut))
