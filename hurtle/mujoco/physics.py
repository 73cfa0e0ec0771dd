"""`Physics`: many copies of a MuJoCo model, stepped by compiled threads that call MuJoCo's own functions.

actions or starts → mj_step or mj_forward of every env → the fields that the task asked for, one row per env. Knows no rewards.
"""

from __future__ import annotations

import ctypes
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.mujoco.state import State
from hurtle.native.batch_arrays import aligned_zeros
from hurtle.native.build import COMPILING, address_of_entry, shared_module
from hurtle.native.thread_tuner import ThreadTuner
from hurtle.native.threads import Crew, thread_count

AFTER_STEP = ("cacc", "cfrc_int", "cfrc_ext")
"""Fields that mj_step leaves out and mj_rnePostConstraint computes."""
REPORT_SECONDS = 1e-3
"""Steps are reported to the tuner together: it takes some microseconds itself."""


class Physics:
    """A batch of MjData of one model.

    Args:
        model: The MjModel, which all envs share and nobody may change.
        fields: Names of float64 arrays of MjData.
        num_envs: Number of envs.
        frame_skip: Calls of mj_step per step.
        num_threads: The most threads to use, None for all free cores; what steps take decides how many.

    Attributes:
        actions: float32 `[num_envs, nu]`, what the next step reads.
        starts: float64 `[num_envs, nq + nv]`, what the next reset reads.
        state: The fields after the last step or reset.
    """

    def __init__(self, model: Any, fields: tuple[str, ...], num_envs: int, frame_skip: int, num_threads: int | None = None):
        import mujoco

        self.model, self.num_envs = model, num_envs
        self.data = [mujoco.MjData(model) for _ in range(num_envs)]
        shapes = {name: _field(self.data[0], name).shape for name in fields}
        self.actions = aligned_zeros((num_envs, model.nu), np.float32)
        self.starts = aligned_zeros((num_envs, model.nq + model.nv), np.float64)
        self.state, self._other = (
            State(num_envs, {name: aligned_zeros((num_envs, *shape), np.float64) for name, shape in shapes.items()})
            for _ in range(2)
        )
        for one, other in ((self.state, self._other), (self._other, self.state)):
            one.action, one.before = self.actions, other
        self._tables = [_table(state) for state in (self.state, self._other)]
        self._order, self._everyone = np.zeros(num_envs, np.int64), np.arange(num_envs)
        self._ordered: np.ndarray | None = None  # the envs that are in _order
        envs = [
            [data._address, *(_field(data, name).ctypes.data for name in ("ctrl", "qpos", "qvel", *fields))]
            for data in self.data
        ]
        self._envs = np.array(envs, np.int64)
        with COMPILING:
            self._calls = shared_module(str(Path(__file__).with_name("physics_calls.py")))
            self._address = address_of_entry(self._calls.run_physics)
        most = thread_count(num_threads, num_envs)
        self._tuner, self._crew = ThreadTuner(most), Crew(most) if most > 1 else None
        self._steps, self._seconds = 0, 0.0  # not yet reported to the tuner
        self._counters = aligned_zeros((most * self._calls.LINE,), np.int64)
        self._job = self._new_job(frame_skip, any(name in AFTER_STEP for name in fields))
        self._job_address, self._table_addresses = self._job.ctypes.data, [table.ctypes.data for table in self._tables]

    def _new_job(self, frame_skip: int, has_more: bool) -> np.ndarray:
        calls, model, functions = self._calls, self.model, c_functions()
        job = np.zeros(calls.WORDS, np.int64)
        job[: calls.MODEL + 1] = (
            functions["mj_step"],
            functions["mj_rnePostConstraint"] if has_more else 0,
            functions["mj_resetData"],
            functions["mj_forward"],
            model._address,
        )
        job[calls.FRAME_SKIP : calls.NUM_FIELDS + 1] = (
            frame_skip,
            self.num_envs,
            0,
            model.nq,
            model.nv,
            model.nu,
            len(self.state.fields),
        )
        arrays = (self._envs, self._tables[0], self._order, self.actions, self.starts, self._counters)
        job[calls.ENVS : calls.WORDS] = [array.ctypes.data for array in arrays]
        return job

    def step(self, envs: np.ndarray | None = None) -> State:
        """Step all envs, or these, with their rows of `actions`; returns the new state, in which rows of other envs are old.

        The arrays of the state are reused by the step after the next.
        """
        self.state, self._other = self._other, self.state
        self._table_addresses.reverse()
        self._job[self._calls.FIELDS] = self._table_addresses[0]
        began = time.perf_counter()
        self._run(self._everyone if envs is None else envs, self._tuner.count)
        self._steps, self._seconds = self._steps + 1, self._seconds + time.perf_counter() - began
        if self._seconds > REPORT_SECONDS:
            self._tuner.took(self._steps, self._seconds)
            self._steps, self._seconds = 0, 0.0
        return self.state

    def reset(self, envs: np.ndarray) -> State:
        """Put these envs into their rows of `starts`; returns the state."""
        self._job[self._calls.RESETS] = 1
        try:
            self._run(envs, max(1, min(self._tuner.best, len(envs))))
        finally:
            self._job[self._calls.RESETS] = 0
        return self.state

    def _run(self, envs: np.ndarray, threads: int) -> None:
        count, counters, line = len(envs), self._counters, self._calls.LINE
        if envs is not self._ordered:
            self._order[:count], self._ordered = envs, envs
            self._job[self._calls.COUNT] = count
        for k in range(threads):
            counters[k * line] = count * k // threads  # where the part of thread k begins
        if threads == 1 or self._crew is None:
            self._calls.run_physics(self._job_address, 0, 1)
        else:
            self._crew.run(self._address, self._job_address, threads)

    @property
    def num_threads(self) -> int:
        """Number of threads that most steps are taken on."""
        return self._tuner.best

    def get_states(self) -> np.ndarray:
        """What MuJoCo needs to continue bitwise, float64 `[num_envs, size]`."""
        import mujoco

        kind = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        states = np.zeros((self.num_envs, mujoco.mj_stateSize(self.model, kind)))
        for data, row in zip(self.data, states, strict=True):
            mujoco.mj_getState(self.model, data, row, kind)
        return states

    def set_states(self, states: np.ndarray) -> None:
        """Continue from what `get_states` returned; the fields are the caller's to restore."""
        import mujoco

        kind = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        for data, row in zip(self.data, states, strict=True):
            mujoco.mj_setState(self.model, data, row, kind)
            mujoco.mj_forward(self.model, data)  # for pictures; it changes the warm start of the solver
            mujoco.mj_setState(self.model, data, row, kind)

    def close(self) -> None:
        """Stop the helper threads."""
        if self._crew is not None:
            self._crew.close()

    def __reduce__(self) -> Any:
        raise HurtleError("MuJoCo vectors cannot be copied or pickled: compiled code holds their addresses. Make new ones.")


def _field(data: Any, name: str) -> np.ndarray:
    """An array of MjData that stays where it is."""
    array = getattr(data, name, None) if not name.startswith(("_", "efc_", "iefc_")) else None
    if isinstance(array, np.ndarray) and array.dtype == np.float64:
        return array
    known = [
        other
        for other in dir(data)
        if not other.startswith(("_", "efc_", "iefc_")) and getattr(getattr(data, other, None), "dtype", None) == np.float64
    ]
    raise UnknownNameError(f"{name!r} is not an array of MjData with a fixed number of float64. {did_you_mean(name, known)}")


def _table(state: State) -> np.ndarray:
    """Where the rows of each field go, and their size."""
    return np.array([[a.ctypes.data, a[0].size] for a in state.fields.values()], np.int64).reshape(-1, 2)


@cache
def c_functions() -> dict[str, int]:
    """The addresses of MuJoCo's C functions that compiled code calls."""
    import mujoco

    library = ctypes.CDLL(mujoco._functions.__file__)  # a symbol is looked up in the libraries that this one needs, too
    names = ("mj_step", "mj_rnePostConstraint", "mj_resetData", "mj_forward")
    found = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names}
    return {name: address for name, address in found.items() if address is not None}
