"""PPO with its entire update on the device, see device_actor_critic.py. Loss and annealing are those of ppo.py.

Priorities and V-trace are drawn and computed on the device too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.device_actor_critic import DeviceActorCritic
from hurtle.algorithms.device_epochs import Passes
from hurtle.algorithms.ppo import Losses, anneal, importance_weights, ppo_loss, segment_probabilities, use_vtrace
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.buffers.rollout import Minibatch, Rollout
from hurtle.kernels.cuda_graphs import autocast
from hurtle.kernels.device_rows import Draw
from hurtle.policies.policy import Policy


class DevicePPO(DeviceActorCritic):
    """PPO with the update on the device.

    Args:
        policy: Trained in place; its parameters become views of one flat tensor.
        config: The settings of PPO.
        setup: Seed, graphs, precision. With CUDA graphs, fused kernels replace the policy in the update if they support it.

    Raises:
        UnsupportedError: The optimizer has no flat version.
    """

    CLIPS = True

    def __init__(self, policy: Policy, config: PPOConfig, setup: LearnerSetup | None = None):
        draws = config.priority_alpha > 0
        passes = Passes(policy.is_recurrent or draws, config.num_epochs, config.shuffle and not draws)
        super().__init__(policy, config, setup or LearnerSetup(), passes, config.gae_lambda)
        self._beta = torch.zeros((), device=self.device)  # the exponent of the importance weights, set before an update
        self._no_steps = torch.zeros(1, dtype=torch.int64, device=self.device)

    def rates(self, progress: float) -> dict[str, float]:
        """See `DeviceEpochs.rates`."""
        now = anneal(self.config, progress)
        self.clip_range.fill_(now.clip_range)
        self._beta.fill_(now.priority_beta)
        return {"learning_rate": now.learning_rate, "clip_range": now.clip_range}

    def goes_too_far(self) -> bool:
        """Whether the mean KL of the epoch's minibatches exceeds target_kl; this synchronizes with the device."""
        if self.config.target_kl is None:
            return False
        if self.ranks.several:
            self.ranks.mean_(self.epoch_kl)
        total, count = self.epoch_kl.tolist()
        return count > 0 and total / count > self.config.target_kl

    def _bind(self, rollout: Rollout) -> None:
        super()._bind(rollout)
        self._places = torch.arange(len(self.minibatches[0]), device=self.device)
        self._uniforms = torch.zeros((len(self._places), 1), device=self.device)
        self._probability = torch.zeros(rollout.num_rows, dtype=torch.float64, device=self.device)
        self._all_rows = torch.arange(rollout.num_rows, device=self.device)

    # Everything below is captured: the same launches on the same memory, regardless of the data.

    def loss(self, log_probs: Tensor, entropies: Tensor, values: Tensor, batch: Minibatch) -> Losses:
        """See `DeviceActorCritic.loss`."""
        return ppo_loss(log_probs, entropies, values, batch, self.clip_range, self.loss_config)

    def begin_epoch(self) -> None:
        """See `DeviceEpochs.begin_epoch`."""
        super().begin_epoch()
        config, rollout = self.config, self.rollout
        if config.vtrace:
            self._correct_advantages(rollout)
            self.begin_fused()
        if config.priority_alpha:
            with torch.no_grad():
                magnitude = (rollout.advantages.abs() * rollout.valid).sum(0).double()
                self._probability.copy_(segment_probabilities(magnitude, config.priority_alpha))

    @torch.no_grad()
    def draw(self, k: int) -> tuple[Tensor, Tensor | None]:
        """See `DeviceEpochs.draw`."""
        if not self.config.priority_alpha:
            return super().draw(k)
        size = len(self._places)
        draw = Draw(self._places + (self.key + k * size), self._no_steps)
        self.kernels("uniform_rows", size, 0, draw, self._uniforms)
        cumulative = self._probability.cumsum(0)  # not multinomial, which is limited to 2^24 rows
        rows = torch.searchsorted(cumulative, self._uniforms[:, 0].double() * cumulative[-1], right=True)
        rows = rows.clamp_max(len(cumulative) - 1)
        return rows, importance_weights(self._probability, rows, self._beta).float()

    @torch.no_grad()
    def _correct_advantages(self, rollout: Rollout) -> None:
        """V-trace with the current policy's ratios."""
        with autocast(self.device, self.half):
            log_probs, _, _ = self.evaluate(self.policy, rollout.segments(self._all_rows, keep_all=True))
        use_vtrace(rollout, log_probs.float().view_as(rollout.log_probs) - rollout.log_probs, self.config)
