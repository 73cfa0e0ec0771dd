"""How much of a core's arithmetic the native gear's networks use: forward and backward of MLPs, width 32 … 512, depth 1 … 4.

One thread and tiles of 64 rows, as collecting and learning run them. The peak is measured in the same run: multiply-adds on
operands that never leave the first-level cache.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from gymnasium import spaces
from numba import njit
from record import rates, save, table

from hurtle.kernels.cpu import network
from hurtle.kernels.loader import load_kernels
from hurtle.policies.build import PolicyConfig, build_policy
from hurtle.policies.native_plan import plan_for
from hurtle.policies.network_plan import NetworkPlan

NONE = np.zeros(0, np.int32)  # no lists of non-zeros
KERNELS = load_kernels()
call_forward, call_backward, linear = KERNELS.network.call_forward, KERNELS.network.call_backward, KERNELS.gemm.linear
WIDE = KERNELS.gemm.PANEL
INPUTS, ROWS, DEPTH = 64, 64, 512
WIDTHS, DEPTHS = (32, 64, 128, 256, 512), (1, 2, 3, 4)


@njit(nogil=True)
def run_forward(address, weights, layers, x, work, times):
    for _ in range(times):
        call_forward(address, weights, layers, 0, layers.shape[0], x, 0, INPUTS, ROWS, work, NONE)


@njit(nogil=True)
def run_backward(address, weights, layers, x, work, slopes, gradient, times):
    for _ in range(times):
        call_backward(address, weights, layers, 0, layers.shape[0], x, 0, INPUTS, ROWS, work, slopes, gradient, 0, NONE)


@njit(nogil=True)
def run_peak(c, a, b, x, times):
    for _ in range(times):  # every row of B is the same one
        linear((c, 0, WIDE, WIDE), (a, 0, DEPTH), (b, 0, 0, 0), (x, 0, 0), 8, DEPTH, 1, WIDE)


def peak_job() -> Any:
    rng = np.random.default_rng(0)
    c, a, b, x = (rng.standard_normal(size).astype(np.float32) for size in (8 * WIDE, 8 * DEPTH, WIDE, WIDE))
    times = 200

    def job() -> int:
        run_peak(c, a, b, x, times)
        return times * 2 * 8 * DEPTH * WIDE

    return job


def network_jobs(width: int, depth: int, activation: str) -> dict[str, Any]:
    """Jobs that return the floating-point operations they did."""
    config = PolicyConfig(hidden_sizes=(width,) * depth, activation=activation, separate_networks=False)
    plan = plan_for(build_policy(config, spaces.Box(-1, 1, (INPUTS,)), spaces.Discrete(4)))
    rng = np.random.default_rng(0)
    weights = plan.new_weights()
    plan.pack((0.1 * rng.standard_normal(plan.num_weights)).astype(np.float32), weights)
    x, slopes = (rng.standard_normal(size).astype(np.float32) for size in (ROWS * INPUTS, plan.work_size))
    work, gradient = np.zeros(plan.work_size, np.float32), np.zeros(plan.trained_size, np.float32)
    forward, backward = plan.compiled()
    flops = {"forward": operations(plan, False), "backward": operations(plan, True)}
    times = max(1, int(2e7 / flops["backward"]))

    def run(which: str) -> Any:
        def job() -> int:
            if which == "forward":
                run_forward(forward, weights, plan.layers, x, work, times)
            else:
                run_backward(backward, weights, plan.layers, x, work, slopes, gradient, times)
            return times * flops[which]

        return job

    run("forward")()  # what backward works on
    return {which: run(which) for which in flops}


def operations(plan: NetworkPlan, backward: bool) -> int:
    """Multiplications and additions of one tile, those of padding and activations not counted."""
    sizes = [int(row[network.INPUTS] * row[network.OUTPUTS]) for row in plan.layers]
    if backward:  # by weights and by inputs; nobody asks for the gradient of observations
        return (
            2 * ROWS * sum(size * (1 if row[network.SOURCE] < 0 else 2) for size, row in zip(sizes, plan.layers, strict=True))
        )
    return 2 * ROWS * sum(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="see that it runs; nothing is kept")
    parser.add_argument("--activation", choices=("tanh", "relu"), default="tanh")
    chosen = parser.parse_args()
    widths, depths = (WIDTHS[:2], DEPTHS[:1]) if chosen.quick else (WIDTHS, DEPTHS)
    seconds, rounds = (0.01, 1) if chosen.quick else (0.05, 15)
    results: list[dict[str, Any]] = []
    for depth in depths:
        for width in widths:
            found = rates({"peak": peak_job(), **network_jobs(width, depth, chosen.activation)}, seconds, rounds)
            results.append({"depth": depth, "width": width, **{name: rate / 1e9 for name, rate in found.items()}})
            print(f"depth {depth} width {width}: " + ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in found.items()))
    peak = max(result["peak"] for result in results)
    rows = [
        [f"{r['depth']} × {r['width']}", *(f"{r[k]:.0f} ({100 * r[k] / r['peak']:.0f} %)" for k in ("forward", "backward"))]
        for r in results
    ]
    text = (
        f"# Arithmetic of the native gear's networks, one thread ({chosen.activation})\n\n"
        f"GFLOP/s and their part of the peak in the same rounds (best: {peak:.0f} GFLOP/s); "
        f"activations and padding cost time and count for nothing.\n\n"
        + table(["hidden layers", "forward", "backward"], rows)
    )  # fmt: skip
    print("\n" + text)
    if not chosen.quick:
        save("gemm" if chosen.activation == "tanh" else "gemm-relu", {"networks": results, "peak": peak}, text)


if __name__ == "__main__":
    main()
