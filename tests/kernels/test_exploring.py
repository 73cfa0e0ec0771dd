"""The compiled samplers of off-policy actors against `EpsilonGreedy` and `ExploringTanh`."""

import numpy as np
import pytest
import torch

from hurtle.kernels.cpu.policy_table import EPSILON_GREEDY, SQUASHED_GAUSSIAN
from hurtle.kernels.loader import load_kernels
from hurtle.policies.distributions import EpsilonGreedy, ExploringTanh, masked

ROWS = 40


def sampled(kind, nvec, outputs, numbers, uniforms, masks=None):
    heads = load_kernels().heads
    ints, floats = np.zeros(ROWS, np.int64), np.zeros(ROWS * int(nvec[0]), np.float32)
    log_probs, has_masks = np.zeros(ROWS, np.float32), masks is not None
    legal = np.zeros(1, np.bool_) if masks is None else masks.numpy().ravel()
    heads.sample_rows(
        kind, np.array(nvec, np.int64), outputs.numpy().ravel(), 0, outputs.shape[1], ROWS, np.array(numbers, np.float32), 0,
        uniforms.numpy().ravel(), legal, 0, int(has_masks), ints, 0, floats, 0, log_probs, 0,
        np.zeros(heads.scratch_size(kind, np.array(nvec)), np.float32),
    )  # fmt: skip
    return ints, floats.reshape(ROWS, -1), log_probs


@pytest.mark.parametrize("has_masks", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_greedy(epsilon, has_masks):
    rng = torch.Generator().manual_seed(0)
    values, uniforms = torch.randn((ROWS, 6), generator=rng), torch.rand((ROWS, 1), generator=rng)
    masks = torch.rand((ROWS, 6), generator=rng) < 0.5
    masks[:, 2] = True
    masks[0] = False  # nothing is legal: everything is
    reference = EpsilonGreedy(values, epsilon)
    reference = masked(reference, masks) if has_masks else reference
    found, _, log_probs = sampled(EPSILON_GREEDY, [6], values, [epsilon], uniforms, masks if has_masks else None)
    assert found.tolist() == reference.sample(uniforms).tolist()
    assert np.isfinite(log_probs).all()
    if has_masks:
        assert all(masks[q, found[q]] for q in range(1, ROWS))
    assert epsilon != 0.0 or found.tolist() == reference.mode().tolist()


@pytest.mark.parametrize("random", [0.0, 1.0])
@pytest.mark.parametrize("own_noise", [True, False])
def test_tanh_actions(own_noise, random):
    rng = torch.Generator().manual_seed(1)
    outputs = 2 * torch.randn((ROWS, 4 if own_noise else 2), generator=rng)
    uniforms = torch.rand((ROWS, 4), generator=rng)
    from hurtle.policies.off_policy_actors import LOG_STD_RANGE, bounded_log_std

    noise = torch.tensor([0.1, 0.6])
    log_std = bounded_log_std(outputs[:, 2:]) if own_noise else noise.log()
    reference = ExploringTanh(outputs[:, :2], log_std, torch.tensor(random), noise_after=not own_noise)
    numbers = [random, float(own_noise), *LOG_STD_RANGE, *noise.tolist()]
    _, found, log_probs = sampled(SQUASHED_GAUSSIAN, [2], outputs, numbers, uniforms)
    expected = reference.sample(uniforms).numpy()
    np.testing.assert_allclose(np.tanh(found), np.tanh(expected), atol=2e-6)
    np.testing.assert_allclose(found, expected, atol=2e-3, rtol=1e-3)
    assert (log_probs == 0).all()


def test_what_is_not_finite_is_noticed():
    outputs = torch.zeros(ROWS, 4)
    outputs[5, 1] = torch.nan
    *_, log_probs = sampled(SQUASHED_GAUSSIAN, [2], outputs, [0, 1, -5, 2, 0, 0], torch.full((ROWS, 4), 0.5))
    assert np.flatnonzero(~np.isfinite(log_probs)).tolist() == [5]
    *_, log_probs = sampled(EPSILON_GREEDY, [4], outputs, [0.1], torch.full((ROWS, 1), 0.5))
    assert np.flatnonzero(~np.isfinite(log_probs)).tolist() == [5]
