"""The CleanRL-style script runs on Gymnasium's vector envs and on ours with one line changed."""

import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from integration_policies import Discrete

import hurtle
from hurtle.integrations.cleanrl import CleanRLAgent

EXAMPLE = Path(__file__).parents[2] / "examples" / "cleanrl_ppo.py"
sys.path.insert(0, str(EXAMPLE.parent))
import cleanrl_ppo  # noqa: E402

SHORT = cleanrl_ppo.Args(total_steps=4096)


def vectors(env, library="hurtle", **options):
    if not options:
        return cleanrl_ppo.make_envs(replace(SHORT, env=env, library=library))
    return hurtle.make_vec(env, SHORT.num_envs, **options)


@pytest.mark.parametrize(
    ("env", "library", "mode"),
    [
        ("cartpole", "hurtle", AutoresetMode.SAME_STEP),
        pytest.param("CartPole-v1", "gymnasium", AutoresetMode.NEXT_STEP, marks=pytest.mark.slow),
        pytest.param("CartPole-v1", "hurtle", AutoresetMode.SAME_STEP, marks=pytest.mark.slow),
    ],
)
def test_it_trains_with_either_library(env, library, mode):
    envs = vectors(env, library)
    assert envs.metadata["autoreset_mode"] is mode
    returns = cleanrl_ppo.train(envs, SHORT)
    envs.close()
    assert len(returns) > 40
    assert np.mean(returns[:20]) < 40
    assert np.mean(returns[-20:]) > 1.3 * np.mean(returns[:20])


def test_it_takes_gymnasiums_envs_too():
    envs = vectors("CartPole-v1", "gymnasium")
    assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    returns = cleanrl_ppo.train(envs, replace(SHORT, total_steps=1024))
    envs.close()
    assert len(returns) > 20
    assert np.mean(returns) < 60


@pytest.mark.slow
def test_it_learns_cartpole():
    returns = cleanrl_ppo.train(vectors("cartpole"), replace(SHORT, total_steps=24_576))
    assert np.mean(returns[-20:]) > 150


@pytest.mark.slow
@pytest.mark.parametrize(("env", "library"), [("CartPole-v1", "gymnasium"), ("cartpole", "hurtle"), ("CartPole-v1", "hurtle")])
def test_it_solves_cartpole(env, library):
    envs = vectors(env, library)
    returns = cleanrl_ppo.train(envs, replace(SHORT, total_steps=100_000))
    envs.close()
    assert np.mean(returns[-50:]) > 475


def test_serial_and_process_envs_give_the_same_training():
    args = replace(SHORT, total_steps=1024, num_epochs=2)
    runs = []
    for backend in ("serial", "process"):
        envs = vectors("CartPole-v1", backend=backend)
        runs.append(cleanrl_ppo.train(envs, args))
        envs.close()
    assert runs[0] == runs[1]
    assert len(runs[0]) > 20


class Constant(torch.nn.Module):
    """Always action 1; every observation is worth `value`, and what was trained on is kept."""

    def __init__(self, value):
        super().__init__()
        self.value, self.weight, self.seen = value, torch.nn.Parameter(torch.zeros(())), []

    def get_value(self, x):
        return torch.full((len(x), 1), self.value) + 0.0 * self.weight

    def get_action_and_value(self, x, action=None):
        if action is not None:
            self.seen.append(len(x))
        zeros = torch.zeros(len(x)) + 0.0 * self.weight
        return torch.ones(len(x), dtype=torch.int64), zeros, zeros, self.get_value(x)


@pytest.mark.parametrize(("mode", "trained_on"), [("SameStep", 512), ("NextStep", 384)])
def test_steps_that_only_reset_are_not_trained_on(mode, trained_on):
    envs = vectors("cartpole", autoreset_mode=mode, max_steps=3)  # with NEXT_STEP, every fourth step only resets
    agent, args = Constant(0.0), replace(SHORT, total_steps=512, num_epochs=1)
    cleanrl_ppo.train(envs, args, agent)
    assert sum(agent.seen) == trained_on


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_a_truncated_episode_goes_on_in_its_value(mode, monkeypatch):
    """With V = 1 / (1 - gamma) everywhere and a reward of 1, nothing is ever better than expected: the value loss is 0."""
    args = replace(SHORT, total_steps=512, num_epochs=1, gamma=0.75)
    squares = []
    original = torch.Tensor.square
    monkeypatch.setattr(torch.Tensor, "square", lambda self: squares.append(original(self).max().item()) or original(self))
    cleanrl_ppo.train(vectors("cartpole", autoreset_mode=mode, max_steps=3), args, Constant(4.0))
    assert len(squares) >= 3
    assert max(squares) < 1e-9


@pytest.mark.parametrize(("steps", "growth"), [(4_096, 1.3), pytest.param(16_384, 2.5, marks=pytest.mark.slow)])
def test_a_policy_of_ours_trains_in_the_script(steps, growth):
    envs = vectors("cartpole")
    torch.manual_seed(0)
    agent = CleanRLAgent(Discrete(envs.single_observation_space, envs.single_action_space))
    returns = cleanrl_ppo.train(envs, replace(SHORT, total_steps=steps), agent)
    assert np.mean(returns[-20:]) > growth * np.mean(returns[:20])


def test_the_command_line_ends_with_a_line_about_the_training(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--total-steps", "1450", "--num-envs", "2"])  # 11 updates of 128
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("   return")[0].strip() for line in lines] == ["1,280 steps", "1,408 steps"]


@pytest.mark.parametrize(("steps", "line"), [(1500, r"1,024 steps   return +\d"), (100, "0 steps   no episode has ended")])
def test_a_short_training_has_a_last_line_too(steps, line, capsys):
    cleanrl_ppo.train(vectors("cartpole"), replace(SHORT, total_steps=steps))
    (only,) = capsys.readouterr().out.splitlines()
    assert re.match(rf" +{line}", only)


def test_other_actions_than_discrete_ones_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cleanrl_ppo.py", "--env", "Pendulum-v1"])
    with pytest.raises(SystemExit, match=r"^cleanrl_ppo.py is for Discrete actions, and those of Pendulum-v1 are Box\.$"):
        cleanrl_ppo.main()
