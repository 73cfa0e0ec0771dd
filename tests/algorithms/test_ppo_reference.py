"""PPO's loss, gradients and full updates against an independent plain implementation (plain_ppo.py)."""

import itertools

import numpy as np
import plain_ppo as plain
import pytest
import torch
from made_rollouts import arrays, made, plain_policy

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.ppo import PPO, ppo_loss
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.buffers.rollout import Minibatch

OPTIONS = list(itertools.product([False, True], repeat=3))  # clip_values, normalize_advantages, weights


def minibatch(size=24, weights=False, seed=0):
    """Old and new outputs for a batch, float64; ratios and values reach beyond the clip range on both sides."""
    rng = np.random.default_rng(seed)
    names = ("log_probs", "values", "advantages", "returns")
    old = dict(zip(names, rng.normal(size=(4, size)), strict=True))
    old["weights"] = rng.uniform(0.2, 3.0, size) if weights else None
    now = (
        old["log_probs"] + 0.4 * rng.normal(size=size),
        rng.normal(size=size) ** 2,
        old["values"] + 0.4 * rng.normal(size=size),
    )
    nothing = torch.zeros(size)
    tensors = {name: None if value is None else torch.from_numpy(value) for name, value in old.items()}
    return now, old, Minibatch(nothing, None, nothing, **tensors)


@pytest.mark.parametrize(("clip_values", "normalize", "weights"), OPTIONS)
@pytest.mark.parametrize("clip_range", [0.1, 0.3])
def test_loss_equals_loops_over_steps(clip_values, normalize, weights, clip_range):
    now, old, batch = minibatch(weights=weights)
    config = {"clip_values": clip_values, "normalize_advantages": normalize, "entropy_coef": 0.03, "value_coef": 0.7}
    losses = ppo_loss(*map(torch.from_numpy, now), batch, clip_range, PPOConfig(**config))
    expected = plain.ppo_losses(*now, old, clip_range, config)
    np.testing.assert_allclose([float(loss) for loss in losses[:-1]], expected[:-1], rtol=1e-12)
    assert float(losses.clip_fraction) == pytest.approx(expected[-1], rel=1e-6)  # a mean of float32 zeros and ones
    assert 0.2 < losses.clip_fraction < 0.9  # both branches were tested


@pytest.mark.parametrize(("clip_values", "normalize", "weights"), OPTIONS)
def test_gradients_equal_finite_differences(clip_values, normalize, weights):
    now, old, batch = minibatch(weights=weights, seed=1)
    config = {"clip_values": clip_values, "normalize_advantages": normalize, "entropy_coef": 0.03, "value_coef": 0.7}
    given = [torch.from_numpy(part).requires_grad_() for part in now]
    ppo_loss(*given, batch, 0.2, PPOConfig(**config)).total.backward()
    step = 1e-6
    for k, part in enumerate(now):
        expected = np.zeros(len(part))
        for i in range(len(part)):
            totals = []
            for sign in (1, -1):
                moved = [array.copy() for array in now]
                moved[k][i] += sign * step
                totals.append(plain.ppo_losses(*moved, old, 0.2, config)[0])
            expected[i] = (totals[0] - totals[1]) / (2 * step)
        np.testing.assert_allclose(given[k].grad, expected, atol=1e-8)


def reference_update(start, rollout, config, orders, progress=0.0):
    """Parameters, mean losses and mean gradient norm after an update whose epochs take steps in these orders."""
    found = plain.advantages(*arrays(rollout), config.gamma, config.gae_lambda, rollout.valid.numpy())
    flat = {name: getattr(rollout, name).flatten(0, 1).numpy().copy() for name in ("obs", "actions", "log_probs", "values")}
    flat |= {"advantages": found.reshape(-1), "returns": found.reshape(-1) + flat["values"]}
    options = {name: getattr(config, name) for name in ("clip_values", "normalize_advantages", "entropy_coef", "value_coef")}
    learning_rate = config.learning_rate * (1 - progress if config.anneal_learning_rate else 1)
    clip_range = config.clip_range * (1 - progress if config.anneal_clip_range else 1)
    steps, adam, norms = np.flatnonzero(rollout.valid.numpy().reshape(-1)), plain.Adam(config.adam_eps), []
    for order in orders:
        for part in np.array_split(order, -(-len(steps) // config.minibatch_size)):
            chosen = steps[part]
            gradients = plain.ppo_gradients(start, {k: v[chosen] for k, v in flat.items()}, clip_range, options)
            gradients, norm = plain.clip_norm(gradients, config.max_grad_norm)
            norms.append(norm)
            adam.step(start, gradients, learning_rate)
    return start, np.mean(norms)


def check_update(config, seed=0, progress=0.0, **how):
    policy = plain_policy(seed)
    start = plain.double(policy.network)
    rollout = made(policy, seed=seed, **how)
    ppo = PPO(policy, config, LearnerSetup(seed))
    generator = torch.Generator()
    generator.set_state(ppo.state_dict()["generator"])
    count = int(rollout.valid.sum())
    orders = [
        torch.randperm(count, generator=generator).numpy() if config.shuffle else np.arange(count)
        for _ in range(config.num_epochs)
    ]
    expected, norm = reference_update(start, rollout, config, orders, progress)
    metrics = ppo.update(rollout, progress)
    for name, parameter in policy.network.named_parameters():
        np.testing.assert_allclose(parameter.detach(), expected[name].detach(), rtol=0, atol=1e-6, err_msg=name)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_grad_norm", [0.05, 1e9])
def test_one_step_of_adam(seed, max_grad_norm):
    check_update(PPOConfig(num_epochs=1, minibatch_size=96, max_grad_norm=max_grad_norm), seed)


@pytest.mark.parametrize("clip_values", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs_of_minibatches(clip_values, normalize, shuffle):
    config = PPOConfig(
        num_epochs=3, minibatch_size=24, clip_values=clip_values, normalize_advantages=normalize, shuffle=shuffle
    )
    check_update(config, seed=5)


def test_annealed_and_with_steps_left_out():
    config = PPOConfig(num_epochs=3, minibatch_size=20, anneal_clip_range=True, learning_rate=1e-3, gamma=0.9, gae_lambda=0.7)
    check_update(config, seed=7, progress=0.7, invalid=0.25, ends=0.2)
