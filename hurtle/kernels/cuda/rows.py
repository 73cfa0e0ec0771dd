"""The CUDA kernels of device_rows.py: one thread per row, launched on torch's current stream. Needs a GPU to import."""

from __future__ import annotations

from typing import Any

from hurtle.kernels import device_rows as rows
from hurtle.native.cuda_support import import_cuda

cuda = import_cuda()
entry = cuda.jit(cache=True)
BLOCK_THREADS = 128

uniform_row = cuda.jit(device=True)(rows.uniform_row.py_func)
choose_row = cuda.jit(device=True)(rows.choose_row.py_func)
gauss_row = cuda.jit(device=True)(rows.gauss_row.py_func)
outcome_row = cuda.jit(device=True)(rows.outcome_row.py_func)
keep_row = cuda.jit(device=True)(rows.keep_row.py_func)
shuffle_row = cuda.jit(device=True)(rows.shuffle_row.py_func)
return_row = cuda.jit(device=True)(rows.return_row.py_func)


@entry
def uniform_rows(count, t, draw, out):
    """`uniform_row` of all rows."""
    n = cuda.grid(1)
    if n < count:
        uniform_row(n, t, draw, out)


@entry
def choose_rows(count, t, draw, logits, mask, has_mask, nvec, start, actions, log_probs, env_actions):
    """`choose_row` of all rows."""
    n = cuda.grid(1)
    if n < count:
        choose_row(n, t, draw, logits, mask, has_mask, nvec, start, actions, log_probs, env_actions)


@entry
def gauss_rows(count, t, draw, mean, log_std, low, high, actions, log_probs, env_actions):
    """`gauss_row` of all rows."""
    n = cuda.grid(1)
    if n < count:
        gauss_row(n, t, draw, mean, log_std, low, high, actions, log_probs, env_actions)


@entry
def outcome_rows(count, t, agents, step, out, episodes):
    """`outcome_row` of all rows."""
    n = cuda.grid(1)
    if n < count:
        outcome_row(n, t, agents, step, out, episodes)


@entry
def keep_rows(count, t, final_steps, state, out):
    """`keep_row` of all rows."""
    n = cuda.grid(1)
    if n < count:
        keep_row(n, t, final_steps, state, out)


@entry
def shuffle_rows(count, size, key, out):
    """`shuffle_row` of all rows."""
    n = cuda.grid(1)
    if n < count:
        shuffle_row(n, size, key, out)


@entry
def return_rows(count, rewards, ended, valid, gamma, returns, out):
    """`return_row` of all rows."""
    n = cuda.grid(1)
    if n < count:
        return_row(n, rewards, ended, valid, gamma, returns, out)


def launch(kernel: Any, count: int, stream: Any, *arguments: Any) -> None:
    """Run a kernel with one thread per row."""
    kernel[-(-count // BLOCK_THREADS), BLOCK_THREADS, stream](count, *arguments)
