"""V-trace (Espeholt et al., 2018): value targets and advantages for actions of an older policy, beside the reference.

log-probability ratios + what `gae` takes [T, N] → targets, advantages [T, N], each column independently. Knows no policy.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hurtle.kernels.gae import as_column, checked_columns
from hurtle.kernels.loader import load_cuda_kernels, load_kernels

f4 = np.float32


def vtrace(
    log_ratios: Any,
    rewards: Any,
    values: Any,
    terminated: Any,
    truncated: Any,
    final_values: Any,
    last_values: Any,
    gamma: float,
    gae_lambda: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    valid: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Value targets and policy-gradient advantages, corrected for policy changes since the actions were chosen.

    With log-ratios of 0 and `gae_lambda=1`, the advantages are those of `gae`, and the targets are advantages plus values.

    Args:
        log_ratios: log-probability of each action now, minus that when it was chosen. [T, N]
        rewards: As `gae` takes them, like all arrays below.
        values: V of the observation that each action was chosen from. [T, N]
        terminated: The episode ended in this step. [T, N]
        truncated: The episode was cut off in this step: bootstrap from `final_values`. [T, N]
        final_values: V of the observation before the reset; read only where a step truncates. [T, N]
        last_values: V of the observation after the last step. [N]
        gamma: Discount.
        gae_lambda: Scales the traces: how far a temporal difference reaches back.
        rho_clip: Largest weight of a step's own temporal difference; it decides which policy's values are learned.
        c_clip: Largest weight of a trace before `gae_lambda`; it decides how fast they are learned.
        valid: False for steps to ignore: such a step has advantage 0 and its value as the target. [T, N]

    Returns:
        Targets and advantages. [T, N], [T, N]

    Example:
        >>> ones, never = np.ones((2, 1), np.float32), np.zeros((2, 1), bool)
        >>> targets, advantages = vtrace(0 * ones, ones, ones, never, never, ones, ones[0], gamma=0.5)
        >>> targets.ravel().tolist(), advantages.ravel().tolist()
        ([1.75, 1.5], [0.75, 0.5])
    """
    kernel, factors = _compiled(valid is not None), (gamma, gamma * gae_lambda, rho_clip, c_clip)
    targets, advantages = np.empty_like(rewards), np.empty_like(rewards)
    try:
        fits = kernel(
            log_ratios, rewards, values, terminated, truncated, final_values, last_values, *factors, valid, targets, advantages
        )
    except TypeError:  # other dtypes or layouts
        fits = False
    if not fits:
        *columns, valid = checked_columns(rewards, values, terminated, truncated, final_values, last_values, valid)
        log_ratios = as_column("log_ratios", log_ratios, columns[0].shape, np.float32)
        targets, advantages = np.empty_like(columns[0]), np.empty_like(columns[0])
        kernel(log_ratios, *columns, *map(float, factors), valid, targets, advantages)
    return targets, advantages


def vtrace_reference(
    log_ratios: Any,
    rewards: Any,
    values: Any,
    terminated: Any,
    truncated: Any,
    final_values: Any,
    last_values: Any,
    gamma: float,
    gae_lambda: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    valid: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The reference for `vtrace`; float64 inside. cpu/advantages.py and cuda/columns.py repeat it."""
    steps, columns = np.shape(rewards)
    targets, advantages = np.empty((2, steps, columns), np.float32)
    ratios = np.exp(np.asarray(log_ratios, np.float64))
    for n in range(columns):
        next_value = next_target = float(last_values[n])
        for t in reversed(range(steps)):
            reward, value = float(rewards[t, n]), float(values[t, n])
            if valid is not None and not valid[t, n]:
                targets[t, n], advantages[t, n] = value, 0.0
                continue
            if terminated[t, n]:
                next_value = next_target = 0.0
            elif truncated[t, n]:
                next_value = next_target = float(final_values[t, n])
            rho, c = np.minimum(rho_clip, ratios[t, n]), gae_lambda * np.minimum(c_clip, ratios[t, n])
            delta = rho * (reward + gamma * next_value - value)
            target = value + delta + gamma * c * (next_target - next_value)
            targets[t, n] = target
            advantages[t, n] = rho * (reward + gamma * next_target - value)
            next_value, next_target = value, target
    return targets, advantages


def vtrace_cuda(
    log_ratios: Any,
    rewards: Any,
    values: Any,
    terminated: Any,
    truncated: Any,
    final_values: Any,
    last_values: Any,
    gamma: float,
    gae_lambda: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    valid: Any = None,
) -> tuple[Any, Any]:
    """`vtrace` of torch tensors on a GPU, on torch's current stream, without a copy. It can be captured in a CUDA graph.

    Tensors must be float32 or bool and contiguous.

    Raises:
        DeviceError: There is no GPU, or numba-cuda is missing.
    """
    import torch

    kernels = load_cuda_kernels().columns
    columns = rewards, values, terminated, truncated, final_values, last_values
    kernels.check_tensors(*columns, valid, log_ratios=log_ratios)
    targets, advantages = torch.empty_like(rewards), torch.empty_like(rewards)
    factors = f4(gamma), f4(gamma * gae_lambda), f4(rho_clip), f4(c_clip)
    masked, valid = valid is not None, terminated if valid is None else valid
    kernels.launch(kernels.vtrace_kernel, log_ratios, *columns, *factors, valid, masked, targets, advantages)
    return targets, advantages


@cache
def _compiled(masked: bool) -> Any:
    """The kernel for arrays that need no conversion."""
    return load_kernels().advantages.compiled_vtrace(masked)
