"""The optimizers in Triton's interpreter: steps, partial gradients, clipping, what is not finite."""

import itertools

import checks_optimizer as checks
import pytest
import torch

from hurtle.errors import HurtleError
from hurtle.kernels.triton import optimizer

FAST = [("adam", 0.0, False), ("adam", 0.1, True), ("adamw", 0.1, False), ("rmsprop", 0.1, False)]


@pytest.mark.parametrize(
    ("name", "weight_decay", "in_parts"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in FAST))
        for case in itertools.product(checks.NAMES, [0.0, 0.1], [False, True])
    ],
)
def test_steps_are_those_of_torch(name, weight_decay, in_parts):
    checks.check_steps("cpu", name, weight_decay, in_parts)


@pytest.mark.parametrize("in_parts", [False, True])
def test_more_parameters_than_the_sums_programs_take_at_once(in_parts, monkeypatch):
    monkeypatch.setattr(optimizer, "MOST_SUMS", 2)
    checks.check_steps("cpu", "adam", 0.0, in_parts, inputs=25)


def test_late_steps():
    checks.check_late_steps("cpu")


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(
    ("name", "in_parts"),
    [
        ("adam", True),
        ("rmsprop", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("adam", False), ("rmsprop", True)]),
        *(pytest.param("adamw", in_parts, marks=pytest.mark.slow) for in_parts in (False, True)),
    ],
)
def test_what_is_not_finite_changes_nothing(name, in_parts):
    checks.check_not_finite("cpu", name, in_parts)


def test_rows_with_gaps():
    checks.check_rows_with_gaps("cpu")


def test_partial_gradients_of_another_size_are_refused():
    fused, _ = checks.pair("cpu", "adam")
    size = fused.parameters.size
    with pytest.raises(HurtleError, match=rf"\[P, {size}\]"):
        fused.step(torch.zeros(3, size + 1))
    with pytest.raises(HurtleError, match="contiguous rows"):
        fused.step(torch.zeros(size, 3).T)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_rows_of_several_optimizers(monkeypatch):
    monkeypatch.setattr(optimizer, "ROW_BLOCK", 256)
    monkeypatch.setattr(optimizer, "MOST_ROW_SUMS", 2)
    checks.check_rows_of_several("cpu")
