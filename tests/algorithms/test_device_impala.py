"""`DeviceIMPALA` and `DeviceA2C` on the CPU against the general and native learners: weights, metrics, saved states, NaN."""

import copy
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from made_rollouts import collected, made
from torch.nn.utils import parameters_to_vector

from hurtle.algorithms.a2c import A2C
from hurtle.algorithms.a2c_config import A2CConfig
from hurtle.algorithms.a2c_device import DeviceA2C
from hurtle.algorithms.a2c_native import NativeA2C
from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.impala import IMPALA
from hurtle.algorithms.impala_config import IMPALAConfig
from hurtle.algorithms.impala_device import DeviceIMPALA
from hurtle.algorithms.impala_native import NativeIMPALA
from hurtle.errors import NonFiniteError
from hurtle.policies.build import PolicyConfig, build_policy

STEPS, ROWS = 8, 11
OBS = spaces.Box(-10, 10, (7,), np.float32)
ACTIONS = {
    "choices": (OBS, spaces.Discrete(5), {}),
    "several choices": (OBS, spaces.MultiDiscrete([3, 4]), {}),
    "numbers": (OBS, spaces.Box(-1, 1, (2,), np.float32), {}),
    "gru": (OBS, spaces.Discrete(5), {"recurrent": "gru"}),
    "lstm": (OBS, spaces.Discrete(5), {"recurrent": "lstm"}),
    "grid": (spaces.Box(0, 1, (4, 4, 3), np.uint8), spaces.Discrete(3), {"policy": "grid_cnn"}),
}
ALGORITHMS = {
    "impala": (IMPALAConfig, IMPALA, NativeIMPALA, DeviceIMPALA),
    "a2c": (A2CConfig, A2C, NativeA2C, DeviceA2C),
}


def make_policy(kind="choices", seed=0):
    observations, actions, options = ACTIONS[kind]
    policy = build_policy(PolicyConfig(hidden_sizes=(16,), **options), observations, actions)
    torch.manual_seed(seed)
    for parameter in policy.parameters():  # away from the initial small outputs and zero biases
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return policy


def config_of(algorithm="impala", **settings):
    usual = {"optimizer": "rmsprop", "learning_rate": 1e-3, "anneal_learning_rate": True}
    if algorithm == "impala":
        usual |= {"rho_clip": 0.9, "c_clip": 0.8, "trace_lambda": 0.95}
    return ALGORITHMS[algorithm][0](**{**usual, **settings})


def flat(policy):
    return parameters_to_vector(policy.parameters()).detach().double()


def optimizer_steps(learner):
    states = learner.state_dict()["optimizer"]["parts"][0]["state"]
    return int(states[0]["step"]) if states else 0


@pytest.fixture
def in_order(monkeypatch):
    """Minibatches are the same in all gears: the rows in their order."""
    monkeypatch.setattr("hurtle.algorithms.impala.torch.randperm", lambda count, generator: torch.arange(count))
    monkeypatch.setattr(DeviceIMPALA, "begin_epoch", lambda self: None)


def compare(policy, config, algorithm="impala", natively=True, **how):
    """Two updates of the device's learner, and of the two others: parameters, their changes, and metrics."""
    _, general, native, device = ALGORITHMS[algorithm]
    before = copy.deepcopy(policy)
    learners = [make(copy.deepcopy(policy), config, LearnerSetup(3)) for make in (device, general, native)[: 2 + natively]]
    for k in range(2):
        found, *expected = [learner.update(collected(before, STEPS, ROWS, seed=k, **how), 0.3 * k) for learner in learners]
        for metrics in expected:
            assert found.keys() == metrics.keys()
            assert found == pytest.approx(metrics, rel=1e-3, abs=2e-5)
    own, *others = [flat(learner.policy) for learner in learners]
    for other in others:
        change = (other - flat(before)).norm()
        assert change > 1e-3 * flat(before).norm()
        assert (own - other).norm() <= 2e-4 * change
    for learner in learners:
        learner.close()


IMPALA_CASES = {
    "one minibatch": ("choices", {}, {}),
    "several minibatches": ("choices", {"num_minibatches": 3}, {"has_masks": True}),
    "normalized, absent agents": ("choices", {"normalize_advantages": True}, {"invalid": 0.3}),
    "several choices": ("several choices", {"num_minibatches": 2}, {}),
    "numbers": ("numbers", {"optimizer": "adam"}, {}),
    "gru": ("gru", {"num_minibatches": 3}, {"invalid": 0.3, "has_masks": True}),
    "lstm": ("lstm", {}, {}),
    "grid": ("grid", {"num_minibatches": 2}, {}),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case == "lstm")) for case in IMPALA_CASES])
def test_impala_learns_the_same_in_all_gears(case, in_order):
    kind, settings, how = IMPALA_CASES[case]
    compare(make_policy(kind), config_of(**settings), **how)


@pytest.mark.parametrize("kind", ["choices", "numbers", "gru"])
@pytest.mark.parametrize("invalid", [0.0, 0.3])
def test_a2c_learns_the_same_in_all_gears(kind, invalid):
    compare(make_policy(kind), config_of("a2c"), "a2c", invalid=invalid)


def test_each_minibatch_is_judged_by_the_policy_as_it_is_then(in_order):
    """With one update of so large steps that the ratios of later minibatches are far from those of the first."""
    policy = make_policy()
    config = config_of(num_minibatches=4, learning_rate=0.1)
    learner, rollout = DeviceIMPALA(policy, config), made(policy, STEPS, ROWS, noise=0.0)
    before = copy.deepcopy(policy)
    metrics = learner.update(rollout)
    assert metrics["approx_kl"] > 0.01
    with torch.no_grad():
        _, values, _ = before.forward_sequence(rollout.inputs, rollout.initial_state, rollout.starts)
    changes = (learner._values - values.view(STEPS, ROWS)).abs().amax(0)
    assert changes[:3].max() < 1e-5  # the first minibatch: 11 rows in four parts
    assert changes[3:].min() > 1e-3


def test_every_update_uses_every_row_once_in_another_order():
    policy, seen = make_policy(), []
    learner = DeviceIMPALA(policy, config_of(num_minibatches=3), LearnerSetup(5))
    draw = learner.draw
    learner.draw = lambda k: seen.append(draw(k)[0].clone()) or draw(k)
    for _ in range(2):
        learner.update(made(policy, STEPS, ROWS))
    assert [len(part) for part in seen] == [4, 4, 3] * 2
    one, other = torch.cat(seen[:3]), torch.cat(seen[3:])
    assert torch.equal(one.sort().values, torch.arange(ROWS))
    assert torch.equal(other.sort().values, torch.arange(ROWS))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_one_saves_the_others_go_on_with(algorithm):
    _, *makers = ALGORITHMS[algorithm]
    config, policy = config_of(algorithm), make_policy()
    ended = []
    for first, then in zip(makers, [*makers[1:], makers[0]], strict=True):
        learner = first(copy.deepcopy(policy), config)
        learner.update(collected(policy, STEPS, ROWS, seed=0))
        other = then(make_policy(seed=9), config)
        other.policy.load_state_dict(learner.policy.state_dict())
        other.load_state_dict(copy.deepcopy(learner.state_dict()))
        other.update(collected(policy, STEPS, ROWS, seed=1))
        assert other.weights().version == 2
        ended.append(flat(other.policy))
        for one in (learner, other):
            one.close()
    for other in ended[1:]:
        torch.testing.assert_close(ended[0], other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "field"),
    [("impala", "rewards"), ("impala", "obs"), ("impala", "log_probs"), ("a2c", "rewards"), ("a2c", "obs")],
)
def test_bad_numbers_are_refused_and_leave_the_weights(algorithm, field):
    policy = make_policy()
    learner = ALGORITHMS[algorithm][-1](copy.deepcopy(policy), config_of(algorithm))
    rollout = made(policy, STEPS, ROWS)
    getattr(rollout, field)[3, 2] = torch.nan
    with pytest.raises(NonFiniteError, match=r"not finite.*checkpoint.*learning_rate"):
        learner.update(rollout)
    assert torch.equal(flat(learner.policy), flat(policy))
    assert optimizer_steps(learner) == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", ["choices", "gru"])
def test_a_rollout_without_a_valid_step_teaches_nothing(kind, algorithm):
    policy = make_policy(kind)
    learner = ALGORITHMS[algorithm][-1](policy, config_of(algorithm))
    before = flat(policy)
    metrics = learner.update(made(policy, STEPS, ROWS, invalid=1.0))
    assert math.isnan(metrics["policy_loss"])
    assert torch.equal(flat(policy), before)
    assert optimizer_steps(learner) == 0
