"""Injects random faults into vectors of worker processes and looks for hangs, leaks and wrong results.

    python tests/vector/soak.py --faults 2000

Each run makes a vector with random settings, steps it, and injects a fault: kills a worker at a random moment, makes an env
raise, exit, crash or hang, interrupts the learner, closes in the middle of a step, or kills the learner's process. After each
run there must be no more workers, open files or shared memory than before.
"""

import argparse
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import time
from collections import Counter as Tally
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from vector_envs import Counter, Faulty

import hurtle
from hurtle.errors import EnvFailedError, EnvTimeoutError, WorkerDiedError

HANG = 30.0  # seconds after which a run counts as hung, and ends the soak
STEP_TIMEOUT = 0.3


class Flaky(Counter):
    """Injects a fault with a small probability, at a time that is random in every process."""

    def __init__(self, what, chance):
        super().__init__()
        self.what, self.chance = what, chance
        self.dice = np.random.default_rng()

    def step(self, action):
        if self.dice.random() < self.chance:
            Faulty._maybe(self, None)
        return super().step(action)

    once, at, seeds = None, None, property(lambda self: [self.given])


class Follower:
    """Steps a vector and knows where each env must be: one step further, or at the beginning after an end."""

    def __init__(self, vec, rng, seed):
        self.vec, self.rng = vec, rng
        self.steps = np.full(vec.num_envs, -1)
        vec.async_reset(seed=seed)

    def step(self):
        obs, _, terminated, truncated, infos = self.vec.recv()
        ids = infos["env_id"]
        self.steps[ids] += 1
        self.steps[ids[terminated | truncated]] = 0
        assert (obs[:, 2] == self.steps[ids]).all(), (obs[:, 2], self.steps[ids])
        if "worker_restarted" in infos:
            assert truncated[infos["worker_restarted"]].all()
        self.vec.send(self.rng.integers(0, 5, len(ids)))


def state():
    gc.collect()
    children = set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
    return children, len(list(Path("/proc/self/fd").iterdir())), sorted(Path("/dev/shm").iterdir())


def one_run(rng, tally):
    """One vector, at least one fault; returns the number of faults injected."""
    kind = str(
        rng.choice(
            ["kill", "restart", "restart", "restart", "raise", "exit", "crash", "stick", "interrupt", "close", "learner"]
        )
    )
    num_envs = int(rng.integers(1, 9))
    num_workers = int(rng.integers(1, min(num_envs, 4) + 1))
    settings = {
        "num_workers": num_workers,
        "batch_size": int(rng.integers(1, num_envs + 1)) if rng.random() < 0.5 else num_envs,
        "order": str(rng.choice(["ready", "fair"])),
        "backend": "process",
        "check": False,
    }
    if kind == "learner":
        return killed_learner(rng, tally, num_envs, settings)
    if kind == "restart":
        return restarts(rng, tally, num_envs, settings)
    maker = Counter
    if kind in ("raise", "exit", "crash", "stick"):
        maker = partial(Flaky, kind, 0.05)
        settings["step_timeout"] = STEP_TIMEOUT if kind == "stick" else None
    vec = hurtle.make_vec(maker, num_envs, **settings)
    expected = {"raise": EnvFailedError, "stick": EnvTimeoutError, "interrupt": KeyboardInterrupt, "close": ()}.get(
        kind, WorkerDiedError
    )
    after = float(rng.random() * 0.05)
    try:
        play(vec, rng, lambda: harm(vec, rng, kind, after))
        assert kind == "close", f"{kind} went unnoticed"
    except expected:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        vec.close()
    tally[kind] += 1
    return 1


def play(vec, rng, begin_harm):
    """Step until something happens; `begin_harm` returns True when it is time to stop."""
    follower = Follower(vec, rng, seed=int(rng.integers(1000)))
    follower.step()
    if begin_harm():
        return
    while True:
        follower.step()


def harm(vec, rng, kind, after):
    if kind == "kill":
        time.sleep(after)
        victim = vec.worker_pids[int(rng.integers(vec.num_workers))]
        os.kill(victim, signal.SIGKILL)
    if kind == "interrupt":
        signal.setitimer(signal.ITIMER_REAL, max(after, 1e-4))
    return kind == "close"


def restarts(rng, tally, num_envs, settings):
    """Many faults in one vector that keeps running."""
    faults = int(rng.integers(2, 8))
    with hurtle.make_vec(Counter, num_envs, restart_workers=True, **settings) as vec:
        follower = Follower(vec, rng, seed=0)
        for _ in range(faults):
            for _ in range(int(rng.integers(1, 30))):
                follower.step()
            victim = vec.worker_pids[int(rng.integers(vec.num_workers))]
            os.kill(victim, signal.SIGKILL if rng.random() < 0.8 else signal.SIGSEGV)
        tally["restart"] += faults
    return faults


LEARNER = """
import sys; sys.path[:] = {path!r}
import hurtle, numpy as np
from vector_envs import Slow
vec = hurtle.make_vec(lambda: Slow(seconds={seconds}), {num_envs}, **{settings!r})
vec.async_reset(seed=0)
print(*vec.worker_pids, flush=True)
while True:
    *_, infos = vec.recv()
    vec.send(np.zeros(len(infos["env_id"]), int))
"""


def killed_learner(rng, tally, num_envs, settings):
    seconds = float(rng.choice([0.0, 0.001, 60.0]))
    text = LEARNER.format(path=sys.path, seconds=seconds, num_envs=num_envs, settings=settings)
    learner = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in learner.stdout.readline().split()]
    assert workers
    time.sleep(float(rng.random() * 0.05))
    learner.kill()
    learner.communicate()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "workers outlived the learner"
        time.sleep(0.01)
    tally["learner"] += 1
    return 1


def soak(faults, seed, log=print):
    """Inject this many faults; returns the tally. A hang ends the process with a traceback."""
    rng, tally = np.random.default_rng(seed), Tally()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    before, done, runs, began = state(), 0, 0, time.monotonic()
    while done < faults:
        faulthandler.dump_traceback_later(HANG, exit=True)
        done += one_run(rng, tally)
        faulthandler.cancel_dump_traceback_later()
        runs += 1
        after = state()
        assert after == before, f"left behind: {before} -> {after}"
        if runs % 20 == 0:
            rate = done / (time.monotonic() - began)
            log(f"{done}/{faults} faults, {runs} runs, {rate:.1f} faults/s, ETA {(faults - done) / rate:.0f} s", flush=True)
    minutes = (time.monotonic() - began) / 60
    log(
        f"{done} faults in {runs} runs, {minutes:.1f} minutes: no hang, no process, file or segment left. {dict(tally)}",
        flush=True,
    )
    return tally


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    soak(arguments.faults, arguments.seed)
