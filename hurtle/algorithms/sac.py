"""Soft actor–critic: the critics learn value plus entropy, the actor maximizes it (settings: sac_config.py).

batch → critics toward the lowest target critic → actor toward the lowest critic → temperature toward the target entropy.
Discrete actions too: expectations over all actions replace samples (Christodoulou, 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.off_policy import OffPolicy
from hurtle.algorithms.q_targets import critic_loss
from hurtle.algorithms.sac_config import SACConfig
from hurtle.algorithms.trained import network_of
from hurtle.buffers.replay import Transitions
from hurtle.policies.action_head import ActionHead
from hurtle.policies.critics import Critics
from hurtle.policies.distributions import Categorical, masked
from hurtle.policies.off_policy_actors import SoftmaxActor, TanhActor
from hurtle.policies.policy import Policy

ENTROPY_SHARE = 0.89
"""Target entropy of discrete actions, relative to that of a uniform choice."""


def make_network(config: SACConfig, head: ActionHead, make_body: Callable[[], nn.Module]) -> nn.Module:
    """The actor."""
    return (TanhActor if head.kind == "squashed_gaussian" else SoftmaxActor)(head, make_body)


class SAC(OffPolicy):
    """The learner.

    Args:
        policy: With a `TanhActor` or `SoftmaxActor`; trained in place.
        config: The settings.
        setup: Seed, reward preprocessing, number of rows.
    """

    METRICS = ("value_loss", "q_value", "td_error", "policy_loss", "entropy", "temperature")
    config: SACConfig

    def __init__(self, policy: Policy, config: SACConfig, setup: LearnerSetup | None = None):
        super().__init__(policy, config, setup)
        self.actor: Any = network_of(policy, TanhActor, SoftmaxActor)
        self.is_discrete = isinstance(self.actor, SoftmaxActor)
        size = self.actor.num_actions
        action_size, num_outputs = (0, size) if self.is_discrete else (size, 1)
        with self.own_stream():
            self.critics = Critics(self.actor, action_size, num_outputs, config.num_critics)
        self.trained_actor = self.trained("actor", self.actor)
        self.trained_critics = self.trained("critics", self.critics, config.critic_learning_rate)
        self.target: Critics = self.target_of(self.critics)
        self.temperature = Temperature(config.temperature or config.initial_temperature).to(self.device)
        self.trained_temperature = None if config.temperature else self.trained("temperature", self.temperature)
        self.compile("value_loss", "policy_loss")
        natural = ENTROPY_SHARE * math.log(size) if self.is_discrete else -float(size)
        self.target_entropy = natural if config.target_entropy is None else config.target_entropy

    def gradient_step(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """See `OffPolicy.gradient_step`."""
        size = batch.rewards.shape[:-1] if self.is_discrete else (*batch.rewards.shape, self.actor.num_actions)
        norm, errors, seen = self.descend(self.trained_critics, self.value_loss, batch, self.normals(*size))
        actor_norm, slope, also_seen = self.descend(self.trained_actor, self.policy_loss, batch, self.normals(*size))
        if self.trained_temperature is not None:
            self.trained_temperature.step_along(slope)
        return errors, self.reported(torch.cat([seen, also_seen], -1), norm + actor_norm)

    def value_loss(self, batch: Transitions, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The critics' loss, the TD errors [B], and the first three METRICS; `noise` gives the next actions."""
        with torch.no_grad():
            following = self.soft_value(batch.next_obs, batch.next_masks, self.temperature.log.exp(), noise)
            target = batch.rewards + batch.discounts * following
        return critic_loss(self.values_of(batch), target, batch.weights)

    def policy_loss(self, batch: Transitions, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The actor's loss, the slope for the temperature's logarithm, and the other METRICS; `noise` gives the actions."""
        temperature = self.temperature.log.exp().detach()
        expected, entropies = self.improvement(batch.obs, batch.masks, noise)
        is_known = batch.weights > 0
        loss, entropy = -((temperature * entropies + expected) * is_known).mean(), entropies.detach().mean()
        return loss, entropy - self.target_entropy, torch.stack([loss.detach(), entropy, temperature])

    def values_of(self, batch: Transitions) -> Tensor:
        """The critics' values of what was done, [E, B]."""
        if self.is_discrete:
            return self.critics(batch.obs).gather(-1, batch.actions.expand(self.critics.count, -1).unsqueeze(-1)).squeeze(-1)
        return self.critics(batch.obs, batch.actions.tanh()).squeeze(-1)

    def soft_value(self, obs: Tensor, mask: Tensor | None, temperature: Tensor, noise: Tensor) -> Tensor:
        """The value of acting on from here: the lowest target critic's, plus the entropy, [B]."""
        if self.is_discrete:
            log_probs = self.choice(obs, mask).log_probs
            probs = log_probs.exp()
            values = self.target(obs).amin(0) - temperature * torch.where(probs > 0, log_probs, 0.0)
            return (probs * values).sum(-1)
        actions, log_probs = self.actor.drawn(self.actor.encode(obs), noise)
        return self.target(obs, actions).amin(0).squeeze(-1) - temperature * log_probs

    def improvement(self, obs: Tensor, mask: Tensor | None, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest critic's value of the actor's actions, and the actor's entropy, [B] each."""
        if self.is_discrete:
            choice = self.choice(obs, mask)
            with torch.no_grad():
                values = self.critics(obs).amin(0)
            return (choice.log_probs.exp() * values).sum(-1), choice.entropy()
        actions, log_probs = self.actor.drawn(self.actor.encode(obs), noise)
        return self.critics(obs, actions).amin(0).squeeze(-1), -log_probs

    def choice(self, obs: Tensor, mask: Tensor | None) -> Categorical:
        """The distribution of discrete actions."""
        found = Categorical(self.actor.logits(self.actor.encode(obs)))
        return found if mask is None else masked(found, mask)  # type: ignore[return-value]


class Temperature(nn.Module):
    """The weight of the entropy, as a logarithm."""

    def __init__(self, initial: float):
        super().__init__()
        self.log = nn.Parameter(torch.tensor(math.log(initial)))
