"""DQN and its extensions: double, dueling, n-step, prioritized, noisy, C51, QR (settings: dqn_config.py).

batch → the target network's value of what follows → TD error or distance of distributions → one Adam step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.dqn_config import DQNConfig
from hurtle.algorithms.off_policy import OffPolicy
from hurtle.algorithms.q_targets import cross_entropy, project, quantile_huber, rescaled, unscaled
from hurtle.algorithms.trained import network_of
from hurtle.buffers.replay import Transitions
from hurtle.policies.action_head import ActionHead
from hurtle.policies.policy import Policy
from hurtle.policies.q_network import QNetwork

KINDS = {"none": "mean", "c51": "c51", "qr": "qr"}


def make_network(config: DQNConfig, head: ActionHead, make_body: Callable[[], nn.Module]) -> QNetwork:
    """The network that DQN acts with and trains."""
    atoms = 1 if config.distributional == "none" else config.num_atoms
    value_range = (config.value_low, config.value_high)
    return QNetwork(head, make_body, KINDS[config.distributional], atoms, value_range, config.dueling, config.noisy)


class DQN(OffPolicy):
    """The learner.

    Args:
        policy: With a `QNetwork`; trained in place.
        config: The settings.
        setup: Seed, reward preprocessing, number of rows.
    """

    METRICS = ("value_loss", "q_value", "td_error", "grad_norm")
    config: DQNConfig

    def __init__(self, policy: Policy, config: DQNConfig, setup: LearnerSetup | None = None):
        super().__init__(policy, config, setup)
        self.network: Any = network_of(policy, QNetwork)
        self.online = self.trained("q", self.network)
        self.target: QNetwork = self.target_of(self.network)
        self.compile("value_loss")

    def exploration(self, progress: float) -> float:
        """ε, annealed linearly; 0 with noisy layers."""
        return 0.0 if self.config.noisy else self.config.epsilon(progress)

    def gradient_step(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """See `OffPolicy.gradient_step`."""
        if self.config.noisy:
            self.network.reset_noise(self.random)
            self.target.reset_noise(self.random)
        norm, errors, seen = self.descend(self.online, self.value_loss, batch)
        return errors, self.reported(torch.cat([seen, norm.unsqueeze(-1)], -1), norm)

    def value_loss(self, batch: Transitions) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the TD errors [B] (for c51 the cross-entropies), and the first three METRICS."""
        following = self.following(batch)
        outputs = chosen_of(self.network(batch.obs), batch.actions)
        losses, errors = self.losses(outputs, following, batch)
        loss, q_value = (batch.weights * losses).mean(), self.network.action_values(outputs.detach()).mean()
        return loss, errors, torch.stack([loss.detach(), q_value, errors.abs().mean()])

    @torch.no_grad()
    def following(self, batch: Transitions) -> Tensor:
        """What the target network says of the best next action, [B, atoms]."""
        outputs = self.target(batch.next_obs)
        chooser = self.network(batch.next_obs) if self.config.double else outputs
        values = self.network.action_values(chooser)
        if batch.next_masks is not None:
            values = values.masked_fill(~batch.next_masks, -torch.inf)
        return chosen_of(outputs, values.argmax(-1))

    def losses(self, outputs: Tensor, following: Tensor, batch: Transitions) -> tuple[Tensor, Tensor]:
        """The loss of each transition, and its TD error (for c51 the cross-entropy), [B] each."""
        if self.config.distributional == "c51":
            with torch.no_grad():
                target = project(following.softmax(-1), batch.rewards, batch.discounts, self.network.support)
            losses = cross_entropy(outputs, target)
            return losses, losses.detach()
        with torch.no_grad():
            following = unscaled(following) if self.config.rescale_values else following
            target = batch.rewards.unsqueeze(-1) + batch.discounts.unsqueeze(-1) * following
            target = rescaled(target) if self.config.rescale_values else target
        errors = (target.mean(-1) - outputs.mean(-1)).detach()
        if self.config.distributional == "qr":
            return quantile_huber(outputs, target), errors
        return functional.smooth_l1_loss(outputs, target, reduction="none").squeeze(-1), errors


def chosen_of(outputs: Tensor, actions: Tensor) -> Tensor:
    """The outputs of the chosen actions: [B, actions, atoms], [B] → [B, atoms]."""
    index = actions.view(-1, 1, 1).expand(-1, 1, outputs.shape[-1])
    return outputs.gather(1, index).squeeze(1)
