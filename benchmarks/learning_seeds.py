"""Learn the MuJoCo tasks of learning_tasks.py on one GPU, all seeds of a task side by side: curves and final evaluations.

    python benchmarks/learning_seeds.py sac_halfcheetah sac_hopper --seconds 500
    python benchmarks/learning_seeds.py xqc_ant xqc_humanoid --seeds 3

Several tasks are trained at the same time. A run ends when its steps are done, when the time is up or on Ctrl-C; the same
command goes on from there. The outcome is one file per task and seed, as learning.py writes them.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learning_jobs import Job, settings_of
from learning_report import Places
from learning_tasks import MUJOCO
from record import machine

import hurtle
from hurtle.algorithms.algorithm import LearnerSetup, find_algorithm
from hurtle.algorithms.off_policy import OffPolicy
from hurtle.algorithms.side_by_side import SideBySide
from hurtle.collect.general_collector import GeneralCollector
from hurtle.collect.seeds_actor import SeedsActor
from hurtle.kernels import cuda_graphs
from hurtle.kernels.cuda_graphs import Graphs
from hurtle.policies.build import build_policy
from hurtle.runners.evaluate import evaluate_policy
from hurtle.runners.signals import StopSignals

EPISODES = 20
"""A point of a curve is the mean return of that many training episodes."""
POINTS = 120
"""Of a curve, at most."""
REPORT_SECONDS = 20.0
FIRST_ENV_SEED = 1_000
PREPARED = 64
"""Gradient steps after which everything is compiled and captured."""


class Returns:
    """Returns of training episodes by seed, from what a vector's `step` returns."""

    def __init__(self, vec: Any, seeds: int):
        self.totals, self.share = np.zeros(vec.num_envs), vec.num_envs // seeds
        self.seen: list[list[tuple[int, float]]] = [[] for _ in range(seeds)]  # steps of that seed, return
        self.steps, self._step = 0, vec.step
        vec.step = self.step

    def step(self, actions: Any) -> Any:
        """As the vector's own."""
        found = self._step(actions)
        self.totals += found[1]
        self.steps += self.share
        for row in (found[2] | found[3]).nonzero()[0]:
            self.seen[row // self.share].append((self.steps, float(self.totals[row])))
            self.totals[row] = 0.0
        return found

    def curve(self, seed: int) -> list[list[float]]:
        """Means over the last episodes."""
        steps, returns = np.array(self.seen[seed]).T if self.seen[seed] else (np.zeros(0), np.zeros(0))
        chosen = np.unique(np.linspace(0, len(steps) - 1, min(POINTS, len(steps))).astype(int))
        return [[int(steps[k]), float(returns[max(0, k - EPISODES + 1) : k + 1].mean())] for k in chosen]


class Turns:
    """Tasks that share a process and its GPU: one at a time compiles and captures, then all learn together.

    While a graph is captured, no other may draw random numbers.
    """

    def __init__(self, tasks: int):
        self._preparing, self._ready = threading.Lock(), threading.Barrier(tasks)

    def alone(self, is_needed: bool) -> Any:
        """A context in which no other task prepares."""
        return self._preparing if is_needed else nullcontext()

    def wait(self) -> None:
        """Wait until all tasks are prepared."""
        self._ready.wait()

    def give_up(self) -> None:
        """Let nobody wait for a task that failed."""
        self._ready.abort()


class SeedsOfTask:
    """The training of one task.

    Args:
        name: The task's.
        args: The command's.
        turns: Of all tasks.
    """

    def __init__(self, name: str, args: argparse.Namespace, turns: Turns):
        self.name, self.args, self.turns = name, args, turns
        self.settings = MUJOCO[name].settings()
        self.total_steps = args.steps or self.settings.train.total_steps
        self.saved = args.folder / f"{name}{f'-{args.first_seed}' * (args.first_seed > 0)}.pt"
        self.learners: list[OffPolicy] = []

    def run(self) -> None:
        """Train until all steps are done or the time is up; save; evaluate what is done."""
        began, train = time.monotonic(), self.settings.train
        with hurtle.make_vec(
            train.env, self.args.seeds * train.num_envs, backend=train.backend, num_workers=train.num_workers
        ) as vec:
            returns, (together, collector) = Returns(vec, self.args.seeds), self._make(vec)
            rollout, before = collector.new_rollout(1), 0.0
            if self.saved.exists():
                before = self._resume(together, collector, returns)
            together.prepare(rollout)
            self._learn(together, collector, rollout, returns, began)
        seconds = before + time.monotonic() - began
        done = returns.steps >= self.total_steps
        epsilons = [float(learner._acting.epsilon) for learner in self.learners]
        torch.save(
            {
                "learner": together.state_dict(),
                "epsilon": epsilons,
                "returns": (returns.steps, returns.seen),
                "seconds": seconds,
            },
            self.saved,
        )
        if done:
            self._evaluate(returns, seconds)
        print(f"{self.name}: {returns.steps:,} steps in {seconds:.0f} s{'' if done else ', to be continued'}", flush=True)

    def _make(self, vec: Any) -> tuple[OffPolicy, GeneralCollector]:
        settings, device = self.settings, self.args.device
        graphs, algorithm = Graphs(device), find_algorithm(settings.train.algorithm)
        spaces = vec.single_observation_space, vec.single_action_space
        for seed in range(self.args.first_seed, self.args.first_seed + self.args.seeds):
            make_network = algorithm.network_maker(settings.algorithm)
            policy = build_policy(settings.policy, *spaces, make_network=make_network, seed=seed).to(device)
            setup = LearnerSetup(
                seed=seed,
                graphs=graphs,
                compiled=device != "cpu",
                precision=settings.train.precision,
                num_rows=settings.train.num_envs,
            )
            learner: Any = algorithm.make_learner("device", policy, settings.algorithm, setup)
            self.learners.append(learner)
        first_env = FIRST_ENV_SEED * (1 + self.args.first_seed)
        actor = SeedsActor([learner.policy for learner in self.learners], vec.num_envs, first_env, graphs)
        together = self.learners[0] if len(self.learners) == 1 else SideBySide(self.learners)
        return together, GeneralCollector(vec, actor, first_env)

    def _resume(self, together: OffPolicy, collector: GeneralCollector, returns: Returns) -> float:
        """Go on from the saved state, with new episodes; returns the seconds it took so far."""
        saved = torch.load(self.saved, weights_only=False)
        together.load_state_dict(saved["learner"])
        for learner, epsilon in zip(self.learners, saved["epsilon"], strict=True):
            learner._acting.epsilon.fill_(epsilon)
        returns.steps, returns.seen = saved["returns"]
        collector._seed += returns.steps
        return float(saved["seconds"])

    def _learn(self, together: Any, collector: GeneralCollector, rollout: Any, returns: Returns, began: float) -> None:
        told, first_update, first_step = time.monotonic(), together.updates, together.gradient_steps
        is_prepared = False
        while returns.steps < self.total_steps and time.monotonic() - began < self.args.seconds:
            with self.turns.alone(together.updates < first_update + 3):
                collector.collect(rollout)
            with self.turns.alone(not is_prepared):
                together.update(rollout, returns.steps / self.total_steps)
            if not is_prepared and together.gradient_steps > first_step + PREPARED:
                is_prepared = True
                self.turns.wait()
            if time.monotonic() - told > REPORT_SECONDS:
                told = time.monotonic()
                last = [np.mean([value for _, value in seen[-EPISODES:]] or [np.nan]) for seen in returns.seen]
                print(f"{self.name}: {returns.steps:,} steps, {told - began:.0f} s, returns {np.round(last)}", flush=True)
        together.pending(wait=True)

    def _evaluate(self, returns: Returns, seconds: float) -> None:
        """Evaluate each seed and write its file."""
        episodes, folder = MUJOCO[self.name].episodes, self.args.results
        folder.mkdir(parents=True, exist_ok=True)
        for k, learner in enumerate(self.learners):
            seed = self.args.first_seed + k
            score = evaluate_policy(
                learner.policy,
                self.settings.train.env,
                episodes,
                num_envs=episodes,
                device=self.args.device,
                backend="process",
                seed=seed,
            )
            job = Job(self.name, "hurtle", seed)
            result = {
                **job._asdict(),
                "steps": returns.steps,
                "seconds": seconds,
                "side_by_side": self.args.seeds,
                "curve": returns.curve(k),
                "evaluation": score.summary(),
                "settings": settings_of(job),
                "machine": machine(),
            }
            (folder / job.file).write_text(json.dumps(result) + "\n")
            print(f"{self.name}, seed {seed}: {score}", flush=True)


def in_thread(seeds: SeedsOfTask, failed: list[str]) -> None:
    """Train one task; nothing it launches waits for what other tasks launch."""
    try:
        if seeds.args.device != "cpu":
            torch.cuda.set_stream(torch.cuda.Stream())
        seeds.run()
    except Exception:
        seeds.turns.give_up()
        failed.append(seeds.name)
        traceback.print_exc()


def let_threads_share_the_gpu() -> None:
    """Give each thread streams of its own, and do not make its captures fail where another thread waits for the GPU."""
    own = cache(lambda device, side, thread: torch.cuda.Stream(device))
    cuda_graphs.stream_of = lambda device, side=False: own(device, side, threading.get_ident())  # type: ignore[assignment]
    torch.cuda.set_sync_debug_mode = lambda mode: None
    sys.setswitchinterval(2e-4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=MUJOCO, metavar="task", help=", ".join(MUJOCO))
    parser.add_argument("--seeds", type=int, default=5, help="how many (5)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--steps", type=int, help="of each seed, instead of the task's")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop and save after that time")
    parser.add_argument("--device", default="cuda", help="of the networks (cuda)")
    parser.add_argument("--folder", type=Path, default=Path("learning-seeds"), help="of unfinished runs (learning-seeds)")
    parser.add_argument("--results", type=Path, default=Places().results, help="of the result files")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    let_threads_share_the_gpu()
    turns, failed = Turns(len(args.tasks)), list[str]()
    threads = [threading.Thread(target=in_thread, args=(SeedsOfTask(name, args, turns), failed)) for name in args.tasks]

    def stop(cause: str) -> None:
        print(f"{cause}: saving …", flush=True)
        args.seconds = 0.0

    with StopSignals(stop):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
