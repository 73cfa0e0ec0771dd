"""The kernels of MinGRU, LSTM and linear layers in Triton's interpreter; tests/gpu runs the same checks on a GPU."""

import pytest
import torch

triton = pytest.importorskip("triton")

from checks_scan import check_dense, check_lstm, check_memory, check_min_gru, inputs_of  # noqa: E402

from hurtle.errors import HurtleError  # noqa: E402
from hurtle.kernels.triton import dense as dense_module  # noqa: E402
from hurtle.kernels.triton import lstm as lstm_module  # noqa: E402
from hurtle.kernels.triton.dense import dense  # noqa: E402
from hurtle.kernels.triton.lstm import lstm  # noqa: E402
from hurtle.kernels.triton.scan import LANES, STEPS, min_gru, min_gru_reference  # noqa: E402
from hurtle.policies import layers, recurrent  # noqa: E402


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        pytest.param(shape, kind, marks=[pytest.mark.slow] * (shape[0] >= STEPS and kind != "some"))
        for shape in [(1, 1, 1), (2, 3, 5), (STEPS, 4, 16), (2 * STEPS + 3, 3, 7)]
        for kind in ("none", "some", "all")
    ],
)
def test_values_and_gradients(shape, kind):
    check_min_gru(*shape, kind)


def test_more_lanes_than_a_program_has():
    check_min_gru(3, 3, LANES + 1)


@pytest.mark.parametrize("stored", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_half_precision(stored):
    check_min_gru(11, 3, 6, stored=stored, tolerance=1e-2)
    check_min_gru(11, 3, 6, stored=stored, dtype=torch.bfloat16, tolerance=2e-2)


def test_half_precision_is_that_of_what_is_stored_alone():
    terms, starts, state = inputs_of(30, 3, 6, "some", "cpu")
    terms = terms.bfloat16()
    torch.testing.assert_close(
        min_gru(terms, starts, state)[0], min_gru_reference(terms.float(), starts, state)[0], rtol=1e-5, atol=1e-6
    )


def test_gates_that_are_wide_open_or_shut():
    check_min_gru(6, 2, 4, spread=100.0)


def test_gradients_that_are_not_contiguous():
    terms, starts, state = inputs_of(5, 3, 4, "some", "cpu")
    terms.requires_grad_()
    found, expected = (torch.autograd.grad(f(terms, starts, state)[0].sum(), terms)[0] for f in (min_gru, min_gru_reference))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_one_step_without_gradients():
    terms, starts, state = inputs_of(1, 4, 6, "some", "cpu")
    with torch.no_grad():
        hidden, last = min_gru(terms, starts, state)
    assert not hidden.requires_grad
    torch.testing.assert_close(hidden, min_gru_reference(terms, starts, state)[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(last, hidden[-1])


def test_no_rows():
    terms, state = torch.zeros(3, 0, 8, requires_grad=True), torch.zeros(0, 4)
    hidden, _ = min_gru(terms, None, state)
    hidden.sum().backward()
    assert hidden.shape == (3, 0, 4)
    assert terms.grad.shape == terms.shape


def test_the_memory_gives_the_same_with_the_kernel(monkeypatch):
    calls = []
    monkeypatch.setattr(recurrent, "_takes_min_gru", lambda terms, state: calls.append(1) or terms.dtype == torch.float32)
    check_memory("mingru")
    assert calls


@pytest.mark.parametrize("kind", ["none", "some", "all"])
def test_the_lstm(kind):
    check_lstm(5, 3, 7, kind)


def test_the_lstm_in_half_precision():
    check_lstm(5, 3, 7, stored=torch.bfloat16, tolerance=2e-2)
    check_lstm(1, 40, 16, "none")


@pytest.mark.parametrize("activation", ["none", "tanh", "relu"])
def test_linear_layers(activation):
    check_dense((150, 70), 67, activation)
    check_dense((4, 33, 20), 3, activation)


def test_linear_layers_in_half_precision():
    check_dense((9, 20), 5, "tanh", stored=torch.bfloat16, dtype=torch.bfloat16, tolerance=1e-2)


def test_memories_and_layers_give_the_same_with_the_kernels(monkeypatch):
    calls = {"dense": 0, "lstm": 0}

    def counted(module, name):
        own = getattr(module, name)

        def function(*arguments):
            calls[name] += 1
            return own(*arguments)

        monkeypatch.setattr(module, name, function)

    def takes(x):
        return x.dtype in (torch.float32, torch.bfloat16)

    counted(dense_module, "dense")
    counted(lstm_module, "lstm")

    monkeypatch.setattr(recurrent, "takes_dense", takes)
    monkeypatch.setattr(recurrent, "takes_kernels", takes)
    check_memory("lstm", tolerance=2e-2)
    monkeypatch.setattr(layers, "takes_dense", takes)
    monkeypatch.setattr(recurrent, "_takes_min_gru", lambda terms, state: terms.dtype == torch.bfloat16)
    check_memory("mingru", tolerance=2e-2)
    made = layers.hidden_layers(6, (5, 4), "relu", True)
    x = torch.randn(9, 6)
    torch.testing.assert_close(layers.layers_output(made, x).float(), made(x), rtol=2e-2, atol=2e-2)
    made[1] = torch.nn.GELU()  # of another kind: torch's own code
    torch.testing.assert_close(layers.layers_output(made, x), made(x))
    assert calls == {"dense": 8, "lstm": 2}


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_the_unrolled_cells_are_those_of_the_layers(name, monkeypatch):
    monkeypatch.setattr(recurrent._TorchMemory, "_is_unrolled", lambda self, features: features.dtype == torch.float32)
    check_memory(name)


@pytest.mark.parametrize(
    ("terms", "starts", "state", "why"),
    [
        (torch.zeros(3, 2, 8), None, torch.zeros(2, 5), r"terms \[T, B, 2F\]"),
        (torch.zeros(0, 2, 8), None, torch.zeros(2, 4), "one step or more"),
        (torch.zeros(3, 2, 8), torch.zeros(3, 2), torch.zeros(2, 4), "starts must be bool"),
        (torch.zeros(3, 2, 8), torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 4), "starts must be bool"),
        (torch.zeros(3, 2, 8).double(), None, torch.zeros(2, 4), "float32, bfloat16 or float16"),
    ],
)
def test_what_does_not_go_together_is_refused(terms, starts, state, why):
    with pytest.raises(HurtleError, match=why):
        min_gru(terms, starts, state)


def test_accesses_outside_of_a_kernels_tensors_are_noticed():
    @triton.jit
    def reads(x, y, count: triton.language.constexpr):
        place = triton.language.arange(0, 8)
        triton.language.store(y + place, triton.language.load(x + place, mask=place < count, other=0.0))

    x = torch.ones(8)
    reads[(1,)](x[:5], torch.zeros(8), 5)
    for short, count in ((x[:5], 6), (x[3:], 8)):
        with pytest.raises(triton.runtime.errors.InterpreterError, match="outside of the kernel's tensors"):
            reads[(1,)](short, torch.zeros(8), count)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="outside of the kernel's tensors"):
        reads[(1,)](x, torch.zeros(7), 8)


def test_layers_that_do_not_go_together_are_refused():
    x, weight, bias = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4)
    with pytest.raises(HurtleError, match="one of none, tanh, relu"):
        dense(x, weight, bias, "gelu")
    with pytest.raises(HurtleError, match="do not fit"):
        dense(x, weight.t(), bias)
    with pytest.raises(HurtleError, match="does not take x of"):
        dense(x.long(), weight, bias)
    with pytest.raises(HurtleError, match=r"gates \[T, B, 4F\]"):
        lstm(torch.zeros(1, 2, 8), None, (torch.zeros(2, 3), torch.zeros(2, 3)), torch.zeros(12, 3))
    with pytest.raises(HurtleError, match="starts must be bool"):
        lstm(torch.zeros(1, 2, 12), torch.zeros(1, 2), (torch.zeros(2, 3), torch.zeros(2, 3)), torch.zeros(12, 3))
