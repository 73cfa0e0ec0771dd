"""Steps without a decision (absent agents, NEXT_STEP resets) and non-finite numbers never reach the parameters."""

import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from made_rollouts import ACTIONS, OBS, made, parameters, plain_policy

from hurtle.algorithms.a2c import A2C
from hurtle.algorithms.a2c_config import A2CConfig
from hurtle.algorithms.impala import IMPALA
from hurtle.algorithms.impala_config import IMPALAConfig
from hurtle.algorithms.ppo import PPO
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.errors import NonFiniteError
from hurtle.policies.build import PolicyConfig, build_policy

STEP_FIELDS = ("obs", "log_probs", "values", "rewards", "final_values", "advantages", "returns")
BOX = spaces.Box(-1, 1, (2,), np.float32)
SMALL = {"minibatch_size": 16, "num_epochs": 2}
LEARNERS = {
    "ppo": lambda policy: PPO(policy, PPOConfig(**SMALL)),
    "unnormalized": lambda policy: PPO(policy, PPOConfig(**SMALL, normalize_advantages=False, clip_values=False)),
    "priorities": lambda policy: PPO(policy, PPOConfig(**SMALL, priority_alpha=0.8)),
    "vtrace": lambda policy: PPO(policy, PPOConfig(**SMALL, vtrace=True)),
    "a2c": lambda policy: A2C(policy, A2CConfig()),
    "impala": lambda policy: IMPALA(policy, IMPALAConfig(num_minibatches=2)),
}


def absent(rollout, seed=0):
    """Make a third of the steps invalid; an episode starts after each run of them, as collectors ensure."""
    rng = np.random.default_rng(seed)
    valid = torch.from_numpy(rng.random((rollout.num_steps, rollout.num_rows)) > 0.3)
    valid[:, -1] = False  # one row is always absent
    rollout.valid.copy_(valid)
    rollout.all_valid = False
    rollout.starts[1:] |= ~valid[:-1]


def spoil(rollout, seed):
    """Junk in every field of the invalid steps."""
    generator = torch.Generator().manual_seed(seed)
    bad = ~rollout.valid
    for name in STEP_FIELDS:
        field = getattr(rollout, name)
        field[bad] = 50 * torch.randn(field[bad].shape, generator=generator)
    for name in ("terminated", "truncated"):
        getattr(rollout, name)[bad] = torch.rand(int(bad.sum()), generator=generator) < 0.5
    if rollout.actions.is_floating_point():
        rollout.actions[bad] = torch.rand(rollout.actions[bad].shape, generator=generator)
    else:
        rollout.actions[bad] = torch.randint(0, 3, rollout.actions[bad].shape, generator=generator)
    if rollout.masks is not None:
        rollout.masks[bad] = torch.rand(rollout.masks[bad].shape, generator=generator) < 0.5


@pytest.mark.parametrize(
    ("recurrent", "learner"),
    [
        pytest.param(recurrent, learner, marks=[pytest.mark.slow] * (recurrent in ("lstm", "mingru") and learner != "ppo"))
        for recurrent, learner in itertools.product(["none", "lstm", "gru", "mingru"], LEARNERS)
    ],
)
def test_junk_in_invalid_steps_changes_nothing(recurrent, learner):
    found = []
    for seed in range(3):
        policy = build_policy(PolicyConfig(hidden_sizes=(8,), recurrent=recurrent), OBS, ACTIONS)
        rollout = made(policy, steps=8, rows=6, has_masks=True)
        absent(rollout)
        before = parameters(policy)
        if seed:
            spoil(rollout, seed)
        metrics = LEARNERS[learner](policy).update(rollout)
        found.append((parameters(policy), metrics))
    for after, metrics in found[1:]:
        for name, parameter in found[0][0].items():
            assert torch.equal(parameter, after[name]), name
        assert metrics == pytest.approx(found[0][1], nan_ok=True)
    assert not all(torch.equal(parameter, before[name]) for name, parameter in found[0][0].items())


@pytest.mark.parametrize("distribution", ["gaussian", "squashed_gaussian", "beta"])
@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_continuous_actions_of_invalid_steps_change_nothing(recurrent, distribution):
    found = []
    for seed in range(2):
        config = PolicyConfig(hidden_sizes=(8,), recurrent=recurrent, distribution=distribution)
        policy = build_policy(config, OBS, BOX)
        rollout = made(policy, steps=8, rows=6)
        absent(rollout)
        if seed:
            spoil(rollout, seed)
        PPO(policy, PPOConfig(**SMALL)).update(rollout)
        found.append(parameters(policy))
    for name, parameter in found[0].items():
        assert bool(parameter.isfinite().all()), name
        assert torch.equal(parameter, found[1][name]), name


@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_a_rollout_without_a_valid_step_teaches_nothing(recurrent, learner):
    policy = build_policy(PolicyConfig(hidden_sizes=(8,), recurrent=recurrent), OBS, ACTIONS)
    rollout = made(policy, steps=8, rows=6)
    rollout.valid.fill_(False)
    rollout.all_valid = False
    before = parameters(policy)
    metrics = LEARNERS[learner](policy).update(rollout)
    assert np.isnan(metrics["policy_loss"])
    for name, parameter in parameters(policy).items():
        assert torch.equal(parameter, before[name]), name


def test_early_stop_of_a_rollout_without_a_valid_step():
    policy = plain_policy()
    rollout = made(policy)
    rollout.valid.fill_(False)
    rollout.all_valid = False
    PPO(policy, PPOConfig(target_kl=0.01)).update(rollout)


def test_rows_that_are_never_there_are_drawn_without_harm():
    """By priority, hundreds of minibatches of one segment; five of six rows are empty."""
    policy = plain_policy()
    rollout = made(policy, steps=8, rows=6)
    rollout.valid[:, 1:] = False
    rollout.all_valid = False
    rollout.rewards.zero_()
    rollout.values.zero_()
    rollout.final_values.zero_()
    rollout.last_values.zero_()  # no priorities: all rows are equally likely
    PPO(policy, PPOConfig(priority_alpha=0.5, minibatch_size=8, num_epochs=20)).update(rollout)


@pytest.mark.parametrize("field", ["rewards", "values", "obs", "log_probs"])
@pytest.mark.parametrize("learner", ["ppo", "a2c"])
def test_numbers_that_are_none_stop_the_update(field, learner):
    if (field, learner) == ("log_probs", "a2c"):
        pytest.skip("A2C does not look at the old log-probs")
    policy = build_policy(PolicyConfig(hidden_sizes=(8,)), OBS, ACTIONS)
    rollout = made(policy)
    getattr(rollout, field)[:] = torch.nan
    before = parameters(policy)
    with pytest.raises(NonFiniteError, match="not finite"):
        LEARNERS[learner](policy).update(rollout)
    for name, parameter in parameters(policy).items():
        assert torch.equal(parameter, before[name]), name


def test_parameters_are_those_before_the_bad_minibatch():
    """The first of two minibatches is fine, the second is not."""
    config = PPOConfig(num_epochs=1, minibatch_size=48, shuffle=False, gamma=0.0)
    good = plain_policy()
    rollout = made(good)
    half = rollout.steps(torch.arange(48))
    policy = plain_policy()
    rollout.log_probs[8:] = torch.nan
    with pytest.raises(NonFiniteError, match="gradient"):
        PPO(policy, config).update(rollout)
    first = made(good, steps=8)
    for name in ("inputs", "actions", "log_probs", "values"):
        getattr(first, name).copy_(getattr(half, name).view_as(getattr(first, name)))
    for name in ("rewards", "terminated", "truncated", "final_values"):
        getattr(first, name).copy_(getattr(rollout, name)[:8])
    PPO(good, config).update(first)
    for name, parameter in parameters(policy).items():
        assert torch.equal(parameter, parameters(good)[name]), name


@pytest.mark.parametrize("learner", ["ppo", "a2c"])
def test_parameters_that_are_none_stop_the_update(learner):
    policy = plain_policy()
    rollout = made(policy)
    with torch.no_grad():
        policy.network.critic.bias.fill_(torch.nan)
    before = parameters(policy)
    with pytest.raises(NonFiniteError):
        LEARNERS[learner](policy).update(rollout)
    for name, parameter in parameters(policy).items():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0, equal_nan=True)


def test_an_infinite_reward_stops_the_update():
    policy = plain_policy()
    rollout = made(policy)
    rollout.rewards[3, 2] = torch.inf
    with pytest.raises(NonFiniteError):
        PPO(policy, PPOConfig(normalize_advantages=False)).update(rollout)
