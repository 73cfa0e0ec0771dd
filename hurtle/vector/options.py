"""`VecOptions`: the settings shared by the back ends for Python envs, validated in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from hurtle.errors import HurtleError, ResetMaskError, UnknownNameError, did_you_mean
from hurtle.native.batch_arrays import check_fits

ORDERS = ("ready", "fair")
ENV_BYTES = 1024
"""Minimum memory of a Python env."""


@dataclass(frozen=True)
class VecOptions:
    """Settings of a vector of Python envs; `hurtle.make_vec` documents them."""

    num_envs: int
    batch_size: int
    num_workers: int | None = None
    seed: int = 0
    autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP
    copy: bool = False
    order: str = "ready"
    emulate: bool = False
    check: bool = True
    step_timeout: float | None = None
    start_timeout: float = 300.0
    restart_workers: bool = False

    def __post_init__(self) -> None:
        check_count("num_envs", self.num_envs)
        check_fits(f"num_envs={self.num_envs}", self.num_envs * ENV_BYTES)
        check_count("batch_size", self.batch_size)
        if self.batch_size > self.num_envs:
            raise HurtleError(f"batch_size={self.batch_size} is more than num_envs={self.num_envs}.")
        if self.num_workers is not None:
            check_count("num_workers", self.num_workers)
            if self.num_workers > self.num_envs:
                raise HurtleError(
                    f"num_workers={self.num_workers} is more than num_envs={self.num_envs}; each worker steps at least one env."
                )
        if self.order not in ORDERS:
            raise UnknownNameError(f"No order {self.order!r}. {did_you_mean(self.order, ORDERS)}")
        for name in ("step_timeout", "start_timeout"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise HurtleError(f"{name} must be a positive number of seconds, got {value!r}.")
        check_seed(self.seed)


def check_count(name: str, value: int) -> None:
    """Refuse anything but an int of at least 1."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise HurtleError(f"{name} must be an int of at least 1, got {value!r}.")


def check_seed(seed: int) -> None:
    """Refuse anything but an int of at least 0."""
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
        raise HurtleError(f"seed must be an int of at least 0, got {seed!r}.")


def check_reset_mask(mask: Any, num_envs: int) -> np.ndarray:
    """`options["reset_mask"]` as an array.

    Raises:
        ResetMaskError: The mask is not bool[num_envs], or selects no env; the message is Gymnasium's.
    """
    mask = np.asarray(mask)
    name = "`options['reset_mask']` must"
    if mask.dtype != np.bool_:
        raise ResetMaskError(f"{name} have `dtype=np.bool_`, got {mask.dtype}.")
    if mask.shape != (num_envs,):
        raise ResetMaskError(f"{name} have shape `({num_envs},)`, got {mask.shape}.")
    if not mask.any():
        raise ResetMaskError(f"{name} contain a boolean array with at least one True value, got reset_mask={mask}.")
    return mask


def autoreset_mode_of(mode: AutoresetMode | str, allowed: tuple[AutoresetMode, ...] = tuple(AutoresetMode)) -> AutoresetMode:
    """The mode from Gymnasium's enum, its value ("SameStep") or its name ("SAME_STEP")."""
    wanted = mode.value if isinstance(mode, AutoresetMode) else str(mode)
    for candidate in allowed:
        if wanted.replace("_", "").lower() == candidate.value.lower():
            return candidate
    names = " or ".join(candidate.name for candidate in allowed)
    raise HurtleError(f"autoreset_mode must be {names}, got {mode!r}.")
