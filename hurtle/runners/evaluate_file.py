"""`evaluate_file`: score an exported policy by playing the file itself, not the run it was exported from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hurtle.deploy.exported import ExportedPolicy
from hurtle.deploy.policy_file import read_policy_file
from hurtle.envs.registry import EnvLike
from hurtle.errors import HurtleError
from hurtle.runners.evaluate import Evaluation, evaluate_policy
from hurtle.trust import check_code


def evaluate_file(
    path: str | Path,
    episodes: int = 100,
    sampled: bool | None = None,
    env: EnvLike | None = None,
    seed: int = 0,
    num_envs: int | None = None,
    env_parameters: dict[str, Any] | None = None,
    runtime: str = "auto",
    trust: bool = False,
    keep_stopped: bool = False,
) -> Evaluation:
    """Evaluate an exported policy.

    Args:
        path: A file that `hurtle.export` wrote.
        episodes: Number of episodes.
        sampled: Whether to sample actions; None accepts whichever the file does.
        env: Another env with the same spaces; None: the env it was trained on.
        seed: Seed of the envs.
        num_envs: Parallel envs; None: up to 128 native ones, or 16.
        env_parameters: Parameters of the env; on the env it was trained on, the others are the run's.
        runtime: As for `hurtle.load`.
        trust: Run code that the file names.
        keep_stopped: On Ctrl-C or SIGTERM, return the episodes played so far, with the reason in `stopped`.

    Raises:
        TrustError: The file names code that the user has not allowed.
    """
    policy = ExportedPolicy(read_policy_file(path), runtime)
    card = policy.card
    if sampled is not None and sampled == card.deterministic:
        does, how = ("the most likely", "with") if card.deterministic else ("sampled", "without")
        raise HurtleError(f"{path} takes {does} actions: for others, export the run {how} --stochastic.")
    named: dict[str, Any] = {}
    if env is None:
        if not card.env:
            raise HurtleError(f"{path} was trained on an env without a name: name one with --env.")
        env = named["env"] = card.env
    own, given = card.env_parameters if env == card.env else {}, env_parameters or {}
    named["env_parameters"] = {name: value for name, value in own.items() if name not in given}
    check_code(path, named, trust)
    return evaluate_policy(
        policy.for_rows(),
        env,
        episodes=episodes,
        deterministic=card.deterministic,
        seed=seed,
        num_envs=num_envs,
        env_parameters={**own, **given},
        emulate=card.structure is not None,
        progress=True,
        keep_stopped=keep_stopped,
    )
