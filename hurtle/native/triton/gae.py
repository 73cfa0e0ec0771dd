"""Generalized advantage estimation as a scan: blocks of steps are read at once, so that bandwidth is the bound, not latency.

rewards, values, flags, bootstrap values [T, N] → advantages, returns [T, N]. `native.gae` says what is computed; steps that do
not count are left to the kernel that goes step by step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_STEPS, BLOCK_COLUMNS = 32, 64


@triton.jit
def _after(factor, term, next_factor, next_term):
    """First one step of `x = term + factor * x`, then the next."""
    return factor * next_factor, next_term + next_factor * term


@triton.jit
def _gae_kernel(
    rewards, values, terminated, truncated, final_values, last_values, advantages, returns, T, N, gamma, decay,
    STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < N
    steps = tl.arange(0, STEPS)
    carried = tl.zeros([COLUMNS], tl.float32)
    last = tl.load(last_values + column, mask=there, other=0.0)
    for block in range(tl.cdiv(T, STEPS)):
        step = T - (block + 1) * STEPS + steps  # below 0 in the last block, the first in time
        at = step.to(tl.int64)[:, None] * N + column[None, :]
        real = (step >= 0)[:, None] & there[None, :]
        value = tl.load(values + at, mask=real, other=0.0)
        reward = tl.load(rewards + at, mask=real, other=0.0)
        is_over = tl.load(terminated + at, mask=real, other=0) != 0
        is_cut = (tl.load(truncated + at, mask=real, other=0) != 0) & ~is_over
        is_last = (step == T - 1)[:, None]
        after = tl.load(values + at + N, mask=real & ~is_last & ~is_over & ~is_cut, other=0.0)
        after = tl.where(is_last & ~is_over & ~is_cut, last[None, :], after)
        after += tl.load(final_values + at, mask=real & is_cut, other=0.0)
        term = reward + gamma * after - value
        factor = tl.where(is_over | is_cut, 0.0, decay)
        factor, term = tl.associative_scan((factor, term), 0, _after, reverse=True)
        advantage = term + factor * carried[None, :]
        tl.store(advantages + at, advantage, mask=real)
        tl.store(returns + at, advantage + value, mask=real)
        carried = tl.sum(tl.where(steps[:, None] == 0, advantage, 0.0), 0)


def gae_scan(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_values: Tensor,
    last_values: Tensor,
    gamma: float,
    gae_lambda: float,
    advantages: Tensor,
    returns: Tensor,
) -> None:
    """Fill `advantages` and `returns`, all contiguous [T, N] and on one GPU; see `gae.gae_cuda`, which checks them."""
    steps, columns = rewards.shape
    flags: Any = (terminated.view(torch.uint8), truncated.view(torch.uint8))
    _gae_kernel[(triton.cdiv(columns, BLOCK_COLUMNS),)](
        rewards, values, *flags, final_values, last_values, advantages, returns, steps, columns, gamma, gamma * gae_lambda,
        STEPS=BLOCK_STEPS, COLUMNS=BLOCK_COLUMNS, num_warps=4,
    )  # fmt: skip
