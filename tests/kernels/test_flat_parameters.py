"""Flat parameters and their optimizers against torch's own: steps, clipping, what is not finite, saved moments."""

import copy

import pytest
import torch
from torch import nn

from hurtle.errors import HurtleError, UnknownNameError
from hurtle.kernels.flat_parameters import FlatParameters
from hurtle.kernels.optimizers import FlatOptimizer, Optimizers

NAMES = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}
RATE, EPS, MAX_NORM = 0.1, 1e-5, 0.5


def network(hidden=6):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def flat_optimizer(module, name="adam", weight_decay=0.0):
    optimizer = FlatOptimizer(FlatParameters(module), name, EPS, weight_decay, MAX_NORM)
    optimizer.set_learning_rate(RATE)
    return optimizer


def gradients(module, seed, scale=1.0):
    """Of every parameter, from below the optimizer's epsilon to far above; with its sign, so that L2 does not cancel them."""
    generator = torch.Generator().manual_seed(seed)
    return [scale * p.detach().sign() * 10 ** (5 * torch.rand(p.shape, generator=generator) - 5) for p in module.parameters()]


def step_torch(optimizer, module, given):
    for parameter, gradient in zip(module.parameters(), given, strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    norm = nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
    optimizer.step()
    return norm


def step_flat(optimizer, given):
    optimizer.parameters.gradients.copy_(torch.cat([gradient.flatten() for gradient in given]))
    return optimizer.step()


def assert_equal(found, expected, rtol=2e-6, atol=5e-7):
    """To a few roundings of float32 at 1, which is how far RMSprop's steps go."""
    for p, q in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q.double(), rtol=rtol, atol=atol)


def test_parameters_and_gradients_are_views_of_two_tensors():
    module = network()
    before = copy.deepcopy(module)
    module[0].bias.requires_grad_(False)
    flat = FlatParameters(module)
    assert_equal(module, before, 0, 0)
    assert flat.offsets == {"0.weight": 0, "2.weight": 30, "2.bias": 48}
    assert flat.size == len(flat.values) == len(flat.gradients) == 51
    flat.values[48:] = 7.0
    assert module[2].bias.tolist() == [7, 7, 7]
    address = flat.gradients.data_ptr()
    for times in (1, 2):
        module(torch.ones(4, 5)).sum().backward()
        assert flat.gradients[48:].tolist() == [4 * times] * 3
    flat.zero_gradients()
    assert not any(parameter.grad.any() for parameter in module.parameters() if parameter.requires_grad)
    assert module[0].weight.grad.data_ptr() == address
    assert module[0].bias.grad is None
    module.load_state_dict(before.state_dict())
    assert torch.equal(flat.values[:30], before[0].weight.flatten())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_torchs(name, weight_decay):
    module = network()
    exact = copy.deepcopy(module).double()
    optimizer = flat_optimizer(module, name, weight_decay)
    rate = float(optimizer.learning_rate)
    reference = NAMES[name](exact.parameters(), lr=rate, eps=EPS, weight_decay=weight_decay)
    for seed, scale in enumerate((10.0, 1e-3, 1.0, 1e-2, 5.0)):
        given = gradients(module, seed, scale)
        norm, expected = step_flat(optimizer, given), step_torch(reference, exact, given)
        assert float(norm) == pytest.approx(float(expected), rel=1e-6)
        assert (float(norm) > MAX_NORM) == (scale > 0.5)
        assert_equal(module, exact)
    assert float(optimizer.count) == 5


def test_partial_gradients_are_summed():
    module, other = network(), network()
    one, two = flat_optimizer(module), flat_optimizer(other)
    partials = torch.randn(4, one.parameters.size)
    two.parameters.gradients.copy_(partials.sum(0))
    one.parameters.gradients.fill_(torch.nan)  # not looked at
    assert float(one.step(partials)) == float(two.step())
    assert torch.equal(one.parameters.gradients, two.parameters.gradients)
    assert_equal(module, other, 0, 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_changes_nothing(name, bad):
    module, other = network(), network()
    optimizer, spared = flat_optimizer(module, name, 0.1), flat_optimizer(other, name, 0.1)
    for seed in range(3):
        given = gradients(module, seed)
        step_flat(optimizer, given)
        step_flat(spared, given)
        given[1][2] = bad
        assert not step_flat(optimizer, given).isfinite()
    assert float(optimizer.count) == 3
    assert torch.equal(optimizer.first, spared.first)
    assert torch.equal(optimizer.second, spared.second)
    assert_equal(module, other, 0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_moments_move_to_torch_and_back(name):
    module, other, third = network(), network(), network()
    flat, torchs = flat_optimizer(module, name), Optimizers(name, other, RATE, EPS)
    third_flat = flat_optimizer(third, name)
    addresses = [tensor.data_ptr() for tensor in (third_flat.first, third_flat.second, third_flat.count)]
    for seed in range(3):
        step_flat(flat, gradients(module, seed))
    other.load_state_dict(module.state_dict())
    torchs.load_state_dict(copy.deepcopy(flat.state_dict()))
    for seed in range(3, 6):
        given = gradients(module, seed)
        step_flat(flat, given)
        step_torch(torchs.parts[0], other, given)
    assert_equal(other, module)
    third.load_state_dict(other.state_dict())
    third_flat.load_state_dict(torchs.state_dict())
    assert float(third_flat.count) == 6
    given = gradients(module, 7)
    step_flat(flat, given)
    step_flat(third_flat, given)
    assert_equal(third, module)
    assert addresses == [tensor.data_ptr() for tensor in (third_flat.first, third_flat.second, third_flat.count)]


@pytest.mark.parametrize("name", NAMES)
def test_the_saved_format_is_torchs(name):
    module, other = network(), network()
    flat, torchs = flat_optimizer(module, name), Optimizers(name, other, RATE, EPS)
    for steps in (0, 1):
        if steps:
            given = gradients(module, 0)
            step_flat(flat, given)
            step_torch(torchs.parts[0], other, given)
        saved, expected = flat.state_dict(), torchs.state_dict()
        assert saved.keys() == expected.keys()
        (part,), (expected_part,) = saved["parts"], expected["parts"]
        assert part["state"].keys() == expected_part["state"].keys()
        for n, state in part["state"].items():
            assert state.keys() == expected_part["state"][n].keys()
            for key, value in state.items():
                torch.testing.assert_close(value, expected_part["state"][n][key])
        group, expected_group = part["param_groups"][0], expected_part["param_groups"][0]
        assert group.pop("lr") == pytest.approx(expected_group["lr"])
        assert group.items() <= expected_group.items()


def test_saved_moments_are_copies():
    module = network()
    optimizer, given = flat_optimizer(module), gradients(module, 0)
    step_flat(optimizer, given)
    saved = optimizer.state_dict()
    step_flat(optimizer, gradients(module, 1))
    optimizer.load_state_dict(saved)
    assert float(optimizer.count) == 1
    first = torch.cat([gradient.flatten() for gradient in given])
    torch.testing.assert_close(optimizer.first, 0.1 * first * min(1, MAX_NORM / float(first.norm())), rtol=1e-5, atol=1e-9)


def test_parameters_that_torch_never_stepped_have_no_moments():
    torchs = Optimizers("adam", module := network(), RATE, EPS)
    torchs.step(module[2](torch.ones(1, 6)).sum(), MAX_NORM)
    optimizer = flat_optimizer(network())
    optimizer.load_state_dict(torchs.state_dict())
    assert float(optimizer.count) == 1
    assert not optimizer.first[:36].any()
    assert optimizer.first[36:].all()


def test_errors_that_teach():
    with pytest.raises(HurtleError, match="use adam, adamw, rmsprop"):
        flat_optimizer(network(), "muon")
    with pytest.raises(UnknownNameError, match="Did you mean adamw"):
        flat_optimizer(network(), "adamww")
    with pytest.raises(HurtleError, match="no parameters"):
        FlatParameters(network().requires_grad_(False))
    with pytest.raises(HurtleError, match="float64 on cpu"):
        FlatParameters(network().double())
    saved = flat_optimizer(network(), "adamw").state_dict()
    with pytest.raises(HurtleError, match="optimizer='adamw'"):
        flat_optimizer(network()).load_state_dict(saved)
    for module, other in (
        (network(), network(hidden=7)),
        (network(), nn.Linear(5, 6)),
        (nn.Linear(5, 6), network()),
    ):
        optimizer = flat_optimizer(module)
        step_flat(optimizer, gradients(module, 0))
        with pytest.raises(HurtleError, match="built differently"):
            flat_optimizer(other).load_state_dict(optimizer.state_dict())


def test_parameters_that_were_replaced_or_frozen_are_noticed_and_gradients_put_back():
    layer = nn.Linear(3, 2)
    flat = FlatParameters(layer)
    layer.zero_grad(set_to_none=True)
    flat.check()
    layer(torch.ones(1, 3)).sum().backward()
    assert flat.gradients.abs().sum() > 0
    layer.bias.requires_grad_(False)
    with pytest.raises(HurtleError, match="replaced or frozen"):
        flat.check()
    layer.bias.requires_grad_(True)
    flat.check()
    layer.double().float()
    with pytest.raises(HurtleError, match="replaced or frozen"):
        flat.check()


def test_parameters_that_were_replaced_are_taken_over_into_the_same_memory():
    module = network()
    flat = FlatParameters(module, has_gradients=False)
    address = flat.values.data_ptr()
    module[2].bias.data = torch.ones(3)  # another tensor
    module[0] = nn.Linear(5, 6)  # another layer
    expected = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    flat.refresh()
    assert flat.values.data_ptr() == address == module[0].weight.data_ptr()
    assert torch.equal(flat.values, expected)
    flat.values.zero_()
    assert not any(parameter.any() for parameter in module.parameters())
    module[0].bias.requires_grad_(False)
    with pytest.raises(HurtleError, match="frozen"):
        flat.refresh()
