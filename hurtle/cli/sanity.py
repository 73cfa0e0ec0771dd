"""`hurtle sanity`: train on five tiny envs, and explain failures."""

from __future__ import annotations

from typing import Annotated

from hurtle.cli.messages import loading
from hurtle.cli.options import POSITIONAL, Device, Seed, option


def sanity(
    envs: Annotated[
        tuple[str, ...], POSITIONAL, option("bandit, memory, password, squared or stochastic; all by default.", "[ENV ...]", "")
    ] = (),
    seed: Seed = 0,
    device: Device = "cpu",
) -> int:
    """Check that training works here, on five tiny envs."""
    from hurtle.runners.sanity import check_names, run_sanity

    check_names(envs)
    with loading("torch"):
        import torch  # noqa: F401 (training imports it, silently, for seconds)

    return 0 if run_sanity(envs, seed=seed, device=device) else 1
