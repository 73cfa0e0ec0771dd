"""Flags compare and hash as Numba's own methods do, in much less time."""

import random

from numba.core.compiler import Flags
from numba.core.targetconfig import TargetConfig

import hurtle.native.compile_lock  # noqa: F401 (it replaces the methods)
from hurtle.native.compiler_flags import flags_equal, flags_hash

NAMES = ("nrt", "boundscheck", "enable_looplift", "no_cpython_wrapper", "forceinline")


class OtherFlags(Flags):
    """The same options under another class."""


def random_flags(draw, kind=Flags):
    flags = kind()
    for name in draw.sample(NAMES, draw.randrange(len(NAMES))):
        setattr(flags, name, draw.random() < 0.5)
    return flags


def numba_equal(one, other):
    """As Numba 0.68 writes it."""
    return one.values() == other.values()


def test_flags_are_equal_when_numba_says_so():
    draw = random.Random(0)
    answers = set()
    for _ in range(2_000):
        one, other = random_flags(draw), random_flags(draw, draw.choice([Flags, OtherFlags]))
        assert flags_equal(one, other) == numba_equal(one, other)
        assert flags_hash(one) == hash(tuple(sorted(one.values())))
        answers.add(flags_equal(one, other))
    assert answers == {True, False}


def test_a_default_that_is_set_equals_one_that_is_not():
    one = Flags()
    one.nrt = Flags.options["nrt"].default
    assert flags_equal(one, Flags())


def test_other_things_are_not_flags():
    assert Flags() != 1
    assert flags_equal(Flags(), 1) is NotImplemented


def test_they_are_in_use():
    assert TargetConfig.__eq__ is flags_equal
    assert TargetConfig.__hash__ is flags_hash
