"""PQN with its entire update on the device, see device_epochs.py; the loss is that of pqn.py."""

from __future__ import annotations

from torch import Tensor

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.device_epochs import DeviceEpochs, Passes
from hurtle.algorithms.ppo import annealed
from hurtle.algorithms.pqn import METRICS, chosen_values, q_loss, refuse_masks
from hurtle.algorithms.pqn_config import PQNConfig
from hurtle.algorithms.trained import network_of
from hurtle.buffers.rollout import Minibatch, Rollout
from hurtle.contracts import Metrics
from hurtle.kernels.cuda_graphs import autocast
from hurtle.policies.policy import Policy
from hurtle.policies.q_network import QNetwork


class DevicePQN(DeviceEpochs):
    """PQN with the update on the device.

    Args:
        policy: With a `QNetwork`; its parameters become views of one flat tensor.
        config: The settings of PQN.
        setup: Seed, graphs, precision.
    """

    METRICS = METRICS

    def __init__(self, policy: Policy, config: PQNConfig, setup: LearnerSetup | None = None):
        passes = Passes(policy.is_recurrent, config.num_epochs, config.shuffle)
        super().__init__(policy, config, setup or LearnerSetup(), passes, config.return_lambda)
        self.network = network_of(policy, QNetwork)
        self.network.epsilon.fill_(config.epsilon_start)

    def update(self, rollout: Rollout, progress: float = 0.0) -> Metrics:
        """See `DeviceEpochs.update`."""
        refuse_masks(rollout)
        found = super().update(rollout, progress)
        self.network.epsilon.fill_(self.config.epsilon(progress))
        return found

    def rates(self, progress: float) -> dict[str, float]:
        """See `DeviceEpochs.rates`."""
        learning_rate = annealed(self.config.learning_rate, self.config.anneal_learning_rate, progress)
        return {"epsilon": self.config.epsilon(progress), "learning_rate": learning_rate}

    def gradients(self, batch: Minibatch, valid: Tensor | None, chosen: Tensor) -> Tensor:
        """See `DeviceEpochs.gradients`."""
        with autocast(self.device, self.half):
            values = chosen_values(self.policy, batch)
        weights = None if valid is None else valid / valid.sum().clamp_min(1)
        loss, seen = q_loss(values.float(), batch.returns, weights)
        loss.backward()
        return seen
