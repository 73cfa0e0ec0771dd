"""An exported CartPole policy in an environment of its own that has NumPy, Gymnasium and ONNX Runtime, and no Hurtle."""

import subprocess
import venv
from pathlib import Path

import pytest

import hurtle

PACKAGES = ("numpy", "gymnasium", "onnxruntime")
PLAY = """
import sys
import gymnasium
import numpy as np
import onnxruntime

for absent in ("hurtle", "torch", "numba", "onnx"):
    try:
        __import__(absent)
    except ImportError:
        continue
    sys.exit(f"{absent} is here")
session = onnxruntime.InferenceSession(sys.argv[1])
env, returns = gymnasium.make("CartPole-v1"), []
for seed in range(20):
    obs, info = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        action = session.run(["action"], {"obs": np.asarray(obs, np.float32)[None]})[0][0]
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


def test_the_file_solves_gymnasiums_cartpole(bare_python, tmp_path):
    run = hurtle.train("cartpole", seed=0, runs=str(tmp_path), progress="quiet", trackers=(), eval_episodes=20)
    file = hurtle.export(run, tmp_path / "cartpole.onnx").path
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [bare_python, "-I", "-c", PLAY, file], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(done.stdout) >= 475
