"""Names that every generated module defines itself; imported by the pasted sources so that editors and linters know them.

`stream.py`, `core.py`, `cpu_loops.py`, `cuda_loops.py` and `rollout_loops.py` are never run where they stand: build.py pastes
their text, without this import, after the code it generates for one env. The constants and adapters below are written by
`adapters.py`, those of rollouts by `layout.py`; `call_forward`, `call_sample` and `list_rows` come from the kernels package.
"""

from collections import namedtuple
from typing import Any

import numpy as np

f4 = np.float32
i8 = np.int64

AGENTS: int = 1
"""Agents in one env."""
MAX_STEPS: int = 0
"""Steps after which an episode is truncated; 0: never."""
OBS_SIZE: int = 1
"""Elements of one env's observation, all agents together."""
OBS_BYTES: int = 4
"""Bytes of one env's observation."""
OBS_IS_ZEROED: bool = True
"""Whether the observation must be zeroed before the author's `observe`."""
OBS_DTYPE = np.dtype(np.float32)
"""The observation's dtype."""
WORD = np.dtype(np.uint32)
"""A CUDA block copies observations in such words."""
THREADS: int = 128
"""Threads, and so envs, of a CUDA block."""
ROWS: int = 128
"""Observations that a CUDA block holds in shared memory at a time."""
INPUTS: int = 1
"""Elements of one agent's observation."""
HAS_MASK: bool = False
"""Whether the env tells which actions are legal."""
HAS_PRESENT: bool = False
"""Whether agents come and go."""
IS_BOX: bool = False
"""Whether actions are real numbers."""
METRICS: int = 0
"""Numbers that an env reports at the end of an episode."""
TILE: int = 64
"""Rows that the kernels work on at a time."""
WORK: int = 0
"""Column of the table of layers: where a layer's outputs lie in the workspace."""
STRIDE: int = 0
"""Column of the table of layers: the distance of rows there."""
LIST_LENGTH: int = 0
"""The most numbers of an observation that are listed because they are not zero; 0: none are."""
WIDTH: int = 16
"""Numbers of a vector."""
U64 = np.uint64
GAMMA = np.uint64(0x9E3779B97F4A7C15)
J: Any = None
"""Where each array and number of a rollout lies in its job, by name; see layout.py."""

Arrays = namedtuple(
    "Arrays",
    "envs obs final_obs reward terminated truncated ended episode_ended episode_return episode_length episode_metrics "
    "mask present",
)
"""The arrays of a batch of envs; what each holds is written in layout.py."""

CudaArrays = namedtuple(
    "CudaArrays",
    "envs obs final_obs reward terminated truncated ended episode_ended episode_return episode_length episode_metrics "
    "mask present obs_words fault",
)
"""The same on the GPU, with the observations once more as 32-bit words, and int64[1] for an index out of bounds."""


def jit(function: Any) -> Any:
    """Compile for the target of the generated module; on the Python target, nothing."""
    return function


def entry(function: Any) -> Any:
    """Compile a function that Python calls, and keep it in the disk cache."""
    return function


def part(function: Any) -> Any:
    """Compile a function that is called, not inlined: it is large, or called from several places."""
    return function


def _at(index: Any, length: Any, *site: Any) -> Any:
    """An index that is inside its array, see bounds.py."""


def unpack(pool: Any) -> Any:
    """The `Arrays` behind a struct of their addresses."""


def floats(job: Any, place: Any) -> Any:
    """The float32 array of that place in the job."""


def doubles(job: Any, place: Any) -> Any:
    """The float64 array of that place in the job."""


def ints(job: Any, place: Any) -> Any:
    """The int64 array of that place in the job."""


def lengths(job: Any, place: Any) -> Any:
    """The int32 array of that place in the job."""


def words(job: Any, place: Any) -> Any:
    """The uint64 array of that place in the job."""


def bools(job: Any, place: Any) -> Any:
    """The bool array of that place in the job."""


def observations(job: Any, place: Any) -> Any:
    """The array of that place in the job, of the observation's dtype."""


def bytes_at(address: Any, size: Any) -> Any:
    """The bytes at an address."""


def tables(job: Any, place: Any) -> Any:
    """The table of layers at that place in the job, int64 [layers, columns]."""


def call_forward(*arguments: Any) -> None:
    """Run layers of the network on a tile of rows."""


def list_rows(*arguments: Any) -> bool:
    """List what is not zero of a tile of rows; False if that is too much."""
    return False


def call_sample(*arguments: Any) -> None:
    """Sample the actions of a tile of rows."""


def call_reset(env: Any, arrays: Any) -> None:
    """The author's `reset`."""


def clear_state(env: Any) -> None:
    """Zero the State fields that have no default."""


def begin_agent(env: Any, agent: int) -> None:
    """Begin the agent's episode: its return is zero and its start is now."""


def call_step(env: Any, *arguments: Any) -> Any:
    """The author's `step`."""


def advance_env(i: int, env: Any, action: Any, same_step: bool, arrays: Any) -> int:
    """`advance_one` or `advance_many` of the core, by the number of agents."""
    return 0


def call_observe(env: Any, obs: Any, arrays: Any) -> None:
    """The author's `observe`; `obs` is flat and zeroed."""


def zero_obs(obs: Any) -> None:
    """Zero an observation; nothing where `observe` sets every element anyway."""


def write_mask(env: Any, mask: Any, arrays: Any) -> None:
    """Fill the mask with True, then the author's `mask`; nothing without one."""


def is_present(env: Any, agent: int) -> Any:
    """Whether the agent takes part in the step to come."""


def write_present(env: Any, present: Any, arrays: Any) -> None:
    """Fill with True, then the author's `present`, kept in the record too; nothing without one."""


def write_metrics(env: Any, metrics: Any) -> None:
    """Copy the State fields named in `metrics`."""


def action_is_legal(action: Any) -> Any:
    """Whether one env's action lies in the action space."""


def sample_action(seed: Any, step: Any, actions: Any, i: int) -> None:
    """Write a uniformly random action of env i into `actions`."""
