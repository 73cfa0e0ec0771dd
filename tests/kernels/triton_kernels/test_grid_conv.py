"""The convolution of grids in Triton's interpreter; tests/gpu runs the same checks on a GPU."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

triton = pytest.importorskip("triton")

from checks_grid_conv import SCALING, check_body, check_grid_convolution, inputs_of  # noqa: E402

from hurtle.errors import HurtleError  # noqa: E402
from hurtle.kernels.triton.grid_conv import grid_convolution, grid_shape, supports  # noqa: E402
from hurtle.policies.cnn import ImageBody, grid_body, nature_body  # noqa: E402

SHAPES = [(1, 3, 3, 1), (1, 10, 10, 4), (3, 5, 8, 7), (2, 6, 9, 10), (2, 3, 4, 21)]


@pytest.mark.parametrize("kind", SCALING)
def test_kinds_of_observations(kind):
    check_grid_convolution((3, 5, 6, 3), kind=kind)


@pytest.mark.parametrize("kind", ["bytes", pytest.param("floats", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, kind):
    check_grid_convolution(shape, kind=kind)


@pytest.mark.parametrize("filters", [pytest.param(1, marks=pytest.mark.slow), 5, pytest.param(20, marks=pytest.mark.slow), 32])
def test_numbers_of_filters(filters):
    check_grid_convolution((2, 4, 7, 3), filters)


def test_several_blocks_for_every_program():
    check_grid_convolution((37, 8, 8, 4))


def test_widths_are_chosen_by_what_is_loaded():
    def width(channels, parts):
        return grid_shape(10, 10, channels, 16, parts, "tf32").width

    assert [width(channels, 3) for channels in (4, 6, 7, 10, 21)] == [2, 2, 2, 4, 1]
    assert width(10, 0) == 1  # float32 matrices of four outputs would not fit


@pytest.mark.parametrize("kind", ["bools", "bytes", "signed"])
def test_bfloat16_holds_bytes(kind):
    check_grid_convolution((3, 5, 6, 4), kind=kind, dtype=torch.bfloat16, tolerance=1e-2, grad_tolerance=1e-5)


def test_bfloat16_of_floats():
    check_grid_convolution((3, 5, 6, 4), kind="floats", dtype=torch.bfloat16, tolerance=2e-2)


def test_tf32_is_as_good_where_torch_may_use_it():
    check_grid_convolution((3, 5, 6, 4), kind="bytes", precision="high", tolerance=1e-4)


def test_observations_and_gradients_that_are_not_contiguous():
    obs, weight, bias = inputs_of((4, 5, 6, 3), 2, "bytes", "cpu")
    weight.requires_grad_()
    other = obs.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    found, expected = (torch.autograd.grad(grid_convolution(x, weight, bias).sum(), weight)[0] for x in (other, obs))
    assert torch.equal(found, expected)


def test_nothing_behind_the_observations_is_used():
    obs, weight, bias = inputs_of((3, 5, 7, 3), 2, "floats", "cpu")
    weight.requires_grad_()
    obs[-1] = torch.nan
    features = grid_convolution(obs[:-1], weight, bias)
    features.sum().backward()
    assert torch.isfinite(features).all()
    assert torch.isfinite(weight.grad).all()


def test_no_samples():
    obs, weight, bias = inputs_of((0, 5, 6, 3), 2, "bytes", "cpu")
    weight.requires_grad_()
    features = grid_convolution(obs, weight, bias)
    features.sum().backward()
    assert features.shape == (0, 24)
    assert (weight.grad == 0).all()


def test_without_gradients():
    obs, weight, bias = inputs_of((2, 5, 6, 3), 2, "bytes", "cpu")
    weight.requires_grad_()
    with torch.no_grad():
        assert not grid_convolution(obs, weight, bias).requires_grad


@pytest.mark.parametrize(
    ("shape", "filters", "dtype", "why"),
    [
        ((2, 2, 5, 3), 4, torch.float32, "at least 3x3"),
        ((2, 5, 5, 22), 4, torch.float32, "up to 21 channels"),
        ((2, 5, 5, 3), 33, torch.float32, "32 filters"),
        ((2, 5, 5, 3), 4, torch.float16, "gives float32 or bfloat16"),
    ],
)
def test_what_the_kernels_do_not_know_is_refused(shape, filters, dtype, why):
    with pytest.raises(HurtleError, match=why):
        grid_convolution(*inputs_of(shape, filters, "bytes", "cpu"), dtype=dtype)
    assert supports(torch.zeros(1, 10, 10, 21), 32)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.bool_, np.float32])
def test_the_body_for_grids_gives_the_same_with_the_kernel(kind, monkeypatch):
    monkeypatch.setattr(ImageBody, "_convolved", lambda self, obs: self._fused(obs, *self.scaling))
    check_body("cpu", kind, (5, 6, 3), 3)


def test_other_bodies_have_no_kernel():
    bytes_, uneven = spaces.Box(0, 255, (4, 84, 84), np.uint8), np.arange(300, dtype=np.uint8).reshape(10, 10, 3)
    assert nature_body(bytes_).scaling is None
    assert grid_body(spaces.Box(0, 1, (3, 10, 10), np.bool_)).scaling is None  # channels first
    assert grid_body(spaces.Box(0, 1, (10, 10), np.bool_)).scaling is None
    assert grid_body(spaces.Box(0, 1, (2, 5, 2), np.bool_)).scaling is None  # padded
    assert grid_body(spaces.Box(np.zeros_like(uneven), uneven, dtype=np.uint8)).scaling is None
    assert grid_body(spaces.Box(-128, 127, (10, 10, 3), np.int8)).scaling == (1 / 255, 128 / 255)
    assert grid_body(spaces.Box(0, 1, (10, 10, 3), np.bool_)).scaling == (1.0, 0.0)
