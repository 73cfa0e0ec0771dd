"""IMPALA: V-trace's targets against the reference, A2C where nothing lags, the compiled step against torch's, learning."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from made_rollouts import ACTIONS, OBS, collected, made, parameters, plain_policy

import hurtle
from hurtle.algorithms.a2c import A2C
from hurtle.algorithms.a2c_config import A2CConfig
from hurtle.algorithms.impala import IMPALA
from hurtle.algorithms.impala_config import IMPALAConfig
from hurtle.algorithms.impala_native import NativeIMPALA
from hurtle.algorithms.ppo import evaluate_actions
from hurtle.errors import HurtleError
from hurtle.kernels.vtrace import vtrace_reference
from hurtle.policies.build import PolicyConfig, build_policy
from hurtle.tracking.checkpoints import load_checkpoint

SGD = {"optimizer": "rmsprop", "learning_rate": 1e-3, "anneal_learning_rate": False}
CONFIG = IMPALAConfig(**SGD, rho_clip=0.9, c_clip=0.8, trace_lambda=0.95)


def small(recurrent="none", seed=0):
    return build_policy(PolicyConfig(hidden_sizes=(8,), recurrent=recurrent), OBS, ACTIONS, seed=seed)


@pytest.mark.parametrize("recurrent", ["none", "gru"])
@pytest.mark.parametrize("invalid", [0.0, 0.3])
def test_targets_are_the_references(recurrent, invalid):
    """Of the ratios and values before the update: with one minibatch, those that the loss was computed with."""
    policy = small(recurrent)
    rollout = made(policy, steps=9, rows=5, invalid=invalid, noise=0.5)
    with torch.no_grad():
        log_probs, _, values = evaluate_actions(policy, rollout.segments(torch.arange(5), keep_all=True))
    lead = rollout.num_steps, rollout.num_rows
    names = ("rewards", "terminated", "truncated", "final_values", "last_values")
    rewards, *others = (getattr(rollout, name).numpy().copy() for name in names)
    ratios = (log_probs.view(lead) - rollout.log_probs).numpy()
    valid = rollout.valid.numpy().copy() if invalid else None
    settings = (CONFIG.gamma, CONFIG.trace_lambda, CONFIG.rho_clip, CONFIG.c_clip)
    targets, advantages = vtrace_reference(ratios, rewards, values.view(lead).numpy(), *others, *settings, valid)
    IMPALA(policy, CONFIG).update(rollout)
    at = slice(None) if valid is None else valid
    np.testing.assert_allclose(rollout.returns.numpy()[at], targets[at], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rollout.advantages.numpy()[at], advantages[at], rtol=1e-4, atol=1e-5)


def test_without_lag_it_is_a2c():
    found = []
    for make in (
        lambda policy: IMPALA(policy, IMPALAConfig(**SGD)),
        lambda policy: A2C(policy, A2CConfig(**SGD)),
    ):
        policy = plain_policy()
        rollout = made(policy, noise=0.0)
        metrics = make(policy).update(rollout)
        found.append((parameters(policy), metrics))
    (one, metrics), (other, same) = found
    for name, parameter in one.items():
        torch.testing.assert_close(parameter, other[name], rtol=1e-4, atol=1e-6)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    for name, value in same.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4), name


def test_the_gradient_is_that_of_the_loss():
    """One plain step of gradient descent, by hand."""
    policy, again = plain_policy(), plain_policy()
    rollout = made(policy, noise=0.5)
    config = IMPALAConfig(**SGD, max_grad_norm=np.inf)
    learner = IMPALA(policy, config)
    learner.optimizer = Plain(policy, 0.1)
    learner.update(rollout)
    batch = rollout.segments(torch.arange(rollout.num_rows))  # with V-trace's targets, of the same policy
    log_probs, entropies, values = evaluate_actions(again, batch)
    loss = -(batch.advantages * log_probs).mean() + 0.25 * (values - batch.returns).square().mean() - 0.01 * entropies.mean()
    loss.backward()
    for own, plain in zip(policy.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(own, plain - 0.1 * plain.grad)


class Plain:
    """Gradient descent."""

    def __init__(self, policy, rate):
        self.policy, self.rate = policy, rate

    def set_learning_rate(self, rate):
        pass

    def step(self, loss, max_grad_norm):
        loss.backward()
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter -= self.rate * parameter.grad
        return torch.zeros(())


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("recurrent", ["none", "gru", pytest.param("lstm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("invalid", [0.0, 0.3])
def test_the_compiled_step_equals_torchs(recurrent, invalid, minibatches):
    found = []
    for kind in (IMPALA, NativeIMPALA):
        policy = small(recurrent)
        learner = kind(policy, IMPALAConfig(**SGD, num_minibatches=minibatches))
        metrics = [learner.update(collected(policy, 8, 6, seed=k, invalid=invalid, has_masks=True)) for k in range(2)]
        found.append((parameters(policy), metrics))
        learner.close()
    for name, parameter in found[0][0].items():
        torch.testing.assert_close(parameter, found[1][0][name], rtol=1e-3, atol=1e-5)
    for own, other in zip(found[0][1], found[1][1], strict=True):
        assert own == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_boxes_too():
    box = spaces.Box(-1, 1, (2,), np.float32)
    found = []
    for kind in (IMPALA, NativeIMPALA):
        policy = build_policy(PolicyConfig(hidden_sizes=(8,)), OBS, box)
        learner = kind(policy, IMPALAConfig(**SGD))
        learner.update(collected(policy, 8, 6))
        found.append(parameters(policy))
        learner.close()
    for name, parameter in found[0].items():
        torch.testing.assert_close(parameter, found[1][name], rtol=1e-3, atol=1e-5)


def test_more_minibatches_than_rows_are_refused():
    with pytest.raises(HurtleError, match="num_minibatches=9 is more than the 8 rows"):
        hurtle.train("cartpole", algorithm="impala", num_envs=8, num_minibatches=9)


SMALL = {"algorithm": "impala", "progress": "quiet", "trackers": (), "eval_episodes": 2, "preset": False, "hidden_sizes": (16,)}


@pytest.mark.parametrize("gear", ["native", "general"])
def test_resuming_is_exact(tmp_path, gear):
    how = {**SMALL, "runs": str(tmp_path), "gear": gear, "num_minibatches": 2, "anneal_learning_rate": False, "num_envs": 4}
    how |= {"normalize_observations": True, "reward_mode": "normalize"}
    whole, half = (hurtle.train("cartpole", total_steps=steps, **how) for steps in (800, 400))
    resumed = hurtle.train(resume=str(half.path), total_steps=800)
    files = (max((run.path / "checkpoints").glob("step-*.pt")) for run in (whole, resumed))
    one, other = (load_checkpoint(file)["policy"] for file in files)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("lag", ["0", "1"])
def test_it_learns_with_lag(tmp_path, lag):
    run = hurtle.train(
        "bandit", total_steps=20_000, runs=str(tmp_path), runner="async", lag=lag, learning_rate=5e-3, num_envs=16,
        **{**SMALL, "eval_episodes": 50},
    )  # fmt: skip
    assert run.evaluation.mean > 0.8
