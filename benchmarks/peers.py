"""The peers of `collect.py` and `train.py`: SB3, rlox, and PPO as one plain torch script, with 64 × 64 tanh networks.

Peers are imported when they are asked for, and torch computes with one thread, which is the fastest for networks this small.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from side_by_side import Timed, repeated
from torch import nn
from torch.distributions import Categorical, Normal

EnvMaker = Callable[[], gymnasium.Env]
HIDDEN = 64
GAMMA, GAE_LAMBDA = 0.99, 0.95
HERE = Path(__file__).resolve().parent
TRIES, PATIENCE = 3, 120
"""How often and for how many seconds a process of rlox is waited for."""


@dataclass(frozen=True)
class Sizes:
    """How much is collected, and how it is learned from."""

    num_envs: int
    num_steps: int = 128
    minibatch_size: int = 256
    num_epochs: int = 4
    agents: int = 1
    """Of each env; each is a row."""

    @property
    def batch(self) -> int:
        """Steps of one rollout."""
        return self.num_envs * self.agents * self.num_steps


def timed(train: Callable[[int], Any], steps: int) -> tuple[int, float]:
    """Train for so many steps."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    train(steps)
    return steps, time.perf_counter() - began


# Stable-Baselines3 ----------------------------------------------------------------------------------------------------


def sb3_model(vec: Any, sizes: Sizes, network: str = "mlp") -> Any:
    """SB3's PPO on an SB3 vector; "grid_cnn" has our layers, "lstm" is sb3-contrib's RecurrentPPO."""
    words = {"n_steps": sizes.num_steps, "batch_size": sizes.minibatch_size, "n_epochs": sizes.num_epochs, "device": "cpu"}
    if network == "lstm":
        from sb3_contrib import RecurrentPPO

        lstm = {"lstm_hidden_size": HIDDEN, "shared_lstm": True, "enable_critic_lstm": False}
        sides = {"pi": [HIDDEN], "vf": [HIDDEN]}
        return RecurrentPPO("MlpLstmPolicy", vec, seed=0, policy_kwargs={"net_arch": sides, **lstm}, **words)
    from stable_baselines3 import PPO

    policy = {"net_arch": {"pi": [HIDDEN, HIDDEN], "vf": [HIDDEN, HIDDEN]}}
    if network == "grid_cnn":
        policy = {"net_arch": [], "features_extractor_class": grid_features()}
    return PPO("MlpPolicy", vec, seed=0, policy_kwargs=policy, **words)


def grid_features() -> type:
    """The convolution and the linear layer of our GridCNN, as SB3 takes them."""
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class GridFeatures(BaseFeaturesExtractor):
        def __init__(self, space: gymnasium.spaces.Box):
            super().__init__(space, features_dim=128)
            height, width, channels = space.shape
            self.layers = nn.Sequential(
                nn.Conv2d(channels, 16, 3),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(16 * (height - 2) * (width - 2), 128),
                nn.ReLU(),
            )

        def forward(self, planes: torch.Tensor) -> torch.Tensor:
            return self.layers(planes.permute(0, 3, 1, 2))

    return GridFeatures


def sb3_vec(maker: EnvMaker, num_envs: int, stack: contextlib.ExitStack, processes: bool = False) -> Any:
    """SB3's own vector, in this process (its fastest for light envs) or in others."""
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    vec = (SubprocVecEnv if processes else DummyVecEnv)([maker] * num_envs)
    stack.callback(vec.close)
    return vec


def sb3_collecting(maker: EnvMaker, sizes: Sizes, seconds: float, stack: contextlib.ExitStack) -> Timed:
    torch.set_num_threads(1)
    model = sb3_model(sb3_vec(maker, sizes.num_envs, stack), sizes)
    _, callback = model._setup_learn(sizes.batch)
    callback.on_training_start({}, {})

    def collect() -> None:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, sizes.num_steps)

    collect()
    return repeated(collect, sizes.batch, seconds)


def sb3_training(vec: Any, sizes: Sizes, updates: int, network: str = "mlp") -> Timed:
    model = sb3_model(vec, sizes, network)
    timed(model.learn, sizes.batch)
    return lambda: timed(model.learn, updates * sizes.batch)


# rlox -----------------------------------------------------------------------------------------------------------------


def rlox_collecting(sizes: Sizes, seconds: float) -> Timed:
    """What its PPO collects with: envs in Rust, the policy in torch."""
    from rlox.collectors import RolloutCollector
    from rlox.policies import DiscretePolicy

    torch.set_num_threads(1)
    policy = DiscretePolicy(obs_dim=4, n_actions=2, hidden=HIDDEN)
    collector = RolloutCollector("CartPole-v1", sizes.num_envs, gamma=GAMMA, gae_lambda=GAE_LAMBDA)
    collector.collect(policy, n_steps=sizes.num_steps)
    return repeated(lambda: collector.collect(policy, n_steps=sizes.num_steps), sizes.batch, seconds)


def candle_collecting(sizes: Sizes, seconds: float) -> Timed:
    """What its HybridPPO collects with: envs and policy in Rust."""
    import rlox  # noqa: F401 (who lacks it shall hear so now)

    return lambda: in_own_process("candle_turn", sizes, seconds)


def candle_turn(sizes: Sizes, seconds: float) -> tuple[int, float]:
    """Its thread works ahead, so the first rollout is left out: then, what is received is what was collected in that time."""
    import rlox

    words = {"n_envs": sizes.num_envs, "n_steps": sizes.num_steps, "hidden": HIDDEN, "gamma": GAMMA, "gae_lambda": GAE_LAMBDA}
    collector = rlox.CandleCollector(env_id="CartPole-v1", obs_dim=4, n_actions=2, **words)
    collector.recv()
    return repeated(collector.recv, sizes.batch, seconds)()


def rlox_training(sizes: Sizes, updates: int) -> Timed:
    """CartPole with its PPO: envs in Rust, all else in torch."""
    from rlox.algorithms.ppo import PPO

    algorithm = PPO("CartPole-v1", n_envs=sizes.num_envs, seed=0, **_rlox_words(sizes))
    timed(algorithm.train, sizes.batch)
    return lambda: timed(algorithm.train, updates * sizes.batch)


def hybrid_training(sizes: Sizes, updates: int) -> Timed:
    """CartPole with its HybridPPO: collecting in Rust, learning in torch."""
    import rlox  # noqa: F401 (who lacks it shall hear so now)

    return lambda: in_own_process("hybrid_turn", sizes, updates)


def hybrid_turn(sizes: Sizes, updates: int) -> tuple[int, float]:
    """A second `train` never returns, so each has its own; the first one warms up."""
    from rlox.algorithms.hybrid_ppo import HybridPPO

    def train(steps: int) -> tuple[int, float]:
        return timed(HybridPPO("CartPole-v1", n_envs=sizes.num_envs, seed=0, **_rlox_words(sizes)).train, steps)

    train(sizes.batch)
    return train(updates * sizes.batch)


def in_own_process(turn: str, *arguments: Any) -> tuple[int, float]:
    """A turn with rlox's compiled collector, which waits for ever if it is stopped while its thread is two rollouts ahead."""
    call = f"{turn}({', '.join(map(repr, arguments))})"
    code = f"import os; from peers import *; print(*{call}, flush=True); os._exit(0)"
    for _ in range(TRIES):
        try:
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=HERE, stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE
            )
        except subprocess.TimeoutExpired:
            print(f"{call} hangs; another try", flush=True)
            continue
        steps, seconds = done.stdout.split()[-2:]
        return int(steps), float(seconds)
    raise RuntimeError(f"{call} did not end in {TRIES} tries of {PATIENCE} s each.")


def _rlox_words(sizes: Sizes) -> dict[str, int]:
    return {"n_steps": sizes.num_steps, "batch_size": sizes.minibatch_size, "n_epochs": sizes.num_epochs}


# PPO as one plain torch script ----------------------------------------------------------------------------------------


class PlainPPO:
    """PPO as people write it in one file: Gymnasium's vector in this process, torch step by step, nothing compiled.

    Args:
        makers: One for each env; observations are flattened, actions are Discrete or a Box.
        sizes: Of rollouts and minibatches.
    """

    def __init__(self, makers: list[EnvMaker], sizes: Sizes):
        self.vec, self.sizes = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP), sizes
        space = self.vec.single_action_space
        self.discrete = isinstance(space, gymnasium.spaces.Discrete)
        inputs = int(np.prod(self.vec.single_observation_space.shape))
        outputs = int(space.n) if self.discrete else int(np.prod(space.shape))
        self.actor, self.critic = _mlp(inputs, outputs, 0.01), _mlp(inputs, 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(outputs))
        self.weights = [*self.actor.parameters(), *self.critic.parameters(), *([] if self.discrete else [self.log_std])]
        self.optimizer = torch.optim.Adam(self.weights, lr=2.5e-4, eps=1e-5)
        lead = (sizes.num_steps, sizes.num_envs)
        self.obs, self.actions = torch.zeros(*lead, inputs), torch.zeros(lead if self.discrete else (*lead, outputs))
        self.log_probs, self.rewards, self.dones, self.values = (torch.zeros(lead) for _ in range(4))
        self.advantages = torch.zeros(lead)
        self.next_obs = self._seen(self.vec.reset(seed=0)[0])

    def train(self, steps: int) -> None:
        """Collect and learn until so many steps are done."""
        for _ in range(steps // self.sizes.batch):
            self.collect()
            self.update()

    @torch.no_grad()
    def collect(self) -> None:
        """Fill the rollout, and its advantages by GAE; an episode that is cut off counts as ended."""
        for t in range(self.sizes.num_steps):
            self.obs[t] = self.next_obs
            distribution = self._distribution(self.next_obs)
            action = distribution.sample()
            self.actions[t], self.log_probs[t] = action, self._sum(distribution.log_prob(action))
            self.values[t] = self.critic(self.next_obs)[:, 0]
            obs, rewards, terminated, truncated, _ = self.vec.step(self._for_env(action))
            self.rewards[t], self.dones[t] = torch.as_tensor(rewards), torch.as_tensor(terminated | truncated)
            self.next_obs = self._seen(obs)
        next_value, advantage = self.critic(self.next_obs)[:, 0], torch.zeros(self.sizes.num_envs)
        for t in reversed(range(self.sizes.num_steps)):
            goes_on = 1.0 - self.dones[t]
            delta = self.rewards[t] + GAMMA * goes_on * next_value - self.values[t]
            advantage = delta + GAMMA * GAE_LAMBDA * goes_on * advantage
            self.advantages[t], next_value = advantage, self.values[t]

    def update(self) -> None:
        """The clipped objectives of policy and value over shuffled minibatches."""
        sizes, returns = self.sizes, self.advantages + self.values
        fields = (self.obs, self.actions, self.log_probs, self.values, self.advantages, returns)
        flat = [field.flatten(0, 1) for field in fields]
        for _ in range(sizes.num_epochs):
            for chosen in torch.randperm(sizes.batch).split(sizes.minibatch_size):
                obs, actions, old_log_probs, old_values, advantages, targets = (field[chosen] for field in flat)
                distribution, values = self._distribution(obs), self.critic(obs)[:, 0]
                ratio = (self._sum(distribution.log_prob(actions)) - old_log_probs).exp()
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                policy_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
                near = old_values + (values - old_values).clamp(-0.2, 0.2)
                value_loss = 0.5 * torch.max((values - targets) ** 2, (near - targets) ** 2).mean()
                loss = policy_loss + 0.5 * value_loss - 0.01 * self._sum(distribution.entropy()).mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.weights, 0.5)
                self.optimizer.step()

    def _seen(self, obs: Any) -> torch.Tensor:
        return torch.as_tensor(obs, dtype=torch.float32).flatten(1)

    def _distribution(self, obs: torch.Tensor) -> Categorical | Normal:
        outputs = self.actor(obs)
        return Categorical(logits=outputs) if self.discrete else Normal(outputs, self.log_std.exp().expand_as(outputs))

    def _sum(self, parts: torch.Tensor) -> torch.Tensor:
        return parts if self.discrete else parts.sum(-1)

    def _for_env(self, action: torch.Tensor) -> np.ndarray:
        if self.discrete:
            return action.numpy()
        space = self.vec.single_action_space
        return np.clip(action.numpy(), space.low, space.high)


def plain_collecting(maker: EnvMaker, sizes: Sizes, seconds: float, stack: contextlib.ExitStack) -> Timed:
    torch.set_num_threads(1)
    script = PlainPPO([maker] * sizes.num_envs, sizes)
    stack.callback(script.vec.close)
    script.collect()
    return repeated(script.collect, sizes.batch, seconds)


def plain_training(maker: EnvMaker, sizes: Sizes, updates: int, stack: contextlib.ExitStack) -> Timed:
    script = PlainPPO([maker] * sizes.num_envs, sizes)
    stack.callback(script.vec.close)
    timed(script.train, sizes.batch)
    return lambda: timed(script.train, updates * sizes.batch)


def _mlp(inputs: int, outputs: int, last_gain: float) -> nn.Sequential:
    widths, gains = (inputs, HIDDEN, HIDDEN, outputs), (2**0.5, 2**0.5, last_gain)
    layers: list[nn.Module] = []
    for k, gain in enumerate(gains):
        linear = nn.Linear(widths[k], widths[k + 1])
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])
