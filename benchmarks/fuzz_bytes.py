"""Random damage to bytes, for both fuzzers."""

from __future__ import annotations

from random import Random


def bytes_mutated(rng: Random, text: bytes) -> bytes:
    """Cut, flip, insert, repeat."""
    data = bytearray(text)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(5)
        if how == 0:
            del data[at:]
        elif how == 1 and at < len(data):
            data[at] = rng.randrange(256)
        elif how == 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 20))
        elif how == 3:
            del data[at : at + rng.randrange(1, 10)]
        else:
            data[at:at] = data[max(0, at - 30) : at] * rng.randrange(1, 4)
    return bytes(data)
