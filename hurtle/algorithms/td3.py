"""Twin delayed DDPG: a deterministic actor, two critics, smoothed targets (settings: td3_config.py).

batch → critics toward the lowest target critic of a noisy target action → every other step the actor, up the first critic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.off_policy import OffPolicy
from hurtle.algorithms.q_targets import critic_loss
from hurtle.algorithms.td3_config import TD3Config
from hurtle.algorithms.trained import network_of
from hurtle.buffers.replay import Transitions
from hurtle.policies.action_head import ActionHead
from hurtle.policies.critics import Critics
from hurtle.policies.off_policy_actors import TanhActor
from hurtle.policies.policy import Policy


def make_network(config: TD3Config, head: ActionHead, make_body: Callable[[], nn.Module]) -> TanhActor:
    """The actor."""
    return TanhActor(head, make_body, config.exploration_noise)


class TD3(OffPolicy):
    """The learner.

    Args:
        policy: With a `TanhActor`; trained in place.
        config: The settings.
        setup: Seed, reward preprocessing, number of rows.
    """

    METRICS = ("value_loss", "q_value", "td_error", "policy_loss")
    config: TD3Config

    def __init__(self, policy: Policy, config: TD3Config, setup: LearnerSetup | None = None):
        super().__init__(policy, config, setup)
        self.period = config.policy_every
        self.actor: Any = network_of(policy, TanhActor)
        with self.own_stream():
            self.critics = Critics(self.actor, self.actor.num_actions, count=config.num_critics)
        self.trained_actor = self.trained("actor", self.actor)
        self.trained_critics = self.trained("critics", self.critics, config.critic_learning_rate)
        self.target_actor: Any = self.target_of(self.actor)
        self.target_critics: Critics = self.target_of(self.critics)
        self.last_policy_loss = torch.full((), torch.nan, device=self.device)
        self.compile("value_loss", "policy_loss")

    def gradient_step(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """See `OffPolicy.gradient_step`."""
        noise = self.normals(*batch.rewards.shape, self.actor.num_actions)
        norm, errors, seen = self.descend(self.trained_critics, self.value_loss, batch, noise)
        if self.gradient_steps % self.config.policy_every == 0:
            actor_norm, policy_loss = self.descend(self.trained_actor, self.policy_loss, batch)
            norm = norm + actor_norm
            self.last_policy_loss.copy_(policy_loss)
        found = torch.cat([seen, self.last_policy_loss.unsqueeze(-1)], -1)
        return errors, self.reported(found, norm)

    def join(self, learners: Sequence[Any]) -> None:
        """See `OffPolicy.join`."""
        self.last_policy_loss = self.last_policy_loss.repeat(len(learners))

    def value_loss(self, batch: Transitions, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The critics' loss, the TD errors [B], and the first three METRICS; `noise` smooths the next actions."""
        with torch.no_grad():
            following = self.target_critics(batch.next_obs, self.target_actions(batch.next_obs, noise))
            target = batch.rewards + batch.discounts * following.amin(0).squeeze(-1)
        values = self.critics(batch.obs, batch.actions.tanh()).squeeze(-1)  # [E, B]
        return critic_loss(values, target, batch.weights)

    def policy_loss(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """The actor's loss, the first critic's value of its actions, negated; and once more for reports."""
        values = self.critics(batch.obs, self.actions(self.actor, batch.obs))[0].squeeze(-1)
        loss = -(values * (batch.weights > 0)).mean()
        return loss, loss.detach()

    def actions(self, actor: TanhActor, obs: Tensor) -> Tensor:
        """An actor's actions, [B, D] in (-1, 1)."""
        return actor.outputs(actor.encode(obs))[0].tanh()

    def target_actions(self, obs: Tensor, noise: Tensor) -> Tensor:
        """The target actor's actions with clipped noise."""
        actions, bound = self.actions(self.target_actor, obs), self.config.target_noise_clip
        return (actions + (noise * self.config.target_noise).clamp(-bound, bound)).clamp(-1.0, 1.0)
