"""The device gear on one GPU: rates, time to solve, learning at every setting that a rate is given for, kernels and floors.

python benchmarks/gpu.py                        # everything, about five minutes; saves benchmarks/results/gpu.md and .json
python benchmarks/gpu.py --parts rates kernels  # some of it, beside what the file holds
python benchmarks/gpu.py --plot                 # the pictures of the last results; needs no GPU
python benchmarks/gpu.py --device cpu --quick   # whether it runs: tiny sizes, nothing is saved
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
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from record import RESULTS, machine, save, short, table

from hurtle.runners.assembly import Parts, assemble
from hurtle.runners.devices import torch_settings
from hurtle.runners.evaluate import evaluate_policy
from hurtle.runners.settings import make_settings

SEEDS, ROUNDS = 5, 5
MARGIN, REACHED = 1.03, 5
"""Training ends when so many rollouts in turn had episodes whose mean is so far above the goal."""
PARTS = ("ceilings", "rates", "gae", "kernels", "sweep", "solve", "cold", "learning")
PROFILED = ("cartpole-1-bf16", "breakout", "breakout-impala", "breakout-mingru-1", "breakout-lstm")
SWEEP = (1, 16, 256, 4096, 16_384, 65_536, 262_144, 1_048_576)


@dataclass(frozen=True)
class Setting:
    """What a rate is given for, and what shows that it learns."""

    about: str
    env: str
    words: dict[str, Any]
    at_least: float = 0.0
    """Steps per second of training."""
    rollouts: float = 0.0
    """Steps per second of collecting alone."""
    goal: float = 0.0
    """Mean return of sampled episodes."""
    steps: int = 0
    """Of training."""
    until_goal: bool = False
    """Whether training ends as soon as episodes reach the goal."""


WIDE = {"num_envs": 65_536, "num_steps": 32, "clip_values": False}
ONCE = {**WIDE, "num_epochs": 1, "minibatch_size": 262_144, "learning_rate": 3e-3, "entropy_coef": 0.0}
OFTEN = {**WIDE, "num_epochs": 4, "minibatch_size": 524_288, "learning_rate": 4e-3}
HALF = {"precision": "bf16"}
GRID = {"num_steps": 32, "clip_values": False, "learning_rate": 3e-3, "entropy_coef": 0.03, **HALF}
CNN = {**GRID, "num_envs": 16_384, "num_epochs": 1, "minibatch_size": 32_768}
MEMORY = {**GRID, "num_envs": 32_768, "num_epochs": 2, "minibatch_size": 131_072, "policy": "mlp", "recurrent": "mingru"}
RECITE = {**MEMORY, "gamma": 0.95, "entropy_coef": 0.2, "hidden_sizes": (96, 208)}
SINGLE = {"num_epochs": 1, "minibatch_size": 65_536, "learning_rate": 5e-3}
BREAKOUT = {**MEMORY, "hidden_sizes": (168,)}
IMPALA = {"algorithm": "impala", "num_envs": 16_384, "num_steps": 32, "num_minibatches": 16, "trace_lambda": 0.95, **HALF}
IMPALA |= {"learning_rate": 2e-3}
SMALL = {"num_envs": 16, "num_steps": 8, "minibatch_size": 64, "num_minibatches": 2}
SETTINGS = {
    "cartpole-1": Setting("CartPole, 64×64, 1 epoch", "cartpole", ONCE, 250e6, 900e6, 475, 200_000_000),
    "cartpole-4": Setting("CartPole, 64×64, 4 epochs", "cartpole", OFTEN, 80e6, 900e6, 475, 100_000_000),
    "cartpole-1-bf16": Setting("CartPole, 64×64, 1 epoch, bf16", "cartpole", {**ONCE, **HALF}, 900e6, 3e9, 475, 200_000_000),
    "cartpole-4-bf16": Setting("CartPole, 64×64, 4 epochs, bf16", "cartpole", {**OFTEN, **HALF}, 350e6, 3e9, 475, 100_000_000),
    "breakout": Setting("breakout, small CNN, bf16", "breakout", CNN, 80e6, 0, 28, 600_000_000, until_goal=True),
    "asterix": Setting("asterix, small CNN, bf16", "asterix", CNN, 80e6, 0, 16, 600_000_000, until_goal=True),
    "breakout-impala": Setting(
        "breakout, small CNN, IMPALA, bf16", "breakout", IMPALA, 20e6, 0, 28, 600_000_000, until_goal=True
    ),
    "asterix-impala": Setting("asterix, small CNN, IMPALA, bf16", "asterix", IMPALA, 20e6, 0, 16, 600_000_000, until_goal=True),
    "breakout-mingru": Setting(
        "breakout, minGRU, 2 epochs, bf16", "breakout", BREAKOUT, 0, 0, 28, 400_000_000, until_goal=True
    ),
    "breakout-mingru-1": Setting(
        "breakout, minGRU, 1 epoch, bf16",
        "breakout",
        {**BREAKOUT, **SINGLE, "learning_rate": 4e-3},  # with 5e-3 one seed of ten ends below the goal
        40e6,
        0,
        28,
        400_000_000,
        until_goal=True,
    ),
    "memory-mingru": Setting("memory, minGRU, 1 epoch, bf16", "memory", {**RECITE, **SINGLE}, 40e6, 0, 0.95, 160_000_000),
    "breakout-lstm": Setting(
        "breakout, LSTM, bf16", "breakout", {**BREAKOUT, "recurrent": "lstm"}, 15e6, 0, 28, 400_000_000, until_goal=True
    ),
    "memory-lstm": Setting("memory, LSTM, bf16", "memory", {**RECITE, "recurrent": "lstm"}, 15e6, 0, 0.95, 80_000_000),
}
SOLVE = {"num_envs": 4096, "num_steps": 32, "minibatch_size": 32_768, "num_epochs": 4, "learning_rate": 2e-3}
SOLVE |= {"clip_values": False, "precision": "bf16", "total_steps": 8_000_000}


class Bench:
    """Everything that is measured on one device; `found` is what the result file holds."""

    def __init__(self, device: str, quick: bool, names: Sequence[str] = tuple(SETTINGS)):
        self.device, self.quick, self.names = device, quick, names
        self.found: dict[str, Any] = {}

    def parts(self, env: str, words: dict[str, Any], seed: int = 0) -> Parts:
        """Of a run with these settings."""
        words = {"precision": "tf32", **words, "device": self.device, "gear": "device", "preset": False, "seed": seed}
        if self.quick:
            words |= small(words) | {"hidden_sizes": (16,) * len(words.get("hidden_sizes", (0, 0)))}
        return assemble(make_settings(env, words), env)

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any], least: float = 0.3) -> float:
        """Of one call: the median of rounds, each long enough to tell."""
        for _ in range(3):
            work()
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        calls = 1 if self.quick else max(2, int(least / ROUNDS / max(time.perf_counter() - began, 1e-6)))
        rounds = []
        for _ in range(1 if self.quick else ROUNDS):
            began = time.perf_counter()
            for _ in range(calls):
                work()
            self.wait()
            rounds.append((time.perf_counter() - began) / calls)
        return statistics.median(rounds)

    def rates_of(self, env: str, words: dict[str, Any]) -> dict[str, float]:
        """Steps per second of collecting, of learning and of both."""
        parts = self.parts(env, words)
        rollout, steps = parts.rollout, parts.rollout.num_steps * parts.rollout.num_rows
        with torch_settings(1, words.get("precision", "tf32") if not self.quick else "float32", rollout.device):
            collect = self.seconds(lambda: parts.collector.collect(rollout))
            done = rollout.done

            def update() -> None:
                rollout.done = done  # as after every rollout
                parts.learner.update(rollout)

            learn = self.seconds(update)
            both = self.seconds(lambda: train(parts), 1.0)
        assert not parts.collector.warning, parts.collector.warning
        size = sum(parameter.numel() for parameter in parts.policy.parameters())
        parts.close()
        return {"rollout": steps / collect, "update": steps / learn, "train": steps / both, "parameters": size}

    # The parts.

    def ceilings(self) -> None:
        """What the device can do at most: bytes and operations per second."""
        size = 1 << (20 if self.quick else 30)
        source = torch.randint(0, 99, (size,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        found = {"bytes": 2 * size / self.seconds(lambda: target.copy_(source))}
        side = 256 if self.quick else 8192
        for name, dtype in (("bf16", torch.bfloat16), ("tf32", torch.float32)):
            with torch_settings(1, "tf32", torch.device(self.device)):
                a, b = (torch.randn(side, side, device=self.device, dtype=dtype) for _ in range(2))
                found[name] = 2 * side**3 / self.seconds(lambda a=a, b=b: a @ b)
        self.found["ceilings"] = found

    def rates(self) -> None:
        """Of all settings, and of one with normalized observations."""
        found = self.found.setdefault("rates", {})
        for name in self.names:
            found[name] = self.rates_of(SETTINGS[name].env, SETTINGS[name].words)
        words = {**SETTINGS["cartpole-1"].words, "normalize_observations": True}
        found["cartpole-1-normalized"] = self.rates_of("cartpole", words)

    def gae(self) -> None:
        """The advantages of 65,536 × 128 steps: bytes that must move over the time that it takes."""
        if self.device != "cuda":
            return
        from hurtle.kernels.cuda_graphs import Graphs
        from hurtle.kernels.gae import gae_cuda

        shape = (128, 65_536)
        rewards, values, final_values = (torch.randn(shape, device="cuda") for _ in range(3))
        terminated, truncated = (torch.rand(shape, device="cuda") < 0.01 for _ in range(2))
        last, out, returns = torch.randn(shape[1], device="cuda"), torch.empty_like(rewards), torch.empty_like(rewards)
        arrays = (rewards, values, terminated, truncated, final_values, last)
        times = 20  # in one graph, so that launching it is nothing

        def work() -> None:
            for _ in range(times):
                gae_cuda(*arrays, 0.99, 0.95, None, out, returns)

        taken = self.seconds(Graphs("cuda").wrap(work)) / times
        moved = rewards.numel() * (4 + 4 + 1 + 1 + 4 + 4)
        self.found["gae"] = {"microseconds": taken * 1e6, "bytes_per_second": moved / taken}

    def kernels(self) -> None:
        """Where the time of one update goes, by kernel."""
        if self.device != "cuda":
            return
        self.found["kernels"] = {name: self._kernels_of(name) for name in PROFILED}

    def _kernels_of(self, name: str) -> list[dict[str, Any]]:
        from torch.profiler import ProfilerActivity, profile

        setting, times = SETTINGS[name], 3
        parts = self.parts(setting.env, setting.words)
        with torch_settings(1, "tf32", parts.rollout.device):
            for _ in range(4):
                train(parts)
            self.wait()
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                for _ in range(times):
                    train(parts)
                self.wait()
        spent: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for event in profiled.key_averages():
            entry = spent[kernel_name(event.key, name)]
            entry[0] += event.self_device_time_total / times
            entry[1] += event.count / times
        rows = [{"kernel": kernel, "microseconds": t, "calls": n} for kernel, (t, n) in spent.items() if t > 0]
        parts.close()
        return sorted(rows, key=lambda row: -row["microseconds"])

    def sweep(self) -> None:
        """Rates against the number of envs, with 32 steps and four minibatches of one epoch."""
        found = {}
        for num_envs in (1, 16) if self.quick else SWEEP:
            words = {**SETTINGS["cartpole-1-bf16"].words, "num_envs": num_envs, "minibatch_size": num_envs * 8}
            found[num_envs] = self.rates_of("cartpole", words)
        self.found["sweep"] = found

    def solve(self) -> None:
        """CartPole to a mean return of 475 over 1,000 fresh episodes, in a process that has compiled its kernels."""
        import hurtle

        runs = []
        for seed in range(2 if self.quick else SEEDS + 1):  # the first compiles
            words = {**SOLVE, "total_steps": 256, **small(SOLVE)} if self.quick else SOLVE
            with tempfile.TemporaryDirectory() as folder:
                run = hurtle.train(
                    "cartpole", device=self.device, gear="device", preset=False, seed=seed, runs=folder, progress="quiet",
                    trackers=(), eval_episodes=5 if self.quick else 1000, **words,
                )  # fmt: skip
            assert run.evaluation is not None
            runs.append({"seed": seed, "seconds": run.seconds, "steps": run.steps, "evaluation": run.evaluation.mean})
        self.found["solve"] = runs[1:]

    def cold(self) -> None:
        """The same from the start of a process to the end of training: with empty caches, and with those of the first."""
        if self.device != "cuda":
            return
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            caches = {f"{name}_CACHE_DIR": f"{folder}/{name}" for name in ("HURTLE", "TRITON", "NUMBA")}
            caches |= {"PYTHONPYCACHEPREFIX": f"{folder}/python", "PYTHONDONTWRITEBYTECODE": ""}  # as pip installs packages
            for state in ("empty caches", "warm caches"):
                began = time.time()
                words = json.dumps(SOLVE)
                code = (
                    "import hurtle, json, time\n"
                    "ends = [0.0]\n"
                    f"run = hurtle.train('cartpole', device='cuda', preset=False, runs={folder!r}, progress='quiet',\n"
                    "    trackers=(), eval_episodes=1, callbacks=[lambda trainer: ends.append(time.time())],\n"
                    f"    **json.loads({words!r}))\n"
                    "print(json.dumps([run.seconds, run.steps, ends[-1]]))"
                )
                done = subprocess.run(
                    [sys.executable, "-c", code], env={**os.environ, **caches}, capture_output=True, text=True, check=True
                )
                seconds, steps, ended = json.loads(done.stdout.splitlines()[-1])
                found[state] = {"wall": ended - began, "training": seconds, "steps": steps}
        self.found["cold"] = found

    def learning(self) -> None:
        """Every setting, from five seeds: what the policy is worth after so many steps."""
        found = self.found.setdefault("learning", {})
        for name in self.names:
            found[name] = [self._learn(SETTINGS[name], seed) for seed in range(1 if self.quick else SEEDS)]

    def _learn(self, setting: Setting, seed: int) -> dict[str, Any]:
        parts = self.parts(setting.env, setting.words, seed)
        rollout, total = parts.rollout, 512 if self.quick else setting.steps
        precision = "float32" if self.quick else setting.words.get("precision", "tf32")
        curve: list[tuple[float, int, float]] = []
        with torch_settings(1, precision, rollout.device):
            parts.collector.prepare(rollout)
            parts.learner.prepare(rollout)
            self.wait()
            began, steps, reached = time.perf_counter(), 0, 0
            while steps < total and reached < REACHED:
                episodes = train(parts, steps / total)
                steps += rollout.num_steps * rollout.num_rows
                if episodes.count:
                    mean = float(episodes.returns.mean())
                    curve.append((time.perf_counter() - began, steps, mean))
                    reached = reached + 1 if setting.until_goal and mean >= setting.goal * MARGIN else 0
            self.wait()
            seconds = time.perf_counter() - began
            count = 5 if self.quick else 200
            played = evaluate_policy(
                parts.policy, setting.env, count, deterministic=False, seed=seed, num_envs=count, device=self.device
            )
        parts.close()
        kept = curve[:: max(1, len(curve) // 60)]
        return {"seed": seed, "seconds": seconds, "steps": steps, "return": played.mean, "curve": kept}


def small(words: dict[str, Any]) -> dict[str, Any]:
    """The settings that make a run tiny, of those that it has."""
    return {name: size for name, size in SMALL.items() if name in words} | {"precision": "float32"}


def train(parts: Parts, progress: float = 0.0) -> Any:
    """One rollout and one update; returns the episodes that were reported."""
    parts.collector.load_weights(parts.learner.weights())
    episodes = parts.collector.collect(parts.rollout)
    parts.learner.update(parts.rollout, progress)
    return episodes


def kernel_name(key: str, setting: str) -> str:
    """What a kernel is called in the table of a setting."""
    ours = {
        "_gradient_kernel": "MLP: loss and gradients", "_value_kernel": "MLP: values", "_record_kernel": "MLP: records",
        "_act_kernel": "act", "_pack_kernel": "CNN: pack weights", "_reduce_kernel": "CNN: sum partial gradients",
        "step_kernel": "env step", "outcome_rows": "outcome", "choose_rows": "sampling", "shuffle_rows": "shuffle",
        "gae_kernel": "advantages", "vtrace_kernel": "V-trace", "sum_partials": "optimizer", "sum_squares": "optimizer",
        "_update_kernel": "optimizer",
        "_moments_kernel": "moments of advantages", "_metrics_kernel": "metrics", "_conv_": "convolution",
        "_scan_": "minGRU scan", "_step_forward": "LSTM cell", "_step_backward": "LSTM cell", "_sum_kernel": "layers: backward",
    }  # fmt: skip
    if key in ("_loss_kernel", "_backward_kernel"):
        is_cnn = setting in ("breakout", "breakout-impala")
        if key == "_backward_kernel":
            return "CNN: backward" if is_cnn else "layers: backward"
        return "CNN: forward and loss" if is_cnn else "PPO loss"
    for part, name in ours.items():
        if part in key:
            return name
    if any(part in key for part in ("nvjet", "gemm", "cutlass", "splitK", "cublas")):
        return "matrix products"
    if any(part in key for part in ("index", "gather", "scatter")):
        return "gathering minibatches"
    if "reduce" in key:
        return "torch: sums"
    if "Memcpy" in key or "Memset" in key:
        return "copies"
    return "torch: elementwise"


def floors(found: dict[str, Any], name: str) -> list[list[str]]:
    """Rows: kernel, time, bytes, operations, floor and how near it is."""
    rate, ops = found["ceilings"]["bytes"], found["ceilings"]["bf16"]
    words = SETTINGS[name].words
    steps, batch = words["num_steps"], words["num_envs"] * words["num_steps"]
    needs = {"advantages": (batch * 18, 0), "shuffle": (batch * 8, 0)}  # bytes and operations of all calls of one update
    if name == "cartpole-1-bf16":
        hidden, record = 64, 4 * 4 + 4 + 4 + 8  # the env's: state, steps, return, random stream
        forward = {out: 2 * (4 * hidden + hidden * hidden + hidden * out) for out in (1, 2)}
        needs |= {
            "act": (batch * (16 + 16 + 8 + 8 + 4 + 8), batch * forward[2]),
            "env step": (batch * (2 * record + 8 + 16 + 4 + 4), 0),
            "outcome": (batch * (4 + 4 + 4 + 16 + 4 + 4), 0),
            "MLP: values": (batch * (16 + 4) * (1 + 2 / steps), batch * forward[1] * (1 + 2 / steps)),
            "MLP: records": (batch * (16 + 8 + 4 + 4 + 4 + 32), 0),
            "MLP: loss and gradients": (batch * 2 * (8 + 32), batch * 3 * (forward[1] + forward[2])),
        }
    elif name == "breakout":
        forward = 2 * (64 * 16 * 36 + 1024 * 128 + 128 * 4)
        needs |= {
            "act": (batch * (400 + 400 + 8 + 8 + 4 + 4 + 8), batch * forward),
            "CNN: forward and loss": (batch * (8 + 400 + 8 + 4 * 4 + 256), batch * forward),
            "CNN: backward": (batch * (8 + 400 + 256), batch * 2 * forward),
        }
    rows = []
    for row in found["kernels"][name]:
        moved, computed = needs.get(row["kernel"], (0, 0))
        floor = max(moved / rate, computed / ops) * 1e6
        known = ["–"] * 4
        if floor:
            known = [f"{moved / 1e6:,.0f} MB", f"{computed / 1e9:,.1f} G", f"{floor:,.0f} µs"]
            known.append(f"{row['microseconds'] / floor:.1f}")
        rows.append([row["kernel"], f"{row['calls']:.0f}", f"{row['microseconds']:,.0f} µs", *known])
    return rows


def report(found: dict[str, Any]) -> str:
    """All tables, as far as their numbers are there."""
    blocks = []
    if "rates" in found:
        rows = []
        for name, rate in found["rates"].items():
            setting = SETTINGS.get(name)
            about = setting.about if setting else "CartPole, 1 epoch, observations normalized"
            asked = [
                short(number) if number else "–" for number in ((setting.rollouts, setting.at_least) if setting else (0, 0))
            ]
            numbers = [short(rate["rollout"]), asked[0], short(rate["train"]), asked[1]]
            rows.append([about, f"{rate['parameters']:,}", *numbers])
        header = ["setting", "parameters", "rollouts", "asked for", "training", "asked for"]
        blocks.append("### Steps per second\n\n" + table(header, rows))
    if "solve" in found:
        rows = [
            [str(run["seed"]), f"{run['seconds']:.3f} s", f"{run['steps']:,}", f"{run['evaluation']:.1f}"]
            for run in found["solve"]
        ]
        text = "### CartPole to 475 (kernels compiled)\n\n" + table(["seed", "training", "steps", "1,000 episodes"], rows)
        for state, cold in found.get("cold", {}).items():
            text += f"\n\nFrom process start to the end of training, {state}: {cold['wall']:.1f} s."
        blocks.append(text)
    if "learning" in found:
        rows = []
        for name, runs in found["learning"].items():
            setting, returns = SETTINGS[name], sorted(run["return"] for run in runs)
            steps, seconds = (max(run[name] for run in runs) for name in ("steps", "seconds"))
            met = f"{sum(value >= setting.goal for value in returns)} of {len(returns)}"
            numbers = [f"{statistics.median(returns):.3g}", f"{returns[0]:.3g}", met, f"{steps / 1e6:.0f}M", f"{seconds:.1f} s"]
            rows.append([setting.about, f"≥ {setting.goal:g}", *numbers])
        header = ["setting", "goal", "median", "worst", "seeds at goal", "most steps", "longest"]
        blocks.append("### Learning: 200 sampled episodes after training\n\n" + table(header, rows))
    if "gae" in found and "ceilings" in found:
        share = found["gae"]["bytes_per_second"] / found["ceilings"]["bytes"]
        blocks.append(
            f"Advantages of 65,536 × 128 steps: {found['gae']['microseconds']:.0f} µs, "
            f"{found['gae']['bytes_per_second'] / 1e12:.2f} TB/s, {share:.0%} of a copy's "
            f"{found['ceilings']['bytes'] / 1e12:.2f} TB/s."
        )
    if "sweep" in found:
        rows = [[f"{int(n):,}", short(rate["rollout"]), short(rate["train"])] for n, rate in found["sweep"].items()]
        blocks.append("### CartPole against num_envs (bf16, 1 epoch)\n\n" + table(["num_envs", "rollouts", "training"], rows))
    if "kernels" in found and "ceilings" in found:
        header = ["kernel", "calls", "time", "bytes", "operations", "floor", "× floor"]
        for name in found["kernels"]:
            words = SETTINGS[name].words
            about = f"{SETTINGS[name].about}, {words['num_envs'] * words['num_steps'] / 1e6:.1f}M steps"
            blocks.append(f"### One update of {about}, by kernel\n\n" + table(header, floors(found, name)))
    return "\n\n".join(blocks)


def plot(found: dict[str, Any]) -> None:
    """The time of one update by kernel beside its floor; and rates against num_envs, if they were measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = 2 if "sweep" in found else 1
    figure, axes = plt.subplots(1, panels, figsize=(6.5 * panels + 1, 4.6), layout="constrained", squeeze=False)
    (*left, right) = axes[0]
    for axis in left:
        sizes = [int(n) for n in found["sweep"]]
        for key, label in (("rollout", "rollouts"), ("train", "training, 1 epoch")):
            axis.plot(sizes, [rate[key] for rate in found["sweep"].values()], marker="o", label=label)
        axis.set(xscale="log", yscale="log", xlabel="num_envs", ylabel="steps per second", title="CartPole, 64×64, bf16")
        axis.grid(alpha=0.3)
        axis.legend()
    rows = floors(found, "cartpole-1-bf16")[:10]
    times = [float(row[2].split()[0].replace(",", "")) for row in rows]
    lowest = [0.0 if row[5] == "–" else float(row[5].split()[0].replace(",", "")) for row in rows]
    places = range(len(rows))
    right.barh(places, times, color="tab:blue", label="measured")
    right.barh(places, lowest, color="tab:orange", height=0.35, label="floor")
    right.set_yticks(places, [row[0] for row in rows])
    right.invert_yaxis()
    right.set(xlabel="µs of one update (2.1M steps, 1 epoch)", title="Where the time goes: CartPole, 64×64, bf16")
    right.legend()
    figure.savefig(RESULTS / "gpu.png", dpi=110)
    print("saved benchmarks/results/gpu.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=tuple(SETTINGS), help="whose rates and learning")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="tiny sizes; saves nothing")
    parser.add_argument("--plot", action="store_true", help="draw the last results")
    options = parser.parse_args()
    file = RESULTS / "gpu.json"
    if options.plot:
        plot(json.loads(file.read_text()))
        return
    bench = Bench(options.device, options.quick, options.settings)
    is_partial = set(options.parts) != set(PARTS) or set(options.settings) != set(SETTINGS)
    if file.exists() and not options.quick and is_partial:
        bench.found = {name: part for name, part in json.loads(file.read_text()).items() if name != "machine"}
    for part in options.parts:
        began = time.perf_counter()
        getattr(bench, part)()
        print(f"{part}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        if not options.quick:
            file.write_text(json.dumps({"machine": machine(), **bench.found}, indent=1) + "\n")
    text = report(bench.found)
    if not options.quick:
        gpu = torch.cuda.get_device_name()
        save("gpu", bench.found, f"# The device gear on one {gpu}\n\n{text}")
    print(text)


if __name__ == "__main__":
    main()
