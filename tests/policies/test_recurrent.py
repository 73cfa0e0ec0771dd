"""Memories: a sequence equals its single steps, even if episodes start inside it."""

import pytest
import torch

from hurtle.errors import UnknownNameError
from hurtle.policies.recurrent import GRU, LSTM, MEMORIES, MinGRU, make_memory, zeroed

T, B, F = 13, 4, 6


def starts_of(kind):
    starts = torch.zeros(T, B, dtype=torch.bool)
    if kind == "first":
        starts[0] = True
    elif kind == "inside":
        starts[3, 1] = starts[4, 1] = starts[7, 0] = starts[7, 2] = starts[T - 1, 3] = True
    elif kind == "all":
        starts[:] = True
    return starts


def stepped(memory, features, state, starts):
    outputs = []
    for t in range(len(features)):
        output, state = memory.step(features[t], zeroed(state, starts[t]))
        outputs.append(output)
    return torch.stack(outputs), state


@pytest.mark.parametrize("kind", ["none", "first", "inside", "all"])
@pytest.mark.parametrize("name", MEMORIES)
def test_a_sequence_is_its_steps(name, kind):
    memory, starts = make_memory(name, F), starts_of(kind)
    features = torch.randn(T, B, F, requires_grad=True)
    state = tuple(torch.randn(B, F, requires_grad=True) for _ in memory.initial_state(B))
    outputs, last = memory.sequence(features, state, starts)
    by_steps, last_by_steps = stepped(memory, features, state, starts)
    torch.testing.assert_close(outputs, by_steps, atol=1e-5, rtol=0)
    torch.testing.assert_close(last, last_by_steps, atol=1e-5, rtol=0)
    assert outputs.shape == (T, B, F)
    leaves = [features, *state, *memory.parameters()]
    weights = torch.randn(T, B, F)
    grads, grads_by_steps = (
        torch.autograd.grad((weights * out).sum(), leaves, materialize_grads=True) for out in (outputs, by_steps)
    )
    for grad, expected in zip(grads, grads_by_steps, strict=True):
        torch.testing.assert_close(grad, expected, atol=1e-4, rtol=1e-4)
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("name", MEMORIES)
def test_gradients_are_those_of_finite_differences(name):
    memory, starts = make_memory(name, 3).double(), torch.zeros(5, 2, dtype=torch.bool)
    starts[2, 1] = True
    features = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    state = tuple(torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in memory.initial_state(2))
    assert torch.autograd.gradcheck(lambda x, *s: memory.sequence(x, s, starts)[0], (features, *state))


@pytest.mark.parametrize("name", MEMORIES)
def test_nothing_is_remembered_across_a_start(name):
    memory, starts = make_memory(name, F), torch.zeros(T, B, dtype=torch.bool)
    starts[5, 0] = True
    one, other = torch.randn(2, T, B, F)
    other[5:] = one[5:]
    state = memory.initial_state(B)
    first, second = (memory.sequence(x, state, starts)[0] for x in (one, other))
    assert torch.equal(first[5:, 0], second[5:, 0])
    assert not torch.allclose(first[5:, 1:], second[5:, 1:])


def random_memory(name, dtype):
    memory = make_memory(name, F).to(dtype)
    for parameter in memory.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return memory


@pytest.mark.parametrize("kind", ["none", "first", "inside", "all"])
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_unrolled_steps_are_those_of_torchs_layers(name, kind):
    memory, starts = random_memory(name, torch.float64), starts_of(kind)
    features = torch.randn(T, B, F, dtype=torch.float64, requires_grad=True)
    state = tuple(torch.randn(B, F, dtype=torch.float64, requires_grad=True) for _ in range(memory.num_states))
    weights = torch.randn(T, B, F, dtype=torch.float64)
    leaves = [features, *state, *memory.parameters()]

    def results():
        outputs, last = memory.sequence(features, state, starts)
        output, after = memory.step(features[0], state)
        loss = (weights * outputs).sum() + sum((part**2).sum() for part in (*last, output, *after))
        return [outputs, *last, output, *after, *torch.autograd.grad(loss, leaves, materialize_grads=True)]

    expected = results()
    memory.capturable = True
    memory.cell.forward = None  # not called
    for ours, theirs in zip(results(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_unrolled_steps_need_no_look_at_the_data(name):
    memory = make_memory(name, F).to("meta")
    features, starts = torch.zeros(T, B, F, device="meta"), torch.zeros(T, B, dtype=torch.bool, device="meta")
    with pytest.raises((NotImplementedError, RuntimeError)):
        memory.sequence(features, memory.initial_state(B, "meta"), starts)
    memory.capturable = True
    outputs, last = memory.sequence(features, memory.initial_state(B, "meta"), starts)
    assert outputs.shape == (T, B, F)
    assert [tuple(part.shape) for part in last] == [(B, F)] * memory.num_states


def test_long_stretches_go_to_torchs_layer_in_one_call(monkeypatch):
    memory, lengths = LSTM(F), []
    forward = memory.cell.forward
    monkeypatch.setattr(memory.cell, "forward", lambda x, s: lengths.append(len(x)) or forward(x, s))
    memory.sequence(torch.randn(T, B, F), memory.initial_state(B), starts_of("none"))
    memory.sequence(torch.randn(T, B, F), memory.initial_state(B), starts_of("inside"))
    assert lengths == [13, 3, 1, 3, 5, 1]


def test_the_formulas():
    features, state = torch.randn(B, F), (torch.randn(B, F), torch.randn(B, F))
    lstm = LSTM(F)
    i, f, g, o = (features @ lstm.cell.weight_ih_l0.T + state[0] @ lstm.cell.weight_hh_l0.T).chunk(4, 1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    output, (hidden, new_cell) = lstm.step(features, state)
    torch.testing.assert_close((output, hidden, new_cell), (o.sigmoid() * cell.tanh(), o.sigmoid() * cell.tanh(), cell))
    minimal = MinGRU(F)
    gate, candidate = (features @ minimal.gate_and_candidate.weight.T).chunk(2, 1)
    output, (hidden,) = minimal.step(features, state[:1])
    torch.testing.assert_close(hidden, (1 - gate.sigmoid()) * state[0] + gate.sigmoid() * candidate)
    torch.testing.assert_close(output, torch.tanh(hidden @ minimal.output.weight.T))


def test_weights_are_orthogonal_and_biases_zero():
    for memory in (LSTM(F), GRU(F), MinGRU(F)):
        for name, parameter in memory.named_parameters():
            if "bias" in name:
                assert (parameter == 0).all()
            else:
                parts = parameter.split(F) if isinstance(memory, MinGRU) else [parameter]
                for part in parts:
                    torch.testing.assert_close(torch.linalg.svdvals(part), torch.ones(F))


def test_the_initial_state_is_zero():
    for name, count in (("lstm", 2), ("gru", 1), ("mingru", 1)):
        state = make_memory(name, F).initial_state(3)
        assert [tuple(part.shape) for part in state] == [(3, F)] * count
        assert all((part == 0).all() for part in state)
    assert make_memory("none", F) is None
    with pytest.raises(UnknownNameError, match=r"No memory 'lst'\. Did you mean lstm"):
        make_memory("lst", F)
