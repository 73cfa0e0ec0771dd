"""How fast vectors of Python envs step, beside their peers in the same run.

python benchmarks/vector.py                             # all sections; a section whose packages are missing says so
python benchmarks/vector.py --sections delay images     # some: cartpole delay images emulation ray
python benchmarks/vector.py --sections delay --workers 6 24 --tag 16-cores     # pools on a larger host
python benchmarks/vector.py --plot                      # draw the committed results
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import vector_jobs as jobs
from record import RESULTS, save, short, table
from vector_envs import Constant, Delay, Images, calibrate, nested_space
from vector_jobs import Turns, make_jobs, ours

from hurtle.native.threads import free_cores

STUDY_ENVS = 64
"""Envs of the delay study: several for each worker, so that the deviation of single steps evens out."""


@dataclass(frozen=True)
class Effort:
    """How long and how much is measured."""

    seconds: float = 0.25
    """Each turn of each job."""
    rounds: int = 7
    workers: tuple[int, ...] = ()
    """Further pools in the delay study."""
    quick: bool = False

    @property
    def cores(self) -> int:
        """Cores that this process may use."""
        return free_cores()


@dataclass
class Outcome:
    """What a section found: numbers, tables, and how they compare with what we aim for."""

    results: dict[str, Any] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    targets: list[list[str]] = field(default_factory=list)

    def aim(self, what: str, measured: float | None, at_least: float | None = None, at_most: float | None = None) -> None:
        """Compare a figure with what we aim for."""
        goal = f"≥ {at_least:g}" if at_least is not None else f"≤ {at_most:g}"
        if measured is None:
            self.targets.append([what, goal, "not measured", "–"])
            return
        met = measured >= at_least if at_least is not None else measured <= (at_most or 0)
        self.targets.append([what, goal, f"{measured:.2f}", "yes" if met else "no"])

    def text(self) -> str:
        """The section as Markdown."""
        goals = [table(["target", "goal", "measured", "met"], self.targets)] if self.targets else []
        return "\n\n".join([*self.parts, *goals])


# CartPole -------------------------------------------------------------------------------------------------------------

cartpole = partial(gymnasium.make, "CartPole-v1", disable_env_checker=True)
NOT_PYTHON_ENVS = ("EnvPool (C++ env)", "hurtle native (compiled env)")


def measure_cartpole(effort: Effort) -> Outcome:
    outcome, cores, rows = Outcome(), effort.cores, []
    for size in (8,) if effort.quick else (8, 64):
        makers = {  # those that fork come first, before there are threads
            "Gymnasium Async": jobs.gymnasium_async(cartpole, size),
            "SB3 SubprocVecEnv": jobs.sb3(cartpole, size, subprocesses=True),
            jobs.SPINNING: jobs.pufferlib(cartpole, size, workers=min(cores, size)),
            "PufferLib Serial": jobs.pufferlib(cartpole, size, workers=None),
            "Gymnasium Sync": jobs.gymnasium_sync(cartpole, size),
            "SB3 DummyVecEnv": jobs.sb3(cartpole, size, subprocesses=False),
            "hurtle serial": ours("CartPole-v1", size, backend="serial"),
            "hurtle process": ours("CartPole-v1", size, backend="process"),
            "hurtle auto": ours("CartPole-v1", size),
            "EnvPool (C++ env)": jobs.envpool("CartPole-v1", size, cores),
            "hurtle native (compiled env)": ours("cartpole", size),
        }
        with contextlib.ExitStack() as stack:
            made, left_out = make_jobs(makers, stack)
            turns = Turns(made, effort.seconds / 3, effort.rounds * 3)  # short turns: neighbours in time are alike
        peers = [name for name in made if not name.startswith("hurtle") and name not in NOT_PYTHON_ENVS]
        fastest = max(peers, key=turns.rate)
        for name in makers:
            over = [f"{turns.ratio(us, name):.2f}x" for us in ("hurtle auto", "hurtle process")] if name in made else ["–", "–"]
            rows.append([str(size), name, short(turns.rate(name)) if name in made else "left out", *over])
        outcome.results[str(size)] = {"steps_per_second": turns.rates, "left_out": left_out, "fastest_peer": fastest}
        outcome.aim(f"auto / {fastest}, the fastest peer, {size} envs", turns.ratio("hurtle auto", fastest), at_least=0.97)
        if size == 64:
            outcome.aim("process / Gymnasium Async, 64 envs", turns.ratio("hurtle process", "Gymnasium Async"), at_least=10)
            outcome.aim("process / serial, 64 envs", turns.ratio("hurtle process", "hurtle serial"), at_least=1.3)
    outcome.parts.append(
        "### CartPole-v1, steps/s\n\n" + table(["envs", "vector", "steps/s", "auto / it", "process / it"], rows)
    )
    return outcome


# The delay study ------------------------------------------------------------------------------------------------------


def measure_delay(effort: Effort) -> Outcome:
    outcome, cores = Outcome(), effort.cores
    loops_per_second = calibrate()
    outcome.results["loops_per_second"] = loops_per_second
    _measure_overhead(outcome, effort)
    rows, delays, deviations = [], (1e-2, 1e-3, 1e-4), (0.0, 0.1, 1.0)
    if effort.quick:
        delays, deviations = (1e-4,), (1.0,)
    sizes = [2 * cores, *effort.workers]  # of the pools: one env per worker
    for delay in delays:
        for deviation in deviations:
            env = partial(Delay, int(delay * loops_per_second), deviation)
            calls = max(2, round(effort.seconds * 2 / delay / STUDY_ENVS))
            share = int(delay * loops_per_second * STUDY_ENVS / cores)
            makers = {
                "bare processes": jobs.bare_processes(cores, share, calls, STUDY_ENVS),
                "hurtle serial": ours(env, STUDY_ENVS, calls, backend="serial"),
                "hurtle process": ours(env, STUDY_ENVS, calls, backend="process", num_workers=cores),
            }
            for size in sizes:
                turns_each = max(4, round(calls * STUDY_ENVS / size))
                pool = {"backend": "process", "num_workers": size}
                makers[f"hurtle sync {size}"] = ours(env, size, turns_each, **pool)
                makers[f"hurtle pool {size}"] = ours(env, size, turns_each, batch_size=size // 2, **pool)
            with contextlib.ExitStack() as stack:
                # One call each: the same steps in every round.
                turns = Turns(make_jobs(makers, stack)[0], 0.0, effort.rounds, budget=16.0)
            cell = f"{delay:g} s, {deviation:.0%}"
            outcome.results[cell] = turns.rates
            control = turns.ratio("bare processes", "hurtle serial")
            speed_up = turns.ratio("hurtle process", "hurtle serial")
            pools = [turns.ratio(f"hurtle pool {size}", f"hurtle sync {size}") for size in sizes]
            rows.append([cell, *(f"{value:.2f}x" for value in (control, speed_up, *pools))])
            print(rows[-1], flush=True)
            if delay >= 1e-3 and cores == 2:
                outcome.aim(f"process / serial, {cell}", speed_up, at_least=1.8)
            if deviation == 1.0 and delay >= 1e-3:
                for size, gain in zip(sizes, pools, strict=True):
                    outcome.aim(f"pool / sync, {size} workers, {cell}", gain, at_least=1.3)
    header = ["work of a step, deviation", f"{cores} bare processes / serial", f"process / serial, {STUDY_ENVS} envs"]
    header += [f"pool / sync, {size} workers" for size in sizes]
    outcome.parts.append(
        "### The delay study: envs that compute\n\nBare processes share out the same work without deviation and wait for each "
        f"other after each batch: what the cores give. Process: {cores} workers. Pool: one env per worker, batches of half the "
        "envs; sync: the same workers, all envs in each batch.\n\n" + table(header, rows)
    )
    return outcome


def _measure_overhead(outcome: Outcome, effort: Effort) -> None:
    """What a batch costs beside the envs: with an env that does nothing."""
    counts = sorted({1, 2, min(effort.cores, 16)})
    makers = {f"{count} workers": ours(Delay, count, 100, backend="process", num_workers=count) for count in counts}
    makers["8 envs, 2 workers"] = ours(Delay, 8, 100, backend="process", num_workers=2)
    makers["serial, 2 envs"] = ours(Delay, 2, 100, backend="serial")
    envs = {**{f"{count} workers": count for count in counts}, "8 envs, 2 workers": 8, "serial, 2 envs": 2}
    with contextlib.ExitStack() as stack:
        turns = Turns(make_jobs(makers, stack)[0], effort.seconds / 3, effort.rounds * 3)
    micros = {name: turns.micros(name) * envs[name] for name in makers}
    outcome.results["overhead_us"] = micros
    rows = [[name, f"{value:.0f} µs"] for name, value in micros.items()]
    outcome.parts.append("### A batch of envs that do nothing\n\n" + table(["one env per worker", "a batch"], rows))
    outcome.aim("µs a batch, 2 workers", micros["2 workers"], at_most=60)


# Images ---------------------------------------------------------------------------------------------------------------


def measure_images(effort: Effort) -> Outcome:
    outcome, peer = Outcome(), "Gymnasium Async, shared memory"
    makers = {
        f"{peer}, copy=True (its default)": jobs.gymnasium_async(Images, 8),
        f"{peer}, copy=False": jobs.gymnasium_async(Images, 8, copy=False),
        "hurtle process (views)": ours(Images, 8, backend="process"),
        "hurtle process, copy=True": ours(Images, 8, backend="process", copy=True),
        "hurtle serial (views)": ours(Images, 8, backend="serial"),
    }
    with contextlib.ExitStack() as stack:
        turns = Turns(make_jobs(makers, stack)[0], effort.seconds, effort.rounds)
    rows = [[name, short(turns.rate(name)), f"{turns.ratio('hurtle process (views)', name):.2f}x"] for name in makers]
    outcome.results = {"steps_per_second": turns.rates, "copies_on_reading": _copies_on_reading()}
    for copy in ("copy=True (its default)", "copy=False"):
        outcome.aim(f"process / {peer}, {copy}", turns.ratio("hurtle process (views)", f"{peer}, {copy}"), at_least=1.5)
    outcome.aim("copies on the reading side", outcome.results["copies_on_reading"], at_most=0)
    outcome.parts.append("### 100 KB observations, 8 envs, steps/s\n\n" + table(["vector", "steps/s", "process / it"], rows))
    return outcome


def _copies_on_reading() -> int:
    """0 if what `step` returns is the memory that the workers write into, else 1."""
    import hurtle

    vec = hurtle.make_vec(Images, 2, backend="process", num_workers=1)
    try:
        first, _ = vec.reset(seed=0)
        second = vec.step(np.zeros(2, np.int64))[0]
        return 0 if np.shares_memory(first, second) else 1
    finally:
        vec.close()


# Emulation ------------------------------------------------------------------------------------------------------------


def measure_emulation(effort: Effort) -> Outcome:
    from hurtle.emulation.flat_layout import SpaceLayout
    from hurtle.emulation.wrap import emulate

    outcome, space = Outcome(), nested_space()
    value, layout = space.sample(), SpaceLayout(space)
    flat_box = gymnasium.spaces.Box(-1, 1, (16,), np.float32)
    nested, flat = Constant(space), Constant(flat_box)
    made = {
        "gymnasium flatten": _repeat(lambda: gymnasium.spaces.utils.flatten(space, value)),
        "SpaceLayout.writer": _repeat(partial(layout.writer(layout.memory()), value)),
        "nested env": _steps_of(nested),
        "nested env, emulated": _steps_of(emulate(nested)),
        "nested env, Gymnasium FlattenObservation": _steps_of(gymnasium.wrappers.FlattenObservation(nested)),
        "flat env": _steps_of(flat),
        "flat env, emulated": _steps_of(emulate(flat)),
    }
    turns = Turns(made, effort.seconds / 2, effort.rounds)
    nested_cost = turns.extra_micros("nested env, emulated", "nested env")
    flat_cost = turns.extra_micros("flat env, emulated", "flat env")
    outcome.results = {"per_second": turns.rates, "nested_emulation_us": nested_cost, "flat_emulation_us": flat_cost}
    rows = [[name, f"{turns.micros(name):.2f} µs"] for name in made]
    rows += [["emulation of a nested step", f"{nested_cost:.2f} µs"], ["emulation of a flat step", f"{flat_cost:.2f} µs"]]
    outcome.parts.append(f"### Emulation: a nested dict of {len(layout.leaves)} leaves\n\n" + table(["", "time"], rows))
    outcome.aim("flatten / writer", turns.ratio("SpaceLayout.writer", "gymnasium flatten"), at_least=8)
    outcome.aim("flatten / emulation of a step", turns.micros("gymnasium flatten") / nested_cost, at_least=8)
    outcome.aim("µs to emulate a flat step", flat_cost, at_most=3)
    return outcome


def _repeat(call: Callable[[], Any], times: int = 100) -> jobs.Job:
    def job() -> int:
        for _ in range(times):
            call()
        return times

    return job


def _steps_of(env: Any) -> jobs.Job:
    env.reset(seed=0)
    return _repeat(partial(env.step, np.int64(0)))


# Ray ------------------------------------------------------------------------------------------------------------------


def measure_ray(effort: Effort) -> Outcome:
    outcome, loops_per_second, rows = Outcome(), calibrate(), []
    num_workers = min(effort.cores, 8)
    cases: dict[str, tuple[Any, int, int]] = {
        "CartPole-v1, 8 envs": ("CartPole-v1", 8, 5),
        "CartPole-v1, 64 envs": ("CartPole-v1", 64, 5),
    }
    delays = (3e-4,) if effort.quick else (3e-4, 1e-3, 3e-3, 1e-2)
    named = {delay: f"{delay * 1e3:g} ms of work, 8 envs" for delay in delays}
    cases |= {named[delay]: (partial(Delay, int(delay * loops_per_second)), 8, 2) for delay in delays}
    ratios = {}
    for case, (env, size, calls) in cases.items():
        makers = {"hurtle serial": ours(env, size, calls, backend="serial")}
        for backend in ("process", "ray"):
            makers[f"hurtle {backend}"] = ours(env, size, calls, backend=backend, num_workers=num_workers)
        with contextlib.ExitStack() as stack:
            made, left_out = make_jobs(makers, stack)
            if "hurtle ray" in left_out:
                raise ImportError(left_out["hurtle ray"])
            turns = Turns(made, effort.seconds, effort.rounds)
        outcome.results[case] = turns.rates
        ratios[case] = turns.ratio("hurtle ray", "hurtle serial")
        over = [f"{ratios[case]:.2f}x", f"{turns.ratio('hurtle ray', 'hurtle process'):.2f}x"]
        rows.append([case, short(turns.rate("hurtle ray") / size), short(turns.rate("hurtle ray")), *over])
        print(rows[-1], flush=True)
    pays = [delay for k, delay in enumerate(delays) if all(ratios[named[longer]] > 1 for longer in delays[k:])]
    outcome.results["pays_from_seconds_a_step"] = pays[0] if pays else None
    note = (
        f"It beats serial from {pays[0] * 1e3:g} ms a step on."
        if pays
        else f"It beats serial at none of these up to {delays[-1]:g} s."
    )
    header = ["env", "calls/s", "steps/s", "ray / serial", "ray / process"]
    outcome.parts.append(f"### Ray, {num_workers} workers on this machine\n\n{table(header, rows)}\n\n{note}")
    return outcome


# All together ---------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Effort], Outcome]] = {
    "cartpole": measure_cartpole,
    "delay": measure_delay,
    "images": measure_images,
    "emulation": measure_emulation,
    "ray": measure_ray,
}


def plot() -> None:
    """Draw what has been recorded: CartPole and the delay study."""
    if missing := [name for name in ("cartpole", "delay") if not (RESULTS / f"vector-{name}.json").exists()]:
        return print(f"No plot: run the sections {' and '.join(missing)} first.")
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    found = json.loads((RESULTS / "vector-cartpole.json").read_text())["64"]["steps_per_second"]
    rates = sorted(((float(np.median(values)), name) for name, values in found.items()), reverse=False)
    colours = ["tab:orange" if name.startswith("hurtle") else "tab:gray" for _, name in rates]
    left.barh([name for _, name in rates], [rate for rate, _ in rates], color=colours)
    left.set(xscale="log", xlabel="steps/s", title="64 CartPoles")
    study = json.loads((RESULTS / "vector-delay.json").read_text())
    cells = [cell for cell in study if " s, " in cell]
    series = {f"process / serial, {STUDY_ENVS} envs": ("hurtle process", "hurtle serial")}
    pools = sorted({int(name.split()[-1]) for cell in cells for name in study[cell] if name.startswith("hurtle pool")})
    series |= {f"pool / sync, {size} workers": (f"hurtle pool {size}", f"hurtle sync {size}") for size in pools}
    series["bare processes / serial"] = ("bare processes", "hurtle serial")
    for k, (label, (name, over)) in enumerate(series.items()):
        ratios = [float(np.median(np.divide(study[cell][name], study[cell][over]))) for cell in cells]
        right.bar(np.arange(len(cells)) + k / (len(series) + 1), ratios, 1 / (len(series) + 1), label=label)
    right.set_xticks(np.arange(len(cells)) + 0.3, [cell.replace(", ", "\n") for cell in cells], fontsize=7)
    right.axhline(1, color="black", lw=0.5)
    right.set(ylabel="speed-up", title="Envs that compute: work of a step, and its deviation")
    right.set_ylim(0, 1.3 * right.get_ylim()[1])  # room for the legend
    right.legend(fontsize=8, loc="upper right")
    figure.savefig(RESULTS / "vector.png", dpi=110)
    print("saved benchmarks/results/vector.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="only these")
    parser.add_argument("--workers", nargs="+", type=int, default=[], help="delay study: pools of so many workers too")
    parser.add_argument("--tag", default="", help="added to the names of the result files, such as 16-cores")
    parser.add_argument("--quick", action="store_true", help="see that it runs: few short rounds, nothing is saved")
    parser.add_argument("--plot", action="store_true", help="draw the committed results")
    arguments = parser.parse_args()
    if arguments.plot:
        return plot()
    warnings.simplefilter("ignore")
    effort = Effort(workers=tuple(arguments.workers))
    if arguments.quick:
        effort = Effort(0.01, 1, effort.workers, quick=True)
    for name in arguments.sections:
        began = time.perf_counter()
        try:
            outcome = SECTIONS[name](effort)
        except ImportError as error:
            print(f"\nSection {name} is skipped: {error}", flush=True)
            continue
        print(f"\n{outcome.text()}\n({name}: {time.perf_counter() - began:.0f} s)", flush=True)
        if not arguments.quick:
            save("-".join(filter(None, ["vector", name, arguments.tag])), outcome.results, outcome.text())
    if not arguments.quick and not arguments.tag:
        with contextlib.suppress(ImportError):  # a host without matplotlib
            plot()


if __name__ == "__main__":
    main()
