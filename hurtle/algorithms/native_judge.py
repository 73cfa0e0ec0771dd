"""`NativeJudge`: what the policy as it is now says of steps that an older one took, in compiled code; for V-trace.

weights, rows of a rollout → log-probs of their actions, values → `kernels.vtrace`. Torch's `evaluate_actions` is the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hurtle.algorithms.native_update import NativeUpdate
from hurtle.buffers.rollout import Done, Rollout
from hurtle.collect.compiled_actor import CompiledActor
from hurtle.contracts import Weights


class NativeJudge:
    """Judges with the weights of an update.

    Args:
        native: The policy's compiled update, which changes the weights.
    """

    def __init__(self, native: NativeUpdate):
        self._native, self._policy = native, native.policy
        self._actor: CompiledActor | None = None  # for as many rows as it was asked for at once

    def __call__(self, rollout: Rollout, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and values of all steps of some rows, [T * rows] each; those of invalid steps mean nothing."""
        return self._acting(len(rows)).judge(rollout.segments(rows, keep_all=True))

    def bootstrap(self, rollout: Rollout) -> Done:
        """Fill `last_values` and `final_values` with values of the policy as it is now."""
        return self._acting(rollout.num_rows).bootstrap(rollout)

    def _acting(self, num_rows: int) -> CompiledActor:
        if self._actor is None or self._actor.num_rows < num_rows:
            self._actor = CompiledActor(self._policy, num_rows, seed=0)
        weights: Weights = self._native.weights(0)
        with torch.no_grad():
            self._actor.load_weights(weights)
        return self._actor
