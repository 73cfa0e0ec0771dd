"""Optimizers by name, each against its formula; the clipped norm; compiled and mixed-precision learners."""

import copy

import numpy as np
import pytest
import torch
from made_rollouts import ACTIONS, OBS, made, parameters, plain_policy
from torch import nn

from hurtle.algorithms.a2c import A2C
from hurtle.algorithms.a2c_config import A2CConfig
from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.ppo import PPO
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.errors import HurtleError, NonFiniteError, UnknownNameError
from hurtle.kernels.optimizers import Optimizers
from hurtle.policies.build import PolicyConfig, build_policy

GRADIENT = torch.tensor([1e-5, -2e-3, 3.0])


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def loss(self, gradient=GRADIENT):
        return (self.weight * gradient).sum()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_first_step_is_the_formula(weight_decay):
    rate, eps = 0.01, 1e-5
    g, l2 = GRADIENT.numpy(), GRADIENT.numpy() + weight_decay
    expected = {
        "adam": 1 - rate * l2 / (np.abs(l2) + eps),
        "adamw": (1 - rate * weight_decay) - rate * g / (np.abs(g) + eps),
        "rmsprop": 1 - rate * l2 / (0.1 * np.abs(l2) + eps),
    }
    for name, weights in expected.items():
        policy = Three()
        Optimizers(name, policy, rate, eps, weight_decay).step(policy.loss(), 1e9)
        np.testing.assert_allclose(policy.weight.detach(), weights, rtol=2e-6, err_msg=name)


def test_adams_epsilon_is_1e_5():
    """A gradient as small as epsilon moves a parameter by half the learning rate."""
    assert PPOConfig().adam_eps == A2CConfig().adam_eps == 1e-5
    policy = Three()
    Optimizers("adam", policy, 0.01, PPOConfig().adam_eps).step(policy.loss(), 1e9)
    assert float(1 - policy.weight[0].detach()) == pytest.approx(0.005, rel=1e-4)


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "muon"])
def test_loaded_moments_leave_a_run_its_own_settings(name):
    policy = plain_policy()
    saved = Optimizers(name, policy, 0.1, 1e-3, 0.5).state_dict()
    own = Optimizers(name, policy, 0.2, 1e-4, 0.25)
    own.load_state_dict(saved)
    for part in own.parts:
        for group in part.param_groups:
            assert (group["lr"], group["weight_decay"]) == (0.2, 0.25)
            assert isinstance(part, torch.optim.Muon) or group["eps"] == 1e-4


def test_the_global_norm_is_clipped():
    policy = plain_policy()
    optimizer = Optimizers("adam", policy, 0.0)

    def loss(slope):
        return slope * sum(parameter.sum() for parameter in policy.parameters())

    count = sum(parameter.numel() for parameter in policy.parameters())
    norm = optimizer.step(loss(100), max_grad_norm=0.5)
    assert float(norm) == pytest.approx(100 * count**0.5)
    clipped = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    assert float(clipped.norm()) == pytest.approx(0.5, rel=1e-4)
    assert float(clipped.max()) == pytest.approx(float(clipped.min()))  # all by the same factor
    small = optimizer.step(loss(1e-3), max_grad_norm=0.5)
    assert float(small) == pytest.approx(1e-3 * count**0.5)
    assert float(policy.network.actor.bias.grad[0]) == pytest.approx(1e-3)  # unchanged


def test_gradients_do_not_pile_up():
    policy = Three()
    optimizer = Optimizers("adam", policy, 0.01)
    norms = [float(optimizer.step(policy.loss(), 1e9)) for _ in range(3)]
    assert norms == [norms[0]] * 3


def test_the_learning_rate_reaches_every_part():
    policy = build_policy(PolicyConfig(hidden_sizes=(8, 8)), OBS, ACTIONS)
    optimizer = Optimizers("muon", policy, 0.01)
    assert len(optimizer.parts) == 2
    optimizer.set_learning_rate(0.0)
    before = parameters(policy)
    optimizer.step(sum((parameter**2).sum() for parameter in policy.parameters()), 1e9)
    assert all(torch.equal(parameter, before[name]) for name, parameter in parameters(policy).items())


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest():
    policy = build_policy(PolicyConfig(hidden_sizes=(8, 8), recurrent="gru"), OBS, ACTIONS)
    optimizer = Optimizers("muon", policy, 0.01)
    muon, adamw = optimizer.parts
    assert isinstance(muon, torch.optim.Muon)
    names = {id(parameter): name for name, parameter in policy.named_parameters()}
    by_muon = {names[id(parameter)] for parameter in muon.param_groups[0]["params"]}
    by_adamw = {names[id(parameter)] for parameter in adamw.param_groups[0]["params"]}
    assert by_muon | by_adamw == set(names.values())
    assert not by_muon & by_adamw
    assert {"network.actor.weight", "network.critic.weight"} <= by_adamw
    assert any("memory" in name for name in by_muon)
    assert not any(name.endswith("bias") for name in by_muon)


@pytest.mark.parametrize(
    ("recurrent", "optimizer"),
    [
        ("none", "rmsprop"),
        ("gru", "muon"),
        *(pytest.param("none", optimizer, marks=pytest.mark.slow) for optimizer in ("adam", "adamw")),
        *(pytest.param("gru", optimizer, marks=pytest.mark.slow) for optimizer in ("adam", "adamw", "rmsprop")),
        pytest.param("none", "muon", marks=pytest.mark.slow),
    ],
)
def test_every_optimizer_fits_the_critic(optimizer, recurrent):
    policy = build_policy(PolicyConfig(hidden_sizes=(16, 16), recurrent=recurrent), OBS, ACTIONS)
    rollout = made(policy, steps=8, rows=16)
    config = PPOConfig(optimizer=optimizer, learning_rate=3e-3, minibatch_size=32, clip_values=False, weight_decay=0.01)
    ppo = PPO(policy, config)
    losses = [ppo.update(rollout)["value_loss"] for _ in range(8)]
    assert losses[-1] < 0.95 * losses[0]  # random returns, which take long to memorize


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "muon"])
def test_saved_moments_go_on(optimizer):
    def learner():
        policy = build_policy(PolicyConfig(hidden_sizes=(8, 8)), OBS, ACTIONS)
        return policy, A2C(policy, A2CConfig(optimizer=optimizer))

    policy, a2c = learner()
    a2c.update(made(policy))
    saved = {name: value.clone() for name, value in policy.state_dict().items()}, copy.deepcopy(a2c.state_dict())
    other, again = learner()
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    rollout = made(policy, seed=1)
    again.update(rollout)
    a2c.update(rollout)
    assert all(torch.equal(parameter, parameters(other)[name]) for name, parameter in parameters(policy).items())


def test_errors_that_teach():
    policy = plain_policy()
    with pytest.raises(UnknownNameError, match="Did you mean adamw"):
        Optimizers("adamww", policy, 0.01)
    for parameter in policy.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(HurtleError, match="no parameters"):
        Optimizers("adam", policy, 0.01)
    saved = Optimizers("muon", build_policy(PolicyConfig(hidden_sizes=(8, 8)), OBS, ACTIONS), 0.01).state_dict()
    with pytest.raises(HurtleError, match="optimizer='muon'"):
        Optimizers("adam", plain_policy(), 0.01).load_state_dict(saved)


def test_frozen_parameters_stay():
    policy = plain_policy()
    policy.network.hidden.weight.requires_grad_(False)
    before = parameters(policy)
    PPO(policy, PPOConfig(minibatch_size=24)).update(made(policy))
    after = parameters(policy)
    assert torch.equal(after["network.hidden.weight"], before["network.hidden.weight"])
    assert not torch.equal(after["network.actor.weight"], before["network.actor.weight"])


def test_a_gradient_that_is_not_finite_changes_nothing():
    policy = Three()
    optimizer = Optimizers("adam", policy, 0.01)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(NonFiniteError, match="learning_rate"):
            optimizer.step(policy.loss(torch.tensor([1.0, bad, 1.0])), 0.5)
        assert policy.weight.tolist() == [1, 1, 1]
    optimizer.step(policy.loss(), 1e9)  # the moments are intact too
    assert policy.weight.isfinite().all()


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
@pytest.mark.parametrize("learner", ["ppo", "a2c"])
def test_mixed_precision_learns_nearly_the_same(recurrent, learner):
    found = []
    for precision in ("float32", "bf16"):
        policy = build_policy(PolicyConfig(hidden_sizes=(16,), recurrent=recurrent), OBS, ACTIONS)
        rollout = made(policy, steps=8, rows=16, noise=0.0)
        setup = LearnerSetup(precision=precision)
        if learner == "ppo":
            found.append(PPO(policy, PPOConfig(minibatch_size=128, num_epochs=1), setup).update(rollout))
        else:
            found.append(A2C(policy, A2CConfig(), setup).update(rollout))
        assert all(parameter.dtype == torch.float32 for parameter in policy.parameters())
    for name in ("value_loss", "entropy"):
        assert found[1][name] == pytest.approx(found[0][name], rel=0.02)
    assert found[1] != found[0]


@pytest.mark.slow
def test_a_compiled_learner_learns_the_same():
    found = []
    for compiled in (False, True):
        policy = build_policy(PolicyConfig(hidden_sizes=(16,)), OBS, ACTIONS)
        rollout = made(policy, steps=8, rows=16)
        PPO(policy, PPOConfig(minibatch_size=64, num_epochs=2), LearnerSetup(compiled=compiled)).update(rollout)
        found.append(parameters(policy))
    for name, parameter in found[0].items():
        torch.testing.assert_close(parameter, found[1][name], rtol=0, atol=1e-5)
