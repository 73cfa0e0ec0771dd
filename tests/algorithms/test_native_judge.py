"""The compiled judge against torch's `evaluate_actions`, for every kind of network and action that learns in compiled code."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from made_rollouts import made

from hurtle.algorithms.native_judge import NativeJudge
from hurtle.algorithms.native_update import NativeUpdate
from hurtle.algorithms.ppo import evaluate_actions
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.buffers.rollout import Done
from hurtle.policies.build import PolicyConfig, build_policy

OBS = spaces.Box(-10, 10, (3,), np.float32)
BOX = spaces.Box(-1, 1, (2,), np.float32)
CASES = {
    "choice": (OBS, spaces.Discrete(3), {}),
    "choices": (OBS, spaces.MultiDiscrete([2, 3]), {}),
    "gaussian": (OBS, BOX, {}),
    "beta": (OBS, BOX, {"distribution": "beta"}),
    "gru": (OBS, spaces.Discrete(3), {"recurrent": "gru"}),
    "lstm": (OBS, BOX, {"recurrent": "lstm"}),
    "cnn": (spaces.Box(0, 1, (10, 10, 4), np.uint8), spaces.Discrete(3), {"policy": "grid_cnn"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("invalid", [0.0, 0.3])
def test_log_probs_and_values_are_torchs(case, invalid):
    obs, actions, settings = CASES[case]
    policy = build_policy(PolicyConfig(hidden_sizes=(8,), **settings), obs, actions)
    judge = NativeJudge(NativeUpdate(policy, PPOConfig()))
    rollout = made(policy, steps=7, rows=5, invalid=invalid, has_masks=case in ("choice", "choices", "gru"), noise=0.3)
    for rows in (torch.arange(5), torch.tensor([3, 1])):
        with torch.no_grad():
            wanted = evaluate_actions(policy, rollout.segments(rows, keep_all=True))
        log_probs, values = judge(rollout, rows)
        torch.testing.assert_close(log_probs, wanted[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values, wanted[2], rtol=1e-4, atol=1e-4)


def test_it_judges_with_the_weights_of_today():
    policy = build_policy(PolicyConfig(hidden_sizes=(8,)), OBS, spaces.Discrete(3))
    judge = NativeJudge(NativeUpdate(policy, PPOConfig()))
    rollout = made(policy)
    rows = torch.arange(rollout.num_rows)
    before, _ = judge(rollout, rows)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    after, _ = judge(rollout, rows)
    assert not torch.allclose(before, after)
    with torch.no_grad():
        wanted, _, _ = evaluate_actions(policy, rollout.segments(rows, keep_all=True))
    torch.testing.assert_close(after, wanted, rtol=1e-4, atol=1e-5)
    assert judge.bootstrap(rollout) == Done.BOOTSTRAP
    with torch.no_grad():
        torch.testing.assert_close(rollout.last_values, policy.value(rollout.last_obs), rtol=1e-4, atol=1e-5)
