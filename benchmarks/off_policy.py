"""Off-policy learning: gradient steps and whole runs per second, beside Stable-Baselines3 on the CPU, and on a GPU.

python benchmarks/off_policy.py                    # what this machine can; saves benchmarks/results/off-policy*.md and .json
python benchmarks/off_policy.py --parts gpu        # only the GPU's
python benchmarks/off_policy.py --parts seeds      # only many seeds side by side on it, in less than two minutes
python benchmarks/off_policy.py --quick            # see that it runs; nothing is saved
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from record import Job, rates, save, short, table

import hurtle
from hurtle.algorithms.algorithm import LearnerSetup, find_algorithm
from hurtle.algorithms.off_policy import OffPolicy
from hurtle.algorithms.side_by_side import SideBySide
from hurtle.buffers.rollout import Rollout
from hurtle.kernels.cuda_graphs import Graphs
from hurtle.policies.build import PolicyConfig, build_policy

THREADS = 2
NOTE = (
    "Gradient steps per second: the best of several rounds with both libraries taking turns, each on a full batch from its "
    f"own buffer, sampling included. All have {THREADS} threads: SB3 and our torch version torch's, compiled steps their own, "
    "beside one of torch's, as in a training run. Whole runs: env steps "
    "per second of training from the first gradient step on, one gradient step per env step (DQN: one for two), with the envs "
    "in the native gear for Hurtle and Gymnasium's in SB3; each trained twice in turns, the better one counts. GFLOP/s counts "
    "products only; the peak is one large float32 product of torch, on as many threads and in the same rounds."
)
GPU_NOTE = (
    "Gradient steps per second of one agent, sampling from a replay buffer in GPU memory included, in CUDA graphs of 32 steps; "
    "`compile` is torch.compile's part, which takes seconds once. 17-dim observations and 6-dim actions, batch 256, two layers "
    "of 256 units (SAC, TD3), critics of four layers of 512 units (XQC); 4-dim observations, batch 64, 64 units (DQN); "
    "4 × 84 × 84 bytes, Nature CNN, batch 32."
)
SEEDS_NOTE = (
    "Gradient steps of all agents together per second: seeds of SAC side by side (17-dim observations, 6-dim actions, batch "
    "256, two critics, two layers of 256 units), sampling from a replay buffer in GPU memory included, in CUDA "
    "graphs of 32 steps, tf32. In brackets milliseconds per step of all seeds, and TFLOP/s of products."
)
SMALL, LARGE = (64, 64), (256, 256)
SIDE = 1024
"""Of the matrices whose product is the peak."""
SEEDS = (64, 16, 1)


@dataclass(frozen=True)
class Case:
    """What is learned."""

    algorithm: str
    observations: tuple[int, ...]
    hidden: tuple[int, ...]
    batch: int
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def spaces(self) -> tuple[spaces.Box, spaces.Space]:
        """Observations and actions."""
        is_image = len(self.observations) == 3
        low, high, dtype = (0, 255, np.uint8) if is_image else (-10.0, 10.0, np.float32)
        action = spaces.Discrete(2) if self.algorithm == "dqn" else spaces.Box(-1, 1, (6,), np.float32)
        return spaces.Box(low, high, self.observations, dtype), action


CPU = {
    "DQN, 64 × 64, batch 64": Case("dqn", (4,), SMALL, 64),
    "SAC, 64 × 64, batch 256": Case("sac", (3,), SMALL, 256),
    "TD3, 64 × 64, batch 256": Case("td3", (3,), SMALL, 256),
    "SAC, 256 × 256, batch 256": Case("sac", (17,), LARGE, 256),
    "TD3, 256 × 256, batch 256": Case("td3", (17,), LARGE, 256),
}
GPU = {
    "SAC": Case("sac", (17,), LARGE, 256),
    "TD3": Case("td3", (17,), LARGE, 256),
    "XQC": Case("xqc", (17,), LARGE, 256),
    "DQN": Case("dqn", (4,), SMALL, 64),
    "DQN, Nature CNN": Case("dqn", (4, 84, 84), SMALL, 32),
}
RUNS = {
    "DQN, CartPole, 64 × 64": ("dqn", "cartpole", "CartPole-v1", {"batch_size": 64}),
    "SAC, Pendulum, 64 × 64": ("sac", "pendulum", "Pendulum-v1", {"batch_size": 256}),
}


def learner_for(case: Case, gear: str, device: str = "cpu", seeds: int | None = None, **setup: Any) -> OffPolicy:
    """Our learner, or several seeds of it side by side, with a buffer of random steps."""
    algorithm = find_algorithm(case.algorithm)
    config = algorithm.config(learning_starts=0, capacity=100_000, batch_size=case.batch, target_every=1, target_rate=0.005)
    network = PolicyConfig(hidden_sizes=case.hidden, activation="relu", orthogonal_init=False)
    made = []
    for seed in range(seeds or 1):
        policy = build_policy(network, *case.spaces, make_network=algorithm.network_maker(config), seed=seed).to(device)
        made.append(algorithm.make_learner(gear, policy, config, LearnerSetup(seed=seed, num_rows=8, **setup)))
    learner = SideBySide(made) if seeds else made[0]
    rollout = Rollout(policy, 64, 8 * len(made), False, device)
    learner.prepare(rollout)
    random = torch.randint(0, 255, rollout.obs.shape, device=device)
    rollout.obs.copy_(random if rollout.obs.dtype == torch.uint8 else torch.randn_like(rollout.obs))
    if rollout.actions.is_floating_point():
        rollout.actions.normal_()
    rollout.rewards.normal_()
    rollout.terminated.bernoulli_(0.01)
    for _ in range(8):
        learner.replay.add(rollout)
    return learner


def our_steps(learner: OffPolicy, count: int = 8) -> Job:
    """Gradient steps of ours."""

    def job() -> int:
        learner._learn(count, 0.5)
        return count

    return job


def on_threads(count: int, job: Job) -> Job:
    """The job with that many threads of torch's."""

    def with_threads() -> int:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        return job()

    return with_threads


def their_steps(case: Case, count: int = 8) -> Job:
    """Gradient steps of SB3's, with the same sizes."""
    import stable_baselines3 as sb3

    class Random(gymnasium.Env):
        observation_space, action_space = case.spaces

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return self.observation_space.sample(), 1.0, bool(self.np_random.random() < 0.01), False, {}

    made = getattr(sb3, case.algorithm.upper())
    model = made(
        "MlpPolicy", Random(), batch_size=case.batch, buffer_size=100_000, learning_starts=0, train_freq=1, gradient_steps=0,
        policy_kwargs={"net_arch": list(case.hidden), "activation_fn": torch.nn.ReLU}, device="cpu",
    )  # fmt: skip
    model.learn(2_000)

    def job() -> int:
        model.train(gradient_steps=count, batch_size=case.batch)
        return count

    return job


def cpu_steps(quick: bool) -> tuple[dict[str, Any], list[list[str]]]:
    """The table of gradient steps."""
    found, rows = {}, []
    for name, case in CPU.items():
        print(f"{name} …", flush=True)
        jobs = {
            "SB3": on_threads(THREADS, their_steps(case)),
            "general": on_threads(THREADS, our_steps(learner_for(case, "general"))),
            "native": on_threads(1, our_steps(learner_for(case, "native", num_threads=THREADS))),
            "product": on_threads(THREADS, large_product()),
        }
        seen = rates(jobs, seconds=0.05 if quick else 1.0, rounds=1 if quick else 9)
        speed, peak = seen["native"] * products(case) / 1e9, seen.pop("product") * 2 * SIDE**3 / 1e9
        found[name] = {**seen, "ratio": seen["native"] / seen["SB3"], "gflops": speed, "peak": peak}
        rows.append(
            [
                name, *(f"{seen[who]:,.0f}" for who in ("SB3", "general", "native")),
                f"{seen['native'] / seen['SB3']:.1f}×", f"{speed:.0f} ({speed / peak:.0%})",
            ]
        )  # fmt: skip
    return found, rows


def products(case: Case) -> float:
    """Floating-point operations of the matrix products of one gradient step."""
    inputs, widths = case.observations[0], case.hidden
    if case.algorithm == "dqn":
        one = layers([inputs, *widths, 2])
        return case.batch * one * (1 + 1 + 3)  # target, chooser, then forward and backward
    actor = layers([inputs, *widths, 12 if case.algorithm == "sac" else 6])
    critic = layers([inputs + 6, *widths, 1])
    improves = 1.0 if case.algorithm == "sac" else 0.5
    steps = 2 if case.algorithm == "sac" else 1  # critics that the actor's loss asks
    return case.batch * (actor + 2 * critic + 2 * 3 * critic + improves * (3 * actor + steps * 2 * critic))


def layers(sizes: list[int]) -> float:
    """Operations of a forward pass for one row."""
    return 2.0 * sum(a * b for a, b in pairwise(sizes))


def large_product() -> Job:
    """One product of two large matrices."""
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)

    def job() -> int:
        torch.mm(a, b)
        return 1

    return job


def whole_runs(quick: bool) -> tuple[dict[str, Any], list[list[str]]]:
    """The table of whole runs."""
    import stable_baselines3 as sb3

    steps, found, rows = 600 if quick else 6_000, {}, []
    for name, (algorithm, native, theirs, settings) in RUNS.items():
        seen: dict[str, float] = {"SB3": 0.0, "hurtle": 0.0}
        ratio = 0.5 if algorithm == "dqn" else 1.0
        for _ in range(1 if quick else 2):
            with tempfile.TemporaryDirectory() as folder:
                run = hurtle.train(
                    native, algorithm=algorithm, total_steps=steps, num_envs=8, num_steps=4, learning_starts=128, preset=False,
                    replay_ratio=ratio, hidden_sizes=SMALL, runs=folder, trackers=(), progress="quiet", eval_episodes=1,
                    save_replay=False, **settings,
                )  # fmt: skip
            seen["hurtle"] = max(seen["hurtle"], run.steps / run.seconds)
            env: Any = gymnasium.make(theirs)
            made = getattr(sb3, algorithm.upper())(
                "MlpPolicy", env, learning_starts=128, train_freq=2 if algorithm == "dqn" else 1, gradient_steps=1,
                policy_kwargs={"net_arch": list(SMALL), "activation_fn": torch.nn.ReLU}, device="cpu", **settings,
            )  # fmt: skip
            began = time.perf_counter()
            made.learn(max(300, steps // 10))
            seen["SB3"] = max(seen["SB3"], max(300, steps // 10) / (time.perf_counter() - began))
        found[name] = {**seen, "ratio": seen["hurtle"] / seen["SB3"]}
        rows.append([name, f"{seen['SB3']:,.0f}", f"{seen['hurtle']:,.0f}", f"{seen['hurtle'] / seen['SB3']:.1f}×"])
    return found, rows


def gpu_steps(quick: bool) -> tuple[dict[str, Any], list[list[str]]]:
    """The table of a GPU."""
    torch.set_float32_matmul_precision("high")
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)
    found, rows = {}, []
    for name, case in GPU.items():
        seen = {}
        for compiled in (False, True):
            learner = learner_for(case, "device", "cuda", graphs=Graphs("cuda"), compiled=compiled, precision="tf32")
            seen["compile" if compiled else "plain"] = graph_steps(learner, 32, 1 if quick else 5)
        found[name] = seen
        rows.append([name, *(f"{seen[how]:,.0f}" for how in ("plain", "compile"))])
        print(f"{name}: {short(seen['plain'])} plain, {short(seen['compile'])} compiled", flush=True)
    return found, rows


def graph_steps(learner: OffPolicy, repeats: int, rounds: int, size: int = 32) -> float:
    """Gradient steps per second in CUDA graphs of `size` steps, the best of several rounds."""
    run: Callable[..., Any] = learner._graphs.run  # type: ignore[union-attr]
    wait = torch.cuda.synchronize if learner.device.type == "cuda" else lambda: None
    for _ in range(4):
        run(size, 1.0)
    best = 0.0
    for _ in range(rounds):
        wait()
        began = time.perf_counter()
        for _ in range(repeats):
            run(size, 1.0)
        wait()
        best = max(best, repeats * size / (time.perf_counter() - began))
    return best


def seeds_steps(quick: bool) -> tuple[dict[str, Any], list[list[str]]]:
    """The table of seeds side by side; without a GPU, small ones on the CPU, to see that it runs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case, size = (GPU["SAC"], 32) if device == "cuda" else (Case("sac", (17,), (16,), 16), 2)
    torch.set_float32_matmul_precision("high")
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)
    found, rows = {}, []
    for seeds in SEEDS if device == "cuda" else SEEDS[1:]:
        seen, cells = {}, []
        for compiled in (False, True) if device == "cuda" else (False,):
            graphs = Graphs(device)
            learner = learner_for(case, "device", device, seeds, graphs=graphs, compiled=compiled, precision="tf32")
            rate = graph_steps(learner, 1 if quick else 16, 1 if quick else 3, size)
            if graphs.failure:
                raise RuntimeError(f"{seeds} seeds do not run as a CUDA graph: {graphs.failure}")
            seen["compile" if compiled else "plain"] = rate * seeds
            speed = rate * seeds * products(case) / 1e12
            cells.append(f"{rate * seeds:,.0f} ({1e3 / rate:.2f} ms, {speed:.0f})")
            print(f"{seeds} seeds{', compiled' if compiled else ''}: {cells[-1]}", flush=True)
            del learner
        found[str(seeds)] = seen
        rows.append([str(seeds), *cells])
    return found, rows


def main(arguments: list[str] | None = None) -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["gpu", "seeds"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--parts", nargs="+", choices=("cpu", "gpu", "seeds"), default=default)
    parser.add_argument("--quick", action="store_true", help="see that it runs; nothing is saved")
    given = parser.parse_args(arguments)
    if "cpu" in given.parts:
        steps, step_rows = cpu_steps(given.quick)
        runs, run_rows = whole_runs(given.quick)
        header = ["gradient steps per second", "SB3", "Hurtle, torch", "Hurtle, compiled", "ratio", "GFLOP/s (of the peak)"]
        tables = [table(header, step_rows), table(["env steps per second", "SB3", "Hurtle", "ratio"], run_rows)]
        print("\n\n".join(tables))
        if not given.quick:
            text = "\n\n".join(["# Off-policy learning on a CPU", NOTE, *tables])
            save("off-policy", {"steps": steps, "runs": runs}, text)
    if "gpu" in given.parts:
        found, rows = gpu_steps(given.quick)
        tables = [table(["gradient steps per second", "plain", "compile"], rows)]
        print("\n\n".join(tables))
        if not given.quick:
            save("off-policy-gpu", {"steps": found}, "\n\n".join(["# Off-policy learning on a GPU", GPU_NOTE, *tables]))
    if "seeds" in given.parts:
        found, rows = seeds_steps(given.quick)
        tables = [table(["seeds", "plain", "compile"][: 1 + len(rows[0][1:])], rows)]
        print("\n\n".join(tables))
        if not given.quick:
            save("off-policy-seeds", {"steps": found}, "\n\n".join(["# Seeds side by side on a GPU", SEEDS_NOTE, *tables]))


if __name__ == "__main__":
    main()
