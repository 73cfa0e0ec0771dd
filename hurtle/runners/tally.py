"""`Tally`: decides which episodes of a vector env count, so that short ones do not count more often than long ones.

steps of all envs → each env's quota of episodes → returns, lengths. Knows nothing of policies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hurtle.errors import HurtleError, NonFiniteError


class Tally:
    """Counts the episodes of a vector env until each env has played its quota.

    Args:
        episodes: Number of episodes in total.
        num_envs: Number of envs that share them.
        max_steps: Longest episode.
        games: Episodes are lives of a game, and complete games count (`final_info["game"]`).
    """

    def __init__(self, episodes: int, num_envs: int, max_steps: int, games: bool = False):
        self._quota = np.full(num_envs, episodes // num_envs)
        self._quota[: episodes % num_envs] += 1
        self._played, self._steps = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)
        self._max_steps, self._games = max_steps, games
        self._returns: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._rounds: list[np.ndarray] = []  # for each episode, the number its env had played before

    @property
    def complete(self) -> bool:
        """Whether every env has played its quota."""
        return bool((self._played >= self._quota).all())

    @property
    def count(self) -> int:
        """Episodes counted so far; with several agents, each agent's."""
        return sum(map(len, self._returns))

    def add(self, infos: dict[str, Any], over: np.ndarray) -> int:
        """Add one step of all envs; returns the number of counted episodes that it ended.

        Args:
            infos: The infos that the step returned.
            over: Envs that ended, bool [num_envs].
        """
        if "_episode" in infos:
            return self.add_ended(*self._ended(infos, over))
        return self.add_ended(over)

    def add_ended(
        self,
        over: np.ndarray,
        ended: np.ndarray | None = None,
        returns: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
    ) -> int:
        """Add one step of all envs; returns the number of counted episodes that it ended.

        Args:
            over: Envs that ended, bool [num_envs].
            ended: Rows whose episode ended, bool [num_envs] or [num_envs, agents]; None: none.
            returns: Their returns, valid where `ended`.
            lengths: Their lengths, likewise.
        """
        counting = self._played < self._quota
        self._steps += 1
        if ended is not None:
            self._keep(ended & (counting if ended.ndim == 1 else counting[:, None]), returns, lengths)
        self._steps[over] = 0
        self._played += over & counting
        late = np.flatnonzero((self._steps >= self._max_steps) & counting & ~over)
        if late.size:
            raise HurtleError(
                f"Env {late[0]} has not ended its episode after {self._steps[late[0]]} steps (max_steps). If it never ends, "
                "limit it: `max_steps` of a native env, gymnasium.wrappers.TimeLimit of others; else raise max_steps here."
            )
        return int((over & counting).sum())

    def _ended(self, infos: dict[str, Any], over: np.ndarray) -> tuple[Any, Any, Any, Any]:
        """The envs that ended for all agents, the rows whose episode ended, their returns and lengths."""
        ended = np.asarray(infos["_episode"])
        episode = infos["episode"]
        if ended.ndim == 1:  # one agent: prefer what the env itself reports in its last info
            final = infos.get("final_info", infos)
            if self._games:
                ended = over = np.asarray(final.get("_game", np.zeros_like(over)))
                episode = final.get("game")
            elif isinstance(own := final["episode"], dict) and own.keys() >= {"r", "l"}:
                episode = own
        return over, ended, None if episode is None else episode["r"], None if episode is None else episode["l"]

    def _keep(self, chosen: np.ndarray, returns: Any, lengths: Any) -> None:
        """Keep the episodes of `chosen`, bool [num_envs] or [num_envs, agents]."""
        if not chosen.any():
            return
        found, envs = np.asarray(returns, np.float64)[chosen], np.nonzero(chosen)[0]
        if np.isnan(found).any():
            env = envs[np.flatnonzero(np.isnan(found))[0]]
            raise NonFiniteError(f"An episode of env {env} has a NaN return: look for a NaN reward in the env.")
        self._returns.append(found)
        self._lengths.append(np.asarray(lengths, np.int64)[chosen])
        self._rounds.append(self._played[envs])

    def episodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of all episodes that count.

        Until every env has played its quota, only rounds that all envs have finished count, since the episodes still being
        played are the long ones; if no round is finished, every ended episode counts.
        """
        if not self._returns:
            raise HurtleError("No agent ended an episode in any env: there is nothing to score.")
        returns, lengths, rounds = map(np.concatenate, (self._returns, self._lengths, self._rounds))
        if self.is_biased or self.complete:
            return returns, lengths
        whole = rounds < self._finished
        return returns[whole], lengths[whole]

    @property
    def is_biased(self) -> bool:
        """Whether short episodes count more often than long ones, because not all envs have finished a round."""
        return not self.complete and self._finished == 0

    @property
    def _finished(self) -> int:
        """Rounds that every env has finished; envs with a smaller quota skip the last."""
        return int(np.where(self._played < self._quota, self._played, self._quota.max()).min())
