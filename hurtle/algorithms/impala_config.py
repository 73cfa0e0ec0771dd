"""The settings of IMPALA and where its learners are; separate from impala.py: `hurtle train --help` must not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hurtle.algorithms.algorithm import Algorithm, AlgorithmConfig
from hurtle.errors import HurtleError
from hurtle.ranges import at_least, between, positive


@dataclass(frozen=True)
class IMPALAConfig(AlgorithmConfig):
    """IMPALA."""

    num_steps: Annotated[int, at_least(1)] = 20
    """Steps per env and rollout."""
    num_minibatches: Annotated[int, at_least(1)] = 1
    """Gradient steps per rollout; each learns from a part of the rows."""
    learning_rate: Annotated[float, positive()] = 6e-4
    """Step size of the optimizer."""
    anneal_learning_rate: bool = True
    """Anneal it linearly to 0 over the run."""
    gamma: Annotated[float, between(0, 1)] = 0.99
    """Discount of future rewards."""
    trace_lambda: Annotated[float, between(0, 1)] = 1.0
    """Bias (0) against variance (1) of V-trace's targets."""
    rho_clip: Annotated[float, positive(allows_infinity=True)] = 1.0
    """V-trace: clips the ratio in the TD errors."""
    c_clip: Annotated[float, positive(allows_infinity=True)] = 1.0
    """V-trace: clips the ratio in the traces."""
    entropy_coef: Annotated[float, at_least(0)] = 0.01
    """Weight of the entropy bonus (exploration)."""
    value_coef: Annotated[float, at_least(0)] = 0.5
    """Weight of the value loss."""
    max_grad_norm: Annotated[float, positive(allows_infinity=True)] = 0.5
    """Clip the global norm of the gradients to this."""
    normalize_advantages: bool = False
    """Scale to mean 0, std 1 in each minibatch."""
    optimizer: Literal["adam", "adamw", "rmsprop", "muon"] = "adam"
    """adam, adamw, rmsprop or muon."""
    adam_eps: Annotated[float, positive()] = 1e-5
    """Added to the optimizer's denominator."""
    weight_decay: Annotated[float, at_least(0)] = 0.0
    """Weight decay of the optimizer."""

    def check(self, num_rows: int, is_recurrent: bool) -> None:
        """See `AlgorithmConfig.check`."""
        if self.num_minibatches > num_rows:
            raise HurtleError(
                f"num_minibatches={self.num_minibatches} is more than the {num_rows} rows (num_envs × agents), "
                "and each learns from whole rows."
            )


ALGORITHM = Algorithm(
    IMPALAConfig,
    {
        "general": "hurtle.algorithms.impala:IMPALA",
        "native": "hurtle.algorithms.impala_native:NativeIMPALA",
        "device": "hurtle.algorithms.impala_device:DeviceIMPALA",
    },
    takes_lag=True,
)
