"""A2C with a compiled gradient step; the algorithm itself is in a2c.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hurtle.algorithms.a2c import A2C, METRICS
from hurtle.algorithms.a2c_config import A2CConfig
from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.native_update import NativeUpdate, Order, Plan, Planner
from hurtle.algorithms.ppo import METRICS as KERNEL_METRICS
from hurtle.algorithms.ppo import annealed
from hurtle.algorithms.ppo_native import order_of_segments
from hurtle.buffers.rollout import Rollout
from hurtle.contracts import Metrics, Weights
from hurtle.policies.policy import Policy

_PLACES = [KERNEL_METRICS.index(name) for name in METRICS]


class NativeA2C(A2C):
    """A2C whose gradient step is compiled.

    Raises:
        UnsupportedError: The kernels do not support this policy or optimizer.
    """

    def __init__(self, policy: Policy, config: A2CConfig, setup: LearnerSetup | None = None):
        setup = setup or LearnerSetup()
        super().__init__(policy, config, setup)
        self.optimizer = self.native = NativeUpdate(policy, config, setup.num_threads, setup.ranks)

    @property
    def planner(self) -> Planner | None:
        """See `Learner.planner`; itself, unless the policy has a memory."""
        return None if self.policy.is_recurrent or self.ranks.several else self

    def step(self, rollout: Rollout) -> list[float]:
        """See `A2C.step`."""
        if self.policy.is_recurrent:
            order = order_of_segments(rollout, [(torch.arange(rollout.num_rows), None)], True, self.ranks.several)
        else:
            steps = rollout.valid_steps()
            order = Order(steps, np.array([len(steps)]))
        results = self.native.learn(rollout, order, clips=False, clips_values=False, clip_range=0.0)
        return results[0, _PLACES].tolist()

    def plan(self, rollout: Rollout, progresses: Sequence[float]) -> Plan:
        """See `Planner.plan`."""
        config, count = self.config, len(progresses)
        rates = [annealed(config.learning_rate, config.anneal_learning_rate, progress) for progress in progresses]
        steps = torch.arange(rollout.num_valid)
        order = Order(steps.repeat(count), np.full(count, len(steps)))
        return Plan(order, rates, [0.0] * count, {"clips": False, "clips_values": False})

    def explained(self, rollout: Rollout) -> float:
        """See `NativeUpdate.explained`."""
        return self.native.explained(rollout)

    def planned(self, plan: Plan, rollout: Rollout, results: np.ndarray, explained: np.ndarray) -> list[Metrics]:
        """See `Planner.planned`."""
        self.updates += len(results)
        parts = zip(results[:, 0, _PLACES].tolist(), explained.tolist(), plan.learning_rates, strict=False)
        names = (*METRICS, "explained_variance", "learning_rate")
        return [dict(zip(names, (*losses, *others), strict=True)) for losses, *others in parts]

    def weights(self) -> Weights:
        """See `Learner.weights`."""
        return self.native.weights(self.updates)

    def threads(self) -> tuple[int, int]:
        """See `Learner.threads`."""
        return self.native.threads()

    def close(self) -> None:
        """Stop the helper threads."""
        self.native.close()
