"""The settings that several algorithms share; imports no torch, since `hurtle train --help` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from hurtle.algorithms.algorithm import AlgorithmConfig
from hurtle.errors import HurtleError
from hurtle.ranges import at_least, between, positive


@dataclass(frozen=True)
class ReplayConfig(AlgorithmConfig):
    """The settings of every algorithm that learns from a replay buffer."""

    num_steps: Annotated[int, at_least(1)] = 1
    """Steps per env between updates."""
    replay_ratio: Annotated[float, positive()] = 1.0
    """Gradient steps per step of an env."""
    learning_starts: Annotated[int, at_least(0)] = 1_000
    """Random steps before the first gradient step."""
    batch_size: Annotated[int, at_least(1)] = 256
    """Transitions per gradient step."""
    learning_rate: Annotated[float, positive()] = 3e-4
    """Step size of Adam."""
    anneal_learning_rate: bool = False
    """Anneal it linearly to 0 over the run."""
    gamma: Annotated[float, between(0, 1)] = 0.99
    """Discount of future rewards."""
    n_step: Annotated[int, at_least(1)] = 1
    """Rewards that are summed before bootstrapping."""
    target_rate: Annotated[float, between(0, 1)] = 0.005
    """How far target networks move toward the trained ones …"""
    target_every: Annotated[int, at_least(1)] = 1
    """… once every this many gradient steps."""
    max_grad_norm: Annotated[float, positive(allows_infinity=True)] = float("inf")
    """Clip the global norm of the gradients to this."""
    adam_eps: Annotated[float, positive()] = 1e-8
    """Added to Adam's denominator."""
    capacity: Annotated[int, at_least(1)] = 1_000_000
    """Steps that the replay buffer holds."""
    priority_alpha: Annotated[float, at_least(0)] = 0.0
    """Draw by (TD error)^alpha; 0: uniformly."""
    priority_beta: Annotated[float, between(0, 1)] = 0.4
    """Exponent of the importance weights; anneals to 1."""
    frame_stack: Annotated[int, at_least(1)] = 1
    """Frames that observations stack; each is stored once."""
    replay_folder: str = ""
    """Keep the buffer in a file there; default: only if it exceeds memory."""
    save_replay: bool = True
    """Save it with checkpoints, so that resuming is exact."""

    def check(self, num_rows: int, is_recurrent: bool) -> None:
        """See `AlgorithmConfig.check`."""
        if is_recurrent:
            raise HurtleError(
                "This algorithm draws single steps from its replay buffer, which a policy with a memory cannot learn from: set "
                "recurrent='none', or use ppo, a2c or pqn."
            )


@dataclass(frozen=True)
class ActorCriticConfig(ReplayConfig):
    """The settings of every algorithm with an actor and several critics."""

    critic_learning_rate: Annotated[float | None, positive()] = None
    """Of the critics; none: learning_rate."""
    num_critics: Annotated[int, at_least(1)] = 2
    """Critics, of which the lowest value counts."""


@dataclass(frozen=True)
class EpsilonConfig:
    """The settings of ε-greedy exploration."""

    epsilon_start: Annotated[float, between(0, 1)] = 1.0
    """Share of random actions at the start …"""
    epsilon_end: Annotated[float, between(0, 1)] = 0.05
    """… and at the end,"""
    epsilon_fraction: Annotated[float, between(0, 1)] = 0.2
    """after this part of the run."""
    epsilon_ladder: Annotated[float, at_least(0)] = 0.0
    """async: of N actors, number i takes ε^(1 + ladder · i / (N − 1))."""

    def epsilon(self, progress: float) -> float:
        """The share of random actions, annealed linearly."""
        done = min(1.0, progress / self.epsilon_fraction) if self.epsilon_fraction else 1.0
        return self.epsilon_start + (self.epsilon_end - self.epsilon_start) * done

    def diversify(self, policy: Any, actor: int, num_actors: int) -> None:
        """See `AlgorithmConfig.diversify`: later actors explore less."""
        if num_actors > 1:
            policy.network.epsilon_power = 1.0 + self.epsilon_ladder * actor / (num_actors - 1)
