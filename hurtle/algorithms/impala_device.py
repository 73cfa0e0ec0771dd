"""IMPALA with its entire update on the device, see device_actor_critic.py; V-trace and the loss are those of impala.py.

minibatch of whole rows → ratios and values as they are now → V-trace → gradients of the loss. With fused kernels, one of them
gives the ratios and values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hurtle.algorithms.a2c import a2c_loss
from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.device_actor_critic import DeviceActorCritic
from hurtle.algorithms.device_epochs import Passes
from hurtle.algorithms.impala import METRICS, vtrace_of
from hurtle.algorithms.impala_config import IMPALAConfig
from hurtle.algorithms.ppo import Losses, annealed, explained_variance_on_device
from hurtle.buffers.rollout import Done, Minibatch, Rollout
from hurtle.policies.policy import Policy


class DeviceIMPALA(DeviceActorCritic):
    """IMPALA with the update on the device.

    Nothing lags here: what follows a rollout has been valued by the collector, with the weights that the update begins with.

    Args:
        policy: Trained in place; its parameters become views of one flat tensor.
        config: The settings of IMPALA.
        setup: Seed, graphs, precision. With CUDA graphs, fused kernels replace the policy in the update if they support it.

    Raises:
        UnsupportedError: The optimizer has no flat version.
    """

    REPORTED, DONE = METRICS, Done.ADVANTAGES

    def __init__(self, policy: Policy, config: IMPALAConfig, setup: LearnerSetup | None = None):
        passes = Passes(by_segments=True, shuffles=config.num_minibatches > 1)
        super().__init__(policy, config, setup or LearnerSetup(), passes, config.trace_lambda)

    def rates(self, progress: float) -> dict[str, float]:
        """See `DeviceEpochs.rates`."""
        return {"learning_rate": annealed(self.config.learning_rate, self.config.anneal_learning_rate, progress)}

    def minibatch_sizes(self, rollout: Rollout) -> list[int]:
        """See `DeviceEpochs.minibatch_sizes`: as equal as possible."""
        parts = torch.arange(rollout.num_rows).tensor_split(self.config.num_minibatches)
        return [len(part) for part in parts if len(part)]

    def _bind(self, rollout: Rollout) -> None:
        super()._bind(rollout)
        self._values = torch.zeros_like(rollout.values)  # as they were when the policy learned from them
        self._in_order = torch.arange(rollout.num_steps * len(self.minibatches[0]), device=self.device)

    # Everything below is captured: the same launches on the same memory, regardless of the data.

    def loss(self, log_probs: Tensor, entropies: Tensor, values: Tensor, batch: Minibatch) -> Losses:
        """See `DeviceActorCritic.loss`."""
        return a2c_loss(log_probs, entropies, values, batch, self.loss_config)

    def begin(self) -> None:
        """Nothing: targets and advantages are those of a minibatch."""

    @torch.no_grad()
    def end_epoch(self) -> None:
        """See `DeviceEpochs.end_epoch`."""
        self.explained.copy_(explained_variance_on_device(self.rollout, self.rollout.returns - self._values, ranks=self.ranks))

    @torch.no_grad()
    def targets(self, batch: Minibatch, chosen: Tensor, log_probs: Tensor, values: Tensor) -> Minibatch:
        """See `DeviceActorCritic.targets`: V-trace's."""
        rollout, lead = self.rollout, (self.rollout.num_steps, len(chosen))
        ratios, values = (log_probs - batch.log_probs).view(lead), values.view(lead)
        returns, advantages = vtrace_of(rollout, chosen, ratios, values, self.config)
        for field, found in ((rollout.returns, returns), (rollout.advantages, advantages), (self._values, values)):
            field.index_copy_(1, chosen, found)
        return batch._replace(returns=returns.flatten(), advantages=advantages.flatten())

    @torch.no_grad()
    def _learn_fused(self, chosen: Tensor) -> None:
        batch, kernels = self.rollout.segments(chosen, keep_all=True), self.acting_kernels
        seen, masks = batch.inputs.flatten(0, 1), None if batch.masks is None else batch.masks.flatten(0, 1)
        batch = self.targets(batch, chosen, *kernels.judge(seen, batch.actions, masks))
        valid = self.valid(chosen)
        advantages = self.joined(batch.advantages, valid) if self.ranks.several else batch.advantages
        fields = (batch.log_probs, batch.values, advantages, batch.returns)
        self.take_steps(seen, batch.actions, *fields, masks, valid)
        self.learn_fused(self._in_order[: len(seen)], None, valid)

    def learn(self, chosen: Tensor, weights: Tensor | None) -> None:
        """See `DeviceEpochs.learn`."""
        if self.acting_kernels is None:
            super().learn(chosen, weights)
        else:
            self._learn_fused(chosen)
