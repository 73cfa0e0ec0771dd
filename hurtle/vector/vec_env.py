"""`VecEnv`: Gymnasium's `VectorEnv` plus `async_reset`, `send` and `recv`; the one interface of all back ends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

from gymnasium import spaces
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

Results = tuple[Any, Any, Any, Any, dict[str, Any]]
Seed = int | Sequence[int | None] | None


class VecEnv(VectorEnv):
    """Many envs at once. Use it in a `with` statement, or call `close()`.

    Attributes:
        batch_size: Envs per `recv`; less than `num_envs` in a pool.
        num_agents: Agents per env; with several, arrays have an axis of agents after that of the envs.
    """

    batch_size: int
    num_agents: int

    @cached_property
    def observation_space(self) -> spaces.Space:  # type: ignore[override]
        """The space of a batch of observations (made when first asked for: a million envs have a large one)."""
        return batch_space(self.single_observation_space, self.batch_size)

    @cached_property
    def action_space(self) -> spaces.Space:  # type: ignore[override]
        """The space of a batch of actions (made when first asked for)."""
        return batch_space(self.single_action_space, self.batch_size)

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Threads or processes that step the envs."""

    @abstractmethod
    def async_reset(self, seed: Seed = None, options: dict[str, Any] | None = None) -> None:
        """Begin resetting as `reset` does, without waiting; `recv` returns the first observations."""

    @abstractmethod
    def send(self, actions: Any, env_id: Any = None) -> None:
        """Begin stepping the envs of the last `recv`, or those of `env_id`, without waiting."""

    @abstractmethod
    def recv(self) -> Results:
        """Wait for `batch_size` envs; what `step` returns, of these, with their indices in `infos["env_id"]`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
