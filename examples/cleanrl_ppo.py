"""PPO in one file, in the manner of CleanRL, on any Gymnasium vector env with discrete actions.

python examples/cleanrl_ppo.py                        # Hurtle's native CartPole
python examples/cleanrl_ppo.py --env CartPole-v1      # Gymnasium's CartPole in Hurtle's vector env
python examples/cleanrl_ppo.py --library gymnasium --env CartPole-v1

Only the line that makes `envs` differs; see `make_envs`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import gymnasium
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from torch import nn
from torch.distributions import Categorical

import hurtle


@dataclass(frozen=True)
class Args:
    """Settings; each is an option on the command line."""

    env: str = "cartpole"
    """what to train on"""
    library: Literal["hurtle", "gymnasium"] = "hurtle"
    """whose vector env"""
    seed: int = 1
    """of networks, actions, minibatches and envs"""
    total_steps: int = 100_000
    """env steps in all"""
    num_envs: int = 8
    """envs side by side"""
    num_steps: int = 64
    """steps of each env per rollout"""
    num_epochs: int = 8
    """passes over a rollout"""
    minibatch_size: int = 128
    """samples per gradient step"""
    learning_rate: float = 1e-3
    """at the start; falls to 0"""
    gamma: float = 0.98
    """discount"""
    gae_lambda: float = 0.9
    """bias against variance of the advantages"""
    clip_range: float = 0.2
    """how far the policy may move per rollout"""
    entropy_coef: float = 0.001
    """weight of the entropy bonus"""
    value_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are scaled down to it"""


def make_envs(args: Args) -> VectorEnv:
    """The one line that differs between the libraries."""
    if args.library == "gymnasium":
        return gymnasium.make_vec(
            args.env, num_envs=args.num_envs, vectorization_mode="sync", wrappers=[RecordEpisodeStatistics]
        )
    return hurtle.make_vec(args.env, num_envs=args.num_envs)


def layer(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    """A linear layer with orthogonal weights and no bias at first."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """Actor and critic, two small networks."""

    def __init__(self, envs: VectorEnv):
        super().__init__()
        inputs = int(np.prod(envs.single_observation_space.shape))
        self.actor, self.critic = (
            nn.Sequential(nn.Flatten(), layer(inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, outputs, gain))
            for outputs, gain in ((int(envs.single_action_space.n), 0.01), (1, 1.0))
        )

    def get_value(self, x: torch.Tensor) -> torch.Tensor:
        """V(x)."""
        return self.critic(x)

    def get_action_and_value(
        self, x: torch.Tensor, action: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The actions (sampled, unless given), their log-probabilities, the entropies, V(x)."""
        distribution = Categorical(logits=self.actor(x))
        if action is None:
            action = distribution.sample()
        return action, distribution.log_prob(action), distribution.entropy(), self.critic(x)


def train(envs: VectorEnv, args: Args, agent: nn.Module | None = None) -> list[float]:
    """PPO on `envs`; returns the returns of all episodes in the order in which they ended."""
    torch.manual_seed(args.seed)
    agent = Agent(envs) if agent is None else agent
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    next_step_resets = envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP

    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros((*shape, *envs.single_observation_space.shape))
    actions = torch.zeros(shape, dtype=torch.int64)
    log_probs, rewards, dones, values = (torch.zeros(shape) for _ in range(4))
    trained_on = torch.ones(shape, dtype=torch.bool)

    returns: list[float] = []
    now = torch.as_tensor(envs.reset(seed=args.seed)[0], dtype=torch.float32)
    done = torch.zeros(args.num_envs)  # the step before ended an episode
    steps_per_update = args.num_steps * args.num_envs
    num_updates, began = args.total_steps // steps_per_update, time.perf_counter()
    for update in range(num_updates):
        if update and update % 10 == 0:
            print(progress(update * steps_per_update, returns, began), flush=True)
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update / num_updates)
        for t in range(args.num_steps):
            if next_step_resets:  # the step after an end only resets: its action is ignored, its reward means nothing
                trained_on[t] = done == 0
            obs[t] = now  # a copy: a vector env may use its arrays again
            with torch.no_grad():
                actions[t], log_probs[t], _, value = agent.get_action_and_value(now)
            values[t] = value.flatten()
            next_obs, reward, terminated, truncated, infos = envs.step(actions[t].numpy())
            rewards[t] = torch.as_tensor(reward)
            cut = truncated & ~terminated
            if cut.any():  # time ran out, the task went on: the value of the last observation stands for the rest
                last = next_obs[cut] if next_step_resets else np.stack(infos["final_obs"][cut])
                with torch.no_grad():
                    rest = agent.get_value(torch.as_tensor(last, dtype=torch.float32)).flatten()
                rewards[t, torch.as_tensor(cut)] += args.gamma * rest
            if "episode" in infos:
                returns += infos["episode"]["r"][infos["_episode"]].tolist()
            now = torch.as_tensor(next_obs, dtype=torch.float32)
            done = dones[t] = torch.as_tensor(terminated | truncated, dtype=torch.float32)

        with torch.no_grad():
            next_value = agent.get_value(now).flatten()
        advantages, advantage = torch.zeros(shape), torch.zeros(args.num_envs)
        for t in reversed(range(args.num_steps)):
            goes_on = 1 - dones[t]
            delta = rewards[t] + args.gamma * next_value * goes_on - values[t]
            advantages[t] = advantage = delta + args.gamma * args.gae_lambda * goes_on * advantage
            next_value = values[t]

        samples = trained_on.flatten().nonzero().flatten()
        flat_obs, targets = obs.flatten(0, 1), (advantages + values).flatten()
        for _ in range(args.num_epochs):
            for batch in samples[torch.randperm(len(samples))].split(args.minibatch_size):
                _, log_prob, entropy, value = agent.get_action_and_value(flat_obs[batch], actions.flatten()[batch])
                ratio = (log_prob - log_probs.flatten()[batch]).exp()
                gain = advantages.flatten()[batch]
                gain = (gain - gain.mean()) / (gain.std(correction=0) + 1e-8)
                clipped = ratio.clamp(1 - args.clip_range, 1 + args.clip_range)
                policy_loss = -torch.minimum(gain * ratio, gain * clipped).mean()
                value_loss = 0.5 * (value.flatten() - targets[batch]).square().mean()
                loss = policy_loss + args.value_coef * value_loss - args.entropy_coef * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
    print(progress(num_updates * steps_per_update, returns, began), flush=True)
    return returns


def progress(steps: int, returns: list[float], began: float) -> str:
    """A line about the training so far, which began at that time."""
    result = f"return {np.mean(returns[-50:]):7.1f}" if returns else "no episode has ended"
    return f"{steps:>9,} steps   {result}   {steps / (time.perf_counter() - began):,.0f} steps/s"


def main() -> None:
    """Train with the settings of the command line."""
    args = tyro.cli(Args)
    torch.set_num_threads(1)  # networks this small run faster on one
    envs = make_envs(args)
    actions = envs.single_action_space
    if not isinstance(actions, gymnasium.spaces.Discrete):
        envs.close()
        raise SystemExit(f"cleanrl_ppo.py is for Discrete actions, and those of {args.env} are {type(actions).__name__}.")
    train(envs, args)
    envs.close()


if __name__ == "__main__":
    main()
