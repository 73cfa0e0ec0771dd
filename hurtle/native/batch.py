"""`CpuBatch`: many envs of one kind in memory, stepped by compiled code on one or more threads (or uncompiled, to debug).

seeds, options → records → reset → actions → step → arrays, written in place. Knows nothing of Gymnasium's API.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from hurtle.errors import ActionError, EnvIndexError, HurtleError
from hurtle.native import python_target
from hurtle.native.batch_arrays import address_table, aligned_zeros, allocate, apply_options, seed_records
from hurtle.native.bounds import OutOfBounds
from hurtle.native.build import COMPILING, CpuFunctions, build
from hurtle.native.env import EnvSpec
from hurtle.native.rng import ACTION_STREAM, seed_range, stream_states
from hurtle.native.threads import ShardThreads, free_cores

TRIALS = 16
"""Number of steps timed to choose between one thread and all."""
PLAY_SECONDS = 0.1
"""The longest that one call without the GIL should take, in seconds: Ctrl-C waits for it."""


class CpuBatch:
    """A batch of envs on the CPU; all arrays are allocated once and reused.

    Args:
        spec: The checked env.
        num_envs: Number of envs.
        num_threads: None chooses one thread or all free cores by timing the first steps.
        debug: Run the author's code uncompiled, with every array access checked.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, num_threads: int | None = None, debug: bool = False):
        self.spec = spec
        self.num_envs = num_envs
        self.arrays = allocate(spec, num_envs, aligned_zeros)
        self.arrays.present[:] = True
        self.actions = aligned_zeros((num_envs, *spec.agents_shape, *spec.action_shape), spec.action_dtype)
        self.played = 0  # steps that `play` has taken; the next call continues from there
        self._play_slice = max(1, 10_000 // num_envs)  # steps in the first slice; the time it takes sets the size of the next
        # What `functions` take in place of the arrays: their addresses, or the arrays themselves, checked.
        self.handle = python_target.checked(self.arrays) if debug else address_table(self.arrays)
        with COMPILING:
            self._program = build(spec, "python" if debug else "cpu")
            self.functions = self._program.functions if debug else self._compiled()
        self._choose_threads(1 if debug else num_threads)

    def seed(self, seeds: np.ndarray, chosen: np.ndarray) -> None:
        """Restart each chosen env from its seed: reset its random stream, and its runtime parameters to their defaults."""
        seed_records(self.spec, self.arrays.envs, seeds, chosen)

    def set_options(self, options: Mapping[str, Any], chosen: np.ndarray) -> None:
        """Set runtime parameters of the chosen envs: one value for all, or an array with one per env."""
        apply_options(self.spec, self.arrays.envs, options, chosen)

    def reset(self, chosen: np.ndarray) -> None:
        """Begin a new episode in the chosen envs."""
        try:
            self.functions.reset_envs(self.handle, np.ascontiguousarray(chosen), 0, self.num_envs)
        except OutOfBounds as error:
            raise self.out_of_bounds(error) from None

    def step(self, actions: np.ndarray, same_step: bool = True) -> int:
        """Step all envs; returns the number of agents' episodes that ended.

        Args:
            actions: C-contiguous, of the shape and dtype of `self.actions`.
            same_step: Reset ended envs within this step (otherwise in the next one).

        Raises:
            ActionError: An action is not in the action space; no env was stepped.
            EnvIndexError: The env's code indexed an array out of bounds; names the author's line.
        """
        illegal = self.functions.first_illegal(actions, 0, self.num_envs)
        if illegal >= 0:
            raise ActionError(f"Env {illegal} got the action {actions[illegal]!s}, which is not in {self.spec.action_space}.")
        try:
            if self._threads is None:
                return self.functions.step_envs(self.handle, actions, same_step, 0, self.num_envs)
            if self._trials_left:
                return self._trial_step(actions, same_step)
            return sum(self._threads.run(partial(self.functions.step_envs, self.handle, actions, same_step)))
        except OutOfBounds as error:
            raise self.out_of_bounds(error) from None

    def step_with(self, actions: np.ndarray) -> None:
        """Step all envs with a copy of `actions`."""
        self.actions[...] = actions
        self.step(self.actions)

    def load_records(self, records: np.ndarray) -> None:
        """Replace all envs' records: state, random stream, return and length so far."""
        self.arrays.envs[...] = records

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        """One of the batch's arrays on the host, which is the array itself."""
        return array

    def play(self, num_steps: int, seed: int = 0) -> int:
        """Take uniformly random actions inside compiled code; returns the number of episodes that ended.

        Further calls with the same seed continue the sequence of actions.
        """
        seeds = stream_states(seed_range(seed, self.num_envs), ACTION_STREAM)
        ended, done = 0, 0
        while done < num_steps:
            size = min(self._play_slice, num_steps - done)
            began = time.perf_counter()
            args = (self.handle, self.actions, seeds, self.played + done, size)
            try:
                if self._threads is None:
                    ended += self.functions.play_envs(*args, 0, self.num_envs)
                else:
                    ended += sum(self._threads.run(partial(self.functions.play_envs, *args)))
            except OutOfBounds as error:
                raise self.out_of_bounds(error) from None
            done += size
            pace = PLAY_SECONDS / (time.perf_counter() - began + 1e-9)
            self._play_slice = max(1, int(size * min(8.0, pace)))
        self.played += num_steps
        return ended

    def out_of_bounds(self, error: OutOfBounds) -> EnvIndexError:
        """The error for an index out of bounds in this env's compiled code."""
        return self._program.out_of_bounds(error)

    def __reduce__(self) -> Any:
        raise HurtleError("Native envs cannot be copied or pickled: compiled code holds their addresses. Make new ones.")

    def close(self) -> None:
        """Stop the helper threads."""
        if self._threads is not None:
            self._threads.close()

    @property
    def num_threads(self) -> int:
        """Number of threads that step the envs."""
        return 1 if self._threads is None else len(self._threads.shards)

    # With num_threads=None the first steps are timed, half on one thread and half on all, and the faster choice is kept.

    def _choose_threads(self, num_threads: int | None) -> None:
        wanted = free_cores() if num_threads is None else num_threads
        many = wanted > 1 and self.num_envs > 1
        self._threads = ShardThreads(self.num_envs, wanted) if many else None
        self._trials: list[float] = []
        self._trials_left = TRIALS if many and num_threads is None else 0

    def _trial_step(self, actions: np.ndarray, same_step: bool) -> int:
        assert self._threads is not None
        job = partial(self.functions.step_envs, self.handle, actions, same_step)
        began = time.perf_counter()
        alone = self._trials_left > TRIALS // 2
        ended = job(0, self.num_envs) if alone else sum(self._threads.run(job))
        self._trials.append(time.perf_counter() - began)
        self._trials_left -= 1
        if self._trials_left == 0:
            half = TRIALS // 2
            if min(self._trials[:half]) < min(self._trials[half:]):
                self._threads.close()
                self._threads = None
        return ended

    def _compiled(self) -> CpuFunctions:
        """Compile, or load from the disk cache, before the first call, so that errors come early and name the author's line."""
        if self._program.is_new:
            print(f"hurtle: compiling {self.spec.name} (first run only) …", file=sys.stderr, flush=True)
        functions = CpuFunctions(self._program)
        functions.reset_envs(self.handle, np.ones(self.num_envs, np.bool_), 0, 0)
        functions.first_illegal(self.actions, 0, 0)
        functions.step_envs(self.handle, self.actions, True, 0, 0)
        return functions
