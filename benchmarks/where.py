"""Where the time of the native gear goes: one update of PPO on CartPole, split into its parts, on one thread.

Kernels are timed alone, on tiles as the update has them, and multiplied by how often it calls them; what is left of a compiled
call is "rest" (copying, losses, sums, optimizer), and what is left of the update is Python.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from record import RESULTS, save, table

from hurtle.kernels.cpu import network
from hurtle.kernels.loader import load_kernels
from hurtle.runners.assembly import Parts, assemble
from hurtle.runners.settings import make_settings

SETTINGS = {
    "8 × 128, minibatch 256": {"num_envs": 8, "num_steps": 128, "minibatch_size": 256},
    "64 × 128, minibatch 2048": {"num_envs": 64, "num_steps": 128, "minibatch_size": 2048},
}
EPOCHS, TILE = 4, 64
STAGES = ("collect: env", "collect: networks", "collect: sampling", "collect: rest", "learn: forward", "learn: backward",
          "learn: heads", "learn: rest", "Python")  # fmt: skip
NONE = np.zeros(0, np.int32)  # no lists of non-zeros
KERNELS = load_kernels()
call_forward, call_backward = KERNELS.network.call_forward, KERNELS.network.call_backward
call_sample, call_score, call_gradient = (getattr(KERNELS.head_calls, f"call_{n}") for n in ("sample", "score", "gradient"))


@njit(nogil=True)
def run_forward(address, weights, layers, first, last, x, inputs, rows, work, times):
    for _ in range(times):
        call_forward(address, weights, layers, first, last, x, 0, inputs, rows, work, NONE)


@njit(nogil=True)
def run_backward(address, weights, layers, first, last, x, inputs, work, slopes, gradient, times):
    for _ in range(times):
        call_backward(address, weights, layers, first, last, x, 0, inputs, TILE, work, slopes, gradient, 0, NONE)


@njit(nogil=True)
def run_sample(address, nvec, outputs, stride, rows, some, masks, ints, scratch, times):
    for _ in range(times):
        call_sample(
            address, 0, nvec, outputs, 0, stride, rows, some, 0, some, masks, 0, 0, ints, 0, some, 0, some, 0, scratch
        )  # fmt: skip


@njit(nogil=True)
def run_heads(score, gradient, nvec, outputs, stride, some, masks, ints, more, slopes, scratch, times):
    for _ in range(times):
        call_score(score, 0, nvec, outputs, 0, stride, TILE, some, 0, masks, 0, 0, ints, some, more, more, scratch)
        call_gradient(
            gradient, 0, nvec, outputs, 0, stride, TILE, some, 0, masks, 0, 0, ints, some, more, more, scratch,
            slopes, 0, stride, some, 0,
        )  # fmt: skip


def best(job: Callable[[], Any], rounds: int) -> float:
    """Seconds of the fastest of many calls."""
    job()
    found = np.inf
    for _ in range(rounds):
        began = time.perf_counter()
        job()
        found = min(found, time.perf_counter() - began)
    return found


def each(job: Callable[..., None], *arguments: Any, rounds: int) -> float:
    """Seconds of one of many calls inside compiled code."""
    return best(lambda: job(*arguments, 20), rounds) / 20


def split(settings: dict[str, int], rounds: int) -> dict[str, float]:
    """Seconds of each stage in one update."""
    more = {"preset": False, "num_epochs": EPOCHS, "num_workers": 1, "gear": "native"}
    parts = assemble(make_settings("cartpole", {**settings, **more}), "cartpole")

    def train() -> None:
        parts.collector.load_weights(parts.learner.weights())
        parts.collector.collect(parts.rollout)
        parts.learner.update(parts.rollout)

    try:
        update = best(train, rounds)
        stages = collect_stages(parts, rounds) | learn_stages(parts, rounds)
    finally:
        parts.close()
    return {**stages, "Python": update - sum(stages.values())}


def collect_stages(parts: Parts, rounds: int) -> dict[str, float]:
    collector: Any = parts.collector
    plan, rows, steps = collector._plan, collector.rows.num_rows, parts.rollout.num_steps
    batch = collector._batch
    whole = best(lambda: collector._collect_together(collector._shards_for(1), 0, steps), rounds)
    step = batch.functions.step_envs
    envs = best(lambda: [step(batch.handle, batch.actions, True, 0, collector.rows.num_envs) for _ in range(10)], rounds) / 10
    tile, count, last = Tile(plan), min(rows, TILE), len(plan.layers)
    forward = plan.compiled()[0], tile.weights, plan.layers
    x = tile.x, plan.num_inputs
    actor = each(run_forward, *forward, 0, plan.split, *x, count, tile.work, rounds=rounds)
    critic = each(run_forward, *forward, plan.split, last, *x, TILE, tile.work, rounds=rounds)
    outputs = KERNELS.head_calls.sample_address(0), plan.nvec, tile.work, tile.stride, count
    sample = each(run_sample, *outputs, tile.some, tile.masks, tile.ints, tile.scratch, rounds=rounds)
    tiles = steps * -(-rows // TILE)
    found = {"env": envs * steps, "networks": actor * tiles + critic * steps * rows / TILE, "sampling": sample * tiles}
    return {f"collect: {name}": value for name, value in {**found, "rest": max(0.0, whole - sum(found.values()))}.items()}


def learn_stages(parts: Parts, rounds: int) -> dict[str, float]:
    learner: Any = parts.learner
    native = learner.epochs.native
    plan, minibatches = native.plan, len(native._kept["bounds"]) - 1
    whole = best(lambda: native._call(0, minibatches, 1), rounds)
    tile, last = Tile(plan), len(plan.layers)
    forward, backward = plan.compiled()
    network_of = tile.weights, plan.layers, 0, last, tile.x, plan.num_inputs
    fore = each(run_forward, forward, *network_of, TILE, tile.work, rounds=rounds)
    back = each(run_backward, backward, *network_of, tile.work, tile.slopes, tile.gradient, rounds=rounds)
    addresses = KERNELS.head_calls.score_address(0), KERNELS.head_calls.gradient_address(0)
    outputs = plan.nvec, tile.work, tile.stride, tile.some, tile.masks, tile.ints, tile.more, tile.slopes, tile.scratch
    heads = each(run_heads, *addresses, *outputs, rounds=rounds)
    tiles = parts.rollout.valid.numel() * EPOCHS / TILE
    found = {"forward": fore * tiles, "backward": back * tiles, "heads": heads * tiles}
    return {f"learn: {name}": value for name, value in {**found, "rest": max(0.0, whole - sum(found.values()))}.items()}


class Tile:
    """Arrays for a tile of rows of a network, filled with anything."""

    def __init__(self, plan: Any):
        rng = np.random.default_rng(0)
        self.weights = plan.new_weights()
        plan.pack(rng.standard_normal(plan.num_weights).astype(np.float32) * np.float32(0.1), self.weights)
        self.x, self.slopes = (rng.standard_normal(n).astype(np.float32) for n in (TILE * plan.num_inputs, plan.work_size))
        self.work, self.gradient = np.zeros(plan.work_size, np.float32), np.zeros(plan.trained_size, np.float32)
        self.some, self.more = rng.random((2, TILE * 4), np.float32)
        self.scratch = np.zeros(KERNELS.heads.scratch_size(plan.head_kind, plan.nvec), np.float32)
        self.ints, self.masks = np.zeros(TILE, np.int64), np.ones(1, np.bool_)
        self.stride = int(plan.layers[plan.actor, network.STRIDE])


def plot(found: dict[str, dict[str, float]], steps: dict[str, int]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.add_subplot()
    colours = ["#0b3954", "#1f6fb2", "#6aaed6", "#c6dbef", "#7f2704", "#d1495b", "#f4a582", "#fddbc7", "#9aa5b1"]
    for row, (name, stages) in enumerate(found.items()):
        left = 0.0
        for stage, colour in zip(STAGES, colours, strict=True):
            width = 1e9 * stages[stage] / steps[name]
            axes.barh(row, width, left=left, color=colour, label=stage if row == 0 else None)
            left += width
    axes.set_yticks(range(len(found)), list(found))
    axes.set_xlabel("nanoseconds per env step, one thread")
    axes.legend(ncols=3, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / "where.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="see that it runs; nothing is kept")
    chosen = parser.parse_args()
    found = {name: split(settings, 2 if chosen.quick else 60) for name, settings in SETTINGS.items()}
    steps = {name: settings["num_envs"] * settings["num_steps"] for name, settings in SETTINGS.items()}

    def cell(name: str, stage: str) -> str:
        seconds, whole = found[name][stage], sum(found[name].values())
        return f"{1e9 * seconds / steps[name]:.0f} ns ({100 * seconds / whole:.0f} %)"

    rows = [[stage, *(cell(name, stage) for name in found)] for stage in STAGES]
    rates = [f"{steps[name] / sum(stages.values()):,.0f} steps/s" for name, stages in found.items()]
    text = "# Where the time goes: PPO on CartPole, native gear, one thread, per env step\n\n"
    text += table(["stage", *found], [*rows, ["all", *rates]])
    print(text)
    if not chosen.quick:
        plot(found, steps)
        save("where", {"seconds": found, "steps": steps}, text)


if __name__ == "__main__":
    main()
