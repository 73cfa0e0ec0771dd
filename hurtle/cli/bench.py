"""`hurtle bench`: measure speed on this machine, of vectorized envs or of an inference server."""

from __future__ import annotations

from typing import Annotated, Any

import tyro

from hurtle.cli.bench_serve import bench_serve
from hurtle.cli.bench_vector import bench_vector

Vector = Annotated[Any, tyro.conf.subcommand(name="vector", constructor=bench_vector)]
Serve = Annotated[Any, tyro.conf.subcommand(name="serve", constructor=bench_serve)]


def bench(what: Vector | Serve | Annotated[None, tyro.conf.Suppress]) -> None:
    """Measure speed on this machine."""
