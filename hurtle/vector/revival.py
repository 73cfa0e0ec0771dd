"""`Revival`: what becomes of envs whose worker was lost: they come back reset, and their learner sees a truncation."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from gymnasium.vector import AutoresetMode

from hurtle.vector.episodes import Episodes
from hurtle.vector.infos import Infos
from hurtle.vector.options import VecOptions
from hurtle.vector.rows import Rows


class Revival:
    """Envs in new workers, until each has been heard of again."""

    def __init__(self, rows: Rows, episodes: Episodes, options: VecOptions):
        self._rows, self._episodes, self._seed = rows, episodes, options.seed
        self._same_step = options.autoreset_mode is AutoresetMode.SAME_STEP
        self._next_step = options.autoreset_mode is AutoresetMode.NEXT_STEP
        self._lost: set[int] = set()  # lost within an episode: their next step is a reset, told as a truncation
        self._reset_due: set[int] = set()  # NEXT_STEP: at an end, or told as truncated: their next step is the reset itself
        self._unseeded: set[int] = set()  # never reset since they were made anew
        self._count = 0

    def lose(self, envs: Iterable[int], resetting: set[int]) -> None:
        """The worker of these envs is gone; those in `resetting` were being reset and will be again."""
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

    def wants_reset(self, index: int) -> bool:
        """Whether the env must be reset where its learner asks for a step."""
        return index in self._lost or index in self._reset_due

    def forget(self, index: int) -> None:
        """The learner resets the env itself: there is nothing to tell."""
        self._lost.discard(index)
        self._reset_due.discard(index)

    def begin_reset(self, index: int) -> int | None:
        """The env is about to be reset, and its row overwritten.

        Returns:
            The seed if the learner gives none: None, but an env that was made anew must not begin with chance.
        """
        if index in self._lost:  # not earlier: in a pool, the end of the episode before may still have to be received
            self._rows.final_obs[index] = self._rows.obs[index]
        if index not in self._unseeded:
            return None
        return int(np.random.SeedSequence((self._seed, index, self._count)).generate_state(1)[0])

    def came_back(self, index: int, told: dict[int, Infos]) -> None:
        """The env has been reset. If it was lost in an episode, its rows now tell of a truncation."""
        self._unseeded.discard(index)
        self._reset_due.discard(index)
        if index not in self._lost:
            return
        self._lost.discard(index)
        rows = self._rows
        rows.truncated[index] = self._episodes.lose_step(index)
        rows.over[index] = True
        told.setdefault(index, {})["worker_restarted"] = True
        if not self._same_step:  # the last observation, as ever where the reset comes later
            rows.obs[index] = rows.final_obs[index]
        if self._next_step:
            self._reset_due.add(index)
