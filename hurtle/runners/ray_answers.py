"""What collectors on a cluster answer, as the learner sees it: errors with name and traceback, versions that must agree."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

from hurtle.errors import EnvFailedError, HurtleError
from hurtle.runners.ray_host import About, Failure, versions
from hurtle.vector.ray_cluster import ray


def who(number: int, about: About | None) -> str:
    """A collector, for messages."""
    if about is None:
        return f"Collector {number} (not yet placed)"
    return f"Collector {number} (pid {about.pid} on {about.machine}, node {about.node[:8]})"


def checked(name: str, answer: Any) -> Any:
    """What a host has answered.

    Raises:
        HurtleError: It failed; names the collector, and ends with the traceback from there.
    """
    if not isinstance(answer, Failure):
        return answer
    error = None
    with contextlib.suppress(Exception):  # its class may exist only there
        error = pickle.loads(answer.error) if answer.error else None
    if isinstance(error, ray.exceptions.RayError):  # what it asked Ray for is gone: as if it were lost itself
        raise error
    if answer.is_ours and isinstance(error, HurtleError):
        error.args = (f"{name}: {error}", *error.args[1:])
        raise error
    raise EnvFailedError(f"{name} failed.\n\n{answer.trace}", -1) from error


def check_versions(number: int, about: About) -> None:
    """Raise if a machine has other versions than this one."""
    ours = versions()
    differ = [
        f"{name} {about.versions.get(name, '–')} instead of {own}"
        for name, own in ours.items()
        if about.versions.get(name) != own
    ]
    if differ:
        raise HurtleError(
            f"{who(number, about)} has {', '.join(differ)}: install the same there, or give Ray a runtime environment with it."
        )


def cause_of(error: Exception) -> str:
    """What Ray says of the cause, without its lists of properties and of possible causes."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t"))
    return text.partition("Some common causes")[0].strip()
