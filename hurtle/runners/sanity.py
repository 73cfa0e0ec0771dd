"""`hurtle sanity`: check that training works, on the five Ocean envs, each of which exposes one kind of bug.

env → train (one PPO configuration) → sampled evaluation → PASS at 0.9 of the best return, else what the failure means.
Imports torch only when it trains.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table

from hurtle.envs.registry import native_class
from hurtle.errors import UnknownNameError, did_you_mean
from hurtle.vector.options import check_seed

PASSING = 0.9
"""Fraction of the best return needed to pass."""
EPISODES = 4096
"""Episodes of each evaluation; bandit's rewards are too noisy for fewer."""


class Check(NamedTuple):
    """One env of the suite."""

    total_steps: int
    meaning: str  # what a failure points to


SUITE = {
    "bandit": Check(
        20_000,
        "no learning signal: the sign of the loss or of the advantages, rewards paired with the wrong actions, "
        "or a value bootstrapped across the end of an episode",
    ),
    "memory": Check(
        100_000,
        "recurrence: the state is not carried from step to step, is cleared in the wrong place, or sequences are "
        "replayed in a different order or from a different state than the actor saw",
    ),
    "password": Check(
        60_000,
        "exploration or credit: the policy lost its randomness before the first reward, or rare rewards at the end of an "
        "episode do not reach the steps before",
    ),
    "squared": Check(
        150_000,
        "plumbing: observations are scrambled or out of step with the actions, or rewards are credited to the wrong steps",
    ),
    "stochastic": Check(
        80_000,
        "the policy became deterministic: too little entropy, updates that overshoot, or log-probabilities that are not "
        "those of the sampled actions",
    ),
}


def run_sanity(envs: Sequence[str] = (), seed: int = 0, device: str = "cpu", console: Console | None = None) -> bool:
    """Train on the Ocean suite and show which envs pass; takes one to two minutes on two cores.

    All use one PPO configuration, the preset of the suite; only memory gets a recurrent policy. Scores are mean returns of
    sampled episodes, since no deterministic policy can be good at stochastic.

    Args:
        envs: Any of bandit, memory, password, squared and stochastic; () means all.
        seed: Seed of training and evaluation.
        device: Device of the networks.
        console: Where the table goes; None: standard output.

    Returns:
        Whether all passed.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM arrived during training.
    """
    check_seed(seed)
    check_names(envs)
    console = console or Console()
    chosen = list(envs) or list(SUITE)
    rows: dict[str, tuple[str, ...]] = {name: (_needed(name), "", "", "") for name in chosen}
    failed = []
    with _shown(rows, console) as show, tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            rows[name] = (_needed(name), "", "", "[dim]training …")
            show(name)
            begun = time.perf_counter()
            score = _score(name, seed, device, folder)
            passed = score >= PASSING * _best(name)
            failed += [] if passed else [name]
            verdict = "[green]PASS" if passed else "[bold red]FAIL"
            rows[name] = (_needed(name), f"{score:.3f}", f"{time.perf_counter() - begun:.1f}", verdict)
            show(name)
    for name in failed:
        console.print(f"[bold red]{name}[/bold red]: {SUITE[name].meaning}.", highlight=False)
    if not failed:
        console.print(f"{'All' if len(chosen) > 1 else chosen[0]} passed.", highlight=False)
    return not failed


def check_names(envs: Sequence[str]) -> None:
    """Raise an error for a name that is not in the suite."""
    for name in envs:
        if name not in SUITE:
            raise UnknownNameError(f"No sanity env {name!r}. {did_you_mean(name, SUITE)}")


def _score(name: str, seed: int, device: str, folder: str) -> float:
    """The mean return after training."""
    from hurtle.runners.evaluate import evaluate_run
    from hurtle.runners.training import train

    quiet: dict[str, Any] = {"progress": "quiet", "trackers": (), "runs": folder}
    run = train(name, total_steps=SUITE[name].total_steps, device=device, seed=seed, eval_episodes=1, **quiet)
    if run.stopped_by in ("Ctrl-C", "SIGTERM"):  # an interrupted run is not a failure
        raise KeyboardInterrupt
    return evaluate_run(run.path, EPISODES, sampled=True, seed=seed, num_envs=1024, device=device).mean


def _best(name: str) -> float:
    return float(native_class(name)().best_return)  # type: ignore[attr-defined]


def _needed(name: str) -> str:
    return f"{PASSING * _best(name):.2f}"


@contextmanager
def _shown(rows: dict[str, tuple[str, ...]], console: Console) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the row of an env: in a live table on a terminal, else as a line."""
    if console.is_terminal:
        with Live(_table(rows), console=console, auto_refresh=False) as live:
            yield lambda name: live.update(_table(rows), refresh=True)
        return

    def line(*cells: str) -> None:
        first, *numbers, last = cells
        console.print(f"{first:<12}{''.join(f'{cell:>10}' for cell in numbers)}   {last}", highlight=False)

    line("env", "needed", "score", "seconds", "")
    yield lambda name: line(name, *rows[name])


def _table(rows: dict[str, tuple[str, ...]]) -> Table:
    table = Table("env", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("needed", "score", "seconds"):
        table.add_column(title, justify="right")
    table.add_column("")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table
