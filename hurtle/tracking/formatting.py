"""Formats numbers for people, in few characters: figures, quantities, durations, memory. Unknown (NaN) is a dash."""

from __future__ import annotations

import math

UNKNOWN = "-"


def figure(x: float) -> str:
    """A metric's value in about four digits and at most nine characters.

    Example:
        >>> [figure(x) for x in (187.31, 0.01234, 2.5e-4, 12345.6, -3.2e9, float("nan"), 0)]
        ['187.3', '0.0123', '2.5e-4', '12,346', '-3.20e9', '-', '0']
    """
    size = abs(x)
    if not math.isfinite(x):
        return UNKNOWN if math.isnan(x) else f"{x:.0f}"
    if size == 0:
        return "0"
    if size < 0.001:
        return _exponent(f"{x:.1e}")
    if size >= 1e6:
        return _exponent(f"{x:.2e}")
    return f"{x:,.{4 if size < 1 else 3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0}f}"


def _exponent(text: str) -> str:
    digits, exponent = text.split("e")
    return f"{digits}e{int(exponent)}"


def count(x: float) -> str:
    """A whole number with thousands separators.

    Example:
        >>> count(102400.0)
        '102,400'
    """
    return f"{x:,.0f}" if math.isfinite(x) else UNKNOWN


def quantity(x: float) -> str:
    """Three digits and K, M, B or T.

    Example:
        >>> [quantity(x) for x in (950.0, 12_345.0, 1_999_999.0, 19.3e9)]
        ['950', '12.3K', '2.00M', '19.3B']
    """
    if not math.isfinite(x):
        return UNKNOWN
    unit = 0
    while abs(x) >= 999.5 and unit < 4:
        x, unit = x / 1000, unit + 1
    decimals = 0 if unit == 0 or abs(x) >= 99.95 else 1 if abs(x) >= 9.995 else 2
    return f"{x:.{decimals}f}{('', 'K', 'M', 'B', 'T')[unit]}"


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours and days when there are some.

    Example:
        >>> [duration(s) for s in (32, 725, 3723, 200_000)]
        ['0:32', '12:05', '1:02:03', '2d 07:33']
    """
    if not math.isfinite(seconds) or seconds >= 1e10:  # more than 300 years
        return UNKNOWN
    minutes, second = divmod(round(max(seconds, 0)), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def age(seconds: float) -> str:
    """How long ago, in one unit.

    Example:
        >>> [age(s) for s in (32, 725, 20_000, 200_000)]
        ['32 s', '12 min', '6 h', '2 d']
    """
    if not math.isfinite(seconds):
        return UNKNOWN
    size, unit = next(((size, unit) for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")) if seconds >= size), (1, "s"))
    return f"{max(seconds, 0) / size:.0f} {unit}"


def memory(size: float) -> str:
    """Bytes as MB or GB.

    Example:
        >>> memory(612e6), memory(1.5e9)
        ('612 MB', '1.5 GB')
    """
    if not math.isfinite(size):
        return UNKNOWN
    if size < 999.5e6:
        return f"{size / 1e6:.0f} MB"
    return f"{size / 1e9:.{1 if size < 99.95e9 else 0}f} GB"


def percent(share: float) -> str:
    """A fraction as a whole percentage.

    Example:
        >>> percent(0.204)
        '20 %'
    """
    return f"{100 * share:.0f} %" if math.isfinite(share) else UNKNOWN
