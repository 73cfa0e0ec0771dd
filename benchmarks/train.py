"""Steps per second of whole PPO trainings, collecting and learning, beside the peers in the same run.

python benchmarks/train.py                             # all settings; saves benchmarks/results/train.md, .json and .png
python benchmarks/train.py --settings cartpole-8       # some of them, see SETTINGS; a part is not saved
python benchmarks/train.py --python-envs               # Gymnasium's own envs for all; saves train-python-envs
python benchmarks/train.py --networks                  # CNNs and memories; saves train-networks
python benchmarks/train.py --time-to-solve             # seconds until CartPole is solved; saves time-to-solve.md and .json
python benchmarks/train.py --quick                     # see that it runs: few steps, nothing is saved
python benchmarks/train.py --plot                      # draw the committed results
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import peers
from peers import Sizes
from record import save, table
from side_by_side import GENERAL, NATIVE, Makers, Timed, compare, plot, report

import hurtle

TITLE = "PPO training, 64 × 64 tanh, 4 epochs"
NOTE = (
    "Medians over rounds; ratios are within a round. Everybody has the same numbers of envs, steps, epochs and minibatches and "
    "a separate network for policy and value. Peers get Gymnasium's envs where there are such; Asterix and Snake are "
    "ours for all. Snake's four agents are rows, and SB3 learns from those of absent ones, too, as it cannot leave them out. "
    "Torch has one thread. Evaluating and making things ready do not count."
)
PYTHON_NOTE = (
    "Gymnasium's own envs for everyone, ours with the back end that it chooses; otherwise as in train.md. Bare stepping: "
    '`hurtle.make_vec(..., backend="serial")` with random actions and no policy, a bound for serial training on one core.'
)
NETWORKS_TITLE = "PPO training, CNNs and memories, 4 epochs"
NETWORKS_NOTE = (
    "Medians over rounds; ratios are within a round. Everybody's CNN is a 3 × 3 convolution with 16 filters and a linear layer "
    "of 128. Memories have 64 units behind 64 × 64 tanh. RecurrentPPO is sb3-contrib's, with an LSTM of 64 units before "
    "64 tanh, and has neither GRU nor MinGRU, so its LSTM stands beside them. Peers get Gymnasium's CartPole and our other "
    "envs. Torch has one thread. Evaluating and making things ready do not count."
)
SOLVED = 475.0
BARE = "bare serial stepping"


@dataclass(frozen=True)
class Setting:
    """What is trained, and on how much at once."""

    about: str
    env: str
    sizes: Sizes
    gymnasium: str = ""
    """The same env there; without one, peers get ours."""
    network: str = "mlp"
    """mlp, grid_cnn, or a memory: lstm, gru, mingru."""

    def make(self) -> gymnasium.Env:
        """The env as the peers get it."""
        return gymnasium.make(self.gymnasium, disable_env_checker=True) if self.gymnasium else hurtle.make(self.env)


SETTINGS = {
    "cartpole-8": Setting("CartPole, 8 × 128", "cartpole", Sizes(8), "CartPole-v1"),
    "cartpole-64": Setting("CartPole, 64 × 128", "cartpole", Sizes(64, minibatch_size=2048), "CartPole-v1"),
    "pendulum": Setting("Pendulum, 8 × 128", "pendulum", Sizes(8), "Pendulum-v1"),
    "asterix": Setting("Asterix, MLP, 8 × 128", "asterix", Sizes(8)),
    "snake": Setting("Snake, 8 × 4 × 128", "snake", Sizes(8, minibatch_size=512, agents=4)),
}
PYTHON_ENVS = {
    "CartPole-v1-8": Setting("CartPole-v1, 8 × 128", "CartPole-v1", Sizes(8), "CartPole-v1"),
    "Pendulum-v1-8": Setting("Pendulum-v1, 8 × 128", "Pendulum-v1", Sizes(8), "Pendulum-v1"),
    "HalfCheetah-v5-8": Setting("HalfCheetah-v5, 8 × 128", "HalfCheetah-v5", Sizes(8), "HalfCheetah-v5"),
    "HalfCheetah-v5-16": Setting("HalfCheetah-v5, 16 × 128", "HalfCheetah-v5", Sizes(16), "HalfCheetah-v5"),
}
NETWORKS = {
    "breakout-cnn": Setting("Breakout, CNN, 8 × 128", "breakout", Sizes(8), network="grid_cnn"),
    "asterix-cnn": Setting("Asterix, CNN, 8 × 128", "asterix", Sizes(8), network="grid_cnn"),
    "cartpole-lstm": Setting("CartPole, LSTM, 8 × 128", "cartpole", Sizes(8), "CartPole-v1", "lstm"),
    "cartpole-gru": Setting("CartPole, GRU, 8 × 128", "cartpole", Sizes(8), "CartPole-v1", "gru"),
    "cartpole-mingru": Setting("CartPole, MinGRU, 8 × 128", "cartpole", Sizes(8), "CartPole-v1", "mingru"),
}
STEPS = {NATIVE: 400_000, GENERAL: 40_000, "rlox HybridPPO": 40_000}
"""Of one training; long enough that its beginning does not matter."""
OTHER_STEPS = 20_000
PYTHON_STEPS = {NATIVE: 60_000, BARE: 40_000, GENERAL: 12_000, "SB3": 12_000}
"""The same for Python envs."""
NETWORK_STEPS = {NATIVE: 100_000, GENERAL: 12_000, "SB3": 12_000, "RecurrentPPO": 6_000}
"""The same for CNNs and memories."""


# Who trains -----------------------------------------------------------------------------------------------------------


def ours(setting: Setting, gear: str, updates: int) -> Timed:
    sizes = setting.sizes

    def job(updates: int = updates) -> tuple[int, float]:
        with tempfile.TemporaryDirectory() as runs:
            run = hurtle.train(
                setting.env,
                total_steps=updates * sizes.batch,
                policy=setting.network if setting.network == "grid_cnn" else "mlp",
                recurrent=setting.network if setting.network in ("lstm", "gru", "mingru") else "none",
                preset=False,
                gear=gear,
                num_envs=sizes.num_envs,
                num_steps=sizes.num_steps,
                minibatch_size=sizes.minibatch_size,
                num_epochs=sizes.num_epochs,
                hidden_sizes=(peers.HIDDEN, peers.HIDDEN),
                eval_episodes=1,
                eval_sampled=True,  # an untrained greedy policy may play for ever
                checkpoint_every=10**12,
                progress="quiet",
                trackers=(),
                runs=runs,
            )
        return run.steps, run.seconds

    job(updates=1)
    return job


class Everyone(gymnasium.vector.VectorWrapper):
    """Does not tell which agents are absent: SB3 cannot leave their rows out, and its speed does not depend on them."""

    def reset(self, **words: Any) -> tuple[Any, dict[str, Any]]:
        """As ever."""
        obs, infos = self.env.reset(**words)
        return obs, self._without_mask(infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """As ever."""
        *outcome, infos = self.env.step(actions)
        return *outcome, self._without_mask(infos)

    def _without_mask(self, infos: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in infos.items() if key not in ("agent_mask", "_agent_mask")}


def sb3(setting: Setting, updates: int, stack: contextlib.ExitStack) -> Timed:
    network = setting.network if setting.network in ("mlp", "grid_cnn") else "lstm"
    if setting.sizes.agents == 1:
        return peers.sb3_training(peers.sb3_vec(setting.make, setting.sizes.num_envs, stack), setting.sizes, updates, network)
    from hurtle.integrations.sb3 import SB3VecEnv

    vec = SB3VecEnv(Everyone(hurtle.make_vec(setting.env, setting.sizes.num_envs)))
    stack.callback(vec.close)
    return peers.sb3_training(vec, setting.sizes, updates)


def bare(setting: Setting, updates: int, stack: contextlib.ExitStack) -> Timed:
    """Steps alone."""
    sizes = setting.sizes
    vec = stack.enter_context(hurtle.make_vec(setting.env, sizes.num_envs, backend="serial"))
    vec.reset(seed=0)
    actions = [vec.action_space.sample() for _ in range(sizes.num_steps)]

    def rollout() -> None:
        for action in actions:
            vec.step(action)

    rollout()

    def job() -> tuple[int, float]:
        began = time.perf_counter()
        for _ in range(updates):
            rollout()
        return updates * sizes.batch, time.perf_counter() - began

    return job


def entrants(setting: Setting, quick: bool) -> Makers:
    sizes, is_python = setting.sizes, setting.env == setting.gymnasium
    steps = PYTHON_STEPS if is_python else STEPS if setting.network == "mlp" else NETWORK_STEPS

    def updates(name: str) -> int:
        return 1 if quick else -(-steps.get(name, OTHER_STEPS) // sizes.batch)

    peer = "SB3" if setting.network in ("mlp", "grid_cnn") else "RecurrentPPO"
    makers: Makers = {peer: partial(sb3, setting, updates(peer))}
    if setting.network != "mlp":
        pass  # the other peers have only MLPs
    elif is_python:
        makers["SB3 SubprocVecEnv"] = lambda stack: peers.sb3_training(
            peers.sb3_vec(setting.make, sizes.num_envs, stack, processes=True), sizes, updates("SB3")
        )
        makers[BARE] = partial(bare, setting, updates(BARE))
    elif sizes.agents == 1:
        name = "plain torch script"
        makers[name] = partial(peers.plain_training, setting.make, sizes, updates(name))
    if setting.env == "cartpole" and setting.network == "mlp":  # the only env that its compiled collector has
        makers["rlox PPO"] = lambda _: peers.rlox_training(sizes, updates("rlox PPO"))
        makers["rlox HybridPPO"] = lambda _: peers.hybrid_training(sizes, updates("rlox HybridPPO"))
    for name, gear in ((GENERAL, "general"), (NATIVE, "native")):
        makers[name] = lambda _, name=name, gear=gear: ours(setting, gear, updates(name))
    return makers


def measure(
    settings: list[Setting], rounds: int, note: str = NOTE, quick: bool = False, title: str = TITLE
) -> tuple[dict[str, Any], str]:
    results, rows = {}, []
    for setting in settings:
        results[setting.about], more = compare(setting.about, entrants(setting, quick), rounds)
        rows += more
    return results, report(title, rows, note)


# Time to solve --------------------------------------------------------------------------------------------------------


def solve(seed: int, *further: str) -> dict[str, Any]:
    """`hurtle train cartpole` in a process of its own: what its summary says, and how long the process took."""
    with tempfile.TemporaryDirectory() as runs:
        words = ["--seed", str(seed), "--stop-at-return", str(SOLVED), "--eval-episodes", "1", "--progress", "quiet"]
        command = [sys.executable, "-m", "hurtle", "train", "cartpole", *words, "--runs", runs, *further, "--trackers"]
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        (summary,) = Path(runs).glob("*/summary.json")
        return {"seed": seed, "process_seconds": seconds, **json.loads(summary.read_text())}


def measure_time_to_solve(seeds: int, *further: str) -> tuple[dict[str, Any], str]:
    solve(0, "--total-steps", "512")  # what is compiled now need not be later
    runs, rows = [], []
    for seed in range(seeds):
        runs.append(solve(seed, *further))
        rows.append([str(seed), f"{runs[-1]['steps']:,}", *_until_solved(runs[-1:])])
        print(rows[-1], flush=True)
    rows.append(["median", f"{statistics.median(run['steps'] for run in runs):,.0f}", *_until_solved(runs)])
    header = ["seed", "steps", "training", "from process start to its end"]
    note = "The process also imports, evaluates one episode and writes the run's files; its caches are warm."
    title = f"### `hurtle train cartpole` until the last 100 episodes reach {SOLVED:g}"
    return {"runs": runs}, f"{title}\n\n{table(header, rows)}\n\n{note}"


def _until_solved(runs: list[dict[str, Any]]) -> list[str]:
    """The medians of the seconds of training and of the process; a run that did not get there takes for ever."""
    cells = []
    for key in ("seconds", "process_seconds"):
        middle = statistics.median(run[key] if run["stopped_by"] == "stop_at_return" else math.inf for run in runs)
        cells.append(f"{middle:.2f} s" if math.isfinite(middle) else "not solved")
    return cells


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=[*SETTINGS, *PYTHON_ENVS, *NETWORKS], help="only these")
    parser.add_argument("--python-envs", action="store_true", help="Gymnasium's own envs for all")
    parser.add_argument("--networks", action="store_true", help="CNNs and memories instead of MLPs")
    parser.add_argument("--rounds", type=int, default=5, help="trainings of each, in turns (5)")
    parser.add_argument("--time-to-solve", action="store_true", help="seconds until CartPole is solved")
    parser.add_argument("--seeds", type=int, default=5, help="with --time-to-solve: so many trainings (5)")
    parser.add_argument("--quick", action="store_true", help="see that it runs: few steps, nothing is saved")
    parser.add_argument("--plot", action="store_true", help="draw the committed results")
    chosen = parser.parse_args(arguments)
    if chosen.plot:
        return plot("train", TITLE)
    name, group, note, title = "train", SETTINGS, NOTE, TITLE
    if chosen.python_envs:
        name, group, note = "train-python-envs", PYTHON_ENVS, PYTHON_NOTE
    elif chosen.networks:
        name, group, note, title = "train-networks", NETWORKS, NETWORKS_NOTE, NETWORKS_TITLE
    settings = [(SETTINGS | PYTHON_ENVS | NETWORKS)[one] for one in chosen.settings or group]
    if all(setting.network != "mlp" for setting in settings):
        note, title = NETWORKS_NOTE, NETWORKS_TITLE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if chosen.time_to_solve:
            results, text = measure_time_to_solve(*((1, "--total-steps", "512") if chosen.quick else (chosen.seeds,)))
        elif chosen.quick:
            small = [replace(setting, sizes=replace(setting.sizes, num_envs=8, minibatch_size=256)) for setting in settings]
            results, text = measure(small, 1, note, quick=True, title=title)
        else:
            results, text = measure(settings, chosen.rounds, note, title=title)
    print(f"\n{text}")
    if chosen.quick:
        return None
    if chosen.time_to_solve:
        save("time-to-solve", results, text)
    elif not chosen.settings:
        save(name, results, text)
        plot(name, title)


if __name__ == "__main__":
    main()
