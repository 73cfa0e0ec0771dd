"""How fast GAE and V-trace are, beside rlox on the same numbers in the same run.

python benchmarks/advantages.py            # saves benchmarks/results/advantages.md and .json
python benchmarks/advantages.py --quick    # see that it runs: few short rounds, nothing is saved

Each is given its own layout, so that nobody pays for a transposition: [steps, envs] here, [envs, steps] there. rlox has no
truncation, so that no step truncates. What both computed is compared before anything is timed.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from record import Job, save, table
from vector_jobs import Makers, Turns, make_jobs

from hurtle.kernels.gae import gae
from hurtle.kernels.vtrace import vtrace

SHAPES = ((128, 64), (2048, 8), (128, 4096))
GAMMA, GAE_LAMBDA = 0.99, 0.95
GOAL = 2.5
"""How many times faster than rlox GAE is meant to be at the first shape."""
CALLS = 5
"""Calls between two looks at the clock."""

Pair = tuple[np.ndarray, np.ndarray]


@dataclass
class Arrays:
    """One rollout of random numbers, [T, N]."""

    log_ratios: np.ndarray
    rewards: np.ndarray
    values: np.ndarray
    terminated: np.ndarray
    last_values: np.ndarray

    @classmethod
    def random(cls, steps: int, envs: int) -> Arrays:
        """Of this size."""
        rng = np.random.default_rng(0)
        log_ratios, rewards, values = rng.normal(size=(3, steps, envs)).astype(np.float32)
        terminated = rng.random((steps, envs)) < 0.01
        return cls(0.1 * log_ratios, rewards, values, terminated, rng.normal(size=envs).astype(np.float32))

    def env_major(self) -> list[np.ndarray]:
        """Log-ratios, rewards, values and ends as rlox has them, float32 [N, T]."""
        columns = (self.log_ratios, self.rewards, self.values, self.terminated)
        return [np.ascontiguousarray(column.T, np.float32) for column in columns]


# What is timed: calls that return (advantages, returns) or (targets, advantages) --------------------------------------


def our_gae(arrays: Arrays) -> Callable[[], Pair]:
    """As a rollout calls it: into memory that is there, and with the returns, which rlox also gives."""
    never, final = np.zeros_like(arrays.terminated), np.zeros_like(arrays.values)
    columns = (arrays.rewards, arrays.values, arrays.terminated, never, final, arrays.last_values)
    advantages, returns = np.empty_like(arrays.values), np.empty_like(arrays.values)

    def call() -> Pair:
        gae(*columns, GAMMA, GAE_LAMBDA, out=advantages)
        return advantages, np.add(advantages, arrays.values, out=returns)

    return call


def rlox_gae(arrays: Arrays) -> Callable[[], Pair]:
    from rlox import compute_gae_batched_f32

    steps = len(arrays.rewards)
    rewards, values, ends = (column.reshape(-1) for column in arrays.env_major()[1:])
    return lambda: compute_gae_batched_f32(rewards, values, ends, arrays.last_values, steps, GAMMA, GAE_LAMBDA)


def our_vtrace(arrays: Arrays) -> Callable[[], Pair]:
    never, final = np.zeros_like(arrays.terminated), np.zeros_like(arrays.values)
    columns = (arrays.log_ratios, arrays.rewards, arrays.values, arrays.terminated, never, final, arrays.last_values)
    return lambda: vtrace(*columns, GAMMA)


def rlox_vtrace(arrays: Arrays) -> Callable[[], Pair]:
    """It takes one env at a time."""
    from rlox import compute_vtrace

    envs = list(zip(*arrays.env_major(), arrays.last_values.tolist(), strict=True))

    def call() -> Pair:
        targets, advantages = zip(*(compute_vtrace(*env, GAMMA) for env in envs), strict=True)
        return targets, advantages

    return call


KERNELS = {"GAE": (our_gae, rlox_gae), "V-trace": (our_vtrace, rlox_vtrace)}


# Measuring ------------------------------------------------------------------------------------------------------------


def check(ours: Callable[[], Pair], theirs: Callable[[], Pair]) -> None:
    """Both compute the same, or a comparison of their times would mean nothing."""
    for mine, other in zip(ours(), theirs(), strict=True):
        np.testing.assert_allclose(mine, np.asarray(other).reshape(mine.T.shape).T, rtol=1e-4, atol=1e-4)


def measure(shapes: tuple[tuple[int, int], ...], seconds: float, rounds: int) -> tuple[dict[str, Any], str]:
    results: dict[str, Any] = {}
    parts = []
    for kernel, (ours, theirs) in KERNELS.items():
        rows = []
        for steps, envs in shapes:
            arrays = Arrays.random(steps, envs)
            makers: Makers = {
                "rlox": lambda _, arrays=arrays, theirs=theirs: _repeated(theirs(arrays)),
                "hurtle": lambda _, arrays=arrays, ours=ours: _repeated(ours(arrays)),
            }
            made, left_out = make_jobs(makers, contextlib.ExitStack())
            if "rlox" in made:
                check(ours(arrays), theirs(arrays))
            turns = Turns(made, seconds, rounds)
            shape = f"{steps} × {envs}"
            results[f"{kernel}, {shape}"] = {"calls_per_second": turns.rates, "left_out": left_out}
            times = [f"{turns.micros(name):.1f} µs" if name in made else "–" for name in makers]
            ratio = f"{turns.ratio('hurtle', 'rlox'):.2f}x" if "rlox" in made else "–"
            rows.append([shape, *times, ratio])
            print(kernel, rows[-1], flush=True)
        parts.append(f"### {kernel}\n\n" + table(["steps × envs", "rlox", "hurtle", "hurtle / rlox"], rows))
    steps, envs = shapes[0]
    parts.append(
        f"Medians over rounds; ratios are of speeds within a round. Goal for GAE at {steps} × {envs}: ≥ {GOAL}x. GAE gives "
        "advantages and returns; rlox's V-trace takes one env at a time and is called once for each."
    )
    return results, "\n\n".join(parts)


def _repeated(call: Callable[[], Any]) -> Job:
    def job() -> int:
        for _ in range(CALLS):
            call()
        return CALLS

    return job


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="see that it runs: few short rounds, nothing is saved")
    chosen = parser.parse_args(arguments)
    results, text = measure(((16, 4),), 0.0, 1) if chosen.quick else measure(SHAPES, 0.1, 15)
    print(f"\n{text}")
    if not chosen.quick:
        save("advantages", results, text)


if __name__ == "__main__":
    main()
