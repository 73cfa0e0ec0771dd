"""A2C against a plain second implementation."""

import numpy as np
import plain_ppo as plain
import pytest
import torch
from made_rollouts import ACTIONS, OBS, arrays, made, parameters, plain_policy

from hurtle.algorithms.a2c import A2C
from hurtle.algorithms.a2c_config import A2CConfig
from hurtle.policies.build import PolicyConfig, build_policy


def reference_step(start, rollout, config):
    """One RMSprop step on the full rollout; also the losses."""
    valid = rollout.valid.numpy()
    adv = plain.advantages(*arrays(rollout), config.gamma, config.gae_lambda, valid)
    returns = torch.from_numpy((adv + rollout.values.double().numpy())[valid])
    adv = torch.from_numpy(adv[valid])
    if config.normalize_advantages:
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    log_all, values = plain.forward(start, rollout.obs[rollout.valid].double())
    log_probs = log_all.gather(1, rollout.actions[rollout.valid][:, None])[:, 0]
    policy_loss, value_loss = -(adv * log_probs).mean(), 0.5 * ((returns - values) ** 2).mean()
    entropy = -(log_all.exp() * log_all).sum(1).mean()
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    gradients = dict(zip(start, torch.autograd.grad(loss, list(start.values())), strict=True))
    gradients, norm = plain.clip_norm(gradients, config.max_grad_norm)
    for name, g in gradients.items():
        square = 0.01 * g**2
        start[name].data -= config.learning_rate * g / (torch.sqrt(square) + config.adam_eps)
    losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    return {name: float(loss.detach()) for name, loss in losses.items()} | {"grad_norm": norm}


@pytest.mark.parametrize("normalize_advantages", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.1, 1e9])
def test_one_update(normalize_advantages, max_grad_norm):
    policy = plain_policy()
    start = plain.double(policy.network)
    rollout = made(policy, steps=5, rows=8, invalid=0.2)
    config = A2CConfig(normalize_advantages=normalize_advantages, max_grad_norm=max_grad_norm, entropy_coef=0.05)
    expected = reference_step(start, rollout, config)
    metrics = A2C(policy, config).update(rollout)
    for name, parameter in policy.network.named_parameters():
        np.testing.assert_allclose(parameter.detach(), start[name].detach(), rtol=0, atol=2e-6, err_msg=name)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_learning_rate_is_annealed_only_if_asked():
    for anneal, expected in ((False, 7e-4), (True, 1.75e-4)):
        policy = plain_policy()
        metrics = A2C(policy, A2CConfig(anneal_learning_rate=anneal)).update(made(policy), progress=0.75)
        assert metrics["learning_rate"] == pytest.approx(expected)


def test_old_log_probs_do_not_matter():
    found = []
    for noise in (0.0, 1.0):
        policy = plain_policy()
        rollout = made(policy)
        rollout.log_probs += noise
        A2C(policy, A2CConfig()).update(rollout)
        found.append(parameters(policy))
    assert all(torch.equal(parameter, found[1][name]) for name, parameter in found[0].items())


@pytest.mark.parametrize("recurrent", ["lstm", "mingru"])
def test_recurrent_policies_learn_from_the_steps_they_saw(recurrent):
    """The loss is that of stepping through the rollout one by one, from its initial state and with its starts."""
    policy = build_policy(PolicyConfig(hidden_sizes=(8,), recurrent=recurrent), OBS, ACTIONS)
    rollout = made(policy, steps=5, rows=8)
    state, policy_losses, entropies = rollout.initial_state, [], []
    rollout.compute_advantages(0.99, 1.0)
    with torch.no_grad():
        for t in range(5):
            distribution, _, state = policy(rollout.obs[t], state, starts=rollout.starts[t])
            policy_losses.append(-(distribution.log_prob(rollout.actions[t]) * rollout.advantages[t]).mean())
            entropies.append(distribution.entropy().mean())
    metrics = A2C(policy, A2CConfig()).update(rollout)
    assert metrics["policy_loss"] == pytest.approx(float(torch.stack(policy_losses).mean()), abs=1e-5)
    assert metrics["entropy"] == pytest.approx(float(torch.stack(entropies).mean()), abs=1e-5)
