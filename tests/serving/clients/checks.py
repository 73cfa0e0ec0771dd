"""Named checks, run one after the other; prints {name: null, or why it failed} as JSON. For foreign clients' processes."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

CHECKS: dict[str, Callable[..., None]] = {}


def check(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function under a name."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        assert name not in CHECKS, name
        CHECKS[name] = function
        return function

    return enter


def equal(found: Any, expected: Any, what: str = "") -> None:
    """Fail unless both are the same."""
    if found != expected:
        raise AssertionError(f"{what}: expected {expected!r}, got {found!r}")


def names(text: str, *words: str) -> None:
    """Fail unless a message says all of this."""
    for word in words:
        if word not in text:
            raise AssertionError(f"expected {word!r} in the message, got {text!r}")


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 10.0) -> None:
    """Until it is so."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds:g} s for {what}")
        time.sleep(0.005)


def run_checks(*arguments: Any) -> None:
    """Run all, print the results."""
    results: dict[str, str | None] = {}
    for name, function in CHECKS.items():
        try:
            function(*arguments)
            results[name] = None
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            results[name] = f"{type(error).__name__}: {error} ({line.name}, line {line.lineno})"
    json.dump(results, sys.stdout)
    sys.stdout.flush()
