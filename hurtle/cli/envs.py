"""`hurtle envs`: list the native envs, or show and check one of them. Imports no torch."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

from hurtle.cli.env_list import list_envs
from hurtle.cli.messages import loading
from hurtle.cli.options import POSITIONAL, SWITCH, option
from hurtle.errors import HurtleError


def envs(
    name: Annotated[str, POSITIONAL, option("A short name or my_env.py:MyEnv: show this env in detail.", "[NAME]", "")] = "",
    check: Annotated[
        bool, SWITCH, option("Check the env: array bounds, NaN, spaces, determinism, and that all targets agree.", default="")
    ] = False,
    seed: Annotated[int, option("Seed of the picture.")] = 0,
) -> None:
    """List the native environments, or show one of them."""
    if check and not name:
        raise HurtleError("--check needs the name of an env: hurtle envs my_env.py:MyEnv --check")
    if not name:
        list_envs()
        return
    with loading("the environments"):
        from rich.console import Console

        from hurtle.envs.registry import resolve
        from hurtle.native import Env
    console = Console()
    found = resolve(name, {})
    if not isinstance(found, Env):
        raise HurtleError(f"{name!r} is a Gymnasium env; `hurtle envs` shows native ones.")
    _show_env(console, found, seed)
    if check:
        from hurtle.native import check as check_env

        console.print(str(check_env(found)), highlight=False, markup=False, soft_wrap=True)


def _show_env(console: Any, env: Any, seed: int) -> None:
    from rich.markdown import Markdown
    from rich.text import Text

    from hurtle.native import EnvSpec
    from hurtle.native.single_env import NativeEnv

    spec = EnvSpec.of(env)
    console.print(Markdown(f"**{spec.name}** {inspect.getdoc(type(env)) or ''}\n"))
    console.print()
    console.print(f"observation  {spec.observation_space}", highlight=False)
    console.print(f"actions      {spec.action_space}", highlight=False)
    console.print(f"agents       {spec.num_agents}")
    console.print(f"truncation   {f'after {spec.max_steps} steps' if spec.max_steps else 'none'}", highlight=False)
    console.print(f"parameters   {', '.join(f'{k}={v}' for k, v in env.parameters().items())}", highlight=False)
    console.print(f"State        {', '.join(f'{k}: {v}' for k, v in spec.fields.items())}", highlight=False, markup=False)
    console.print(f"memory       {spec.record.itemsize} bytes per env\n")
    if spec.method("render") is not None and console.is_terminal:
        shown = NativeEnv(env, render_mode="ansi", debug=True)  # compiling is not worth it for one picture
        shown.reset(seed=seed)
        console.print(Text.from_ansi(str(shown.render())))
