"""The layers that observations go through first."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from hurtle.policies.layers import Numbers


def test_bytes_are_scaled_by_the_bounds_of_their_space():
    obs = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    torch.testing.assert_close(Numbers(spaces.Box(0, 255, (3,), np.uint8))(obs), torch.tensor([[0.0, 0.2, 1.0]]))
    signed = Numbers(spaces.Box(-2, 2, (3,), np.int8))(torch.tensor([[-2, 0, 1]], dtype=torch.int8))
    torch.testing.assert_close(signed, torch.tensor([[0.0, 0.5, 0.75]]))
    shifted = Numbers(spaces.Box(1, 2, (2,), np.uint8))(torch.tensor([[1, 2]], dtype=torch.uint8))
    torch.testing.assert_close(shifted, torch.tensor([[0.0, 1.0]]))


@pytest.mark.parametrize(
    ("space", "dtype"),
    [
        (spaces.Box(0, 1, (3,), np.uint8), torch.uint8),
        (spaces.MultiBinary(3), torch.int8),
        (spaces.Box(0, 1, (3,), bool), torch.bool),
    ],
)
def test_bytes_that_stay_what_they_are_go_straight_to_half_precision(space, dtype):
    layer, obs = Numbers(space), torch.tensor([[0, 1, 1]]).to(dtype)
    assert layer(obs).dtype == torch.float32
    assert layer(obs).tolist() == [[0.0, 1.0, 1.0]]
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(obs).dtype == torch.bfloat16
        assert layer(obs).tolist() == [[0.0, 1.0, 1.0]]
        assert layer(obs.float() + 1e-3).dtype == torch.float32  # inexact values are left to the layers
    with torch.autocast("cpu", torch.float16):
        assert layer(obs).dtype == torch.float32
