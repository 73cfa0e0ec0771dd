"""Connects to Ray: uses the running one, or starts one that is shut down with its last user. Knows nothing of envs."""

from __future__ import annotations

import logging

from hurtle.errors import HurtleError
from hurtle.native.threads import free_cores

try:
    import ray
except ModuleNotFoundError as error:
    raise HurtleError('backend="ray" needs Ray: pip install "hurtle[ray]".') from error

__all__ = ["cluster_cpus", "free_cpus", "join", "leave", "ray"]

_users = 0  # vector envs that use Ray
_ours: str | None = None  # address of the Ray instance that we started


def join(num_cpus: int) -> None:
    """Use the Ray of this process; else connect to the cluster that Ray finds (RAY_ADDRESS, `ray start`); else start one.

    Args:
        num_cpus: CPUs that the caller's actors will request; a Ray that we start has at least as many.
    """
    global _users, _ours
    if not ray.is_initialized():
        try:
            ray.init(num_cpus=max(free_cores(), num_cpus), include_dashboard=False, logging_level=logging.ERROR)
        except ValueError:  # there is a cluster to connect to, which fixes the number of CPUs
            ray.init(logging_level=logging.ERROR)
        _ours, _users = ray.get_runtime_context().gcs_address, 0
    _users += 1


def leave() -> None:
    """Shut Ray down if we started it and this was its last user."""
    global _users, _ours
    _users -= 1
    if _users <= 0 and ray.is_initialized() and ray.get_runtime_context().gcs_address == _ours:
        ray.shutdown()
        _ours = None


def cluster_cpus() -> float:
    """CPUs of all nodes."""
    return ray.cluster_resources().get("CPU", 0.0)


def free_cpus() -> float:
    """CPUs that are not in use."""
    return ray.available_resources().get("CPU", 0.0)
