"""Curricula in the device gear on a real GPU: returns by level inside CUDA graphs, gates that open, runs that repeat."""

import json

import pytest
from ladder_envs import Ladder

import hurtle

pytestmark = pytest.mark.gpu

RULES = {"size": "gated:1:6:2.0:5:200", "push": "uniform:0.5:1.0"}


def told(run):
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    names = ("curriculum/", "episode/size", "episodes")
    return [{name: value for name, value in line.items() if name.startswith(names)} for line in lines if "updates" in line]


def train(tmp_path):
    return hurtle.train(
        Ladder, total_steps=12 * 256 * 16, device="cuda", num_envs=256, num_steps=16, minibatch_size=1024, preset=False,
        curriculum=RULES, progress="quiet", trackers=(), eval_episodes=4, runs=str(tmp_path),
    )  # fmt: skip


def test_the_gate_opens_level_by_level_and_runs_repeat(tmp_path):
    run = train(tmp_path)
    assert json.loads((run.path / "about.json").read_text())["gear"] == "device"
    found = told(run)
    levels = [line["curriculum/size_level"] for line in found]
    assert levels == sorted(levels)
    assert levels[-1] == 5.0
    assert [line["curriculum/size_high"] for line in found[1:]] == [1.0 + level for level in levels[:-1]]
    assert told(train(tmp_path))[-1]["curriculum/size_level"] == 5.0
