"""Proximal policy optimization, top to bottom: annealing, loss, minibatches, update (settings: ppo_config.py).

rollout → postprocessing → epochs of minibatches → clipped loss → clipped gradients → optimizer. Knows no env or process.
The compiled and GPU versions (ppo_native.py, ppo_device.py) are built from the functions here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.ppo_config import PPOConfig, segments_per_minibatch
from hurtle.buffers.rollout import Minibatch, Rollout
from hurtle.collect.postprocess import Postprocess
from hurtle.contracts import Learner, Metrics, Weights
from hurtle.errors import NonFiniteError
from hurtle.kernels.cuda_graphs import autocast
from hurtle.kernels.optimizers import Optimizers
from hurtle.kernels.ranks import ALONE, Ranks, joined_moments, merged_means, normalized
from hurtle.kernels.vtrace import vtrace, vtrace_cuda
from hurtle.native.rng import stream_state
from hurtle.policies.policy import Policy

SHUFFLE_STREAM = 2
AUTOCAST = {"float32": None, "tf32": None, "bf16": torch.bfloat16}
METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
"""Metrics of each minibatch."""
NOT_KNOWN = (math.nan,) * len(METRICS)


class Annealed(NamedTuple):
    """Settings that change over a run."""

    learning_rate: float
    clip_range: float
    priority_beta: float


def annealed(value: float, anneals: bool, progress: float) -> float:
    """`value`, lowered linearly to 0 over the run if it anneals."""
    return value * max(0.0, 1.0 - progress) if anneals else value


def anneal(config: PPOConfig, progress: float) -> Annealed:
    """The settings of an update at a point of the run, from 0 to 1."""
    return Annealed(
        annealed(config.learning_rate, config.anneal_learning_rate, progress),
        annealed(config.clip_range, config.anneal_clip_range, progress),
        config.priority_beta + (1 - config.priority_beta) * progress,
    )


class Losses(NamedTuple):
    """The loss of one minibatch and its parts; all scalars."""

    total: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor


def evaluate_actions(policy: Policy, batch: Minibatch) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and entropies of the batch's actions and the values, under the current policy; each `[batch]`."""
    if batch.starts is None:
        distribution, values, _ = policy(batch.inputs, mask=batch.masks)
        return distribution.log_prob(batch.actions), distribution.entropy(), values
    distribution, values, _ = policy.forward_sequence(batch.inputs, batch.state, batch.starts, batch.masks)
    if batch.kept is None:
        return distribution.log_prob(batch.actions), distribution.entropy(), values
    # Invalid steps have run through the memory and are dropped here. Their actions, which are never used, are replaced by the
    # first valid one, which is legal: even an unused log-prob of an impossible action would turn gradients into NaN.
    filler = batch.actions[:1].expand(len(values), *batch.actions.shape[1:])
    actions = filler.index_copy(0, batch.kept, batch.actions)
    log_probs, entropies = distribution.log_prob(actions), distribution.entropy()
    return log_probs[batch.kept], entropies[batch.kept], values[batch.kept]


def ppo_loss(
    log_probs: Tensor, entropies: Tensor, values: Tensor, batch: Minibatch, clip_range: Any, config: PPOConfig
) -> Losses:
    """PPO's loss of one minibatch; clip_range may be a tensor."""
    advantages = batch.advantages
    if config.normalize_advantages and len(advantages) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    if batch.weights is not None:
        advantages = advantages * batch.weights

    log_ratio = log_probs - batch.log_probs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    policy_loss = -torch.min(advantages * ratio, advantages * clipped).mean()

    value_error = (values - batch.returns) ** 2
    if config.clip_values:
        near = batch.values + (values - batch.values).clamp(-clip_range, clip_range)
        value_error = torch.max(value_error, (near - batch.returns) ** 2)
    value_loss = 0.5 * value_error.mean()

    entropy = entropies.mean()
    total = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    with torch.no_grad():
        approx_kl = (ratio - 1 - log_ratio).mean()  # Schulman's low-variance estimate of KL(old || new)
        clip_fraction = ((ratio - 1).abs() > clip_range).float().mean()
    return Losses(total, policy_loss.detach(), value_loss.detach(), entropy.detach(), approx_kl, clip_fraction)


def shuffle_generator(seed: int) -> torch.Generator:
    """The random stream of minibatches."""
    return torch.Generator().manual_seed(stream_state(seed, SHUFFLE_STREAM) >> 1)


class MinibatchOrder:
    """Which steps form each minibatch, drawn from a separate random stream.

    Args:
        config: PPO's settings, or others with minibatch_size, shuffle and priority_alpha.
        is_recurrent: Whether the policy has a memory.
        seed: Seed of the stream.
        ranks: The learners that take as many minibatches, each of its own steps.

    Attributes:
        by_segments: Whether minibatches are whole segments: for policies with a memory, and for priorities.
    """

    def __init__(self, config: Any, is_recurrent: bool, seed: int, ranks: Ranks = ALONE):
        self.config, self.by_segments, self.ranks = config, is_recurrent or config.priority_alpha > 0, ranks
        self.generator = shuffle_generator(seed)

    def epoch(self, rollout: Rollout, beta: float) -> Iterator[tuple[Tensor, Tensor | None]]:
        """One epoch: flat indices of steps, or rows of segments with their importance weights."""
        config = self.config
        if not self.by_segments:
            steps = rollout.valid_steps()
            if config.shuffle:
                steps = steps[torch.randperm(len(steps), generator=self.generator).to(rollout.device)]
            count = max(1, -(-len(steps) // config.minibatch_size))
            count = self.ranks.most(count) if self.ranks.several else count
            for chosen in steps.tensor_split(count):  # absent agents make counts uneven: split as equally as possible
                yield chosen, None
            return
        size = segments_per_minibatch(config.minibatch_size, rollout.num_steps)
        rows = torch.arange(rollout.num_rows)
        if not config.priority_alpha:
            order = rows[torch.randperm(len(rows), generator=self.generator)] if config.shuffle else rows
            for chosen in order.split(size):
                yield chosen, None
            return
        magnitude = (rollout.advantages.abs() * rollout.valid).sum(0).cpu()
        probability = segment_probabilities(magnitude, config.priority_alpha)
        for _ in range(rollout.num_rows // size):
            chosen = torch.multinomial(probability, size, replacement=True, generator=self.generator)
            yield chosen, importance_weights(probability, chosen, beta)

    def minibatches(self, rollout: Rollout, beta: float) -> Iterator[Minibatch]:
        """The minibatches of one epoch, gathered."""
        for chosen, weights in self.epoch(rollout, beta):
            if self.by_segments:
                yield rollout.segments(chosen.to(rollout.device), None if weights is None else weights.to(rollout.device))
            else:
                yield rollout.steps(chosen)


def segment_probabilities(magnitude: Tensor, alpha: float) -> Tensor:
    """Probability of drawing each segment, ∝ magnitude^alpha and never 0. [N] -> [N]."""
    weight = magnitude**alpha + 1e-6
    return weight / weight.sum()


def importance_weights(probability: Tensor, chosen: Tensor, beta: Any) -> Tensor:
    """(N · p)^-beta of the chosen segments; beta may be a tensor. [N], [b] -> [b]."""
    return (len(probability) * probability[chosen]) ** -beta


class Epochs(Protocol):
    """Runs epochs of minibatches for `PPO`: in torch (below) or in compiled code (ppo_native.py)."""

    def run(self, rollout: Rollout, order: MinibatchOrder, now: Annealed, count: int) -> Tensor:
        """Learn for `count` epochs; returns the METRICS of each minibatch, `[minibatches, 6]`."""

    def weights(self, version: int) -> Weights:
        """The weights to act with."""

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's moments, in the format of `Optimizers.state_dict`."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with saved moments."""

    def threads(self) -> tuple[int, int] | None:
        """See `Learner.threads`."""
        return None

    def close(self) -> None:
        """Stop any threads."""


class TorchEpochs(Epochs):
    """Epochs in torch, for any policy."""

    def __init__(self, policy: Policy, config: PPOConfig, setup: LearnerSetup):
        self.policy, self.config = policy, config
        self.ranks: Ranks = setup.ranks or ALONE
        self.optimizer = Optimizers(
            config.optimizer, policy, config.learning_rate, config.adam_eps, config.weight_decay, self.ranks
        )
        self._loss_config = replace(config, normalize_advantages=False) if self.ranks.several else config
        self._autocast, self._compiled = AUTOCAST[setup.precision], setup.compiled
        self._minibatch_loss = torch.compile(self.loss) if setup.compiled else self.loss

    def run(self, rollout: Rollout, order: MinibatchOrder, now: Annealed, count: int) -> Tensor:
        """See `Epochs.run`."""
        # A float would be baked in and cause a recompilation for every new value; a tensor does not.
        clip_range: Any = torch.tensor(now.clip_range, device=rollout.device) if self._compiled else now.clip_range
        self.optimizer.set_learning_rate(now.learning_rate)
        seen: list[Tensor] = []
        weights: list[float] = []
        for _ in range(count):
            if self.config.vtrace:
                correct_advantages(self.policy, rollout, self.config, self._autocast)
            for batch in order.minibatches(rollout, now.priority_beta):
                if self.ranks.several:
                    found, weight = self._step_together(batch, clip_range)
                    if not math.isnan(weight):
                        seen.append(found)
                        weights.append(weight)
                    continue
                if not len(batch.actions):  # only steps of absent agents
                    continue
                losses = self._minibatch_loss(batch, clip_range)
                grad_norm = self.optimizer.step(losses.total, self.config.max_grad_norm)
                seen.append(torch.stack([*losses[1:], grad_norm]))
        if self.ranks.several and seen:
            return merged_means(self.ranks, torch.stack(seen), torch.tensor(weights, device=rollout.device))
        return torch.stack(seen) if seen else torch.zeros(0, len(METRICS))

    def _step_together(self, batch: Minibatch, clip_range: Any) -> tuple[Tensor, float]:
        """A gradient step on all ranks' minibatches; returns the METRICS of this one's, and its weight among the others'."""
        batch, weight = joined_minibatch(self.ranks, batch, self.config.normalize_advantages)
        if math.isnan(weight):  # only steps of absent agents, on all ranks
            return torch.zeros(len(METRICS)), weight
        if not weight:
            norm = self.optimizer.step(None, self.config.max_grad_norm)
            return torch.cat([norm.new_zeros(len(METRICS) - 1), norm.view(1)]), weight
        losses = self._minibatch_loss(batch, clip_range)
        norm = self.optimizer.step(losses.total * weight, self.config.max_grad_norm)
        return torch.stack([*losses[1:], norm]), weight

    def loss(self, batch: Minibatch, clip_range: Any) -> Losses:
        """The loss of a minibatch."""
        with autocast(batch.advantages.device, self._autocast):
            log_probs, entropies, values = evaluate_actions(self.policy, batch)
        return ppo_loss(log_probs.float(), entropies.float(), values.float(), batch, clip_range, self._loss_config)

    def weights(self, version: int) -> Weights:
        """See `Learner.weights`."""
        return Weights.of(self.policy, version)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's moments."""
        return self.optimizer.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with saved moments."""
        self.optimizer.load_state_dict(saved)

    def close(self) -> None:
        """Nothing to stop."""


class PPO(Learner):
    """The learner.

    Args:
        policy: Trained in place.
        config: The settings.
        setup: Seed, reward preprocessing, precision.
        epochs: Runs the minibatches; None: torch.
    """

    takes_lag = True
    rank_state = ("generator", "postprocess")

    def __init__(self, policy: Policy, config: PPOConfig, setup: LearnerSetup | None = None, *, epochs: Epochs | None = None):
        setup = setup or LearnerSetup()
        self.ranks: Ranks = setup.ranks or ALONE
        self.policy, self.config, self.updates = policy, config, 0
        self._autocast = AUTOCAST[setup.precision]
        self._corrects_lag = setup.lags and config.correct_lag and not config.vtrace
        self.postprocess = Postprocess(policy, config.gamma, config.gae_lambda, setup.rewards, self._autocast)
        self.order = MinibatchOrder(config, policy.is_recurrent, setup.drawing_seed, self.ranks)
        self.epochs = epochs or TorchEpochs(policy, config, setup)

    def update(self, rollout: Rollout, progress: float = 0.0) -> Metrics:
        """Learn from one rollout; see `Learner.update`. Losses are means over the minibatches."""
        config, now = self.config, anneal(self.config, progress)
        self.postprocess(rollout)
        explained = self.explained(rollout)
        if self._corrects_lag and rollout.version < self.updates:
            self.correct(rollout)

        together = config.num_epochs if config.target_kl is None else 1
        parts: list[Tensor] = []
        for _ in range(0, config.num_epochs, together):
            parts.append(self.epochs.run(rollout, self.order, now, together))
            if beyond_target_kl(parts[-1], config):
                break
        seen = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.updates += 1
        metrics = dict(zip(METRICS, seen.numpy(force=True).mean(0).tolist() if len(seen) else NOT_KNOWN, strict=True))
        if len(seen) and not all(map(math.isfinite, metrics.values())):
            raise not_finite(metrics)
        rates = {"learning_rate": now.learning_rate, "clip_range": now.clip_range}
        return {**metrics, "explained_variance": explained, **rates}

    def correct(self, rollout: Rollout) -> None:
        """V-trace, for a rollout of an older policy."""
        correct_advantages(self.policy, rollout, self.config, self._autocast)

    def explained(self, rollout: Rollout) -> float:
        """See `explained_variance`."""
        return explained_variance(rollout, ranks=self.ranks)

    def weights(self) -> Weights:
        """See `Learner.weights`."""
        return self.epochs.weights(self.updates)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer, the minibatch stream and the reward statistics."""
        return {
            "optimizer": self.epochs.state_dict(),
            "generator": self.order.generator.get_state(),
            "postprocess": self.postprocess.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.epochs.load_state_dict(saved["optimizer"])
        self.order.generator.set_state(saved["generator"].cpu())
        self.postprocess.load_state_dict(saved["postprocess"])
        self.updates = saved["updates"]

    def threads(self) -> tuple[int, int] | None:
        """See `Learner.threads`."""
        return self.epochs.threads()

    def close(self) -> None:
        """Stop any threads."""
        self.epochs.close()


def beyond_target_kl(seen: Tensor, config: PPOConfig) -> bool:
    """Whether the mean KL of an epoch's minibatches, `[minibatches, 6]`, exceeds the target."""
    if config.target_kl is None or not len(seen):
        return False
    return bool(seen[:, METRICS.index("approx_kl")].mean() > config.target_kl)


def not_finite(metrics: Metrics) -> NonFiniteError:
    """The error for a loss or gradient that is not finite."""
    return NonFiniteError(
        f"The loss or its gradient is not finite: {dict(metrics)}. Continue from a checkpoint, with a lower learning_rate."
    )


@torch.no_grad()
def correct_advantages(policy: Policy, rollout: Rollout, config: PPOConfig, dtype: torch.dtype | None) -> None:
    """V-trace with the current policy's ratios."""
    batch = rollout.segments(torch.arange(rollout.num_rows, device=rollout.device), keep_all=True)
    with autocast(rollout.device, dtype):
        log_probs, _, _ = evaluate_actions(policy, batch)
    use_vtrace(rollout, log_probs.float().view_as(rollout.log_probs) - rollout.log_probs, config)


def use_vtrace(rollout: Rollout, log_ratios: Tensor, config: PPOConfig) -> None:
    """Replace advantages and returns with V-trace's. log_ratios: [T, N].

    V-trace weighs advantages by the ratios; PPO's loss does so too, and would weigh them twice.
    """
    settings = (config.gamma, config.gae_lambda, config.rho_clip, config.c_clip)
    compute, arrays = rollout.kernel(vtrace, vtrace_cuda)
    targets, advantages = compute(rollout.kernel_array(log_ratios), *arrays, *settings, rollout.kernel_valid())
    rollout.returns.copy_(torch.as_tensor(targets))
    weights = log_ratios.exp().clamp(max=config.rho_clip).clamp_min(1e-8)
    rollout.advantages.copy_(torch.as_tensor(advantages) / weights)


def joined_minibatch(ranks: Ranks, batch: Minibatch, normalizes: bool) -> tuple[Minibatch, float]:
    """A rank's minibatch with advantages that are normalized over all ranks' minibatches, if at all; and its weight."""
    mean, std, weight = joined_moments(ranks, batch.advantages)
    return (batch._replace(advantages=normalized(batch.advantages, mean, std)) if normalizes else batch), weight


def explained_variance(rollout: Rollout, errors: Tensor | None = None, ranks: Ranks = ALONE) -> float:
    """1 − Var(returns − values) / Var(returns): 1 is a perfect critic, 0 is no better than a constant.

    Args:
        rollout: With returns.
        errors: Returns − values [T, N]; None: GAE's advantages, which they are.
        ranks: The learners whose rollouts count.
    """
    if ranks.several:
        return _joined_explained_variance(ranks, rollout, rollout.advantages if errors is None else errors)
    if rollout.device.type != "cpu":
        return explained_variance_on_device(rollout, errors).item()
    returns, left = (field.numpy().ravel() for field in (rollout.returns, rollout.advantages if errors is None else errors))
    if not rollout.all_valid:
        valid = rollout.valid.numpy().ravel()
        returns, left = returns[valid], left[valid]
    if len(returns) < 2:
        return math.nan
    with np.errstate(all="ignore"):  # the update raises if anything is not finite
        returns, left = (numbers - np.add.reduce(numbers) / len(numbers) for numbers in (returns, left))
        variance = np.dot(returns, returns)
        return float(1 - np.dot(left, left) / variance) if variance else math.nan


def _joined_explained_variance(ranks: Ranks, rollout: Rollout, errors: Tensor) -> float:
    """The same over all ranks' rollouts."""
    valid = rollout.valid.flatten()
    returns, left = (field.flatten()[valid].double().cpu() for field in (rollout.returns, errors))
    sums = [float(each) for numbers in (returns, left) for each in (numbers.sum(), numbers.square().sum())]
    count, *(first, squares, first_left, squares_left) = ranks.sums(len(returns), *sums)
    if count < 2:
        return math.nan
    spread = squares - first * first / count
    return 1 - (squares_left - first_left * first_left / count) / spread if spread else math.nan


def explained_variance_on_device(
    rollout: Rollout, errors: Tensor | None = None, groups: int = 1, ranks: Ranks = ALONE
) -> Tensor:
    """Like `explained_variance`, without synchronizing with the host, for each of `groups` shares of the rows. [groups]."""
    errors = rollout.advantages if errors is None else errors
    if ranks.several:
        kept = [torch.where(rollout.valid, numbers, 0.0).double() for numbers in (rollout.returns, errors)]
        sums = [total for numbers in kept for total in (numbers.sum(), numbers.square().sum())]
        count, *found = ranks.sum_(torch.stack([rollout.valid.sum().double(), *sums])).unbind()
        spreads = [squares - total.square() / count for total, squares in (found[:2], found[2:])]
        return (1 - spreads[1] / spreads[0]).float().view(1)
    if rollout.all_valid:
        left, all_of_them = (field.unflatten(1, (groups, -1)).var((0, 2)) for field in (errors, rollout.returns))
        return 1 - left / all_of_them
    assert groups == 1
    returns, errors = rollout.returns.double(), errors.double()
    count = rollout.valid.sum()

    def spread(numbers: Tensor) -> Tensor:
        mean = torch.where(rollout.valid, numbers, 0.0).sum() / count
        return torch.where(rollout.valid, (numbers - mean).square(), 0.0).sum()

    return (1 - spread(errors) / spread(returns)).float().view(1)
