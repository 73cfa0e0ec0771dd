"""The command line: `hurtle VERB …`, also `python -m hurtle VERB …`; each verb is one function, its docstring the help."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
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


def bench_vector(
    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")],
    num_envs: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N [N ...]")] = (8, 64),
    seconds: float = 1.0,
    backends: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint="(default: all but ray that can run it)")
    ] = (),
    policy_ms: float = 0.0,
    emulate: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Find the fastest way to run many copies of an env on this machine.

    Steps the env with random actions over back ends, workers and batch sizes, and prints the best make_vec call.
    Ctrl-C ends it early and shows what is known.

    Args:
        env: A name such as CartPole-v1, atari/Pong or my_env.py:MyEnv.
        num_envs: How many copies; several numbers are tried one after the other.
        seconds: How long each setting is measured.
        backends: Of serial, process, ray and native.
        policy_ms: Milliseconds that your policy takes for a batch. Pools (batch < envs) step some envs meanwhile.
        emulate: Flat observations and actions.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from hurtle.vector.autotune import Result, best, measure_all, settings_for

    settings = settings_for(env, num_envs, backends)
    measured = measure_all(env, settings, seconds=seconds, policy_ms=policy_ms, emulate=emulate)  # refuses before the header
    results: list[Result] = []
    progress = Progress(TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), transient=True)
    task = progress.add_task("", total=len(settings))
    say = partial(progress.console.print, highlight=False, markup=False, soft_wrap=True)
    try:
        with progress:
            say(_columns("back end", "envs", "workers", "envs/worker", "batch", "steps/s", "× serial"))
            for result in measured:
                results.append(result)
                say(_result_line(result))
                progress.advance(task)
    finally:  # after Ctrl-C, or an error of one setting, too
        if 0 < len(results) < len(settings):
            say(f"\nStopped after {len(results)} of {len(settings)} settings.")
        for size in dict.fromkeys(result.setting.num_envs for result in results):
            found = best([result for result in results if result.setting.num_envs == size])
            call = found.setting.call(env, **({"emulate": True} if emulate else {}))
            say(f"\nBest with {size} envs ({found.steps_per_second:,.0f} steps/s):\n  vec = {call}")


def _result_line(result: Any) -> str:
    chosen = result.setting
    return _columns(
        chosen.backend,
        chosen.num_envs,
        chosen.num_workers,
        f"{chosen.num_envs / chosen.num_workers:.3g}",
        chosen.batch_size,
        f"{result.steps_per_second:,.0f}",
        "–" if result.speed_up is None else f"{result.speed_up:.2f}",
    )


def _columns(first: Any, *others: Any) -> str:
    return f"{first:<8}" + "".join(f"{cell:>12}" for cell in others)


BenchVector = Annotated[Any, tyro.conf.subcommand(name="vector", constructor=bench_vector)]


def bench(what: BenchVector | Annotated[None, tyro.conf.Suppress]) -> None:
    """Measure speed on this machine."""


VERBS: dict[str, Callable[..., Any]] = {"envs": envs, "bench": bench}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            VERBS,
            prog="hurtle",
            description="Reinforcement learning in Python at the speed of the hardware.",
            args=arguments,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        )
    except HurtleError as error:
        print(f"hurtle: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
