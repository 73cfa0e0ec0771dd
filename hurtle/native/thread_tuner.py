"""`ThreadTuner`: how many threads to use for work that repeats, decided by measuring it while it runs."""

from __future__ import annotations

import math

MEMORY_SECONDS = 0.5
"""Half-life of what was measured: machines get busy and quiet again."""
EXPLORED = 0.1
"""Share of the time in which the numbers that are not in use are measured again."""
LOSS, MOST_LOST = 0.03, 1.0
"""Share of the time that measuring slower numbers may cost. A single call counts for at most so many seconds: it may have been
stopped from outside."""
BETTER, ENOUGH, LONG = 0.97, 10, 0.3
"""Switch to a number that takes less than this share of the time, once that many calls in a row or so many seconds show it."""
FASTER, SLOWER, TRIES = 0.85, 1.3, 3
"""The search tries a number once if its time is below this share of the last one's, twice if above that, else this often."""
TRIAL_SECONDS = 0.002
"""How long a trial should take: it may turn out to be a slow one."""


def ladder(most: int) -> list[int]:
    """The numbers of threads to choose from."""
    return sorted({*(1 << k for k in range(most.bit_length())), most})


class ThreadTuner:
    """Chooses the number of threads for each call of a kind, from how long the calls take.

    It begins with one thread and goes up while that is faster. Then it measures the other numbers again from time to time, and
    switches when one of them is faster. All of them must give the same results. Read `count` before a call, and call `took`
    after it.

    Args:
        most: The largest number of threads.
        adapts: False always uses that number.

    Attributes:
        count: Number of threads for the next call.
        best: The number that most calls use.
        searching: Whether it is still in the first search.

    Example:
        >>> tuner = ThreadTuner(4)
        >>> for _ in range(200):
        ...     tuner.took(work=1.0, seconds=0.001 / tuner.count)
        >>> tuner.best
        4
    """

    def __init__(self, most: int, adapts: bool = True):
        self._counts = ladder(most) if adapts else [most]
        self._work, self._seconds = [0.0] * len(self._counts), [0.0] * len(self._counts)
        self._at = self._next = 0
        self.searching = len(self._counts) > 1
        self._tries, self._tried_seconds = 0, 0.0  # calls in a row with the number that is tried, and their time
        self._is_first = True
        self._lost = 0.0  # seconds lost to slower numbers, beyond what they may cost
        self.count = self.best = self._counts[0]

    @property
    def most(self) -> int:
        """The largest number of threads."""
        return self._counts[-1]

    @property
    def is_settled(self) -> bool:
        """Whether the next call uses the best number, as far as is known."""
        return not self.searching and self.count == self.best

    def fitting(self, seconds: float) -> int:
        """How much work the next call can do in about so many seconds, at least 1; less if it tries another number."""
        if not self._work[self._at]:
            return 1
        is_trial = self.searching or self._next != self._at
        return max(1, int((TRIAL_SECONDS if is_trial else seconds) / self._pace(self._at)))

    def took(self, work: float, seconds: float) -> None:
        """Report what a call with `count` threads took.

        Args:
            work: How much it did, in any unit.
            seconds: How long it took.
        """
        if self._is_first or len(self._counts) == 1:  # the first call is slow, and good for nothing but `fitting`
            self._work[0], self._seconds[0] = work, seconds
            self._is_first = False
            return
        if self.searching and not self._tries and not self._next:
            self._work[0] = self._seconds[0] = 0.0
        if self._next == self._at:
            self._lost = max(0.0, self._lost - LOSS * seconds)
        elif self._work[self._at]:
            self._lost += min(MOST_LOST, max(0.0, seconds - work * self._pace(self._at)))
        kept = 0.5 ** (min(seconds, MOST_LOST) / MEMORY_SECONDS)
        for measured, new in ((self._work, work), (self._seconds, seconds)):
            measured[:] = [value * kept for value in measured]
            measured[self._next] += new
        self._tries, self._tried_seconds = self._tries + 1, self._tried_seconds + seconds
        if self.searching:
            self._search()
        else:
            self._compare()
        self.count, self.best = self._counts[self._next], self._counts[self._at]

    def _pace(self, k: int) -> float:
        """Seconds for a unit of work; infinite if nothing is known any more."""
        return self._seconds[k] / self._work[k] if self._work[k] else math.inf

    def _search(self) -> None:
        """Try one number after another, until they get slower."""
        tried = self._next
        ratio = self._pace(tried) / self._pace(tried - 1) if tried else 0.0
        if ratio > FASTER and self._tries < (TRIES if ratio < SLOWER else 2):
            return
        self._at = min(range(tried + 1), key=self._pace)
        self.searching = tried + 1 < len(self._counts) and ratio < SLOWER
        self._try(tried + 1 if self.searching else self._at)

    def _compare(self) -> None:
        """Switch to the number that was tried if it is faster; decide whether to try another one."""
        tried = self._next
        if tried != self._at and self._pace(tried) < BETTER * self._pace(self._at):
            is_clear = self._pace(tried) < FASTER * self._pace(self._at)
            if self._tries < (TRIES if is_clear else ENOUGH) and self._tried_seconds < LONG:
                return
            self._at = tried
        others = [k for k in range(len(self._counts)) if k != self._at]
        least = min(others, key=self._seconds.__getitem__)
        is_due = self._seconds[least] < EXPLORED / len(others) * sum(self._seconds)
        self._try(least if is_due and self._lost == 0.0 else self._at)

    def _try(self, k: int) -> None:
        if k != self._next:
            self._next, self._tries, self._tried_seconds = k, 0, 0.0
