"""The one small exception tree: every error Hurtle raises on purpose is a `HurtleError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HurtleError(Exception):
    """Base of all errors that Hurtle raises on purpose."""


class UnknownNameError(HurtleError, ValueError):
    """A name (environment, parameter, option …) does not exist; the message suggests the closest ones."""


class EnvDefinitionError(HurtleError, TypeError):
    """A native environment class is incomplete or inconsistent."""


class EnvCodeError(HurtleError):
    """Environment code cannot be compiled or misbehaves when run; the message names the author's file and line."""


class EnvIndexError(EnvCodeError, IndexError):
    """Environment code indexed an array out of bounds; the message names the author's line, the index and the length."""


class ActionError(HurtleError, ValueError, TypeError):
    """Actions have the wrong shape or type, or are outside the action space."""


class ResetMaskError(HurtleError, ValueError, TypeError):
    """`options["reset_mask"]` has the wrong shape or type, or selects no env."""


class DeviceError(HurtleError, RuntimeError):
    """A requested device is missing or cannot do what was asked.

    Attributes:
        device_lost: Nothing can be read from the device any more; only a new process can use it again.
    """

    def __init__(self, message: str, device_lost: bool = False):
        super().__init__(message)
        self.device_lost = device_lost


class EnvFailedError(HurtleError, RuntimeError):
    """An environment raised; the message ends with its own traceback.

    Attributes:
        env_index: Index of the env in the vector.
        seed: The seed of the env's last reset.
    """

    def __init__(self, message: str, env_index: int = 0, seed: int | None = None):
        super().__init__(message)
        self.env_index, self.seed = env_index, seed


class WorkerDiedError(HurtleError, RuntimeError):
    """A worker process exited or was killed; the message names it, its envs and the signal."""


class LostRankError(HurtleError, RuntimeError):
    """One of several learners that train together has failed or was killed; the message names it and says why."""


class EnvTimeoutError(HurtleError, TimeoutError):
    """An environment took longer than `step_timeout`; the message names it and shows where it is stuck."""


class NonFiniteError(HurtleError, ArithmeticError):
    """An observation, reward or loss is NaN or infinite; the message names its origin."""


class EmulationError(HurtleError, ValueError):
    """A space or value cannot be emulated, or a value contradicts its space; the message names the leaf."""


class CheckpointError(HurtleError):
    """A checkpoint could not be written, or is missing, damaged or not one of ours; the message suggests an alternative."""


class PolicyFileError(HurtleError):
    """An exported policy could not be written, or is missing, damaged or not one of ours; the message says what is wrong."""


class TrustError(HurtleError):
    """A file names code that the user has not allowed to run; the message names both, and how to allow it."""


class ServingError(HurtleError):
    """The inference server cannot answer a request.

    Attributes:
        reason: The kind of error, a key of `hurtle.serving.status.CODES`, which maps it to status codes.
        is_counted: Whether the server's statistics already include this failure.
    """

    is_counted = False

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that suggests the known names closest to `name`, or lists them if none is close.

    Example:
        >>> did_you_mean("cartpol", ["cartpole", "snake"])
        'Did you mean cartpole?'
    """
    known = sorted(known)
    near = [found for found in difflib.get_close_matches(name, known, n=3, cutoff=0.6) if _is_typo(name, found)]
    if near:
        return f"Did you mean {' or '.join(near)}?"
    if not known:
        return "There are none."
    return f"Known: {', '.join(known[:20])}{' …' if len(known) > 20 else '.'}"


def _is_typo(name: str, known: str) -> bool:
    """Whether the names differ by few omitted, added, changed or swapped letters; `sac` is not a typo for `a2c`."""
    before, row = [0] * (len(known) + 1), list(range(len(known) + 1))
    for i, letter in enumerate(name.lower(), 1):
        older, before, row = before, row, [i]
        for j, other in enumerate(known.lower(), 1):
            edits = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and name[i - 2].lower() == other and letter == known[j - 2].lower():
                edits = min(edits, older[j - 2] + 1)
            row.append(edits)
    return row[-1] <= max(1, max(len(name), len(known)) // 2 - 1)


class UnsupportedError(HurtleError):
    """Compiled code cannot run this policy, env or algorithm; the message gives the reason."""
