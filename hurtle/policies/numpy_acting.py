"""A torch policy on NumPy arrays: `see` prepares observations, `choose` also picks the env's actions.

observations [B, …] → normalized, on the policy's device → distribution → mode or sample → env actions [B, …]. Knows no env.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hurtle.buffers.rollout import torch_dtype
from hurtle.policies.policy import Policy


def see(policy: Policy, obs: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Observations [B, …] as the policy sees them: normalized if it normalizes, else in the dtype that rollouts store."""
    seen = torch.as_tensor(obs, device=device)
    if policy.normalizer is not None:
        return policy.normalizer.normalize(seen)
    return seen.to(torch_dtype(policy.observation_space.dtype))


@torch.inference_mode()
def choose(
    policy: Policy,
    rows: np.ndarray,
    state: tuple[Tensor, ...],
    mask: np.ndarray | None,
    starts: np.ndarray | None,
    drawn: np.ndarray | None,
    device: torch.device,
) -> tuple[np.ndarray, tuple[Tensor, ...]]:
    """The env's actions, and the next recurrent state.

    Args:
        policy: The policy, on `device`.
        rows: Observations [B, …] as the env returned them.
        state: The recurrent state of each row; () without recurrence.
        mask: Legal actions, bool [B, n], or None.
        starts: Rows that begin an episode and have their state cleared, bool [B], or None.
        drawn: Uniforms [B, policy.num_uniforms] to sample with; None takes the most likely action.
        device: The policy's device.
    """

    def tensor(array: np.ndarray | None) -> Tensor | None:
        return None if array is None else torch.as_tensor(array, device=device)

    distribution, _, state = policy(see(policy, rows, device), state, tensor(mask), tensor(starts))
    raw = distribution.mode() if drawn is None else distribution.sample(tensor(drawn))
    return policy.head.env_actions(raw.cpu().numpy()), state
