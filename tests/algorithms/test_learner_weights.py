"""What learners hand to collectors: all parameters in order, the version, and the policy's buffers."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from made_rollouts import made

from hurtle.algorithms.a2c import A2C
from hurtle.algorithms.a2c_config import A2CConfig
from hurtle.algorithms.a2c_device import DeviceA2C
from hurtle.algorithms.a2c_native import NativeA2C
from hurtle.algorithms.impala import IMPALA
from hurtle.algorithms.impala_config import IMPALAConfig
from hurtle.algorithms.impala_device import DeviceIMPALA
from hurtle.algorithms.impala_native import NativeIMPALA
from hurtle.algorithms.ppo import PPO
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.algorithms.ppo_device import DevicePPO
from hurtle.algorithms.ppo_native import NativePPO
from hurtle.contracts import Weights
from hurtle.policies.build import PolicyConfig, build_policy

LEARNERS = {
    "ppo": (PPO, PPOConfig(minibatch_size=48)),
    "native ppo": (NativePPO, PPOConfig(minibatch_size=48)),
    "device ppo": (DevicePPO, PPOConfig(minibatch_size=48)),
    "a2c": (A2C, A2CConfig()),
    "native a2c": (NativeA2C, A2CConfig()),
    "device a2c": (DeviceA2C, A2CConfig()),
    "impala": (IMPALA, IMPALAConfig()),
    "native impala": (NativeIMPALA, IMPALAConfig()),
    "device impala": (DeviceIMPALA, IMPALAConfig()),
}


def make_policy(normalize=True):
    space = spaces.Box(-10, 10, (7,), np.float32)
    return build_policy(PolicyConfig(hidden_sizes=(8,)), space, spaces.Discrete(3), normalize_observations=normalize)


@pytest.mark.parametrize("case", LEARNERS)
def test_weights_are_the_policys_after_every_update(case):
    make, config = LEARNERS[case]
    policy = make_policy()
    learner, rollout, before = make(policy, config), made(policy, steps=8, rows=12), Weights.of(policy).flat
    for updates in range(3):
        weights = learner.weights()
        assert (weights.version, weights.policy) == (updates, policy)
        assert torch.equal(weights.flat, Weights.of(policy).flat)
        assert torch.equal(weights.flat, before) is (updates == 0)
        assert len(weights.buffers) == len(list(policy.buffers())) > 0
        other = make_policy()
        Weights(weights.flat.clone(), buffers=weights.buffers).copy_to(other)
        for (name, value), (_, found) in zip(policy.state_dict().items(), other.state_dict().items(), strict=True):
            assert torch.equal(found, value), name
        learner.update(rollout)
    learner.close()


@pytest.mark.parametrize("case", LEARNERS)
def test_weights_that_a_user_changes_are_handed_on(case):
    make, config = LEARNERS[case]
    policy = make_policy()
    learner = make(policy, config)
    with torch.no_grad():
        policy.network.critic.bias.fill_(7.0)
    assert torch.equal(learner.weights().flat, Weights.of(policy).flat)
    learner.close()


@pytest.mark.parametrize("case", ["ppo", "device ppo", "a2c", "device impala"])
def test_frozen_parameters_are_handed_on_with_the_others(case):
    make, config = LEARNERS[case]
    policy = make_policy()
    policy.network.actor.weight.requires_grad_(False)
    learner = make(policy, config)
    learner.update(made(policy, steps=8, rows=12))
    other = make_policy()
    Weights(learner.weights().flat).copy_to(other)
    for (name, value), found in zip(policy.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(found, value), name


@pytest.mark.parametrize("case", LEARNERS)
def test_the_version_is_saved(case):
    make, config = LEARNERS[case]
    policy, other = make_policy(), make_policy()
    learner, again = make(policy, config), make(other, config)
    learner.update(made(policy, steps=8, rows=12))
    again.load_state_dict(learner.state_dict())
    assert again.weights().version == 1
    learner.close()
    again.close()
