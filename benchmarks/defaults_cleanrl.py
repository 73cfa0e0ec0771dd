"""CleanRL's PPO, SAC and DQN with its published settings, written anew: what a user of its scripts gets without tuning.

SB3's kind of vector → training → a model with `predict`, as SB3's evaluation takes it. The settings are those of ppo.py,
ppo_continuous_action.py, sac_continuous_action.py and dqn.py. A training that is stopped can be saved and continued.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import mse_loss, one_hot

Told = Callable[[int, float], bool]
"""Called with steps and mean return; whether to go on."""
SOON = 100
"""Steps between two calls of it, at least."""


class Moments:
    """Running mean and variance of rows."""

    def __init__(self, shape: tuple[int, ...]):
        self.count, self.mean, self.var = 1e-4, np.zeros(shape), np.ones(shape)

    def add(self, rows: np.ndarray) -> None:
        """Learn from rows [rows, *shape]."""
        count, mean, var = len(rows), rows.mean(0), rows.var(0)
        total, delta = self.count + count, mean - self.mean
        spread = self.var * self.count + var * count + delta**2 * self.count * count / total
        self.mean, self.var, self.count = self.mean + delta * count / total, spread / total, total


class CleanRL:
    """What the algorithms share: the rows of a vector, their returns, and what is saved.

    Args:
        vec: SB3's kind of vector.
        total: Steps of the run, summed over rows.
    """

    num_envs = 1

    def __init__(self, vec: Any, total: int, seed: int):
        self.vec, self.total, self.steps = vec, total, 0
        self.rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        space = vec.observation_space
        self.choices = int(space.n) if isinstance(space, spaces.Discrete) else 0
        self.inputs = self.choices or int(np.prod(space.shape))
        self.returns: list[float] = []
        self._running = np.zeros(vec.num_envs)
        self._told = 0

    def rows(self, obs: np.ndarray) -> np.ndarray:
        """Observations as float32 vectors; numbers of a Discrete space one-hot, which the scripts leave to the user."""
        if self.choices:
            return one_hot(torch.as_tensor(obs).long().flatten(), self.choices).float().numpy()
        return np.asarray(obs, np.float32).reshape(len(obs), -1)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Next observations, the same before resets, rewards, ends, and which of the ends are only time limits."""
        obs, rewards, dones, infos = self.vec.step(actions)
        self.steps += len(dones)
        self._running += rewards
        self.returns = (self.returns + self._running[dones].tolist())[-100:]
        self._running[dones] = 0.0
        now = self.rows(obs)
        last, limits = now.copy(), np.zeros(len(dones), np.bool_)
        for row in dones.nonzero()[0]:
            last[row] = self.rows(np.asarray(infos[row]["terminal_observation"])[None])[0]
            limits[row] = infos[row].get("TimeLimit.truncated", False)
        return now, last, rewards, dones, limits

    def tells(self, tell: Told) -> bool:
        """Tell now and then; whether to go on."""
        if self.steps - self._told < SOON:
            return True
        self._told = self.steps
        return tell(self.steps, float(np.mean(self.returns)) if self.returns else float("nan"))

    def learn(self, tell: Told) -> bool:
        """Go on with the training; whether it is done."""
        raise NotImplementedError

    def predict(self, obs: np.ndarray, state: Any = None, episode_start: Any = None, deterministic: bool = True) -> Any:
        """The best actions, for SB3's `evaluate_policy`."""
        with torch.no_grad():
            return self.best(torch.from_numpy(self.rows(obs))).numpy(), None

    def best(self, rows: Tensor) -> Tensor:
        """The best actions for rows of observations."""
        raise NotImplementedError

    def save(self, file: Path) -> None:
        """Everything but the envs, which begin new episodes."""
        kept = {name: value for name, value in vars(self).items() if name not in ("vec", "_running")}
        torch.save(kept, file)

    def load(self, file: Path) -> None:
        """Continue."""
        vars(self).update(torch.load(file, weights_only=False))


def layer(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    """A linear layer with orthogonal weights and zero biases."""
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


def tanh_network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """PPO's actor or critic."""
    return nn.Sequential(layer(inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, outputs, gain))


def relu_network(inputs: int, sizes: tuple[int, ...], outputs: int) -> nn.Sequential:
    """The critics of SAC, and DQN's network."""
    widths = [inputs, *sizes]
    hidden = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], outputs))


class PPO(CleanRL):
    """ppo.py for discrete actions, else ppo_continuous_action.py, which normalizes observations and rewards."""

    gamma, gae_lambda, clip, value_coef, max_grad_norm = 0.99, 0.95, 0.2, 0.5, 0.5

    def __init__(self, vec: Any, total: int, seed: int):
        super().__init__(vec, total, seed)
        space = vec.action_space
        self.is_box = isinstance(space, spaces.Box)
        self.rate, self.epochs, self.entropy_coef = (3e-4, 10, 0.0) if self.is_box else (2.5e-4, 4, 0.01)
        self.num_steps, self.minibatches = (2048, 32) if self.is_box else (128, 4)
        outputs = int(np.prod(space.shape)) if self.is_box else int(space.n)
        self.actor, self.critic = tanh_network(self.inputs, outputs, 0.01), tanh_network(self.inputs, 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(outputs))
        self.seen, self.earned = Moments((self.inputs,)), Moments(())
        self.discounted = np.zeros(vec.num_envs)
        self.weights = [*self.actor.parameters(), *self.critic.parameters(), *([self.log_std] if self.is_box else [])]
        self.adam = torch.optim.Adam(self.weights, self.rate, eps=1e-5)

    def distribution(self, rows: Tensor) -> torch.distributions.Distribution:
        """Of the actions."""
        if self.is_box:
            return torch.distributions.Independent(torch.distributions.Normal(self.actor(rows), self.log_std.exp()), 1)
        return torch.distributions.Categorical(logits=self.actor(rows))

    def normalized(self, rows: np.ndarray) -> np.ndarray:
        """Observations as the networks see them."""
        if not self.is_box:
            return rows
        return ((rows - self.seen.mean) / np.sqrt(self.seen.var + 1e-8)).clip(-10, 10).astype(np.float32)

    def best(self, rows: Tensor) -> Tensor:
        """See `CleanRL.best`."""
        found = self.actor(torch.from_numpy(self.normalized(rows.numpy())))
        return self._clipped(found) if self.is_box else found.argmax(1)

    def _clipped(self, actions: Tensor) -> Tensor:
        space = self.vec.action_space
        return actions.view(-1, *space.shape).clamp(torch.from_numpy(space.low), torch.from_numpy(space.high))

    def learn(self, tell: Told) -> bool:
        """See `CleanRL.learn`."""
        rows, raw = self.vec.num_envs, self.rows(self.vec.reset())
        self.discounted = np.zeros(rows)
        updates, batch = self.total // (rows * self.num_steps), rows * self.num_steps
        while self.steps // batch < updates:
            self.adam.param_groups[0]["lr"] = self.rate * (1 - (self.steps // batch) / updates)
            raw, *fields, following = self._rollout(raw)
            self._update(*fields, following)
            if not self.tells(tell):
                return False
        return True

    def _rollout(self, raw: np.ndarray) -> Any:
        kept: list[list[Any]] = [[] for _ in range(6)]
        for _ in range(self.num_steps):
            if self.is_box:
                self.seen.add(raw)
            rows = torch.from_numpy(self.normalized(raw))
            with torch.no_grad():
                distribution, values = self.distribution(rows), self.critic(rows).flatten()
                actions = distribution.sample()
            raw, _, rewards, dones, _ = self.step((self._clipped(actions) if self.is_box else actions).numpy())
            if self.is_box:
                self.discounted = self.discounted * self.gamma * (1 - dones) + rewards
                self.earned.add(self.discounted)
                rewards = (rewards / np.sqrt(self.earned.var + 1e-8)).clip(-10, 10)
            done = torch.as_tensor(dones).float()
            step = (rows, actions, distribution.log_prob(actions), values, torch.as_tensor(rewards).float(), done)
            for field, value in zip(kept, step, strict=True):
                field.append(value)
        with torch.no_grad():
            following = self.critic(torch.from_numpy(self.normalized(raw))).flatten()
        return raw, *(torch.stack(field) for field in kept), following

    def _update(
        self, obs: Tensor, actions: Tensor, log_probs: Tensor, values: Tensor, rewards: Tensor, dones: Tensor, following: Tensor
    ) -> None:
        advantages, advantage = torch.zeros_like(values), torch.zeros_like(following)
        for t in reversed(range(len(values))):
            goes_on = 1 - dones[t]
            delta = rewards[t] + self.gamma * following * goes_on - values[t]
            advantages[t] = advantage = delta + self.gamma * self.gae_lambda * goes_on * advantage
            following = values[t]
        flat = [field.flatten(0, 1) for field in (obs, actions, log_probs, values, advantages, advantages + values)]
        size = len(flat[0]) // self.minibatches
        for _ in range(self.epochs):
            for chosen in torch.from_numpy(self.rng.permutation(len(flat[0]))).split(size):
                self._minibatch(*(field[chosen] for field in flat))

    def _minibatch(
        self, obs: Tensor, actions: Tensor, log_probs: Tensor, values: Tensor, advantages: Tensor, returns: Tensor
    ) -> None:
        distribution, found = self.distribution(obs), self.critic(obs).flatten()
        ratio = (distribution.log_prob(actions) - log_probs).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        gain = torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - self.clip, 1 + self.clip)).mean()
        near = values + (found - values).clamp(-self.clip, self.clip)
        value_loss = 0.5 * torch.maximum((found - returns) ** 2, (near - returns) ** 2).mean()
        loss = self.value_coef * value_loss - gain - self.entropy_coef * distribution.entropy().mean()
        self.adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights, self.max_grad_norm)
        self.adam.step()


class Replay:
    """A ring of transitions of all rows."""

    def __init__(self, capacity: int, inputs: int, actions: tuple[int, ...]):
        self.capacity, self.size, self.at = capacity, 0, 0
        self.obs, self.next = np.zeros((capacity, inputs), np.float32), np.zeros((capacity, inputs), np.float32)
        self.actions = np.zeros((capacity, *actions), np.float32)
        self.rewards, self.ends = np.zeros(capacity, np.float32), np.zeros(capacity, np.float32)

    def add(self, *fields: np.ndarray) -> None:
        """One transition of each row."""
        for row in range(len(fields[0])):
            kept = (self.obs, self.next, self.actions, self.rewards, self.ends)
            for ring, field in zip(kept, fields, strict=True):
                ring[self.at] = field[row]
            self.at, self.size = (self.at + 1) % self.capacity, min(self.size + 1, self.capacity)

    def sample(self, count: int, rng: np.random.Generator) -> list[Tensor]:
        """Transitions drawn uniformly."""
        chosen = rng.integers(0, self.size, count)
        fields = (self.obs, self.next, self.actions, self.rewards, self.ends)
        return [torch.from_numpy(field[chosen]) for field in fields]


class OffPolicy(CleanRL):
    """The loop of SAC and DQN."""

    capacity, starts, batch, gamma, every = 1_000_000, 5_000, 256, 0.99, 1

    def __init__(self, vec: Any, total: int, seed: int):
        super().__init__(vec, total, seed)
        self.replay = Replay(min(self.capacity, total), self.inputs, vec.action_space.shape)
        vec.action_space.seed(seed)

    def learn(self, tell: Told) -> bool:
        """See `CleanRL.learn`."""
        rows = self.rows(self.vec.reset())
        while self.steps < self.total:
            before = self.steps
            actions = self.explore(rows)
            now, last, rewards, dones, limits = self.step(actions)
            self.replay.add(rows, last, actions, rewards, dones & ~limits)
            rows = now
            for number in range(before + 1, self.steps + 1):  # as many gradient steps as with one row
                if number > self.starts and number % self.every == 0:
                    self.update(number)
            if not self.tells(tell):
                return False
        return True

    def explore(self, rows: np.ndarray) -> np.ndarray:
        """Actions for rows of observations."""
        raise NotImplementedError

    def update(self, number: int) -> None:
        """What follows step `number`."""
        raise NotImplementedError

    def drawn(self) -> np.ndarray:
        """Random actions."""
        return np.stack([self.vec.action_space.sample() for _ in range(self.vec.num_envs)])


class SAC(OffPolicy):
    """sac_continuous_action.py."""

    tau, actor_rate, critic_rate, actor_every = 0.005, 3e-4, 1e-3, 2

    def __init__(self, vec: Any, total: int, seed: int):
        super().__init__(vec, total, seed)
        space, self.size = vec.action_space, int(np.prod(vec.action_space.shape))
        self.scale = torch.from_numpy((space.high - space.low).ravel() / 2)
        self.bias = torch.from_numpy((space.high + space.low).ravel() / 2)
        self.actor = relu_network(self.inputs, (256, 256), 2 * self.size)
        self.critics = nn.ModuleList([relu_network(self.inputs + self.size, (256, 256), 1) for _ in range(2)])
        self.targets = deepcopy(self.critics)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.actor_adam = torch.optim.Adam(self.actor.parameters(), self.actor_rate)
        self.critic_adam = torch.optim.Adam(self.critics.parameters(), self.critic_rate)
        self.alpha_adam = torch.optim.Adam([self.log_alpha], self.critic_rate)

    def act(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sampled actions and their log-probabilities."""
        mean, spread = self.actor(rows).chunk(2, 1)
        normal = torch.distributions.Normal(mean, (-5 + 3.5 * (spread.tanh() + 1)).exp())
        drawn = normal.rsample()
        squashed = drawn.tanh()
        log_prob = normal.log_prob(drawn) - torch.log(self.scale * (1 - squashed**2) + 1e-6)
        return squashed * self.scale + self.bias, log_prob.sum(1)

    def best(self, rows: Tensor) -> Tensor:
        """See `CleanRL.best`."""
        return self._shaped(self.actor(rows)[:, : self.size].tanh() * self.scale + self.bias)

    def _shaped(self, actions: Tensor) -> Tensor:
        return actions.view(-1, *self.vec.action_space.shape)

    def explore(self, rows: np.ndarray) -> np.ndarray:
        """See `OffPolicy.explore`."""
        if self.steps < self.starts:
            return self.drawn()
        with torch.no_grad():
            return self._shaped(self.act(torch.from_numpy(rows))[0]).numpy()

    def update(self, number: int) -> None:
        """See `OffPolicy.update`."""
        obs, following, actions, rewards, ends = self.replay.sample(self.batch, self.rng)
        actions, alpha = actions.flatten(1), self.log_alpha.exp().item()
        with torch.no_grad():
            after, log_prob = self.act(following)
            both = torch.cat([target(torch.cat([following, after], 1)) for target in self.targets], 1)
            wanted = rewards + (1 - ends) * self.gamma * (both.min(1).values - alpha * log_prob)
        pair = torch.cat([obs, actions], 1)
        self._descend(self.critic_adam, sum(mse_loss(critic(pair).flatten(), wanted) for critic in self.critics))
        if number % self.actor_every == 0:
            for _ in range(self.actor_every):
                chosen, log_prob = self.act(obs)
                values = torch.cat([critic(torch.cat([obs, chosen], 1)) for critic in self.critics], 1).min(1).values
                self._descend(self.actor_adam, (self.log_alpha.exp().item() * log_prob - values).mean())
                with torch.no_grad():
                    _, log_prob = self.act(obs)
                self._descend(self.alpha_adam, (-self.log_alpha.exp() * (log_prob - self.size)).mean())
        with torch.no_grad():
            for target, critic in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                target.lerp_(critic, self.tau)

    def _descend(self, adam: torch.optim.Optimizer, loss: Any) -> None:
        adam.zero_grad()
        loss.backward()
        adam.step()


class DQN(OffPolicy):
    """dqn.py."""

    capacity, starts, batch, every, target_every = 10_000, 10_000, 128, 10, 500
    rate, epsilon_end, epsilon_fraction = 2.5e-4, 0.05, 0.5

    def __init__(self, vec: Any, total: int, seed: int):
        super().__init__(vec, total, seed)
        self.network = relu_network(self.inputs, (120, 84), int(vec.action_space.n))
        self.target = deepcopy(self.network)
        self.adam = torch.optim.Adam(self.network.parameters(), self.rate)

    def best(self, rows: Tensor) -> Tensor:
        """See `CleanRL.best`."""
        return self.network(rows).argmax(1)

    def explore(self, rows: np.ndarray) -> np.ndarray:
        """See `OffPolicy.explore`."""
        epsilon = max(self.epsilon_end, 1 - (1 - self.epsilon_end) * self.steps / (self.epsilon_fraction * self.total))
        with torch.no_grad():
            best = self.best(torch.from_numpy(rows)).numpy()
        return np.where(self.rng.random(len(rows)) < epsilon, self.drawn(), best)

    def update(self, number: int) -> None:
        """See `OffPolicy.update`."""
        obs, following, actions, rewards, ends = self.replay.sample(self.batch, self.rng)
        with torch.no_grad():
            wanted = rewards + self.gamma * (1 - ends) * self.target(following).max(1).values
        loss = mse_loss(self.network(obs).gather(1, actions.long().view(-1, 1)).flatten(), wanted)
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        if number % self.target_every == 0:
            self.target.load_state_dict(self.network.state_dict())


ALGORITHMS: dict[str, type[CleanRL]] = {"ppo": PPO, "sac": SAC, "dqn": DQN}


def rows_of(algorithm: str, is_box: bool) -> int:
    """How many envs the scripts use."""
    return 4 if algorithm == "ppo" and not is_box else 1
