"""How training grows with learners: the native gear with 1, 2 and 4, each with one thread and the same batch of its own.

python benchmarks/data_parallel.py            # saves benchmarks/results/data-parallel-N.md and .json for N cores
python benchmarks/data_parallel.py --quick    # see that it runs: short jobs of 1 and 2 learners, nothing is saved
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

from record import save, short, table

import hurtle
from hurtle.native.threads import free_cores

SIZES = {"64 × 128": (64, 128, 2048), "256 × 128": (256, 128, 8192)}
"""Envs, steps and minibatch of each learner; PPO on CartPole, with 64 × 64 networks and 4 epochs."""
LEARNERS = (1, 2, 4)


def train(size: str, learners: int, seconds: float, rate: float) -> float:
    """Steps per second of all learners, in a training of about that many seconds at that rate for each."""
    num_envs, num_steps, minibatch_size = SIZES[size]
    with tempfile.TemporaryDirectory() as runs:
        run = hurtle.train(
            "cartpole", gear="native", total_steps=int(learners * rate * seconds) + 1, num_learners=learners, num_workers=1,
            preset=False, num_envs=num_envs, num_steps=num_steps, minibatch_size=minibatch_size, num_epochs=4,
            hidden_sizes=(64, 64), eval_episodes=1, eval_sampled=True, checkpoint_every=10**12, progress="quiet", trackers=(),
            runs=runs,
        )  # fmt: skip
    return run.steps / run.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="see that it runs; nothing is saved")
    chosen = parser.parse_args()
    rounds, seconds = (1, 0.05) if chosen.quick else (5, 5.0)
    counts = [n for n in LEARNERS if n <= (2 if chosen.quick else free_cores())]
    seen: dict[str, dict[int, list[float]]] = {size: {n: [] for n in counts} for size in SIZES}
    for number in range(rounds):
        for size in SIZES:
            for n in counts:  # in turns, so that a noisy neighbour hits all alike
                rate = seen[size][n][-1] / n if seen[size][n] else 1e5
                seen[size][n].append(train(size, n, seconds, rate))
        print(f"round {number + 1} of {rounds}", flush=True)
    middle = {size: {n: statistics.median(values) for n, values in by.items()} for size, by in seen.items()}
    rows: list[list[Any]] = []
    for n in counts:
        shares = {size: middle[size][n] / (n * middle[size][1]) for size in SIZES}
        rows.append([str(n), *(f"{short(middle[size][n])} ({100 * shares[size]:.0f} %)" for size in SIZES)])
    text = (
        "# PPO on CartPole, native gear, by learners: steps/s\n\n"
        "Each learner has one thread and the envs, steps and minibatch of its column. In brackets: the part of as many times "
        "the rate of one learner. Medians over rounds.\n\n" + table(["learners", *SIZES], rows)
    )
    print("\n" + text)
    if not chosen.quick:
        save(f"data-parallel-{free_cores()}", {"seen": seen}, text)


if __name__ == "__main__":
    main()
