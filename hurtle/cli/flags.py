"""Flags of `hurtle train` that are read first: the algorithm, file or folder that they name says which others there are.

arguments → a flag's value, or all flags by name.
"""

from __future__ import annotations

from itertools import zip_longest

from hurtle.errors import HurtleError
from hurtle.runners.values import fit


def count_flag(arguments: list[str], flag: str) -> int | None:
    """The value of a flag that takes a number of at least 1; None if it is not given."""
    text = given_flag(arguments, flag)
    if not text:
        return None
    try:
        number = fit(text, int)
    except ValueError as error:
        raise HurtleError(f"{flag} {error}") from None
    if number < 1:
        raise HurtleError(f"{flag} must be at least 1, got {number}.")
    return number


def given_flag(arguments: list[str], flag: str) -> str:
    """The value of one flag, before the rest are parsed; "" if it is not given."""
    value = ""
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, attached = argument.partition("=")
        if name == flag:
            value = attached if equals else following
            if not value or (not equals and value.startswith("--")):
                raise HurtleError(f"{flag} needs a value.")
    return value


def all_flags(arguments: list[str]) -> dict[str, tuple[str | None, str]]:
    """The given flags by the names of their settings: the value after "=", or None, and the next argument."""
    found = {}
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        if argument.startswith("--"):
            flag, equals, attached = argument.partition("=")
            found[flag[2:].replace("-", "_").removeprefix("no_")] = (attached if equals else None, following)
    return found
