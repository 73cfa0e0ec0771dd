"""The losses in Triton's interpreter: gradients and metrics against `ppo_loss` and `a2c_loss`; ties, absent steps, NaN."""

import checks_loss as checks
import pytest
import torch

from hurtle.errors import HurtleError
from hurtle.kernels.triton import loss


@pytest.mark.parametrize("options", checks.OPTIONS)
def test_gradients_and_metrics_are_those_of_autograd(options):
    checks.check_options("cpu", *options)


def test_more_steps_than_the_sums_programs_take_at_once(monkeypatch):
    monkeypatch.setattr(loss, "BLOCK", 32)
    monkeypatch.setattr(loss, "MOST_SUMS", 3)
    checks.check_options("cpu", True, True, True, True)


@pytest.mark.parametrize("has_absent", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_loss_without_clipping(has_absent, normalize):
    checks.check_without_clipping("cpu", has_absent, normalize)


def test_ties():
    checks.check_ties("cpu")


def test_few_valid_steps():
    checks.check_few_valid_steps("cpu")


def test_equal_advantages():
    checks.check_equal_advantages("cpu")


def test_a_large_mean():
    checks.check_large_mean("cpu")


def test_nan_is_seen():
    checks.check_nan_is_seen("cpu")


def test_columns_that_do_not_go_together_are_named():
    steps = [torch.zeros(8) for _ in range(7)]
    settings = loss.LossSettings(0.5, 0.0, True, True)
    with pytest.raises(HurtleError, match=r"shape \(8,\); one has \(7,\)"):
        loss.loss_gradients(*steps, torch.ones(1), settings, weights=torch.zeros(7))
    with pytest.raises(HurtleError, match="contiguous"):
        loss.loss_gradients(torch.zeros(16)[::2], *steps[1:], torch.ones(1), settings)
    with pytest.raises(HurtleError, match="at least one step"):
        loss.loss_gradients(*(column[:0] for column in steps), torch.ones(1), settings)
