"""How fast vectors of Atari games step, beside their peers and the emulator alone, in one run.

python benchmarks/atari.py                             # Breakout, 4 and 8 envs per core; saves benchmarks/results/atari.*
python benchmarks/atari.py --game Pong --envs 16 128   # another game, other numbers of envs
python benchmarks/atari.py --tag 16-cores              # saves atari-16-cores.*
python benchmarks/atari.py --quick                     # see that it runs: few short rounds, nothing is saved

Bare processes are the limit: one per core steps one game after the other, without Python beside it, a vector or a barrier. They
run the frames that our preprocessing runs: four per step, no-ops at the start, FIRE after each lost life. Random actions.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from record import Job, save, short, table
from vector_jobs import Makers, Turns, gymnasium_async, make_jobs

import hurtle
from hurtle.envs.atari import game_id
from hurtle.native.threads import free_cores

EMULATING, SCREENS = "bare processes, emulation", "bare processes, two screens"
OURS, POOL, ALE, ENVPOOL = "hurtle", "hurtle, pool of half", "ale-py AtariVectorEnv", "EnvPool"
GYMNASIUM = "Gymnasium Async, its wrappers"
GOALS = {ALE: 1.45, SCREENS: 0.85, ENVPOOL: 1.0}
ROWS = 64  # of random actions, used in turn
NOTE = (
    "Steps per second of all envs, medians over rounds in which all take turns; a step is four frames. Ratios are made within "
    "a round. 84 × 84 gray, 4 frames, the maximum of two, no-op starts, FIRE, rewards clipped; games go on after a lost life. "
    "Bare processes, one per core: the emulator alone, or with the gray screens of two frames per step."
)


def measure(game: str, num_envs: int, seconds: float, rounds: int) -> tuple[dict[str, Any], list[list[str]]]:
    """All vectors with so many envs: the numbers, and the rows of the table."""
    spec, cores = gymnasium.spec(game_id(game)), free_cores()
    name = spec.id.removeprefix("ALE/").removesuffix("-v5")
    makers: Makers = {
        EMULATING: bare(game, cores, False, seconds),
        SCREENS: bare(game, cores, True, seconds),
        OURS: ours(f"atari/{name}", num_envs),
        POOL: ours(f"atari/{name}", num_envs, batch_size=num_envs // 2),
        ALE: ale_py(spec.kwargs["game"], num_envs, cores),
        ENVPOOL: envpool(spec.id.removeprefix("ALE/"), num_envs, cores),
        GYMNASIUM: gymnasium_async(lambda: gymnasium_game(spec.id), num_envs, calls=2),
    }
    with contextlib.ExitStack() as stack:
        made, left_out = make_jobs(makers, stack)
        turns = Turns(made, seconds, rounds, budget=600.0)
    rows = []
    for who in makers:
        if who not in made:
            rows.append([str(num_envs), who, "left out", "–", ""])
            continue
        ratio = turns.ratio(OURS, who)
        met = "" if who not in GOALS else f"≥ {GOALS[who]:g}: {'yes' if ratio >= GOALS[who] else 'no'}"
        rows.append([str(num_envs), who, short(turns.rate(who)), f"{ratio:.2f}x", met])
    return {"steps_per_second": turns.rates, "left_out": left_out}, rows


# Us and our peers -----------------------------------------------------------------------------------------------------


def ours(env: str, num_envs: int, **options: Any) -> Callable[[contextlib.ExitStack], Job]:
    def make(stack: contextlib.ExitStack) -> Job:
        vec = hurtle.make_vec(env, num_envs, **options)
        stack.callback(vec.close)
        choices, batch = vec.single_action_space.n, options.get("batch_size", num_envs)
        if batch < num_envs:
            vec.async_reset(seed=0)
            vec.recv()
        else:
            vec.reset(seed=0)
        return stepping(vec.step, batch, choices, calls=2 * num_envs // batch)

    return make


def ale_py(game: str, num_envs: int, cores: int) -> Callable[[contextlib.ExitStack], Job]:
    def make(stack: contextlib.ExitStack) -> Job:
        from ale_py.vector_env import AtariVectorEnv

        vec = AtariVectorEnv(game, num_envs, num_threads=cores, life_loss_info=True, autoreset_mode="SameStep")
        stack.callback(vec.close)
        vec.reset(seed=0)
        return stepping(vec.step, num_envs, vec.single_action_space.n)

    return make


def envpool(task: str, num_envs: int, cores: int) -> Callable[[contextlib.ExitStack], Job]:
    def make(stack: contextlib.ExitStack) -> Job:
        import envpool

        options = {"episodic_life": True, "reward_clip": True}
        vec = envpool.make(task, env_type="gymnasium", num_envs=num_envs, num_threads=cores, seed=0, **options)
        stack.callback(vec.close)
        vec.reset()
        return stepping(vec.step, num_envs, vec.action_space.n, np.int32)

    return make


def gymnasium_game(name: str) -> gymnasium.Env:
    """The game with Gymnasium's wrappers, which resize with OpenCV."""
    game_id(name)  # registers it in this process
    env = gymnasium.make(name, frameskip=1, repeat_action_probability=0.0, disable_env_checker=True)
    env = gymnasium.wrappers.AtariPreprocessing(env, terminal_on_life_loss=True)
    return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.ClipReward(env, -1, 1), 4)


def stepping(step: Callable[[Any], Any], batch: int, choices: int, dtype: Any = np.int64, calls: int = 2) -> Job:
    """A job of so many calls of `step` with random actions."""
    actions, turn = np.random.default_rng(0).integers(0, choices, (ROWS, batch)).astype(dtype), 0

    def job() -> int:
        nonlocal turn
        for _ in range(calls):
            step(actions[turn % ROWS])
            turn += 1
        return calls * batch

    return job


# The limit ------------------------------------------------------------------------------------------------------------


def bare(game: str, count: int, screens: bool, seconds: float) -> Callable[[contextlib.ExitStack], Job]:
    """A job of processes that emulate for so many seconds, and nothing else."""

    def make(stack: contextlib.ExitStack) -> Job:
        folder, processes = Path(__file__).resolve().parent, []
        for k in range(count):
            command = [sys.executable, "-c", f"from atari import emulate; emulate({game!r}, {screens}, {k})"]
            process = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)

        def job() -> int:
            for process in processes:
                os.write(process.stdin.fileno(), b"%f\n" % seconds)
            return sum(int(process.stdout.readline()) for process in processes)

        return job

    return make


def emulate(game: str, screens: bool, seed: int) -> None:
    """Read a number of seconds, emulate for so long, print the number of steps; until there is nothing to read."""
    from ale_py import ALEInterface, LoggerMode, roms

    ALEInterface.setLoggerMode(LoggerMode.Error)
    ale = ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(roms.get_rom_path(gymnasium.spec(game_id(game)).kwargs["game"]))
    codes, rng = [action.value for action in ale.getMinimalActionSet()], np.random.default_rng(seed)
    fires, shown = 1 in codes, np.zeros((2, *ale.getScreenDims()), np.uint8)

    def begin() -> int:
        """Start a game, or the next life of one; returns the lives."""
        if ale.game_over():
            ale.reset_game()
            for _ in range(rng.integers(1, 31)):
                ale.act(0)
        else:
            hold(0)
        if fires:
            hold(1)
        return ale.lives()

    def hold(code: int) -> None:
        for _ in range(4):
            ale.act(code)

    ale.reset_game()
    lives = begin()
    for line in sys.stdin:
        steps, end = 0, time.perf_counter() + float(line)
        while time.perf_counter() < end:
            for code in rng.choice(codes, 8).tolist():
                ale.act(code)
                ale.act(code)
                ale.act(code)
                if screens:
                    ale.getScreenGrayscale(shown[1])
                ale.act(code)
                if screens:
                    ale.getScreenGrayscale(shown[0])
                if ale.game_over() or ale.lives() < lives:
                    lives = begin()
            steps += 8
        print(steps, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, save."""
    cores = free_cores()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="Breakout")
    parser.add_argument("--envs", nargs="+", type=int, default=[4 * cores, 8 * cores], help="numbers of envs")
    parser.add_argument("--seconds", type=float, default=1.5, help="each turn of each vector")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tag", default="", help="added to the names of the result files, such as 16-cores")
    parser.add_argument("--quick", action="store_true", help="see that it runs: few short rounds, nothing is saved")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if chosen.quick:
        chosen.envs, chosen.seconds, chosen.rounds = [2], 0.05, 1
    results, rows = {}, []
    for num_envs in chosen.envs:
        results[str(num_envs)], more = measure(chosen.game, num_envs, chosen.seconds, chosen.rounds)
        rows += more
    title = f"### {chosen.game}, steps/s, {cores} cores"
    text = f"{title}\n\n{table(['envs', 'vector', 'steps/s', 'hurtle / it', 'goal'], rows)}\n\n{NOTE}"
    print(f"\n{text}", flush=True)
    if not chosen.quick:
        save("-".join(filter(None, ["atari", chosen.tag])), results, text)


if __name__ == "__main__":
    main()
