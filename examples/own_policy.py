"""A policy of your own, given by its name: attention over the cells of MinAtar's grid.

python examples/own_policy.py
hurtle train breakout --policy examples/own_policy.py:CellAttention --total-steps 1_000_000
"""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical

import hurtle


class CellAttention(nn.Module):
    """Two methods make it a policy: `encode` and `decode`.

    Args:
        observation_space: A grid [height, width, planes].
        action_space: Discrete.
    """

    def __init__(self, observation_space: spaces.Box, action_space: spaces.Discrete):
        super().__init__()
        height, width, planes = observation_space.shape
        self.cells = nn.Linear(planes, 32)
        self.places = nn.Parameter(0.02 * torch.randn(height * width, 32))
        self.attention = nn.MultiheadAttention(32, num_heads=4, batch_first=True)
        self.actor = nn.Linear(32, int(action_space.n))
        self.critic = nn.Linear(32, 1)

    def encode(self, obs: Tensor) -> Tensor:
        """[batch, height, width, planes] → features [batch, 32]."""
        cells = self.cells(obs.float().flatten(1, 2)) + self.places  # [batch, height * width, 32]
        query = cells.mean(1, keepdim=True)
        attended, _ = self.attention(query, cells, cells, need_weights=False)
        return attended.squeeze(1).tanh()

    def decode(self, features: Tensor) -> tuple[Categorical, Tensor]:
        """The distribution of actions, and the values [batch, 1]."""
        return Categorical(logits=self.actor(features)), self.critic(features)


def main() -> None:
    """Train it for a moment, then load it and act."""
    run = hurtle.train(
        "breakout",
        policy=f"{__file__}:CellAttention",  # an instance would do too, but must then be given again to load it
        total_steps=8_192,
        num_envs=64,
        minibatch_size=512,
        eval_episodes=20,
        eval_sampled=True,
        name="own-policy",
    )
    policy = hurtle.load(run)
    obs, _ = hurtle.make("breakout").reset(seed=0)
    print(f"\naction {policy.act(obs)}, value {policy.value(obs):.2f}; weights in {run.path}")


if __name__ == "__main__":
    main()
