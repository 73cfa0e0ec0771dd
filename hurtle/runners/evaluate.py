"""How good is a policy: many parallel episodes, without bias towards short ones, with confidence intervals.

policy × vector env → every env plays its quota of episodes → returns, lengths → `Evaluation`. Knows nothing of learning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hurtle.envs.registry import EnvLike, resolve
from hurtle.errors import HurtleError, NonFiniteError
from hurtle.native.env import Env
from hurtle.policies.policy import Policy
from hurtle.runners.playing import Player, RowPolicy, eval_seed
from hurtle.runners.restore import Restored, find_checkpoint, restore
from hurtle.tracking.json_text import to_json
from hurtle.tracking.statistics import summarize
from hurtle.trust import check_code
from hurtle.vector.factory import make_vec
from hurtle.vector.options import check_count, check_seed

NATIVE_ENVS, PYTHON_ENVS = 128, 16
"""Envs at a time unless the user says how many; Python envs take memory, and time to start."""


@dataclass(frozen=True)
class Evaluation:
    """What a policy achieved.

    Attributes:
        returns: float64 [episodes], in no particular order.
        lengths: int64 [episodes].
        mean: Mean return.
        std: Standard deviation of the returns.
        iqm: Interquartile mean: that of the middle half, which single lucky or unlucky episodes do not move.
        low: Lower end of the bootstrapped 95 % confidence interval of the mean.
        high: Its upper end.
        episodes: How many; with several agents each agent's episodes count.
        deterministic: Whether the most likely actions were taken, or sampled ones.
    """

    returns: np.ndarray = field(repr=False)
    lengths: np.ndarray = field(repr=False)
    mean: float
    std: float
    iqm: float
    low: float
    high: float
    episodes: int
    deterministic: bool

    @classmethod
    def of(cls, returns: np.ndarray, lengths: np.ndarray, deterministic: bool) -> Evaluation:
        """The statistics of these episodes."""
        found = summarize(returns)
        numbers = {name: float(found[name]) for name in ("mean", "std", "iqm", "low", "high")}
        return cls(returns, lengths, **numbers, episodes=len(returns), deterministic=deterministic)

    def __str__(self) -> str:
        how = "deterministic" if self.deterministic else "sampled"
        return (
            f"return {self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]  IQM {self.iqm:.2f}  std {self.std:.2f}  "
            f"({self.episodes} {how} episodes)"
        )

    def summary(self) -> dict[str, Any]:
        """The statistics without the single episodes, for JSON."""
        names = ("mean", "std", "iqm", "low", "high", "episodes", "deterministic")
        return {**{name: getattr(self, name) for name in names}, "mean_length": float(self.lengths.mean())}


def evaluate_policy(
    policy: Policy | RowPolicy,
    env: EnvLike,
    episodes: int = 100,
    deterministic: bool = True,
    seed: int = 0,
    num_envs: int | None = None,
    backend: str = "auto",
    env_parameters: dict[str, Any] | None = None,
    device: str = "cpu",
    emulate: bool = False,
    max_steps: int = 100_000,
    progress: bool = False,
) -> Evaluation:
    """Play episodes in parallel and count them all.

    Each env plays a fixed number of episodes and then waits for the others, so that short episodes are not counted more often
    than long ones. The envs' seeds are hashed from `seed` into a stream that no training run uses. The observation normalizer
    is applied, and not changed.

    Args:
        policy: What plays.
        env: Where: as `hurtle.make_vec` takes it. Of Atari games by name ("atari/Pong"), whole games and their scores count.
        episodes: How many; with several agents, so many of the whole env, in which every agent's episodes count.
        deterministic: Take the most likely action; False samples, reproducibly.
        seed: Of the envs and of sampling.
        num_envs: Envs at a time; None takes up to 128 native ones, or 16.
        backend: As for `hurtle.make_vec`.
        env_parameters: The env's own parameters.
        device: Where the policy is.
        emulate: Flatten structured spaces, as in training.
        max_steps: Most steps of one episode; more raises an error, as the episode may never end.
        progress: Show a progress bar while it runs, if on a terminal.

    Raises:
        HurtleError: An episode took more than `max_steps` steps, or the spaces are not those of the policy.
        NonFiniteError: NaN in an observation or a return; names the env.
    """
    check_count("episodes", episodes)
    check_count("max_steps", max_steps)
    check_seed(seed)
    parameters = env_parameters or {}
    if num_envs is None:
        num_envs = NATIVE_ENVS if isinstance(resolve(env, parameters), Env) else PYTHON_ENVS
    check_count("num_envs", num_envs)
    num_envs, first_seed = min(num_envs, episodes), eval_seed(seed)
    tally = Tally(episodes, num_envs, max_steps, games=isinstance(env, str) and env.startswith("atari/"))
    was_training = isinstance(policy, Policy) and policy.training
    if isinstance(policy, Policy):
        policy.eval()
    try:
        with (
            make_vec(env, num_envs, backend=backend, seed=first_seed, emulate=emulate, **parameters) as vec,
            _progress(episodes, progress) as advance,
        ):
            player = Player(policy, vec, deterministic=deterministic, seed=first_seed, device=device)
            obs, infos = vec.reset(seed=first_seed)
            while not tally.complete:
                obs, _, terminated, truncated, infos = vec.step(player.act(obs, infos))
                over = np.asarray(infos.get("_final_obs", np.zeros(num_envs, np.bool_)))
                player.end(terminated, truncated, over)
                advance(tally.add(infos, over))
    finally:
        if isinstance(policy, Policy):
            policy.train(was_training)
    return Evaluation.of(*tally.episodes(), deterministic)


class Tally:
    """Counts the episodes of a vector env until each env has played its share.

    Args:
        episodes: How many in all.
        num_envs: Among how many envs they are divided.
        max_steps: Most steps of one episode.
        games: Episodes are lives of a game, of which the whole counts (`final_info["game"]`).
    """

    def __init__(self, episodes: int, num_envs: int, max_steps: int, games: bool = False):
        self._quota = np.full(num_envs, episodes // num_envs)
        self._quota[: episodes % num_envs] += 1
        self._played, self._steps = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)
        self._max_steps, self._games = max_steps, games
        self._returns: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []

    @property
    def complete(self) -> bool:
        """Whether every env has played its share."""
        return bool((self._played >= self._quota).all())

    def add(self, infos: dict[str, Any], over: np.ndarray) -> int:
        """Take in one step of all envs; returns how many of the episodes asked for ended with it.

        Args:
            infos: What the step returned.
            over: bool [num_envs]: which envs ended.
        """
        counting = self._played < self._quota
        self._steps += 1
        if "_episode" in infos:
            over = self._count(infos, counting, over)
        self._steps[over] = 0
        self._played += over & counting
        late = np.flatnonzero((self._steps >= self._max_steps) & counting & ~over)
        if late.size:
            raise HurtleError(
                f"Env {late[0]} has not ended its episode after {self._steps[late[0]]} steps (max_steps). If it never ends, "
                "limit it: `max_steps` of a native env, gymnasium.wrappers.TimeLimit of others; else raise max_steps here."
            )
        return int((over & counting).sum())

    def _count(self, infos: dict[str, Any], counting: np.ndarray, over: np.ndarray) -> np.ndarray:
        """Keep the episodes that ended in envs that are still counting; which envs ended, as a whole."""
        ended = np.asarray(infos["_episode"])
        episode = infos["episode"]
        if ended.ndim == 1:  # one agent: what the env itself says of its episode, in its last info, is the better
            final = infos.get("final_info", infos)
            if self._games:
                ended = over = np.asarray(final.get("_game", np.zeros_like(over)))
                episode = final.get("game")
            elif isinstance(own := final["episode"], dict) and own.keys() >= {"r", "l"}:
                episode = own
        chosen = ended & (counting if ended.ndim == 1 else counting[:, None])
        if not chosen.any():
            return over
        returns = np.asarray(episode["r"], np.float64)[chosen]
        if np.isnan(returns).any():
            env = int(np.flatnonzero(np.isnan(np.asarray(episode["r"], np.float64)) & chosen)[0]) // (chosen.size // len(over))
            raise NonFiniteError(f"An episode of env {env} has the return NaN: one of its rewards was. Look for it in the env.")
        self._returns.append(returns)
        self._lengths.append(np.asarray(episode["l"], np.int64)[chosen])
        return over

    def episodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of all that counted."""
        if not self._returns:
            raise HurtleError("No agent ended an episode in any env: there is nothing to count.")
        return np.concatenate(self._returns), np.concatenate(self._lengths)


@contextmanager
def _progress(episodes: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """A bar that goes away at the end; yields what advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (wanted and console.is_terminal)) as bar:
        task = bar.add_task("", total=episodes)
        yield lambda count: bar.advance(task, count)


def env_to_play(found: Restored, env: EnvLike | None, parameters: dict[str, Any] | None) -> tuple[EnvLike, dict[str, Any]]:
    """The env on which a restored policy is shown, and its parameters: the run's own, where it is the run's env, then these."""
    trained = found.settings.train
    own = trained.env_parameters if env is None or env == trained.env else {}
    played, given = found.named_env() if env is None else env, parameters or {}
    named: dict[str, Any] = {"env_parameters": {name: value for name, value in own.items() if name not in given}}
    check_code(found.file, named | ({"env": played} if env is None else {}), found.trusted)
    return played, {**own, **given}


def evaluate_run(
    path: Any,
    episodes: int = 100,
    sampled: bool = False,
    env: EnvLike | None = None,
    seed: int = 0,
    num_envs: int | None = None,
    device: str = "cpu",
    env_parameters: dict[str, Any] | None = None,
    trust: bool = False,
) -> Evaluation:
    """Evaluate what a run has learned, and write `evaluation.json` into its folder.

    Args:
        path: A run folder, "latest", or a checkpoint file. Of a run: its best checkpoint if it has one, else the newest.
        episodes: How many.
        sampled: Sample actions instead of taking the most likely ones.
        env: Another env than the run's; needed where that was an object of the caller's.
        seed: Of the envs and of sampling.
        num_envs: Envs at a time; None takes up to 128 native ones, or 16.
        device: Where the policy runs.
        env_parameters: The env's own; those not named are the run's, if the env is.
        trust: Run code that the checkpoint names, also if this user did not sign it.
    """
    folder, file = find_checkpoint(path)
    found = restore(file, device=device, trust=trust)
    played, parameters = env_to_play(found, env, env_parameters)
    evaluation = evaluate_policy(
        found.policy,
        played,
        episodes,
        not sampled,
        seed,
        num_envs,
        env_parameters=parameters,
        device=device,
        emulate=found.emulated,
        progress=True,
    )
    if folder is not None:
        about = {"env": str(played), "env_parameters": parameters, "checkpoint": file.name, "steps": found.steps, "seed": seed}
        single = {"returns": evaluation.returns.tolist(), "lengths": evaluation.lengths.tolist()}
        (folder / "evaluation.json").write_text(to_json({**about, **evaluation.summary(), **single}))
    return evaluation
