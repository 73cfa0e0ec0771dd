"""Names that every generated module defines itself; imported by the pasted sources so that editors and linters know them.

`stream.py`, `core.py`, `cpu_loops.py` and `cuda_loops.py` are never run where they stand: build.py pastes their text, without
this import, after the code it generates for one env. The constants and adapters below are written by `adapters.py`.
"""

from collections import namedtuple
from typing import Any

import numpy as np

f4 = np.float32

AGENTS: int = 1
"""Agents in one env."""
MAX_STEPS: int = 0
"""Steps after which an episode is truncated; 0: never."""
OBS_SIZE: int = 1
"""Elements of one env's observation, all agents together."""

Arrays = namedtuple(
    "Arrays",
    "envs obs final_obs reward terminated truncated ended episode_ended episode_return episode_length episode_metrics "
    "mask present",
)
"""The arrays of a batch of envs; what each holds is written in layout.py."""


Words = namedtuple("Words", "records obs")
"""Records and observations once more, as 32-bit words: what a CUDA block copies to and from shared memory."""


def jit(function: Any) -> Any:
    """Compile for the target of the generated module; on the Python target, nothing."""
    return function


def entry(function: Any) -> Any:
    """Compile a function that Python calls, and keep it in the disk cache."""
    return function


def unpack(pool: Any) -> Any:
    """The `Arrays` behind a struct of their addresses."""


def env_reset(env: Any, rng: Any) -> None:
    """The author's `reset`."""


def clear_state(env: Any) -> None:
    """Zero the State fields that have no default."""


def agent_start(env: Any, agent: int) -> int:
    """The env's step at which the agent's episode began."""
    return 0


def begin_agent(env: Any, agent: int) -> None:
    """Begin the agent's episode: its return is zero and its start is now."""


def step_agents(env: Any, action: Any, reward: Any, terminated: Any) -> Any:
    """The author's `step`, its results written to the rows `reward[a]`, `terminated[a]`; returns whether the episode is over."""


def observe(env: Any, obs: Any) -> None:
    """Zero the flat observation where that is needed, then the author's `observe`."""


def write_mask(env: Any, mask: Any) -> None:
    """Fill the mask with True, then the author's `mask`; nothing without one."""


def is_present(env: Any, agent: int) -> Any:
    """Whether the agent takes part in the step to come."""


def write_present(env: Any, present: Any) -> None:
    """Fill with True, then the author's `present`, kept in the record too; nothing without one."""


def write_metrics(env: Any, metrics: Any) -> None:
    """Copy the State fields named in `metrics`."""


def action_is_legal(action: Any) -> Any:
    """Whether one env's action lies in the action space."""


def sample_action(seed: Any, step: Any, actions: Any, i: int) -> None:
    """Write a uniformly random action of env i into `actions`."""


# CUDA only, written by cuda_staging.py.


def load_records(words: Any, n: int) -> None:
    """Bring the block's records into shared memory, if they are staged."""


def record_of(i: int, arrays: Any) -> Any:
    """The record this thread works on."""


def store_records(words: Any, n: int) -> None:
    """Write the block's records back."""


def obs_row(i: int, arrays: Any) -> Any:
    """Where this thread writes its observation."""


def store_obs(words: Any, n: int) -> None:
    """Write the block's observations out, if they are staged."""
