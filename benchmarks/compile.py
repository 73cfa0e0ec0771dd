"""Does `compile=True` pay? Steps per second of whole trainings with torch.compile and without, in turns.

python benchmarks/compile.py                   # CPU: CartPole with a small and a large network, Breakout with a CNN
python benchmarks/compile.py --device cuda     # networks on a GPU
python benchmarks/compile.py --quick           # see that it runs: few updates, nothing is saved

Ours against ours: eager is the peer. What compiling costs at the start is told apart, and also how many steps make up for it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from record import save, short, table

WARM_UPDATES = 4
"""Left out of the rates: the first updates compile, those after them compile again for shapes and schedules that change."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "CartPole, 8 × 128 steps, MLP 64 × 64": (
        "cartpole",
        {"num_envs": 8, "num_steps": 128, "minibatch_size": 256, "hidden_sizes": (64, 64)},
    ),
    "CartPole, 64 × 128 steps, MLP 512 × 512": (
        "cartpole",
        {"num_envs": 64, "num_steps": 128, "minibatch_size": 1024, "hidden_sizes": (512, 512)},
    ),
    "Breakout, 64 × 32 steps, GridCNN": (
        "breakout",
        {"num_envs": 64, "num_steps": 32, "minibatch_size": 512, "policy": "grid_cnn"},
    ),
}


@dataclass
class Timing:
    """The updates of several trainings of one kind."""

    seconds: list[float] = field(default_factory=list)
    """Of every update after the warm-up."""
    starts: list[float] = field(default_factory=list)
    """Per training: the warm-up, beyond what so many updates take later."""
    steps: int = 0
    """Of one update."""

    @property
    def rate(self) -> float:
        """Steps per second of the median update: collecting and learning."""
        return self.steps / statistics.median(self.seconds)


def train_once(timing: Timing, env: str, words: dict[str, Any], compiled: bool, updates: int, device: str) -> None:
    """Train for some updates and take note of how long each took."""
    import torch

    import hurtle

    torch._dynamo.reset()  # each training compiles anew
    marks = [0.0]

    def mark(trainer: Any) -> None:
        if device != "cpu":
            torch.cuda.synchronize()
        marks.append(trainer.seconds)

    steps = words["num_envs"] * words["num_steps"]
    with tempfile.TemporaryDirectory() as runs:
        where = {"runs": runs, "progress": "quiet", "trackers": (), "checkpoint_every": 10**12}
        hurtle.train(
            env,
            total_steps=steps * (WARM_UPDATES + updates),
            device=device,
            callbacks=[mark],
            gear="general",
            compile=compiled,
            preset=False,
            eval_episodes=1,
            eval_sampled=True,
            **words,
            **where,
        )
    seconds = [after - before for before, after in pairwise(marks)]
    warm, timed = seconds[:WARM_UPDATES], seconds[WARM_UPDATES:]
    timing.steps = steps
    timing.seconds += timed
    timing.starts.append(max(0.0, sum(warm) - WARM_UPDATES * statistics.median(timed)))


def measure(updates: int, rounds: int, device: str) -> tuple[dict[str, Any], str]:
    """All cases, eager and compiled in turns."""
    results, rows = {}, []
    for case, (env, words) in CASES.items():
        eager, compiled = Timing(), Timing()
        for _ in range(rounds):
            train_once(eager, env, words, False, updates, device)
            train_once(compiled, env, words, True, updates, device)
        results[case] = {"eager": asdict(eager), "compiled": asdict(compiled)}
        saved = 1 / eager.rate - 1 / compiled.rate  # seconds a step
        pays = f"{short(compiled.starts[0] / saved)} steps" if saved > 0 else "never"
        again = f"{statistics.median(compiled.starts[1:]):.1f} s" if rounds > 1 else "–"
        ratio = f"{compiled.rate / eager.rate:.2f}x"
        rows.append([case, short(eager.rate), short(compiled.rate), ratio, f"{compiled.starts[0]:.1f} s", again, pays])
        print(rows[-1], flush=True)
    header = [
        "training",
        "eager, steps/s",
        "compiled, steps/s",
        "compiled / eager",
        "compiling",
        "again, from its cache",
        "pays after",
    ]
    return results, f"### torch.compile, networks on {device}, one torch thread\n\n" + table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the networks (cpu)")
    parser.add_argument("--updates", type=int, default=15, help="timed updates of each training (15)")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each kind, in turns (3)")
    parser.add_argument("--quick", action="store_true", help="see that it runs: few updates, nothing is saved")
    chosen = parser.parse_args()
    updates, rounds = (2, 1) if chosen.quick else (chosen.updates, chosen.rounds)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # empty, so that the first training of each case compiles all
        results, text = measure(updates, rounds, chosen.device)
    print(f"\n{text}")
    if not chosen.quick:
        save("compile" if chosen.device == "cpu" else "compile-cuda", results, text)


if __name__ == "__main__":
    main()
