"""The model and the simulation of benchmarks/scale.py, where the answer is known."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts import each other as neighbours

from scale_model import (
    Constants,
    Machines,
    Workload,
    collector_seconds,
    fit,
    limits,
    predict,
    simulate,
    taking_seconds,
    weights_seconds,
)

FOUND = Constants(step_overhead=1e-4, rollout_overhead=0.02, take_seconds=0.001, copy_rate=1e9)
WORK = Workload(env_seconds=0.001, num_envs=4, num_steps=100, step_bytes=1000, weight_bytes=4e7)
MACHINES = Machines(cores=16, network=1e9, price=1.0, learner_price=2.0, learner_rate=1e6)


def test_where_nobody_waits_the_rate_is_that_of_the_collectors():
    assert simulate(50, 1.0, 1e-6, spread=0.0).rate == pytest.approx(50, rel=1e-3)
    assert simulate(50, 1.0, 1e-6, spread=0.2, updates=400).rate == pytest.approx(50, rel=0.02)


def test_a_learner_that_is_too_slow_is_the_limit():
    found = simulate(10, 0.1, 0.05, update_seconds=0.5)
    assert found.rate == pytest.approx(10 / (10 * 0.05 + 0.5), rel=0.02)
    assert found.idle_learner < 0.05
    assert found.idle_collectors == pytest.approx(0.9, abs=0.02)  # work 0.1 s of each second
    assert 2 <= found.lag <= 3  # two rollouts wait, and one more is learned from


def test_the_link_is_a_queue():
    assert simulate(100, 0.1, 1e-6, link_seconds=0.01).rate == pytest.approx(100, rel=0.02)


def test_late_weights_are_lag():
    early, late = (simulate(10, 1.0, 1e-6, weights_seconds=seconds).lag for seconds in (0.0, 5.0))
    assert early < 2 < late


def test_overheads_are_found():
    times = [
        (work.steps, 7, work.env_seconds, 7 * collector_seconds(FOUND, work))
        for work in (replace(WORK, env_seconds=env, num_steps=steps) for env in (1e-4, 1e-2) for steps in (10, 100, 1000))
    ]
    assert fit(times) == pytest.approx((FOUND.step_overhead, FOUND.rollout_overhead))


def test_each_part_can_be_the_bottleneck():
    rate, first, dollars = predict(FOUND, WORK, MACHINES, 1)
    assert (first, rate) == ("envs", pytest.approx(16 * 400 / (400 * 1.1e-3 + 0.02)))
    assert dollars == pytest.approx(1e9 / rate / 3600 * 3.0)
    assert predict(FOUND, WORK, MACHINES, 1000)[1] == "taking rollouts"
    assert limits(FOUND, WORK, MACHINES, 1000)["taking rollouts"] == pytest.approx(400 / taking_seconds(FOUND, WORK))
    assert predict(FOUND, WORK, replace(MACHINES, learner_rate=100.0), 1)[1] == "learning"
    assert predict(FOUND, replace(WORK, step_bytes=1e5), replace(MACHINES, network=1e7), 10)[1] == "network, rollouts"
    assert weights_seconds(WORK, MACHINES, 1000) == pytest.approx(40.0)
