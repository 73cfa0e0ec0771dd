"""Names that every generated module defines itself, declared here for the editors and linters that read the pasted sources.

generate.py pastes the text of `stream.py`, `core.py`, `cpu_loops.py` and `cuda_loops.py`, without these imports, after the code
of one env; as modules, they only give editors something to read. `adapters.py` writes the constants and adapters below.
"""

from collections import namedtuple
from typing import Any

import numpy as np

f4 = np.float32
i8 = np.int64

AGENTS: int = 1
"""Agents in one env."""
OBS_SIZE: int = 1
"""Elements of one env's observation, all agents together."""
OBS_BYTES: int = 4
"""Bytes of one env's observation."""
OBS_IS_ZEROED: bool = True
"""Whether the observation must be zeroed before the author's `observe`."""
OBS_DTYPE = np.dtype(np.float32)
"""The observation's dtype."""
WORD = np.dtype(np.uint32)
"""The unit in which a CUDA block copies observations."""
THREADS: int = 128
"""Threads in a CUDA block; each runs one env."""
ROWS: int = 128
"""Observations that a CUDA block holds in shared memory at a time."""
U64 = np.uint64
GAMMA = np.uint64(0x9E3779B97F4A7C15)

Arrays = namedtuple(
    "Arrays",
    "envs obs final_obs reward terminated truncated ended episode_ended episode_return episode_length episode_metrics "
    "mask present max_steps",
)
"""The arrays of a batch of envs, described in batch_arrays.py."""

CudaArrays = namedtuple(
    "CudaArrays",
    "envs obs final_obs reward terminated truncated ended episode_ended episode_return episode_length episode_metrics "
    "mask present max_steps obs_words fault",
)
"""The same on the GPU, plus the observations viewed as 32-bit words, and int64[1] that reports an index out of bounds."""


def part(function: Any) -> Any:
    """Compile a function that is called, not inlined: it is large, or called from several places."""
    return function


def jit(function: Any) -> Any:
    """Compile for the module's target; a no-op on the Python target."""
    return function


def entry(function: Any) -> Any:
    """Compile an entry point, and keep it in the disk cache."""
    return function


def _at(index: Any, length: Any, *site: Any) -> Any:
    """An index that is inside its array, see bounds.py."""


def unpack(handle: Any) -> Any:
    """The `Arrays` of a batch; on the CPU `handle` is the address of `address_table`."""


def actions_at(address: Any, n: int) -> Any:
    """The actions of n envs."""


def flags_at(address: Any, n: int) -> Any:
    """One bool per env."""


def seeds_at(address: Any, n: int) -> Any:
    """One uint64 per env."""


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
    """Zero an observation; a no-op where `observe` sets every element anyway."""


def write_mask(env: Any, mask: Any, arrays: Any) -> None:
    """Fill the mask with True, then call the author's `mask`; a no-op without one."""


def is_present(env: Any, agent: int) -> Any:
    """Whether the agent takes part in the next step."""


def write_present(env: Any, present: Any, arrays: Any) -> None:
    """Fill with True, then call the author's `present` and keep a copy in the record; a no-op without one."""


def write_metrics(env: Any, metrics: Any) -> None:
    """Copy the State fields named in `metrics`."""


def action_is_legal(action: Any) -> Any:
    """Whether one env's action lies in the action space."""


def sample_action(seed: Any, step: Any, actions: Any, i: int) -> None:
    """Write a uniformly random action of env i into `actions`."""
