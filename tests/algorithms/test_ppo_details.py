"""Each implementation detail of PPO by its name."""

import copy
import math
from itertools import chain

import numpy as np
import plain_ppo as plain
import pytest
import torch
from gymnasium import spaces
from made_rollouts import ACTIONS, OBS, arrays, made, parameters, plain_policy

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.ppo import PPO, evaluate_actions, explained_variance, ppo_loss, use_vtrace
from hurtle.algorithms.ppo_config import PPOConfig, segments_per_minibatch
from hurtle.buffers.rollout import Minibatch, Rollout
from hurtle.errors import HurtleError
from hurtle.policies.build import PolicyConfig, build_policy


def watched(rollout, name, monkeypatch):
    """The indices with which the rollout's `steps` or `segments` is called from now on."""
    calls, method = [], getattr(rollout, name)

    def record(chosen, *rest):
        calls.append(chosen.tolist())
        return method(chosen, *rest)

    monkeypatch.setattr(rollout, name, record)
    return calls


def one_batch(log_ratios, advantages, values=0.0, old_values=0.0, returns=0.0):
    """A minibatch of hand-made numbers, and the policy's view of it now."""
    log_ratios, advantages = torch.tensor(log_ratios, requires_grad=True), torch.tensor(advantages)
    size = len(advantages)
    values = torch.full((size,), values, requires_grad=True)
    old = torch.zeros(size), torch.full((size,), old_values), advantages, torch.full((size,), returns)
    return log_ratios, values, Minibatch(torch.zeros(size), None, torch.zeros(size), *old)


# The loss.


def test_clipped_surrogate():
    """Outside the clip range the gradient is zero, but only if the policy has already moved in the advantage's direction."""
    ratios = [1.1, 1.5, 0.5, 1.5, 0.5]
    log_ratios, values, batch = one_batch([math.log(r) for r in ratios], [1.0, 1.0, 1.0, -1.0, -1.0])
    config = PPOConfig(normalize_advantages=False, value_coef=0.0, entropy_coef=0.0)
    losses = ppo_loss(log_ratios, torch.zeros(5), values, batch, 0.2, config)
    assert float(losses.policy_loss) == pytest.approx(-(1.1 + 1.2 + 0.5 - 1.5 - 0.8) / 5)
    losses.total.backward()
    np.testing.assert_allclose(log_ratios.grad, np.array([-1.1, 0.0, -0.5, 1.5, 0.0]) / 5, rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "clip_values", "loss", "slope"),
    [
        (1.0, True, 0.5 * (2.0 - 0.2) ** 2, 0.0),  # clipped at 0.2: farther from the return 2 than 1.0 is
        (1.0, False, 0.5 * (2.0 - 1.0) ** 2, -1.0),
        (-1.0, True, 0.5 * (2.0 + 1.0) ** 2, -3.0),  # it moved away: no clipping
        (0.1, True, 0.5 * (2.0 - 0.1) ** 2, -1.9),
    ],
)
def test_value_clipping(value, clip_values, loss, slope):
    log_ratios, values, batch = one_batch([0.0], [0.0], values=value, returns=2.0)
    config = PPOConfig(clip_values=clip_values, value_coef=1.0, entropy_coef=0.0)
    losses = ppo_loss(log_ratios, torch.zeros(1), values, batch, 0.2, config)
    assert float(losses.value_loss) == pytest.approx(loss)
    losses.total.backward()
    assert float(values.grad) == pytest.approx(slope)


def test_entropy_bonus():
    policy = plain_policy()
    rollout = made(policy)
    config = PPOConfig(value_coef=0.0, entropy_coef=1.0, learning_rate=3e-3, num_epochs=1, max_grad_norm=1e9, minibatch_size=96)
    rollout.rewards.zero_()
    rollout.values.zero_()
    rollout.last_values.zero_()
    rollout.final_values.zero_()  # no advantage anywhere
    ppo = PPO(policy, config)
    entropies = [ppo.update(rollout)["entropy"] for _ in range(5)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 0.005


def test_advantages_are_normalized_in_each_minibatch():
    """Changing the mean and scale of a minibatch's advantages changes nothing."""
    found = []
    for scale, shift in ((1.0, 0.0), (1000.0, 7.0)):
        policy = plain_policy()
        rollout = made(policy, noise=0.0)
        rollout.values.zero_()
        rollout.rewards[8:] = rollout.rewards[8:] * scale + shift
        config = PPOConfig(
            gamma=0.0, value_coef=0.0, num_epochs=1, minibatch_size=48, shuffle=False, max_grad_norm=1e9, learning_rate=1e-3
        )
        PPO(policy, config).update(rollout)
        found.append(parameters(policy))
    for name, parameter in found[0].items():
        torch.testing.assert_close(parameter, found[1][name], rtol=0, atol=1e-6)


def test_a_single_advantage_is_not_normalized():
    log_ratios, values, batch = one_batch([0.0], [3.0])
    losses = ppo_loss(log_ratios, torch.zeros(1), values, batch, 0.2, PPOConfig())
    assert float(losses.policy_loss) == -3.0


# The schedule.


def test_learning_rate_is_annealed_linearly():
    for anneal, progress, expected in ((True, 0.0, 1.0), (True, 0.75, 0.25), (True, 1.0, 0.0), (False, 0.75, 1.0)):
        policy = plain_policy()
        before = parameters(policy)
        config = PPOConfig(learning_rate=1e-3, anneal_learning_rate=anneal, num_epochs=1, minibatch_size=96)
        metrics = PPO(policy, config).update(made(policy), progress)
        assert metrics["learning_rate"] == pytest.approx(1e-3 * expected)
        moved = max(float((p - before[name]).abs().max()) for name, p in parameters(policy).items())
        assert moved == pytest.approx(1e-3 * expected, rel=0.01)  # Adam's first step is the learning rate


def test_clip_range_is_annealed_linearly():
    policy = plain_policy()
    config = PPOConfig(clip_range=0.4, anneal_clip_range=True, learning_rate=0.0, num_epochs=1, minibatch_size=96)
    fractions = []
    for progress in (0.0, 0.5, 0.9):
        rollout = made(policy)
        metrics = PPO(policy, config).update(rollout, progress)
        assert metrics["clip_range"] == pytest.approx(0.4 * (1 - progress))
        log_probs, _, _ = evaluate_actions(policy, rollout.steps(rollout.valid_steps()))
        ratios = (log_probs - rollout.log_probs.flatten()).exp()
        fractions.append(metrics["clip_fraction"])
        assert metrics["clip_fraction"] == pytest.approx(float(((ratios - 1).abs() > 0.4 * (1 - progress)).float().mean()))
    assert fractions[0] < fractions[1] < fractions[2]


def test_kl_early_stop(monkeypatch):
    """Epochs end after the first whose KL is above the target; its minibatches are all done."""

    def run(target_kl):
        policy = plain_policy()
        rollout = made(policy, noise=0.0)
        calls = watched(rollout, "steps", monkeypatch)
        config = PPOConfig(num_epochs=8, minibatch_size=24, learning_rate=0.02, target_kl=target_kl, max_grad_norm=1e9)
        return PPO(policy, config).update(rollout), len(calls) / 4

    assert run(None)[1] == 8
    assert run(1e-9)[1] == 1
    assert run(1e9)[1] == 8
    by_epochs = []  # mean KL of each epoch
    for count in range(1, 9):
        policy = plain_policy()
        config = PPOConfig(num_epochs=count, minibatch_size=24, learning_rate=0.02, max_grad_norm=1e9)
        by_epochs.append(PPO(policy, config).update(made(policy, noise=0.0))["approx_kl"] * count - sum(by_epochs))
    target = by_epochs[2] * 0.999
    assert by_epochs[1] < target < by_epochs[2]
    assert run(target)[1] == 3


# Minibatches.


def test_gae_is_wired_in():
    policy = plain_policy()
    rollout = made(policy, invalid=0.2, ends=0.15)
    expected = plain.advantages(*arrays(rollout), 0.9, 0.8, rollout.valid.numpy())
    PPO(policy, PPOConfig(gamma=0.9, gae_lambda=0.8, minibatch_size=96)).update(rollout)
    np.testing.assert_allclose(rollout.advantages, expected, atol=2e-6)
    valid = rollout.valid.numpy()
    np.testing.assert_allclose(rollout.returns.numpy()[valid], (expected + rollout.values.numpy())[valid], atol=2e-6)


@pytest.mark.parametrize("invalid", [0.0, 0.3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_minibatches_cover_each_valid_step_once_per_epoch(monkeypatch, shuffle, invalid):
    policy = plain_policy()
    rollout = made(policy, invalid=invalid)
    calls = watched(rollout, "steps", monkeypatch)
    PPO(policy, PPOConfig(num_epochs=3, minibatch_size=20, shuffle=shuffle)).update(rollout)
    expected = np.flatnonzero(rollout.valid.numpy()).tolist()
    per_epoch = math.ceil(len(expected) / 20)
    assert len(calls) == 3 * per_epoch
    epochs = [list(chain(*calls[k * per_epoch : (k + 1) * per_epoch])) for k in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == expected
        assert (epoch == expected) is not shuffle
    assert (epochs[0] == epochs[1]) is not shuffle


@pytest.mark.parametrize("shuffle", [False, True])
def test_recurrent_minibatches_are_whole_sequences(monkeypatch, shuffle):
    policy = build_policy(PolicyConfig(hidden_sizes=(8,), recurrent="gru"), OBS, ACTIONS)
    rollout = made(policy, steps=8, rows=6)
    calls = watched(rollout, "segments", monkeypatch)
    monkeypatch.setattr(rollout, "steps", None)
    PPO(policy, PPOConfig(num_epochs=4, minibatch_size=16, shuffle=shuffle)).update(rollout)
    assert [len(rows) for rows in calls] == [2] * 12
    epochs = [list(chain(*calls[3 * k : 3 * k + 3])) for k in range(4)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert all(epoch == list(range(6)) for epoch in epochs) is not shuffle
    batch = rollout.segments(torch.tensor([4, 1]))
    assert batch.inputs.shape == (8, 2, 3)
    torch.testing.assert_close(batch.inputs[:, 0], rollout.obs[:, 4])
    torch.testing.assert_close(batch.log_probs.view(8, 2)[:, 1], rollout.log_probs[:, 1])
    torch.testing.assert_close(batch.state[0][1], rollout.initial_state[0][1])


def test_minibatches_of_segments_must_hold_whole_ones():
    with pytest.raises(HurtleError, match="multiple of num_steps=128, such as 256"):
        segments_per_minibatch(300, 128)
    assert segments_per_minibatch(256, 128) == 2


# Metrics.


def test_debug_metrics_by_hand():
    """With a learning rate of zero all minibatches see the same policy."""
    policy = plain_policy()
    rollout = made(policy, invalid=0.2)
    config = PPOConfig(learning_rate=0.0, num_epochs=2, minibatch_size=1000)
    metrics = PPO(policy, config).update(rollout)
    valid = rollout.valid.numpy()
    log_all, _ = plain.forward(plain.double(policy.network), rollout.obs[rollout.valid].double())
    log_probs = log_all.gather(1, rollout.actions[rollout.valid][:, None])[:, 0].detach().numpy()
    log_ratios = log_probs - rollout.log_probs.numpy()[valid]
    assert metrics["approx_kl"] == pytest.approx(np.mean(np.exp(log_ratios) - 1 - log_ratios), rel=1e-4)
    assert metrics["clip_fraction"] == pytest.approx(np.mean(np.abs(np.exp(log_ratios) - 1) > 0.2), rel=1e-4)
    assert metrics["entropy"] == pytest.approx(float(-(log_all.exp() * log_all).sum(1).mean().detach()), rel=1e-4)
    returns = plain.advantages(*arrays(rollout), 0.99, 0.95, valid)[valid] + rollout.values.numpy()[valid]
    left = np.var(returns - rollout.values.numpy()[valid]) / np.var(returns)
    assert metrics["explained_variance"] == pytest.approx(1 - left, abs=1e-5)


def test_explained_variance_has_its_meaning():
    rollout = made(plain_policy())
    rollout.advantages.zero_()
    rollout.returns.copy_(rollout.values)
    assert explained_variance(rollout) == 1.0
    rollout.advantages.copy_(rollout.returns)  # i.e. values of 0
    assert explained_variance(rollout) == pytest.approx(0.0)
    rollout.returns.fill_(2.0)
    assert math.isnan(explained_variance(rollout))


# Masks, priorities, V-trace.


def test_masked_actions_have_probability_zero_in_the_update():
    policy = plain_policy()
    rollout = made(policy, has_masks=True)
    batch = rollout.steps(rollout.valid_steps())
    every = torch.stack([evaluate_actions(policy, batch._replace(actions=torch.full((96,), a)))[0] for a in range(3)], 1)
    expected, _ = plain.forward(plain.double(policy.network), batch.inputs.double(), batch.masks)
    np.testing.assert_allclose(every.exp().detach(), expected.exp().detach(), atol=1e-6)
    assert bool((every.exp()[~batch.masks] == 0).all())
    _, entropies, _ = evaluate_actions(policy, batch)
    plogp = torch.where(batch.masks, expected.exp() * expected, 0.0)
    np.testing.assert_allclose(entropies.detach(), -plogp.sum(1).detach(), atol=1e-6)
    PPO(policy, PPOConfig(minibatch_size=24, entropy_coef=0.1)).update(rollout)
    assert all(parameter.isfinite().all() for parameter in policy.parameters())


def test_masked_actions_get_no_gradient():
    policy = plain_policy()
    rollout = made(policy, has_masks=True)
    rollout.masks[..., 2] = False
    batch = rollout.steps(rollout.valid_steps())
    log_probs, entropies, _ = evaluate_actions(policy, batch._replace(actions=torch.zeros(96, dtype=torch.int64)))
    (log_probs.sum() + entropies.sum()).backward()
    gradient = policy.network.actor.weight.grad
    assert float(gradient[2].abs().max()) < 1e-6  # rounding error of 96 zeros
    assert float(gradient[:2].abs().max()) > 1.0


def test_segments_are_drawn_by_priority():
    """p ∝ (Σ|A|)^α over the valid steps, with importance weights (N p)^-β; β rises to 1 over the run."""
    policy = plain_policy()
    rollout = made(policy, steps=4, rows=5, invalid=0.2)
    rollout.rewards *= torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0])
    alpha, drawn, weights = 0.7, [], {}
    config = PPOConfig(priority_alpha=alpha, priority_beta=0.4, minibatch_size=20, num_epochs=200, learning_rate=0.0)
    segments = rollout.segments

    def record(rows, of_rows):
        drawn.extend(rows.tolist())
        batch = segments(rows, of_rows)
        valid = rollout.valid[:, rows]
        torch.testing.assert_close(batch.weights, of_rows.expand(4, -1)[valid])
        weights.update(zip(rows.tolist(), of_rows.tolist(), strict=True))
        return batch

    rollout.segments = record
    PPO(policy, config).update(rollout, progress=0.75)
    magnitude = np.where(rollout.valid, np.abs(rollout.advantages.numpy()), 0.0).sum(0) ** alpha
    expected = magnitude / magnitude.sum()
    counts = np.bincount(drawn, minlength=5)
    assert counts.sum() == 1000
    chi_squared = ((counts - 1000 * expected) ** 2 / (1000 * expected)).sum()
    assert chi_squared < 20.5  # 4 degrees of freedom: 0.04 %
    beta = 0.4 + 0.6 * 0.75
    np.testing.assert_allclose([weights[n] for n in range(5)], (5 * expected) ** -beta, rtol=1e-4)


def vtrace_by_hand(rollout, ratios, gamma, gae_lambda, rho_clip, c_clip):
    """Espeholt et al.'s targets, and advantages not weighed by rho, by recursion over the valid steps of each row."""
    rewards, values, terminated, truncated, final_values, last_values = arrays(rollout)
    targets, advantages = values.copy(), np.zeros_like(values)
    for n in range(rollout.num_rows):
        next_value = next_target = last_values[n]
        for t in reversed(np.flatnonzero(rollout.valid[:, n].numpy())):
            if terminated[t, n]:
                next_value = next_target = 0.0
            elif truncated[t, n]:
                next_value = next_target = final_values[t, n]
            rho, c = min(rho_clip, ratios[t, n]), gae_lambda * min(c_clip, ratios[t, n])
            delta = rho * (rewards[t, n] + gamma * next_value - values[t, n])
            targets[t, n] = values[t, n] + delta + gamma * c * (next_target - next_value)
            advantages[t, n] = rewards[t, n] + gamma * next_target - values[t, n]
            next_value, next_target = values[t, n], targets[t, n]
    return targets, advantages


def test_vtrace_weighs_actions_once():
    """A bandit that pays for action 0, which the older policy took too often: the gradient is that of the policy now."""
    older, now = torch.tensor([0.9, 0.1]), torch.tensor([0.5, 0.5])
    policy = build_policy(PolicyConfig(hidden_sizes=(4,)), OBS, spaces.Discrete(2))
    rollout = Rollout(policy, 1, 10)
    rollout.actions[0, 9] = 1
    rollout.rewards[0, :9] = 1.0
    rollout.terminated.fill_(True)
    chosen = rollout.actions[0]
    use_vtrace(rollout, (now[chosen] / older[chosen]).log().unsqueeze(0), PPOConfig(rho_clip=100.0))
    logits = now.log().requires_grad_()
    ratios = logits.softmax(-1)[chosen] / older[chosen]  # as in the loss
    (rollout.advantages[0] * ratios).mean().backward()
    np.testing.assert_allclose(logits.grad, [0.25, -0.25], rtol=1e-5)


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_vtrace_corrects_for_older_policies(recurrent):
    policy = build_policy(PolicyConfig(hidden_sizes=(8,), recurrent=recurrent), OBS, ACTIONS)
    rollout = made(policy, steps=8, rows=4, invalid=0.2, noise=0.5)
    with torch.no_grad():
        distribution, _, _ = policy.forward_sequence(rollout.obs, rollout.initial_state, rollout.starts)
        now = distribution.log_prob(rollout.actions.flatten()).view(8, 4)
    ratios = (now - rollout.log_probs).double().exp().numpy()
    config = PPOConfig(
        vtrace=True, learning_rate=0.0, num_epochs=2, minibatch_size=16, gae_lambda=0.9, rho_clip=1.2, c_clip=0.9
    )
    PPO(policy, config).update(rollout)
    targets, advantages = vtrace_by_hand(rollout, ratios, 0.99, 0.9, 1.2, 0.9)
    valid = rollout.valid.numpy()
    np.testing.assert_allclose(rollout.returns.numpy()[valid], targets[valid], atol=5e-6)
    np.testing.assert_allclose(rollout.advantages.numpy()[valid], advantages[valid], atol=5e-6)


def test_vtrace_on_policy_is_gae_with_lambda_one():
    policy = plain_policy()
    rollout = made(policy, noise=0.0)
    PPO(policy, PPOConfig(vtrace=True, gae_lambda=1.0, num_epochs=1, minibatch_size=96)).update(rollout)
    expected = plain.advantages(*arrays(rollout), 0.99, 1.0, rollout.valid.numpy())
    np.testing.assert_allclose(rollout.advantages, expected, atol=1e-5)


def test_vtrace_follows_the_policy_from_epoch_to_epoch():
    """The ratios are those of the policy at the start of each epoch, so later epochs see different advantages."""
    policy = plain_policy()
    rollout = made(policy, noise=0.0)
    config = PPOConfig(vtrace=True, num_epochs=2, minibatch_size=96, learning_rate=0.05, max_grad_norm=1e9)
    ppo = PPO(policy, config)
    ppo.update(rollout)
    off_policy = rollout.advantages.clone()
    PPO(plain_policy(), config).update(fresh := made(plain_policy(), noise=0.0))
    torch.testing.assert_close(fresh.advantages, off_policy)
    on_policy = plain.advantages(*arrays(rollout), 0.99, 0.95, rollout.valid.numpy())
    assert np.abs(off_policy.numpy() - on_policy).max() > 0.01


# The state.


def test_a_saved_learner_goes_on_bitwise():
    def learner():
        policy = plain_policy()
        return policy, PPO(policy, PPOConfig(minibatch_size=24), LearnerSetup(seed=3))

    policy, ppo = learner()
    for seed in range(2):
        ppo.update(made(policy, seed=seed))
    weights, saved = parameters(policy), copy.deepcopy(ppo.state_dict())
    ppo.update(made(policy, seed=2))
    other, again = learner()
    other.load_state_dict(weights)
    again.load_state_dict(saved)
    again.update(made(other, seed=2))
    for name, parameter in parameters(policy).items():
        assert torch.equal(parameter, other.state_dict()[name]), name


def test_the_seed_decides_the_minibatches():
    found = []
    for seed in (0, 0, 1):
        policy = plain_policy()
        PPO(policy, PPOConfig(minibatch_size=24, learning_rate=1e-2), LearnerSetup(seed)).update(made(policy))
        found.append(policy.network.actor.weight.detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("lags", "setting", "version", "corrects"),
    [(True, True, 0, True), (True, True, 1, False), (False, True, 0, False), (True, False, 0, False)],
)
def test_only_rollouts_of_older_policies_are_corrected(lags, setting, version, corrects):
    """With correction the update is that of V-trace's targets, without it that of GAE's."""
    found = []
    for learner_lags, asks in ((lags, setting), (False, False)):
        policy, config = plain_policy(), PPOConfig(minibatch_size=48, num_epochs=1, correct_lag=asks)
        learner = PPO(policy, config, LearnerSetup(lags=learner_lags))
        learner.updates, rollout = 1, made(policy)
        rollout.version = version
        learner.update(rollout)
        found.append(rollout.returns.clone())
    assert torch.equal(*found) is not corrects
