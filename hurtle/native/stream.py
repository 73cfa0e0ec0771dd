"""The random library as compiled code: one SplitMix64 stream per env, kept in the record field `_rng`.

Its text is pasted into every generated module (see generate.py) and compiled there by `jit`; rng.py is its plain reference.
"""

import math

import numpy as np

from hurtle.native.pasted import _at, f4, jit

U64 = np.uint64
GAMMA = np.uint64(0x9E3779B97F4A7C15)


@jit
def mix(z):
    z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    return z ^ (z >> U64(31))


@jit
def rng_next(rng):
    rng._rng = rng._rng + GAMMA
    return mix(rng._rng)


@jit
def rng_random(rng):
    return f4(rng_next(rng) >> U64(40)) * f4(2.0**-24)


@jit
def rng_uniform(rng, low, high):
    drawn = f4(low) + (f4(high) - f4(low)) * rng_random(rng)
    return f4(low) if drawn == f4(high) else drawn


@jit
def rng_integers(rng, low, high):
    return np.int64(low) + np.int64(((rng_next(rng) >> U64(32)) * U64(high - low)) >> U64(32))


@jit
def rng_normal(rng, mean, std):
    radius = f4(math.sqrt(f4(-2.0) * f4(math.log(f4(1.0) - rng_random(rng)))))
    angle = f4(2.0 * math.pi) * rng_random(rng)
    return f4(mean) + f4(std) * (radius * f4(math.cos(angle)))


@jit
def rng_choice(rng, items, *site):
    return items[_at(rng_integers(rng, 0, len(items)), len(items), *site)]


@jit
def rng_shuffle(rng, items):
    for i in range(len(items) - 1, 0, -1):
        j = rng_integers(rng, 0, i + 1)
        kept = items[i]
        items[i] = items[j]
        items[j] = kept


@jit
def action_bits(seed, step):
    return mix(seed + U64(step + 1) * GAMMA) >> U64(32)
