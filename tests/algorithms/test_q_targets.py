"""The arithmetic of value-based learning against plain loops in NumPy."""

import numpy as np
import pytest
import torch

from hurtle.algorithms import q_targets
from hurtle.algorithms.q_targets import (
    cross_entropy,
    lowest,
    n_step_targets,
    project,
    quantile_huber,
    rescaled,
    unscaled,
)


def project_reference(probabilities, rewards, discounts, support):
    low, high, count = support[0], support[-1], len(support)
    spacing = (high - low) / (count - 1)
    found = np.zeros_like(probabilities)
    for b in range(len(probabilities)):
        for k in range(count):
            value = min(max(rewards[b] + discounts[b] * support[k], low), high)
            place = (value - low) / spacing
            lower, upper = int(np.floor(place)), int(np.ceil(place))
            if lower == upper:
                found[b, lower] += probabilities[b, k]
            else:
                found[b, lower] += probabilities[b, k] * (upper - place)
                found[b, upper] += probabilities[b, k] * (place - lower)
    return found


@pytest.mark.parametrize("shared", [q_targets._shared_by_place, q_targets._shared_by_distance])
def test_projection(shared, monkeypatch):
    monkeypatch.setattr(q_targets, "_shared_by_place", shared)
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(11), 40)
    rewards, support = rng.normal(0, 4, 40), np.linspace(-5, 5, 11)
    discounts = np.where(rng.random(40) < 0.3, 0.0, 0.99)  # terminations
    rewards[:5], discounts[:5] = 1.0, [1.0, 1.0, 0.0, 0.0, 1.0]  # exactly on atoms
    found = project(*(torch.from_numpy(part) for part in (probabilities, rewards, discounts, support)))
    np.testing.assert_allclose(found.numpy(), project_reference(probabilities, rewards, discounts, support), atol=1e-9)
    np.testing.assert_allclose(found.sum(-1).numpy(), 1.0, atol=1e-9)


@pytest.mark.parametrize("shared", [q_targets._shared_by_place, q_targets._shared_by_distance])
def test_nan_stays_in_its_own_row(shared, monkeypatch):
    monkeypatch.setattr(q_targets, "_shared_by_place", shared)
    rewards, support = torch.tensor([0.5, torch.nan, -9.0, torch.inf]), torch.linspace(-1, 1, 5)
    found = project(torch.full((4, 5), 0.2), rewards, torch.full((4,), 0.9), support)
    assert found.isnan().any(1).tolist() == [False, True, False, False]
    torch.testing.assert_close(found[[0, 2, 3]].sum(1), torch.ones(3))


def test_the_lowest_distribution_is_chosen_for_each_transition():
    support = torch.tensor([-1.0, 0.0, 2.0])
    low, high = torch.tensor([0.6, 0.2, 0.2]), torch.tensor([0.8, 0.0, 0.2])  # means -0.2 and -0.4
    assert lowest(torch.stack([torch.stack([low, high]), torch.stack([high, low])]), support).tolist() == [high.tolist()] * 2


def test_cross_entropy():
    logits, target = torch.randn(6, 4, dtype=torch.float64), torch.rand(6, 4, dtype=torch.float64)
    expected = [-sum(t * (x - np.log(np.exp(row).sum())) for t, x in zip(ts, row, strict=True)) for ts, row in
                zip(target.numpy(), logits.numpy(), strict=True)]  # fmt: skip
    np.testing.assert_allclose(cross_entropy(logits, target).numpy(), expected)


def test_quantile_huber_loss():
    rng = np.random.default_rng(1)
    quantiles, targets = rng.normal(0, 2, (7, 5)), rng.normal(0, 2, (7, 9))
    expected = np.zeros(7)
    for b in range(7):
        for i in range(5):
            for j in range(9):
                error = targets[b, j] - quantiles[b, i]
                huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
                expected[b] += abs((i + 0.5) / 5 - (error < 0)) * huber / 9
    found = quantile_huber(torch.from_numpy(quantiles), torch.from_numpy(targets))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_the_quantiles_of_least_loss_are_those_of_the_targets():
    """Gradient descent on the loss finds the quantiles of a sample, so its slopes have the right signs and sizes."""
    targets = torch.linspace(0, 100, 201).unsqueeze(0)
    quantiles = torch.full((1, 4), 50.0, requires_grad=True)
    for _ in range(600):
        (slope,) = torch.autograd.grad(quantile_huber(quantiles, targets).sum(), quantiles)
        quantiles = (quantiles - 8.0 * slope).detach().requires_grad_()
    assert quantiles.tolist()[0] == pytest.approx([12.5, 37.5, 62.5, 87.5], abs=1.0)


def test_rescaling_is_undone():
    values = torch.tensor([-1000.0, -1.0, -1e-3, 0.0, 0.5, 30.0, 1e5], dtype=torch.float64)
    expected = [np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + 1e-3 * x for x in values.tolist()]
    np.testing.assert_allclose(rescaled(values).numpy(), expected)
    np.testing.assert_allclose(unscaled(rescaled(values)).numpy(), values.numpy(), rtol=1e-6, atol=1e-9)


def n_step_by_hand(rewards, values, terminated, valid, gamma, n):
    steps, columns = rewards.shape
    found = values.copy()
    for b in range(columns):
        for t in range(steps - 1):
            if not valid[t, b]:
                continue
            total, discount, k = 0.0, 1.0, t
            while k < steps - 1 and k - t < n and valid[k, b]:
                total += discount * rewards[k, b]
                discount *= gamma
                if terminated[k, b]:
                    discount = 0.0
                    break
                k += 1
            found[t, b] = total + discount * (values[k, b] if discount else 0.0)
    return found


@pytest.mark.parametrize("n", [1, 3, 20])
def test_n_step_targets(n):
    rng = np.random.default_rng(n)
    shape = (12, 7)
    rewards, values = rng.normal(size=shape), rng.normal(size=shape)
    terminated, valid = rng.random(shape) < 0.1, rng.random(shape) > 0.15
    given = (rewards, values, terminated & valid, valid)
    found = n_step_targets(*(torch.from_numpy(part) for part in given), 0.9, n)
    np.testing.assert_allclose(found.numpy(), n_step_by_hand(*given, 0.9, n))
