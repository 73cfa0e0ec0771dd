"""The two-method contract and what is made of its distributions."""

import pytest
import torch
from gymnasium.spaces import Box, Discrete
from integration_policies import Continuous
from integration_policies import Discrete as DiscretePolicy
from torch import nn

from hurtle.errors import HurtleError
from hurtle.integrations.cleanrl import CleanRLAgent
from hurtle.integrations.torch_policy import TorchPolicy, checked_policy, evaluate, per_row

VECTOR = Box(-1.0, 1.0, (3,))


def test_any_module_with_the_two_methods_is_a_policy():
    assert isinstance(DiscretePolicy(VECTOR, Discrete(2)), TorchPolicy)
    assert not isinstance(nn.Linear(3, 2), TorchPolicy)


def test_a_module_without_the_methods_is_refused_by_what_it_lacks():
    with pytest.raises(HurtleError, match=r"encode\(obs\) -> features .* Linear has no encode and no decode\."):
        checked_policy(nn.Linear(3, 2))
    with pytest.raises(HurtleError, match=r"Bare is no torch.nn.Module"):
        checked_policy(type("Bare", (), {"encode": None, "decode": None})())


def test_logits_in_place_of_a_distribution_are_refused():
    policy = DiscretePolicy(VECTOR, Discrete(2))
    policy.decode = lambda features: (features, features[:, 0])
    with pytest.raises(HurtleError, match=r"Discrete.decode must return .* is a Tensor.*Categorical\(logits=logits\)"):
        evaluate(policy, torch.zeros(2, 3))


def test_values_come_as_one_column_whatever_their_shape():
    obs = torch.randn(5, 3)
    for policy in (DiscretePolicy(VECTOR, Discrete(2)), Continuous(VECTOR, Box(-1, 1, (2,)))):
        _, value = evaluate(policy, obs)
        assert value.shape == (5, 1)
        assert torch.equal(value.squeeze(1), policy.decode(policy.encode(obs))[1].flatten())


def test_the_parts_of_an_action_are_summed():
    assert per_row(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert per_row(torch.ones(2, 3, 4)).tolist() == [12.0, 12.0]


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
