"""`choose`: picks the back end for a Python env by stepping it briefly.

maker → one env in this process → seconds per step → predicted time of a batch, serial and with workers → if workers look
worthwhile and steps are cheap, a short measurement of both in turns → back end, and the reason.
Ignores the time of the policy between steps; `hurtle bench vector` measures that.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from hurtle.errors import EnvFailedError
from hurtle.native.threads import free_cores, has_share
from hurtle.vector.description import CONSTRUCTOR, Description, EnvMaker, description_of, env_failure, prepare
from hurtle.vector.env_rows import RowPlan, Rows, private_rows
from hurtle.vector.options import VecOptions
from hurtle.vector.random_actions import batch_actions, has_action_mask, legal_actions
from hurtle.vector.shard import Shard

TRIAL_SECONDS = 0.15
TRIAL_STEPS = 2000
FEWEST_STEPS = 5
"""Minimum number of steps, even if they take longer than TRIAL_SECONDS …"""
SLOW_STEP = 0.5
"""… unless one step takes longer than this, which is enough to know that the env is slow."""

# The cost model, in seconds. The overhead of a batch (sending actions, wake-ups, done messages, results) was measured with
# envs that do nothing (`python benchmarks/vector.py --sections delay`, the table of batches): about 48 µs with one worker and
# 52 µs with two, on two Xeon cores.
BATCH_OVERHEAD = 40e-6
WORKER_OVERHEAD = 8e-6
"""Overhead of each worker: its command and its done message."""
SHARING = 1.05
"""Slow-down of a step in a worker: workers and learner share caches and memory."""
LEAST_SPEED_UP = 1.4
"""Speed-up that workers must be predicted, and measured, to have; below it noise would decide, and serial is simpler."""

CLEAR_STEP = 1e-3
"""Seconds per step above which the overhead of workers is negligible and the prediction needs no measurement."""
ROUNDS = 8
"""Rounds of the measurement; in each, serial and workers have a turn, in alternating order."""
TURN_SECONDS = 0.03


@dataclass(frozen=True)
class Trial:
    """The result of stepping one env briefly."""

    name: str
    step_seconds: float
    """Mean time of a step, including automatic resets."""


def choose(maker: EnvMaker, options: VecOptions) -> tuple[str, VecOptions, str]:
    """The best back end for the env, the options with `num_workers` set for it, and one line with the reason.

    It is empty where one of several processes of a run has a share of one core, which says nothing about the machine.

    Raises:
        EnvFailedError: The env raised while it was tried.
    """
    cores = free_cores()
    if options.step_timeout is not None or options.restart_workers:
        asked = "step_timeout" if options.step_timeout is not None else "restart_workers"
        workers = options.num_workers or min(cores, options.num_envs)
        return "process", replace(options, num_workers=workers), f"process with {_count(workers, 'worker')}, because of {asked}"
    reason = "one core" if cores == 1 else "one env" if options.num_envs == 1 else ""
    if reason:
        why = "" if reason == "one core" and has_share() else f"serial, because there is only {reason}"
        return "serial", replace(options, num_workers=None), why
    if _is_atari(maker):
        workers = options.num_workers or min(cores, options.num_envs)
        why = f"process with {_count(workers, 'worker')}, because Atari games take long to step"
        return "process", replace(options, num_workers=workers), why
    trial = try_env(maker, options)
    workers = options.num_workers or _best_workers(trial.step_seconds, options.num_envs, cores)
    serial = options.num_envs * trial.step_seconds
    speed_up = serial / batch_seconds(trial.step_seconds, options.num_envs, workers, cores)
    if speed_up >= LEAST_SPEED_UP and trial.step_seconds < CLEAR_STEP:
        speed_up = measured_speed_up(maker, options, workers, trial.step_seconds)
    about = f"{trial.name}: {duration(trial.step_seconds)} per step, {options.num_envs} envs"
    with_workers = f"process with {_count(workers, 'worker')}"
    if speed_up < LEAST_SPEED_UP:
        why = f"{about}: serial ({with_workers} would be about {speed_up:.1f}×)"
        return "serial", replace(options, num_workers=None), why
    return "process", replace(options, num_workers=workers), f"{about}: {with_workers} (about {speed_up:.1f}× serial)"


def _is_atari(maker: EnvMaker) -> bool:
    """Whether the maker makes an Atari game by name: a step takes about 0.5 ms anywhere, so there is nothing to measure."""
    atari = sys.modules.get("hurtle.envs.atari")
    return atari is not None and getattr(maker, "func", None) is atari.make_atari


def measured_speed_up(maker: EnvMaker, options: VecOptions, workers: int, step_seconds: float) -> float:
    """The speed-up of worker processes over serial, from a short measurement of both."""
    from hurtle.vector.process_vec import ProcessVecEnv
    from hurtle.vector.serial_vec import SerialVecEnv

    whole = replace(options, batch_size=options.num_envs, autoreset_mode=AutoresetMode.SAME_STEP, check=False)
    batches = max(1, int(TURN_SECONDS / (options.num_envs * step_seconds)))
    with (
        SerialVecEnv(maker, replace(whole, num_workers=None)) as serial,
        ProcessVecEnv(maker, replace(whole, num_workers=workers)) as process,
    ):
        return speed_up_in_turns(_turn(serial, batch_actions(serial), batches), _turn(process, batch_actions(process), batches))


def _turn(vec: Any, actions: Callable[[int, Any, dict[str, Any]], Any], batches: int) -> Callable[[], None]:
    last = list(vec.reset())

    def turn() -> None:
        for k in range(batches):
            last[0], *_, last[1] = vec.step(actions(k, *last))

    turn()  # warm-up
    return turn


def speed_up_in_turns(
    serial: Callable[[], None], workers: Callable[[], None], clock: Callable[[], float] = perf_counter
) -> float:
    """The speed-up of `workers` over `serial`: the median of ROUNDS in which both have a turn.

    Both turns of a round see the same machine, and the order alternates, so that a change of the machine's speed favours
    neither.
    """
    ratios = []  # logarithms, so that going first gains as much in one round as it loses in the next
    for k in range(ROUNDS):
        seconds: dict[Callable[[], None], float] = {}
        for turn in (serial, workers) if k % 2 == 0 else (workers, serial):
            began = clock()
            turn()
            seconds[turn] = clock() - began
        ratios.append(math.log(seconds[serial] / seconds[workers]))
    return math.exp(np.median(ratios))


def batch_seconds(step_seconds: float, num_envs: int, num_workers: int, cores: int) -> float:
    """The predicted time of a step of all envs with worker processes.

    Example:
        >>> duration(batch_seconds(1e-3, num_envs=8, num_workers=2, cores=2))
        '4.3 ms'
    """
    turns = max(math.ceil(num_envs / num_workers), num_envs / cores)  # more workers than cores take turns
    return turns * step_seconds * SHARING + BATCH_OVERHEAD + WORKER_OVERHEAD * num_workers


def _best_workers(step_seconds: float, num_envs: int, cores: int) -> int:
    """The number of workers with the best prediction: for cheap envs, another worker may cost more than it saves."""
    return min(range(2, min(cores, num_envs) + 1), key=lambda workers: batch_seconds(step_seconds, num_envs, workers, cores))


def try_env(maker: EnvMaker, options: VecOptions) -> Trial:
    """Step a throw-away env briefly with random actions.

    It runs in a `Shard`, like the envs of serial and worker processes, so that the timing applies to them.
    """
    env = _guarded(CONSTRUCTOR, lambda: prepare(maker(), options.emulate, check=False))
    try:
        description = _guarded("reset", lambda: description_of(env, options.emulate, check=False))
        rows = private_rows(RowPlan.of(description, num_envs=1))
        # Autoresets even if the vector would not; leaves the checks to the chosen back end.
        shard = Shard([lambda: env], 0, description, rows, AutoresetMode.SAME_STEP, check=False)
        shard.reset(0, options.seed, None)
        return Trial(_name(env), _step_seconds(shard, _random_actions(description, rows)))
    finally:
        env.close()


def _step_seconds(shard: Shard, act: Callable[[], None]) -> float:
    seen: list[float] = []
    end = perf_counter() + TRIAL_SECONDS
    while len(seen) < TRIAL_STEPS:
        act()
        began = perf_counter()
        shard.step(0)
        now = perf_counter()
        seen.append(now - began)
        shard.infos.clear()
        if seen[-1] > SLOW_STEP or (now > end and len(seen) >= FEWEST_STEPS):
            break
    return float(np.mean(seen[1:] or seen))  # the first step may load or compile something


def _random_actions(description: Description, rows: Rows) -> Callable[[], None]:
    """A function that writes the next random action into its row, a legal one if the env has a mask."""
    space = copy.deepcopy(description.action_space)  # so that the env's own space keeps its random stream
    space.seed(0)
    ready, turn = [space.sample() for _ in range(64)], 0
    rng = np.random.default_rng(0)
    memory = rows.actions if description.num_agents is None else rows.actions[0]
    writers = [description.actions.writer(row) for row in memory]  # one per agent
    masks = _observed_mask(description, rows) if has_action_mask(description.structure.space) else rows.action_mask
    masks = masks.reshape(len(writers), -1)  # a view that each step updates

    def act() -> None:
        nonlocal turn
        legal = legal_actions(space, masks, rng) if masks.size and not masks.all() else None
        for k, write in enumerate(writers):
            turn += 1
            write(ready[turn % len(ready)] if legal is None else legal[k])

    return act


def _observed_mask(description: Description, rows: Rows) -> np.ndarray:
    return rows.action_mask if description.mask_size else description.structure.batch(rows.obs)["action_mask"]


def _guarded(doing: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except EnvFailedError:
        raise
    except Exception as error:
        raise env_failure(0, None, doing, error) from error


def _name(env: Any) -> str:
    spec = getattr(env, "spec", None)
    if spec is not None:
        return str(spec.id)
    bare = getattr(env, "unwrapped", env)
    return str(getattr(bare, "metadata", {}).get("name") or type(bare).__name__)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A time in human-readable form.

    Example:
        >>> duration(8.13e-6), duration(650e-6), duration(0.0021), duration(1.5)
        ('8.1 µs', '650 µs', '2.1 ms', '1.5 s')
    """
    size, unit = next((size, unit) for size, unit in ((1.0, "s"), (1e-3, "ms"), (0.0, "µs")) if seconds >= size)
    value = seconds / (size or 1e-6)
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
