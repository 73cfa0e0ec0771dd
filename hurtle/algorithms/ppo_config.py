"""The settings of PPO and where its learners are; separate from ppo.py, since `hurtle train --help` must not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hurtle.algorithms.algorithm import Algorithm, AlgorithmConfig
from hurtle.errors import HurtleError
from hurtle.ranges import at_least, between, positive


@dataclass(frozen=True)
class PPOConfig(AlgorithmConfig):
    """PPO."""

    num_steps: Annotated[int, at_least(1)] = 128
    """Steps per env and rollout."""
    minibatch_size: Annotated[int, at_least(1)] = 256
    """Steps per gradient step; divides the batch."""
    num_epochs: Annotated[int, at_least(1)] = 4
    """Passes over each rollout."""
    learning_rate: Annotated[float, positive()] = 2.5e-4
    """Step size of the optimizer."""
    anneal_learning_rate: bool = True
    """Anneal it linearly to 0 over the run."""
    gamma: Annotated[float, between(0, 1)] = 0.99
    """Discount of future rewards."""
    gae_lambda: Annotated[float, between(0, 1)] = 0.95
    """GAE: bias (0) against variance (1)."""
    clip_range: Annotated[float, positive()] = 0.2
    """How far the probability ratio may move from 1."""
    anneal_clip_range: bool = False
    """Anneal it linearly to 0 over the run."""
    clip_values: bool = True
    """Also clip changes of the values by clip_range."""
    entropy_coef: Annotated[float, at_least(0)] = 0.01
    """Weight of the entropy bonus (exploration)."""
    value_coef: Annotated[float, at_least(0)] = 0.5
    """Weight of the value loss."""
    max_grad_norm: Annotated[float, positive(allows_infinity=True)] = 0.5
    """Clip the global norm of the gradients to this."""
    normalize_advantages: bool = True
    """Scale to mean 0, std 1 in each minibatch."""
    target_kl: Annotated[float | None, positive()] = None
    """Stop an update early beyond this KL."""
    shuffle: bool = True
    """Draw minibatches at random, else in order."""
    priority_alpha: Annotated[float, at_least(0)] = 0.0
    """Draw segments by (sum |advantage|)^alpha; 0: off."""
    priority_beta: Annotated[float, between(0, 1)] = 0.2
    """Exponent of their importance weights; anneals to 1."""
    vtrace: bool = False
    """V-trace before each epoch: correct for steps of older policies."""
    correct_lag: bool = False
    """V-trace once per update, for rollouts of older policies."""
    rho_clip: Annotated[float, positive(allows_infinity=True)] = 1.0
    """V-trace: clips the ratio in the TD errors."""
    c_clip: Annotated[float, positive(allows_infinity=True)] = 1.0
    """V-trace: clips the ratio in the traces."""
    optimizer: Literal["adam", "adamw", "rmsprop", "muon"] = "adam"
    """adam, adamw, rmsprop or muon."""
    adam_eps: Annotated[float, positive()] = 1e-5
    """Added to the optimizer's denominator."""
    weight_decay: Annotated[float, at_least(0)] = 0.0
    """Weight decay of the optimizer."""

    def check(self, num_rows: int, is_recurrent: bool) -> None:
        """See `AlgorithmConfig.check`."""
        check_divides(self.num_steps * num_rows, self.minibatch_size)
        if is_recurrent or self.priority_alpha:
            segments_per_minibatch(self.minibatch_size, self.num_steps)


def check_divides(batch: int, minibatch: int) -> None:
    """Reject a minibatch size that does not divide the batch, naming the nearest ones that do."""
    if batch % minibatch == 0:
        return
    divisors = sorted(d for low in range(1, int(batch**0.5) + 1) if batch % low == 0 for d in {low, batch // low})
    near = [max(d for d in divisors if d < minibatch), *(d for d in divisors if d > minibatch)][:2]
    problem = f"is more than the batch of {batch}" if minibatch > batch else f"does not divide the batch of {batch}"
    raise HurtleError(
        f"minibatch_size={minibatch} {problem} steps (num_steps × num_envs × agents). "
        f"Nearest that fit: {' or '.join(map(str, near))}; or change num_steps or num_envs."
    )


def segments_per_minibatch(minibatch_size: int, num_steps: int) -> int:
    """Number of segments per minibatch.

    Raises:
        HurtleError: Segments do not fit evenly.
    """
    if minibatch_size % num_steps:
        raise HurtleError(
            f"Recurrent policies and priorities learn from whole segments: minibatch_size={minibatch_size} must be a "
            f"multiple of num_steps={num_steps}, such as {max(1, round(minibatch_size / num_steps)) * num_steps}."
        )
    return minibatch_size // num_steps


ALGORITHM = Algorithm(
    PPOConfig,
    {
        "general": "hurtle.algorithms.ppo:PPO",
        "native": "hurtle.algorithms.ppo_native:NativePPO",
        "device": "hurtle.algorithms.ppo_device:DevicePPO",
    },
    takes_lag=True,
    side_by_side=True,
)
