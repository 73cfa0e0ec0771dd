"""Values of settings: from Python, TOML or the command line to the type of the field, or an error.

Knows only types, not which settings exist or their ranges.
"""

from __future__ import annotations

import ast
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin


def fit(value: Any, kind: Any) -> Any:
    """`value` as a `kind`, the annotation of a field, such as `int`, `float | None`, `tuple[int, ...]` or `Literal["a", "b"]`.

    Text is parsed ("1e6" and "1_000_000" are whole numbers), lists become tuples, "none" is None where that is allowed.

    Raises:
        ValueError: It does not fit; the message continues after the name of the setting.

    Example:
        >>> fit("1e6", int), fit([64, 64], tuple[int, ...]), fit("none", float | None)
        (1000000, (64, 64), None)
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        return fit(value, next(part for part in inner if part is not NoneType))
    if origin is Literal:
        for choice in inner:
            if value == choice or (isinstance(value, str | int) and str(value) == str(choice)):
                return choice
        raise ValueError(f"must be one of {', '.join(map(str, inner))}, got {value!r}.")
    if origin is tuple:
        return tuple(fit(item, inner[0]) for item in (value if isinstance(value, list | tuple) else [value]))
    if origin is dict:
        return _pairs(value)
    if kind not in _SCALARS:
        raise ValueError(f"is declared as {kind}: use int, float, bool, str, Literal, tuple or dict, or one of them | None.")
    return _SCALARS[kind](value)


def shown(value: Any) -> str:
    """A value as written on the command line.

    Example:
        >>> shown(1_000_000), shown((64, 64)), shown(None), shown({"gravity": 1.6})
        ('1_000_000', '64 64', 'none', 'gravity=1.6')
    """
    if isinstance(value, dict):
        return " ".join(f"{name}={item}" for name, item in value.items())
    if isinstance(value, tuple):
        return " ".join(shown(item) for item in value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:_}" if value >= 10_000 else str(value)
    return str(value)


def _whole(value: Any) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        with suppress(ValueError):
            return int(value)
    number = _number(value, "a whole number")
    if not number.is_integer():
        raise ValueError(f"must be a whole number, got {value!r}.")
    return int(number)


def _number(value: Any, expected: str = "a number") -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real | str) else float(value)
    except (ValueError, OverflowError):  # not a number, or an int of more than 308 digits
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"must be {expected}, got {value!r}.")
    return number


def _switch(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {value!r}.")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"must be text, got {value!r}.")
    return os.fspath(value)


def _pairs(value: Any) -> dict[str, Any]:
    """A dict, or ["gravity=1.6", …] of the command line; only what TOML can store, so that every run can be repeated."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Sequence):
        pairs = {}
        for item in value:
            name, equals, text = item.partition("=") if isinstance(item, str) else (str(item), "", "")
            if not (equals and name.isidentifier()):
                raise ValueError(f"must be NAME=VALUE pairs such as gravity=1.6, got {item!r}.")
            if name in pairs:
                raise ValueError(f"has {name} twice.")
            pairs[name] = _literal(text)
        value = pairs
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a dict such as {{'gravity': 1.6}}, got {value!r}.")
    return {str(name): _plain(name, item) for name, item in value.items()}


def _literal(text: str) -> Any:
    """A Python literal, `true` or `false`; anything else is text."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _plain(name: Any, value: Any) -> Any:
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    raise ValueError(
        f"holds numbers, text, true or false, and lists of them, got {name}={value!r}. "
        "For anything else, pass a function that makes the env."
    )


_SCALARS: dict[type, Callable[[Any], Any]] = {int: _whole, float: _number, bool: _switch, str: _text}
