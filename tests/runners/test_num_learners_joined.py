"""N learners give what one learner with the joined batch gives, for every gear: two and three gloo processes against one."""

import os
import subprocess
import sys
from pathlib import Path

import joined_cases
import pytest
import torch

from hurtle.kernels.ranks import ALONE

TESTS = Path(__file__).parents[1]
NAMES = list(joined_cases.cases(ALONE, 2))
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
"""Of float32 weights of about 1 after 3 to 12 steps of Adam: sums over a minibatch are made in another order."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found, by size and rank; all processes work on all cases, since each takes seconds to start."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = [TESTS.parent, TESTS, TESTS / "algorithms"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "GLOO_SOCKET_IFNAME": "lo"}
    if sys.platform == "darwin":
        environment["GLOO_SOCKET_IFNAME"] = "lo0"
    command = [sys.executable, joined_cases.__file__]
    processes = [
        subprocess.Popen([*command, str(rank), str(folder)], env=environment) for rank in range(max(joined_cases.SIZES))
    ]
    assert [process.wait(300) for process in processes] == [0] * len(processes)
    return {size: [torch.load(folder / f"{size}-{rank}.pt") for rank in range(size)] for size in joined_cases.SIZES}


@pytest.mark.parametrize("size", joined_cases.SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_learn_what_one_learner_of_all_their_steps_does(found, name, size):
    first, *others = (each[name] for each in found[size])
    for other in others:  # to the last bit
        assert torch.equal(other["weights"], first["weights"])
        assert all(torch.equal(*pair) for pair in zip(other["buffers"], first["buffers"], strict=True))
    one = joined_cases.cases(ALONE, size)[name]()
    torch.testing.assert_close(first["weights"], one["weights"], **TOLERANCE)
    for buffer, expected in zip(first["buffers"], one["buffers"], strict=True):
        torch.testing.assert_close(buffer, expected, rtol=1e-12, atol=1e-12)
    if "rewards" in one:
        torch.testing.assert_close(first["rewards"], one["rewards"], rtol=1e-12, atol=1e-12)
    metrics = (one["metrics"], *(each[name]["metrics"] for each in found[size]))
    for other in metrics[1:]:
        torch.testing.assert_close(other, metrics[0], rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("gear", ["general", "native", "device"])
def test_the_target_kl_ends_updates_early(gear):
    """The case is worth something: with its target, updates end after fewer epochs."""
    for size in joined_cases.SIZES:
        limited = joined_cases.kl_stop(gear, ALONE, size)["weights"]
        unlimited = joined_cases.kl_stop(gear, ALONE, size, target_kl=None)["weights"]
        assert not torch.equal(limited, unlimited)
