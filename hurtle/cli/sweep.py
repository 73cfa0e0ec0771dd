"""`hurtle sweep`: the command line → `hurtle.sweep`. Its own flags, and those of `hurtle train` for what all trials share."""

from __future__ import annotations

from typing import Any

from hurtle.cli.flags import all_flags, given_flag
from hurtle.cli.train import read_settings
from hurtle.errors import HurtleError
from hurtle.experiments.sweeps.search import METHODS
from hurtle.runners.settings import settings_to_dict
from hurtle.runners.values import fit

FLAGS = {
    "budget": ("TIME", "10m", "Time in all, such as 90s, 10m, 2h; a quarter of it is for checks"),
    "trials": ("N", "0", "The most trials; 0: as many as the budget allows"),
    "space": ("FILE", "", "What to search, in TOML; default: what comes with the algorithm"),
    "method": ("NAME", "cost_aware", f"{', '.join(METHODS)}"),
    "metric": ("NAME", "return", "What to maximize: return, or any name in metrics.jsonl"),
    "check_seeds": ("N", "5", "Fresh seeds with which each finalist is trained again; 0: no check"),
    "parallel": ("N", "0", "Trials at a time; 0: one per core or GPU, as far as memory allows"),
    "trial_seconds": ("TIME", "", "The most that a trial may take; default: a quarter of the budget"),
    "trial_memory": ("SIZE", "", "The most memory of a trial, such as 2G; default: what is free"),
    "ray": ("ADDRESS", "", "Run trials on a Ray cluster; local starts one on this machine"),
    "resume": ("FOLDER", "", "Go on with a sweep, or latest; --budget and --trials may be raised"),
}
"""Flag → its placeholder, its default, its help."""
SWITCHES = {
    "minimize": "Minimize the metric",
    "no_prune": "Train every trial to its end, also those that learn worse than half of the others",
    "show_space": "Print what would be searched, as a file for --space, and end",
    "trust": "Run code named by the file of --config or --resume",
}
NUMBERS = {"trials", "check_seeds", "parallel"}
EXAMPLES = """\
  hurtle sweep cartpole --budget 10m
  hurtle sweep pendulum --algorithm sac --trials 40 --total-steps 20_000
  hurtle sweep cartpole --show-space > space.toml
  hurtle sweep cartpole --space space.toml --method optuna_tpe
  hurtle sweep --resume latest"""


def run_sweep(arguments: list[str]) -> int:
    """Parse the arguments of `hurtle sweep` and search, or print the help; returns the exit code."""
    if not arguments or {"-h", "--help"} & set(arguments):
        _print_help()
        return 0
    values, switches, rest = split(arguments)
    for name in NUMBERS & values.keys():
        try:
            values[name] = fit(values[name], int)
        except ValueError as error:
            raise HurtleError(f"--{name.replace('_', '-')} {error}") from None
    from hurtle.experiments.sweeps.sweep import sweep

    if values.get("resume"):
        if rest:
            raise HurtleError(f"--resume goes on with the env and the settings of that sweep: leave out {' '.join(rest)}.")
        if others := sorted({*values, *switches} - {"resume", "budget", "trials", "parallel", "ray", "trust"}):
            raise HurtleError(f"--resume goes on as the sweep began: leave out --{', --'.join(others).replace('_', '-')}.")
        return _exit_code(sweep(trust="trust" in switches, **values))
    flags = all_flags(rest)
    if foreign := sorted(flags.keys() & {"seeds", "population", "population_every", "search", "side_by_side"}):
        raise HurtleError(f"--{foreign[0].replace('_', '-')} is for `hurtle train`; a sweep has --check-seeds.")
    settings = settings_to_dict(read_settings(rest + ["--trust"] * ("trust" in switches)))
    given = {name: settings[name] for name in flags if name in settings}
    if "show_space" in switches:
        from hurtle.experiments.space import default_space, read_space

        fixed = given.keys() - {"total_steps"}
        found = read_space(values["space"], settings) if values.get("space") else default_space(settings, fixed)
        print(found.to_toml(), end="")
        return 0
    how: dict[str, Any] = {
        "prune": "no_prune" not in switches,
        "minimize": "minimize" in switches,
        "trust": "trust" in switches,
    }
    config = given_flag(rest, "--config") or None
    return _exit_code(sweep(settings["env"], config=config, **how, **values, **given))


def _exit_code(found: Any) -> int:
    """That of a process which a signal ended, so that `hurtle sweep … && …` does not go on."""
    return {"Ctrl-C": 130, "SIGTERM": 143}.get(found.stopped_by, 0)


def split(arguments: list[str]) -> tuple[dict[str, Any], set[str], list[str]]:
    """The sweep's own flags with their values, its switches, and the arguments that are settings of a run.

    Example:
        >>> split(["cartpole", "--budget", "5m", "--minimize", "--gamma=0.9"])
        ({'budget': '5m'}, {'minimize'}, ['cartpole', '--gamma=0.9'])
    """
    values: dict[str, Any] = {}
    switches: set[str] = set()
    rest: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        flag, equals, attached = argument.partition("=")
        name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        if name in SWITCHES:
            if equals:
                raise HurtleError(f"{flag} is a switch: give it without a value.")
            switches.add(name)
        elif name in FLAGS:
            if not equals and (not left or left[0].startswith("--")):
                raise HurtleError(f"{flag} needs a value.")
            values[name] = attached if equals else left.pop(0)
        else:
            rest.append(argument)
    return values, switches, rest


def _print_help() -> None:
    lines = [
        "usage: hurtle sweep ENV [--flag value ...]\n",
        f"{EXAMPLES}\n",
        "Search for settings that score well, and for those that do so in less time. The best are checked with fresh seeds.\n",
    ]
    for name, (placeholder, default, text) in FLAGS.items():
        flag = f"--{name.replace('_', '-')} {default or placeholder}"
        lines.append(f"  {flag:<30}{text}")
    lines += [f"  {f'--{name}'.replace('_', '-'):<30}{text}" for name, text in SWITCHES.items()]
    lines.append(
        "\nFlags of `hurtle train` set what all trials share: it is not searched. --total-steps is the most of a trial."
    )
    print("\n".join(lines))
