"""An exported CartPole policy where there are NumPy, Gymnasium and ONNX Runtime, and no Hurtle."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from hand_made_runs import policy_for, write_run

import hurtle

PACKAGES = ("numpy", "gymnasium", "onnxruntime")
ABSENT = ("hurtle", "torch", "numba", "onnx")
HIDE = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT}))  # they cannot be imported
"""
PLAY = f"""
import sys
import gymnasium
import numpy as np
import onnxruntime

for absent in {ABSENT}:
    try:
        __import__(absent)
    except ImportError:
        continue
    sys.exit(absent + " is here")
session = onnxruntime.InferenceSession(sys.argv[1])
env, returns = gymnasium.make("CartPole-v1"), []
for seed in range(int(sys.argv[2])):
    obs, info = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        action = session.run(["action"], {{"obs": np.asarray(obs, np.float32)[None]}})[0][0]
        obs, reward, terminated, truncated, info = env.step(int(action))
        total, over = total + float(reward), terminated or truncated
    returns.append(total)
print(np.mean(returns))
"""


@pytest.fixture
def bare_python(tmp_path):
    """A new virtual environment with the versions that are tested here, but for what they need in turn."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    constraints = Path(__file__).parents[2] / "constraints.txt"
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints, *PACKAGES]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if installed.returncode:
        pytest.skip(f"the packages cannot be installed here: {installed.stderr[-300:]}")
    return python


def play(python, code, file, episodes, home):
    """The mean return of the file in Gymnasium's CartPole."""
    command = [python, "-I", "-c", code, file, str(episodes)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return float(done.stdout)


def test_a_file_plays_where_hurtle_cannot_be_imported(tmp_path):
    policy, _, _ = policy_for("cartpole", hidden_sizes=())
    with torch.no_grad():  # to the right where the pole falls to the right
        policy.network.actor.weight.copy_(torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.1, 0.5, 3.0, 1.0]]))
        policy.network.actor.bias.zero_()
    run, _ = write_run(tmp_path, "cartpole", weights_of=policy, hidden_sizes=())
    file = hurtle.export(run, tmp_path / "cartpole.onnx").path
    assert play(sys.executable, HIDE + PLAY, file, 2, tmp_path) == 500


@pytest.mark.slow
def test_a_trained_policy_solves_cartpole_in_an_environment_of_its_own(bare_python, tmp_path):
    run = hurtle.train("cartpole", seed=0, runs=str(tmp_path), progress="quiet", trackers=(), eval_episodes=20)
    file = hurtle.export(run, tmp_path / "cartpole.onnx").path
    assert play(bare_python, PLAY, file, 20, tmp_path) >= 475
