"""`CleanRLAgent`: what a CleanRL-style loop gets from a module with the two methods."""

import pytest
import torch
from gymnasium.spaces import Box, Discrete
from integration_policies import Continuous
from integration_policies import Discrete as DiscretePolicy

from hurtle.integrations.cleanrl import CleanRLAgent

VECTOR = Box(-1.0, 1.0, (3,))


@pytest.mark.parametrize("independent", [True, False])
def test_cleanrl_agent_gives_the_joint_log_probability_of_a_gaussian(independent):
    torch.manual_seed(0)
    policy = Continuous(VECTOR, Box(-1, 1, (2,)), independent)
    agent, obs = CleanRLAgent(policy), torch.randn(4, 3)
    action, log_prob, entropy, value = agent.get_action_and_value(obs)
    assert (action.shape, log_prob.shape, entropy.shape, value.shape) == ((4, 2), (4,), (4,), (4, 1))
    by_hand = (-0.5 * (action - policy.mean(obs)) ** 2 - 0.5 * torch.log(torch.tensor(2 * torch.pi))).sum(1)
    assert torch.allclose(log_prob, by_hand, atol=1e-6)
    again, repeated, _, _ = agent.get_action_and_value(obs, action)
    assert again is action
    assert torch.equal(repeated, log_prob)
    assert torch.equal(agent.get_value(obs), value)


def test_cleanrl_agent_samples_as_the_policy_says():
    torch.manual_seed(0)
    policy = DiscretePolicy(VECTOR, Discrete(2))
    with torch.no_grad():
        policy.actor.bias[1] = 2.0
    action, log_prob, _, _ = CleanRLAgent(policy).get_action_and_value(torch.zeros(4000, 3))
    assert action.float().mean().item() == pytest.approx(0.881, abs=0.02)  # sigmoid(2)
    assert log_prob[action == 1][0].exp().item() == pytest.approx(0.8808, abs=1e-3)


def test_the_wrapped_policy_is_trained_in_place():
    policy = DiscretePolicy(VECTOR, Discrete(2))
    agent = CleanRLAgent(policy)
    assert {id(p) for p in agent.parameters()} == {id(p) for p in policy.parameters()}
