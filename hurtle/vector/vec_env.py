"""`VecEnv`, the interface of all back ends: Gymnasium's `VectorEnv` plus `async_reset`, `send`, `recv` and `reset_env`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

from hurtle.errors import HurtleError
from hurtle.native.drawn import Ranges

Results = tuple[Any, Any, Any, Any, dict[str, Any]]
Seed = int | Sequence[int | None] | None


class VecEnvClosedError(HurtleError, ClosedEnvironmentError):
    """The vector env was closed, by `close` or by an error."""


class VecEnv(VectorEnv):
    """Many envs stepped together. Use it in a `with` statement, or call `close()`.

    Attributes:
        batch_size: Envs per `recv`; less than `num_envs` in a pool.
        num_agents: Agents per env; if there are several, arrays have an agent axis after the env axis.
    """

    batch_size: int
    num_agents: int
    steps_elsewhere = False
    """Whether other processes step the envs."""

    @cached_property
    def observation_space(self) -> spaces.Space:  # type: ignore[override]
        """The space of a batch of observations, made on first use: it is large for a million envs."""
        return batch_space(self.single_observation_space, self.batch_size)

    @cached_property
    def action_space(self) -> spaces.Space:  # type: ignore[override]
        """The space of a batch of actions, made on first use."""
        return batch_space(self.single_action_space, self.batch_size)

    @property
    @abstractmethod
    def agent_observation_space(self) -> spaces.Space:
        """The observation space of one agent; for single-agent envs, `single_observation_space`."""

    @property
    @abstractmethod
    def agent_action_space(self) -> spaces.Space:
        """The action space of one agent; for single-agent envs, `single_action_space`."""

    @property
    @abstractmethod
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each env's last reset; before the first reset, the seed that it will get."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Threads or processes that step the envs."""

    @abstractmethod
    def async_reset(self, seed: Seed = None, options: dict[str, Any] | None = None) -> None:
        """Start a reset without waiting; `recv` returns the first observations."""

    @abstractmethod
    def send(self, actions: Any, env_id: Any = None) -> None:
        """Start a step of the envs of the last `recv`, or of those in `env_id`, without waiting."""

    @abstractmethod
    def recv(self) -> Results:
        """Wait for `batch_size` envs and return their results like `step`, with their indices in `infos["env_id"]`."""

    @abstractmethod
    def reset_env(
        self, index: int, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset one env without touching the others; returns what the env's own `reset` returns.

        Args:
            index: The env; it must not be running, that is, sent and not yet received.
            seed: The seed of this very env, used as it is; None continues its random stream.
            options: The options of the env's own `reset`.
        """

    @abstractmethod
    def call(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method (or read an attribute) of every env, or of those in `indices`, and return the results."""

    @abstractmethod
    def get_attr(self, name: str, indices: Any = None) -> tuple[Any, ...]:
        """An attribute of every env, or of those in `indices`."""

    @abstractmethod
    def set_attr(self, name: str, values: Any, indices: Any = None) -> None:
        """Set an attribute of every env, or of those in `indices`: one value for all, or a list or tuple with one for each."""

    @property
    def drawn(self) -> dict[str, np.dtype | None]:
        """The options that are drawn anew for each episode; None where a Python env does not tell their dtype."""
        return {}

    def set_ranges(self, ranges: Ranges) -> None:
        """Set the ranges of the drawn options: every episode that begins from now on draws its values from them.

        Args:
            ranges: The lowest and highest value of each option: of all envs, or arrays with one per env.
        """
        raise HurtleError("This vector draws no options: make it with hurtle.make_vec(…, drawn=('NAME',)).")

    def check_open(self) -> None:
        """Check that the envs can still be stepped.

        Raises:
            VecEnvClosedError: The vector env was closed, or ended by an error.
        """
        if self.closed:
            raise VecEnvClosedError("This vector env is closed; make a new one.")

    def _indices(self, indices: Any) -> list[int]:
        """Indices as a list: None means all envs, and negative ones count from the end."""
        if indices is None:
            return list(range(self.num_envs))
        given = np.asarray(indices).reshape(-1)
        if given.size and given.dtype.kind not in "iu":
            raise HurtleError(f"indices must be an int or ints, got {indices!r}.")
        ids = given.tolist()
        if not all(-self.num_envs <= i < self.num_envs for i in ids):
            raise HurtleError(f"There are envs 0 … {self.num_envs - 1}, got {ids}.")
        return [i % self.num_envs for i in ids]

    def _value_of_each(self, name: str, values: Any, count: int) -> list[Any]:
        """The values given to `set_attr`, one for each of `count` envs."""
        if not isinstance(values, list | tuple):
            return [values] * count
        if len(values) != count:
            raise HurtleError(f"set_attr got {len(values)} values of {name!r} for {count} envs.")
        return list(values)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
