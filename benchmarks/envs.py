"""How fast native environments step, beside their peers in the same run.

python benchmarks/envs.py            # CPU: step() against Gymnasium, EnvPool and rlox; the engine loop; start-up; memory
python benchmarks/envs.py --cuda     # GPU: steps/s of every env against num_envs, as replays of a captured graph
python benchmarks/envs.py --plot     # draw benchmarks/results/envs-cuda.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

import numpy as np
from record import RESULTS, Job, rates, save, short, table

import hurtle
from hurtle.envs.registry import names

SIZES = (8, 64, 512)
MINATAR = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
GPU_SIZES = (256, 1024, 4096, 16384, 65536, 262144, 1048576)
CALLS = 50
"""step() calls between two looks at the clock."""


# step() from Python ---------------------------------------------------------------------------------------------------


def hurtle_job(num_envs: int) -> Job:
    vec = hurtle.make_vec("cartpole", num_envs)
    vec.reset(seed=0)
    return _loop(vec.step, num_envs, np.int64)


def gymnasium_job(num_envs: int) -> Job:
    import gymnasium

    vec = gymnasium.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="sync")
    vec.reset(seed=0)
    return _loop(vec.step, num_envs, np.int64)


def envpool_job(num_envs: int) -> Job:
    import envpool

    vec = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=num_envs, num_threads=os.cpu_count(), seed=0)
    vec.reset()
    return _loop(vec.step, num_envs, np.int32)


def rlox_job(num_envs: int) -> Job:
    import rlox

    vec = rlox.VecEnv(num_envs, seed=0, env_id="CartPole-v1")
    vec.reset_all(seed=0)
    return _loop(vec.step_all, num_envs, np.uint32)


def _loop(step: Any, num_envs: int, dtype: Any) -> Job:
    actions = list(np.random.default_rng(0).integers(0, 2, (CALLS, num_envs)).astype(dtype))

    def job() -> int:
        for row in actions:
            step(row)
        return CALLS * num_envs

    return job


def measure_step() -> tuple[dict[str, Any], str]:
    makers = {"gymnasium": gymnasium_job, "envpool": envpool_job, "rlox": rlox_job, "hurtle": hurtle_job}
    results, rows = {}, []
    for size in SIZES:
        jobs = {}
        for name, maker in makers.items():
            try:
                jobs[name] = maker(size)
            except ImportError as error:
                print(f"{name} is left out: {error}")
        found = rates(jobs)
        results[str(size)] = found
        ratio = {name: f"{found['hurtle'] / found[name]:.1f}x" if name in found else "–" for name in makers}
        cells = [short(found[name]) if name in found else "–" for name in makers]
        rows.append([str(size), *cells, ratio["gymnasium"], ratio["envpool"], ratio["rlox"]])
        print(rows[-1], flush=True)
    header = ["envs", *makers, "us / gymnasium", "us / envpool", "us / rlox"]
    return results, "### CartPole through step(), steps/s\n\n" + table(header, rows)


# The engine loop ------------------------------------------------------------------------------------------------------


def play_job(name: str, threads: int, num_envs: int = 512) -> Job:
    vec = hurtle.make_vec(name, num_envs, num_workers=threads)
    vec.reset(seed=0)

    def job() -> int:
        vec.play(1_000)
        return 1_000 * num_envs

    return job


def minatar_job(name: str) -> Job:
    import minatar

    env = minatar.Environment(name)
    actions = np.random.default_rng(0).integers(0, 6, 200).tolist()

    def job() -> int:
        for action in actions:
            _, terminal = env.act(action)
            env.state()
            if terminal:
                env.reset()
        return len(actions)

    return job


def measure_engine() -> tuple[dict[str, Any], str]:
    results, rows = {}, []
    for name in names():
        jobs = {"1 thread": play_job(name, 1), "2 threads": play_job(name, 2)}
        if name in MINATAR:
            jobs["minatar"] = minatar_job(name)
        found = rates(jobs)
        results[name] = found
        peer = [short(found["minatar"]), f"{found['1 thread'] / found['minatar']:.0f}x"] if name in MINATAR else ["", ""]
        one, two = found["1 thread"], found["2 threads"]
        rows.append([name, short(one), short(two), f"{two / one:.2f}", *peer])
        print(rows[-1], flush=True)
    header = ["env", "1 thread", "2 threads", "speed-up", "minatar package", "1 thread / minatar"]
    return results, "### The engine loop without Python (512 envs, random actions), steps/s\n\n" + table(header, rows)


# Start-up and memory --------------------------------------------------------------------------------------------------

START = """
import time; began = time.perf_counter()
import numpy as np, hurtle
vec = hurtle.make_vec("cartpole", 8); vec.reset(); vec.step(np.zeros(8, np.int64))
print(time.perf_counter() - began)
"""
MEMORY = """
import resource, numpy as np, hurtle
hurtle.make_vec("cartpole", 8).reset()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = resident()
vec = hurtle.make_vec("cartpole", 2**20)
obs, _ = vec.reset()
actions = np.zeros(2**20, np.int64)
given = actions.nbytes + sum(array.nbytes for array in vec.step(actions)[:4])
print((resident() - before - given) / 1e6)
"""


def measure_start() -> tuple[dict[str, Any], str]:
    with tempfile.TemporaryDirectory() as folder:
        cold = _fresh_process(START, folder)
        warm = statistics.median(_fresh_process(START, folder) for _ in range(5))
        memory = _fresh_process(MEMORY, folder)
    rows = [
        ["make_vec and first step, empty cache", f"{cold:.2f} s"],
        ["make_vec and first step, warm cache (imports included)", f"{warm:.2f} s"],
        ["1M CartPoles, beyond the arrays handed out", f"{memory:.0f} MB"],
    ]
    return {"cold_s": cold, "warm_s": warm, "memory_mb": memory}, "### Start-up and memory\n\n" + table(["", "measured"], rows)


def _fresh_process(code: str, cache: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HURTLE_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


# GPU ------------------------------------------------------------------------------------------------------------------


def measure_cuda(chosen: list[str]) -> tuple[dict[str, Any], str]:
    import torch

    results: dict[str, dict[str, float]] = {}
    for name in chosen:
        results[name] = {}
        for size in GPU_SIZES:
            vec = hurtle.make_vec(name, size, device="cuda")
            vec.reset(seed=0)
            vec.play(96)  # captures the graph
            replays: list[float] = []
            steps = 320
            for _ in range(5):
                torch.cuda.synchronize()
                began = time.perf_counter()
                vec.play(steps)
                replays.append(time.perf_counter() - began)
            results[name][str(size)] = size * steps / statistics.median(replays)
            vec.close()
            del vec
        print(name, {k: short(v) for k, v in results[name].items()}, flush=True)
    header = ["env", *(f"{size:,}" for size in GPU_SIZES)]
    rows = [[name, *(short(rate) for rate in found.values())] for name, found in results.items()]
    device = torch.cuda.get_device_name()
    title = f"### The engine on one {device} (random actions, CUDA graph), steps/s against num_envs\n\n"
    return {"device": device, "steps_per_second": results}, title + table(header, rows)


def plot_cuda() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    data = json.loads((RESULTS / "envs-cuda.json").read_text())
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    found = sorted(data["steps_per_second"].items(), key=lambda item: -list(item[1].values())[-1])
    for k, (name, by_size) in enumerate(found):
        axes.loglog(
            [int(s) for s in by_size],
            list(by_size.values()),
            marker="o",
            ms=3,
            label=name,
            color=plt.cm.turbo(k / len(found)),
        )
    axes.set(xlabel="num_envs", ylabel="steps/s", title=f"Native environments on one {data['device']}, random actions")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(RESULTS / "envs-cuda.png", dpi=110)
    print("saved benchmarks/results/envs-cuda.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="measure on the GPU")
    parser.add_argument("--plot", action="store_true", help="draw the committed GPU results")
    parser.add_argument("--envs", nargs="*", default=names(), help="with --cuda: only these envs")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.plot:
        plot_cuda()
    elif arguments.cuda:
        results, text = measure_cuda(arguments.envs)
        print("\n" + text)
        save("envs-cuda", results, text)
    else:
        parts = {"step": measure_step(), "engine": measure_engine(), "start": measure_start()}
        text = "\n\n".join(part[1] for part in parts.values())
        print("\n" + text)
        save("envs-cpu", {name: part[0] for name, part in parts.items()}, text)


if __name__ == "__main__":
    main()
