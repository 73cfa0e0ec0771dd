"""The fused policies against the policies they stand for: what they see, choose and learn, on any device."""

import numpy as np
import torch
from gymnasium import spaces

from hurtle.algorithms.a2c import a2c_loss
from hurtle.algorithms.impala_config import IMPALAConfig
from hurtle.algorithms.ppo import evaluate_actions, ppo_loss
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.buffers.rollout import Minibatch
from hurtle.kernels.triton.grid_cnn import FusedGridCNN
from hurtle.kernels.triton.loss import LossSettings, Steps, add_metrics
from hurtle.kernels.triton.mlp import FusedMLP
from hurtle.kernels.uniforms import uniforms
from hurtle.native.rng import ACTION_STREAM, seed_range, stream_states
from hurtle.policies import layers
from hurtle.policies.build import PolicyConfig, build_policy
from hurtle.policies.native_plan import grid_cnn_shape, mlp_shape

DISCRETE, BOX = spaces.Discrete(3, start=2), spaces.Box(-1.0, 1.0, (2,), np.float32)


def make(action_space, device, inputs=5, hidden=16, activation="tanh", precision="float32", normalizes=False, grid=None):
    """A policy with weights that matter, flat, and its kernels; a CNN if there is the shape of a grid."""
    config = PolicyConfig(hidden_sizes=(hidden, hidden), activation=activation, log_std_init=-0.4)
    space = spaces.Box(-np.inf, np.inf, (inputs,), np.float32)
    if grid is not None:
        config, space = PolicyConfig(policy="grid_cnn"), spaces.Box(0, 1, grid, np.uint8)
    policy = build_policy(config, space, action_space, normalize_observations=normalizes, seed=1).to(device)
    torch.manual_seed(0)
    for parameter in policy.parameters():
        parameter.data += (0.2 if grid is None else 0.05) * torch.randn(parameter.shape).to(device)
    weights = torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])
    if grid is None:
        return policy, FusedMLP(mlp_shape(policy), weights, precision)
    return policy, FusedGridCNN(grid_cnn_shape(policy), weights, 2 if device == "cpu" else 16)


def observations(policy, count, generator, device):
    """Random ones."""
    shape = (count, *policy.observation_space.shape)
    if policy.observation_space.dtype == np.uint8:
        return (torch.rand(shape, generator=generator) < 0.2).to(torch.uint8).to(device)
    return torch.randn(shape, generator=generator).to(device)


def legal_choices(policy, count, generator, device):
    """Random masks: of some rows nothing is legal."""
    masks = torch.rand((count, policy.head.num_outputs), generator=generator) < 0.6
    masks[::7] = False
    return masks.to(device)


def check_acting(action_space, device="cpu", rows=70, steps=3, masked=False, tolerance=1e-4, **options):
    """Actions, log-probs and values are those of the policy from the same uniforms."""
    policy, fused = make(action_space, device, **options)
    generator = torch.Generator().manual_seed(2)
    streams = stream_states(seed_range(5, rows), ACTION_STREAM)
    on_device = torch.from_numpy(streams.view(np.int64).copy()).to(device)
    clock = torch.tensor([11], device=device)
    gaussian = isinstance(action_space, spaces.Box)
    bounds = (torch.tensor([2], device=device),)
    if gaussian:
        bounds = tuple(torch.tensor(bound, device=device) for bound in (BOX.low, BOX.high))
    normalizer = None
    if policy.normalizer is not None:
        inputs = policy.observation_space.shape[0]
        policy.normalizer.update(np.random.default_rng(0).normal(2.0, 3.0, (9, 4, inputs)).astype(np.float32))
        normalizer = policy.normalizer.mean, (policy.normalizer.variance + policy.normalizer.eps).sqrt(), policy.normalizer.clip
    fused.refresh()
    for t in range(steps):
        obs = observations(policy, rows, generator, device)
        masks = legal_choices(policy, rows, generator, device) if masked else None
        seen, log_probs, values = torch.empty_like(obs), torch.empty(rows, device=device), torch.empty(rows, device=device)
        shape = (rows, 2) if gaussian else (rows,)
        dtype = torch.float32 if gaussian else torch.int64
        actions, env_actions = (torch.full(shape, -9, dtype=dtype, device=device) for _ in range(2))
        fused.act(obs, on_device, clock, t, seen, actions, log_probs, values, env_actions, bounds, normalizer, masks)
        again = values.clone()
        fused.values(seen, again)
        if fused.acts_with_values:
            torch.testing.assert_close(values, again)
        expected = obs if policy.normalizer is None else policy.normalizer.normalize(obs)
        torch.testing.assert_close(seen, expected, rtol=1e-6, atol=1e-6)
        drawn = torch.from_numpy(uniforms(streams, np.full(rows, 11 + t), policy.num_uniforms)).to(device)
        with torch.no_grad():
            distribution, value, _ = policy(seen, mask=masks)
        same = (
            actions == distribution.sample(drawn) if not gaussian else (actions - distribution.sample(drawn)).abs() < tolerance
        )
        assert same.float().mean() > (0.999 if tolerance <= 1e-4 else 0.95)  # rounding may tip a few
        torch.testing.assert_close(log_probs, distribution.log_prob(actions), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(again, value, rtol=tolerance, atol=tolerance)
        for own, judged in zip((log_probs, again), fused.judge(seen, actions, masks), strict=True):
            torch.testing.assert_close(judged, own, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(env_actions.cpu().numpy(), policy.head.env_actions(actions.cpu().numpy()))


def check_gradients(
    action_space,
    limit,
    device="cpu",
    total=150,
    count=90,
    clip_values=True,
    normalizes=True,
    parts=(),
    clips=True,
    **options,
):
    """The gradients and means of a minibatch are those of `ppo_loss`, or without clips of `a2c_loss`, relative to their norm.

    Without a limit, they may be twice as far off as torch's own in the same precision: with random advantages, gradients are
    small sums of large numbers, and how far rounding carries is a matter of the data. `parts`: "masks", "valid", "weights".
    """
    policy, fused = make(action_space, device, **options)
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    obs = observations(policy, total, generator, device)
    masks = legal_choices(policy, total, generator, device) if "masks" in parts else None
    with torch.no_grad():
        distribution, values, _ = policy(obs, mask=masks)
        actions = distribution.sample(torch.rand(total, policy.num_uniforms, generator=generator).to(device))
        log_probs = distribution.log_prob(actions) + 0.3 * normal(total)
    values, advantages, returns = values + 0.3 * normal(total), 1.0 + normal(total), normal(total)
    order = torch.randperm(total, generator=generator)[:count].to(device)
    valid = (torch.rand(total, generator=generator) < 0.7).to(device) if "valid" in parts else None
    weights = (0.5 + torch.rand(count, generator=generator)).to(device) if "weights" in parts else None
    config = PPOConfig(clip_values=clip_values, entropy_coef=0.02, normalize_advantages=normalizes)
    clip = torch.tensor([config.clip_range], device=device)
    if not clips:
        config, clip_values = IMPALAConfig(entropy_coef=0.02, normalize_advantages=normalizes), False
    fields = [actions, log_probs, values, advantages, returns]
    kept = torch.ones(count, dtype=torch.bool, device=device) if valid is None else valid[order]
    chosen = order[kept]
    batch = Minibatch(obs[chosen], None if masks is None else masks[chosen], *(field[chosen] for field in fields))
    batch = batch._replace(weights=None if weights is None else weights[kept])
    if valid is not None:  # whatever they contain
        log_probs[~valid] = advantages[~valid] = returns[~valid] = torch.nan
    fused.begin(
        Steps(obs, *fields, masks, valid), LossSettings(config.value_coef, config.entropy_coef, clip_values, normalizes, clips)
    )
    fused.gradients(order.flip(0)[: count // 2], clip, None if weights is None else weights[: count // 2])
    fill(fused, torch.nan)
    stats, _ = fused.gradients(order, clip, weights)
    losses, expected = gradients_of(policy, batch, config)
    tolerance = {"float32": 1e-4, "tf32": 2e-3, "bf16": 2e-2}["float32" if limit == 1e-5 else fused.precision]
    limit = 2.0 * rounding(policy, batch, config, fused.precision, expected) if limit is None else limit
    difference = float((fused.partials.sum(0) - expected).norm() / expected.norm())
    assert difference <= limit, f"{difference:.2e} > {limit:.2e}"
    torch.testing.assert_close(stats.sum(1), torch.stack(losses[1:]), rtol=tolerance, atol=tolerance)


def rounding(policy, batch, config, precision, expected):
    """The relative error of torch's own gradients in that precision."""
    takes, layers.takes_dense = layers.takes_dense, lambda x: False  # not of our kernels
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        with torch.autocast(batch.inputs.device.type, torch.bfloat16, enabled=precision == "bf16"):
            _, rounded = gradients_of(policy, batch, config)
    finally:
        torch.set_float32_matmul_precision("highest")
        layers.takes_dense = takes
    return float((rounded - expected).norm() / expected.norm())


def fill(fused, number):
    """Overwrite what a minibatch left; partial gradients of a CNN that no kernel writes stay 0."""
    is_kept = (fused.partials == 0) & isinstance(fused, FusedGridCNN)
    assert not is_kept.all()
    fused.partials.copy_(torch.where(is_kept, 0.0, number))


def gradients_of(policy, batch, config):
    """The losses, and the gradients flat."""
    policy.zero_grad()
    found = [part.float() for part in evaluate_actions(policy, batch)]
    if isinstance(config, PPOConfig):
        losses = ppo_loss(*found, batch, config.clip_range, config)
    else:
        losses = a2c_loss(*found, batch, config)
    losses.total.backward()
    return losses, torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def check_empty(device="cpu", **options):
    """A minibatch without valid steps has gradients that the optimizer skips, and does not count."""
    policy, fused = make(DISCRETE, device, **options)
    count = 40
    obs, zeros = observations(policy, count, torch.Generator(), device), torch.zeros(count, device=device)
    actions, order = zeros.long(), torch.arange(count, device=device)
    steps = Steps(obs, actions, zeros, zeros, zeros + 1, zeros, None, zeros > 0)
    fused.begin(steps, LossSettings(0.5, 0.01, False, True))
    sums, epoch_kl = torch.zeros(7, device=device), torch.zeros(2, device=device)
    for valid, counted in ((False, 0.0), (True, 1.0)):
        steps.valid.fill_(valid)
        stats, moments = fused.gradients(order, torch.full((1,), 0.2, device=device))
        norm = fused.partials.sum(0).norm()
        assert bool(norm.isfinite()) is valid
        add_metrics(stats, moments, norm, sums, epoch_kl)
        assert sums[-1] == epoch_kl[1] == counted
        assert sums.isfinite().all()
    torch.testing.assert_close(sums[:5], stats.sum(1))
    torch.testing.assert_close(epoch_kl[0], sums[3])
    torch.testing.assert_close(sums[5], norm)
    fused.begin(steps._replace(valid=None), LossSettings(0.5, 0.01, False, False))
    stats, moments = fused.gradients(order, torch.full((1,), 0.2, device=device))
    assert moments.sums is None
    before = sums.clone()
    add_metrics(stats, moments, norm, sums, epoch_kl)
    torch.testing.assert_close(sums[:5] - before[:5], stats.sum(1))
    assert sums[-1] == 2.0


def check_nan(action_space, device="cpu", **options):
    """One NaN weight, with the bits that a GPU gives it, makes log-probs, values and gradients NaN."""
    policy, fused = make(action_space, device, **options)
    nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32, device=device).view(torch.float32)
    rows = 40
    for offset in (fused.shape.offsets[0], fused.shape.offsets[6]):
        fused.weights[offset : offset + 1] = nan
    fused.refresh()
    obs, order = observations(policy, rows, torch.Generator(), device), torch.arange(rows, device=device)
    zeros = torch.zeros(rows, device=device)
    seen, log_probs, values = torch.empty_like(obs), zeros.clone(), zeros.clone()
    actions, streams = torch.zeros(rows, dtype=torch.int64, device=device), torch.arange(rows, device=device)
    clock, start = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    fused.act(obs, streams, clock, 0, seen, actions, log_probs, values, actions.clone(), (start,))
    fused.values(seen, values)
    assert log_probs.isnan().all()
    assert values.isnan().all()
    fused.begin(Steps(obs, actions, zeros, zeros, zeros + 1, zeros), LossSettings(0.5, 0.0, True, False))
    stats, _ = fused.gradients(order, torch.tensor([0.2], device=device))
    assert stats.sum(1)[:2].isnan().all()
    assert not fused.partials.sum(0).norm().isfinite()


def check_seeds(action_space, device="cpu", each=40, steps=2, count=50, masked=False, tolerance=1e-5, **options):
    """The kernels of three seeds do what three kernels of one seed do; gradients of a seed that does not go on are NaN."""
    policy, first = make(action_space, device, **options)
    generator = torch.Generator().manual_seed(4)
    rows_of_weights = torch.stack([first.weights + 0.1 * n * torch.randn(len(first.weights)).to(device) for n in range(3)])
    fused = FusedMLP(first.shape, rows_of_weights, first.precision)
    alone = [FusedMLP(first.shape, own.clone(), first.precision) for own in rows_of_weights]
    gaussian, rows = isinstance(action_space, spaces.Box), 3 * each
    streams = torch.from_numpy(stream_states(seed_range(5, rows), ACTION_STREAM).view(np.int64).copy()).to(device)
    clock, clip = torch.tensor([11], device=device), torch.tensor([0.2], device=device)
    bounds = tuple(torch.tensor(bound, device=device) for bound in (BOX.low, BOX.high)) if gaussian else (clock - 9,)
    means = None
    if options.get("normalizes"):
        means = torch.randn(3, first.shape.inputs, generator=generator).double().to(device)
    obs = torch.stack([observations(policy, rows, generator, device) for _ in range(steps)])
    masks = [legal_choices(policy, rows, generator, device) if masked else None for _ in range(steps)]
    seen, shape = torch.empty_like(obs), (steps, rows, *((2,) if gaussian else ()))
    actions = torch.zeros(shape, dtype=torch.float32 if gaussian else torch.int64, device=device)
    log_probs, values = torch.zeros(2, steps, rows, device=device)
    mine = [torch.empty_like(part) for part in (seen, actions, log_probs, values)]
    for t in range(steps):
        normalizer = None if means is None else (means.flatten(), means.flatten() ** 2 + 1, 5.0)
        into = (seen[t], actions[t], log_probs[t], values[t], actions[t].clone(), bounds)
        fused.act(obs[t], streams, clock, t, *into, normalizer, masks[t])
        for n, one in enumerate(alone):
            own = slice(n * each, (n + 1) * each)
            normalizer = None if means is None else (means[n], means[n] ** 2 + 1, 5.0)
            into = tuple(part[t, own] for part in mine)
            legal = masks[t][own] if masked else None
            one.act(obs[t, own], streams[own], clock, t, *into, into[1].clone(), bounds, normalizer, legal)
    fused.values(seen, values)
    for n, one in enumerate(alone):
        own = slice(n * each, (n + 1) * each)
        found = torch.zeros(steps * each, device=device)
        one.values(seen[:, own].reshape(steps * each, -1), found)
        mine[3][:, own] = found.view(steps, each)
    for part, expected in zip((seen, actions, log_probs, values), mine, strict=True):
        torch.testing.assert_close(part, expected, rtol=tolerance, atol=tolerance)

    advantages, returns = torch.randn(2, steps * rows, generator=generator).to(device)
    fields = (seen.flatten(0, 1), actions.flatten(0, 1), log_probs.flatten(), values.flatten(), advantages, returns)
    fields = (*fields, torch.cat(masks) if masked else None)
    settings = LossSettings(0.5, 0.01, True, True)
    drawn = torch.stack([torch.randperm(steps * each, generator=generator) for _ in range(3)]).to(device)
    places = drawn // each * rows + torch.arange(3, device=device)[:, None] * each + drawn % each
    order, goes_on = places[:, 7 : 7 + count], torch.tensor([True, False, True], device=device)
    fused.begin(Steps(*fields), settings)
    fill(fused, torch.nan)
    stats, moments = fused.gradients(order, clip, goes_on=goes_on)
    sums, epoch_kl = torch.zeros(3, 7, device=device), torch.zeros(3, 2, device=device)
    add_metrics(stats, moments, fused.partials.sum(1).norm(dim=1), sums, epoch_kl, goes_on)
    for n, one in enumerate(alone):
        one.begin(Steps(*fields), settings)
        own_stats, own_moments = one.gradients(order[n].contiguous(), clip)
        gradient, expected = fused.partials[n].sum(0), one.partials.sum(0)
        assert bool(gradient.isfinite().all()) is (n != 1)
        if n == 1:
            assert not sums[n].any()
            assert not epoch_kl[n].any()
            continue
        assert (gradient - expected).norm() <= tolerance * expected.norm()
        own_sums, own_kl = torch.zeros(7, device=device), torch.zeros(2, device=device)
        add_metrics(own_stats, own_moments, expected.norm(), own_sums, own_kl)
        torch.testing.assert_close(sums[n], own_sums, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(epoch_kl[n], own_kl, rtol=1e-4, atol=1e-5)
