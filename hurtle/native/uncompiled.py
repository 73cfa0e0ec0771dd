"""Runs an env uncompiled: its functions as plain Python, and random play that reports errors at the author's own line.

rewritten methods + engine sources → functions on checked arrays → seeded random play.
"""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np

from hurtle.errors import EnvCodeError
from hurtle.native import python_target
from hurtle.native.adapters import adapter_source
from hurtle.native.batch_arrays import aligned_zeros, allocate, seed_records
from hurtle.native.cpu_loops import NEXT_STEP, PLAY, RESET, SAME_STEP
from hurtle.native.env import Env, EnvSpec
from hurtle.native.generate import LOOPS, paste
from hurtle.native.language import code_message
from hurtle.native.pasted import Arrays
from hurtle.native.rewrite import METHODS, Rewritten, rewrite
from hurtle.native.rng import ACTION_STREAM, stream_states

PROBE_STEPS = 8


class UncompiledFunctions:
    """One env's functions as plain Python: the author's own lines, checked arrays, the reference random streams.

    They take what those of `CpuFunctions` take.
    """

    def __init__(self, spec: EnvSpec):
        names = _namespace(spec)
        self._run, self.first_illegal, self.sample_action = names["run_envs"], names["first_illegal"], names["sample_action"]

    def reset_envs(self, handle: Any, chosen: np.ndarray, lo: int, hi: int) -> None:
        """Begin a new episode in the chosen envs of [lo, hi)."""
        self._run(RESET, handle, chosen, None, 0, 1, lo, hi)

    def step_envs(self, handle: Any, actions: np.ndarray, same_step: bool, lo: int, hi: int) -> int:
        """Step envs [lo, hi); returns the number of episodes that ended."""
        return self._run(SAME_STEP if same_step else NEXT_STEP, handle, actions, None, 0, 1, lo, hi)

    def play_envs(
        self, handle: Any, actions: np.ndarray, seeds: np.ndarray, first_step: int, num_steps: int, lo: int, hi: int
    ) -> int:
        """Take `num_steps` uniformly random actions in envs [lo, hi); returns the number of episodes that ended."""
        return self._run(PLAY, handle, actions, seeds.tolist(), first_step, first_step + num_steps, lo, hi)


def _namespace(spec: EnvSpec) -> dict[str, Any]:
    namespace = python_target.namespace()
    namespace["self"] = spec.env  # for the debugger; rewritten code does not use it
    rewritten: Rewritten = rewrite(spec, "python")
    namespace.update({name: python_target.CheckedArray(table) for name, table in rewritten.tables.items()})
    for method in METHODS:  # names that `print` and `assert` messages may use
        for name, value in getattr(spec.method(method), "__globals__", {}).items():
            namespace.setdefault(name, value)
    for function, file in rewritten.functions:
        exec(compile(ast.Module([function], []), file, "exec"), namespace)
    python_target.guard_methods(namespace, spec)
    for label, text in (
        ("adapters", adapter_source(spec)),
        ("core", paste("core.py")),
        ("loops", paste(LOOPS["python"])),
    ):
        exec(compile(text, f"<hurtle {label}>", "exec"), namespace)
    namespace["zero_obs"] = python_target.zero
    namespace["advance_env"] = namespace["advance_many" if spec.num_agents > 1 else "advance_one"]
    return namespace


def probe(spec: EnvSpec) -> None:
    """Take a few uncompiled steps before compiling, so that plain mistakes are reported at the author's own line."""
    for _ in play_uncompiled(spec, 1, PROBE_STEPS, seed=0):
        pass


def play_uncompiled(spec: EnvSpec, num_envs: int, num_steps: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray, Arrays]]:
    """Play random actions in uncompiled envs; yields each step's actions, the records before it, and the arrays after it.

    Raises:
        EnvCodeError: The env's code failed; names the author's line.
    """
    functions, arrays = UncompiledFunctions(spec), allocate(spec, num_envs, aligned_zeros)
    actions = np.zeros((num_envs, *spec.agents_shape, *spec.action_shape), spec.action_dtype)
    checked, everyone, seeds = python_target.checked(arrays), np.ones(num_envs, np.bool_), np.arange(seed, seed + num_envs)
    streams = stream_states(seeds, ACTION_STREAM)
    functions.sample_action.__globals__.update(print=_nothing, breakpoint=_nothing)  # the author's debugging aids
    seed_records(spec, arrays.envs, seeds, everyone)
    try:
        with np.errstate(all="ignore"):  # NaN and infinity are errors only once they reach an observation or a reward
            functions.reset_envs(checked, everyone, 0, num_envs)
        for t in range(num_steps):
            for i in range(num_envs):
                functions.sample_action(int(streams[i]), t, actions, i)
            before = arrays.envs.copy()
            with np.errstate(all="ignore"):
                functions.step_envs(checked, actions, True, 0, num_envs)
            yield actions, before, arrays
    except EnvCodeError as error:
        raise EnvCodeError(_at_authors_line(spec, error)) from None
    except (IndexError, TypeError, ValueError, ArithmeticError, AttributeError, NameError, AssertionError) as error:
        raise EnvCodeError(_at_authors_line(spec, error)) from error


def _nothing(*arguments: Any, **keywords: Any) -> None:
    pass


def _at_authors_line(spec: EnvSpec, error: Exception) -> str:
    """The error's message after the innermost line of the author's code in its traceback."""
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
