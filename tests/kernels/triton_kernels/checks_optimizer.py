"""The optimizers in Triton against `FlatOptimizer` in torch, on any device: for the interpreter's tests and the GPU's."""

import copy

import torch
from torch import nn

from hurtle.kernels.flat_parameters import FlatParameters, FlatRows
from hurtle.kernels.optimizers import FlatOptimizer

NAMES = ("adam", "adamw", "rmsprop")


def pair(device, name, weight_decay=0.0, inputs=20):
    """The same network of about 700 parameters in the kernels' hands, and in torch's on the CPU."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(inputs, 30), nn.Linear(30, 2))
    optimizers = [
        FlatOptimizer(FlatParameters(module), name, weight_decay=weight_decay)
        for module in (copy.deepcopy(plain).to(device), plain)
    ]
    for optimizer in optimizers:
        optimizer.set_learning_rate(0.1)
    fused, plain = optimizers
    fused.fused, plain.fused = True, False
    return fused, plain


def step(fused, plain, partials, in_parts):
    """Of both, whose gradient is the sum of the partial ones; returns the norm."""
    for optimizer in (fused, plain):
        optimizer.parameters.gradients.copy_(partials.double().sum(0))
    if in_parts:
        fused.parameters.gradients.fill_(torch.nan)
    norm, expected = fused.step(partials.to(fused.learning_rate.device) if in_parts else None), plain.step()
    torch.testing.assert_close(norm.cpu(), expected, rtol=2e-6, atol=0, equal_nan=True)
    return norm


def assert_same(fused, plain):
    """Weights to a few roundings of float32 at 1, which is how far RMSprop's steps go."""
    for name in ("first", "second", "count"):
        torch.testing.assert_close(getattr(fused, name).cpu(), getattr(plain, name), rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(fused.parameters.values.cpu(), plain.parameters.values, rtol=2e-6, atol=5e-7)


def partial_gradients(values, seed, scale=1.0, parts=37):
    """Of sizes from below the optimizers' epsilon on; with the weights' signs, so that nothing cancels but in the moments."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (4 * torch.rand(len(values), generator=generator) - 5)
    return scale * sizes * values.sign() * torch.rand(parts, len(values), generator=generator)


def check_steps(device, name, weight_decay, in_parts, inputs=20):
    """Gradients that are clipped and that are not."""
    fused, plain = pair(device, name, weight_decay, inputs)
    norms = []
    for seed, scale in enumerate((1.0, 1e-3, 0.1)):
        partials = partial_gradients(plain.parameters.values, seed, scale)
        norms.append(float(step(fused, plain, partials, in_parts)))
        torch.testing.assert_close(fused.parameters.gradients.cpu(), partials.sum(0), rtol=2e-6, atol=1e-12)
        assert_same(fused, plain)
    assert max(norms) > 0.5 > min(norms)
    assert float(fused.count) == 3


def check_late_steps(device):
    """The moments' corrections after many steps, from a saved state on."""
    fused, plain = pair(device, "adam")
    step(fused, plain, partial_gradients(plain.parameters.values, 9), in_parts=False)
    for n, count in enumerate((7, 900, 60_000)):
        saved = plain.state_dict()
        for state in saved["parts"][0]["state"].values():
            state["step"].fill_(count)
        for optimizer in (fused, plain):
            optimizer.load_state_dict(saved)
        step(fused, plain, partial_gradients(plain.parameters.values, n), in_parts=False)
        assert_same(fused, plain)
        assert float(fused.count) == count + 1


def check_not_finite(device, name, in_parts):
    """Nothing changes, not a bit, and the next step is as if it had not been."""
    fused, plain = pair(device, name, 0.1)
    values, size = plain.parameters.values, plain.parameters.size
    for seed, bad in enumerate((torch.nan, torch.inf)):
        step(fused, plain, partial_gradients(values, seed), in_parts)
        before = [tensor.clone() for tensor in (fused.parameters.values, fused.first, fused.second, fused.count)]
        partials = partial_gradients(values, seed)
        partials[5, size - 1] = bad
        assert not step(fused, plain, partials, in_parts).isfinite()
        after = (fused.parameters.values, fused.first, fused.second, fused.count)
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    step(fused, plain, partial_gradients(values, 3), in_parts)
    assert_same(fused, plain)
    assert float(fused.count) == 3


def check_rows_with_gaps(device):
    """Partial gradients may be the first columns of a wider tensor."""
    fused, plain = pair(device, "adam")
    size = plain.parameters.size
    wide = torch.full((3, size + 5), torch.nan, device=device)
    wide[:, :size] = partial_gradients(plain.parameters.values, 0, parts=3).to(device)
    step(fused, plain, wide[:, :size], in_parts=True)
    assert_same(fused, plain)


def check_rows_of_several(device):
    """Each row is clipped and checked on its own: as three optimizers, of which one gets a gradient that is not finite."""
    pairs = [pair(device, "adam") for _ in range(3)]
    flats = [FlatParameters(copy.deepcopy(plain.parameters.module).to(device), padded=True) for _, plain in pairs]
    rows = FlatOptimizer(FlatRows(flats), max_grad_norm=0.5)
    rows.fused = True
    rows.set_learning_rate(0.1)
    for step_number in range(3):
        seeds = [(plain.parameters.values, step_number + 7 * n, 10.0**-n) for n, (_, plain) in enumerate(pairs)]
        gradients = [partial_gradients(*seed).sum(0) for seed in seeds]
        if step_number == 1:
            gradients[1][5] = torch.nan
        rows.parameters.gradients.zero_()
        for n, ((_, plain), gradient) in enumerate(zip(pairs, gradients, strict=True)):
            rows.parameters.gradients[n, : len(gradient)] = gradient
            plain.parameters.gradients.copy_(gradient)
        if step_number == 2:  # partial gradients of each row
            whole = rows.parameters.gradients.clone()
            rows.parameters.gradients.fill_(torch.nan)
            norms = rows.step(torch.stack([0.25 * whole, 0.75 * whole], 1))
        else:
            norms = rows.step()
        expected = torch.stack([plain.step() for _, plain in pairs])
        torch.testing.assert_close(norms.cpu(), expected, rtol=2e-6, atol=0, equal_nan=True)
    for n, (_, plain) in enumerate(pairs):
        size = plain.parameters.size
        for name in ("first", "second"):
            found = getattr(rows, name)[n, :size].cpu()
            torch.testing.assert_close(found, getattr(plain, name), rtol=2e-5, atol=1e-9)
        torch.testing.assert_close(rows.parameters.values[n, :size].cpu(), plain.parameters.values, rtol=2e-6, atol=5e-7)
        assert not rows.parameters.values[n, size:].any()
    assert rows.count.tolist() == [3.0, 2.0, 3.0]
