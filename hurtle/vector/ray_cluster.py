"""Connects to Ray: uses the running one, or starts one that is shut down with its last user. Knows nothing of envs."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from hurtle.errors import HurtleError
from hurtle.native.threads import free_cores

try:
    import ray
except ModuleNotFoundError as error:
    raise HurtleError('Ray is not installed: pip install "hurtle[ray]".') from error

__all__ = ["cluster_cpus", "free_cpus", "is_own", "join", "leave", "ray"]

LOOPBACK = "127.0.0.1"

_users = 0  # vector envs and runs that use Ray
_ours: str | None = None  # address of the Ray instance that we started or connected to
_started = False  # whether we started it


def join(num_cpus: float, address: str = "") -> None:
    """Use the Ray of this process; else the cluster at an address; else the one that Ray finds, or one on this machine.

    Args:
        num_cpus: CPUs that the caller's actors will request; a Ray that we start has at least as many.
        address: "HOST:PORT", "auto" (RAY_ADDRESS, or the `ray start` of this machine, which must exist), "local" (a new one),
            or "" (as "auto" if there is one, else as "local").

    Raises:
        HurtleError: No cluster answers there.
    """
    global _users, _ours, _started
    if not ray.is_initialized():
        _started = _connect(num_cpus, address)
        _ours, _users = ray.get_runtime_context().gcs_address, 0
    _users += 1


def _connect(num_cpus: float, address: str) -> bool:
    """Connect to a cluster or start one; returns whether it was started."""
    if address.startswith("ray://"):
        raise HurtleError(
            f"{address} is a proxy, through which every rollout would pass as a message: run on a machine of the cluster with "
            "address='auto', or hand the program in with `ray job submit`."
        )
    if address in ("", "local"):
        try:
            with _on_loopback():
                ray.init(
                    address=address or None,
                    num_cpus=max(free_cores(), math.ceil(num_cpus)),
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    _node_ip_address=LOOPBACK,
                )
            return True
        except ValueError:  # there is a cluster to connect to, which fixes the number of CPUs
            if address:
                raise
    _check_answers(address)
    try:
        ray.init(address=address or None, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise HurtleError(
            f"No Ray cluster at {address!r}: {str(error).splitlines()[0]} Start one with `ray start --head`, or leave out the "
            "address: then one is started on this machine."
        ) from None
    return False


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray listen on the loopback interface only; it would take the machine's outer address instead of 127.0.0.1."""
    from ray._private import services

    resolve = getattr(services, "resolve_ip_for_localhost", None)
    if resolve is not None:
        services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        if resolve is not None:
            services.resolve_ip_for_localhost = resolve


def _check_answers(address: str) -> None:
    """Raise at once if nobody answers; Ray would try for a minute."""
    host, colon, port = address.rpartition(":")
    if not (colon and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise HurtleError(f"No Ray cluster answers at {address!r}: {error}.") from None


def leave() -> None:
    """Disconnect if we connected and this was the last user; a Ray that we started is shut down."""
    global _users, _ours
    _users -= 1
    if _users <= 0 and ray.is_initialized() and ray.get_runtime_context().gcs_address == _ours:
        ray.shutdown()
        _ours = None


def is_own() -> bool:
    """Whether the Ray in use was started here, for as long as it is needed."""
    return _started and ray.get_runtime_context().gcs_address == _ours


def cluster_cpus() -> float:
    """CPUs of all nodes."""
    return ray.cluster_resources().get("CPU", 0.0)


def free_cpus() -> float:
    """CPUs that are not in use."""
    return ray.available_resources().get("CPU", 0.0)
