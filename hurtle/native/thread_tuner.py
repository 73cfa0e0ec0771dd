"""`ThreadTuner`: how many threads to use for work that repeats, decided by measuring it while it runs."""

from __future__ import annotations

MEMORY_SECONDS = 0.5
"""Half of what was measured is forgotten after so long: machines get busy and quiet again."""
EXPLORED = 0.05
"""Share of the time in which the numbers that are not in use are measured again."""
LOSS, MOST_LOST = 0.03, 0.3
"""Share of the time that measuring slower numbers may cost; what counts of a single call, in seconds."""
BETTER, ENOUGH = 0.97, 10.0
"""Change to a number that takes less than this share of the current one's time, if so many calls show it."""
FASTER, SLOWER, TRIES = 0.85, 1.3, 3
"""At first, one number after another is tried: once if it is so much faster than the last, twice if slower, else so often."""


def ladder(most: int) -> list[int]:
    """The numbers of threads to choose from."""
    return sorted({*(1 << k for k in range(most.bit_length())), most})


class ThreadTuner:
    """Chooses the number of threads for each call of a kind: searches, measures, changes, comes back.

    All numbers must give the same results. Ask `count` before a call, report to `took` after it.

    Args:
        most: The largest number of threads.
        adapts: False always uses that number.

    Attributes:
        count: Number of threads for the next call.
        best: The number that most calls use.
        searching: Whether it is still trying one number after another; short calls make that short.

    Example:
        >>> tuner = ThreadTuner(4)
        >>> for _ in range(200):
        ...     tuner.took(work=1.0, seconds=0.001 / tuner.count)
        >>> tuner.best
        4
    """

    def __init__(self, most: int, adapts: bool = True):
        self._counts = ladder(most) if adapts else [most]
        self._work, self._seconds, self._calls = ([0.0] * len(self._counts) for _ in range(3))
        self._at = self._next = 0
        self.searching, self._tries = len(self._counts) > 1, 0
        self._lost = 0.0  # seconds lost to slower numbers, beyond what they may cost
        self.count = self.best = self._counts[0]

    @property
    def most(self) -> int:
        """The largest number of threads."""
        return self._counts[-1]

    def took(self, work: float, seconds: float) -> None:
        """Report what a call with `count` threads took.

        Args:
            work: How much it did, in any unit.
            seconds: How long it took.
        """
        if len(self._counts) == 1:
            return
        if self._next != self._at and self._work[self._at]:
            self._lost += min(MOST_LOST, max(0.0, seconds - work * self._pace(self._at)))
        self._lost = max(0.0, self._lost - LOSS * seconds)
        kept = 0.5 ** (seconds / MEMORY_SECONDS)
        for measured, new in ((self._work, work), (self._seconds, seconds), (self._calls, 1.0)):
            measured[:] = [value * kept for value in measured]
            measured[self._next] += new
        if self.searching:
            self._search()
        else:
            self._compare()
        self.count, self.best = self._counts[self._next], self._counts[self._at]

    def _pace(self, k: int) -> float:
        """Seconds for a unit of work."""
        return self._seconds[k] / self._work[k]

    def _search(self) -> None:
        """Try one number after another, until they get slower."""
        tried, self._tries = self._next, self._tries + 1
        ratio = self._pace(tried) / self._pace(tried - 1) if tried else 0.0
        if ratio > FASTER and self._tries < (TRIES if ratio < SLOWER else 2):
            return
        self._tries = 0
        self._at = min(range(tried + 1), key=self._pace)
        self.searching = tried + 1 < len(self._counts) and ratio < SLOWER
        self._next = tried + 1 if self.searching else self._at

    def _compare(self) -> None:
        """Change to the number that was tried if it is faster; decide whether to try another one."""
        tried = self._next
        if tried != self._at and self._pace(tried) < BETTER * self._pace(self._at):
            if self._calls[tried] < ENOUGH:
                return
            self._at = tried
        self._next = self._at
        others = [k for k in range(len(self._counts)) if k != self._at]
        least = min(others, key=self._seconds.__getitem__)
        if self._lost == 0.0 and self._seconds[least] < EXPLORED / len(others) * sum(self._seconds):
            self._next = least
