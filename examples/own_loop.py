"""PPO in plain torch around Hurtle's collector: the rollouts come from compiled code, the learning is yours.

python examples/own_loop.py
"""

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad_norm_

import hurtle
from hurtle.collect import NativeCollector
from hurtle.collect.postprocess import Postprocess
from hurtle.contracts import Weights
from hurtle.policies.build import PolicyConfig

GAMMA, GAE_LAMBDA = 0.98, 0.9
NUM_ENVS, NUM_STEPS = 32, 64
EPOCHS, MINIBATCH = 8, 256


def main(total_steps: int = 200_000) -> None:
    """Train on CartPole, and print how long its episodes last."""
    torch.manual_seed(0)
    collector = NativeCollector(hurtle.make_vec("cartpole", NUM_ENVS), PolicyConfig(), seed=0)
    rollout = collector.new_rollout(NUM_STEPS)
    policy = collector.policy  # a torch module; the collector acts with a copy of its weights
    postprocess = Postprocess(policy, GAMMA, GAE_LAMBDA)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3, eps=1e-5)

    while collector.steps * NUM_ENVS < total_steps:
        collector.load_weights(Weights.of(policy))
        episodes = collector.collect(rollout)
        postprocess(rollout)  # advantages and returns
        obs, actions, log_probs, advantages, returns = (
            field.flatten(0, 1)
            for field in (rollout.inputs, rollout.actions, rollout.log_probs, rollout.advantages, rollout.returns)
        )
        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(obs)).split(MINIBATCH):
                distribution, values, _ = policy(obs[chosen])
                ratio = (distribution.log_prob(actions[chosen]) - log_probs[chosen]).exp()
                gain = advantages[chosen]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                value_loss = 0.5 * (values - returns[chosen]).square().mean()
                optimizer.zero_grad()
                (policy_loss + 0.5 * value_loss).backward()
                clip_grad_norm_(policy.parameters(), 0.5)
                optimizer.step()
        if episodes is not None and len(episodes.lengths):
            print(f"{collector.steps * NUM_ENVS:>8,} steps, mean length of episodes {episodes.lengths.mean():.1f}")
    collector.close()


if __name__ == "__main__":
    main()
