"""Learners that train together on a GPU: NCCL inside CUDA graphs, and two processes on one GPU through gloo."""

import pytest
import torch

import hurtle
from hurtle.tracking.checkpoints import Checkpoints, load_checkpoint

pytestmark = pytest.mark.gpu
SETTINGS = {
    "gear": "device", "preset": False, "num_steps": 16, "num_epochs": 2, "shuffle": False, "hidden_sizes": (64, 64),
    "normalize_observations": True, "reward_mode": "normalize", "total_steps": 4 * 16 * 64, "eval_episodes": 2, "trackers": (),
    "curve": False, "progress": "quiet", "seed": 1,
}  # fmt: skip
"""Minibatches are whole rollouts, so that those of two learners are one learner's."""

ONE_OF_SEVERAL = """
import sys, tempfile
from pathlib import Path

import torch
from test_gpu_ranks import SETTINGS

from hurtle.kernels.ranks import ALONE, Ranks
from hurtle.runners.settings import make_settings
from hurtle.runners.trainer import Trainer
from hurtle.tracking.checkpoints import Checkpoints, load_checkpoint
from hurtle.tracking.dashboard import make_display

folder = tempfile.mkdtemp()
store = torch.distributed.FileStore(folder + "/store", 1)
torch.distributed.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
several = Ranks(0, 1, "nccl")
several.several = True  # one that exchanges with itself what it would exchange with others
found = []
for number, ranks in enumerate((several, ALONE)):
    given = SETTINGS | {"device": "cuda", "num_envs": 64, "minibatch_size": 16 * 64, "runs": f"{folder}/{number}"}
    settings = make_settings("cartpole", given)
    trainer = Trainer(settings, "cartpole", display=make_display("quiet", "", 1), ranks=ranks)
    graphs = trainer._parts.learner.graphs
    run = trainer.run()
    assert graphs.enabled and not graphs.failure, graphs.failure
    found.append(load_checkpoint(Checkpoints(run.path / "checkpoints").latest())["policy"])
for name, tensor in found[1].items():
    torch.testing.assert_close(found[0][name], tensor, rtol=1e-4, atol=1e-5, msg=name)
torch.distributed.destroy_process_group()
"""


def test_nccl_is_captured_in_the_graphs_of_rollout_and_update(run_python):
    run_python(
        f"import sys; sys.path.insert(0, 'tests/gpu')\n{ONE_OF_SEVERAL}", GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo"
    )


def test_two_learners_on_one_gpu_train_as_one_with_all_envs(tmp_path):
    runs = []
    for learners in (2, 1):
        num_envs = 64 // learners
        given = {"num_envs": num_envs, "minibatch_size": 16 * num_envs, "runs": str(tmp_path / str(learners))}
        runs.append(hurtle.train("cartpole", device="cuda:0", num_learners=learners, **SETTINGS | given))
    found, expected = (load_checkpoint(Checkpoints(run.path / "checkpoints").latest()) for run in runs)
    assert runs[0].steps == runs[1].steps
    assert len(found["ranks"]) == 1
    for name, tensor in expected["policy"].items():
        torch.testing.assert_close(found["policy"][name], tensor, rtol=1e-3, atol=1e-4, msg=name)
