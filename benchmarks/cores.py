"""How training grows with cores: the native gear with 1, 2, 4, … threads, and the multiply-adds that as many threads can do.

python benchmarks/cores.py            # saves benchmarks/results/cores-N.md and .json, N being the number of cores
python benchmarks/cores.py --quick    # see that it runs: short jobs, nothing is saved
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from typing import Any

from gemm import peak_job
from record import save, short, table

import hurtle
from hurtle.native.thread_tuner import ladder
from hurtle.native.threads import free_cores

SIZES = {"64 × 128": (64, 128, 2048), "1024 × 64": (1024, 64, 8192)}
"""Envs, steps and minibatch of PPO on CartPole, with 64 × 64 networks and 4 epochs."""
STEP_FLOPS = 230_000
"""Multiplications and additions of a step of these: 4 epochs × 8,900 weights × 6, and 18,000 to act."""


def train(size: str, threads: int, seconds: float, rate: float) -> float:
    """Steps per second of a training of about that many seconds."""
    num_envs, num_steps, minibatch_size = SIZES[size]
    with tempfile.TemporaryDirectory() as runs:
        run = hurtle.train(
            "cartpole", gear="native", total_steps=int(rate * seconds) + 1, num_workers=threads, preset=False,
            num_envs=num_envs, num_steps=num_steps, minibatch_size=minibatch_size, num_epochs=4, hidden_sizes=(64, 64),
            eval_episodes=1, eval_sampled=True, checkpoint_every=10**12, progress="quiet", trackers=(), runs=runs,
        )  # fmt: skip
    return run.steps / run.seconds


def peak(threads: int, seconds: float) -> float:
    """Multiplications and additions per second of so many threads whose operands stay in their first-level caches."""
    jobs, done, stopping = [peak_job() for _ in range(threads)], [0] * threads, threading.Event()

    def work(k: int) -> None:
        while not stopping.is_set():
            done[k] += jobs[k]()

    for job in jobs:
        job()
    workers = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    time.sleep(seconds)
    stopping.set()
    for worker in workers:
        worker.join()
    return sum(done) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="see that it runs; nothing is saved")
    chosen = parser.parse_args()
    rounds, seconds, counts = (1, 0.05, [1]) if chosen.quick else (3, 2.0, ladder(free_cores()))
    seen: dict[str, dict[int, list[float]]] = {name: {n: [] for n in counts} for name in ("peak", *SIZES)}
    for number in range(rounds):
        for n in counts:
            seen["peak"][n].append(peak(n, seconds / 4))
            for size in SIZES:
                before = seen[size][n][-1:] or [train(size, n, 0.2, 3e5)]
                seen[size][n].append(train(size, n, seconds, before[0]))
        print(f"round {number + 1} of {rounds}", flush=True)
    middle: dict[str, dict[int, float]] = {
        name: {n: statistics.median(values) for n, values in by.items()} for name, by in seen.items()
    }
    rows: list[list[Any]] = []
    for n in counts:
        cells = [f"{short(middle[size][n])} ({100 * middle[size][n] * STEP_FLOPS / middle['peak'][n]:.0f} %)" for size in SIZES]
        rows.append([str(n), f"{middle['peak'][n] / 1e9:.0f}", *cells])
    text = (
        "# PPO on CartPole, native gear, by threads: steps/s\n\n"
        "In brackets: the part of the peak (GFLOP/s of as many threads, measured in the same rounds) that the networks' "
        "multiplications and additions are; activations, sampling, envs and the optimizer cost time and count for nothing. "
        "Medians over rounds.\n\n" + table(["threads", "peak", *SIZES], rows)
    )
    print("\n" + text)
    if not chosen.quick:
        save(f"cores-{free_cores()}", {"seen": seen}, text)


if __name__ == "__main__":
    main()
