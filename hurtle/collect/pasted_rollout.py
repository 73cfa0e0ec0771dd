"""Names that a module with a rollout defines itself, declared here for the editors and linters that read rollout_loops.py.

`rollout_job.py` writes them into the generated module. `call_forward`, `call_sample` and `list_rows` come from the kernels.
"""

from typing import Any

INPUTS: int = 1
"""Elements of one agent's observation."""
HAS_MASK: bool = False
"""Whether the env has an action mask."""
HAS_PRESENT: bool = False
"""Whether agents come and go."""
IS_BOX: bool = False
"""Whether actions are real numbers."""
METRICS: int = 0
"""Number of metrics that an env reports at the end of an episode."""
TILE: int = 64
"""Rows that the kernels process at a time."""
WORK: int = 0
"""Column of the layer table: offset of a layer's outputs in the workspace."""
STRIDE: int = 0
"""Column of the layer table: the row stride there."""
LIST_LENGTH: int = 0
"""The most nonzeros of an observation that are listed; 0: none are."""
WIDTH: int = 16
"""Lanes of a vector."""
J: Any = None
"""The places of arrays and numbers in a job, by name; see rollout_job.py."""


def allocating(function: Any) -> Any:
    """Compile a function that allocates arrays, so that references are counted in it."""
    return function


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
    """List the nonzeros of a tile of rows; False if there are too many."""
    return False


def call_sample(*arguments: Any) -> None:
    """Sample the actions of a tile of rows."""
