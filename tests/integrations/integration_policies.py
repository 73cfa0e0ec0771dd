"""Small torch policies for the tests of the integrations."""

import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal


class Discrete(nn.Module):
    """For vectors in and one of n actions out; half of the features are the actor's, half the critic's."""

    def __init__(self, observation_space, action_space, hidden=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(observation_space.shape[0], 2 * hidden), nn.Tanh())
        self.actor, self.critic = nn.Linear(hidden, int(action_space.n)), nn.Linear(hidden, 1)
        for layer, gain in ((self.body[0], 2**0.5), (self.actor, 0.01), (self.critic, 1.0)):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)

    def encode(self, obs):
        return self.body(obs)

    def decode(self, features):
        for_actor, for_critic = features.chunk(2, -1)
        return Categorical(logits=self.actor(for_actor)), self.critic(for_critic)


class Continuous(nn.Module):
    """Gaussian actions; the values come as `[batch]`."""

    def __init__(self, observation_space, action_space, independent=True):
        super().__init__()
        inputs, outputs = observation_space.shape[0], action_space.shape[0]
        self.mean, self.critic = nn.Linear(inputs, outputs), nn.Linear(inputs, 1)
        self.log_std = nn.Parameter(torch.zeros(outputs))
        self.independent = independent

    def encode(self, obs):
        return obs

    def decode(self, features):
        normal = Normal(self.mean(features), self.log_std.exp())
        return (Independent(normal, 1) if self.independent else normal), self.critic(features).squeeze(1)
