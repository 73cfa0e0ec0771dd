"""The CUDA target in Numba's simulator: every env of the zoo behaves on the GPU as on the CPU.

CPU play is recorded here; a process with the simulator enabled replays all of it.
"""

import json
import pickle
from collections import deque
from functools import cache

import numpy as np
import pytest
from sample_envs import Levers, Masked, Shift, Thrust, Walk

import hurtle
from hurtle.envs.registry import names

SAMPLES = {"Walk": Walk, "Levers": Levers, "Thrust": Thrust, "Masked": Masked, "Shift": Shift}
FAST = ("cartpole", "squared", "breakout", "snake", *SAMPLES)
"""One env of each kind, and those of the tests; the rest of the zoo is for the slow tests."""
REST = tuple(name for name in names() if name not in FAST)
ODD = "Levers"  # observations of five bytes: words of four straddle the rows of neighbours

REPLAY = """
import json, pickle, sys
import numpy as np
import hurtle
import sample_envs

def difference(a, b):
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return float("inf")
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max()) if a.size else 0.0

def fresh(infos):
    # Rows that no mask calls new are stale.
    found = {}
    for name in ("action_mask", "agent_mask"):
        if name in infos:
            found[name] = np.array(infos[name])
    ended = np.array(infos["_episode"])
    found["ended"] = ended
    for name, values in infos["episode"].items():
        rows = ended.any(axis=1) if ended.ndim > np.ndim(values) else ended
        found["episode " + name] = np.where(rows, values, 0)
    done = np.array(infos["_final_obs"])
    found["final_obs"] = np.array(infos["final_obs"])[done]
    return found

with open(sys.argv[1], "rb") as file:
    recordings = pickle.load(file)
report = {}
for name, recording in recordings.items():
    env = getattr(sample_envs, name, name)
    vec = hurtle.make_vec(env, recording["num_envs"], device="cuda")
    obs, _ = vec.reset(seed=recording["seed"])
    worst = {"reset": difference(obs, recording["obs"])}
    for t, step in enumerate(recording["steps"]):
        if step["records"] is not None:
            vec._batch.load_records(step["records"])
        obs, rewards, terminated, truncated, infos = vec.step(step["actions"])
        got = {"obs": obs, "reward": rewards, "terminated": terminated, "truncated": truncated, **fresh(infos)}
        for key, value in step["expected"].items():
            if key in got:
                worst[key] = max(worst.get(key, 0.0), difference(got[key], value))
            else:
                worst[key] = float("inf")
    report[name] = worst
print(json.dumps(report))
"""


def fresh(infos, vec):
    """The new entries of infos in this step, in row order; empty if no episode ended."""
    found = {name: infos[name].copy() for name in ("action_mask", "agent_mask") if name in infos}
    arrays, several = vec._batch.arrays, vec.num_agents > 1
    ended = arrays.episode_ended.copy() if several else arrays.episode_ended[:, 0].copy()
    found["ended"] = ended
    for name, values in vec._episode_infos["episode"].items():
        rows = ended.any(axis=1) if ended.ndim > values.ndim else ended
        found[f"episode {name}"] = np.where(rows, values, 0).astype(values.dtype)
    found["final_obs"] = vec._episode_infos["final_obs"][arrays.ended]
    return found


def record(name, num_envs, num_steps, seed=3):
    """Play on the CPU until some episode has ended a few steps ago, and keep the last `num_steps` steps."""
    vec = hurtle.make_vec(SAMPLES.get(name, name), num_envs)
    vec.action_space.seed(0)
    obs, _ = vec.reset(seed=seed)
    recording = {"num_envs": num_envs, "seed": seed, "obs": obs.copy()}
    steps = deque(maxlen=num_steps)
    for _ in range(4000):
        before, actions = vec._batch.arrays.envs.copy(), vec.action_space.sample()
        obs, rewards, terminated, truncated, infos = vec.step(actions)
        expected = {"obs": obs, "reward": rewards, "terminated": terminated, "truncated": truncated}
        expected = {key: value.copy() for key, value in expected.items()} | fresh(infos, vec)
        steps.append({"records": before, "actions": actions, "expected": expected})
        if len(steps) == num_steps and any(len(step["expected"]["final_obs"]) for step in list(steps)[2:-3]):
            break
    # Envs of real numbers are set to the same state before each step: rounding errors must not accumulate.
    recording["steps"] = list(steps)
    for step in recording["steps"][1:]:
        step["records"] = step["records"] if obs.dtype.kind == "f" else None
    return recording


@cache
def recordings(envs):
    """Recordings of these envs: with those of the tests, more than one block of 8 threads, the last one partial."""
    return {name: record(name, 9 if name in SAMPLES else 3, 10) for name in envs}


@pytest.fixture(scope="module")
def report(run_simulated, tmp_path_factory):
    """A function that replays the recordings of these envs and says how far each is off."""

    @cache
    def replay(envs):
        path = tmp_path_factory.mktemp("recordings") / "recordings.pickle"
        path.write_bytes(pickle.dumps(recordings(envs)))
        return json.loads(run_simulated(REPLAY, path).stdout)

    return replay


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)])
def test_the_simulated_gpu_agrees_with_the_cpu(name, report):
    envs = FAST if name in FAST else REST
    found = report(envs)[name]
    exact = recordings(envs)[name]["obs"].dtype.kind != "f"
    limit = 0.0 if exact or name in ("Walk", "Shift") else 1e-4
    for key, worst in found.items():
        assert worst <= (0.0 if key in ("terminated", "truncated", "ended") else limit), f"{key}: {worst}"
    assert {"obs", "reward", "terminated", "truncated", "ended", "final_obs"} <= found.keys()


@pytest.mark.parametrize("envs", [FAST, pytest.param(REST, marks=pytest.mark.slow)], ids=["fast", "rest"])
def test_recordings_hold_what_they_should(envs):
    if envs is FAST:
        assert recordings(FAST)[ODD]["obs"][0].nbytes % 4 != 0
        assert recordings(FAST)["squared"]["obs"][0].nbytes % 4 != 0
    for name, found in recordings(envs).items():
        assert any(len(step["expected"]["final_obs"]) for step in found["steps"]), f"{name}: no autoreset"
