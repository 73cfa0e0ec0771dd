"""From a vector env's arrays to rows: shapes, masks, checks for NaN, ended episodes, episode starts. Knows no policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from hurtle.contracts import ListedEpisodes
from hurtle.emulation.leaves import tree_leaves
from hurtle.errors import HurtleError, NonFiniteError


class EpisodeStarts(NamedTuple):
    """The state of each row before the next step, bool `[rows]` each; see `episode_starts`."""

    starts: np.ndarray
    """The next step starts an episode of the row."""
    resetting: np.ndarray
    """The next step is the row's reset (NEXT_STEP)."""
    left: np.ndarray
    """The row's agent left without a flag and its env is over: the last step it took was its episode's last."""


def episode_starts(
    starts: np.ndarray, resetting: np.ndarray, acting: np.ndarray | None, ended: np.ndarray, over: np.ndarray, next_step: bool
) -> EpisodeStarts:
    """Which rows start an episode with the next step; an absent agent's first step may come later.

    This is the reference. Compiled code repeats it: `write_outcomes` in kernels/cpu/rollout.py and `outcome_row` in
    kernels/device_rows.py; tests/collect/test_native_collector.py and test_device_collector.py compare them.

    Args:
        starts: Rows whose last step started an episode.
        resetting: Rows whose last step was a reset.
        acting: Rows for which the last step counted; None: all.
        ended: Rows whose episode ended with it.
        over: Rows of envs whose episode is over for all agents.
        next_step: Whether resets take a step of their own.
    """
    waiting = left = np.zeros_like(ended)
    if acting is not None:
        waiting, left = starts & ~acting, over & ~acting & ~starts & ~resetting
    if next_step:
        return EpisodeStarts(resetting | waiting | (ended & ~over), over, left)
    return EpisodeStarts(ended | waiting | over, np.zeros_like(ended), left)


def unused_seeds(saved: Mapping[str, Any], num_envs: int) -> int:
    """How far to move the seeds of a saved collector's envs, so that new episodes use others than all that were used.

    Args:
        saved: The collector's state; "num_envs" are those of the whole run, where this collector has only a part of them.
        num_envs: Envs of this collector.
    """
    return (int(saved["steps"]) + 1) * int(saved.get("num_envs", num_envs))


def _any(flags: np.ndarray) -> bool:
    """`flags.any()`, but in a tenth of the time for few rows."""
    return b"\x01" in flags.tobytes()


def _all(flags: np.ndarray) -> bool:
    return b"\x00" not in flags.tobytes()


def is_finite(array: np.ndarray) -> bool:
    """Whether these are floats without NaN and infinities."""
    return array.dtype.kind == "f" and _all(np.isfinite(array))


class VecRows:
    """A vector env seen as rows: one per agent of each env, env-major.

    Args:
        vec: Any `gymnasium.vector.VectorEnv`; ours may have several agents per env.

    Attributes:
        next_step: The env resets in the step after an end (NEXT_STEP) instead of in the same one.
        infos_tell: Whether infos are never empty where an episode ended.

    Raises:
        HurtleError: The vector does not reset its envs automatically.
    """

    def __init__(self, vec: VectorEnv):
        self.vec = vec
        self.num_envs = int(vec.num_envs)
        self.num_agents = int(getattr(vec, "num_agents", 1))
        self.num_rows = self.num_envs * self.num_agents
        mode = vec.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
            raise HurtleError(
                f"Rollouts need a vector env that resets its envs, in the SAME_STEP or the NEXT_STEP, and says which in "
                f"metadata['autoreset_mode']; this one says {mode}."
            )
        self.next_step = mode is AutoresetMode.NEXT_STEP
        self._agent_axis = self.num_agents > 1 or getattr(vec, "agents", None) is not None  # even a lone agent may have one
        layout = getattr(vec, "layout", None)
        self._layout = layout if layout is not None and not layout.is_plain else None
        self._own_statistics = not hasattr(vec, "num_agents")  # other libraries' vectors may not track episodes
        self.infos_tell = not self._own_statistics
        self._returns, self._lengths = np.zeros(self.num_rows), np.zeros(self.num_rows, np.int64)

    def flat(self, array: Any) -> np.ndarray:
        """`[envs, (agents), …]` as `[rows, …]`, a view where possible."""
        array = np.asarray(array)
        return array.reshape(-1, *array.shape[2:]) if self._agent_axis else array

    def actions(self, rows: np.ndarray) -> np.ndarray:
        """Actions `[rows, …]` as the env expects them."""
        return rows.reshape(-1, self.num_agents, *rows.shape[1:]) if self._agent_axis else rows

    def name_of(self, row: int) -> str:
        """A row's env and agent, for messages."""
        env, agent = divmod(row, self.num_agents)
        return f"agent {agent} of env {env}" if self._agent_axis else f"env {env}"

    def mask(self, infos: dict[str, Any]) -> np.ndarray | None:
        """Legal actions, bool `[rows, actions]`, or None if no env reports any; if an env reports none, all are legal."""
        if "action_mask" not in infos:
            return None
        mask, reported = np.asarray(infos["action_mask"]), infos.get("_action_mask")
        if reported is None or (mask.dtype != object and np.all(reported)):  # by every row
            return mask.reshape(-1, mask.shape[-1]).astype(np.bool_, copy=False)
        reported = np.asarray(reported)
        legal = np.ones((len(reported), len(mask[reported.argmax()])), np.bool_)
        for n in reported.nonzero()[0]:
            legal[n] = mask[n]
        return legal

    def present(self, infos: dict[str, Any]) -> np.ndarray | None:
        """Which rows act in the next step, bool `[rows]`; None: all."""
        return self.flat(infos["agent_mask"]).astype(np.bool_) if "agent_mask" in infos else None

    def over(self, infos: dict[str, Any], ended: np.ndarray, acting: np.ndarray | None) -> np.ndarray:
        """All rows of envs that are over for all agents, bool `[rows]`: their next step starts an episode, or is the reset."""
        if acting is None or not self._agent_axis:
            return ended
        over = infos.get("_metrics" if self.next_step else "_final_obs")
        if over is None and not self.next_step:
            return np.zeros_like(ended)
        if over is None:  # no agent continues, and in a Python env none joins; native ones show their last state
            over = (ended | ~acting).reshape(-1, self.num_agents).all(1) & ended.reshape(-1, self.num_agents).any(1)
            if hasattr(self.vec, "agents"):
                over &= ~np.asarray(infos["agent_mask"]).any(1)
        return np.asarray(over).repeat(self.num_agents)

    def final_obs(self, infos: dict[str, Any], rows: np.ndarray, obs: np.ndarray) -> np.ndarray:
        """The last observations of these rows' truncated episodes; `obs`: what the step returned.

        An agent that is truncated while its env continues has its last observation in `obs`; so does every agent of an env that
        resets in the next step.
        """
        final = obs[rows].copy()
        if self.next_step or "final_obs" not in infos:
            return final
        over = np.asarray(infos["_final_obs"])[rows // self.num_agents]
        given = infos["final_obs"]
        if isinstance(given, np.ndarray) and given.dtype == object:  # Gymnasium's own vectors: one array per ended env
            for k in over.nonzero()[0]:
                final[k] = given[rows[k]]
        elif over.any():
            final[over] = self.flat(given)[rows[over]]
        return final

    def ended_episodes(
        self, infos: dict[str, Any], rewards: np.ndarray, ended: np.ndarray, stepped: np.ndarray | None
    ) -> ListedEpisodes | None:
        """The episodes that ended with this step; statistics that the vector itself reports take precedence."""
        if self._own_statistics:
            counted = 1 if stepped is None else stepped
            self._returns += rewards * counted
            self._lengths += counted
        if not _any(ended):
            return None
        found = self._reported(infos) if "_episode" in infos else (self._returns[ended], self._lengths[ended], {})
        if self._own_statistics:
            self._returns[ended] = self._lengths[ended] = 0
        return found

    def _reported(self, infos: dict[str, Any]) -> ListedEpisodes:
        episode, ended = infos["episode"], np.asarray(infos["_episode"])
        own = [name for name in episode if name not in ("r", "l", "t") and not name.startswith("_")]
        with_metrics = infos.get("_metrics", ended if self.num_agents == 1 else None)
        metrics = {name: np.asarray(episode[name])[with_metrics] for name in own} if with_metrics is not None else {}
        return np.asarray(episode["r"])[ended], np.asarray(episode["l"])[ended], metrics

    def check_finite(self, what: str, array: np.ndarray, steps: Any, rows: np.ndarray | None = None) -> None:
        """Raise on NaN and infinities before anything learns from them.

        Args:
            what: "observation", "reward" …
            array: `[batch, …]`; may be the bytes of a structured observation.
            steps: Steps taken in this run: an int for all envs, or an array with one per env.
            rows: Which rows these are; None: all in order.

        Raises:
            NonFiniteError: Names the env, the agent and the step.
        """
        if is_finite(array):
            return
        structured = self._layout is not None and array.dtype == np.uint8
        for leaf in tree_leaves(self._layout.unflatten(array)) if structured else [array]:  # type: ignore[union-attr]
            if leaf.dtype.kind != "f" or np.isfinite(leaf).all():
                continue
            bad = int(np.argwhere(~np.isfinite(leaf))[0][0])
            row = bad if rows is None else int(rows[bad])
            env, who = row // self.num_agents, self.name_of(row)
            raise NonFiniteError(
                f"The {what} of {who} at its step {np.broadcast_to(steps, self.num_envs)[env]} is not finite: "
                f"{np.array2string(leaf[bad], threshold=12)}. "
                "Nothing was learned from it. Look for a division by zero, a log or an overflow in the env."
            )
