"""Bounds checks of env code: `state.grid[y, x]` becomes `state.grid[_at(y, 10, 0), _at(x, 10, 1)]`, on every compiled target.

On the CPU an index out of range raises; on the GPU it is clamped, so that no env writes outside its own record, and reported.
The compiler removes the checks that it can prove unnecessary: constants, loops over an array's length, masked indices.
"""

from __future__ import annotations

from dataclasses import dataclass

from hurtle.errors import EnvIndexError
from hurtle.native.language import code_message

CHECKED = """\
@njit(_nrt=True, **INNER)  # the exception is allocated
def _out_of_bounds(index, length, site):
    raise OutOfBounds(site, index, length)


@jit
def _at(index, length, site):
    place = index | 0
    if 0 <= place < length:
        return U64(place)
    if -length <= place < 0:
        return U64(place + length)
    _out_of_bounds(place, length, site)
    return U64(0)
"""
CLAMPED = """\
@jit
def _at(index, length, site, _fault):
    place = index | 0
    if place < 0:
        place += length
    if not 0 <= place < length:
        if _fault[0] == 0:  # report the first
            _fault[0] = ((site + 1) << 32) | (index & 0xFFFFFFFF)  # one store: no thread sees half of it
        place = 0
    return U64(place)
"""
UNCHECKED = """\
@jit
def _at(index, length, site{fault}):
    place = index | 0
    return U64(place + length if place < 0 else place)
"""


GET = """

@jit
def _get(value, index, site{fault}):
    return value[_at(index, len(value), site{fault})]
"""


def at_source(target: str, unsafe: bool) -> str:
    """The source of `_at(index, length, site)`, which returns a checked index ≥ 0, and of `_get(value, index, site)`."""
    fault = ", _fault" if target == "cuda" else ""
    checked = CLAMPED if target == "cuda" else CHECKED
    return (UNCHECKED.format(fault=fault) if unsafe else checked) + GET.format(fault=fault)


class OutOfBounds(Exception):
    """Raised by compiled code with (site, index, length); `Site.error` turns it into an error for the author."""

    @classmethod
    def on_gpu(cls, fault: int) -> OutOfBounds:
        """Decode what a kernel wrote to `_fault`, which does not include the length."""
        index = fault & 0xFFFFFFFF
        return cls((fault >> 32) - 1, index - (1 << 32) if index >> 31 else index, None)


@dataclass(frozen=True)
class Site:
    """One index of one subscript in the author's code."""

    file: str
    line: int
    where: str
    """The qualified name of the author's function."""
    text: str
    """The subscript as the author wrote it, such as `state.grid[y, x]`."""
    axis: int
    length: int | None = None
    """None if it is known only at run time."""

    def error(self, index: int, length: int | None) -> EnvIndexError:
        """The error for the author."""
        length = self.length if length is None else length
        known = "" if length is None else f", whose length is {length}"
        problem = f"indexes {self.text} out of bounds: index {index} on axis {self.axis}{known}"
        return EnvIndexError(code_message(self.file, self.line, self.where, problem, "").rstrip())
