"""Parallel Q-learning: no replay, no target network, but many envs, λ-returns and layer norm (settings: pqn_config.py).

rollout → λ-returns of the best actions' values → epochs of minibatches → (Q − return)². From Gallici et al., 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.ppo import AUTOCAST, MinibatchOrder, annealed, explained_variance, not_finite
from hurtle.algorithms.pqn_config import PQNConfig
from hurtle.algorithms.trained import network_of
from hurtle.buffers.rollout import Minibatch, Rollout
from hurtle.collect.postprocess import Postprocess
from hurtle.contracts import Learner, Metrics, Weights
from hurtle.errors import HurtleError
from hurtle.kernels.cuda_graphs import autocast
from hurtle.kernels.optimizers import Optimizers
from hurtle.kernels.ranks import ALONE, Ranks, joined_moments
from hurtle.policies.action_head import ActionHead
from hurtle.policies.policy import Policy
from hurtle.policies.q_network import QNetwork

METRICS = ("value_loss", "q_value", "td_error", "grad_norm")


def make_network(config: PQNConfig, head: ActionHead, make_body: Callable[[], nn.Module]) -> QNetwork:
    """The network that PQN acts with and trains."""
    return QNetwork(head, make_body, dueling=config.dueling)


class PQN(Learner):
    """The learner.

    Its λ-returns are GAE's: V is the value of the best action, which the policy reports as its value.

    Args:
        policy: With a `QNetwork`, also with a memory; trained in place.
        config: The settings.
        setup: Seed, reward preprocessing, precision.
    """

    rank_state = ("generator", "postprocess")

    def __init__(self, policy: Policy, config: PQNConfig, setup: LearnerSetup | None = None):
        setup = setup or LearnerSetup()
        self.ranks: Ranks = setup.ranks or ALONE
        self.policy, self.config, self.updates = policy, config, 0
        self.network: Any = network_of(policy, QNetwork)
        self._autocast = AUTOCAST[setup.precision]
        self.postprocess = Postprocess(policy, config.gamma, config.return_lambda, setup.rewards, self._autocast)
        self.order = MinibatchOrder(config, policy.is_recurrent, setup.drawing_seed, self.ranks)
        self.optimizer = Optimizers("adam", policy, config.learning_rate, config.adam_eps, ranks=self.ranks)
        self.network.epsilon.fill_(config.epsilon_start)

    def update(self, experience: Rollout, progress: float = 0.0) -> Metrics:
        """Learn from one rollout; see `Learner.update`. Losses are means over the minibatches."""
        config = self.config
        refuse_masks(experience)
        learning_rate = annealed(config.learning_rate, config.anneal_learning_rate, progress)
        self.optimizer.set_learning_rate(learning_rate)
        self.postprocess(experience)
        seen: list[Tensor] = []
        for _ in range(config.num_epochs):
            for batch in self.order.minibatches(experience, 1.0):
                if self.ranks.several:
                    seen += self._step_together(batch)
                elif len(batch.actions):
                    seen.append(self.step(batch))
        self.updates += 1
        epsilon = config.epsilon(progress)
        self.network.epsilon.fill_(epsilon)
        metrics = dict(zip(METRICS, torch.stack(seen).mean(0).tolist(), strict=True)) if seen else {}
        if not all(map(math.isfinite, metrics.values())):
            raise not_finite(metrics)
        explained = explained_variance(experience, ranks=self.ranks)
        return {**metrics, "explained_variance": explained, "epsilon": epsilon, "learning_rate": learning_rate}

    def step(self, batch: Minibatch) -> Tensor:
        """One gradient step; returns the METRICS."""
        with autocast(batch.returns.device, self._autocast):
            values = chosen_values(self.policy, batch)
        loss, seen = q_loss(values.float(), batch.returns)
        norm = self.optimizer.step(loss, self.config.max_grad_norm)
        return torch.cat([seen, norm.view(1)])

    def _step_together(self, batch: Minibatch) -> list[Tensor]:
        """The same on the steps of all ranks, `batch` being this one's; nothing if they have none."""
        weight = joined_moments(self.ranks, batch.returns)[2]
        if math.isnan(weight):
            return []
        found, loss = torch.zeros(len(METRICS) - 1, device=batch.returns.device), None
        if weight:
            with autocast(batch.returns.device, self._autocast):
                values = chosen_values(self.policy, batch)
            loss, found = q_loss(values.float(), batch.returns)
            loss = loss * weight
        norm = self.optimizer.step(loss, self.config.max_grad_norm)
        return [torch.cat([self.ranks.mean_(found * weight), norm.view(1)])]

    def weights(self) -> Weights:
        """See `Learner.weights`."""
        return Weights.of(self.policy, self.updates)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer, the minibatch stream and the reward statistics."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "generator": self.order.generator.get_state(),
            "postprocess": self.postprocess.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.optimizer.load_state_dict(saved["optimizer"])
        self.order.generator.set_state(saved["generator"].cpu())
        self.postprocess.load_state_dict(saved["postprocess"])
        self.updates = saved["updates"]


def refuse_masks(rollout: Rollout) -> None:
    """Raise a HurtleError if the env masks actions: the best legal action of the next state is not known here."""
    if rollout.masks is not None:
        raise HurtleError("pqn does not support action masks: use dqn, sac or ppo.")


def chosen_values(policy: Policy, batch: Minibatch) -> Tensor:
    """Q of the actions that were taken, [batch]."""
    if batch.starts is None:
        distribution, _, _ = policy(batch.inputs)
    else:
        distribution, _, _ = policy.forward_sequence(batch.inputs, batch.state, batch.starts)
    values: Tensor = distribution.action_values
    values = values if batch.kept is None else values[batch.kept]
    return values.gather(-1, batch.actions.unsqueeze(-1)).squeeze(-1)


def q_loss(values: Tensor, returns: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The loss, and the METRICS but the norm; weights of the steps sum to 1, None: all count the same."""
    weights = values.new_full((), 1.0 / max(1, len(values))) if weights is None else weights
    errors = values - returns
    loss = 0.5 * (weights * errors.square()).sum()
    return loss, torch.stack([loss.detach(), (weights * values.detach()).sum(), (weights * errors.detach().abs()).sum()])
