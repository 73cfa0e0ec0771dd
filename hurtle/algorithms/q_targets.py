"""The arithmetic of value-based learning on tensors: projections, quantile losses, value rescaling. Knows no network.

Each function has a plain NumPy reference in tests/algorithms/test_q_targets.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

RESCALING_EPS = 1e-3
"""Keeps value rescaling invertible (Pohlen et al., 2018)."""


def project(probabilities: Tensor, rewards: Tensor, discounts: Tensor, support: Tensor) -> Tensor:
    """The distribution of r + γ Z on the atoms of Z (C51, Bellemare et al., 2017).

    Args:
        probabilities: Of Z's atoms, [B, K].
        rewards: [B]
        discounts: [B]
        support: The atoms' values, evenly spaced, [K].

    Returns:
        Probabilities [B, K]; what falls between two atoms is shared by them, what falls outside goes to the last one.
    """
    moved = (rewards.unsqueeze(-1) + discounts.unsqueeze(-1) * support).clamp(support[0], support[-1])
    return (_shared_by_distance if moved.is_cuda else _shared_by_place)(probabilities, moved, support)


def _shared_by_place(probabilities: Tensor, moved: Tensor, support: Tensor) -> Tensor:
    """Share what was moved between the atoms below and above; adds in no particular order on a GPU."""
    last = len(support) - 1
    place = ((moved - support[0]) * (last / (support[-1] - support[0]))).clamp(max=last)
    below = place.nan_to_num(0.0).long()  # NaN stays in the share, and reaches the loss
    share = place - below
    found = torch.zeros_like(moved).scatter_add_(-1, below, probabilities * (1.0 - share))
    return found.scatter_add_(-1, (below + 1).clamp(max=last), probabilities * share)


def _shared_by_distance(probabilities: Tensor, moved: Tensor, support: Tensor) -> Tensor:
    """The same with K² numbers, for GPUs: an atom gets the share 1 − distance of what is less than one spacing away."""
    spacing = (support[-1] - support[0]) / (len(support) - 1)
    distance = (moved.unsqueeze(-2) - support.unsqueeze(-1)).abs() / spacing  # [B, K, K]
    return ((1.0 - distance).clamp_min(0.0) * probabilities.unsqueeze(-2)).sum(-1)


def lowest(probabilities: Tensor, support: Tensor) -> Tensor:
    """Of several critics' distributions the one with the lowest mean, for each transition: [E, B, K] → [B, K]."""
    chosen = (probabilities * support).sum(-1).argmin(0)
    return probabilities.gather(0, chosen.view(1, -1, 1).expand(1, -1, len(support))).squeeze(0)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """−Σ target log softmax(logits), over the last axis: [..., K] → [...]."""
    return -(target * logits.log_softmax(-1)).sum(-1)


def quantile_huber(quantiles: Tensor, targets: Tensor) -> Tensor:
    """The quantile Huber loss (QR-DQN, Dabney et al., 2018).

    Args:
        quantiles: At the midpoints of N equal parts of probability, [B, N].
        targets: Samples of what they should describe, [B, M].

    Returns:
        Sum over the quantiles of the mean over the targets, [B].
    """
    count = quantiles.shape[-1]
    midpoints = (torch.arange(count, device=quantiles.device) + 0.5) / count
    errors = targets.unsqueeze(-2) - quantiles.unsqueeze(-1)  # [B, N, M]
    huber = functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")
    share = (midpoints.unsqueeze(-1) - (errors.detach() < 0).float()).abs()
    return (share * huber).mean(-1).sum(-1)


def rescaled(values: Tensor) -> Tensor:
    """Values compressed to about their square root: sign(x) (√(|x| + 1) − 1) + ε x."""
    return values.sign() * ((values.abs() + 1.0).sqrt() - 1.0) + RESCALING_EPS * values


def unscaled(values: Tensor) -> Tensor:
    """The inverse of `rescaled`."""
    eps = RESCALING_EPS
    root = (1.0 + 4.0 * eps * (values.abs() + 1.0 + eps)).sqrt()
    return values.sign() * (((root - 1.0) / (2.0 * eps)) ** 2 - 1.0)


def n_step_targets(rewards: Tensor, values: Tensor, terminated: Tensor, valid: Tensor, gamma: float, num_steps: int) -> Tensor:
    """Discounted sums of up to n rewards and the value of what follows, within sequences.

    A sum ends at a termination, at the final observation of a truncated episode, which is a slot that is not valid, or at the
    sequence's last slot, whose target is its own value.

    Args:
        rewards: [T, B]
        values: Of each slot's observation, [T, B].
        terminated: [T, B]
        valid: Slots with a step, [T, B].
        gamma: Discount.
        num_steps: n.

    Returns:
        [T, B]
    """
    targets = values
    for _ in range(num_steps):
        following = rewards[:-1] + gamma * torch.where(terminated[:-1], 0.0, targets[1:])
        targets = torch.cat([torch.where(valid[:-1], following, values[:-1]), values[-1:]])
    return targets


def has_targets(terminated: Tensor, truncated: Tensor, valid: Tensor, num_steps: int) -> Tensor:
    """Which slots' targets `n_step_targets` can know, [T, B].

    Not the last slot's, and not of slots whose sum reaches a truncation that the start of another episode follows at once,
    without a slot for the final observation.
    """
    known = torch.ones_like(valid)
    known[-1] = False
    lost = truncated[:-1] & ~terminated[:-1] & valid[1:]
    reached = torch.cat([lost, torch.zeros_like(lost[:1])])
    for _ in range(num_steps - 1):
        reached = reached | torch.cat([reached[1:] & ~(terminated | truncated)[:-1], reached[-1:]])
    return known & ~reached


def critic_loss(values: Tensor, target: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The squared error of several critics toward one target.

    Args:
        values: [E, B]
        target: [B]
        weights: Importance weights, [B].

    Returns:
        The loss, the TD errors [B] (means over the critics), and loss, mean value and mean |TD error| for reports.
    """
    loss = (weights * (values - target).square()).mean(1).sum()
    errors = (target - values).detach().mean(0)
    return loss, errors, torch.stack([loss.detach(), values.detach().mean(), errors.abs().mean()])
