"""`DevicePPO` on the CPU against `PPO`: the same minibatches give the same weights; draws, early stops, saved states, NaN."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from made_rollouts import made
from torch.nn.utils import parameters_to_vector

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.ppo import PPO, segment_probabilities
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.algorithms.ppo_device import DevicePPO
from hurtle.errors import HurtleError, NonFiniteError
from hurtle.policies.build import PolicyConfig, build_policy

OBS = spaces.Box(-10, 10, (7,), np.float32)
ACTIONS = {
    "categorical": (spaces.Discrete(5), {}),
    "multi-categorical": (spaces.MultiDiscrete([3, 4, 2]), {}),
    "gaussian": (spaces.Box(-1, 1, (3,)), {}),
    "squashed gaussian": (spaces.Box(-1, 1, (2,)), {"distribution": "squashed_gaussian"}),
    "beta": (spaces.Box(-1, 1, (2,)), {"distribution": "beta"}),
    "lstm": (spaces.Discrete(5), {"recurrent": "lstm"}),
    "mingru": (spaces.Discrete(5), {"recurrent": "mingru"}),
    "shared": (spaces.Discrete(5), {"separate_networks": False, "activation": "relu"}),
}
STEPS, ROWS = 8, 12


def make_policy(kind="categorical", seed=0):
    space, config = ACTIONS[kind]
    policy = build_policy(PolicyConfig(hidden_sizes=(16,), **config), OBS, space)
    torch.manual_seed(seed)
    for parameter in policy.parameters():  # away from the initial small outputs and zero biases
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return policy


def config_of(**words):
    usual = {"num_epochs": 3, "minibatch_size": 24, "learning_rate": 1e-3, "shuffle": False}
    return PPOConfig(**{**usual, **words})


def pair(policy, config, seed=3):
    """The same policy for both learners."""
    own = copy.deepcopy(policy)
    setup = LearnerSetup(seed)
    return PPO(policy, config, setup), DevicePPO(own, config, setup)


def flat(policy):
    return parameters_to_vector(policy.parameters()).detach().double()


def assert_same_learning(before, expected, found):
    """Parameters match, and so do their changes, which are much smaller than the parameters."""
    for (name, p), q in zip(expected.named_parameters(), found.named_parameters(), strict=True):
        assert (q[1] - p).double().norm() <= 1e-6 * p.double().norm(), name
    change = (flat(expected) - flat(before)).norm()
    assert (flat(found) - flat(expected)).norm() <= 1e-4 * change
    assert change > 1e-3 * flat(before).norm()


def assert_same_metrics(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=2e-6, nan_ok=True), name


def optimizer_steps(learner):
    states = learner.state_dict()["optimizer"]["parts"][0]["state"]
    return int(states[0]["step"]) if states else 0


ONE = STEPS * ROWS
UPDATES = {
    "adam": {},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
    "adam with an L2 penalty": {"weight_decay": 0.1},
    "rmsprop": {"optimizer": "rmsprop"},
    "rmsprop with an L2 penalty": {"optimizer": "rmsprop", "weight_decay": 0.01},
    "clipped gradients": {"max_grad_norm": 0.01},
    "values not clipped": {"clip_values": False},
    "advantages as they are": {"normalize_advantages": False},
    "narrow clip": {"clip_range": 0.02, "entropy_coef": 0.1, "value_coef": 1.0},
    "annealed": {"anneal_clip_range": True},
    "constant": {"anneal_learning_rate": False},
    "v-trace": {"vtrace": True, "rho_clip": 0.9, "c_clip": 1.1},
    "one minibatch": {"minibatch_size": ONE},
}


def compare_updates(policy, config, progress=(0.0, 0.4), **how):
    before = copy.deepcopy(policy)
    learner, device_learner = pair(policy, config)
    for seed, part in enumerate(progress):
        rollout = made(before, STEPS, ROWS, seed=seed, **how)
        assert_same_metrics(device_learner.update(rollout, part), learner.update(rollout, part))
    assert optimizer_steps(device_learner) == optimizer_steps(learner) > 0
    assert_same_learning(before, learner.policy, device_learner.policy)


SLOW = {"rmsprop", "constant", "one minibatch"}  # covered by others


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in UPDATES])
def test_two_updates_agree(case):
    compare_updates(make_policy(), config_of(**UPDATES[case]))


@pytest.mark.parametrize("vtrace", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ACTIONS)
def test_every_kind_of_policy(kind, vtrace):
    compare_updates(make_policy(kind), config_of(vtrace=vtrace))


@pytest.mark.parametrize("kind", ["categorical", "multi-categorical", "lstm"])
def test_masks(kind):
    compare_updates(make_policy(kind), config_of(), has_masks=True)


@pytest.mark.parametrize(
    ("kind", "vtrace", "masks"),
    [
        pytest.param(kind, vtrace, masks, marks=[pytest.mark.slow] * (vtrace != masks))
        for kind, vtrace, masks in itertools.product(["categorical", "lstm", "mingru"], [False, True], [False, True])
    ],
)
def test_absent_agents(kind, vtrace, masks):
    """With all steps in one minibatch: with several they would differ from PPO's, which drops absent steps first."""
    compare_updates(make_policy(kind), config_of(minibatch_size=ONE, vtrace=vtrace), invalid=0.3, has_masks=masks)


@pytest.mark.parametrize("kind", ["lstm", "mingru"])
def test_absent_agents_in_several_minibatches_of_segments(kind):
    compare_updates(make_policy(kind), config_of(), invalid=0.3)


def test_a_minibatch_of_absent_agents_alone_teaches_nothing():
    policy = make_policy()
    before, rollout = copy.deepcopy(policy), made(policy, STEPS, ROWS, invalid=0.1)
    rollout.valid[: STEPS // 2], rollout.valid[STEPS // 2 :] = False, True
    learner, device_learner = pair(policy, config_of(minibatch_size=ONE // 2))
    assert_same_metrics(device_learner.update(rollout), learner.update(rollout))
    assert optimizer_steps(device_learner) == optimizer_steps(learner) == 3
    assert_same_learning(before, learner.policy, device_learner.policy)


@pytest.mark.parametrize("kind", ["categorical", "lstm"])
def test_a_rollout_without_a_valid_step_teaches_nothing(kind):
    policy = make_policy(kind)
    _, learner = pair(policy, config_of())
    metrics = learner.update(made(policy, STEPS, ROWS, invalid=1.0))
    assert math.isnan(metrics["policy_loss"])
    assert torch.equal(flat(learner.policy), flat(policy))
    assert optimizer_steps(learner) == 0


def test_rollouts_of_several_sizes():
    policy = make_policy()
    before = copy.deepcopy(policy)
    learner, device_learner = pair(policy, config_of())
    for steps, rows in ((8, 12), (4, 6), (8, 12)):
        rollout = made(before, steps, rows, seed=steps)
        for one in (learner, device_learner):
            one.update(rollout)
    assert_same_learning(before, learner.policy, device_learner.policy)


@pytest.mark.parametrize("kind", ["categorical", "lstm"])
def test_minibatches_must_divide_the_rollout(kind):
    learner = DevicePPO(make_policy(kind), config_of(minibatch_size=40))
    for rows in (ROWS, 3):  # with a remainder, and too few for one minibatch
        with pytest.raises(HurtleError, match=rf"minibatch_size=40 does not divide the rollout of 8 steps of {rows} rows"):
            learner.update(made(learner.policy, STEPS, rows))


def test_an_update_that_goes_too_far_ends_after_the_same_epoch():
    counts = []
    for target in (1e-7, 1e-3, 4e-3, 1e-2, 0.5):
        policy = make_policy()
        learner, device_learner = pair(policy, config_of(target_kl=target, num_epochs=5, learning_rate=3e-3))
        rollout = made(policy, STEPS, ROWS, noise=0.0)
        for one in (learner, device_learner):
            one.update(rollout)
        assert optimizer_steps(device_learner) == optimizer_steps(learner)
        counts.append(optimizer_steps(learner) // 4)
    assert counts[0] == 1
    assert counts[-1] == 5
    assert len(set(counts)) >= 3


def test_the_device_learns_from_the_policys_own_parameters():
    policy = make_policy()
    before = copy.deepcopy(policy)
    learner, device_learner = pair(policy, config_of())
    rollout = made(before, STEPS, ROWS)
    for one in (learner, device_learner):
        one.update(rollout)
        with torch.no_grad():
            one.policy.network.actor.weight.mul_(1.5)
            for parameter in one.policy.parameters():
                parameter.add_(0.01)
        one.update(rollout)
    assert_same_learning(before, learner.policy, device_learner.policy)


# Contents of minibatches


def watched(learner):
    """All draws of the learner from now on, minibatch by minibatch: what was drawn, and the weights."""
    draw, seen = learner.draw, []

    def noted(k):
        chosen, weights = draw(k)
        seen.append((chosen.clone(), None if weights is None else weights.clone()))
        return chosen, weights

    learner.draw = noted
    return seen


@pytest.mark.parametrize("kind", ["categorical", "lstm"])
def test_every_epoch_uses_everything_once_in_another_order(kind):
    policy = make_policy(kind)
    items = ROWS if kind == "lstm" else ONE
    found = []
    for seed in (3, 3, 4):
        learner = DevicePPO(copy.deepcopy(policy), config_of(shuffle=True), LearnerSetup(seed))
        seen = watched(learner)
        for _ in range(2):
            learner.update(made(policy, STEPS, ROWS))
        assert len(seen) == 2 * 3 * 4
        epochs = [torch.cat([chosen for chosen, _ in seen[first : first + 4]]) for first in range(0, 24, 4)]
        for k, epoch in enumerate(epochs):
            assert torch.equal(epoch.sort().values, torch.arange(items))
            assert not any(torch.equal(epoch, other) for other in (*epochs[:k], torch.arange(items)))
        found.append((epochs, flat(learner.policy)))
    (first, weights), (again, same_weights), (other, other_weights) = found
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(weights, same_weights)
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(weights, other_weights)


def test_in_order_is_in_order():
    policy = make_policy()
    learner = DevicePPO(policy, config_of())
    seen = watched(learner)
    learner.update(made(policy, STEPS, ROWS))
    for k, (chosen, weights) in enumerate(seen):
        assert torch.equal(chosen, torch.arange(24) + 24 * (k % 4))
        assert weights is None


def priorities(rollout, alpha):
    """By the definition: (sum of |advantages| of a row's valid steps)^alpha, divided by the sum over rows."""
    return segment_probabilities((rollout.advantages.abs() * rollout.valid).sum(0).double(), alpha)


@pytest.mark.parametrize("invalid", [pytest.param(0.0, marks=pytest.mark.slow), 0.3])
def test_rows_are_drawn_by_their_priorities(invalid):
    policy = make_policy()
    config = config_of(priority_alpha=1.2, learning_rate=0.0, num_epochs=80, minibatch_size=ONE)
    learner = DevicePPO(policy, config)
    seen = watched(learner)
    rollout = made(policy, STEPS, ROWS, invalid=invalid)
    rollout.rewards.mul_(torch.linspace(0.1, 2.0, ROWS))
    for _ in range(5):
        learner.update(rollout)
    counts = torch.stack([chosen.bincount(minlength=ROWS) for chosen, _ in seen]).double()
    probability = priorities(rollout, 1.2)
    assert counts.sum() == 5 * 80 * ROWS
    assert probability.max() > 4 * probability.min()
    expected = counts.sum() * probability
    assert (((counts.sum(0) - expected) ** 2) / expected).sum() < 33.1  # chi-squared with 11 degrees of freedom: 1 in 2,000
    # Draws are independent: the counts of a minibatch vary as those of a multinomial do.
    variance = counts.var(0) / (ROWS * probability * (1 - probability))
    assert (variance - 1).abs().max() < 0.3


@pytest.mark.parametrize("progress", [0.0, 0.75])
@pytest.mark.parametrize("kind", ["categorical", "lstm"])
def test_priorities_have_importance_weights_that_count(kind, progress):
    policy = make_policy(kind)
    before = copy.deepcopy(policy)
    learner, device_learner = pair(policy, config_of(priority_alpha=0.8, priority_beta=0.3))
    seen, rollout = watched(device_learner), made(policy, STEPS, ROWS)
    metrics = device_learner.update(rollout, progress)
    probability, beta = priorities(rollout, 0.8), 0.3 + 0.7 * progress
    for chosen, weights in seen:
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.double(), (ROWS * probability[chosen]) ** -beta, rtol=1e-5, atol=0)
    draws = iter(seen)
    learner.order.epoch = lambda *_: (next(draws) for _ in range(4))  # the other learner's draws
    assert_same_metrics(metrics, learner.update(rollout, progress))
    assert_same_learning(before, learner.policy, device_learner.policy)


# Saved states


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("adamw", marks=pytest.mark.slow), "rmsprop"])
def test_what_one_saves_the_other_goes_on_with(optimizer):
    config = config_of(optimizer=optimizer)
    policy = make_policy()
    before = copy.deepcopy(policy)
    learner, device_learner = pair(policy, config)
    rollouts = [made(before, STEPS, ROWS, seed=seed) for seed in range(3)]
    for one in (learner, device_learner):
        one.update(rollouts[0])
    crossed, crossed_device = PPO(make_policy(seed=9), config), DevicePPO(make_policy(seed=8), config)
    for source, target in ((device_learner, crossed), (learner, crossed_device)):
        target.policy.load_state_dict(source.policy.state_dict())
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    for one in (learner, device_learner, crossed, crossed_device):
        for rollout in rollouts[1:]:
            one.update(rollout)
        assert optimizer_steps(one) == 36
    for one in (device_learner, crossed, crossed_device):
        assert_same_learning(before, policy, one.policy)


@pytest.mark.parametrize("words", [{}, {"priority_alpha": 0.5}])
def test_going_on_from_a_saved_state_changes_no_bit(words):
    policy = make_policy()
    learner = DevicePPO(policy, config_of(shuffle=True, **words), LearnerSetup(5))
    rollout = made(policy, STEPS, ROWS)
    learner.update(rollout)
    other = DevicePPO(copy.deepcopy(policy), learner.config, LearnerSetup(77))
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    for one in (learner, other):
        for _ in range(2):
            one.update(rollout, 0.5)
    assert torch.equal(flat(learner.policy), flat(other.policy))
    found, expected = other.state_dict(), learner.state_dict()
    assert torch.equal(found["generator"], expected["generator"])
    for mine, theirs in zip(
        found["optimizer"]["parts"][0]["state"].values(), expected["optimizer"]["parts"][0]["state"].values(), strict=True
    ):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_saved_states_look_the_same():
    policy = make_policy()
    learner, device_learner = pair(policy, config_of())
    for _ in range(2):  # with and without moments
        found, expected = device_learner.state_dict(), learner.state_dict()
        assert found.keys() == expected.keys()
        assert found["optimizer"].keys() == expected["optimizer"].keys()
        (mine,), (theirs,) = found["optimizer"]["parts"], expected["optimizer"]["parts"]
        assert mine["state"].keys() == theirs["state"].keys()
        for n, state in theirs["state"].items():
            assert {name: value.shape for name, value in mine["state"][n].items()} == {
                name: value.shape for name, value in state.items()
            }
        rollout = made(policy, STEPS, ROWS)
        for one in (learner, device_learner):
            one.update(rollout)


# Non-finite numbers


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("field", ["rewards", "obs", "log_probs", "values"])
def test_bad_numbers_are_refused_and_leave_the_weights(field, optimizer):
    policy = make_policy()
    learner = DevicePPO(copy.deepcopy(policy), config_of(minibatch_size=ONE, optimizer=optimizer))
    rollout = made(policy, STEPS, ROWS)
    getattr(rollout, field)[3, 2] = torch.nan
    with pytest.raises(NonFiniteError, match=r"not finite.*checkpoint.*learning_rate"):
        learner.update(rollout)
    assert torch.equal(flat(learner.policy), flat(policy))
    assert optimizer_steps(learner) == 0
    fresh = PPO(copy.deepcopy(policy), learner.config)
    for one in (learner, fresh):  # and it continues with good numbers as if nothing had happened
        one.update(made(policy, STEPS, ROWS))
    assert_same_learning(policy, fresh.policy, learner.policy)


def test_only_the_bad_minibatches_change_nothing():
    policy = make_policy()
    learner = DevicePPO(copy.deepcopy(policy), config_of(num_epochs=1))
    rollout = made(policy, STEPS, ROWS)
    rollout.log_probs[3, 2] = torch.nan  # in the second of four
    with pytest.raises(NonFiniteError):
        learner.update(rollout)
    assert optimizer_steps(learner) == 3
    assert bool(flat(learner.policy).isfinite().all())


def test_weights_that_are_not_finite():
    learner = DevicePPO(make_policy(), config_of())
    with torch.no_grad():
        next(learner.policy.parameters())[0, 0] = torch.nan
    with pytest.raises(NonFiniteError):
        learner.update(made(make_policy(), STEPS, ROWS))
