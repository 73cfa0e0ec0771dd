"""The two-method contract of a user's module, and the errors for modules that violate it."""

import pytest
import torch
from gymnasium import spaces
from torch import distributions as td
from torch import nn

from hurtle.errors import HurtleError
from hurtle.policies import distributions as ours
from hurtle.policies.build import PolicyConfig, build_policy
from hurtle.policies.contract import TorchPolicy, checked_policy, evaluate, per_row

VECTOR = spaces.Box(-1.0, 1.0, (3,))
CONFIG = PolicyConfig()


class Net(nn.Module):
    """A module whose distribution and value are made by given functions of 6 features."""

    def __init__(self, distribution=lambda x: td.Categorical(logits=x[:, :2]), value=lambda x: x[:, 0]):
        super().__init__()
        self.body, self.distribution, self.value = nn.Linear(3, 6), distribution, value

    def encode(self, obs):
        return self.body(obs)

    def decode(self, features):
        return self.distribution(features), self.value(features)


def build(net, action_space=None, **options):
    config = PolicyConfig(**options) if options else CONFIG
    return build_policy(config, VECTOR, action_space or spaces.Discrete(2), module=net)


def test_any_module_with_the_two_methods_is_a_policy():
    assert isinstance(Net(), TorchPolicy)
    assert not isinstance(nn.Linear(3, 2), TorchPolicy)


def test_a_module_without_the_methods_is_refused_by_what_it_lacks():
    with pytest.raises(HurtleError, match=r"encode\(obs\) -> features .* Linear has no encode and no decode\."):
        checked_policy(nn.Linear(3, 2))
    with pytest.raises(HurtleError, match=r"Bare is not a torch.nn.Module"):
        checked_policy(type("Bare", (), {"encode": None, "decode": None})())
    with pytest.raises(HurtleError, match=r"Linear has no encode and no decode\."):
        build(nn.Linear(3, 2))


def test_other_libraries_get_torchs_distribution_and_a_column_of_values():
    obs = torch.randn(5, 3)
    for net in (Net(), Net(value=lambda x: x[:, :1])):
        distribution, value = evaluate(net, obs)
        assert isinstance(distribution, td.Categorical)
        assert value.shape == (5, 1)
        assert torch.equal(value.squeeze(1), net.encode(obs)[:, 0])
    with pytest.raises(HurtleError, match=r"Net.decode must return .* is a Tensor.*Categorical\(logits=logits\)"):
        evaluate(Net(lambda x: x), obs)


def test_the_parts_of_an_action_are_summed():
    assert per_row(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert per_row(torch.ones(2, 3, 4)).tolist() == [12.0, 12.0]


@pytest.mark.parametrize("column", [True, False])
def test_a_users_module_becomes_a_policy(column):
    net = Net(value=(lambda x: x[:, :1]) if column else (lambda x: x[:, 0]))
    policy = build(net)
    assert policy.network is net
    obs = torch.randn(5, 3)
    distribution, value, state = policy(obs)
    assert state == ()
    assert type(distribution) is ours.Categorical
    assert torch.equal(value, net.encode(obs)[:, 0])
    assert policy.num_uniforms == 1
    assert {id(p) for p in policy.parameters()} == {id(p) for p in net.parameters()}


BOX = spaces.Box(-2.0, 2.0, (2,))
KINDS = {
    "gaussian": (lambda x: td.Normal(x[:, :2], x[:, 2:4].exp()), BOX, 4, "gaussian"),
    "independent": (lambda x: td.Independent(td.Normal(x[:, :2], 1.0), 1), BOX, 4, "gaussian"),
    "squashed": (lambda x: ours.SquashedGaussian(x[:, :2], x[:, 2:4]), BOX, 4, "squashed_gaussian"),
    "beta": (lambda x: ours.Beta(1 + x[:, :2].exp(), 1 + x[:, 2:4].exp()), BOX, 96, "beta"),
    "gamma": (lambda x: td.Gamma(x[:, :2].exp(), 1.0), BOX, 0, "gaussian"),
    "multi": (lambda x: ours.MultiCategorical(x[:, :5], (3, 2)), spaces.MultiDiscrete([3, 2]), 2, "multi_categorical"),
    "bits": (lambda x: td.Bernoulli(logits=x[:, :3]), spaces.MultiBinary(3), 3, "multi_categorical"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_users_distribution_decides_what_raw_actions_mean(name):
    make, space, num_uniforms, kind = KINDS[name]
    policy = build(Net(make), space)
    assert policy.head.kind == kind
    assert policy.num_uniforms == num_uniforms
    distribution, _, _ = policy(torch.randn(4, 3))
    raw = distribution.sample(torch.rand(4, num_uniforms)).detach()
    assert raw.shape == (4, *policy.head.action_shape)
    for action in policy.head.env_actions(raw.numpy()):
        assert space.contains(action)


class Bad(Net):
    def encode(self, obs):
        return self.answer(obs)


def bad_encode(answer):
    net = Bad()
    net.answer = answer
    return net


class OnlyDistribution(Net):
    def decode(self, features):
        return self.distribution(features)


WRONG = {
    "features as a tuple": (bad_encode(lambda obs: (obs, obs)), None, r"Bad.encode must return features .* got a tuple of 2"),
    "features without batch": (bad_encode(lambda obs: obs.mean(0)), None, r"here \[2, ...\]; got a tensor \[3\] of float32"),
    "an exception": (
        bad_encode(lambda obs: obs @ obs),
        None,
        r"Bad.encode failed on a tensor \[2, 3\] of float32: RuntimeError: mat1",
    ),
    "no value": (
        OnlyDistribution(),
        None,
        r"OnlyDistribution.decode must return a tuple \(distribution, value\); got a Categorical",
    ),
    "logits": (
        Net(lambda x: x),
        None,
        r"the first is a tensor \[2, 6\] of float32, not a distribution .*Categorical\(logits=logits\)",
    ),
    "values of all": (
        Net(value=lambda x: x),
        None,
        r"must return values \[batch\] or \[batch, 1\], here \[2\]; got a tensor \[2, 6\]",
    ),
    "one value": (Net(value=lambda x: x.mean()), None, r"here \[2\]; got a tensor \[\] of float32"),
    "float value": (Net(value=lambda x: 0.0), None, r"here \[2\]; got a float"),
    "too many logits": (
        Net(),
        spaces.Discrete(3),
        r"Discrete\(3\) needs a distribution over 3 logits; got a Categorical over 2 actions",
    ),
    "nvec": (Net(KINDS["multi"][0]), spaces.MultiDiscrete([2, 3]), r"nvec=\(2, 3\); got a MultiCategorical with nvec=\(3, 2\)"),
    "discrete for a box": (
        Net(),
        BOX,
        r"Box\(-2.0, 2.0, \(2,\), float32\) needs .* 2 continuous numbers; got a Categorical over 2",
    ),
    "box for discrete": (
        Net(KINDS["gaussian"][0]),
        spaces.Discrete(2),
        r"needs .* 2 logits; got a Gaussian over actions of shape \(2,\)",
    ),
    "dimensions": (
        Net(lambda x: td.Normal(x, 1.0)),
        BOX,
        r"needs .* 2 continuous numbers; got a Gaussian over actions of shape \(6,\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_the_contract_is_named_when_the_policy_is_built(name):
    net, space, message = WRONG[name]
    with pytest.raises(HurtleError, match=message):
        build(net, space)


def test_a_distribution_without_an_entropy_is_refused():
    def squashed(x):
        return td.TransformedDistribution(td.Normal(x[:, :2], 1.0), td.TanhTransform())

    with pytest.raises(HurtleError, match=r"no entropy for TransformedDistribution.*SquashedGaussian\(mean, log_std\)"):
        build(Net(squashed), BOX)


def test_the_trial_leaves_no_trace():
    net = Net()
    net.body = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    build(net, recurrent="gru")
    assert net.training
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("recurrent", ["lstm", "gru", "mingru"])
def test_a_memory_takes_its_width_from_the_users_features(recurrent):
    net = Net()
    policy = build(net, recurrent=recurrent)
    assert policy.memory.size == 6
    obs, starts = torch.randn(7, 4, 3), torch.zeros(7, 4, dtype=torch.bool)
    starts[3, 1] = True
    distribution, value, last = policy.forward_sequence(obs, policy.initial_state(4), starts)
    state, values, log_probs = policy.initial_state(4), [], []
    for t in range(7):
        step, value_t, state = policy(obs[t], state, starts=starts[t])
        values.append(value_t)
        log_probs.append(step.log_probs)
    torch.testing.assert_close(value, torch.cat(values), atol=1e-5, rtol=0)
    torch.testing.assert_close(distribution.log_probs, torch.cat(log_probs), atol=1e-5, rtol=0)
    torch.testing.assert_close(last, state, atol=1e-5, rtol=0)
