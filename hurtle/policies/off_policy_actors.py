"""Actors without a critic, for off-policy learners, which have critics of their own: `TanhActor` and `SoftmaxActor`.

obs → body → mean and log_std, or logits → a distribution to act with. Knows nothing of losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hurtle.errors import HurtleError
from hurtle.policies.action_head import ActionHead
from hurtle.policies.batch_norm_networks import BatchNormBody
from hurtle.policies.distributions import Categorical, ExploringTanh, SquashedGaussian
from hurtle.policies.greedy import GreedyNetwork

LOG_STD_RANGE = (-5.0, 2.0)


class TanhActor(nn.Module):
    """Bounded continuous actions; a network with the two methods of `TorchPolicy`, whose values are 0.

    Args:
        head: The action head; must be squashed_gaussian.
        make_body: Makes a module that maps observations to features [B, F] and has the attribute `num_features`.
        noise: Standard deviation of the noise that is added after the tanh; None learns one before it, by observation.

    Attributes:
        epsilon: 1 makes all actions random, 0 none; set by the learner. float32 []

    Raises:
        HurtleError: The head is of another kind.
    """

    epsilon: Tensor
    log_noise: Tensor

    def __init__(self, head: ActionHead, make_body: Callable[[], nn.Module], noise: float | None = None):
        super().__init__()
        if head.kind != "squashed_gaussian":
            raise HurtleError(
                f"Actions in {head.action_space} with distribution={head.kind!r}: this algorithm needs a Box with finite "
                "bounds and squashed_gaussian, its default; for discrete actions use dqn, sac or ppo."
            )
        self.has_own_noise, self.num_actions = noise is None, head.num_outputs
        self.make_body, self.body = make_body, make_body()
        size = int(self.body.num_features)  # type: ignore[arg-type]
        self.last = nn.Linear(size, self.num_actions * (2 if noise is None else 1))
        self.register_buffer("epsilon", torch.ones(()))
        log_noise = torch.full((self.num_actions,), math.log(max(noise or 0.0, 1e-8)))
        self.register_buffer("log_noise", log_noise, persistent=False)

    def encode(self, obs: Tensor) -> Tensor:
        """Features [B, F]."""
        return self.body(obs)

    def decode(self, features: Tensor) -> tuple[ExploringTanh, Tensor]:
        """The distribution to act with, and values of 0, [B]."""
        mean, log_std = self.outputs(features)
        return ExploringTanh(mean, log_std, self.epsilon, not self.has_own_noise), mean.new_zeros(mean.shape[0])

    def outputs(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation, before the tanh: [B, D] and [B, D] or [D]."""
        outputs = self.last(features).float()
        if not self.has_own_noise:
            return outputs, self.log_noise
        mean, raw = outputs.chunk(2, -1)
        return mean, bounded_log_std(raw)

    def drawn(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions drawn with standard normals, [B, D] in (-1, 1), and their log-probabilities, [B]."""
        mean, log_std = self.outputs(features)
        raw = mean + log_std.exp() * noise
        return raw.tanh(), SquashedGaussian(mean, log_std).log_prob(raw)

    def exploration(self) -> list[float]:
        """What compiled code needs to explore; see `sample_tanh` in kernels/cpu/exploring.py."""
        return [float(self.epsilon), float(self.has_own_noise), *LOG_STD_RANGE, *self.log_noise.exp().tolist()]

    def greedy(self, head: ActionHead) -> GreedyNetwork:
        """A plain network that chooses the same actions, without noise."""
        body = self.body.folded() if isinstance(self.body, BatchNormBody) else self.body
        return GreedyNetwork(head, body, self.last.weight[: self.num_actions], self.last.bias[: self.num_actions])


def bounded_log_std(raw: Tensor) -> Tensor:
    """Numbers of any size → `LOG_STD_RANGE`, smoothly, so that gradients never vanish at a bound."""
    low, high = LOG_STD_RANGE
    return low + 0.5 * (high - low) * (raw.tanh() + 1.0)


class SoftmaxActor(nn.Module):
    """Discrete actions; a network with the two methods of `TorchPolicy`, whose values are 0.

    Args:
        head: The action head; must be categorical.
        make_body: As for `TanhActor`.

    Attributes:
        epsilon: 1 makes all actions random, 0 none; set by the learner. float32 []
    """

    epsilon: Tensor

    def __init__(self, head: ActionHead, make_body: Callable[[], nn.Module]):
        super().__init__()
        if head.kind != "categorical":
            raise HurtleError(
                f"Actions in {head.action_space} with distribution={head.kind!r}: this algorithm needs Discrete ones, or a Box "
                "with finite bounds and squashed_gaussian, its default; ppo takes others."
            )
        self.num_actions = head.num_outputs
        self.make_body, self.body = make_body, make_body()
        self.logits = nn.Linear(int(self.body.num_features), self.num_actions)  # type: ignore[arg-type]
        self.register_buffer("epsilon", torch.ones(()))

    def encode(self, obs: Tensor) -> Tensor:
        """Features [B, F]."""
        return self.body(obs)

    def decode(self, features: Tensor) -> tuple[Categorical, Tensor]:
        """The distribution to act with, and values of 0, [B]."""
        logits = self.logits(features)
        return Categorical(logits * (1.0 - self.epsilon)), logits.new_zeros(logits.shape[0])

    def greedy(self, head: ActionHead) -> GreedyNetwork:
        """A plain network that chooses the same actions."""
        return GreedyNetwork(head, self.body, self.logits.weight, self.logits.bias)
