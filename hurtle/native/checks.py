"""`check(MyEnv)`: plays an env on every target and reports what an author would want to know before training on it.

definition → uncompiled play with every access checked → compiled play from the same states, compared step by step → report.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hurtle.errors import EnvCodeError
from hurtle.native.batch import CpuBatch
from hurtle.native.build import Program, build
from hurtle.native.cuda_support import gpu_is_usable
from hurtle.native.env import Env, EnvSpec
from hurtle.native.language import code_message
from hurtle.native.rng import ACTION_STREAM, stream_states

COMPARED = ("obs", "reward", "terminated", "truncated", "ended", "episode_ended", "mask", "present")
COMPARED_AT_THE_END = ("final_obs", "episode_return", "episode_length", "episode_metrics")
PROBE_STEPS = 8


@dataclass
class CheckReport:
    """What `check` found: the checks that passed, and warnings that do not stop the env from working."""

    name: str
    passed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.passed)} checks passed, {len(self.warnings)} warnings"]
        return "\n".join(
            lines + [f"  ok       {text}" for text in self.passed] + [f"  warning  {text}" for text in self.warnings]
        )


def check(env: Env | type[Env], num_steps: int = 500, num_envs: int = 4, seed: int = 0) -> CheckReport:
    """Check an env: definition, array accesses, NaN, space bounds, determinism, and that all targets agree.

    Args:
        env: The env class, or an instance with its parameters.
        num_steps: Random steps to play in each env.
        num_envs: How many envs to play.
        seed: Seed of the first env and of the actions.

    Returns:
        A report; print it.

    Raises:
        EnvDefinitionError: The class is incomplete.
        EnvCodeError: The code does something wrong; names the author's file and line where it can.

    Example:
        >>> from hurtle.envs.cartpole import CartPole
        >>> print(check(CartPole, num_steps=50).warnings)
        []
    """
    spec = EnvSpec.of(env)
    report = CheckReport(spec.name)
    report.passed.append("definition: spaces, State and methods")

    debug = CpuBatch(spec, num_envs, debug=True)
    compiled = CpuBatch(spec, num_envs, num_threads=1)
    others: list[tuple[str, Any]] = [("cpu", compiled)]
    if gpu_is_usable():
        from hurtle.native.cuda_batch import CudaBatch

        others.append(("cuda", CudaBatch(spec, num_envs)))
    for actions, before in _play(spec, debug, num_steps, seed):
        _check_rewards(spec, debug.arrays.reward)
        _check_observations(spec, debug.arrays.obs)
        _check_observations(spec, debug.arrays.final_obs[debug.arrays.ended])
        for target, batch in others:
            _compare(spec, target, batch, before, actions, debug)
    played = f"{num_steps} random steps in {num_envs} envs"
    report.passed.append(f"uncompiled play, every read and write checked: {played}")
    report.passed.append("rewards finite; observations finite and inside the observation space")
    report.passed += [f"the {target} target agrees with plain Python, step by step" for target, _ in others]

    _check_determinism(spec, num_steps, num_envs, seed)
    report.passed.append("the same seed gives the same trajectory, on one thread and on two")
    report.warnings += sorted(_wide_arithmetic(build(spec, "cpu"), compiled))
    return report


def probe(spec: EnvSpec) -> None:
    """A first look before compiling: a few uncompiled steps, so that plain mistakes come with the author's own line."""
    for _ in _play(spec, CpuBatch(spec, 1, debug=True), PROBE_STEPS, seed=0):
        pass


def _play(spec: EnvSpec, batch: CpuBatch, num_steps: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random play of an uncompiled batch; yields each step's actions and the records before it."""
    everyone = np.ones(batch.num_envs, np.bool_)
    seeds = np.arange(seed, seed + batch.num_envs)
    streams = stream_states(seeds, ACTION_STREAM)
    sample = batch.functions.sample_action
    sample.__globals__.update(print=_nothing, breakpoint=_nothing)  # for the author's own debugging, not for a check
    batch.seed(seeds, everyone)
    try:
        with np.errstate(all="ignore"):  # NaN and infinity are judged by what they do to the observation
            batch.reset(everyone)
        for t in range(num_steps):
            for i in range(batch.num_envs):
                sample(int(streams[i]), t, batch.actions, i)
            before = batch.arrays.envs.copy()
            with np.errstate(all="ignore"):
                batch.step(batch.actions)
            yield batch.actions, before
    except EnvCodeError as error:
        raise EnvCodeError(_at_authors_line(spec, error)) from None
    except (IndexError, TypeError, ValueError, ArithmeticError, AttributeError, NameError, AssertionError) as error:
        raise EnvCodeError(_at_authors_line(spec, error)) from error


def _nothing(*arguments: Any, **keywords: Any) -> None:
    pass


def _at_authors_line(spec: EnvSpec, error: Exception) -> str:
    """The error's message, led by the innermost line of the author's code that it passed through."""
    files = {function.__code__.co_filename for function in _author_functions(spec)}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if not frames:
        return str(error) if isinstance(error, EnvCodeError) else f"{spec.name} failed in plain Python: {error!r}"
    said = str(error) if isinstance(error, EnvCodeError) else f"{type(error).__name__}: {error}"
    frame = frames[-1]
    problem = f"failed in plain Python: {said.rstrip('.')}"
    return code_message(
        frame.filename, frame.lineno or 0, f"{spec.name}.{re.sub('^(env|self|fn)_', '', frame.name)}", problem, ""
    ).rstrip()


def _author_functions(spec: EnvSpec) -> list[Any]:
    owners = [base for base in type(spec.env).__mro__ if base not in (Env, object)]
    return [value for owner in owners for value in vars(owner).values() if hasattr(value, "__code__")]


def _check_rewards(spec: EnvSpec, rewards: np.ndarray) -> None:
    if not np.isfinite(rewards).all():
        env, agent = np.argwhere(~np.isfinite(rewards))[0]
        whose = f"env {env}, agent {agent}" if spec.num_agents > 1 else f"env {env}"
        raise EnvCodeError(f"{spec.name}.step gave the reward {rewards[env, agent]} ({whose}).")


def _check_observations(spec: EnvSpec, rows: np.ndarray) -> None:
    space = spec.observation_space
    obs = rows.reshape(-1, *spec.obs_shape)
    if obs.dtype.kind == "f" and not np.isfinite(obs).all():
        place = tuple(int(k) for k in np.argwhere(~np.isfinite(obs))[0])
        raise EnvCodeError(f"{spec.name}.observe wrote {obs[place]} to obs{list(place[1:])} (env {place[0]}).")
    outside = (obs < space.low) | (obs > space.high)
    if outside.any():
        place = tuple(int(k) for k in np.argwhere(outside)[0])
        low, high = (np.broadcast_to(bound, obs.shape)[place] for bound in (space.low, space.high))
        raise EnvCodeError(
            f"{spec.name}.observe wrote {obs[place]} to obs{list(place[1:])} (env {place[0]}), "
            f"but the observation space there is [{low}, {high}]."
        )


def _compare(spec: EnvSpec, target: str, batch: Any, before: np.ndarray, actions: np.ndarray, debug: CpuBatch) -> None:
    """One step of another target from the same records; its results must be those of the uncompiled step."""
    batch.load_records(before)
    batch.step_with(actions)
    ended = debug.arrays.episode_ended.any(1)  # other rows of what is kept of an episode are stale
    for name in COMPARED + COMPARED_AT_THE_END:
        expected, got = getattr(debug.arrays, name), batch.to_numpy(getattr(batch.arrays, name))
        if name in COMPARED_AT_THE_END:
            rows = debug.arrays.ended if name in ("final_obs", "episode_metrics") else ended
            expected, got = expected[rows], got[rows]
        exact = expected.dtype.kind != "f"
        same = expected == got if exact else np.isclose(expected, got, rtol=1e-4, atol=1e-4, equal_nan=True)
        if not same.all():
            place = tuple(int(k) for k in np.argwhere(~same)[0])
            raise EnvCodeError(
                f"{spec.name}: the {target} target disagrees with plain Python on {name}{list(place)}: "
                f"{got[place]} instead of {expected[place]}, from the same state and action {actions[place[0]]}. Usual causes: "
                "an index out of bounds or negative, an integer that overflows, a comparison of nearly equal floats."
            )


def _check_determinism(spec: EnvSpec, num_steps: int, num_envs: int, seed: int) -> None:
    """Two threads, and one env more, must not change what any env does."""
    results = []
    for threads, count in ((1, num_envs), (2, num_envs + 1)):
        batch = CpuBatch(spec, count, num_threads=threads)
        everyone = np.ones(count, np.bool_)
        batch.seed(np.arange(seed, seed + count), everyone)
        batch.reset(everyone)
        batch.play(num_steps, seed)
        batch.close()
        results.append(batch.arrays.envs[:num_envs].tobytes() + batch.arrays.obs[:num_envs].tobytes())
    if results[0] != results[1]:
        raise EnvCodeError(
            f"{spec.name}: the same seed gave two different trajectories, on one thread and on two. "
            "All randomness must come from `rng`, and all memory must be State."
        )


def _wide_arithmetic(program: Program, batch: CpuBatch) -> set[str]:
    """Author's lines whose compiled arithmetic is float64 or unsigned: usually an int that met a float, slow on a GPU."""
    from numba import njit, types

    fresh = njit(nogil=True, error_model="numpy")(program.functions.step_envs.py_func)  # not from the cache: types are needed
    fresh(batch.pool, batch.actions, True, 0, 0)
    advice = {
        types.float64: "is computed in float64: an int meets a float32; write 2.0 instead of 2, float(n) instead of n",
        types.uint64: "is computed unsigned: a small difference wraps around; read State fields directly, or use int(…)",
    }
    found = set()
    for name, function in vars(program.functions).items():
        if not name.startswith(("env_", "self_", "fn_")) or not hasattr(function, "overloads"):
            continue
        for compiled in function.overloads.values():
            annotation = compiled.type_annotation
            for block in getattr(annotation, "blocks", {}).values():
                for statement in block.body:
                    operation = getattr(getattr(statement, "value", None), "op", None)
                    if operation not in ("binop", "inplace_binop"):
                        continue
                    kind = annotation.typemap.get(statement.target.name)
                    if kind in advice and statement.loc.line in program.lines:
                        file, line = program.lines[statement.loc.line]
                        found.add(code_message(file, line, "this line", advice[kind], "").strip().replace("\n    ", "  |  "))
    return found
