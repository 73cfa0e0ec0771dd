"""The command line: `hurtle VERB …`, also `python -m hurtle VERB …`; each verb is one function, its docstring the help."""

from __future__ import annotations

import inspect
import sys
from typing import Annotated, Any

import tyro

from hurtle.errors import HurtleError


def envs(
    name: Annotated[str, tyro.conf.arg(metavar="[NAME]")] = "",
    /,
    check: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    seed: int = 0,
) -> None:
    """List the native environments, or show one of them.

    Args:
        name: A short name, or my_env.py:MyEnv, to show its parameters, State and a picture.
        check: Check the env: array accesses, NaN, bounds, determinism, and that all targets agree.
        seed: Seed of the picture.
    """
    from rich.console import Console

    console = Console()
    if not name:
        if check:
            raise HurtleError("--check needs the name of an env: hurtle envs my_env.py:MyEnv --check")
        _list_envs(console)
        return
    from hurtle.envs.registry import resolve
    from hurtle.native import Env
    from hurtle.native import check as check_env

    found = resolve(name, {})
    if not isinstance(found, Env):
        raise HurtleError(f"{name!r} is a Gymnasium env; `hurtle envs` shows native ones.")
    _show_env(console, found, seed)
    if check:
        console.print(str(check_env(found)), highlight=False)


def _list_envs(console: Any) -> None:
    from rich.markup import escape

    from hurtle.envs.registry import names, native_class
    from hurtle.native import EnvSpec

    for name in names():
        spec = EnvSpec.of(native_class(name))
        obs = f"{spec.observation_space.dtype}{list(spec.observation_space.shape)}"
        agents = f"{spec.num_agents} agents" if spec.num_agents > 1 else ""
        line = f"{obs:<20} {_describe(spec.action_space):<13} {agents}"
        console.print(f"[bold]{name:<25}[/bold]{escape(line)}", highlight=False)
        console.print(f"  [dim]{spec.description}[/dim]", highlight=False)
    console.print("\nMore of one: [bold]hurtle envs NAME[/bold]. Your own: [bold]hurtle envs my_env.py:MyEnv --check[/bold].")


def _show_env(console: Any, env: Any, seed: int) -> None:
    from rich.markdown import Markdown
    from rich.text import Text

    from hurtle.native import EnvSpec
    from hurtle.native.single import NativeEnv

    spec = EnvSpec.of(env)
    console.print(Markdown(f"**{spec.name}** {inspect.getdoc(type(env)) or ''}\n"))
    console.print()
    console.print(f"observation  {spec.observation_space}", highlight=False)
    console.print(f"actions      {spec.action_space}", highlight=False)
    console.print(f"agents       {spec.num_agents}")
    console.print(f"truncation   {f'after {spec.max_steps} steps' if spec.max_steps else 'none'}", highlight=False)
    console.print(f"parameters   {', '.join(f'{k}={v}' for k, v in env.parameters().items())}", highlight=False)
    console.print(f"State        {', '.join(f'{k}: {v}' for k, v in spec.fields.items())}", highlight=False, markup=False)
    console.print(f"memory       {spec.record.itemsize} bytes an env\n")
    if spec.method("render") is not None and console.is_terminal:
        shown = NativeEnv(env, render_mode="ansi", debug=True)  # one picture is not worth compiling for
        shown.reset(seed=seed)
        console.print(Text.from_ansi(str(shown.render())))


def _describe(space: Any) -> str:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return f"Discrete({space.n})"
    if isinstance(space, spaces.MultiDiscrete):
        return f"MultiDiscrete({space.nvec.tolist()})"
    return f"{space.dtype}{list(space.shape)}"


VERBS = {"envs": envs}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            VERBS,
            prog="hurtle",
            description="Reinforcement learning in Python at the speed of the hardware.",
            args=arguments,
        )
    except HurtleError as error:
        print(f"hurtle: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
