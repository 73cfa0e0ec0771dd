"""The scale of rewards against plain loops, its pools and its state."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from hurtle.buffers.rollout import Rollout
from hurtle.collect.return_scale import ReturnScale
from hurtle.policies.build import PolicyConfig, build_policy

POLICY = build_policy(PolicyConfig(hidden_sizes=(2,)), spaces.Box(-1, 1, (1,)), spaces.Discrete(2))
GAMMA = 0.9


def rollouts(mean, columns=None, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(4):
        rollout = Rollout(POLICY, 6, 3)
        rollout.rewards.copy_(torch.from_numpy(rng.normal(mean, 1, (6, 3))))
        rollout.terminated.copy_(torch.from_numpy(rng.random((6, 3)) < 0.15))
        rollout.truncated.copy_(torch.from_numpy(rng.random((6, 3)) < 0.15))
        rollout.valid.copy_(torch.from_numpy(rng.random((6, 3)) < 0.8))
        rollout.all_valid, rollout.columns = False, columns
        yield rollout


def reference(seen, bound, columns=(0, 1, 2)):
    running, returns = np.zeros(3), []
    for rollout in seen:
        for n, row in enumerate(columns):
            for t in range(6):
                if rollout.valid[t, n]:
                    running[row] = GAMMA * running[row] + float(rollout.rewards[t, n])
                    returns.append(running[row])
                    running[row] *= not (rollout.terminated[t, n] or rollout.truncated[t, n])
    return max(np.sqrt(np.var(returns) + 1e-8), np.abs(returns).max() / bound)


def update(scale, rollout):
    scale.update(rollout.rewards, rollout.terminated | rollout.truncated, rollout.valid, rollout.columns)


@pytest.mark.parametrize(("mean", "bound"), [(0.0, 5.0), (-3.0, 1.0)], ids=["by spread", "by the largest"])
def test_the_scale_is_that_of_plain_loops(mean, bound):
    scale = ReturnScale(3, GAMMA, bound)
    for rollout in rollouts(mean):
        before = rollout.rewards.clone()
        update(scale, rollout)
        assert torch.equal(rollout.rewards, before)
    assert float(scale.value) == pytest.approx(reference(rollouts(mean), bound), rel=1e-6)
    is_spread = float(scale.value) > float(scale.largest) / bound * 1.001
    assert is_spread == (mean == 0.0)


def test_columns_of_a_pool_belong_to_rows():
    columns, scale = np.array([2, 0, 2]), ReturnScale(3, GAMMA, 5.0)
    for rollout in rollouts(1.0, columns):
        update(scale, rollout)
    assert float(scale.value) == pytest.approx(reference(rollouts(1.0), 5.0, columns), rel=1e-6)


def test_saved_statistics_continue_and_other_numbers_of_rows_start_anew():
    whole, first, other = ReturnScale(3, GAMMA, 5.0), ReturnScale(3, GAMMA, 5.0), ReturnScale(1, GAMMA, 5.0)
    *given, last = rollouts(-1.0)
    for rollout in given:
        update(whole, rollout)
        update(first, rollout)
    resumed = ReturnScale(3, GAMMA, 5.0)
    for scale in (resumed, other):
        scale.load_state_dict(first.state_dict())
        assert torch.equal(scale.value, whole.value)
        assert float(scale.value) != 1.0
    for scale in (resumed, whole, other):
        update(scale, last)
    assert torch.equal(resumed.value, whole.value)
    assert other.value.isfinite()
