"""`hurtle eval`: play a run or an exported policy, and print its mean return with a confidence interval."""

from __future__ import annotations

from typing import Annotated

from hurtle.cli.messages import loading
from hurtle.cli.options import (
    Device,
    EnvName,
    EnvParameters,
    RunOrFile,
    Runs,
    Sampled,
    Seed,
    Trust,
    find_run,
    option,
    read_pairs,
)
from hurtle.errors import HurtleError


def evaluate(
    run: RunOrFile,
    episodes: Annotated[int, option("Number of episodes; Ctrl-C stops early and scores those played.")] = 100,
    sampled: Sampled = False,
    env: EnvName = None,
    env_parameters: EnvParameters = (),
    seed: Seed = 0,
    num_envs: Annotated[int | None, option("Number of parallel envs.", "INT", "128 native ones, or 16")] = None,
    device: Device = "cpu",
    runs: Runs = "runs",
    trust: Trust = False,
) -> int:
    """Score a trained policy over many episodes, with a 95% interval."""
    from hurtle.deploy.policy_file import is_policy_file

    parameters = read_pairs(env_parameters)
    if is_policy_file(run):
        if device not in ("cpu", "auto"):
            raise HurtleError(f"--device {device}: exported policies run on the CPU.")
        with loading("the policy's runtime"):
            from hurtle.runners.evaluate_file import evaluate_file

        found = evaluate_file(run, episodes, sampled or None, env, seed, num_envs, parameters, trust=trust, keep_stopped=True)
    else:
        path = find_run(run, runs)
        with loading("torch"):
            from hurtle.runners.evaluate import evaluate_run

        found = evaluate_run(
            path,
            episodes=episodes,
            sampled=sampled,
            env=env,
            env_parameters=parameters,
            seed=seed,
            num_envs=num_envs,
            device=device,
            trust=trust,
            keep_stopped=True,
        )
    print(found)
    return 130 if found.stopped else 0
