"""Does the number of threads that Hurtle chooses hold up on machines that are busy, limited, or preempted by their host?

python benchmarks/contention.py                        # all situations; saves benchmarks/results/contention.md and .json
python benchmarks/contention.py --situations quiet     # some of them, see SITUATIONS; a part is not saved
python benchmarks/contention.py --quick                # see that it runs: short jobs, nothing is saved

Each situation is a process in which one thread, all threads, the default and SB3 take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peers
from record import save, short, table
from side_by_side import Rounds, Timed, repeated
from train import SETTINGS, Setting, ours
from vector_jobs import make_jobs

import hurtle
from hurtle.native import batch, thread_tuner
from hurtle.native.threads import free_cores

MODES = ("1 thread", "all threads", "default")
ENVS = 512  # for `step()`
STEPS = 600_000 * max(1, free_cores() // 8)  # of one training; many cores are done with few in no time
SB3_STEPS = 8_192
SECONDS = 0.7  # of one turn of `step()`
NOTE = (
    "Steps per second, medians over rounds in which all take turns; ratios are within a round. The default starts anew in "
    "every training and finds its number of threads while it trains. Busy loops are other processes. In the last situation a "
    "process on one of the cores (a real-time one, if allowed) runs for 5 of every 20 ms, like a host that takes it away."
)
BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:  # ends with the benchmark, however that ends
    for _ in range(1_000_000): pass
"""
PULSE = """
import os, sys, time
parent = os.getppid()
os.sched_setaffinity(0, {int(sys.argv[1])})
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
except PermissionError:
    pass  # one that sleeps most of the time is preferred to one that does not, too
while os.getppid() == parent:
    until = time.perf_counter() + 0.005
    while time.perf_counter() < until: pass
    time.sleep(0.015)
"""


# Situations -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def beside(*programs: tuple[str, ...]) -> Iterator[list[str]]:
    """Other processes run meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", *program]) for program in programs]
    try:
        yield []
    finally:
        for other in others:
            other.kill()
            other.wait()


@contextlib.contextmanager
def fewer_cores() -> Iterator[list[str]]:
    """Half of the cores, by CPU affinity."""
    yield ["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[: max(1, free_cores() // 2)]))]


@contextlib.contextmanager
def quota() -> Iterator[list[str]]:
    """The time of half of the cores, by a control group, as containers have it."""
    roots = [Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")]
    group = next(root for root in roots if root.is_dir()) / f"hurtle-{os.getpid()}"
    group.mkdir()
    microseconds = str(free_cores() * 100_000 // 2)
    try:
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{microseconds} 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text(microseconds)
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()


def situations() -> dict[str, Any]:
    """Each is a context manager that gives the command to prefix a process with."""
    cores, last = free_cores(), str(max(os.sched_getaffinity(0)))
    return {
        "quiet": beside(),
        "a busy loop per core": beside(*[(BUSY,)] * cores),
        "two busy loops per core": beside(*[(BUSY,)] * (2 * cores)),
        "half of the cores": fewer_cores(),
        "a quota of half of the cores": quota(),
        "a core is taken away for 5 of 20 ms": beside((PULSE, last)),
    }


# What is measured, in a process of its own ----------------------------------------------------------------------------


@contextlib.contextmanager
def threads(mode: str) -> Iterator[None]:
    """Make what is constructed here use one thread, as many as it may, or what it chooses."""
    ladder, trials = thread_tuner.ladder, batch.TRIALS
    try:
        if mode != "default":
            thread_tuner.ladder = (lambda most: [1]) if mode == "1 thread" else (lambda most: [most])
            batch.TRIALS = 0
        yield
    finally:
        thread_tuner.ladder, batch.TRIALS = ladder, trials


def training(setting: Setting, mode: str, updates: int) -> Timed:
    with threads(mode):
        job = ours(setting, "native", updates)

    def run() -> tuple[int, float]:
        with threads(mode):
            return job()

    return run


def stepping(mode: str, seconds: float, stack: contextlib.ExitStack) -> Timed:
    with threads(mode):
        vec = hurtle.make_vec("cartpole", ENVS)
    stack.callback(vec.close)
    vec.reset(seed=0)
    actions = np.random.default_rng(0).integers(2, size=ENVS)

    def some() -> None:
        for _ in range(100):
            vec.step(actions)

    return repeated(some, 100 * ENVS, seconds)


def measure(rounds: int, quick: bool) -> dict[str, Any]:
    """All jobs of one situation."""
    found = {}
    for name in ("cartpole-8", "cartpole-64"):
        setting = SETTINGS[name]
        updates = 2 if quick else STEPS // setting.sizes.batch
        makers: dict[str, Any] = {mode: lambda _, m=mode, s=setting, u=updates: training(s, m, u) for mode in MODES}
        makers["SB3"] = partial(_sb3, setting, 1 if quick else max(1, SB3_STEPS // setting.sizes.batch))
        found[f"PPO, {setting.sizes.num_envs} × {setting.sizes.num_steps}"] = _rates(makers, rounds)
    makers = {mode: partial(stepping, mode, 0.05 if quick else SECONDS) for mode in MODES}
    found[f"step() of {ENVS} envs"] = _rates(makers, rounds)
    return found


def _sb3(setting: Setting, updates: int, stack: contextlib.ExitStack) -> Timed:
    return peers.sb3_training(peers.sb3_vec(setting.make, setting.sizes.num_envs, stack), setting.sizes, updates)


def _rates(makers: dict[str, Any], rounds: int) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        made, _ = make_jobs(makers, stack)
        with contextlib.redirect_stdout(sys.stderr):
            turns = Rounds(made, rounds, "")
    best = max((mode for mode in MODES[:2]), key=turns.rate)
    ratios = {"default / best": turns.ratio("default", best)}
    if "SB3" in made:
        ratios["default / SB3"] = turns.ratio("default", "SB3")
    return {"steps_per_second": turns.rates, "medians": {name: turns.rate(name) for name in made}, **ratios}


# The table ------------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = situations()
    parser.add_argument("--situations", nargs="+", choices=every, default=list(every), metavar="NAME", help="only these")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (7)")
    parser.add_argument("--quick", action="store_true", help="short jobs; nothing is saved")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.measure:
        print(json.dumps(measure(given.rounds, given.quick)))
        return
    results, rows = {}, []
    for name in given.situations:
        options = ["--measure", "--rounds", str(given.rounds), *["--quick"] * given.quick]
        try:
            with every[name] as prefix:
                print(f"{name} …", flush=True)
                command = [*prefix, sys.executable, __file__, *options]
                found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
        except OSError as error:  # no right to make control groups
            print(f"{name}: not possible here: {error}")
            continue
        results[name] = found
        for job, each in found.items():
            medians = each["medians"]
            rates = [short(medians[who]) if who in medians else "" for who in ("SB3", *MODES)]
            ratios = [f"{each[key]:.2f}" if key in each else "" for key in ("default / best", "default / SB3")]
            rows.append([name, job, *rates, *ratios])
        print(table(HEADER, rows), flush=True)
    text = f"### Threads on busy machines\n\n{table(HEADER, rows)}\n\n{NOTE}"
    if not given.quick and list(given.situations) == list(every):
        save("contention", {"results": results}, text)


HEADER = ["situation", "job", "SB3", *MODES, "default / best fixed", "default / SB3"]

if __name__ == "__main__":
    main()
