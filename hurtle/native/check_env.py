"""`check(MyEnv)`: plays an env on every target and reports errors and slow code before anyone trains on it.

definition → uncompiled play with every access checked → compiled play from the same states, compared step by step → report.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hurtle.errors import EnvCodeError
from hurtle.native.batch import CpuBatch
from hurtle.native.build import Program, build, write_atomically
from hurtle.native.cpu_loops import SAME_STEP
from hurtle.native.cuda_batch import CudaBatch
from hurtle.native.cuda_support import gpu_is_usable
from hurtle.native.env import Env, EnvSpec
from hurtle.native.language import code_message
from hurtle.native.pasted import Arrays
from hurtle.native.uncompiled import play_uncompiled

COMPARED = ("obs", "reward", "terminated", "truncated", "ended", "episode_ended", "mask", "present")
COMPARED_AT_THE_END = ("final_obs", "episode_return", "episode_length", "episode_metrics")
ADVICE = {
    "float64": "is computed in float64: an int meets a float32; write 2.0 instead of 2, float(n) instead of n",
    "uint64": "is computed unsigned: a small difference wraps around; read State fields directly, or use int(…)",
}
"""What a warning says about arithmetic in a wide type."""


@dataclass
class CheckReport:
    """The result of `check`: the checks that passed, and warnings, which do not stop the env from working."""

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
        num_envs: Number of envs to play.
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

    compiled = CpuBatch(spec, num_envs, num_threads=1)
    others: list[tuple[str, Any]] = [("cpu", compiled)]
    if gpu_is_usable():
        others.append(("cuda", CudaBatch(spec, num_envs)))
    for actions, before, expected in play_uncompiled(spec, num_envs, num_steps, seed):
        _check_rewards(spec, expected.reward)
        _check_observations(spec, expected.obs)
        _check_observations(spec, expected.final_obs[expected.ended])
        for target, batch in others:
            _compare(spec, target, batch, before, actions, expected)
    played = f"{num_steps} random steps in {num_envs} envs"
    report.passed.append(f"uncompiled play, every read and write checked: {played}")
    report.passed.append("rewards finite; observations finite and inside the observation space")
    report.passed += [f"the {target} target agrees with plain Python, step by step" for target, _ in others]

    _check_determinism(spec, num_steps, num_envs, seed)
    report.passed.append("the same seed gives the same trajectory, on one thread and on two")
    report.warnings += sorted(_wide_arithmetic(build(spec, "cpu"), compiled))
    return report


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


def _compare(spec: EnvSpec, target: str, batch: Any, before: np.ndarray, actions: np.ndarray, reference: Arrays) -> None:
    """Take one step on another target from the same records; its results must equal those of the uncompiled step."""
    batch.load_records(before)
    batch.step_with(actions)
    ended = reference.episode_ended.any(1)  # in other rows, the episode's return and length are stale
    for name in COMPARED + COMPARED_AT_THE_END:
        expected, got = getattr(reference, name), batch.to_numpy(getattr(batch.arrays, name))
        if name in COMPARED_AT_THE_END:
            rows = reference.ended if name in ("final_obs", "episode_metrics") else ended
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
    """A second thread and one more env must not change what any env does."""
    results = []
    for threads, count in ((1, num_envs), (2, num_envs + 1)):
        batch = CpuBatch(spec, count, num_threads=threads, adapts=False)
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
    """The author's lines that compute in float64, which is slow on a GPU, or unsigned: usually an int meets a float.

    Finding them takes a compilation; they are kept beside the compiled code.
    """
    import numba

    kept = Path(program.functions.__file__).with_suffix(".wide")
    places: list[tuple[int, str]]
    try:
        version, places = json.loads(kept.read_text())
        is_known = version == numba.__version__
    except (OSError, ValueError):
        is_known = False
    if not is_known:
        places = _wide_operations(program, batch)
        with suppress(OSError):  # a cache that only others may write
            write_atomically(kept, json.dumps([numba.__version__, places]))
    found = set()
    for number, kind in places:
        file, line = program.lines[number]
        found.add(code_message(file, line, "this line", ADVICE[kind], "").strip().replace("\n    ", "  |  "))
    return found


def _wide_operations(program: Program, batch: CpuBatch) -> list[tuple[int, str]]:
    """Lines of the generated code, and the wide types they compute in."""
    from numba import njit

    methods = [
        f
        for name, f in vars(program.functions).items()
        if name.startswith(("env_", "self_", "fn_")) and hasattr(f, "overloads")
    ]
    compiled_here = any(hasattr(found.type_annotation, "blocks") for found in program.functions.run_envs.overloads.values())
    if not compiled_here:  # loaded from disk, without types
        fresh = njit(error_model="numpy")(program.functions.run_envs.py_func)
        fresh(SAME_STEP, batch.handle.ctypes.data, batch.actions.ctypes.data, 0, 0, 1, 0, 0)
    found = set()
    for annotation in [compiled.type_annotation for function in methods for compiled in function.overloads.values()]:
        for block in getattr(annotation, "blocks", {}).values():
            for statement in block.body:
                operation = getattr(getattr(statement, "value", None), "op", None)
                if operation not in ("binop", "inplace_binop"):
                    continue
                kind = str(annotation.typemap.get(statement.target.name))
                if kind in ADVICE and statement.loc.line in program.lines:
                    found.add((statement.loc.line, kind))
    return sorted(found)
