"""Actors and a learner on a GPU: streams of their own, actors on the CPU, and off-policy learning fed by them."""

import pytest
import torch
from slow_envs import Simulator

import hurtle
from hurtle.tracking.checkpoints import load_checkpoint

pytestmark = pytest.mark.gpu
HOW = {"progress": "quiet", "trackers": (), "eval_episodes": 2, "preset": False, "device": "cuda", "runner": "async"}
SMALL = {"num_envs": 8, "num_steps": 16, "total_steps": 1_024, "minibatch_size": 64, "hidden_sizes": (32, 32)}


def weights(run):
    saved = load_checkpoint(max((run.path / "checkpoints").glob("step-*.pt")))["policy"]
    return torch.cat([part.double().flatten().cpu() for part in saved.values()])


@pytest.mark.parametrize("devices", [(), ("cpu",), ("cuda:0", "cpu")], ids=str)
@pytest.mark.parametrize("lag", ["0", "1", "free"])
def test_runs_end_and_resume(lag, devices, tmp_path):
    how = {**HOW, **SMALL, "lag": lag, "num_actors": 2, "actor_devices": devices, "backend": "serial", "runs": tmp_path}
    run = hurtle.train(Simulator, **how)
    assert run.steps >= 1_024
    again = hurtle.train(resume=run.path, total_steps=2_048, progress="quiet")
    assert weights(again).isfinite().all()


def test_lag_1_repeats_with_any_number_of_actors(tmp_path):
    """As far as torch's kernels do: rows act in batches of another size."""
    how = {**HOW, **SMALL, "lag": "1", "backend": "serial", "total_steps": 512, "runs": tmp_path}
    one, two = (weights(hurtle.train("CartPole-v1", **how, num_actors=actors)) for actors in (1, 2))
    torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-3)


def test_actors_on_the_cpu_collect_what_actors_on_the_gpu_do(tmp_path):
    how = {**HOW, **SMALL, "lag": "1", "backend": "serial", "total_steps": 512, "num_actors": 2, "runs": tmp_path}
    there, here = (weights(hurtle.train("CartPole-v1", **how, actor_devices=names)) for names in ((), ("cpu",)))
    torch.testing.assert_close(there, here, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("algorithm", ["dqn", "impala", "r2d2"])
def test_algorithms_with_actors(algorithm, tmp_path):
    replay = {"learning_starts": 64, "capacity": 4_000, "batch_size": 16, "replay_ratio": 0.05}
    options = {"dqn": replay, "impala": {}, "r2d2": {**replay, "sequence_length": 8, "burn_in": 2, "num_steps": 4}}[algorithm]
    how = {**HOW, "num_envs": 8, "num_actors": 2, "total_steps": 1_000, "backend": "serial", "runs": tmp_path, **options}
    assert hurtle.train("CartPole-v1", algorithm=algorithm, **how).steps >= 1_000
