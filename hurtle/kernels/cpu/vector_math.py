"""float32 exp, log and relatives without branches or calls, so that loops over them are vectorized; Gamma functions in float64.

NaN always stays NaN. Knows nothing of arrays.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .host import f4, jit

i4 = np.int32

_LOG2_E = f4(1.0 / math.log(2.0))
_LN2_HIGH = f4(355.0 / 512.0)  # few bits, so that its product with an integer is exact
_LN2_LOW = f4(math.log(2.0) - 355.0 / 512.0)
_ROUNDS = f4(1.5 * 2.0**23)  # adding it to a small number leaves the nearest integer in the lowest bits of the sum
_ROUNDS_BITS = int(np.array(_ROUNDS).view(np.int32))
_SQRT_HALF_BITS = int(np.array(f4(math.sqrt(0.5))).view(np.int32))
_INFINITY = f4(np.inf)
_NAN = f4(np.nan)


def _to_bits(typing_context: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), codegen


def _from_bits(typing_context: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), codegen


to_bits: Any = intrinsic(_to_bits)
"""The bits of a float32, as an int32."""
from_bits: Any = intrinsic(_from_bits)
"""The float32 that has the bits of this int32."""


@jit
def exp(x):
    """e^x to 2 units in the last place: 2^n times a Taylor series around 0."""
    x = f4(89.0) if x > f4(89.0) else x  # beyond this, n would not fit
    x = f4(-104.0) if x < f4(-104.0) else x
    shifted = x * _LOG2_E + _ROUNDS
    whole = shifted - _ROUNDS
    n = i4(to_bits(shifted) - _ROUNDS_BITS)
    r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    series = f4(1 / 5040)
    series = series * r + f4(1 / 720)
    series = series * r + f4(1 / 120)
    series = series * r + f4(1 / 24)
    series = series * r + f4(1 / 6)
    series = series * r + f4(1 / 2)
    series = series * r + f4(1.0)
    series = series * r + f4(1.0)
    half = i4(n >> 1)  # in two steps: 2^n alone may overflow where the product does not
    return series * _power_of_two(half) * _power_of_two(i4(n - half))


@jit
def _power_of_two(n):
    return from_bits(i4(i4(n + 127) << 23))


@jit
def log(x):
    """The natural logarithm to 2 units in the last place; -inf at 0, NaN below."""
    tiny = x < f4(2.0**-126)
    normal = x * f4(2.0**23) if tiny else x
    bits = i4(to_bits(normal) - _SQRT_HALF_BITS)
    exponent = f4(i4(bits >> 23)) - (f4(23.0) if tiny else f4(0.0))
    f = from_bits(i4(i4(bits & 0x7FFFFF) + _SQRT_HALF_BITS)) - f4(1.0)  # normal is 2^exponent times 1 + f, in [√½, √2)
    s = f / (f4(2.0) + f)  # log(1 + f) = 2 artanh(s)
    z = s * s
    series = f4(2 / 9)
    series = series * z + f4(2 / 7)
    series = series * z + f4(2 / 5)
    series = series * z + f4(2 / 3)
    series = series * z
    square = f4(0.5) * f * f
    small = f - (square - (s * (square + series) + exponent * _LN2_LOW))
    y = small + exponent * _LN2_HIGH
    y = x if x == _INFINITY else y
    y = y if x > f4(0.0) else _NAN
    return -_INFINITY if x == f4(0.0) else y


@jit
def log1p(x):
    """log(1 + x), accurate near 0; for finite x."""
    y = f4(1.0) + x
    return log(y) + (x - (y - f4(1.0))) / y if y > f4(0.0) else log(y)


@jit
def softplus(x):
    """log(1 + e^x)."""
    return (x if x > f4(0.0) else f4(0.0)) + log1p(exp(-abs(x)))


@jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return f4(1.0) / (f4(1.0) + exp(-x))


@jit
def cos_turn(u):
    """cos(2πu) for u in [0, 1]."""
    v = abs(u - f4(0.5)) - f4(0.25)  # the cosine is sin(2πv), |v| at most a quarter
    z = v * v
    series = f4(math.tau**13 / 6227020800)
    series = series * z - f4(math.tau**11 / 39916800)
    series = series * z + f4(math.tau**9 / 362880)
    series = series * z - f4(math.tau**7 / 5040)
    series = series * z + f4(math.tau**5 / 120)
    series = series * z - f4(math.tau**3 / 6)
    return (series * z + f4(math.tau)) * v


@jit
def lgamma(x):
    """The logarithm of Γ(x), float64, for x of at least 1."""
    return math.lgamma(np.float64(x))


@jit
def digamma(x):
    """The slope of log Γ, float64, for x of at least 1: the asymptotic series beyond 10."""
    y, steps = np.float64(x), 0.0
    while y < 10.0:
        steps += 1.0 / y
        y += 1.0
    z = 1.0 / (y * y)
    series = z * (1 / 12 - z * (1 / 120 - z * (1 / 252 - z * (1 / 240 - z * (1 / 132 - z * (691 / 32760))))))
    return math.log(y) - 0.5 / y - series - steps


@jit
def trigamma(x):
    """The slope of digamma, float64, for x of at least 1: the asymptotic series beyond 10."""
    y, steps = np.float64(x), 0.0
    while y < 10.0:
        steps += 1.0 / (y * y)
        y += 1.0
    z = 1.0 / (y * y)
    series = z * (1 / 6 - z * (1 / 30 - z * (1 / 42 - z * (1 / 30 - z * (5 / 66 - z * (691 / 2730))))))
    return (1.0 + 0.5 / y + series) / y + steps
