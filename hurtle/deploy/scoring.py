"""How good an exported file is: `hurtle eval policy.onnx` plays the file itself, not the run it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium

from hurtle.deploy.card import Card
from hurtle.deploy.exported import ExportedPolicy
from hurtle.deploy.policy_file import read_policy_file
from hurtle.envs.registry import EnvLike, names
from hurtle.errors import HurtleError
from hurtle.runners.evaluate import Evaluation, evaluate_policy


def evaluate_file(
    path: str | Path,
    episodes: int = 100,
    sampled: bool | None = None,
    env: EnvLike | None = None,
    seed: int = 0,
    num_envs: int | None = None,
    env_parameters: dict[str, Any] | None = None,
    runtime: str = "auto",
) -> Evaluation:
    """Evaluate an exported policy.

    Args:
        path: A file that `hurtle.export` wrote.
        episodes: How many.
        sampled: Whether actions are to be sampled; a file does one of the two, which None takes.
        env: Another env than the one that it was trained on, with the same spaces.
        seed: Of the envs.
        num_envs: Envs at a time; None takes up to 128 native ones, or 16.
        env_parameters: The env's own; those not named are the run's, if the env is.
        runtime: As for `hurtle.load`.
    """
    policy = ExportedPolicy(read_policy_file(path), runtime)
    card = policy.card
    if sampled is not None and sampled == card.deterministic:
        does, how = ("the most likely", "with") if card.deterministic else ("sampled", "without")
        raise HurtleError(f"{path} gives {does} actions: for others, export the run {how} --stochastic.")
    if env is None:
        env = _named_env(card, path)
    own = card.env_parameters if env == card.env else {}
    return evaluate_policy(
        policy.for_rows(),
        env,
        episodes=episodes,
        deterministic=card.deterministic,
        seed=seed,
        num_envs=num_envs,
        env_parameters={**own, **(env_parameters or {})},
        emulate=card.structure is not None,
        progress=True,
    )


def _named_env(card: Card, path: str | Path) -> str:
    """The env that a file says it was trained on, if that is a plain id: others would import code because a file says so.

    Raises:
        HurtleError: It is not, or the file has parameters for an env that is not Hurtle's, which may be paths or worse.
    """
    name = card.env
    if not name:
        raise HurtleError(f"{path} was trained on an env without a name: say which to play, with --env.")
    is_own = name in names() or name.startswith("atari/")
    if ":" in name or not (is_own or name in gymnasium.registry or name.startswith("ALE/")):
        raise HurtleError(
            f"{path} says that its env is {name!r}, which is none of Hurtle's or Gymnasium's: say which, with --env."
        )
    if card.env_parameters and not is_own:
        raise HurtleError(
            f"{path} has parameters for {name}, {card.env_parameters!r:.200}: if you trust them, say --env {name}."
        )
    return name
