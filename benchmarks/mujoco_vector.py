"""How fast vectors of MuJoCo tasks step, beside their peers and beside bare physics in the same run.

python benchmarks/mujoco_vector.py             # HalfCheetah-v5 and Ant-v5, 16 and 64 envs
python benchmarks/mujoco_vector.py --tasks Hopper-v5 --envs 16 --tag hopper
python benchmarks/mujoco_vector.py --quick          # see that it runs; nothing is saved

The bound is as many processes as cores that call `mj_step` and nothing else, with random actions and the task's frame_skip;
they never wait for each other. Vectors step all envs together, with random actions and their resets. EnvPool has its tasks and
its own build of MuJoCo (an older version) in C++, under the same ids. What is not installed is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from record import Job, save, short, table
from vector_jobs import Turns, make_jobs

import hurtle
from hurtle.native.threads import free_cores

Maker = Callable[[contextlib.ExitStack], Job]
CALLS = 20
"""Steps of all envs in a job."""
US, BARE = "hurtle mujoco", "bare mj_step"
PEERS = ("hurtle process", "Gymnasium Async", "EnvPool")
GOALS = {BARE: 0.8, "hurtle process": 1.5, "Gymnasium Async": 4.0, "EnvPool": 1.0}

_BARE = """
import sys
import gymnasium, mujoco, numpy as np
name, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
env = gymnasium.make(name).unwrapped
model, skip = env.model, env.frame_skip
datas, rng = [mujoco.MjData(model) for _ in range(count)], np.random.default_rng(seed)
ends, (low, high) = name.startswith("Ant"), getattr(env, "_healthy_z_range", (0, 0))
actions = rng.uniform(env.action_space.low, env.action_space.high, (64, count, model.nu))
for data in datas:
    data.qpos[:] += rng.uniform(-0.1, 0.1, model.nq)
print(flush=True)
for line in sys.stdin:
    for step in range(int(line)):
        for data, action in zip(datas, actions[step % 64]):
            data.ctrl[:] = action
            mujoco.mj_step(model, data, skip)
            if ends and not low <= data.qpos[2] <= high:  # as the task ends: upside down, the physics takes another time
                mujoco.mj_resetData(model, data)
                data.qpos[:] += rng.uniform(-0.1, 0.1, model.nq)
    print(flush=True)
"""


def bare(name: str, num_envs: int, cores: int) -> Maker:
    """Processes that only call `mj_step`, together for as many envs, each at its own pace."""

    def make(stack: contextlib.ExitStack) -> Job:
        count = max(1, num_envs // cores)
        processes = []
        for seed in range(min(cores, num_envs)):
            command = [sys.executable, "-c", _BARE, name, str(count), str(seed)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            stack.callback(_end, process)
            processes.append(process)

        def wait() -> None:
            for process in processes:
                if not os.read(process.stdout.fileno(), 16):
                    raise RuntimeError("A bare process ended; its error is above.")

        def job() -> int:
            for process in processes:
                os.write(process.stdin.fileno(), b"%d\n" % CALLS)
            wait()
            return CALLS * count * len(processes)

        wait()
        return job

    return make


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def stepping(vec: Any, num_envs: int, space: gymnasium.spaces.Box) -> Job:
    """A job of CALLS steps with random actions."""
    shape = (CALLS, num_envs, *space.shape)
    actions = np.random.default_rng(0).uniform(space.low, space.high, shape).astype(np.float32)

    def job() -> int:
        for action in actions:
            vec.step(action)
        return CALLS * num_envs

    return job


def ours(name: str, num_envs: int, backend: str, cores: int) -> Maker:
    def make(stack: contextlib.ExitStack) -> Job:
        workers = min(cores, num_envs)
        vec = stack.enter_context(hurtle.make_vec(name, num_envs, backend=backend, num_workers=workers))
        vec.reset(seed=0)
        return stepping(vec, num_envs, vec.single_action_space)

    return make


def gymnasium_async(name: str, num_envs: int) -> Maker:
    def make(stack: contextlib.ExitStack) -> Job:
        maker = partial(gymnasium.make, name, disable_env_checker=True)
        vec = gymnasium.vector.AsyncVectorEnv([maker] * num_envs, shared_memory=True)
        stack.callback(vec.close)
        vec.reset(seed=0)
        return stepping(vec, num_envs, vec.single_action_space)

    return make


def envpool(name: str, num_envs: int, cores: int, space: gymnasium.spaces.Box) -> Maker:
    def make(stack: contextlib.ExitStack) -> Job:
        import envpool

        vec = envpool.make(name, env_type="gymnasium", num_envs=num_envs, num_threads=min(cores, num_envs), seed=0)
        stack.callback(vec.close)
        vec.reset()
        return stepping(vec, num_envs, space)

    return make


def measure(name: str, num_envs: int, cores: int, seconds: float, rounds: int) -> tuple[dict[str, Any], list[list[str]]]:
    """The rates of all vectors of one task, and their rows of the table."""
    made_once = gymnasium.make(name)
    space = made_once.action_space
    made_once.close()
    makers = {  # those that fork come first, before there are threads
        "Gymnasium Async": gymnasium_async(name, num_envs),
        "hurtle process": ours(name, num_envs, "process", cores),
        BARE: bare(name, num_envs, cores),
        US: ours(name, num_envs, "mujoco", cores),
        "EnvPool": envpool(name, num_envs, cores, space),  # type: ignore[arg-type]
    }
    with contextlib.ExitStack() as stack:
        made, left_out = make_jobs(makers, stack)
        turns = Turns(made, seconds, rounds, budget=90.0)
    rows = []
    for other in (US, BARE, *PEERS):
        row = [f"{name}, {num_envs} envs", other]
        if other not in made:
            rows.append([*row, "left out", "–", "–", "–"])
            continue
        ratio = turns.ratio(US, other)
        goal = GOALS.get(other)
        verdict = ["–", "–"] if goal is None else [f"≥ {goal:g}", "yes" if ratio >= goal else "no"]
        rows.append([*row, short(turns.rate(other)), f"{ratio:.2f}x", *verdict])
        print(" ".join(rows[-1]), flush=True)
    return {"steps_per_second": turns.rates, "left_out": left_out}, rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["HalfCheetah-v5", "Ant-v5"], help="ids of Gymnasium's v5 tasks")
    parser.add_argument("--envs", nargs="+", type=int, default=[16, 64], help="numbers of envs")
    parser.add_argument("--seconds", type=float, default=0.4, help="the turn of each vector in a round")
    parser.add_argument("--rounds", type=int, default=15, help="rounds in which all have a turn")
    parser.add_argument("--tag", default="", help="added to the name of the result files, such as 16-cores")
    parser.add_argument("--quick", action="store_true", help="see that it runs: one task, few short rounds, nothing is saved")
    given = parser.parse_args(arguments)
    if given.quick:
        given.tasks, given.envs, given.seconds, given.rounds = given.tasks[:1], [4], 0.01, 1
    warnings.simplefilter("ignore")
    cores, results, rows = free_cores(), {}, []
    for name in given.tasks:
        for num_envs in given.envs:
            results[f"{name}, {num_envs} envs"], found = measure(name, num_envs, cores, given.seconds, given.rounds)
            rows += found
    header = ["task", "vector", "env steps/s", f"{US} / it", "goal", "met"]
    about = " ".join((__doc__ or "").split("nothing is saved")[1].split())
    text = f"### MuJoCo, {cores} cores\n\n{table(header, rows)}\n\n{about}"
    print(f"\n{text}")
    if not given.quick:
        save("-".join(filter(None, ["mujoco", given.tag or f"{cores}-cores"])), results, text)


if __name__ == "__main__":
    main()
