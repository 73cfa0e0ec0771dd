"""Score a policy: many parallel episodes, without bias towards short ones, with confidence intervals.

policy × vector env → every env plays its quota of episodes → returns, lengths → `Evaluation`. Knows nothing of learning.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hurtle.collect.native_player import NativePlayer, player_obstacle
from hurtle.deploy.restore import Restored, find_checkpoint, restore
from hurtle.envs.registry import EnvLike, resolve
from hurtle.native.env import Env
from hurtle.policies.policy import Policy
from hurtle.runners.playing import EVAL_ACTION_STREAM, Player, RowPolicy, compiled_rows, eval_seed
from hurtle.runners.settings import TrainConfig
from hurtle.runners.signals import StopSignals
from hurtle.runners.tally import Tally
from hurtle.tracking.progress import progress_of
from hurtle.tracking.return_statistics import summarize
from hurtle.tracking.run_folder import RunFolder
from hurtle.trust import check_code
from hurtle.vector.factory import make_vec
from hurtle.vector.options import check_count, check_seed
from hurtle.vector.vec_env import VecEnv

NATIVE_ENVS, PYTHON_ENVS = 128, 16
"""Default numbers of parallel envs; Python envs take memory and time to start."""


@dataclass(frozen=True)
class Evaluation:
    """The episodes of a policy, and their statistics.

    Attributes:
        returns: Return of each episode, float64 [episodes], in no particular order.
        lengths: Length of each episode, int64 [episodes].
        mean: Mean return.
        std: Standard deviation of the returns.
        iqm: Interquartile mean: the mean of the middle half, robust to outlier episodes.
        low: Lower end of the bootstrapped 95 % confidence interval of the mean.
        high: Upper end of that interval.
        episodes: Number of episodes; with several agents, each agent's episodes count.
        deterministic: Whether the most likely actions were taken rather than sampled ones.
        stopped: Why an interrupted evaluation is incomplete, or an empty string.
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
    stopped: str = ""

    @classmethod
    def of(cls, returns: np.ndarray, lengths: np.ndarray, deterministic: bool, stopped: str = "") -> Evaluation:
        """Compute the statistics of these episodes."""
        found = summarize(returns)
        numbers = {name: float(found[name]) for name in ("mean", "std", "iqm", "low", "high")}
        return cls(returns, lengths, **numbers, episodes=len(returns), deterministic=deterministic, stopped=stopped)

    def __str__(self) -> str:
        how = "deterministic" if self.deterministic else "sampled"
        return (
            f"return {self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]  IQM {self.iqm:.2f}  std {self.std:.2f}  "
            f"({self.episodes} {how} episodes){self.stopped and f' {self.stopped}'}"
        )

    def summary(self) -> dict[str, Any]:
        """The statistics without the individual episodes, for JSON."""
        names = ("mean", "std", "iqm", "low", "high", "episodes", "deterministic", *(("stopped",) if self.stopped else ()))
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
    gear: str = "auto",
    keep_stopped: bool = False,
) -> Evaluation:
    """Play episodes in parallel and compute their statistics.

    Each env plays a fixed number of episodes, so that short episodes do not count more often than long ones. The envs' seeds
    are hashed from `seed` into a stream that no training run uses. The observation normalizer is applied, not updated.

    Args:
        policy: The policy to score.
        env: The env, as for `hurtle.make_vec`. For Atari games by name ("atari/Pong"), complete games and their scores count.
        episodes: Number of episodes; with several agents, episodes of the env, in which every agent's episodes count.
        deterministic: Take the most likely action; False samples, reproducibly.
        seed: Seed of the envs and of sampled actions.
        num_envs: Parallel envs; None: up to 128 native ones, or 16.
        backend: As for `hurtle.make_vec`.
        env_parameters: Parameters of the env.
        device: The policy's device.
        emulate: Flatten structured spaces, as in training.
        max_steps: Longest episode; a longer one raises an error, since it may never end.
        progress: Show progress on standard error: a bar on a terminal, else lines.
        gear: "auto" plays in compiled code where it can, native envs included, else with torch; "general" always uses torch.
        keep_stopped: On Ctrl-C or SIGTERM, return the episodes played so far, with the reason in `stopped`.

    Raises:
        HurtleError: An episode exceeded `max_steps`, or the env's spaces differ from the policy's.
        KeyboardInterrupt: Ctrl-C before any episode ended, or without `keep_stopped`.
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
    stop = _Stop()
    if isinstance(policy, Policy):
        policy.eval()
    try:
        vec: Any
        with (
            make_vec(env, num_envs, backend=backend, seed=first_seed, emulate=emulate, **parameters) as vec,
            progress_of("evaluating", episodes, progress) as advance,
            StopSignals(stop) if keep_stopped else nullcontext(),
        ):
            how: dict[str, Any] = {"deterministic": deterministic, "seed": first_seed}
            if gear != "general" and isinstance(policy, Policy) and player_obstacle(vec, policy, deterministic) is None:
                _play_compiled(NativePlayer(vec, policy, stream=EVAL_ACTION_STREAM, **how), tally, advance, stop)
            else:
                played: Policy | RowPolicy = policy
                if gear != "general" and isinstance(policy, Policy):
                    played = compiled_rows(policy, vec, deterministic)
                _play(Player(played, vec, device=device, **how), vec, first_seed, tally, advance, stop)
    finally:
        if isinstance(policy, Policy):
            policy.train(was_training)
    if tally.complete:
        return Evaluation.of(*tally.episodes(), deterministic)
    if not tally.count:
        raise KeyboardInterrupt
    bias = "; the longest had not ended, so the mean is biased" if tally.is_biased else ""
    return Evaluation.of(*tally.episodes(), deterministic, f"stopped by {stop.by} before {episodes} were played{bias}")


class _Stop:
    """Records the signal that requested a stop."""

    by = ""

    def __call__(self, by: str) -> None:
        self.by = by


def _play(player: Player, vec: VecEnv, seed: int, tally: Tally, advance: Callable[[int], None], stop: _Stop) -> None:
    """Play step by step, with any policy on any env."""
    obs, infos = vec.reset(seed=seed)
    while not tally.complete and not stop.by:
        obs, _, terminated, truncated, infos = vec.step(player.act(obs, infos))
        over = np.asarray(infos.get("_final_obs", np.zeros(vec.num_envs, np.bool_)))
        player.end(terminated, truncated, over)
        advance(tally.add(infos, over))


def _play_compiled(player: NativePlayer, tally: Tally, advance: Callable[[int], None], stop: _Stop) -> None:
    """Play many steps per call in compiled code: the same episodes, unless rounding tips an action."""
    try:
        while not tally.complete and not stop.by:
            played = player.play()
            assert played is not None  # nothing stops it: calls are short
            for step in zip(*played, strict=True):
                advance(tally.add_ended(*step))
    finally:
        player.close(envs=False)


def evaluate_trained(train: TrainConfig, policy: Policy, env: EnvLike, emulate: bool, gear: str = "auto") -> Evaluation:
    """Evaluate a policy as the settings of its run say; see `evaluate_policy`."""
    return evaluate_policy(
        policy,
        env,
        episodes=train.eval_episodes,
        deterministic=not train.eval_sampled,
        seed=train.seed,
        backend=train.backend,
        env_parameters={**train.env_parameters, **({"unsafe": True} if train.unsafe else {})},
        device=train.device,
        emulate=emulate,
        gear=gear,
    )


def env_to_play(found: Restored, env: EnvLike | None, parameters: dict[str, Any] | None) -> tuple[EnvLike, dict[str, Any]]:
    """The env to play a restored policy on, and its parameters; on the run's env, the given ones override the run's.

    Raises:
        TrustError: The checkpoint names code that the user has not allowed.
    """
    own = found.settings.get("env_parameters", {}) if env is None or env == found.settings["env"] else {}
    played, given = found.named_env() if env is None else env, parameters or {}
    named: dict[str, Any] = {"env_parameters": {name: value for name, value in own.items() if name not in given}}
    check_code(found.file, named | ({"env": played} if env is None else {}), found.trusted, found.signature)
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
    keep_stopped: bool = False,
) -> Evaluation:
    """Evaluate the policy of a run, and write `evaluation.json` into its folder.

    Args:
        path: A run folder, "latest", or a checkpoint file. A run's best checkpoint is used if there is one, else its newest.
        episodes: Number of episodes.
        sampled: Sample actions instead of taking the most likely ones.
        env: An env to use instead of the run's; required if the run was trained on an object.
        seed: Seed of the envs and of sampled actions.
        num_envs: Parallel envs; None: up to 128 native ones, or 16.
        device: Device of the policy.
        env_parameters: Parameters of the env; on the run's own env, the others are the run's.
        trust: Run code that the checkpoint names, even if this user did not sign it.
        keep_stopped: On Ctrl-C or SIGTERM, return and write the episodes played so far, with the reason in `stopped`.
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
        gear="general" if found.settings.get("compile") else found.settings.get("gear", "auto"),
        keep_stopped=keep_stopped,
    )
    if folder is not None:
        about = {"env": str(played), "env_parameters": parameters, "checkpoint": file.name, "steps": found.steps, "seed": seed}
        single = {"returns": evaluation.returns.tolist(), "lengths": evaluation.lengths.tolist()}
        RunFolder(folder).write_evaluation({**about, **evaluation.summary(), **single})
    return evaluation
