"""R2D2: deep Q-learning with a memory, from replayed sequences (Kapturowski et al., 2019; settings: r2d2_config.py).

sequences → burn-in: the memory as today's network would have it → n-step targets → TD errors of all steps → one Adam step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.off_policy import OffPolicy
from hurtle.algorithms.q_targets import has_targets, n_step_targets, rescaled, unscaled
from hurtle.algorithms.r2d2_config import R2D2Config
from hurtle.algorithms.trained import network_of
from hurtle.buffers.device_sequences import DeviceSequences
from hurtle.buffers.rollout import Rollout
from hurtle.buffers.sequences import SequenceReplay, Sequences
from hurtle.policies.action_head import ActionHead
from hurtle.policies.policy import Policy
from hurtle.policies.q_network import QNetwork


def make_network(config: R2D2Config, head: ActionHead, make_body: Callable[[], nn.Module]) -> QNetwork:
    """The network that R2D2 acts with and trains."""
    return QNetwork(head, make_body, dueling=config.dueling)


class R2D2(OffPolicy):
    """The learner.

    Args:
        policy: With a `QNetwork` and a memory; trained in place.
        config: The settings.
        setup: Seed, reward preprocessing, number of rows.
    """

    METRICS = ("value_loss", "q_value", "td_error", "grad_norm")
    config: R2D2Config

    def __init__(self, policy: Policy, config: R2D2Config, setup: LearnerSetup | None = None):
        super().__init__(policy, config, setup)
        network_of(policy, QNetwork)
        self.online = self.trained("q", policy)
        self.target: Policy = self.target_of(policy)
        if self._graphs is None:  # else the memory's own kernels are faster
            self.compile("sequence_loss")

    def exploration(self, progress: float) -> float:
        """ε, annealed linearly."""
        return self.config.epsilon(progress)

    def _new_replay(self, experience: Rollout) -> SequenceReplay | DeviceSequences:
        config = self.config
        if self._graphs is not None:
            return DeviceSequences(experience, config.capacity, config.sequence_length, config.priority_alpha)
        return SequenceReplay(
            experience,
            config.capacity,
            config.sequence_length,
            num_rows=self.setup.num_rows,
            frame_stack=config.frame_stack,
            priority_alpha=config.priority_alpha,
            seed=self._seed,
            folder=config.replay_folder or None,
        )

    def can_draw(self) -> bool:
        """See `OffPolicy.can_draw`."""
        return bool(self.replay.num_sequences)

    def draw(self, beta: float | Tensor) -> Sequences:
        """See `OffPolicy.draw`."""
        return self.replay.sample_sequences(self.config.batch_size, beta)

    def gradient_step(self, batch: Sequences) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """See `OffPolicy.gradient_step`; returns a TD error for each sequence."""
        norm, errors, seen = self.descend(self.online, self.sequence_loss, batch)
        return errors, self.reported(torch.cat([seen, norm.unsqueeze(-1)], -1), norm)

    def sequence_loss(self, batch: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the sequences' TD errors [B], and the first three METRICS."""
        config, first = self.config, self.config.burn_in
        online, target = self.states(batch)
        later = Sequences(*(part[first:] if name in TIMED and part is not None else part for name, part in _named(batch)))
        values = self.values_of(self.policy, later, online)
        with torch.no_grad():
            goals = self.goals(later, values.detach(), self.values_of(self.target, later, target))
            counts = later.valid & has_targets(later.terminated, later.truncated, later.valid, config.n_step)
        chosen = values.gather(-1, later.actions.unsqueeze(-1)).squeeze(-1)
        errors = torch.where(counts, goals - chosen, 0.0)
        count = counts.sum().float()
        if self.ranks.several:  # so that the mean of the ranks' losses is that of all their sequences
            count = self.ranks.mean_(count)
        share = 1.0 / count.clamp_min(1.0)
        loss = 0.5 * (batch.weights * errors.square()).sum() * share
        sizes = errors.detach().abs()
        mean = sizes.sum(0) / counts.sum(0).clamp_min(1)
        priorities = config.priority_max * sizes.amax(0) + (1.0 - config.priority_max) * mean
        q_value = torch.where(counts, chosen.detach(), 0.0).sum() * share
        return loss, priorities, torch.stack([loss.detach(), q_value, sizes.sum() * share])

    @torch.no_grad()
    def states(self, batch: Sequences) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The memory of both networks after the burn-in."""
        first, begun = self.config.burn_in, batch.state
        if not self.config.stored_state:
            begun = tuple(torch.zeros_like(part) for part in begun)
        if not first:
            return begun, begun
        obs, starts = batch.obs[:first], batch.starts[:first]
        return self.policy.forward_sequence(obs, begun, starts)[2], self.target.forward_sequence(obs, begun, starts)[2]

    def values_of(self, policy: Policy, batch: Sequences, state: tuple[Tensor, ...]) -> Tensor:
        """Q of all actions, [T, B, actions]."""
        distribution: Any = policy.forward_sequence(batch.obs, state, batch.starts)[0]
        return distribution.action_values.unflatten(0, batch.rewards.shape)

    def goals(self, batch: Sequences, values: Tensor, following: Tensor) -> Tensor:
        """What the values of the chosen actions should be, [T, B]."""
        config = self.config
        chooser = values if config.double else following
        if batch.masks is not None:  # envs report none for the final observation of an episode
            chooser = chooser.masked_fill(~batch.masks & batch.valid.unsqueeze(-1), -torch.inf)
        best = following.gather(-1, chooser.argmax(-1, keepdim=True)).squeeze(-1)
        best = unscaled(best) if config.rescale_values else best
        found = n_step_targets(batch.rewards, best, batch.terminated, batch.valid, config.gamma, config.n_step)
        return rescaled(found) if config.rescale_values else found


TIMED = ("obs", "actions", "rewards", "terminated", "truncated", "starts", "valid", "masks")
"""Fields `[T, B, …]` of `Sequences`."""


def _named(batch: Sequences) -> list[tuple[str, Any]]:
    return list(zip(batch._fields, batch, strict=True))
