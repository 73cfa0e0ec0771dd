"""`DevicePQN` on the CPU against `PQN`: the same minibatches give the same weights, metrics and saved states."""

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from made_rollouts import made

from hurtle.algorithms.algorithm import LearnerSetup, find_algorithm
from hurtle.algorithms.pqn import PQN
from hurtle.algorithms.pqn_device import DevicePQN
from hurtle.policies.build import build_policy
from hurtle.policies.policy_config import PolicyConfig

STEPS, ROWS = 8, 12


def learners(recurrent="none", **settings):
    algorithm = find_algorithm("pqn")
    config = algorithm.config(num_epochs=2, minibatch_size=24, learning_rate=1e-3, shuffle=False, **settings)
    network = PolicyConfig(hidden_sizes=(16,), recurrent=recurrent, layer_norm=True)
    spaces_of = spaces.Box(-10, 10, (7,), np.float32), spaces.Discrete(5)
    policy = build_policy(network, *spaces_of, make_network=algorithm.network_maker(config), seed=1)
    return [make(copy.deepcopy(policy), config, LearnerSetup(3)) for make in (PQN, DevicePQN)]


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_updates_are_those_of_the_plain_learner(recurrent):
    plain, device = learners(recurrent)
    first = copy.deepcopy(plain.policy)
    for k in range(3):
        rollout = made(first, STEPS, ROWS, seed=k)
        found, expected = device.update(rollout, 0.25 * k), plain.update(rollout, 0.25 * k)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert plain.network.epsilon == device.network.epsilon
    before, weights, own = first.state_dict(), plain.policy.state_dict(), device.policy.state_dict()
    assert any(not torch.equal(before[name], weights[name]) for name in weights)
    for name, weight in weights.items():
        torch.testing.assert_close(own[name], weight, atol=1e-6, rtol=1e-5)


def test_either_continues_what_the_other_saved():
    plain, device = learners()
    for learner in (plain, device):
        learner.update(made(learner.policy, STEPS, ROWS, seed=0))
    others = learners()
    for source, target in zip((plain, device), reversed(others), strict=True):
        target.policy.load_state_dict(source.policy.state_dict())
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        for learner in (source, target):
            learner.update(made(learner.policy, STEPS, ROWS, seed=5))
        for name, weight in source.policy.state_dict().items():
            torch.testing.assert_close(target.policy.state_dict()[name], weight, atol=1e-6, rtol=1e-5)


def test_invalid_steps_change_nothing():
    """A rollout with junk in invalid steps, and a minibatch without any valid one."""
    results = []
    for junk in (0.0, 1e3):
        _, device = learners()
        rollout = made(device.policy, STEPS, ROWS, seed=2)
        rollout.all_valid = False
        rollout.valid[2:5] = False
        rollout.rewards[~rollout.valid] = junk
        rollout.inputs[~rollout.valid] = junk
        device.update(rollout)
        results.append(device.parameters.values.clone())
    assert torch.equal(*results)
