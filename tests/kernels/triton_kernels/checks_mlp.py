"""The fused MLP against the policy it stands for: what it sees, chooses and learns, on any device."""

import numpy as np
import torch
from gymnasium import spaces

from hurtle.algorithms.ppo import evaluate_actions, ppo_loss
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.buffers.rollout import Minibatch
from hurtle.kernels.triton.mlp import FusedMLP
from hurtle.kernels.uniforms import uniforms
from hurtle.native.rng import ACTION_STREAM, seed_range, stream_states
from hurtle.policies.build import PolicyConfig, build_policy
from hurtle.policies.native_plan import mlp_shape

DISCRETE, BOX = spaces.Discrete(3, start=2), spaces.Box(-1.0, 1.0, (2,), np.float32)


def make(action_space, device, inputs=5, hidden=16, activation="tanh", precision="float32", normalizes=False):
    """A policy with weights that matter, flat, and its kernels."""
    config = PolicyConfig(hidden_sizes=(hidden, hidden), activation=activation, log_std_init=-0.4)
    space = spaces.Box(-np.inf, np.inf, (inputs,), np.float32)
    policy = build_policy(config, space, action_space, normalize_observations=normalizes, seed=1).to(device)
    torch.manual_seed(0)
    for parameter in policy.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape).to(device)
    weights = torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])
    return policy, FusedMLP(mlp_shape(policy), weights, precision)


def check_acting(action_space, device="cpu", rows=70, steps=3, **options):
    """Actions, log-probs and values are those of the policy from the same uniforms."""
    policy, fused = make(action_space, device, **options)
    inputs = fused.shape.inputs
    streams = stream_states(seed_range(5, rows), ACTION_STREAM)
    on_device = torch.from_numpy(streams.view(np.int64).copy()).to(device)
    clock = torch.tensor([11], device=device)
    gaussian = fused.shape.gaussian
    bounds = (torch.tensor([2], device=device),)
    if gaussian:
        bounds = tuple(torch.tensor(bound, device=device) for bound in (BOX.low, BOX.high))
    normalizer = None
    if policy.normalizer is not None:
        policy.normalizer.update(np.random.default_rng(0).normal(2.0, 3.0, (9, 4, inputs)).astype(np.float32))
        normalizer = policy.normalizer.mean, (policy.normalizer.variance + policy.normalizer.eps).sqrt(), policy.normalizer.clip
    for t in range(steps):
        obs = torch.randn(rows, inputs).to(device)
        seen, log_probs, values = torch.empty_like(obs), torch.empty(rows, device=device), torch.empty(rows, device=device)
        shape = (rows, 2) if gaussian else (rows,)
        dtype = torch.float32 if gaussian else torch.int64
        actions, env_actions = (torch.full(shape, -9, dtype=dtype, device=device) for _ in range(2))
        fused.act(obs, on_device, clock, t, seen, actions, log_probs, env_actions, bounds, normalizer)
        fused.values(seen, values)
        expected = obs if policy.normalizer is None else policy.normalizer.normalize(obs)
        torch.testing.assert_close(seen, expected, rtol=1e-6, atol=1e-6)
        drawn = torch.from_numpy(uniforms(streams, np.full(rows, 11 + t), policy.num_uniforms)).to(device)
        with torch.no_grad():
            distribution, value, _ = policy(seen)
        torch.testing.assert_close(actions, distribution.sample(drawn), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(log_probs, distribution.log_prob(actions), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values, value, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(env_actions.cpu().numpy(), policy.head.env_actions(actions.cpu().numpy()))


def check_gradients(action_space, limit, device="cpu", total=150, count=90, clip_values=True, **options):
    """The gradients and means of a minibatch are those of `ppo_loss`, relative to their norm.

    Without a limit, they may be twice as far off as torch's own in the same precision: with random advantages, gradients are
    small sums of large numbers, and how far rounding carries is a matter of the data.
    """
    policy, fused = make(action_space, device, **options)
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    obs = normal(total, fused.shape.inputs)
    with torch.no_grad():
        distribution, values, _ = policy(obs)
        actions = distribution.sample(torch.rand(total, policy.num_uniforms, generator=generator).to(device))
        log_probs = distribution.log_prob(actions) + 0.3 * normal(total)
    values, advantages, returns = values + 0.3 * normal(total), 1.0 + normal(total), normal(total)
    order = torch.randperm(total, generator=generator)[:count].to(device)
    config = PPOConfig(clip_values=clip_values, entropy_coef=0.02)
    chosen = advantages[order]
    moments = torch.stack([chosen.mean(), 1.0 / (chosen.std() + 1e-8)])
    clip = torch.tensor([config.clip_range], device=device)
    fused.partials.fill_(torch.nan)
    found = fused.gradients(
        obs, order, actions, log_probs, values, advantages, returns, moments, clip, config.value_coef, config.entropy_coef,
        config.clip_values,
    )  # fmt: skip
    batch = Minibatch(obs[order], None, *(field[order] for field in (actions, log_probs, values, advantages, returns)))
    losses, expected = gradients_of(policy, batch, config)
    if limit is None:
        precision = options["precision"]
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16"):
            _, rounded = gradients_of(policy, batch, config)
        torch.set_float32_matmul_precision("highest")
        limit = 2.0 * float((rounded - expected).norm() / expected.norm())
    difference = float((fused.partials.sum(0) - expected).norm() / expected.norm())
    assert difference <= limit, f"{difference:.2e} > {limit:.2e}"
    torch.testing.assert_close(found, torch.stack(losses[1:]), rtol=10 * limit, atol=10 * limit)


def gradients_of(policy, batch, config):
    """The losses, and the gradients flat."""
    policy.zero_grad()
    losses = ppo_loss(*(part.float() for part in evaluate_actions(policy, batch)), batch, config.clip_range, config)
    losses.total.backward()
    return losses, torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def check_nan(action_space, device="cpu", **options):
    """One NaN weight, with the bits that a GPU gives it, makes log-probs, values and gradients NaN."""
    _, fused = make(action_space, device, **options)
    nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32, device=device).view(torch.float32)
    rows, size = 40, fused.shape.inputs
    for offset in (fused.shape.offsets[0], fused.shape.offsets[6]):
        fused.weights[offset : offset + 1] = nan
    obs, order = torch.randn(rows, size).to(device), torch.arange(rows, device=device)
    zeros, moments = torch.zeros(rows, device=device), torch.tensor([0.0, 1.0], device=device)
    seen, log_probs, values = torch.empty_like(obs), zeros.clone(), zeros.clone()
    actions, streams = torch.zeros(rows, dtype=torch.int64, device=device), torch.arange(rows, device=device)
    clock, start = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    fused.act(obs, streams, clock, 0, seen, actions, log_probs, actions.clone(), (start,))
    fused.values(seen, values)
    assert log_probs.isnan().all()
    assert values.isnan().all()
    clip = torch.tensor([0.2], device=device)
    found = fused.gradients(obs, order, actions, zeros, zeros, zeros + 1, zeros, moments, clip, 0.5, 0.0, True)
    assert found[:2].isnan().all()
    assert not fused.partials.sum(0).norm().isfinite()
