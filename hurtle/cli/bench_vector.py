"""`hurtle bench vector`: step an env with random actions under many settings, and print the fastest `make_vec` call.

env → settings (back end, workers, batch) → steps per second of each → the best. Ctrl-C shows what was measured.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from hurtle.cli.messages import loading
from hurtle.cli.options import POSITIONAL, SWITCH, option


def bench_vector(
    env: Annotated[str, POSITIONAL, option("A name such as CartPole-v1, atari/Pong or my_env.py:MyEnv.", "ENV")],
    num_envs: Annotated[tuple[int, ...], option("Number of envs; several numbers are measured in turn.", "N [N ...]")] = (
        8,
        64,
    ),
    seconds: Annotated[float, option("Time to measure each setting.")] = 1.0,
    backends: Annotated[
        tuple[str, ...],
        option("Any of serial, process, ray, native and mujoco.", "NAME [NAME ...]", "all that can run it, except ray"),
    ] = (),
    policy_ms: Annotated[
        float, option("Milliseconds your policy takes for a batch; pools (batch < envs) step other envs meanwhile.")
    ] = 0.0,
    emulate: Annotated[bool, SWITCH, option("Flatten observations and actions.", default="")] = False,
) -> None:
    """Find the fastest way to run many envs on this machine.

    Steps the env with random actions over back ends, workers and batch sizes, and prints the best make_vec call.
    Ctrl-C stops early and shows what was measured.
    """
    with loading("the environments"):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from hurtle.vector.autotune import Result, best, measure_all, settings_for

    settings = settings_for(env, num_envs, backends)
    measured = measure_all(env, settings, seconds=seconds, policy_ms=policy_ms, emulate=emulate)  # raises before the header
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
    finally:  # also after Ctrl-C or an error in one setting
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
