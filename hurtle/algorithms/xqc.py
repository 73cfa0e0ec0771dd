"""XQC: SAC with batch norm, weights of unit norm and distributional critics (Palenicek et al., 2025; settings: xqc_config.py).

batch and what follows, in one pass → critics by cross-entropy toward the lowest target critic → actor toward the lowest critic
→ temperature toward the target entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.off_policy import OffPolicy
from hurtle.algorithms.q_targets import cross_entropy, lowest, project
from hurtle.algorithms.sac import Temperature
from hurtle.algorithms.trained import network_of
from hurtle.algorithms.xqc_config import XQCConfig
from hurtle.buffers.replay import Transitions
from hurtle.collect.return_scale import ReturnScale
from hurtle.errors import HurtleError
from hurtle.policies.action_head import ActionHead
from hurtle.policies.batch_norm_networks import BatchNormBody, BatchNormCritics
from hurtle.policies.off_policy_actors import TanhActor
from hurtle.policies.policy import Policy


def make_network(config: XQCConfig, head: ActionHead, make_body: Callable[[], nn.Module]) -> TanhActor:
    """The actor."""
    return TanhActor(head, partial(BatchNormBody, make_body))


class XQC(OffPolicy):
    """The learner.

    Args:
        policy: With a `TanhActor` that has a `BatchNormBody`; trained in place.
        config: The settings.
        setup: Seed, reward preprocessing, number of rows.

    Raises:
        HurtleError: The policy has another network, or rewards are normalized already.
    """

    METRICS = ("value_loss", "q_value", "td_error", "policy_loss", "entropy", "temperature")
    config: XQCConfig

    def __init__(self, policy: Policy, config: XQCConfig, setup: LearnerSetup | None = None):
        super().__init__(policy, config, setup)
        if self.rewards.normalizer is not None:
            raise HurtleError("xqc scales rewards itself, to fit value_bound: set reward_mode='raw' or 'sign'.")
        self.period = config.policy_every
        self.actor: Any = network_of(policy, TanhActor)
        if not isinstance(self.actor.body, BatchNormBody):
            raise HurtleError("xqc trains an actor with batch norm, got one without: leave policy at 'auto'.")
        sizes, atoms = config.critic_sizes, config.num_atoms
        with self.own_stream():
            self.critics = BatchNormCritics(self.actor, sizes, atoms, config.value_bound, config.num_critics)
        self.trained_actor = self.trained("actor", self.actor)
        self.trained_critics = self.trained("critics", self.critics, config.critic_learning_rate)
        self.target: BatchNormCritics = self.target_of(self.critics)
        self.temperature = Temperature(config.temperature or config.initial_temperature).to(self.device)
        self.trained_temperature = None if config.temperature else self.trained("temperature", self.temperature)
        size = self.actor.num_actions
        self.target_entropy = -0.5 * size if config.target_entropy is None else config.target_entropy
        self.scale: Any = ReturnScale(self.setup.num_rows or 1, config.gamma, config.value_bound, self.device)
        self.policy_metrics = torch.full((3,), torch.nan, device=self.device)
        self.compile("value_loss", "policy_loss")

    def gradient_step(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """See `OffPolicy.gradient_step`."""
        size = *batch.rewards.shape, self.actor.num_actions
        norm, errors, seen, found = self.descend(self.trained_critics, self.value_loss, batch, self.normals(*size))
        self.trained_critics.settle(found, norm.isfinite())
        if self.gradient_steps % self.config.policy_every == 0:
            actor_norm, slope, metrics, found = self.descend(self.trained_actor, self.policy_loss, batch, self.normals(*size))
            self.trained_actor.settle(found, actor_norm.isfinite())
            norm = norm + actor_norm
            if self.trained_temperature is not None:
                self.trained_temperature.step_along(slope)
            self.policy_metrics.copy_(metrics)
        return errors, self.reported(torch.cat([seen, self.policy_metrics], -1), norm)

    def value_loss(self, batch: Transitions, noise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The critics' loss; `noise` gives the next actions.

        What was done and what follows go through the critics in one pass, so that both are normalized by the same statistics
        (CrossQ, Bhatt et al., 2024). The targets do the same, hence need no running statistics of their own. Transitions of
        weight 0 count in the statistics, but not in the loss.

        Returns:
            The loss, the cross-entropies [B], the first three METRICS, and the batch's statistics.
        """
        size = len(batch.rewards)
        obs = torch.cat([batch.obs, batch.next_obs])
        with torch.no_grad():
            next_actions, log_probs = self.actor.drawn(self.actor.encode(batch.next_obs), noise)
            actions = torch.cat([batch.actions.tanh(), next_actions])
            following, _ = self.target.by_batch(obs, actions, slice(size, None))
            bonus = -self.temperature.log.exp() * log_probs
            rewards, support = batch.rewards + batch.discounts * bonus, self.critics.support
            target = project(lowest(following.softmax(-1), support), rewards, batch.discounts, support)
        logits, found = self.critics.by_batch(obs, actions, slice(size))
        losses = cross_entropy(logits, target)  # [E, B]
        loss, errors = (batch.weights * losses).mean(1).sum(), losses.detach().mean(0)
        q_value = self.critics.expected(logits.detach()).mean()
        return loss, errors, torch.stack([loss.detach(), q_value, errors.mean()]), found

    def policy_loss(self, batch: Transitions, noise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The actor's loss; `noise` gives the actions.

        The critics judge by running statistics: those of a batch of new actions alone are not what they were trained with. The
        lowest one counts, as in the targets, so that the actor does not seek what only one of them overrates.

        Returns:
            The loss, the slope for the temperature's logarithm, the other METRICS, and the batch's statistics.
        """
        temperature = self.temperature.log.exp().detach()
        features, found = self.actor.body.by_batch(batch.obs)
        actions, log_probs = self.actor.drawn(features, noise)
        values = self.critics.expected(self.critics(batch.obs, actions)).amin(0)
        loss, entropy = ((temperature * log_probs - values) * (batch.weights > 0)).mean(), -log_probs.detach().mean()
        return loss, entropy - self.target_entropy, torch.stack([loss.detach(), entropy, temperature]), found

    def observe(self, rewards: Tensor, ended: Tensor, valid: Tensor, columns: np.ndarray | None) -> None:
        """See `OffPolicy.observe`."""
        self.scale.update(rewards, ended, valid, columns)

    def join(self, learners: Sequence[Any]) -> None:
        """See `OffPolicy.join`."""
        self.policy_metrics = self.policy_metrics.repeat(len(learners), 1)
        scales = torch.stack([learner.scale.value for learner in learners]).unsqueeze(-1)
        for learner, own in zip(learners, scales, strict=True):
            learner.scale.value = own[0]
        self.scale = SimpleNamespace(value=scales)

    def prepared(self, batch: Transitions) -> Transitions:
        """A batch as `gradient_step` takes it, its rewards scaled to returns within ±value_bound."""
        batch = super().prepared(batch)
        return batch._replace(rewards=batch.rewards / self.scale.value)

    def own_state(self) -> dict[str, Any]:
        """See `OffPolicy.own_state`: the scale of rewards."""
        return {"scale": self.scale.state_dict()}

    def load_own_state(self, saved: dict[str, Any]) -> None:
        """See `OffPolicy.load_own_state`."""
        self.scale.load_state_dict(saved["scale"])
