"""What does acting while learning gain? The asynchronous runner beside the local one and SB3, with envs of 1 ms a step.

python benchmarks/async_runner.py                      # saves benchmarks/results/async-runner.md and .json
python benchmarks/async_runner.py --cases waits        # some of them, see CASES; a part is not saved
python benchmarks/async_runner.py --quick              # see that it runs: few steps, nothing is saved
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import peers
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.wrappers import TimeLimit
from record import save, short, table
from side_by_side import Rounds, Timed

import hurtle

ENVS, WORKERS, STEPS, MINIBATCH = 8, 8, 64, 128
SECONDS = 0.001  # of an env's step
LOCAL, PEER = "local", "SB3"
RUNNERS: dict[str, dict[str, Any]] = {
    LOCAL: {},
    "lag 0": {"runner": "async", "lag": "0"},
    "lag 1": {"runner": "async", "lag": "1"},
    "lag free": {"runner": "async", "lag": "free"},
    "lag 1, 2 actors": {"runner": "async", "lag": "1", "num_actors": 2},
}
RETURN, RETURN_STEPS = 150.0, 200_000
NOTE = (
    f"PPO with 4 epochs on CartPole whose step takes 1 ms, {ENVS} × {STEPS} steps a rollout, {WORKERS} workers (two where "
    "steps compute). Waiting envs sleep, like a simulator elsewhere; computing ones use a core. Medians over rounds in which "
    "all take turns; ratios are within a round. SB3 has the same sizes and SubprocVecEnv. Evaluating does not count. Idle: the "
    "part of the time in which actors waited for weights, and the learner for rollouts."
)


class SlowCartPole(gymnasium.Wrapper):
    """CartPole whose steps wait, or compute."""

    def __init__(self, waits: bool):
        super().__init__(TimeLimit(CartPoleEnv(), 500))
        self.waits = waits

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Takes 1 ms, waiting or of this process's CPU time."""
        if self.waits:
            time.sleep(SECONDS)
        else:
            until = time.thread_time() + SECONDS
            while time.thread_time() < until:
                pass
        return self.env.step(action)


@dataclass(frozen=True)
class Case:
    """What is trained."""

    about: str
    waits: bool
    hidden: int
    gear: str
    workers: int = WORKERS

    def settings(self, **more: Any) -> dict[str, Any]:
        """Of `hurtle.train`."""
        return {
            "env": partial(SlowCartPole, self.waits), "backend": "process", "num_envs": ENVS, "num_workers": self.workers,
            "num_steps": STEPS, "minibatch_size": MINIBATCH, "hidden_sizes": (self.hidden, self.hidden), "gear": self.gear,
            "preset": False, "eval_episodes": 1, "eval_sampled": True, "checkpoint_every": 10**12, "progress": "quiet",
            "trackers": (), **more,
        }  # fmt: skip


CASES = {
    "waits": Case("waits, 512 × 512 in torch", True, 512, "general"),
    "waits-native": Case("waits, 512 × 512 compiled", True, 512, "native"),
    "computes": Case("computes, 512 × 512 in torch", False, 512, "general", 2),
    "computes-native": Case("computes, 512 × 512 compiled", False, 512, "native", 2),
}


def ours(case: Case, how: dict[str, Any], steps: int, idle: list[tuple[float, float]]) -> Timed:
    """Training by one runner; notes how idle both sides were."""

    def job() -> tuple[int, float]:
        def note(trainer: Any) -> None:
            last.update(trainer.metrics)

        last: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as runs:
            run = hurtle.train(**case.settings(total_steps=steps, runs=runs, callbacks=[note], **how))
        if how:
            idle.append((last["idle/actors"], last["idle/learner"]))
        return run.steps, run.seconds

    return job


def sb3(case: Case, steps: int, stack: contextlib.ExitStack) -> Timed:
    """The same with SB3."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import SubprocVecEnv

    vec = SubprocVecEnv([partial(SlowCartPole, case.waits)] * ENVS)
    stack.callback(vec.close)
    sizes = [case.hidden, case.hidden]
    model = PPO(
        "MlpPolicy", vec, n_steps=STEPS, batch_size=MINIBATCH, n_epochs=4, device="cpu", seed=0,
        policy_kwargs={"net_arch": {"pi": sizes, "vf": sizes}},
    )  # fmt: skip
    return lambda: peers.timed(lambda count: model.learn(count), steps)


def speeds(names: list[str], rounds: int, steps: int) -> tuple[dict[str, Any], list[list[str]]]:
    """Steps per second of everybody."""
    found, rows = {}, []
    for name in names:
        case, idle = CASES[name], {runner: list[tuple[float, float]]() for runner in RUNNERS}
        with contextlib.ExitStack() as stack:
            jobs = {runner: ours(case, how, steps, idle[runner]) for runner, how in RUNNERS.items()}
            jobs[PEER] = sb3(case, steps, stack)
            jobs[LOCAL]()  # compiles
            turns = Rounds(jobs, rounds, name)
        found[name] = {"steps_per_second": turns.rates, "idle": idle}
        for who in jobs:
            medians = [statistics.median(side) for side in zip(*idle.get(who, ()), strict=True)]
            waits = " / ".join(f"{median:.0%}" for median in medians) or "–"
            rows.append([case.about, who, short(turns.rate(who)), f"{turns.ratio(who, LOCAL):.2f}×", waits])
    return found, rows


def time_to_return(rounds: int, steps: int) -> tuple[dict[str, Any], list[list[str]]]:
    """Seconds until a mean return is reached, for the same seeds."""
    case, found = CASES["waits"], dict[str, list[float]]()
    for seed in range(rounds):
        for name in (LOCAL, "lag 1", "lag free"):
            with tempfile.TemporaryDirectory() as runs:
                run = hurtle.train(
                    **case.settings(total_steps=steps, stop_at_return=RETURN, seed=seed, runs=runs, **RUNNERS[name])
                )
            reached = run.stopped_by == "stop_at_return"
            found.setdefault(name, []).append(run.seconds if reached else float("inf"))
            print(f"return {RETURN:g}, seed {seed}, {name}: {run.seconds:.0f} s, {run.steps:,} steps", flush=True)
    rows = [[name, f"{statistics.median(values):.0f}", ", ".join(f"{s:.0f}" for s in values)] for name, values in found.items()]
    return found, rows


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rounds, steps = (1, ENVS * STEPS) if options.quick else (options.rounds, 16 * ENVS * STEPS)
    found, rows = speeds(options.cases, rounds, steps)
    text = table(["", "who", "steps/s", "/ local", "actor idle / learner idle"], rows)
    if set(options.cases) == set(CASES):
        found["seconds_to_return"], rows = time_to_return(rounds, steps if options.quick else RETURN_STEPS)
        text += f"\n\nSeconds until the mean return of 100 episodes is {RETURN:g} (waits, in torch):\n\n"
        text += table(["who", "median", "each seed"], rows)
    text += "\n\n" + NOTE
    print(text)
    if not options.quick and set(options.cases) == set(CASES):
        save("async-runner", found, f"## Acting while learning\n\n{text}")


if __name__ == "__main__":
    main()
