"""The losses in Triton against `ppo_loss` and `a2c_loss` with autograd, on any device: for the interpreter and the GPU."""

import itertools

import torch

from hurtle.algorithms.a2c import a2c_loss
from hurtle.algorithms.impala_config import IMPALAConfig
from hurtle.algorithms.ppo import ppo_loss
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.buffers.rollout import Minibatch
from hurtle.kernels.triton.loss import LossSettings, loss_gradients

NEW = ("log_probs", "entropies", "values")
OLD = ("old_log_probs", "old_values", "advantages", "returns")
OPTIONS = tuple(itertools.product((False, True), repeat=4))
"""Weights, absent steps, clipped values, normalized advantages."""


def columns(size, seed=0):
    """Ratios and values' changes on both sides of a clip range of 0.2, advantages far from mean 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(size, generator=generator)

    old_log_probs, old_values = normal() - 1, normal()
    return {
        "log_probs": old_log_probs + 0.3 * normal(),
        "entropies": normal().abs(),
        "values": old_values + 0.3 * normal(),
        "old_log_probs": old_log_probs,
        "old_values": old_values,
        "advantages": 5 + 2 * normal(),
        "returns": old_values + normal(),
        "weights": 0.2 + normal().abs(),
        "valid": torch.rand(size, generator=generator) < 0.7,
    }


def expected(steps, config, clip_range):
    """In float64: gradients [3, B], zero where a step is not valid, and metrics [5]."""
    valid = steps.get("valid")
    valid = torch.ones(len(steps["values"]), dtype=torch.bool) if valid is None else valid
    new = [steps[name].double().requires_grad_() for name in NEW]
    old_log_probs, old_values, advantages, returns = (steps[name].double()[valid] for name in OLD)
    weights = None if steps.get("weights") is None else steps["weights"].double()[valid]
    batch = Minibatch(None, None, None, old_log_probs, old_values, advantages, returns, weights)
    new_of_valid = [tensor[valid] for tensor in new]
    if isinstance(config, PPOConfig):
        losses = ppo_loss(*new_of_valid, batch, torch.tensor([clip_range]).double(), config)
    else:
        losses = a2c_loss(*new_of_valid, batch, config)
    return torch.stack(torch.autograd.grad(losses.total, new)), torch.stack(losses[1:])


def found(steps, config, clip_range, device):
    """The same of the kernels."""
    new = [steps[name].to(device, copy=True).requires_grad_() for name in NEW]  # as they come from a policy
    old = [steps[name].to(device) for name in OLD]
    optional = {name: steps[name].to(device) for name in ("weights", "valid") if steps.get(name) is not None}
    clips = isinstance(config, PPOConfig)
    clip_values = clips and config.clip_values
    gradients = loss_gradients(
        *new,
        *old,
        torch.tensor([clip_range], device=device),
        LossSettings(config.value_coef, config.entropy_coef, clip_values, config.normalize_advantages, clips),
        **optional,
    )
    torch.autograd.backward(new, gradients[:3])
    return torch.stack([tensor.grad for tensor in new]).cpu(), gradients.metrics.cpu()


def assert_same(steps, config, clip_range, device):
    (gradients, metrics), (wanted, wanted_metrics) = (
        found(steps, config, clip_range, device),
        expected(steps, config, clip_range),
    )
    assert gradients.dtype == metrics.dtype == torch.float32
    for name, got, want in zip((*NEW, "metrics"), (*gradients, metrics), (*wanted, wanted_metrics), strict=True):
        nearly_zero = 1e-6 * float(want.abs().max())  # what is left of numbers that cancel
        torch.testing.assert_close(
            got.double(), want, rtol=1e-5, atol=nearly_zero, msg=lambda text, name=name: f"{name}: {text}"
        )


def check_options(device, has_weights, has_absent, clip_values, normalize, size=300):
    steps = columns(size)
    if not has_weights:
        del steps["weights"]
    if not has_absent:
        del steps["valid"]
    config = PPOConfig(clip_values=clip_values, normalize_advantages=normalize, value_coef=0.7, entropy_coef=0.03)
    ratios = (steps["log_probs"] - steps["old_log_probs"]).exp()
    assert ((ratios - 1).abs() > 0.2).float().mean() > 0.2
    assert ((ratios - 1).abs() < 0.2).float().mean() > 0.2
    assert_same(steps, config, 0.2, device)


def check_without_clipping(device, has_absent, normalize, size=300):
    """The loss of A2C and IMPALA."""
    steps = columns(size)
    del steps["weights"]
    if not has_absent:
        del steps["valid"]
    config = IMPALAConfig(normalize_advantages=normalize, value_coef=0.7, entropy_coef=0.03)
    assert_same(steps, config, 0.0, device)


def check_ties(device):
    """Where the arguments of min or max are equal, torch gives each half of the gradient."""
    zero, steps = torch.zeros(4), columns(4)
    del steps["weights"], steps["valid"]
    config = PPOConfig(normalize_advantages=False)
    steps |= {"log_probs": zero, "old_log_probs": zero, "advantages": torch.tensor([1.0, -1.0, 0.0, 2.0])}
    steps |= {
        "old_values": zero,
        "values": torch.tensor([0.0, 0.25, 0.75, -0.75]),  # in the range, on its edge, outside
        "returns": torch.tensor([1.0, 1.0, 0.5, -0.5]),  # those outside are as far from it as what they are clipped to
    }
    assert_same(steps, config, 0.25, device)
    gradients, _ = found(steps, config, 0.25, device)
    assert gradients[0].tolist() == [-0.25, 0.25, 0.0, -0.5]
    assert gradients[2].tolist() == [-0.125, -0.09375, 0.015625, -0.015625]
    assert_same(steps, config, 0.0, device)  # a ratio on both edges of its range


def check_few_valid_steps(device):
    """None: nothing is learned. One: its advantage stays as it is."""
    config, steps = PPOConfig(), columns(300)
    for name in (*NEW, *OLD, "weights"):
        steps[name][:] = torch.nan  # what is not valid may hold anything
    steps["valid"][:] = False
    gradients, metrics = found(steps, config, 0.2, device)
    assert not gradients.any()
    assert not metrics.any()
    for name, column in columns(300).items():
        steps[name][270] = column[270]
    steps["valid"][270] = True
    assert_same(steps, config, 0.2, device)
    assert found(steps, config, 0.2, device)[0].abs().sum(0).nonzero().tolist() == [[270]]
    del steps["valid"]
    assert_same({name: column[270:271] for name, column in steps.items()}, config, 0.2, device)  # a minibatch of one


def check_equal_advantages(device):
    """They have no deviation: what is left of them after normalization is 0."""
    steps = columns(300)
    steps["advantages"][:] = 0.1
    gradients, _ = found(steps, PPOConfig(), 0.2, device)
    assert not gradients[0].any()


def check_large_mean(device):
    """A mean far beyond the deviation costs no digits but those that float32 has not."""
    steps = columns(300)
    steps["advantages"] = 3000 + torch.randint(-3, 4, (300,), generator=torch.Generator().manual_seed(1)).float()
    assert_same(steps, PPOConfig(), 0.2, device)


def check_nan_is_seen(device):
    """In the metrics and in the gradients."""
    for name, metric, gradient in (("log_probs", 0, 0), ("advantages", 0, 0), ("values", 1, 2), ("returns", 1, 2)):
        steps = columns(300)
        steps["valid"][7] = True
        steps[name][7] = torch.nan
        gradients, metrics = found(steps, PPOConfig(), 0.2, device)
        assert gradients[gradient, 7].isnan(), name
        assert metrics[metric].isnan(), name
