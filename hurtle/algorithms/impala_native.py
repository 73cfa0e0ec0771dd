"""IMPALA in compiled code: ratios, values and the gradient step; the algorithm itself is in impala.py."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.impala import IMPALA, METRICS
from hurtle.algorithms.impala_config import IMPALAConfig
from hurtle.algorithms.native_judge import NativeJudge
from hurtle.algorithms.native_update import NativeUpdate
from hurtle.algorithms.ppo import METRICS as KERNEL_METRICS
from hurtle.algorithms.ppo_native import order_of_segments
from hurtle.buffers.rollout import Done, Rollout
from hurtle.contracts import Weights
from hurtle.policies.policy import Policy

_PLACES = np.array([KERNEL_METRICS.index(name) for name in METRICS])


class NativeIMPALA(IMPALA):
    """IMPALA whose gradient step is compiled.

    Raises:
        UnsupportedError: The kernels do not support this policy or optimizer.
    """

    def __init__(self, policy: Policy, config: IMPALAConfig, setup: LearnerSetup | None = None):
        setup = setup or LearnerSetup()
        super().__init__(policy, config, setup)
        self.optimizer = self.native = NativeUpdate(policy, config, setup.num_threads, setup.ranks)
        self._judge = NativeJudge(self.native)

    def bootstrap(self, rollout: Rollout) -> Done:
        """See `IMPALA.bootstrap`."""
        return self._judge.bootstrap(rollout)

    def step(self, rollout: Rollout, rows: Tensor) -> Tensor | None:
        """See `IMPALA.step`."""
        batch = rollout.segments(rows)
        if self.ranks.several:
            if not self.ranks.sums(len(batch.actions))[0]:
                return None
        elif not len(batch.actions):
            return None
        log_probs, values = self._judge(rollout, rows)
        if batch.kept is not None:
            log_probs, values = log_probs[batch.kept], values[batch.kept]
        self.correct(rollout, rows, batch, log_probs, values)
        order = order_of_segments(rollout, [(rows, None)], self.policy.is_recurrent, self.ranks.several)
        results = self.native.learn(rollout, order, clips=False, clips_values=False, clip_range=0.0)
        seen = torch.from_numpy(results[0, _PLACES])
        log_ratios = log_probs - batch.log_probs
        divergences = log_ratios.exp() - 1 - log_ratios
        if self.ranks.several:
            total, count = self.ranks.sums(float(divergences.sum()), len(divergences))
            seen[METRICS.index("approx_kl")] = total / count
        else:
            seen[METRICS.index("approx_kl")] = divergences.mean()
        return seen

    def weights(self) -> Weights:
        """See `Learner.weights`."""
        return self.native.weights(self.updates)

    def threads(self) -> tuple[int, int]:
        """See `Learner.threads`."""
        return self.native.threads()

    def close(self) -> None:
        """Stop the helper threads."""
        self.native.close()
