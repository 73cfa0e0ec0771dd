"""`Given`: reads and checks a backend's parameters, given as text or as values. Does not know what they are for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hurtle.errors import HurtleError, UnknownNameError, did_you_mean

FOR_EVERYBODY = ("backend", "load_library")
"""Parameters that the server may pass to any backend."""


class Given:
    """Parameters such as {"device": "cuda", "threads": "2"}.

    Args:
        backend: Name of the backend, for messages.
        parameters: The user's parameters.
        known: Names that this backend reads.

    Raises:
        UnknownNameError: A name is unknown; suggests the nearest.

    Example:
        >>> Given("onnx", {"threads": "2"}, ("threads",)).whole("threads", 1)
        2
    """

    def __init__(self, backend: str, parameters: Mapping[str, Any], known: Sequence[str]):
        self._backend, self._parameters = backend, parameters
        for name in parameters:
            if name not in known and name not in FOR_EVERYBODY:
                raise UnknownNameError(f"The backend {backend} has no parameter {name!r}. {did_you_mean(name, known)}")

    def whole(self, name: str, default: int, least: int = 1, most: int = 1024) -> int:
        """A whole number."""
        value = self._parameters.get(name, default)
        try:
            found = int(str(value))
        except ValueError:
            found = least - 1
        if not least <= found <= most:
            raise self._wrong(name, f"a whole number from {least} to {most}", value)
        return found

    def truth(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._parameters.get(name, default)
        found = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(str(value).lower())
        if found is None:
            raise self._wrong(name, "true or false", value)
        return found

    def word(self, name: str, default: str, choices: Sequence[str]) -> str:
        """One of several choices."""
        value = self._parameters.get(name, default)
        if value not in choices:
            raise self._wrong(name, " or ".join(choices), value)
        return value

    def words(self, name: str) -> tuple[str, ...]:
        """A list, or text with commas; empty by default."""
        value = self._parameters.get(name, ())
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
            raise self._wrong(name, "words with commas between them", value)
        return tuple(part.strip() for part in parts if part.strip())

    def device(self) -> str:
        """cpu, cuda or cuda:N."""
        value = self._parameters.get("device", "cpu")
        if not isinstance(value, str) or not re.fullmatch(r"cpu|cuda(:\d{1,2})?", value):
            raise self._wrong("device", "cpu, cuda or cuda:N", value)
        return value

    def _wrong(self, name: str, expected: str, value: Any) -> HurtleError:
        return HurtleError(f"The parameter {name} of the backend {self._backend} must be {expected}, got {value!r:.100}.")
