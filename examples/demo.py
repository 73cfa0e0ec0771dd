"""What `make demo` shows: CartPole trained until it is solved, with the dashboard.

python examples/demo.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import hurtle

SOLVED = 475
"""The mean return of 100 episodes from which CartPole counts as solved; 500 is the best there is."""


def main() -> int:
    """Train, then say how well it went and what to try next; returns the exit code."""
    print("Training a policy to balance a pole on a cart. Ctrl-C stops it and keeps what it has learned.\n", flush=True)
    run = hurtle.train(
        "cartpole",
        name="demo",
        stop_at_return=SOLVED,
        total_steps=200_000,
        num_envs=32,
        num_epochs=10,
        learning_rate=2e-3,
        trackers=(),
    )
    program = Path(sys.executable).with_name("hurtle")
    hurtle_verb = program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program
    if run.evaluation is None:
        print(f"\nGo on with it: {hurtle_verb} train --resume {run.path}")
        return 0
    score = run.evaluation.mean
    print(f"\n{'Solved' if score >= SOLVED else 'Not solved'}: a mean return of {score:.0f}; 500 is the best there is.")
    print("Try next:")
    for words, why in {
        f"watch {run.path}": "see it balance",
        "train cartpole --env-parameters gravity=1.6": "on the Moon",
        "train pendulum": "continuous actions",
        "train --help": "every setting",
        "sanity": "five tiny envs, each of which finds one kind of bug",
    }.items():
        print(f"  {f'{hurtle_verb} {words}':<62}  # {why}")
    return 0 if score >= SOLVED else 1


if __name__ == "__main__":
    sys.exit(main())
