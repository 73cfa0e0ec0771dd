"""A2C with a compiled gradient step; the algorithm itself is in a2c.py."""

from __future__ import annotations

import numpy as np
import torch

from hurtle.algorithms.a2c import A2C, METRICS
from hurtle.algorithms.a2c_config import A2CConfig
from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.native_update import NativeUpdate, Order
from hurtle.algorithms.ppo import METRICS as KERNEL_METRICS
from hurtle.algorithms.ppo_native import order_of_segments
from hurtle.buffers.rollout import Rollout
from hurtle.contracts import Weights
from hurtle.policies.policy import Policy

_PLACES = [KERNEL_METRICS.index(name) for name in METRICS]


class NativeA2C(A2C):
    """A2C whose gradient step is compiled.

    Raises:
        UnsupportedError: The kernels do not support this policy or optimizer.
    """

    def __init__(self, policy: Policy, config: A2CConfig, setup: LearnerSetup | None = None):
        super().__init__(policy, config, setup)
        self.optimizer = self.native = NativeUpdate(policy, config, (setup or LearnerSetup()).num_threads)

    def step(self, rollout: Rollout) -> list[float]:
        """See `A2C.step`."""
        if self.policy.is_recurrent:
            order = order_of_segments(rollout, [(torch.arange(rollout.num_rows), None)], is_recurrent=True)
        else:
            steps = rollout.valid_steps()
            order = Order(steps, np.array([len(steps)]))
        results = self.native.learn(rollout, order, clips=False, clips_values=False, clip_range=0.0)
        return results[0, _PLACES].tolist()

    def weights(self) -> Weights:
        """See `Learner.weights`."""
        return self.native.weights(self.updates)

    def threads(self) -> tuple[int, int]:
        """See `Learner.threads`."""
        return self.native.threads()

    def close(self) -> None:
        """Stop the helper threads."""
        self.native.close()
