"""The off-policy example: it learns, resumes exactly, and takes every kind of env."""

from pathlib import Path

import pytest
import torch
from sample_envs import Shift

import hurtle
from hurtle.tracking.checkpoints import Checkpoints, load_checkpoint

NAME = f"{Path(__file__).parents[2] / 'examples' / 'soft_q.py'}:SoftQ"
HOW = {"num_envs": 4, "progress": "quiet", "trackers": (), "eval_episodes": 2, "threads": 1, "preset": False}
FEW = {"gradient_steps": 2, "batch_size": 16, "capacity": 400}


def weights_of(run):
    return load_checkpoint(Checkpoints(run.path / "checkpoints").latest())["policy"]


def test_a_resumed_run_equals_one_that_was_never_stopped(tmp_path):
    whole = hurtle.train("cartpole", algorithm=NAME, total_steps=256, runs=tmp_path, name="whole", **HOW, **FEW)
    half = hurtle.train(
        "cartpole",
        algorithm=NAME,
        total_steps=256,
        runs=tmp_path,
        callbacks=[lambda trainer: trainer.steps < 128],
        **HOW,
        **FEW,
    )
    resumed = hurtle.train(resume=half.path, progress="quiet", trackers=())
    assert resumed.steps == whole.steps
    expected, found = weights_of(whole), weights_of(resumed)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        pytest.param("CartPole-v1", {}, marks=pytest.mark.slow),
        ("CartPole-v1", {"backend": "serial", "pool_batch_size": 2}),
        (Shift, {"capacity": 1000}),
    ],
)
def test_it_takes_every_kind_of_env(env, settings, tmp_path):
    run = hurtle.train(env, algorithm=NAME, total_steps=150, runs=tmp_path, **{**HOW, **FEW, **settings})
    assert run.steps >= 150


@pytest.mark.slow
def test_it_solves_cartpole(tmp_path):
    how = {**HOW, "num_envs": 8, "eval_episodes": 50}
    run = hurtle.train("cartpole", algorithm=NAME, total_steps=30_000, runs=tmp_path, **how)
    assert run.evaluation.mean > 475
