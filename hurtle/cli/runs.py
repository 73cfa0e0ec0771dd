"""`hurtle runs`: list runs, filter and sort them, remove them. Imports neither torch nor tyro, so that it comes at once."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError, did_you_mean
from hurtle.experiments.records import SEEDS_FILE, RunRecord, find_runs, runs_in
from hurtle.tracking.formatting import age, count, figure, quantity
from hurtle.tracking.json_text import to_json
from hurtle.tracking.run_state import STATES, hold, is_running

ORDERS: dict[str, Any] = {
    "age": lambda run: run.started,
    "name": lambda run: str(run.path),
    "env": lambda run: (run.env, str(run.path)),
    "algorithm": lambda run: (run.algorithm, str(run.path)),
    "seed": lambda run: run.seed,
    "state": lambda run: (run.state, str(run.path)),
    "steps": lambda run: run.steps,
    "return": lambda run: _last_if_unknown(run.final_return),
    "seconds": lambda run: _last_if_unknown(run.seconds),
}
"""What --sort takes; numbers come with the largest first."""
_RISING = ("name", "env", "algorithm", "seed", "state")
_STYLES = {"running": "cyan", "finished": "green", "stopped": "yellow", "crashed": "red"}
_DESCRIPTION = "List the runs in a folder, newest first; filter, sort and remove them."
_EXAMPLES = """\
examples:
  hurtle runs
  hurtle runs --env cartpole --sort return
  hurtle runs --state crashed --remove
  hurtle runs runs/cartpole-ppo-5-seeds-20260101-120000 --json"""


def run_runs(arguments: list[str]) -> int:
    """Parse the arguments of `hurtle runs` and list or remove runs; returns the exit code."""
    given = _parser().parse_args(arguments)
    for name, value, known in (("--state", given.state, STATES), ("--sort", given.sort, ORDERS)):
        if value is not None and value not in known:
            raise HurtleError(f"{name} {value}: {did_you_mean(value, known)}")
    found = _chosen(given)
    if given.remove:
        return _remove(found, given.yes)
    if given.json:
        print(to_json({"runs": [run.to_dict() for run in found]}, indent=2), end="")
    elif found:
        _show(found)
    else:
        print("No run matches.")
    return 0


def runs() -> None:
    """List, sort and remove runs: hurtle runs --env cartpole."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "hurtle runs",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="*", default=["runs"], metavar="FOLDER", help="folders of runs, or runs (runs)")
    parser.add_argument("--env", metavar="NAME", help="only runs on this env")
    parser.add_argument("--algorithm", metavar="NAME", help="only runs of this algorithm")
    parser.add_argument("--state", metavar="STATE", help=f"only these: {', '.join(STATES)}")
    parser.add_argument("--sort", default="age", metavar="ORDER", help=f"{', '.join(ORDERS)} (age)")
    parser.add_argument("--reverse", action="store_true", help="turn the order around")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--remove", action="store_true", help="remove the runs listed, for good; running ones stay")
    parser.add_argument("--yes", action="store_true", help="remove without asking")
    return parser


def _chosen(given: argparse.Namespace) -> list[RunRecord]:
    """The runs that match, in order; unreadable ones are reported and left out."""
    paths = dict.fromkeys(path for folder in given.folders for path in find_runs(folder))
    found = []
    for path in paths:
        try:
            found.append(RunRecord.read(path))
        except HurtleError as error:
            print(f"hurtle: {error}", file=sys.stderr)
    for name in ("env", "algorithm"):
        wanted, known = getattr(given, name), {getattr(run, name) for run in found}
        if wanted is not None and found and wanted not in known:
            raise HurtleError(f"No run has the {name} {wanted}. {did_you_mean(wanted, known)}")
    wanted = {name: value for name in ("env", "algorithm", "state") if (value := getattr(given, name)) is not None}
    found = [run for run in found if all(getattr(run, name) == value for name, value in wanted.items())]
    return sorted(found, key=ORDERS[given.sort], reverse=(given.sort not in _RISING) != given.reverse)


def _show(found: list[RunRecord]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 200
    table, now = Table(box=None, pad_edge=False, header_style="bold"), time.time()
    table.add_column("run", overflow="fold", min_width=min(26, max(len(str(run.path)) for run in found)))
    for name in ("env", "algorithm"):
        table.add_column(name, overflow="ellipsis")
    for name in ("seed", "steps", "return", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    for run in found:
        done = quantity(run.steps) if run.steps >= run.total_steps else f"{quantity(run.steps)}/{quantity(run.total_steps)}"
        table.add_row(
            Text(str(run.path)), Text(run.env), Text(run.algorithm), str(run.seed), done,
            figure(run.final_return), f"{run.seconds:.1f}" if run.seconds < 1000 else count(run.seconds),
            Text(run.state, _STYLES[run.state]), age(now - run.started),
        )  # fmt: skip
    console.print(table)


def _remove(found: list[RunRecord], is_sure: bool) -> int:
    """Remove runs that nobody trains, and folders of seeds that are empty then."""
    running = [run for run in found if run.state == "running"]
    for run in running:
        print(f"{run.path} is running and stays.", file=sys.stderr)
    doomed = [run for run in found if run.state != "running"]
    if not doomed:
        print("There is nothing to remove.")
        return 0
    if not is_sure:
        for run in doomed:
            print(f"{run.path}  {run.state}, {count(run.steps)} steps, return {figure(run.final_return)}")
        try:
            answer = input(f"Remove {'this run' if len(doomed) == 1 else f'these {len(doomed)} runs'} for good? [y/N] ")
        except EOFError:
            raise HurtleError("Nothing was removed: there is nobody to ask. --yes removes without asking.") from None
        if answer.strip().lower() not in ("y", "yes"):
            print("Nothing was removed.")
            return 1
    for run in doomed:
        _remove_run(run.path)
    print(f"Removed {len(doomed)} run{'s' * (len(doomed) > 1)}.")
    return 0


def _remove_run(path: Path) -> None:
    try:
        with hold(path, patience=0.0):  # nobody can begin to train there
            shutil.rmtree(path)
        parent = path.parent
        if (parent / SEEDS_FILE).is_file() and not runs_in(parent) and not is_running(parent):
            shutil.rmtree(parent)
    except OSError as error:
        raise HurtleError(f"{path} could not be removed: {error.strerror or error}.") from error


def _last_if_unknown(value: float) -> float:
    return -math.inf if math.isnan(value) else value
