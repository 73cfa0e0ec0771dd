"""A2C with its entire update on the device, see device_actor_critic.py; the loss is that of a2c.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hurtle.algorithms.a2c import METRICS, a2c_loss
from hurtle.algorithms.a2c_config import A2CConfig
from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.device_actor_critic import DeviceActorCritic
from hurtle.algorithms.device_epochs import Passes
from hurtle.algorithms.ppo import Losses, annealed
from hurtle.buffers.rollout import Minibatch, Rollout
from hurtle.policies.policy import Policy


class DeviceA2C(DeviceActorCritic):
    """A2C with the update on the device.

    Args:
        policy: Trained in place; its parameters become views of one flat tensor.
        config: The settings of A2C.
        setup: Graphs, precision. With CUDA graphs, fused kernels replace the policy in the update if they support it.

    Raises:
        UnsupportedError: The optimizer has no flat version.
    """

    REPORTED = METRICS

    def __init__(self, policy: Policy, config: A2CConfig, setup: LearnerSetup | None = None):
        super().__init__(policy, config, setup or LearnerSetup(), Passes(policy.is_recurrent), config.gae_lambda)

    def rates(self, progress: float) -> dict[str, float]:
        """See `DeviceEpochs.rates`."""
        return {"learning_rate": annealed(self.config.learning_rate, self.config.anneal_learning_rate, progress)}

    def minibatch_sizes(self, rollout: Rollout) -> list[int]:
        """See `DeviceEpochs.minibatch_sizes`: one of everything."""
        return [rollout.num_rows if self.passes.by_segments else rollout.num_steps * rollout.num_rows]

    def loss(self, log_probs: Tensor, entropies: Tensor, values: Tensor, batch: Minibatch) -> Losses:
        """See `DeviceActorCritic.loss`."""
        return a2c_loss(log_probs, entropies, values, batch, self.loss_config)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer and the reward statistics; nothing is drawn."""
        return {name: part for name, part in super().state_dict().items() if name != "generator"}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state."""
        super().load_state_dict({**saved, "generator": self.generator.get_state()})
