"""The one small exception tree: every error Hurtle raises on purpose is a `HurtleError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HurtleError(Exception):
    """Base of all errors that Hurtle raises on purpose."""


class UnknownNameError(HurtleError, ValueError):
    """A name (environment, parameter, option …) that does not exist; the message suggests the nearest ones."""


class EnvDefinitionError(HurtleError, TypeError):
    """A native environment class that is incomplete or contradicts itself."""


class EnvCodeError(HurtleError):
    """Environment code that cannot be compiled, or that misbehaves when run; names the author's file and line."""


class EnvIndexError(EnvCodeError, IndexError):
    """Environment code that indexed an array out of bounds; names the author's line, the index and the length."""


class ActionError(HurtleError, ValueError, TypeError):
    """Actions of the wrong shape or type, or outside the action space."""


class ResetMaskError(HurtleError, ValueError, TypeError):
    """`options["reset_mask"]` of the wrong shape or type, or without a True."""


class DeviceError(HurtleError, RuntimeError):
    """A device that was asked for and is not there, or that cannot do what was asked.

    Attributes:
        device_lost: Nothing can be read from the device any more; only a new process can use it again.
    """

    def __init__(self, message: str, device_lost: bool = False):
        super().__init__(message)
        self.device_lost = device_lost


class EnvFailedError(HurtleError, RuntimeError):
    """An environment raised; the message ends with its own traceback.

    Attributes:
        env_index: Which env of the vector.
        seed: The last seed that this env was reset with.
    """

    def __init__(self, message: str, env_index: int = 0, seed: int | None = None):
        super().__init__(message)
        self.env_index, self.seed = env_index, seed


class WorkerDiedError(HurtleError, RuntimeError):
    """A worker process ended by itself or was killed; the message names it, its envs and the signal."""


class EnvTimeoutError(HurtleError, TimeoutError):
    """An environment took longer than `step_timeout`; the message names it and shows where it is stuck."""


class NonFiniteError(HurtleError, ArithmeticError):
    """NaN or infinity where a number must be (observation, reward, loss); names where it came from."""


class EmulationError(HurtleError, ValueError):
    """A space or value that cannot be emulated, or that contradicts its space; names the leaf."""


class CheckpointError(HurtleError):
    """A checkpoint that could not be written, or is missing, damaged or foreign; names the file and what to use instead."""


class PolicyFileError(HurtleError):
    """An exported policy that could not be written, or is missing, damaged or foreign; names the file and what is wrong."""


class TrustError(HurtleError):
    """A file that names code which the user has not allowed to run; names both, and how to allow it."""


class ServingError(HurtleError):
    """A request that the inference server cannot answer.

    Attributes:
        reason: What kind of error, a key of `hurtle.serving.status.CODES`, which says what clients get.
        is_counted: Whether it is among the failures of the server's statistics already.
    """

    is_counted = False

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that suggests the known names nearest to `name`, or lists them when none is near.

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
    """Whether few letters were left out, added, changed or swapped: `sac` is no typo for `a2c`, though two letters agree."""
    before, row = [0] * (len(known) + 1), list(range(len(known) + 1))
    for i, letter in enumerate(name.lower(), 1):
        older, before, row = before, row, [i]
        for j, other in enumerate(known.lower(), 1):
            edits = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and name[i - 2].lower() == other and letter == known[j - 2].lower():
                edits = min(edits, older[j - 2] + 1)
            row.append(edits)
    return row[-1] <= max(1, max(len(name), len(known)) // 2 - 1)
