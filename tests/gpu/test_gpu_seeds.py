"""Seeds of PPO and A2C side by side on a GPU, in graphs, with fused kernels or without: each learns what it would alone."""

import pytest
import torch
from test_epochs_together import CASES, Made, updates_as_alone

import hurtle
from hurtle.runners.devices import torch_settings

pytestmark = pytest.mark.gpu
FUSED = {
    "choices, fused": ("cartpole", "ppo", {"hidden_sizes": (64, 64)}, {}),
    "numbers, fused": ("pendulum", "ppo", {"hidden_sizes": (64, 64), "clip_values": False}, {"statistics": True}),
    "a2c, fused": ("cartpole", "a2c", {"hidden_sizes": (16, 16), "optimizer": "rmsprop"}, {}),
    "a KL stop, fused": ("cartpole", "ppo", {"hidden_sizes": (64, 64), "target_kl": 2e-4, "num_epochs": 4}, {}),
}


@pytest.mark.parametrize("case", ["choices", "numbers", "bounded numbers", "a KL stop", "frames", *FUSED])
def test_each_seed_learns_what_it_would_alone(case):
    env, algorithm, settings, more = {**CASES, **FUSED}[case]
    with torch_settings(torch.get_num_threads(), "float32", torch.device("cuda")):
        learner, collector, _, _ = updates_as_alone(Made(env, algorithm, settings, device="cuda", **more))
    assert (learner.acting_kernels is not None) is (case in FUSED)
    assert not learner.graphs.failure
    learner.close()
    collector.close()


@pytest.mark.parametrize(("env", "options"), [("cartpole", {}), ("breakout", {"policy": "grid_cnn", "precision": "bf16"})])
def test_runs_go_on(env, options, tmp_path):
    how = {"seeds": 3, "device": "cuda", "runs": tmp_path, "progress": "quiet", "trackers": (), "preset": False, "num_envs": 64}
    found = hurtle.train_seeds(env, total_steps=40_000, num_steps=32, **how, **options)
    assert [run.steps >= 40_000 for run in found.runs] == [True] * 3
    again = hurtle.train_seeds(resume=found.path, total_steps=60_000)
    assert [run.steps >= 60_000 for run in again.runs] == [True] * 3
