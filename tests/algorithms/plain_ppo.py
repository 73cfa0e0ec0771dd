"""An independent, plain float64 implementation of PPO and A2C to compare ours with: it imports nothing from `hurtle`.

The network has one hidden tanh layer, logits for two actions and a value; gradients come from torch's autograd.
"""

import numpy as np
import torch
from torch import nn


class Plain(nn.Module):
    """The network as a user would write it."""

    num_features = 6

    def __init__(self, seed=0, size=3, actions=3):
        super().__init__()
        self.hidden = nn.Linear(size, self.num_features)
        self.actor = nn.Linear(self.num_features, actions)
        self.critic = nn.Linear(self.num_features, 1)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = 0.7 * torch.randn(parameter.shape, generator=generator)

    def encode(self, obs):
        return torch.tanh(self.hidden(obs))

    def decode(self, features):
        return torch.distributions.Categorical(logits=self.actor(features)), self.critic(features)


def double(module):
    """The parameters of a `Plain` in float64, by name."""
    return {name: parameter.detach().double().clone().requires_grad_() for name, parameter in module.named_parameters()}


def forward(p, obs, mask=None):
    """Log-probabilities [B, actions] and values [B]."""
    features = torch.tanh(obs @ p["hidden.weight"].T + p["hidden.bias"])
    logits = features @ p["actor.weight"].T + p["actor.bias"]
    if mask is not None:
        logits = torch.where(mask, logits, -torch.inf)
    values = (features @ p["critic.weight"].T + p["critic.bias"])[:, 0]
    return logits - torch.logsumexp(logits, -1, keepdim=True), values


def advantages(rewards, values, terminated, truncated, final_values, last_values, gamma, gae_lambda, valid):
    """GAE, from its definition as a sum of discounted TD errors. [T, N]"""
    steps, rows = rewards.shape
    found = np.zeros((steps, rows))
    for n in range(rows):
        real = [t for t in range(steps) if valid[t, n]]
        deltas, ends = [], []
        for k, t in enumerate(real):
            if terminated[t, n]:
                after = 0.0
            elif truncated[t, n]:
                after = final_values[t, n]
            elif k + 1 < len(real):
                after = values[real[k + 1], n]
            else:
                after = last_values[n]
            deltas.append(rewards[t, n] + gamma * after - values[t, n])
            ends.append(terminated[t, n] or truncated[t, n])
        for k, t in enumerate(real):
            weight = 1.0
            for j in range(k, len(real)):
                found[t, n] += weight * deltas[j]
                if ends[j]:
                    break
                weight *= gamma * gae_lambda
    return found


def ppo_losses(log_probs, entropies, values, batch, clip_range, config):
    """(total, policy_loss, value_loss, entropy, approx_kl, clip_fraction) by loops over steps, in NumPy's float64."""
    old, old_values, adv, returns = (np.asarray(batch[k], np.float64) for k in ("log_probs", "values", "advantages", "returns"))
    if config["normalize_advantages"] and len(adv) > 1:
        adv = (adv - adv.mean()) / (adv.std(ddof=1) + 1e-8)
    weights = np.ones(len(adv)) if batch.get("weights") is None else np.asarray(batch["weights"], np.float64)
    policy = value = kl = clipped = 0.0
    for i in range(len(adv)):
        ratio = np.exp(log_probs[i] - old[i])
        near = min(max(ratio, 1 - clip_range), 1 + clip_range)
        policy -= min(ratio * adv[i] * weights[i], near * adv[i] * weights[i])
        error = (values[i] - returns[i]) ** 2
        if config["clip_values"]:
            moved = min(max(values[i] - old_values[i], -clip_range), clip_range)
            error = max(error, (old_values[i] + moved - returns[i]) ** 2)
        value += 0.5 * error
        kl += (ratio - 1) - np.log(ratio)
        clipped += abs(ratio - 1) > clip_range
    size, entropy = len(adv), np.mean(entropies)
    policy, value, kl, clipped = policy / size, value / size, kl / size, clipped / size
    total = policy + config["value_coef"] * value - config["entropy_coef"] * entropy
    return total, policy, value, entropy, kl, clipped


def ppo_gradients(p, batch, clip_range, config):
    """Gradients of the loss of a minibatch of NumPy arrays, by autograd in float64."""
    t = {k: torch.as_tensor(v) if v is None or v.dtype != np.float32 else torch.as_tensor(v).double() for k, v in batch.items()}
    log_all, values = forward(p, t["obs"])
    log_probs = log_all[torch.arange(len(t["actions"])), t["actions"]]
    adv = t["advantages"]
    if config["normalize_advantages"]:
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    ratio = torch.exp(log_probs - t["log_probs"])
    surrogate = torch.minimum(ratio * adv, torch.clip(ratio, 1 - clip_range, 1 + clip_range) * adv)
    errors = (values - t["returns"]) ** 2
    if config["clip_values"]:
        near = t["values"] + torch.clip(values - t["values"], -clip_range, clip_range)
        errors = torch.maximum(errors, (near - t["returns"]) ** 2)
    entropy = -(log_all.exp() * log_all).sum(-1)
    loss = -surrogate.mean() + config["value_coef"] * 0.5 * errors.mean() - config["entropy_coef"] * entropy.mean()
    return dict(zip(p, torch.autograd.grad(loss, list(p.values())), strict=True))


def clip_norm(gradients, bound):
    """Gradients scaled down to a global norm of `bound`, and the norm before."""
    norm = torch.sqrt(sum((g**2).sum() for g in gradients.values()))
    scale = min(1.0, bound / (float(norm) + 1e-6))
    return {k: g * scale for k, g in gradients.items()}, float(norm)


class Adam:
    """Adam, from Kingma and Ba's paper."""

    def __init__(self, eps):
        self.eps, self.count, self.m, self.v = eps, 0, {}, {}

    def step(self, p, gradients, learning_rate):
        self.count += 1
        for name, g in gradients.items():
            m = self.m[name] = 0.9 * self.m.get(name, 0.0) + 0.1 * g
            v = self.v[name] = 0.999 * self.v.get(name, 0.0) + 0.001 * g**2
            m, v = m / (1 - 0.9**self.count), v / (1 - 0.999**self.count)
            p[name].data -= learning_rate * m / (torch.sqrt(v) + self.eps)
