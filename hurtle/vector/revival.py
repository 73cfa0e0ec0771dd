"""`Revival`: bookkeeping for envs whose worker was lost: they are reset in a new worker and reported as truncated."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from gymnasium.vector import AutoresetMode

from hurtle.vector.env_rows import Rows
from hurtle.vector.episode_counts import Episodes
from hurtle.vector.infos import Infos
from hurtle.vector.options import VecOptions


class Revival:
    """The envs of replaced workers, until each has been reset."""

    def __init__(self, rows: Rows, episodes: Episodes, options: VecOptions):
        self._rows, self._episodes, self._seed = rows, episodes, options.seed
        self._same_step = options.autoreset_mode is AutoresetMode.SAME_STEP
        self._next_step = options.autoreset_mode is AutoresetMode.NEXT_STEP
        self._lost: set[int] = set()  # lost within an episode: their next step is a reset, reported as a truncation
        self._reset_due: set[int] = set()  # NEXT_STEP: ended, or reported as truncated: their next step is the reset itself
        self._unseeded: set[int] = set()  # not reset yet in the new worker
        self._count = 0

    def lose(self, envs: Iterable[int], resetting: set[int]) -> None:
        """Record that the worker of these envs is gone; those in `resetting` were being reset and will be reset again."""
        self._count += 1
        for index in envs:
            self._unseeded.add(index)
            if index in resetting or index in self._lost:
                continue
            if self._next_step and self._rows.over[index]:
                self._reset_due.add(index)
            else:
                self._lost.add(index)

    def __bool__(self) -> bool:
        return bool(self._lost or self._reset_due)

    def needs_reset(self, index: int) -> bool:
        """Whether the env must be reset when the learner asks for a step."""
        return index in self._lost or index in self._reset_due

    def cancel(self, index: int) -> None:
        """Drop an env that the learner resets itself: there is nothing to report."""
        self._lost.discard(index)
        self._reset_due.discard(index)

    def prepare_reset(self, index: int) -> int | None:
        """Prepare for a reset of the env, which overwrites its row.

        Returns:
            The seed to use if the learner gives none: None, or, for an env in a new worker, a seed that makes it repeatable.
        """
        if index in self._lost:  # not earlier: in a pool, the end of the previous episode may not have been received yet
            self._rows.final_obs[index] = self._rows.obs[index]
        if index not in self._unseeded:
            return None
        return int(np.random.SeedSequence((self._seed, index, self._count)).generate_state(1)[0])

    def was_reset(self, index: int, infos: dict[int, Infos]) -> None:
        """Record that the env has been reset. If it was lost within an episode, mark its rows as truncated."""
        self._unseeded.discard(index)
        self._reset_due.discard(index)
        if index not in self._lost:
            return
        self._lost.discard(index)
        rows = self._rows
        rows.truncated[index] = self._episodes.lose_step(index)
        rows.over[index] = True
        infos.setdefault(index, {})["worker_restarted"] = True
        if not self._same_step:  # the reset comes later: return the last observation
            rows.obs[index] = rows.final_obs[index]
        if self._next_step:
            self._reset_due.add(index)
