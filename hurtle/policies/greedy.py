"""`GreedyNetwork`: what is left of an off-policy network for acting without exploring: a body and one linear layer.

Exported files hold it instead of critics, noise and distributions of values. Knows nothing of files.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hurtle.policies.action_head import ActionHead
from hurtle.policies.distributions import Distribution


class GreedyNetwork(nn.Module):
    """A network with the two methods of `TorchPolicy`; only the mode of its distribution means anything, and its values are 0.

    Args:
        head: The action head.
        body: Maps observations to features.
        weight: Of the last layer, [outputs, features].
        bias: Of the last layer, [outputs].
    """

    def __init__(self, head: ActionHead, body: nn.Module, weight: Tensor, bias: Tensor):
        super().__init__()
        self.head, self.body = head, body
        self.last = nn.Linear(weight.shape[1], weight.shape[0])
        with torch.no_grad():
            self.last.weight.copy_(weight)
            self.last.bias.copy_(bias)

    def encode(self, obs: Tensor) -> Tensor:
        """Features [B, F]."""
        return self.body(obs)

    def decode(self, features: Tensor) -> tuple[Distribution, Tensor]:
        """The distribution, and values of 0, [B]."""
        outputs = self.last(features)
        log_std = outputs.new_zeros(self.head.log_std_size) if self.head.log_std_size else None
        return self.head.distribution(outputs, log_std), outputs.new_zeros(outputs.shape[0])
