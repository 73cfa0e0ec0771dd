"""`Episodes`: counts the returns and lengths of running episodes, per env or per agent, from the rows of each step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hurtle.vector.env_rows import ALL, Rows


class Ended(NamedTuple):
    """The episodes of a batch, of which at least one ended."""

    episodes: np.ndarray  # bool [batch, (agents)]: which episodes ended
    envs: np.ndarray  # bool [batch]: which envs are over
    statistics: dict[str, np.ndarray]  # "r" and "l" [batch, (agents)], of ended and running episodes


class Episodes:
    """Statistics of all envs of a vector.

    Args:
        rows: The arrays that back ends write.
        several: Whether envs have several agents; an agent's episode consists of the steps in which it acts.
        next_step: Whether the step after an end is a reset (NEXT_STEP), which belongs to no episode.
    """

    def __init__(self, rows: Rows, several: bool, next_step: bool):
        self._rows, self._several, self._next_step = rows, several, next_step
        lead = rows.rewards.shape
        self._returns, self._lengths = np.zeros(lead), np.zeros(lead, np.int64)
        self._one = np.ones(lead, np.int64)
        self._acting = np.ones(lead, np.bool_)  # which agents act in the next step
        self._reset_next = np.zeros(lead[0], np.bool_)  # envs whose next result is a reset, not a step
        self._resets_due = False  # whether there are any

    def state_dict(self) -> dict[str, np.ndarray]:
        """The counts of running episodes."""
        return {"returns": self._returns.copy(), "lengths": self._lengths.copy(), "reset_next": self._reset_next.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these counts."""
        self._returns[...], self._lengths[...] = state["returns"], state["lengths"]
        self._reset_next[...] = state["reset_next"]
        self._resets_due = bool(self._reset_next.any())

    def expect_reset(self, ids: Any) -> None:
        """Expect the first observation of an episode as the next result of these envs."""
        self._reset_next[ids] = self._resets_due = True

    def lose_step(self, index: int) -> Any:
        """Do not count the next step of this env, which did not happen. Returns which agents would have acted."""
        acting = self._acting[index].copy()
        self._lengths[index] -= acting
        return acting

    def add(self, chosen: Any) -> Ended | None:
        """Count the results of these envs (a slice or indices); returns the ended episodes, or None."""
        if chosen is ALL and not self._several and not self._resets_due:  # the common case, without temporary arrays
            self._returns += self._rows.rewards
            self._lengths += self._one  # half the time of += 1
            ended = over = self._rows.over
        else:
            ended, over = self._add_some(chosen)
        nothing = b"\x01" not in ended.tobytes()  # a tenth of the time of ended.any()
        if nothing and (ended is over or b"\x01" not in over.tobytes()):
            return None
        result = Ended(ended.copy(), over.copy(), {"r": self._returns[chosen].copy(), "l": self._lengths[chosen].copy()})
        going_on = ~(result.episodes | over[:, None]) if self._several else ~result.episodes
        self._returns[chosen] *= going_on
        self._lengths[chosen] *= going_on
        if self._next_step:
            self._reset_next[chosen] = over
            self._resets_due = True
        return result

    def _add_some(self, chosen: Any) -> tuple[np.ndarray, np.ndarray]:
        rows = self._rows
        acting: Any = self._acting[chosen] if self._several else 1
        if self._resets_due:
            acting = self._leave_out_resets(chosen, acting)
        self._returns[chosen] += rows.rewards[chosen] * acting
        self._lengths[chosen] += acting
        over = rows.over[chosen]
        if not self._several:
            return over, over
        ended = (rows.terminated[chosen] | rows.truncated[chosen] | over[:, None]) & acting
        self._acting[chosen] = rows.agent_mask[chosen]
        return ended, over

    def _leave_out_resets(self, chosen: Any, acting: Any) -> Any:
        """Zero the counts of episodes that start now; returns which agents acted, without the rows that were reset."""
        stepped = ~self._reset_next[chosen]
        self._reset_next[chosen] = False
        self._resets_due = bool(self._reset_next.any())
        stepped = stepped[:, None] if self._several else stepped
        self._returns[chosen] *= stepped
        self._lengths[chosen] *= stepped
        return acting * stepped
