"""`hurtle watch`: show a run's policy acting, in the terminal or as a video."""

from __future__ import annotations

from typing import Annotated

from hurtle.cli.messages import loading
from hurtle.cli.options import Device, EnvName, EnvParameters, Run, Runs, Sampled, Seed, Trust, find_run, option, read_pairs


def watch(
    run: Run,
    episodes: Annotated[int, option("Number of episodes.")] = 1,
    video: Annotated[str | None, option("Write out.mp4 or out.gif instead.", "FILE", "show in the terminal")] = None,
    fps: Annotated[int, option("Frames per second.")] = 30,
    seed: Seed = 0,
    sampled: Sampled = False,
    env: EnvName = None,
    env_parameters: EnvParameters = (),
    device: Device = "cpu",
    runs: Runs = "runs",
    trust: Trust = False,
) -> None:
    """Watch a trained policy play, in the terminal or as a video."""
    path, parameters = find_run(run, runs), read_pairs(env_parameters)
    with loading("torch"):
        from hurtle.runners.watch import watch_run

    watch_run(
        path,
        episodes=episodes,
        video=video,
        fps=fps,
        seed=seed,
        sampled=sampled,
        env=env,
        env_parameters=parameters,
        device=device,
        trust=trust,
    )
