"""Normalizers: NumPy's statistics over everything seen, frozen while a rollout is normalized."""

import numpy as np
import pytest
import torch

from hurtle.errors import HurtleError
from hurtle.policies.normalizers import ObservationNormalizer, RewardNormalizer, merge_moments

T, N = 9, 4


def rollouts(seed=0, shape=(3,)):
    rng = np.random.default_rng(seed)
    return [(5.0 + 2.0 * rng.normal(size=(T, N, *shape))).astype(np.float32) for _ in range(3)]


def test_observations_get_mean_0_and_variance_1_over_all_that_was_seen():
    normalizer = ObservationNormalizer((3,))
    for obs in rollouts():
        normalizer.update(obs)
    everything = np.concatenate(rollouts()).reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose(normalizer.mean, everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(normalizer.variance, everything.var(0), rtol=1e-12)
    seen = normalizer.normalize(torch.from_numpy(everything.astype(np.float32)))
    assert seen.dtype == torch.float32
    np.testing.assert_allclose(seen.mean(0), 0.0, atol=1e-6)
    np.testing.assert_allclose(seen.std(0, correction=0), 1.0, atol=1e-6)


def test_what_is_not_valid_does_not_count():
    obs, valid = rollouts()[0], np.random.default_rng(1).random((T, N)) < 0.5
    poisoned = np.where(valid[..., None], obs, np.float32(1e9))
    normalizer = ObservationNormalizer((3,))
    normalizer.update(torch.from_numpy(poisoned), torch.from_numpy(valid))
    np.testing.assert_allclose(normalizer.mean, obs[valid].astype(np.float64).mean(0), rtol=1e-12)
    assert normalizer.count == valid.sum()


def test_before_anything_was_seen_observations_are_only_clipped():
    normalizer = ObservationNormalizer((2,), clip=3.0)
    assert normalizer.normalize(torch.tensor([[1.5, -99.0]])).tolist() == [[1.5, -3.0]]


def test_large_offsets_keep_their_digits():
    normalizer = ObservationNormalizer((1,))
    normalizer.update(np.float32([[[1e6]], [[1e6 + 1.0]]]))
    assert normalizer.normalize(torch.tensor([[1e6], [1e6 + 1.0]])).flatten().tolist() == pytest.approx([-1.0, 1.0], abs=1e-6)


def test_shapes_of_images_and_wrong_ones():
    normalizer = ObservationNormalizer((2, 3))
    normalizer.update(np.ones((T, N, 2, 3), np.float32))
    assert normalizer.normalize(torch.ones(5, 2, 3)).abs().max() < 1e-6
    assert normalizer.normalize(torch.ones(7, 5, 2, 3)).shape == (7, 5, 2, 3)
    with pytest.raises(HurtleError, match=r"Expected observations of shape \[T, N, 2, 3\], got \(9, 4, 6\)"):
        normalizer.update(np.ones((T, N, 6), np.float32))


def test_statistics_are_saved():
    normalizer, other = ObservationNormalizer((3,)), ObservationNormalizer((3,))
    normalizer.update(rollouts()[0])
    other.load_state_dict(normalizer.state_dict())
    assert torch.equal(other.mean, normalizer.mean)
    assert set(normalizer.state_dict()) == {"count", "mean", "m2"}
    assert all(value.dtype == torch.float64 for value in normalizer.state_dict().values())
    for one in (normalizer, other):
        one.update(rollouts()[1])
    assert torch.equal(other.m2, normalizer.m2)


# rewards


def reference(batches, gamma, clip=10.0):
    """Row by row, step by step: the rewards of each rollout, scaled by the variance of all earlier returns."""
    running, returns, outputs = np.zeros(N), [], []
    for rewards, ended, valid in batches:
        variance = np.var(returns) if returns else 1.0
        outputs.append(np.clip(rewards / np.sqrt(variance + 1e-8), -clip, clip))
        for n in range(N):
            for t in range(T):
                if valid[t, n]:
                    running[n] = gamma * running[n] + rewards[t, n]
                    returns.append(running[n])
                    if ended[t, n]:
                        running[n] = 0.0
    return outputs, running


@pytest.mark.parametrize("masked", [True, False])
def test_rewards_are_scaled_by_the_returns_before_the_rollout(masked):
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(4):
        rewards = (3.0 * rng.normal(size=(T, N))).astype(np.float32)
        batches.append((rewards, rng.random((T, N)) < 0.2, rng.random((T, N)) < (0.6 if masked else 2.0)))
    expected, running = reference(batches, 0.9)
    normalizer = RewardNormalizer(N, 0.9)
    for (rewards, ended, valid), by_hand in zip(batches, expected, strict=True):
        scaled = normalizer.scale(torch.from_numpy(rewards), torch.from_numpy(ended), valid if masked else None)
        assert scaled.dtype == torch.float32
        np.testing.assert_allclose(scaled, by_hand, rtol=1e-6)
    np.testing.assert_allclose(normalizer.returns, running, rtol=1e-12)
    assert (np.sign(scaled.numpy()) == np.sign(rewards)).all()


def test_rewards_are_clipped_and_returns_saved():
    normalizer = RewardNormalizer(2, 0.5, clip=1.0)
    ended = np.zeros((1, 2), np.bool_)
    assert normalizer.scale(np.float32([[4.0, -0.5]]), ended).tolist() == [[1.0, -0.5]]
    other = RewardNormalizer(2, 0.5, clip=1.0)
    other.load_state_dict(normalizer.state_dict())
    assert other.returns.tolist() == [4.0, -0.5]
    assert torch.equal(other.scale(np.float32([[1.0, 1.0]]), ended), normalizer.scale(np.float32([[1.0, 1.0]]), ended))
    assert other.returns.tolist() == [3.0, 0.75]
    with pytest.raises(HurtleError, match=r"of shape \[T, 2\], got \(1, 3\) and \(1, 3\)"):
        other.scale(np.zeros((1, 3), np.float32), np.zeros((1, 3), np.bool_))


# on a device


@pytest.mark.parametrize("shape", [(3,), (2, 2), ()])
@pytest.mark.parametrize("part", [None, 0.5])
def test_moments_are_merged_without_the_host(shape, part):
    """All at once, against NumPy's statistics and against the host's implementation."""
    rng, seen = np.random.default_rng(1), []
    normalizer, by_host = ObservationNormalizer(shape), ObservationNormalizer(shape)
    for obs in rollouts(shape=shape):
        valid = None if part is None else rng.random((T, N)) < part
        merge_moments(normalizer, torch.from_numpy(obs), None if valid is None else torch.from_numpy(valid))
        by_host.update(obs, valid)
        seen.append(obs.reshape(T * N, -1) if valid is None else obs[valid].reshape(valid.sum(), -1))
    everything = np.concatenate(seen).astype(np.float64)
    assert normalizer.count == len(everything)
    np.testing.assert_allclose(normalizer.mean.flatten(), everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(normalizer.variance.flatten(), everything.var(0), rtol=1e-12)
    for name, value in by_host.state_dict().items():
        torch.testing.assert_close(normalizer.state_dict()[name], value, rtol=1e-12, atol=0)
        assert normalizer.state_dict()[name].dtype == torch.float64


def test_moments_of_nothing_stay():
    normalizer = ObservationNormalizer((3,))
    nobody = torch.zeros(T, N, dtype=torch.bool)
    merge_moments(normalizer, torch.full((T, N, 3), 7.0), nobody)
    assert normalizer.count == 0
    assert (normalizer.variance == 1.0).all()
    merge_moments(normalizer, torch.from_numpy(rollouts()[0]))
    before = {name: value.clone() for name, value in normalizer.state_dict().items()}
    merge_moments(normalizer, torch.full((T, N, 3), 7.0), nobody)
    for name, value in before.items():
        assert torch.equal(normalizer.state_dict()[name], value)


def test_bad_samples_are_not_merged_where_they_are_known_to_be_bad():
    normalizer, other = ObservationNormalizer((3,)), ObservationNormalizer((3,))
    first, second = (torch.from_numpy(obs) for obs in rollouts()[:2])
    everyone = torch.ones(T, N, dtype=torch.bool)
    merge_moments(normalizer, first)
    merge_moments(other, first, None, torch.tensor(True))
    spoilt = second.clone()
    spoilt[3, 2, 1] = torch.inf
    for valid in (None, everyone):
        merge_moments(other, spoilt, valid, torch.tensor(False))
    for name, value in normalizer.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_what_is_merged_keeps_its_memory_and_its_digits():
    normalizer = ObservationNormalizer((1,))
    addresses = [value.data_ptr() for value in normalizer.state_dict().values()]
    merge_moments(normalizer, torch.tensor([[[1e6]], [[1e6 + 1.0]]]))
    merge_moments(normalizer, torch.tensor([[[1e6]], [[1e6 + 1.0]]]))
    assert normalizer.variance.item() == 0.25
    assert [value.data_ptr() for value in normalizer.state_dict().values()] == addresses  # a captured graph writes there


def test_what_is_not_valid_may_be_anything():
    samples, valid = torch.randn(5, 3, 2), torch.rand(5, 3) < 0.5
    valid[0, 0] = True
    normalizer, expected = ObservationNormalizer((2,)), ObservationNormalizer((2,))
    merge_moments(expected, torch.where(valid.unsqueeze(-1), samples, 0.0), valid)
    merge_moments(normalizer, torch.where(valid.unsqueeze(-1), samples, torch.nan), valid)
    torch.testing.assert_close(normalizer.mean, expected.mean)
    torch.testing.assert_close(normalizer.m2, expected.m2)
    assert normalizer.mean.isfinite().all()
