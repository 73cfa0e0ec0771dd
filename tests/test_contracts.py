"""What passes between collectors and learners: `Weights` and `Episodes`."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from hurtle.contracts import SHOWN, Episodes, Weights
from hurtle.policies.build import PolicyConfig, build_policy


def policy_of(seed=0):
    spaces_of = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)
    return build_policy(PolicyConfig(hidden_sizes=(4,)), *spaces_of, normalize_observations=True, seed=seed)


# Weights


def test_weights_are_the_parameters_in_their_order():
    policy = policy_of()
    weights = Weights.of(policy, version=3)
    assert torch.equal(weights.flat, nn.utils.parameters_to_vector(policy.parameters()))
    assert (weights.flat.dtype, weights.version, weights.policy) == (torch.float32, 3, policy)
    assert not weights.flat.requires_grad
    assert [buffer is own for buffer, own in zip(weights.buffers, policy.buffers(), strict=True)] == [True] * 3


def test_flat_weights_are_a_copy():
    policy = policy_of()
    weights = Weights.of(policy)
    before = weights.flat.clone()
    with torch.no_grad():
        next(policy.parameters()).add_(1.0)
    assert torch.equal(weights.flat, before)


def test_weights_are_copied_in_place_with_the_statistics():
    policy, other = policy_of(), policy_of(1)
    policy.normalizer.update(np.random.default_rng(0).normal(2.0, 3.0, (9, 4, 3)).astype(np.float32))
    places = [parameter.data_ptr() for parameter in other.parameters()]
    Weights.of(policy).copy_to(other)
    for name, value in policy.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert [parameter.data_ptr() for parameter in other.parameters()] == places
    assert all(parameter.requires_grad for parameter in other.parameters())


def test_weights_without_buffers_leave_the_statistics():
    policy, other = policy_of(), policy_of(1)
    other.normalizer.count.fill_(5.0)
    Weights(Weights.of(policy).flat).copy_to(other)
    assert torch.equal(Weights.of(other).flat, Weights.of(policy).flat)
    assert float(other.normalizer.count) == 5.0


def test_the_same_policy_is_left_alone():
    """A collector that acts with the learner's module has nothing to copy, also where its memory is newer than the weights."""
    policy = policy_of()
    weights = Weights.of(policy)
    with torch.no_grad():
        next(policy.parameters()).add_(1.0)
    changed = Weights.of(policy).flat
    weights.copy_to(policy)
    assert torch.equal(Weights.of(policy).flat, changed)


@pytest.mark.parametrize("size", [-1, 1])
def test_weights_of_another_size_are_refused(size):
    flat = Weights.of(policy_of()).flat
    with pytest.raises((RuntimeError, ValueError)):
        Weights(torch.zeros(len(flat) + size)).copy_to(policy_of(1))


# Episodes


def test_episodes_one_by_one():
    episodes = Episodes.of([3.0, -1.0], [10, 40], {"score": [7, 8]})
    assert (episodes.count, episodes.best_return, episodes.best_length) == (2, 3.0, 40.0)
    assert episodes.returns.tolist() == [3.0, -1.0]
    assert episodes.lengths.tolist() == [10, 40]
    assert episodes.metrics["score"].tolist() == [7, 8]


@pytest.mark.parametrize("none", [Episodes(), Episodes.of([], []), Episodes.join([]), Episodes.from_totals(0, 0, 0, 0, 0, {})])
def test_no_episodes(none):
    assert (none.count, none.best_return, none.best_length) == (0, -np.inf, 0.0)
    assert none.returns.size == none.lengths.size == len(none.metrics) == 0


def test_of_totals_each_episode_is_the_mean():
    episodes = Episodes.from_totals(3, 6.0, 4.0, 30.0, 20.0, {"score": 1.5})
    assert episodes.returns.tolist() == [2.0] * 3
    assert episodes.lengths.tolist() == [10.0] * 3
    assert episodes.metrics["score"].tolist() == [1.5] * 3
    assert (episodes.count, episodes.best_return, episodes.best_length) == (3, 4.0, 20.0)
    many = Episodes.from_totals(5_000, 10_000.0, 9.0, 5_000.0, 3.0, {})
    assert many.count == 5_000
    assert many.returns.tolist() == [2.0] * SHOWN


def test_joined_episodes_keep_their_order_and_their_best():
    first = Episodes.from_totals(3, 6.0, 4.0, 30, 20, {"score": 1.0})
    second = Episodes.of([-8.0], [25])
    whole = Episodes.join([first, Episodes(), second])
    assert (whole.count, whole.best_return, whole.best_length) == (4, 4.0, 25.0)
    assert whole.returns.tolist() == [2.0, 2.0, 2.0, -8.0]
    assert whole.lengths.tolist() == [10, 10, 10, 25]
    assert {name: values.tolist() for name, values in whole.metrics.items()} == {"score": [1.0] * 3}
    assert Episodes.join([second]).best_return == -8.0


def test_metrics_of_some_parts_are_joined_in_their_order():
    parts = [Episodes.of([1], [1], {"a": [1]}), Episodes.of([1], [1], {"b": [2]}), Episodes.of([1, 1], [1, 1], {"a": [3, 4]})]
    metrics = Episodes.join(parts).metrics
    assert {name: values.tolist() for name, values in metrics.items()} == {"a": [1, 3, 4], "b": [2]}
