"""One vector for many seeds: rollouts, episodes and saved states of each seed are those of a collector of its own."""

import numpy as np
import pytest
import torch

import hurtle
from hurtle.collect.general_collector import GeneralCollector
from hurtle.collect.inference import Actor
from hurtle.collect.seeds_actor import SeedsActor
from hurtle.collect.seeds_collector import SeedsCollector
from hurtle.contracts import Episodes
from hurtle.kernels.cuda_graphs import Graphs
from hurtle.policies.build import PolicyConfig, build_policy

BASES, SHARE, STEPS = (700, 20, 90_000), 2, 60
FIELDS = ("obs", "actions", "rewards", "terminated", "truncated", "starts", "valid")


def policies(vec):
    spaces = vec.agent_observation_space, vec.agent_action_space
    return [build_policy(PolicyConfig(hidden_sizes=(4,)), *spaces, seed=n) for n in range(len(BASES))]


def together(env):
    vec = hurtle.make_vec(env, SHARE * len(BASES))
    rows = vec.num_envs * vec.num_agents
    return SeedsCollector(vec, SeedsActor(policies(vec), rows, BASES, Graphs("cpu")), BASES, names=(5, 6, 7))


def alone(env):
    vecs = [hurtle.make_vec(env, SHARE) for _ in BASES]
    made = zip(vecs, policies(vecs[0]), BASES, strict=True)
    return [GeneralCollector(vec, Actor(policy, SHARE * vec.num_agents, seed), seed) for vec, policy, seed in made]


def assert_as_alone(collector, singles):
    rollout = collector.new_rollout(STEPS)
    collector.collect(rollout)
    ended = collector.take_episodes()
    for k, single in enumerate(singles):
        own, found = single.new_rollout(STEPS), ended.get(k, Episodes())
        expected = single.collect(own)
        for name in FIELDS:
            part = getattr(rollout, name).chunk(len(BASES), 1)[k]
            torch.testing.assert_close(part, getattr(own, name), atol=1e-5, rtol=1e-5, msg=name)
        assert found.count == expected.count
        np.testing.assert_allclose(found.returns, expected.returns)
        np.testing.assert_array_equal(found.lengths, expected.lengths)
        assert found.metrics.keys() == expected.metrics.keys()
        for name, values in expected.metrics.items():
            np.testing.assert_allclose(found.metrics[name], values)


@pytest.mark.parametrize("env", ["cartpole", "snake"])
def test_each_seed_collects_what_it_would_alone(env):
    """Also with several agents; and after states were exchanged in both directions."""
    collector, singles = together(env), alone(env)
    assert_as_alone(collector, singles)
    for _ in range(2):
        again, others = together(env), alone(env)
        for own, state, single in zip(others, collector.states(), singles, strict=True):
            own.load_state_dict(state)
            assert state.keys() == single.state_dict().keys()
        again.load_states([single.state_dict() for single in singles])
        collector, singles = again, others
        assert_as_alone(collector, singles)
    assert not collector.take_episodes()


def test_without_the_envs_new_episodes_have_the_seeds_of_a_single_run():
    collector, singles = together("cartpole"), alone("cartpole")
    assert_as_alone(collector, singles)
    again, others = together("cartpole"), alone("cartpole")
    again.load_states(collector.states(with_envs=False))
    for own, single in zip(others, singles, strict=True):
        own.load_state_dict(single.state_dict(with_envs=False))
    assert_as_alone(again, others)
