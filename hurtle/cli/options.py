"""Options shared by several verbs, each defined once: its type, its help, and how its value is read.

arguments → tyro → typed values; RUN → the run's folder; NAME=VALUE → env parameters. Imports no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from hurtle.errors import HurtleError
from hurtle.runners.values import fit


def option(text: str, metavar: str | None = None, default: str | None = None, name: str | None = None) -> Any:
    """The help of one option, for its annotation.

    Example: `episodes: Annotated[int, option("Number of episodes.")] = 100`.

    Args:
        text: What the option does.
        metavar: The placeholder of its value; None: the type's name.
        default: Shown instead of the default value; "" shows none.
        name: The flag, if it differs from the parameter's name.
    """
    hint = default if not default else f"(default: {default})"
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint=hint, name=name)


POSITIONAL = tyro.conf.Positional
SWITCH = tyro.conf.FlagCreatePairsOff  # --flag, without --no-flag

Run = Annotated[str, POSITIONAL, option("A run folder, a checkpoint file, or latest.", "RUN")]
RunOrFile = Annotated[
    str, POSITIONAL, option("A run folder, a checkpoint file, latest, or an exported policy (.onnx, .pt2).", "RUN")
]
Runs = Annotated[str, option("Folder of the runs, for latest and for names.", "DIR")]
Trust = Annotated[
    bool, SWITCH, option("Run code that the file names (my_env.py:MyEnv), even if the run is not yours.", default="")
]
Seed = Annotated[int, option("Seed of envs and sampled actions.")]
Device = Annotated[str, option("cpu, cuda, cuda:1 or auto.")]
Sampled = Annotated[bool, SWITCH, option("Sample actions instead of taking the most likely ones.", default="")]
EnvName = Annotated[str | None, option("Play on another env with the same spaces.", "NAME", "the run's env")]
EnvParameters = Annotated[
    tuple[str, ...], option("Parameters of the env, such as gravity=1.6.", "[NAME=VALUE ...]", "the run's, on its own env")
]


def find_run(run: str, runs: str) -> str:
    """The folder or checkpoint file that RUN names; prints which run `latest` is to standard error.

    Raises:
        HurtleError: There is no such run, or it is an exported policy.
    """
    from hurtle.deploy.policy_file import is_policy_file
    from hurtle.tracking.run_folder import RunFolder

    if is_policy_file(run):
        raise HurtleError(f"{run} is an exported policy: this verb needs the run it was exported from.")
    if Path(run).is_file():
        return run
    folder = str(RunFolder.open(run, runs).path)
    if run == "latest":
        print(f"hurtle: the latest run is {folder}", file=sys.stderr, flush=True)
    return folder


def read_pairs(texts: tuple[str, ...]) -> dict[str, Any]:
    """The values of --env-parameters by name."""
    try:
        return fit(list(texts), dict[str, Any])
    except ValueError as error:
        raise HurtleError(f"--env-parameters {error}") from None


def number_parser(arguments: list[str]) -> ConstructorRegistry:
    """Makes tyro read numbers as settings files do (1e6 is an integer), and report errors as a `HurtleError`."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if info.type not in (int, float, int | None):
            return None

        def read(texts: list[str]) -> Any:
            try:
                return fit(texts[0], info.type)
            except ValueError as error:
                raise HurtleError(f"{_flag_before(texts[0], arguments)} {error}") from None

        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="FLOAT" if info.type is float else "INT",
            instance_from_str=read,
            is_instance=lambda value: isinstance(value, int | float | None),
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def _flag_before(text: str, arguments: list[str]) -> str:
    """The flag that was given this value."""
    flag = ""
    for argument in arguments:
        if argument.startswith("--"):
            flag, _, value = argument.partition("=")
        else:
            value = argument
        if value == text:
            break
    return flag
