"""What does a Ray cluster of collectors carry, and what limits it? Measured on this machine, then predicted for more of them.

python benchmarks/scale.py                      # saves benchmarks/results/scale-N-cores.md and .json
python benchmarks/scale.py --waits              # envs that sleep instead of computing, like simulators elsewhere
python benchmarks/scale.py --quick              # see that it runs: short rounds, nothing is saved
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
from gymnasium import spaces
from record import save, short, table
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

from hurtle.buffers.packed_rollout import Packing
from hurtle.buffers.rollout import Done, Rollout
from hurtle.contracts import Weights
from hurtle.native.threads import free_cores
from hurtle.policies.build import PolicyConfig, build_policy
from hurtle.runners.assembly import Parts, assemble
from hurtle.runners.ray_host import packed, unpacked
from hurtle.runners.settings import make_settings

ENVS, STEPS = 4, 64  # of each collector
ENV_SECONDS = (0.0001, 0.001, 0.01)
PARAMETERS = 10_000_000
IMAGE = 100_000  # bytes
MACHINES = {
    # On-demand list prices of AWS us-east-1 in 2025, Linux: c7i.4xlarge for collectors, c7i.8xlarge for the learner. One
    # collector per vCPU; a network of 12.5 Gbit/s, half of which is counted on.
    "1 ms, small observations": Machines(16, 12.5e9 / 8 / 2, 0.714, 1.428, 1e6),
    # The same collectors with a g6.12xlarge: CNNs learn faster there.
    "10 ms, images of 100 KB": Machines(16, 12.5e9 / 8 / 2, 0.714, 4.602, 1e5),
}
NOTE = (
    "Collecting alone, without updates: PPO's collectors take rollouts of {envs} envs × {steps} steps in turn, with weights "
    "that change each time. Linear is the rate of one collector times their number. The model: a rollout takes steps × (env + "
    "overhead per step), slowed in proportion to the cores in use, + overhead per rollout; the learner's process takes each "
    "one in turn; whatever is lowest is the bottleneck. Assumed: machines like this one, a learner of {updates}, one rollout "
    "from each collector per update, prices from a list."
)


class Waiting(gymnasium.Env):
    """An env whose steps take this long, computing or waiting."""

    action_space = spaces.Discrete(2)

    def __init__(self, seconds: float = 0.0, waits: bool = False, size: int = 16):
        self.seconds, self.waits = seconds, waits
        kind = (np.float32, -1, 1, (4,)) if size <= 16 else (np.uint8, 0, 255, (size,))
        self.observation_space = spaces.Box(kind[1], kind[2], kind[3], kind[0])
        self._obs = np.zeros(kind[3], kind[0])
        self._age = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode of 200 steps."""
        super().reset(seed=seed)
        self._age = 0
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take the time."""
        if self.waits:
            time.sleep(self.seconds)
        elif self.seconds:
            until = time.thread_time() + self.seconds
            while time.thread_time() < until:
                pass
        self._age += 1
        return self._obs, 1.0, self._age == 200, False, {}


@contextlib.contextmanager
def collectors(count: int, env: Any, num_steps: int = STEPS, num_envs: int = ENVS) -> Iterator[Parts]:
    """A run's collectors, ready."""
    with tempfile.TemporaryDirectory() as runs:
        settings = make_settings(
            "scale",
            {
                "runner": "ray", "num_collectors": count, "num_envs": count * num_envs, "num_steps": num_steps, "runs": runs,
                "backend": "serial", "preset": False, "minibatch_size": count * num_envs * num_steps, "collector_cpus": 0.5,
            },
        )  # fmt: skip
        parts = assemble(settings, env)
        try:
            parts.collector.load_weights(parts.learner.weights())
            parts.collector.prepare(parts.rollout)
            yield parts
        finally:
            parts.close()


def collect_for(parts: Parts, seconds: float) -> tuple[int, float]:
    """Collect for so long; returns rollouts of single collectors and seconds."""

    def once(version: int) -> None:
        weights = parts.learner.weights()
        parts.collector.load_weights(Weights(weights.flat, version, weights.buffers))
        assert parts.collector.collect(parts.rollout) is not None

    for version in range(3):
        once(version)
    began, updates = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds or updates < 2:
        once(3 + updates)
        updates += 1
    return updates * len(parts.rollout.ids), elapsed


def counts_up_to(cores: int) -> list[int]:
    """1, 2, 4 … collectors, up to one per core."""
    return [2**k for k in range(int(math.log2(max(1, cores))) + 1)]


def measure_rates(seconds: float, waits: bool, counts: list[int]) -> list[dict[str, float]]:
    """Collection rates, for each time of a step and number of collectors."""
    found = []
    for env_seconds in ENV_SECONDS:
        for count in counts:
            with collectors(count, partial(Waiting, env_seconds, waits)) as parts:
                rollouts, elapsed = collect_for(parts, seconds)
            rate = rollouts * ENVS * STEPS / elapsed
            found.append(
                {"env_seconds": env_seconds, "collectors": count, "rollouts": rollouts, "seconds": elapsed, "rate": rate}
            )
            print(f"env of {env_seconds * 1e3:g} ms, {count} collectors: {short(rate)} steps/s", flush=True)
    return found


def measure_overheads(seconds: float) -> list[tuple[int, int, float, float]]:
    """Rollouts of a single collector with envs that take no time, of several lengths: what `fit` needs."""
    found = []
    for num_steps in (4, 64, 512):
        with collectors(1, partial(Waiting, 0.0), num_steps) as parts:
            rollouts, elapsed = collect_for(parts, seconds)
        found.append((ENVS * num_steps, rollouts, 0.0, elapsed))
    return found


def measure_taking(seconds: float, count: int) -> tuple[float, float]:
    """Seconds of the learner's process per rollout that is ready, and bytes per second that it joins."""
    with collectors(count, partial(Waiting, 0.0), num_steps=1, num_envs=1) as parts:
        rollouts, elapsed = collect_for(parts, seconds)
    policy = policy_of(IMAGE)
    parts_of = [Rollout(policy, STEPS, ENVS) for _ in range(2)]
    whole = Rollout(policy, STEPS, 2 * ENVS)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        whole.join(parts_of, [0, ENVS])
        times.append(time.perf_counter() - began)
    return elapsed / rollouts, 2 * size_of(policy) / min(times)


def policy_of(size: int = 16, hidden: tuple[int, ...] = (64, 64)) -> Any:
    """A policy for `Waiting`."""
    env = Waiting(size=size)
    return build_policy(PolicyConfig(hidden_sizes=hidden if size <= 16 else (4,)), env.observation_space, env.action_space)


def size_of(policy: Any, done: Done = Done.BOOTSTRAP) -> int:
    """Bytes of a rollout on the wire."""
    rollout = Rollout(policy, STEPS, ENVS)
    rollout.done = done
    packing = Packing(rollout)
    return packing.packed(rollout, packing.move_into_block(rollout))[1].nbytes


class Receiver:
    """What a collector does with weights."""

    def take(self, weights: list[Any]) -> int:
        """Fetch them and make them tensors; returns their version."""
        return unpacked(ray.get(weights[0])).version


def measure_weights(counts: list[int], rounds: int) -> list[dict[str, float]]:
    """Seconds until all collectors have the weights of a large policy, from the learner's tensors on."""
    found = []
    for count in counts:
        receivers = [ray.remote(num_cpus=0.5)(Receiver).remote() for _ in range(count)]
        times = []
        for version in range(rounds + 1):
            weights = Weights(torch.zeros(PARAMETERS), version)
            began = time.perf_counter()
            reference = ray.put(packed(weights))
            assert ray.get([each.take.remote([reference]) for each in receivers]) == [version] * count
            times.append(time.perf_counter() - began)
        found.append({"collectors": count, "seconds": statistics.median(times[1:])})
        for each in receivers:
            ray.kill(each)
    return found


class Sender:
    """Sends a rollout of images as collectors do, and the same bytes bare."""

    def __init__(self) -> None:
        self.rollout = Rollout(policy_of(IMAGE), STEPS, ENVS)
        self.rollout.done = Done.BOOTSTRAP
        self.packing = Packing(self.rollout)
        self.block = self.packing.move_into_block(self.rollout)
        self.bare = np.zeros(self.block.nbytes, np.uint8)

    def rollout_of(self) -> Any:
        """As a collector."""
        return self.packing.packed(self.rollout, self.block)

    def bytes_of(self) -> Any:
        """Bare: `ray.put` of the same bytes, whose reference the learner gets."""
        return [ray.put(self.bare)]


def measure_images(rounds: int) -> dict[str, float]:
    """Bytes per second of rollouts with observations of 100 KB: bare, and until the learner can use them."""
    sender = ray.remote(num_cpus=0.5)(Sender).remote()
    policy = policy_of(IMAGE)
    part, whole, size = Rollout(policy, STEPS, ENVS), Rollout(policy, STEPS, ENVS), size_of(policy)
    packing = Packing(part)

    def ours() -> None:
        contents, block = ray.get(sender.rollout_of.remote())
        packing.lend(part, contents, block)
        whole.join([part], [0])
        packing.take_back(part)

    def bare() -> None:
        ray.get(ray.get(sender.bytes_of.remote())[0])

    times: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(rounds + 1):
        for name, work in (("ours", ours), ("bare", bare)):
            began = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - began)
    ray.kill(sender)
    return {name: size / statistics.median(taken[1:]) for name, taken in times.items()}


def check_simulation(found: Constants, rates: list[dict[str, float]], cores: int) -> list[list[str]]:
    """The model and the simulation beside what was measured."""
    rows = []
    for point in rates:
        work = Workload(point["env_seconds"], ENVS, STEPS, size_of(policy_of()) / ENVS / STEPS)
        count = int(point["collectors"])
        load = min(1.0, (count - 1) / max(1, cores - 1))
        simulated = simulate(count, collector_seconds(found, work, load), taking_seconds(found, work)).rate * work.steps
        rows.append(
            [
                f"{point['env_seconds'] * 1e3:g} ms", str(count), short(point["rate"]), short(simulated),
                f"{simulated / point['rate'] - 1:+.0%}",
            ]
        )  # fmt: skip
    return rows


def contention_of(found: Constants, rates: list[dict[str, float]], cores: int) -> float:
    """How much a collector slows down when all cores are in use, from the most and the fewest collectors."""
    slopes = []
    for env_seconds in ENV_SECONDS:
        points = {int(point["collectors"]): point for point in rates if point["env_seconds"] == env_seconds}
        most = max(points)
        load = (most - 1) / max(1, cores - 1)
        if load > 0:
            slopes.append((most * points[1]["rate"] / points[most]["rate"] - 1) / load)
    return max(0.0, statistics.median(slopes)) if slopes else 0.0


def predictions(found: Constants) -> list[list[str]]:
    """10, 100 and 1,000 machines: rate, bottleneck, cost, and lag by simulation."""
    rows = []
    for (name, machines), env_seconds, size in zip(MACHINES.items(), (0.001, 0.01), (16, IMAGE), strict=True):
        work = Workload(env_seconds, ENVS, STEPS, size_of(policy_of(size)) / ENVS / STEPS, PARAMETERS * 4.0)
        for count in (10, 100, 1000):
            rate, first, dollars = predict(found, work, machines, count)
            number, late = count * machines.cores, weights_seconds(work, machines, count)
            update = number * work.steps / machines.learner_rate
            simulated = simulate(
                number, collector_seconds(found, work, 1.0), taking_seconds(found, work), update, late, updates=12,
                link_seconds=work.steps * work.step_bytes / machines.network,
            )  # fmt: skip
            allowed = sorted(limits(found, work, machines, count).items(), key=lambda item: item[1])
            rows.append(
                [name, f"{count:,}", short(rate), first, f"{allowed[1][0]} ({short(allowed[1][1])})", f"${dollars:,.2f}",
                 short(simulated.rate * work.steps), f"{simulated.lag:.1f}"]
            )  # fmt: skip
    return rows


def queueing(found: Constants) -> list[list[str]]:
    """A simulation of 1,000 collectors with a slow env, beside the model."""
    rows = []
    for env_seconds in ENV_SECONDS:
        work = Workload(env_seconds, ENVS, STEPS, size_of(policy_of()) / ENVS / STEPS)
        one, taking = collector_seconds(found, work, 1.0), taking_seconds(found, work)
        simulated = simulate(1000, one, taking, updates=24)
        model = min(1000 / one, 1 / taking)
        rows.append(
            [f"{env_seconds * 1e3:g} ms", short(model * work.steps), short(simulated.rate * work.steps), f"{simulated.lag:.1f}",
             f"{simulated.idle_collectors:.0%}", f"{simulated.idle_learner:.0%}"]
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short rounds, at most two collectors; nothing is saved")
    parser.add_argument("--waits", action="store_true", help="envs sleep instead of computing")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each round")
    arguments = parser.parse_args()
    cores = free_cores()
    counts = counts_up_to(min(cores, 2) if arguments.quick else cores)
    seconds, rounds = (0.5, 2) if arguments.quick else (arguments.seconds, 9)
    ray.init(address="local", num_cpus=max(4, cores), include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        rates = measure_rates(seconds, arguments.waits, counts)
        per_step, per_rollout = fit(measure_overheads(seconds))
        take, copy_rate = measure_taking(seconds, counts[-1])
        weights, images = measure_weights(counts, rounds), measure_images(rounds)
    finally:
        ray.shutdown()
    found = Constants(per_step, per_rollout, take, copy_rate)
    found = Constants(per_step, per_rollout, take, copy_rate, contention_of(found, rates, cores))
    base = {point["env_seconds"]: point["rate"] for point in rates if point["collectors"] == 1}
    learners = " and ".join(f"{short(each.learner_rate)} steps/s" for each in MACHINES.values())
    advantages = size_of(policy_of(), Done.BOOTSTRAP | Done.ADVANTAGES)
    text = "\n\n".join(
        [
            f"# Collectors on a cluster: {cores} cores",
            NOTE.format(envs=ENVS, steps=STEPS, updates=learners),
            table(
                ["env", "collectors", "steps/s", "of linear"],
                [
                    [f"{p['env_seconds'] * 1e3:g} ms", str(int(p["collectors"])), short(p["rate"]),
                     f"{p['rate'] / p['collectors'] / base[p['env_seconds']]:.2f}"]
                    for p in rates
                ],
            ),
            "## On the wire",
            table(
                ["", "bytes per step"],
                [
                    ["4 floats", f"{size_of(policy_of()) / ENVS / STEPS:,.0f}"],
                    ["4 floats, with advantages", f"{advantages / ENVS / STEPS:,.0f}"],
                    ["100 KB", f"{size_of(policy_of(IMAGE)) / ENVS / STEPS:,.0f}"],
                ],
            ),
            table(
                ["weights of 10M parameters to", "seconds"],
                [[f"{int(w['collectors'])} collectors", f"{w['seconds']:.3f}"] for w in weights],
            ),
            f"Rollouts with observations of 100 KB: {images['ours'] / 1e6:,.0f} MB/s until they are joined, "
            f"{images['bare'] / 1e6:,.0f} MB/s by bare ray.put and ray.get: {images['ours'] / images['bare']:.0%}.",
            "## The model",
            f"Overhead {per_step * 1e6:.0f} µs per step and {per_rollout * 1e3:.1f} ms per rollout; the learner's process "
            f"{take * 1e3:.2f} ms per rollout and {copy_rate / 1e9:.1f} GB/s; {found.contention:.0%} slower with all cores "
            "in use.",
            table(["env", "collectors", "measured", "simulated", "off by"], check_simulation(found, rates, cores)),
            table(
                ["1,000 collectors, env of", "model", "simulated", "lag", "collectors wait", "learner waits"], queueing(found)
            ),
            "## More machines, on paper",
            table(
                ["", "machines", "steps/s", "bottleneck", "then", "1B steps", "simulated", "lag"], predictions(found)
            ),
        ]
    )  # fmt: skip
    print(f"\n{text}")
    if not arguments.quick:
        name = f"scale-{cores}-cores" + ("-waiting" if arguments.waits else "")
        save(name, {"rates": rates, "weights": weights, "images": images, "constants": vars(found)}, text)


if __name__ == "__main__":
    main()
