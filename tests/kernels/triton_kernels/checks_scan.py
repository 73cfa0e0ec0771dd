"""MinGRU's kernels, and every memory on a GPU, against plain torch in float64; on any device."""

import torch

from hurtle.kernels.triton.scan import min_gru, min_gru_reference
from hurtle.policies.recurrent import make_memory


def inputs_of(steps, rows, size, kind, device, spread=1.0):
    """Terms, starts and state; starts are "none" (None), "some" or "all"."""
    generator = torch.Generator().manual_seed(steps + rows + size)
    terms = spread * torch.randn(steps, rows, 2 * size, generator=generator)
    starts = {"none": None, "some": torch.rand(steps, rows, generator=generator) < 0.3, "all": torch.ones(steps, rows) > 0}[
        kind
    ]
    state = torch.randn(rows, size, generator=generator)
    return terms.to(device), None if starts is None else starts.to(device), state.to(device)


def check_min_gru(
    steps, rows, size, kind="some", stored=torch.float32, dtype=torch.float32, device="cpu", spread=1.0, tolerance=1e-5
):
    """Values and gradients, with terms stored as `stored` and the result as `dtype`."""
    terms, starts, state = inputs_of(steps, rows, size, kind, device, spread)
    terms = terms.to(stored)
    leaves = terms.clone().requires_grad_(), state.clone().requires_grad_()
    exact = terms.double().requires_grad_(), state.double().requires_grad_()
    hidden = min_gru(leaves[0], starts, leaves[1], dtype)
    expected = min_gru_reference(exact[0], starts, exact[1], torch.float64)
    assert hidden.shape == (steps, rows, size)
    assert hidden.dtype == dtype
    torch.testing.assert_close(hidden.double(), expected, rtol=tolerance, atol=tolerance)
    weights = torch.randn(steps, rows, size, generator=torch.Generator().manual_seed(7)).to(dtype).to(device)
    hidden.backward(weights)
    expected.backward(weights.double())
    for leaf, other in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=tolerance, atol=tolerance)


def check_memory(name, device="cpu", steps=9, rows=5, size=16, tolerance=1e-5):
    """Sequences and steps of a memory on a device against the same on the CPU in float64, with gradients."""
    torch.manual_seed(3)
    memory = make_memory(name, size)
    for parameter in memory.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    exact = make_memory(name, size).double()
    exact.load_state_dict(memory.state_dict())
    memory.to(device)
    features, starts = torch.randn(steps, rows, size), torch.rand(steps, rows) < 0.2
    state = tuple(torch.randn(rows, size) for _ in range(memory.num_states))
    weights = torch.randn(steps, rows, size)

    def results(network, dtype, place):
        leaves = [part.to(place, dtype).requires_grad_() for part in (features, *state)]
        outputs, last = network.sequence(leaves[0], tuple(leaves[1:]), starts.to(place))
        after, after_state = network.step(leaves[0][0], tuple(leaves[1:]))
        loss = (outputs * weights.to(place, dtype)).sum() + (after**2).sum()
        leaves += list(network.parameters())
        found = [outputs, *last, after, *after_state, *torch.autograd.grad(loss, leaves)]
        return [part.detach().cpu().double() for part in found]

    for found, expected in zip(results(memory, torch.float32, device), results(exact, torch.float64, "cpu"), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * max(1.0, expected.abs().max().item()))
