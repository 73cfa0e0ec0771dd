"""The command line: `hurtle VERB …`, also `python -m hurtle VERB …`; each verb is one function, its docstring the help.

Verbs import what they need when they run: `hurtle --help` and `hurtle envs` load no torch. `train` has its own file.
"""

from __future__ import annotations

import inspect
import os
import select
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from hurtle import __version__
from hurtle.cli_bench_serve import BenchServe
from hurtle.cli_loading import loading
from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.runners.values import fit

Runs = Annotated[str, tyro.conf.arg(metavar="DIR")]
EnvName = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: the run's)")]
EnvParameters = Annotated[
    tuple[str, ...], tyro.conf.arg(metavar="[NAME=VALUE ...]", help_behavior_hint="(default: the run's, on its env)")
]
RunArgument = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]


def train(arguments: Annotated[tuple[str, ...], tyro.conf.Positional] = ()) -> None:
    """Train a policy, or resume a run: hurtle train cartpole."""
    from hurtle.cli_train import run_train

    run_train(list(arguments))


def evaluate(
    run: RunArgument,
    episodes: int = 100,
    sampled: Switch = False,
    env: EnvName = None,
    env_parameters: EnvParameters = (),
    seed: int = 0,
    num_envs: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: what is fast)")] = None,
    device: str = "cpu",
    runs: Runs = "runs",
    trust: Switch = False,
) -> int:
    """Score a trained policy over many episodes, with confidence.

    Ctrl-C ends it early and shows what was played.

    Args:
        run: A run folder, a checkpoint file, latest, or an exported policy (.onnx, .pt2).
        episodes: How many.
        sampled: Sample actions; otherwise the most likely one is taken.
        env: Another env with the same spaces.
        env_parameters: The env's own, such as gravity=1.6.
        seed: Of the episodes; the same for every policy that is compared.
        num_envs: Envs side by side.
        device: cpu, cuda, cuda:1 or auto.
        runs: Folder of the runs, for latest and for names.
        trust: Run code that the file names (my_env.py:MyEnv), though it is none of your own runs.
    """
    from hurtle.deploy.policy_file import is_policy_file

    if is_policy_file(run):
        with loading("the policy's runtime"):
            from hurtle.deploy.scoring import evaluate_file

        if device not in ("cpu", "auto"):
            raise HurtleError(f"--device {device}: exported policies run on the CPU.")
        pairs = _pairs(env_parameters)
        found = evaluate_file(run, episodes, sampled or None, env, seed, num_envs, pairs, trust=trust, keep_stopped=True)
        print(found)
        return 130 if found.stopped else 0
    with loading("torch"):
        from hurtle.runners.evaluate import evaluate_run

    found = evaluate_run(
        _find(run, runs),
        episodes=episodes,
        sampled=sampled,
        env=env,
        env_parameters=_pairs(env_parameters),
        seed=seed,
        num_envs=num_envs,
        device=device,
        trust=trust,
        keep_stopped=True,
    )
    print(found)
    return 130 if found.stopped else 0


def watch(
    run: RunArgument,
    episodes: int = 1,
    video: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: show in the terminal)")] = None,
    fps: int = 30,
    seed: int = 0,
    sampled: Switch = False,
    env: EnvName = None,
    env_parameters: EnvParameters = (),
    device: str = "cpu",
    runs: Runs = "runs",
    trust: Switch = False,
) -> None:
    """Watch a trained policy play, in the terminal or as a video.

    Args:
        run: A run folder, a checkpoint file, or latest.
        episodes: How many.
        video: Write out.mp4 or out.gif instead.
        fps: Pictures per second.
        seed: Of the episodes.
        sampled: Sample actions; otherwise the most likely one is taken.
        env: Another env with the same spaces.
        env_parameters: The env's own, such as gravity=1.6.
        device: cpu, cuda, cuda:1 or auto.
        runs: Folder of the runs, for latest and for names.
        trust: Run code that the file names (my_env.py:MyEnv), though it is none of your own runs.
    """
    with loading("torch"):
        from hurtle.runners.watch import watch_run

    watch_run(
        _find(run, runs),
        episodes=episodes,
        video=video,
        fps=fps,
        seed=seed,
        sampled=sampled,
        env=env,
        env_parameters=_pairs(env_parameters),
        device=device,
        trust=trust,
    )


def export(
    run: RunArgument,
    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")],
    outputs: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]")] = ("action",),
    stochastic: Switch = False,
    masked: Literal["auto", "yes", "no"] = "auto",
    runs: Runs = "runs",
    trust: Switch = False,
) -> None:
    """Write a trained policy to one file that runs anywhere, and check it.

    Args:
        run: A run folder, a checkpoint file, or latest.
        file: out.onnx, or out.pt2 for torch.export.
        outputs: Of action, value, logits (or mean, log_std; alpha, beta); heads means all that the distribution is made of.
        stochastic: Sample the action; otherwise it is the most likely one.
        masked: Take legal actions as an input; auto: if the run's env gave some.
        runs: Folder of the runs, for latest and for names.
        trust: Run code that the file names (my_env.py:MyEnv), though it is none of your own runs.
    """
    with loading("torch"):
        from hurtle.deploy.exporting import export as write_policy

    wanted = None if masked == "auto" else masked == "yes"
    print(write_policy(_find(run, runs), file, outputs=outputs, stochastic=stochastic, masked=wanted, trust=trust))


def _find(run: str, runs: str) -> str:
    """The run's folder, or the checkpoint file itself."""
    from hurtle.deploy.policy_file import is_policy_file
    from hurtle.tracking.run_folder import RunFolder

    if is_policy_file(run):
        raise HurtleError(f"{run} is an exported policy: this needs the run that it came from.")
    return run if Path(run).is_file() else str(RunFolder.open(run, runs).path)


def _pairs(texts: tuple[str, ...]) -> dict[str, Any]:
    try:
        return fit(list(texts), dict[str, Any])
    except ValueError as error:
        raise HurtleError(f"--env-parameters {error}") from None


def serve(arguments: Annotated[tuple[str, ...], tyro.conf.Positional] = ()) -> int:
    """Serve models over gRPC and REST: hurtle serve policy.onnx."""
    from hurtle.cli_serve import run_serve

    return run_serve(list(arguments))


def sanity(
    envs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[ENV ...]", help_behavior_hint="")] = (),
    seed: int = 0,
    device: str = "cpu",
) -> int:
    """Check that training works here: learn five tiny envs.

    Args:
        envs: Of bandit, memory, password, squared and stochastic; all if none is named.
        seed: Of the runs.
        device: cpu, cuda, cuda:1 or auto.
    """
    with loading("torch"):
        from hurtle.runners.sanity import run_sanity

    return 0 if run_sanity(envs, seed=seed, device=device) else 1


def envs(
    name: Annotated[str, tyro.conf.arg(metavar="[NAME]", help_behavior_hint="")] = "",
    /,
    check: Switch = False,
    seed: int = 0,
) -> None:
    """List the native environments, or show one of them.

    Args:
        name: A short name, or my_env.py:MyEnv, to show its parameters, State and a picture.
        check: Check the env: array accesses, NaN, bounds, determinism, and that all targets agree.
        seed: Seed of the picture.
    """
    if check and not name:
        raise HurtleError("--check needs the name of an env: hurtle envs my_env.py:MyEnv --check")
    with loading("the environments"):
        from rich.console import Console

        from hurtle.envs.registry import resolve
        from hurtle.native import Env
        from hurtle.native import check as check_env
    console = Console()
    if not name:
        _list_envs(console)
        return
    found = resolve(name, {})
    if not isinstance(found, Env):
        raise HurtleError(f"{name!r} is a Gymnasium env; `hurtle envs` shows native ones.")
    _show_env(console, found, seed)
    if check:
        console.print(str(check_env(found)), highlight=False, markup=False, soft_wrap=True)


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
    emulate: Switch = False,
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
    with loading("the environments"):
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


def bench(what: BenchVector | BenchServe | Annotated[None, tyro.conf.Suppress]) -> None:
    """Measure speed on this machine."""


VERBS: dict[str, Callable[..., int | None]] = {
    "train": train,
    "eval": evaluate,
    "watch": watch,
    "export": export,
    "serve": serve,
    "sanity": sanity,
    "envs": envs,
    "bench": bench,
}


def _numbers(arguments: list[str]) -> ConstructorRegistry:
    """Numbers are read as everywhere in Hurtle, and a mistake is an error like all others."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if info.type not in (int, float, int | None):
            return None

        def read(texts: list[str]) -> Any:
            try:
                return fit(texts[0], info.type)
            except ValueError as error:
                raise HurtleError(f"{_flag_of(texts[0], arguments)} {error}") from None

        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="FLOAT" if info.type is float else "INT",
            instance_from_str=read,
            is_instance=lambda value: isinstance(value, int | float | None),
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def _flag_of(text: str, arguments: list[str]) -> str:
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


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        print(f"hurtle {__version__}")
        return 0
    try:
        if arguments and not arguments[0].startswith("-") and arguments[0] not in VERBS:
            raise UnknownNameError(f"No verb {arguments[0]!r}. {did_you_mean(arguments[0], VERBS)}")
        if arguments[:1] == ["train"]:  # not by tyro yet: its flags depend on the algorithm, its defaults on the env
            train(tuple(arguments[1:]))
            return 0
        if arguments[:1] == ["serve"]:  # its defaults depend on a file and on the environment
            return serve(tuple(arguments[1:]))
        code = tyro.extras.subcommand_cli_from_dict(
            VERBS,
            prog="hurtle",
            description=f"Hurtle {__version__}: reinforcement learning in Python at the speed of the hardware.",
            args=arguments or ["--help"],
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
            registry=_numbers(arguments),
        )
    except HurtleError as error:
        print(f"hurtle: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        return 141
    return code or 0


def _output_is_closed() -> bool:
    """Whether whoever read the output, such as head, has gone; nothing is written to it any more then."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
