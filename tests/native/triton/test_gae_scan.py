"""The scan of advantages in Triton's interpreter; tests/gpu runs the same checks on a GPU."""

import pytest

pytest.importorskip("triton")

from checks_gae import check_gae


@pytest.mark.parametrize(("steps", "columns"), [(1, 1), (5, 3), (32, 64), (33, 70), (70, 5)])
def test_advantages_and_returns(steps, columns):
    check_gae(steps, columns)
