"""Between a vector env's arrays and rows: shapes, masks, numbers that are not finite, ended episodes. Knows no policies."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from hurtle.buffers.rollout import EpisodeStats
from hurtle.emulation.leaves import tree_leaves
from hurtle.errors import HurtleError, NonFiniteError


class VecRows:
    """A vector env seen as rows: one per agent of each env, env-major.

    Args:
        vec: Any `gymnasium.vector.VectorEnv`; ours may have several agents per env.

    Attributes:
        next_step: The env resets in the step after an end (NEXT_STEP) instead of in the same one.

    Raises:
        HurtleError: The vector does not reset its envs.
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
        self._agent_axis = self.num_agents > 1 or getattr(vec, "agents", None) is not None  # a lone agent may have one too
        layout = getattr(vec, "layout", None)
        self._layout = layout if layout is not None and not layout.is_plain else None
        self._own_statistics = not hasattr(vec, "num_agents")  # a foreign vector may count no episodes
        self._returns, self._lengths = np.zeros(self.num_rows), np.zeros(self.num_rows, np.int64)

    def flat(self, array: Any) -> np.ndarray:
        """`[envs, (agents), …]` as `[rows, …]`, a view where possible."""
        array = np.asarray(array)
        return array.reshape(-1, *array.shape[2:]) if self._agent_axis else array

    def actions(self, rows: np.ndarray) -> np.ndarray:
        """Actions `[rows, …]` as the env takes them."""
        return rows.reshape(-1, self.num_agents, *rows.shape[1:]) if self._agent_axis else rows

    def mask(self, infos: dict[str, Any]) -> np.ndarray | None:
        """Legal actions, bool `[rows, actions]`, if an env tells them; all are in an env that does not."""
        if "action_mask" not in infos:
            return None
        mask, told = np.asarray(infos["action_mask"]), infos.get("_action_mask")
        if told is None or (mask.dtype != object and np.all(told)):  # of every row
            return mask.reshape(-1, mask.shape[-1]).astype(np.bool_, copy=False)
        told = np.asarray(told)
        legal = np.ones((len(told), len(mask[told.argmax()])), np.bool_)
        for n in told.nonzero()[0]:
            legal[n] = mask[n]
        return legal

    def present(self, infos: dict[str, Any]) -> np.ndarray | None:
        """Which rows act in the step to come, bool `[rows]`; None: all."""
        return self.flat(infos["agent_mask"]).astype(np.bool_) if "agent_mask" in infos else None

    def over(self, infos: dict[str, Any], ended: np.ndarray, acting: np.ndarray | None) -> np.ndarray:
        """All rows of the envs that are over as a whole, bool `[rows]`: their next step begins an episode, or is the reset."""
        if acting is None or not self._agent_axis:
            return ended
        told = infos.get("_metrics" if self.next_step else "_final_obs")
        if told is None and not self.next_step:
            return np.zeros_like(ended)
        if told is None:  # nobody goes on; and in a Python env nobody comes, while native ones show their last state
            told = (ended | ~acting).reshape(-1, self.num_agents).all(1) & ended.reshape(-1, self.num_agents).any(1)
            if hasattr(self.vec, "agents"):
                told &= ~np.asarray(infos["agent_mask"]).any(1)
        return np.asarray(told).repeat(self.num_agents)

    def final_obs(self, infos: dict[str, Any], rows: np.ndarray, obs: np.ndarray) -> np.ndarray:
        """The last observations of the episodes of these rows, which were truncated; `obs`: what the step returned.

        An agent that is truncated while its env goes on has its last observation in `obs`.
        """
        final = obs[rows].copy()
        if "final_obs" not in infos:
            return final
        over = np.asarray(infos["_final_obs"])[rows // self.num_agents]
        given = infos["final_obs"]
        if isinstance(given, np.ndarray) and given.dtype == object:  # Gymnasium's own vectors: one array per ended env
            for k in over.nonzero()[0]:
                final[k] = given[rows[k]]
        elif over.any():
            final[over] = self.flat(given)[rows[over]]
        return final

    def episodes(
        self, infos: dict[str, Any], rewards: np.ndarray, ended: np.ndarray, stepped: np.ndarray | None
    ) -> EpisodeStats | None:
        """The episodes that ended with this step; a foreign vector's own statistics win where it has some."""
        if self._own_statistics:
            counted = 1 if stepped is None else stepped
            self._returns += rewards * counted
            self._lengths += counted
        if not ended.any():
            return None
        if "_episode" in infos:
            found = np.asarray(infos["_episode"])
            episode = infos["episode"]
            known = {"r", "l", "t"}
            in_metrics = infos.get("_metrics", found if self.num_agents == 1 else None)
            metrics = {
                name: np.asarray(values)[in_metrics]
                for name, values in episode.items()
                if in_metrics is not None and not name.startswith("_") and name not in known
            }
            stats = EpisodeStats(np.array(episode["r"][found], np.float64), np.array(episode["l"][found]), metrics)
        else:
            stats = EpisodeStats(self._returns[ended].copy(), self._lengths[ended].copy(), {})
        if self._own_statistics:
            self._returns[ended] = self._lengths[ended] = 0
        return stats

    def check_finite(self, what: str, array: np.ndarray, steps: Any, rows: np.ndarray | None = None) -> None:
        """Refuse NaN and infinities before anything learns from them.

        Args:
            what: "observation", "reward" …
            array: `[batch, …]`; an observation may be the bytes of a structured one.
            steps: How many steps the envs have taken in this run: an int for all, or an array with one for each env.
            rows: Which rows these are; None: all in order.

        Raises:
            NonFiniteError: Names the env, the agent and the step.
        """
        structured = self._layout is not None and array.dtype == np.uint8
        for leaf in tree_leaves(self._layout.unflatten(array)) if structured else [array]:  # type: ignore[union-attr]
            if leaf.dtype.kind != "f" or np.isfinite(leaf).all():
                continue
            bad = int(np.argwhere(~np.isfinite(leaf))[0][0])
            env, agent = divmod(bad if rows is None else int(rows[bad]), self.num_agents)
            who = f"env {env}" if not self._agent_axis else f"agent {agent} of env {env}"
            raise NonFiniteError(
                f"The {what} of {who} at its step {np.broadcast_to(steps, self.num_envs)[env]} is not finite: "
                f"{np.array2string(leaf[bad], threshold=12)}. "
                "Nothing was learned from it. Look for a division by zero, a log or an overflow in the env."
            )


def merge_stats(found: list[EpisodeStats]) -> EpisodeStats:
    """The episodes of several steps as one."""
    if not found:
        return EpisodeStats(np.zeros(0), np.zeros(0, np.int64), {})
    names = dict.fromkeys(name for stats in found for name in stats.metrics)
    metrics = {name: np.concatenate([stats.metrics[name] for stats in found if name in stats.metrics]) for name in names}
    return EpisodeStats(np.concatenate([s.returns for s in found]), np.concatenate([s.lengths for s in found]), metrics)
