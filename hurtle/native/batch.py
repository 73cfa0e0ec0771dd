"""`CpuBatch`: many envs of one kind in memory, stepped by compiled code on one or more threads (or uncompiled, to debug).

seeds, options → records → reset → actions → step → arrays, written in place. Knows nothing of Gymnasium's API.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from hurtle.errors import ActionError, EnvIndexError, HurtleError
from hurtle.native import python_target
from hurtle.native.batch_arrays import address_table, aligned_zeros, allocate, apply_options, seed_records
from hurtle.native.bounds import OutOfBounds
from hurtle.native.build import COMPILING, CpuFunctions, build
from hurtle.native.cpu_loops import NEXT_STEP, PLAY, SAME_STEP
from hurtle.native.drawn import Ranges, write_ranges
from hurtle.native.env import EnvSpec
from hurtle.native.rng import ACTION_STREAM, seed_range, stream_states
from hurtle.native.thread_tuner import ThreadTuner
from hurtle.native.threads import Crew, shard_edges, thread_count

TRIALS = 8
"""Number of steps timed to see whether more threads could help."""
SHORT_SECONDS = 20e-6
"""Steps that one thread takes in less are not shared: waking another thread takes as long."""
REPORT_SECONDS = 1e-3
"""Steps are reported to the tuner together: it takes some microseconds itself."""
PLAY_SECONDS = 0.1
"""The longest that one call without the GIL should take, in seconds: Ctrl-C waits for it."""


class CpuBatch:
    """A batch of envs on the CPU; all arrays are allocated once and reused.

    Args:
        spec: The checked env.
        num_envs: Number of envs.
        num_threads: The most threads to use, None for all free cores; what steps take decides how many.
        debug: Run the author's code uncompiled, with every array access checked.
        adapts: False always uses that many threads, also for steps that one thread takes faster.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, num_threads: int | None = None, debug: bool = False, adapts: bool = True):
        self.spec = spec
        self.num_envs = num_envs
        self.arrays = allocate(spec, num_envs, aligned_zeros)
        self.actions = aligned_zeros((num_envs, *spec.agents_shape, *spec.action_shape), spec.action_dtype)
        self.played = 0  # steps that `play` has taken; the next call continues from there
        # What `functions` take in place of the arrays: their addresses, or the arrays themselves, checked.
        self.handle = python_target.checked(self.arrays) if debug else address_table(self.arrays)
        with COMPILING:
            self._program = build(spec, "python" if debug else "cpu")
            self.functions = self._program.functions if debug else self._compiled()
        most = 1 if debug else thread_count(num_threads, num_envs)
        self._stepping, self._playing = ThreadTuner(most, adapts), ThreadTuner(most, adapts)
        self._crew: Crew | None = None  # made when it is first needed
        self._shared: dict[int, tuple[np.ndarray, int]] = {}  # arguments of calls on several threads, and their address
        self._trials_left, self._shortest = TRIALS if adapts else 0, float("inf")
        self._alone = most == 1  # whether steps are never shared
        self._steps, self._seconds = 0, 0.0  # not yet reported to the tuner

    def seed(self, seeds: np.ndarray, chosen: np.ndarray) -> None:
        """Restart each chosen env from its seed: reset its random stream, and its runtime parameters to their defaults."""
        seed_records(self.spec, self.arrays.envs, seeds, chosen)

    def set_options(self, options: Mapping[str, Any], chosen: np.ndarray) -> None:
        """Set runtime parameters of the chosen envs: one value for all, or an array with one per env."""
        apply_options(self.spec, self.arrays.envs, options, chosen)

    def set_ranges(self, ranges: Ranges) -> None:
        """Set the ranges of the drawn options, from which all episodes draw that begin from now on."""
        write_ranges(self.spec, self.arrays.envs, ranges)

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
            if self._alone:
                return self.functions.step_envs(self.handle, actions, same_step, 0, self.num_envs)
            return self._timed_step(actions, same_step)
        except OutOfBounds as error:
            raise self.out_of_bounds(error) from None

    def _timed_step(self, actions: np.ndarray, same_step: bool) -> int:
        """Step on as many threads as is fastest; the first steps show whether sharing them is worth trying."""
        threads = 1 if self._trials_left else self._stepping.count
        began = time.perf_counter()
        if threads == 1:
            ended = self.functions.step_envs(self.handle, actions, same_step, 0, self.num_envs)
        else:
            mode = SAME_STEP if same_step else NEXT_STEP
            ended = self._run_together(threads, mode, self.handle.ctypes.data, actions.ctypes.data, 0, 0, 1)
        took = time.perf_counter() - began
        if self._trials_left:
            self._trials_left, self._shortest = self._trials_left - 1, min(self._shortest, took)
            if not self._trials_left:
                self._alone = self._shortest < SHORT_SECONDS
                if not self._alone:
                    self._prepare_to_share()
        else:
            self._steps, self._seconds = self._steps + 1, self._seconds + took
            if self._seconds > REPORT_SECONDS:
                self._stepping.took(self._steps, self._seconds)
                self._steps, self._seconds = 0, 0.0
        return ended

    def _prepare_to_share(self) -> None:
        """Compile, or load, what calls on several threads need."""
        if self._crew is None and self._playing.most > 1:
            self._crew = Crew(self._playing.most)
            _ = self.functions.run_shard

    def _run_together(self, threads: int, *arguments: int) -> int:
        """Call `run_envs` on several threads, each with a shard of the envs; returns the number of episodes that ended."""
        if threads not in self._shared:
            start = [self.functions.addresses["run_envs"], 0, 0, 0, 0, 0, 0]
            call = np.array([*start, *shard_edges(self.num_envs, threads)], np.int64)
            self._shared[threads] = call, call.ctypes.data
        call, address = self._shared[threads]
        call[1:7] = arguments
        self._prepare_to_share()
        assert self._crew is not None
        return sum(self._crew.run(self.functions.run_shard, address, threads))

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
        self._prepare_to_share()
        seeds = stream_states(seed_range(seed, self.num_envs), ACTION_STREAM)
        ended, done = 0, 0
        while done < num_steps:
            size = min(self._playing.fitting(PLAY_SECONDS), num_steps - done)
            began = time.perf_counter()
            first, threads = self.played + done, self._playing.count
            try:
                if threads == 1:
                    ended += self.functions.play_envs(self.handle, self.actions, seeds, first, size, 0, self.num_envs)
                else:
                    addresses = (array.ctypes.data for array in (self.handle, self.actions, seeds))
                    ended += self._run_together(threads, PLAY, *addresses, first, first + size)
            except OutOfBounds as error:
                raise self.out_of_bounds(error) from None
            done += size
            self._playing.took(size, time.perf_counter() - began)
        self.played += num_steps
        return ended

    def out_of_bounds(self, error: OutOfBounds) -> EnvIndexError:
        """The error for an index out of bounds in this env's compiled code."""
        return self._program.out_of_bounds(error)

    def __reduce__(self) -> Any:
        raise HurtleError("Native envs cannot be copied or pickled: compiled code holds their addresses. Make new ones.")

    def close(self) -> None:
        """Stop the helper threads."""
        if self._crew is not None:
            self._crew.close()

    @property
    def num_threads(self) -> int:
        """Number of threads that most steps are taken on."""
        return 1 if self._alone or self._trials_left else self._stepping.best

    def _compiled(self) -> CpuFunctions:
        """Compile, or load from the disk cache, before the first call, so that errors come early and name the author's line."""
        if self._program.is_new:
            print(f"hurtle: compiling {self.spec.name} (first run only) …", file=sys.stderr, flush=True)
        functions = CpuFunctions(self._program)
        functions.reset_envs(self.handle, np.ones(self.num_envs, np.bool_), 0, 0)
        functions.first_illegal(self.actions, 0, 0)
        functions.step_envs(self.handle, self.actions, True, 0, 0)
        return functions
