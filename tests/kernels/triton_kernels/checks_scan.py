"""The kernels of MinGRU, LSTM and linear layers, and every memory on a GPU, against plain torch in float64; on any device."""

import torch

from hurtle.kernels.triton.dense import dense, dense_reference
from hurtle.kernels.triton.lstm import lstm, lstm_reference
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
    hidden, last = min_gru(leaves[0], starts, leaves[1], dtype)
    expected, expected_last = min_gru_reference(exact[0], starts, exact[1], torch.float64)
    assert hidden.shape == (steps, rows, size)
    assert hidden.dtype == dtype
    torch.testing.assert_close(hidden.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(last.double(), expected_last, rtol=tolerance, atol=tolerance)
    weights = torch.randn(steps + 1, rows, size, generator=torch.Generator().manual_seed(7)).to(dtype).to(device)
    torch.autograd.backward([hidden, last], [weights[:-1], weights[-1].float()])
    torch.autograd.backward([expected, expected_last], [weights[:-1].double(), weights[-1].double()])
    for leaf, other in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=tolerance, atol=tolerance)


def relative(found, expected):
    """The difference, relative to the norm."""
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


def check_lstm(steps, rows, size, kind="some", stored=torch.float32, device="cpu", tolerance=1e-5):
    """Values and gradients, with gates stored as `stored`."""
    gates, starts, state = inputs_of(steps, rows, 2 * size, kind, device)
    cell, hidden = state.chunk(2, -1)
    weight = torch.randn(4 * size, size, generator=torch.Generator().manual_seed(1)).to(device) / size**0.5
    leaves = [part.clone().requires_grad_() for part in (gates.to(stored), hidden, cell, weight)]
    exact = [part.detach().double().requires_grad_() for part in leaves]
    found = lstm(leaves[0], starts, (leaves[1], leaves[2]), leaves[3])
    expected = lstm_reference(exact[0], starts, (exact[1], exact[2]), exact[3])
    weights = [torch.randn(part.shape, generator=torch.Generator().manual_seed(7)).to(device) for part in expected]
    torch.autograd.backward(found, [w.to(part.dtype) for w, part in zip(weights, found, strict=True)])
    torch.autograd.backward(expected, [w.double() for w in weights])
    assert [part.dtype for part in found] == [stored, torch.float32, torch.float32]
    for own, other in (*zip(found, expected, strict=True), *((a.grad, b.grad) for a, b in zip(leaves, exact, strict=True))):
        assert own.shape == other.shape
        if other.norm():
            assert relative(own, other) <= tolerance
        else:  # nothing from before an episode that starts
            assert not own.any()


def check_dense(shape, width, activation, stored=torch.float32, device="cpu", dtype=torch.float32, tolerance=1e-5):
    """Values and gradients of a linear layer."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(*shape, generator=generator)
    weight = torch.randn(width, shape[-1], generator=generator) / shape[-1] ** 0.5
    bias = torch.randn(width, generator=generator)
    parts = [part.to(dtype).float() for part in (x, weight, bias)]  # exact in it: rounding must not tip a ReLU
    parts[0] = parts[0].to(stored)
    leaves = [part.to(device).requires_grad_() for part in parts]
    exact = [part.detach().double().requires_grad_() for part in leaves]
    found, expected = dense(*leaves, activation, dtype), dense_reference(*exact, activation, torch.float64)
    weights = torch.randn(expected.shape, generator=generator).to(device)
    assert found.dtype == dtype
    assert relative(found, expected) <= tolerance
    found.backward(weights.to(dtype))
    expected.backward(weights.double())
    for own, other in zip(leaves, exact, strict=True):
        assert own.grad.dtype == own.dtype
        assert relative(own.grad, other.grad) <= tolerance


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
