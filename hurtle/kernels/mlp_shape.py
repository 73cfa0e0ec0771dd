"""`MLPShape`: the sizes that the fused Triton kernels of a small MLP are compiled for, and their limits.

Plain data: `hurtle.policies.native_plan.mlp_shape` makes one from a policy, `hurtle.kernels.triton.mlp` compiles for it.
"""

from __future__ import annotations

from dataclasses import dataclass

HIDDEN_WIDTHS = (16, 32, 64, 128)
MAX_INPUTS, MAX_OUTPUTS = 64, 16


@dataclass(frozen=True)
class MLPShape:
    """Two hidden layers of one width, for both the actor and the critic.

    Attributes:
        inputs: Numbers in an observation.
        hidden: Width of both hidden layers.
        outputs: Number of logits, or of means.
        relu: The activation is ReLU, otherwise tanh.
        gaussian: The head is a Gaussian, otherwise a categorical.
        offsets: Offsets in the flat parameters of weight and bias of each of the three layers, actor first, then of log_std:
            13 in all.
        size: Total number of parameters.
    """

    inputs: int
    hidden: int
    outputs: int
    relu: bool
    gaussian: bool
    offsets: tuple[int, ...]
    size: int
