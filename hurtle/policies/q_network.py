"""`QNetwork`: the values of discrete actions, as numbers or as distributions, acting ε-greedily.

obs → body → features → outputs [B, actions, atoms] → Q → `EpsilonGreedy`. Knows nothing of targets or losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hurtle.errors import HurtleError
from hurtle.policies.action_head import ActionHead
from hurtle.policies.distributions import EpsilonGreedy
from hurtle.policies.greedy import GreedyNetwork

NOISE_SCALE = 0.5
"""Initial noise of a noisy layer, before the division by the square root of its inputs."""


class QNetwork(nn.Module):
    """A network with the two methods of `TorchPolicy`.

    Args:
        head: The action head; must be categorical.
        make_body: Makes a module that maps observations to features [B, F] and has the attribute `num_features`.
        kind: What an action's outputs mean: "mean" (its value), "c51" (logits over fixed values) or "qr" (quantiles).
        num_atoms: Outputs per action; 1 for "mean".
        value_range: The lowest and highest value of "c51".
        dueling: Q = V + advantage − the mean advantage.
        noisy: Noisy layers after the body (Fortunato et al., 2018).

    Attributes:
        epsilon: Share of random actions, set by the learner. float32 []
        epsilon_power: Actions are random with the probability epsilon ** epsilon_power; one actor of several has its own.
        support: The values of c51's atoms, [num_atoms].

    Raises:
        HurtleError: The actions are not Discrete.
    """

    epsilon: Tensor
    support: Tensor

    def __init__(
        self,
        head: ActionHead,
        make_body: Callable[[], nn.Module],
        kind: str = "mean",
        num_atoms: int = 1,
        value_range: tuple[float, float] = (-10.0, 10.0),
        dueling: bool = False,
        noisy: bool = False,
    ):
        super().__init__()
        if head.kind != "categorical":
            raise HurtleError(f"Q-learning needs Discrete actions, this env's are {head.action_space}; use sac, td3 or ppo.")
        self.kind, self.num_actions, self.num_atoms = kind, head.num_outputs, num_atoms
        self.body = make_body()
        size = int(self.body.num_features)  # type: ignore[arg-type]
        make = NoisyLinear if noisy else nn.Linear
        self.advantage: nn.Module = make(size, self.num_actions * num_atoms)
        self.state_value: nn.Module | None = make(size, num_atoms) if dueling else None
        self.register_buffer("epsilon", torch.ones(()))
        self.epsilon_power = 1.0
        self.register_buffer("support", torch.linspace(*value_range, num_atoms), persistent=False)

    def encode(self, obs: Tensor) -> Tensor:
        """Features [B, F]."""
        return self.body(obs)

    def decode(self, features: Tensor) -> tuple[EpsilonGreedy, Tensor]:
        """The ε-greedy policy, and the value of its best action, [B]."""
        values = self.action_values(self.outputs(features))
        epsilon = self.epsilon if self.epsilon_power == 1.0 else self.epsilon**self.epsilon_power
        return EpsilonGreedy(values, epsilon), values.amax(-1)

    def outputs(self, features: Tensor) -> Tensor:
        """[B, F] → [B, actions, atoms]."""
        found = self.advantage(features).unflatten(-1, (self.num_actions, self.num_atoms))
        if self.state_value is not None:
            found = found - found.mean(-2, keepdim=True) + self.state_value(features).unsqueeze(-2)
        return found.float()

    def action_values(self, outputs: Tensor) -> Tensor:
        """Q of each action: [B, actions, atoms] → [B, actions]."""
        if self.kind == "c51":
            return outputs.softmax(-1) @ self.support
        return outputs.mean(-1)

    def forward(self, obs: Tensor) -> Tensor:
        """Observations → [B, actions, atoms]."""
        return self.outputs(self.encode(obs))

    def exploration(self) -> list[float]:
        """What compiled code needs to explore; see `sample_greedy` in kernels/cpu/exploring.py."""
        return [float(self.epsilon) ** self.epsilon_power]

    def greedy(self, head: ActionHead) -> GreedyNetwork | None:
        """A plain network that chooses the same actions; None if values are not linear in the features (c51).

        State values do not change which action is best.
        """
        if self.kind == "c51":
            return None
        layer: Any = self.advantage  # noise has mean 0; quantiles are averaged
        weight = layer.weight.unflatten(0, (self.num_actions, self.num_atoms)).mean(1)
        return GreedyNetwork(head, self.body, weight, layer.bias.unflatten(0, (self.num_actions, self.num_atoms)).mean(1))

    def reset_noise(self, generator: torch.Generator | None = None) -> None:
        """Draw the noise of noisy layers anew."""
        for module in self.modules():
            if isinstance(module, NoisyLinear):
                module.reset_noise(generator)


class NoisyLinear(nn.Module):
    """A linear layer with learned, factorized noise on its weights; without noise in eval mode.

    Args:
        inputs: Number of inputs.
        outputs: Number of outputs.
    """

    input_noise: Tensor
    output_noise: Tensor

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        bound, noise = 1.0 / math.sqrt(inputs), NOISE_SCALE / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_noise = nn.Parameter(torch.full((outputs, inputs), noise))
        self.bias_noise = nn.Parameter(torch.full((outputs,), noise))
        self.register_buffer("input_noise", torch.zeros(inputs))
        self.register_buffer("output_noise", torch.zeros(outputs))

    def reset_noise(self, generator: torch.Generator | None = None) -> None:
        """Draw new noise."""
        for noise in (self.input_noise, self.output_noise):
            drawn = torch.randn(noise.shape, generator=generator, device=noise.device)
            noise.copy_(drawn.sign() * drawn.abs().sqrt())

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs] → [B, outputs]."""
        if not self.training:
            return functional.linear(x, self.weight, self.bias)
        weight = self.weight + self.weight_noise * torch.outer(self.output_noise, self.input_noise)
        return functional.linear(x, weight, self.bias + self.bias_noise * self.output_noise)
