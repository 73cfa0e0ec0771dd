"""Prints the list of native environments. Imports neither torch nor tyro, so that it comes at once."""

from __future__ import annotations

from typing import Any

from hurtle.cli.messages import loading


def list_envs() -> None:
    """Print the native environments, each with its spaces and what it is."""
    with loading("the environments"):
        from rich.console import Console
        from rich.markup import escape

        from hurtle.envs.registry import names, native_class
        from hurtle.native import EnvSpec
    console = Console(emoji=False)  # the table of emoji takes as long to load as all else of rich
    for name in names():
        spec = EnvSpec.of(native_class(name))
        obs = f"{spec.observation_space.dtype}{list(spec.observation_space.shape)}"
        agents = f"{spec.num_agents} agents" if spec.num_agents > 1 else ""
        line = f"{obs:<20} {_describe(spec.action_space):<13} {agents}"
        console.print(f"[bold]{name:<25}[/bold]{escape(line)}", highlight=False)
        console.print(f"  [dim]{spec.description}[/dim]", highlight=False)
    console.print("\nDetails: [bold]hurtle envs NAME[/bold]. Your own: [bold]hurtle envs my_env.py:MyEnv --check[/bold].")


def _describe(space: Any) -> str:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return f"Discrete({space.n})"
    if isinstance(space, spaces.MultiDiscrete):
        return f"MultiDiscrete({space.nvec.tolist()})"
    return f"{space.dtype}{list(space.shape)}"
