"""The scan of advantages against the NumPy reference, on any device."""

import numpy as np
import torch

from hurtle.native.gae import gae_reference
from hurtle.native.triton.gae import gae_scan


def check_gae(steps, columns, device="cpu", seed=0):
    """Advantages and returns of random columns, with every kind of end."""
    rng = np.random.default_rng(seed)
    rewards, values, final_values = rng.normal(size=(3, steps, columns)).astype(np.float32)
    terminated, truncated = rng.random((2, steps, columns)) < 0.15
    last_values = rng.normal(size=columns).astype(np.float32)
    arrays = (rewards, values, terminated, truncated, final_values, last_values)
    tensors = [torch.from_numpy(array).to(device) for array in arrays]
    advantages, returns = (torch.full((steps, columns), torch.nan, device=device) for _ in range(2))
    gae_scan(*tensors, 0.99, 0.95, advantages, returns)
    expected = gae_reference(*arrays, 0.99, 0.95)
    np.testing.assert_allclose(advantages.cpu().numpy(), expected, rtol=2e-6, atol=1e-5)
    np.testing.assert_allclose(returns.cpu().numpy(), expected + values, rtol=2e-6, atol=1e-5)
