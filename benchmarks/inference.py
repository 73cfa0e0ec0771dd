"""How long a call of a trained policy takes: hurtle.load(file).act(obs), ONNX Runtime and torch on the same network, in turns.

python benchmarks/inference.py            # saves benchmarks/results/inference.md and .json
python benchmarks/inference.py --quick    # see that it runs: few short rounds, nothing is saved

A policy for 4 numbers and 2 actions is trained for a moment and exported. Each runtime gets an observation as an env gives it,
a float32 array, and must return an action that the env takes; what all of them chose is compared before anything is timed. ONNX
Runtime and torch run on one thread, which is their fastest here; torch runs the linear layers and an argmax, and nothing of
Hurtle's. "in a Numba loop" is `policy.native`, called by compiled code.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from record import Job, rates, save, table

import hurtle
from hurtle.deploy.exported import ExportedPolicy, onnx_session

SIZES = ((64, 64), (256, 256))
BATCHES = (1, 64)
GOALS = {"ONNX Runtime": 6.0, "torch eager": 25.0}
"""How many times faster the native runtime is meant to be with one observation and 64×64."""
GOAL_NATIVE = 1.0
"""Microseconds per observation of `policy.native`, 64×64."""
CALLS = 20
"""Calls between two looks at the clock."""


def exported(hidden: tuple[int, ...], folder: Path) -> tuple[Any, Path]:
    """A run of a moment with this network, and its file."""
    run = hurtle.train(
        "cartpole", total_steps=4096, num_envs=8, num_steps=128, hidden_sizes=hidden, eval_episodes=1, preset=False,
        runs=str(folder), progress="quiet", trackers=(),
    )  # fmt: skip
    return run, hurtle.export(run, folder / f"{hidden[0]}.onnx").path


def callers(run: Any, file: Path, batch: int) -> dict[str, Callable[[], Any]]:
    """What each runtime does with the same observations."""
    rng = np.random.default_rng(0)
    obs = rng.uniform(-1, 1, (batch, 4)).astype(np.float32)
    one = obs[0] if batch == 1 else obs
    native = hurtle.load(file)
    assert isinstance(native, ExportedPolicy)
    assert native.runtime == "native"
    session = onnx_session(file.read_bytes(), str(file))
    through_onnx = hurtle.load(file, runtime="onnxruntime")
    network = hurtle.load(run).module.network  # type: ignore[attr-defined]

    def onnx() -> Any:
        action = session.run(None, {"obs": one[None] if batch == 1 else one})[0]
        return action[0] if batch == 1 else action

    def eager() -> Any:
        with torch.inference_mode():
            logits = network.actor(network.actor_body.hidden(torch.from_numpy(one[None] if batch == 1 else one)))
            action = logits.argmax(-1)
            return action.item() if batch == 1 else action.numpy()

    found = {
        "hurtle, native": lambda: native.act(one),
        "ONNX Runtime": onnx,
        "torch eager": eager,
        "hurtle, ONNX Runtime": lambda: through_onnx.act(one),
    }
    expected = np.asarray(eager())
    for name, call in found.items():
        assert np.array_equal(np.asarray(call()), expected), name
    return found


def in_a_loop(file: Path) -> Job:
    """`policy.native` in compiled code, over many observations."""
    act = hurtle.load(file).native  # type: ignore[attr-defined]
    rows = np.random.default_rng(0).uniform(-1, 1, (1000, 4)).astype(np.float32)

    @njit(nogil=True)
    def loop(rows):  # type: ignore[no-untyped-def]
        total = 0
        for n in range(len(rows)):
            total += act(rows[n])
        return total

    assert loop(rows) == int(hurtle.load(file).act(rows).sum())

    def work() -> int:
        loop(rows)
        return len(rows)

    return work


def job(call: Callable[[], Any]) -> Job:
    """So many calls."""

    def calls() -> int:
        for _ in range(CALLS):
            call()
        return CALLS

    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few short rounds; saves nothing")
    options = parser.parse_args()
    seconds, rounds = (0.02, 2) if options.quick else (0.2, 9)
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for hidden in SIZES:
            run, file = exported(hidden, Path(folder))
            for batch in BATCHES:
                jobs = {name: job(call) for name, call in callers(run, file, batch).items()}
                if batch == 1:
                    jobs["in a Numba loop"] = in_a_loop(file)
                speeds = rates(jobs, seconds, rounds)
                found[f"{hidden[0]}×{hidden[1]}, batch {batch}"] = {name: 1e6 / rate for name, rate in speeds.items()}
    print(text := report(found))
    if not options.quick:
        save("inference", found, text)


def report(found: dict[str, dict[str, float]]) -> str:
    """The table, and how it compares with what is asked for."""
    names = list(next(iter(found.values())))
    rows = []
    for setting, times in found.items():
        cells = [f"{times[name]:.2f} µs" if name in times else "–" for name in names]
        ratios = [f"{times[name] / times['hurtle, native']:.1f}" for name in GOALS]
        rows.append([setting, *cells, *ratios])
    blocks = ["# One call of a trained policy", table(["policy", *names, *(f"× {name}" for name in GOALS)], rows)]
    first = next(iter(found.values()))
    for name, goal in GOALS.items():
        ratio = first[name] / first["hurtle, native"]
        blocks.append(f"Asked for: {goal:g}× as fast as {name} with one observation and 64×64; measured {ratio:.1f}×.")
    blocks.append(
        f"Asked for: {GOAL_NATIVE:g} µs an observation in compiled code, 64×64; measured {first['in a Numba loop']:.2f} µs."
    )
    return "\n\n".join(blocks)


if __name__ == "__main__":
    main()
