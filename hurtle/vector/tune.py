"""`choose`: which back end suits a Python env, from a moment of stepping it.

maker → one env in this process → seconds a step → predicted time of a batch, serial and with workers → where workers promise
enough and steps are cheap, both for a moment, in turns → back end, and why.
Knows no policy: what a learner does between steps is `hurtle bench vector`'s to measure.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from hurtle.errors import EnvFailedError
from hurtle.native.threads import free_cores
from hurtle.vector.description import CONSTRUCTOR, Description, EnvMaker, description_of, env_failure, prepare
from hurtle.vector.options import VecOptions
from hurtle.vector.rows import RowPlan, Rows, private_rows
from hurtle.vector.shard import Shard

TRIAL_SECONDS = 0.15
TRIAL_STEPS = 2000
FEWEST_STEPS = 5
"""Steps that are tried even if they take longer than TRIAL_SECONDS …"""
SLOW_STEP = 0.5
"""… unless one of them takes longer than this; no more is needed to know that the env is slow."""

# The cost model, in seconds. What a batch costs beside the envs' own steps (actions out, wake-ups, done messages back, results)
# was measured with envs that do nothing (`python benchmarks/vector.py --sections delay`, the table of batches): about 48 µs
# with one worker and 52 µs with two, on two Xeon cores.
BATCH_OVERHEAD = 40e-6
WORKER_OVERHEAD = 8e-6
"""Of each worker: its own command and done message."""
SHARING = 1.05
"""A step in a worker takes so much longer: workers and learner share caches and memory."""
LEAST_SPEED_UP = 1.4
"""Workers must promise at least this much, and show it; below it noise decides, and the simple thing wins."""

CLEAR_STEP = 1e-3
"""Seconds of a step from which what workers cost is negligible, so that nothing more is measured."""
ROUNDS = 8
"""In each, serial and workers have a turn, and who begins changes."""
TURN_SECONDS = 0.03


@dataclass(frozen=True)
class Trial:
    """What a moment with one env told."""

    name: str
    step_seconds: float
    """Mean of a step, automatic resets included."""


def choose(maker: EnvMaker, options: VecOptions) -> tuple[str, VecOptions, str]:
    """The back end that suits the env, the options with `num_workers` set for it, and one line that says why.

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
        return "serial", replace(options, num_workers=None), f"serial, as there is only {reason}"
    trial = try_env(maker, options)
    workers = options.num_workers or _best_workers(trial.step_seconds, options.num_envs, cores)
    serial = options.num_envs * trial.step_seconds
    speed_up = serial / batch_seconds(trial.step_seconds, options.num_envs, workers, cores)
    if speed_up >= LEAST_SPEED_UP and trial.step_seconds < CLEAR_STEP:
        speed_up = measured_speed_up(maker, options, workers, trial.step_seconds)
    about = f"{trial.name}: {duration(trial.step_seconds)} a step, {options.num_envs} envs"
    with_workers = f"process with {_count(workers, 'worker')}"
    if speed_up < LEAST_SPEED_UP:
        why = f"{about}: serial ({with_workers} would be about {speed_up:.1f}×)"
        return "serial", replace(options, num_workers=None), why
    return "process", replace(options, num_workers=workers), f"{about}: {with_workers} (about {speed_up:.1f}× serial)"


def measured_speed_up(maker: EnvMaker, options: VecOptions, workers: int, step_seconds: float) -> float:
    """How many times as fast as serial worker processes are, from a moment of both."""
    from hurtle.vector.autotune import batch_actions  # measures what this module chooses from
    from hurtle.vector.process import ProcessVecEnv
    from hurtle.vector.serial import SerialVecEnv

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

    turn()  # the first steps load what the others use
    return turn


def speed_up_in_turns(
    serial: Callable[[], None], workers: Callable[[], None], clock: Callable[[], float] = perf_counter
) -> float:
    """How many times as fast as `serial` `workers` is: the median of ROUNDS in which both have a turn.

    Two turns in a row see the same machine, and each goes first in every other round: where the machine's speed changes on the
    way, neither is favoured.
    """
    ratios = []  # logarithms: who goes first gains as much in one round as it loses in the next
    for k in range(ROUNDS):
        seconds: dict[Callable[[], None], float] = {}
        for turn in (serial, workers) if k % 2 == 0 else (workers, serial):
            began = clock()
            turn()
            seconds[turn] = clock() - began
        ratios.append(math.log(seconds[serial] / seconds[workers]))
    return math.exp(np.median(ratios))


def batch_seconds(step_seconds: float, num_envs: int, num_workers: int, cores: int) -> float:
    """The predicted time of one step of all envs with worker processes.

    Example:
        >>> duration(batch_seconds(1e-3, num_envs=8, num_workers=2, cores=2))
        '4.3 ms'
    """
    turns = max(math.ceil(num_envs / num_workers), num_envs / cores)  # more workers than cores take turns
    return turns * step_seconds * SHARING + BATCH_OVERHEAD + WORKER_OVERHEAD * num_workers


def _best_workers(step_seconds: float, num_envs: int, cores: int) -> int:
    """As many workers as help: for cheap envs a further worker costs more than it brings."""
    return min(range(2, min(cores, num_envs) + 1), key=lambda workers: batch_seconds(step_seconds, num_envs, workers, cores))


def try_env(maker: EnvMaker, options: VecOptions) -> Trial:
    """Step a throw-away env with random actions for a moment.

    It runs in the shard that serial and worker processes run too, so that what is timed is what they will do.
    """
    env = _guarded(CONSTRUCTOR, lambda: prepare(maker(), options.emulate, check=False))
    try:
        description = _guarded("reset", lambda: description_of(env, options.emulate, check=False))
        rows = private_rows(RowPlan.of(description, num_envs=1))
        # It resets by itself where the vector would not, and the checks are left to the back end that is chosen.
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
    return float(np.mean(seen[1:] or seen))  # the first step may load or compile what the others use


def _random_actions(description: Description, rows: Rows) -> Callable[[], None]:
    """A function that puts the next random action into its row, a legal one where the env tells."""
    space = copy.deepcopy(description.action_space)  # the env's own keeps its random stream
    space.seed(0)
    ready, turn = [space.sample() for _ in range(64)], 0
    rng = np.random.default_rng(0)
    memory = rows.actions if description.num_agents is None else rows.actions[0]
    writers = [description.actions.writer(row) for row in memory]  # one per agent
    masks = _observed_mask(description, rows) if tells_legal(description.structure.space) else rows.action_mask
    masks = masks.reshape(len(writers), -1)  # a view of what each step writes

    def act() -> None:
        nonlocal turn
        legal = legal_actions(space, masks, rng) if masks.size and not masks.all() else None
        for k, write in enumerate(writers):
            turn += 1
            write(ready[turn % len(ready)] if legal is None else legal[k])

    return act


def tells_legal(space: spaces.Space) -> bool:
    """Whether observations have a mask of legal actions in them."""
    return isinstance(space, spaces.Dict) and "action_mask" in space.spaces


def _observed_mask(description: Description, rows: Rows) -> np.ndarray:
    return rows.action_mask if description.mask_size else description.structure.batch(rows.obs)["action_mask"]


def legal_actions(space: spaces.Space, masks: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
    """A random legal action for each row of masks, bool [..., n]; None where they say nothing about this space.

    Example:
        >>> masks = np.array([[False, True, False], [False, False, True]])
        >>> legal_actions(spaces.Discrete(3), masks, np.random.default_rng(0))
        array([1, 2])
    """
    if isinstance(space, spaces.Discrete):
        counts = np.array([space.n])
    elif isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        counts = space.nvec
    else:
        return None
    if masks.shape[-1] < counts.sum():
        return None
    scores = masks * (1 - rng.random(masks.shape))  # (0, 1] where legal, 0 where not
    parts = np.split(scores, np.cumsum(counts), axis=-1)[:-1]
    chosen = np.stack([part.argmax(-1) for part in parts], -1)
    return (chosen[..., 0] if isinstance(space, spaces.Discrete) else chosen) + space.start


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
    """A time for people.

    Example:
        >>> duration(8.13e-6), duration(650e-6), duration(0.0021), duration(1.5)
        ('8.1 µs', '650 µs', '2.1 ms', '1.5 s')
    """
    size, unit = next((size, unit) for size, unit in ((1.0, "s"), (1e-3, "ms"), (0.0, "µs")) if seconds >= size)
    value = seconds / (size or 1e-6)
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
