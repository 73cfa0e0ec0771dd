"""The convolution of grids against torch's own in float64, on any device."""

import contextlib

import numpy as np
import torch
from gymnasium import spaces

from hurtle.kernels.triton.grid_conv import grid_convolution, grid_convolution_reference
from hurtle.policies.cnn import grid_body

SCALING = {
    "bools": (1.0, 0.0),
    "bytes": (1 / 255, 0.0),
    "signed": (1 / 255, 128 / 255),
    "floats": (1.0, 0.0),
    "ints": (0.5, -1.0),
}


def inputs_of(shape, filters, kind, device):
    """Observations of a kind, weight and bias."""
    generator = torch.Generator().manual_seed(sum(shape))
    whole = torch.randint(0, 256, shape, generator=generator)
    obs = {
        "bools": whole < 80,
        "bytes": whole.to(torch.uint8),
        "signed": (whole - 128).to(torch.int8),
        "floats": torch.randn(shape, generator=generator),
        "ints": whole % 5,
    }[kind]
    weight = torch.randn(filters, shape[3], 3, 3, generator=generator)
    bias = torch.randn(filters, generator=generator) + 1.0
    return obs.to(device), weight.to(device), bias.to(device)


@contextlib.contextmanager
def matmul_precision(name):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def close(found, expected, tolerance):
    scale = expected.abs().max().item() if expected.numel() else 1.0
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * scale)


def check_grid_convolution(
    shape, filters=16, kind="bools", dtype=torch.float32, device="cpu", precision="highest", tolerance=1e-5, grad_tolerance=None
):
    """Values and gradients; the ReLU's slope is taken from the values found, since some may lie as near to zero as rounding."""
    obs, weight, bias = inputs_of(shape, filters, kind, device)
    scale, shift = SCALING[kind]
    weight.requires_grad_()
    bias.requires_grad_()
    with matmul_precision(precision):
        features = grid_convolution(obs, weight, bias, scale, shift, dtype)
        samples, height, width, _ = shape
        assert features.shape == (samples, filters * (height - 2) * (width - 2))
        assert features.dtype == dtype
        exact_weight, exact_bias = weight.detach().double(), bias.detach().double()
        expected = grid_convolution_reference(obs, exact_weight, exact_bias, scale, shift, torch.float64)
        close(features.detach(), expected, tolerance)
        weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(7)).to(dtype).to(device)
        features.backward(weights)
    slopes = (weights.double() * (features > 0)).view(samples, filters, height - 2, width - 2)
    planes = (obs.double() * scale + shift).permute(0, 3, 1, 2)
    d_weight = torch.nn.grad.conv2d_weight(planes, weight.shape, slopes)
    close(weight.grad, d_weight, grad_tolerance or tolerance)
    close(bias.grad, slopes.sum((0, 2, 3)), grad_tolerance or tolerance)


def check_body(device, kind=np.uint8, shape=(10, 10, 6), samples=7, tolerance=1e-5):
    """The policies' body for grids on a device against the same in float64 on the CPU, with gradients."""
    torch.manual_seed(2)
    space = spaces.Box(0, 1 if kind == np.bool_ else 9, shape, kind)
    body, exact = grid_body(space), grid_body(space).double()
    body.convolutions[0].bias.data.normal_()
    exact.load_state_dict(body.state_dict())
    body.to(device)
    obs = torch.from_numpy(np.stack([space.sample() for _ in range(samples)]))
    found = body(obs.to(device))
    planes = exact.input(obs).double().permute(0, 3, 1, 2)
    expected = exact.linear(exact.convolutions(planes))
    close(found.detach().cpu(), expected.detach(), tolerance)
    (found**2).sum().backward()
    (expected**2).sum().backward()
    for ours, theirs in zip(body.parameters(), exact.parameters(), strict=True):
        close(ours.grad.cpu(), theirs.grad, 10 * tolerance)


def check_beyond_32_bits(device, samples=5_400_000):
    """Offsets of observations and features that int32 cannot hold; needs 20 GB."""
    obs = torch.zeros(samples, 10, 10, 4, dtype=torch.uint8, device=device)
    few, weight, bias = inputs_of((4, 10, 10, 4), 8, "bytes", device)
    obs[-4:] = few
    leaves = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    few_leaves = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    features = grid_convolution(obs, *leaves, dtype=torch.bfloat16)
    expected = grid_convolution(few, *few_leaves, dtype=torch.bfloat16)
    assert torch.equal(features[-4:], expected)
    slopes = torch.zeros_like(features)
    slopes[-4:] = 1.0
    features.backward(slopes)
    expected.backward(torch.ones_like(expected))
    for ours, theirs in zip(leaves, few_leaves, strict=True):
        close(ours.grad, theirs.grad.double(), 1e-5)
