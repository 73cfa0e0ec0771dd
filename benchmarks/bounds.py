"""What bounds checks cost: each native env with and without them, in turns in one run.

python benchmarks/bounds.py            # one CPU core; saves benchmarks/results/bounds-cpu.md and .json
python benchmarks/bounds.py --cuda     # one GPU; saves bounds-cuda.md and .json
python benchmarks/bounds.py --quick    # see that it runs: few short rounds, nothing is saved
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from record import Job, save, short, table
from vector_jobs import Turns

import hurtle
from hurtle.envs.registry import names

LIMIT = 0.90
"""The zoo must keep this part of its speed."""


def play(name: str, num_envs: int, num_steps: int, device: str, unsafe: bool) -> Job:
    """Random play inside compiled code."""
    workers = {"num_workers": 1} if device == "cpu" else {}
    vec = hurtle.make_vec(name, num_envs, device=device, unsafe=unsafe, **workers)  # type: ignore[arg-type]
    vec.reset(seed=0)

    def job() -> int:
        vec.play(num_steps)  # type: ignore[attr-defined]
        return num_envs * num_steps

    return job


def measure(envs: list[str], size: tuple[int, int], device: str, seconds: float, rounds: int) -> tuple[dict[str, Any], str]:
    results: dict[str, Any] = {}
    rows, kept = [], []
    for name in envs:
        jobs = {label: play(name, *size, device, unsafe) for label, unsafe in (("checked", False), ("unsafe", True))}
        turns = Turns(jobs, seconds, rounds)
        results[name] = {"steps_per_second": turns.rates}
        kept.append(turns.ratio("checked", "unsafe"))
        rows.append([name, *(short(turns.rate(label)) for label in jobs), f"{kept[-1]:.2f}x"])
        print(rows[-1], flush=True)
    text = table(["env", "checked", "unsafe", "checked / unsafe"], rows)
    note = (
        f"Steps/s of random play, {size[0]:,} envs on {'one GPU' if device == 'cuda' else 'one core'}; medians over rounds, "
        f"ratios within a round. Median ratio {median(kept):.3f}, lowest {min(kept):.2f}; goal: ≥ {LIMIT}."
    )
    return results, f"{text}\n\n{note}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="on the GPU")
    parser.add_argument("--quick", action="store_true", help="see that it runs: few short rounds, nothing is saved")
    parser.add_argument("--envs", nargs="+", default=names(), help="which; all by default")
    chosen = parser.parse_args(arguments)
    device = "cuda" if chosen.cuda else "cpu"
    if chosen.quick:
        print(measure(["bandit"], (8, 10), device, 0.0, 1)[1])
        return
    results, text = measure(chosen.envs, (65_536, 64) if chosen.cuda else (64, 100), device, 0.1, 15)
    print(f"\n{text}")
    save(f"bounds-{device}", results, text)


if __name__ == "__main__":
    main()
