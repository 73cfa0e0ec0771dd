"""How a CUDA block keeps its envs in shared memory: chooses the block size, and writes the adapters that move rows in and out.

shared memory of a block: [records of its envs | observations of its envs], both copied to and from global memory by words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hurtle.native.env import EnvSpec

SHARED_BYTES = 48 * 1024
"""What every CUDA device grants a block without asking."""


@dataclass(frozen=True)
class Staging:
    """What a block of `threads` envs keeps in shared memory."""

    threads: int
    record_stride: int
    """Bytes from one staged record to the next; 0: records stay in global memory."""
    record_bytes: int
    obs_bytes: int
    """Bytes of one env's observation; 0: observations are written to global memory directly."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block."""
        return self.threads * (self.record_stride + self.obs_bytes)


def plan(spec: EnvSpec, stage_records: bool = True, stage_obs: bool = True) -> Staging:
    """The largest block, up to 128 threads, whose observations and records fit into shared memory."""
    record_bytes = spec.record.itemsize
    # an even number of 8-byte words between records would put every fourth (or second, …) thread on the same bank
    stride = record_bytes + 8 * (record_bytes % 16 == 0) if stage_records else 0
    obs_bytes = int(np.prod(spec.obs_shape)) * spec.observation_space.dtype.itemsize if stage_obs else 0
    for threads in (128, 64, 32):
        staging = Staging(threads, stride, record_bytes, obs_bytes)
        if staging.shared_bytes <= SHARED_BYTES:
            return staging
    return plan(spec, stage_records, False) if stage_obs else Staging(128, 0, record_bytes, 0)


def staging_source(spec: EnvSpec, staging: Staging, simulated: bool = False) -> str:
    """The adapters `load_records`, `record_of`, `store_records`, `obs_row` and `store_obs`, as text."""
    view = ".view(np.recarray)" if simulated else ""  # the simulator's records have no attributes otherwise
    head = f"WORD = np.dtype(np.uint32)\nOBS_DTYPE = np.dtype(np.{spec.observation_space.dtype})\n\n\n"
    return head + _records_source(spec, staging, view) + _obs_source(spec, staging)


def _records_source(spec: EnvSpec, staging: Staging, view: str) -> str:
    if not staging.record_stride:
        return (
            "@jit\ndef load_records(words, n):\n    pass\n\n\n"
            "@jit\ndef record_of(i, arrays):\n    return arrays.envs[i]\n\n\n"
            "@jit\ndef store_records(words, n):\n    pass\n\n\n"
        )
    names = spec.record.names or ()
    formats = [(spec.record[n].base.str, spec.record[n].shape) for n in names]
    offsets = [spec.record.fields[n][1] for n in names]  # type: ignore[index]
    words, stride = staging.record_bytes // 4, staging.record_stride // 4

    def copy(name: str, move: str, before: str, after: str) -> str:
        return f"""\
@jit
def {name}(words, n):
{before}    staged = cuda.shared.array(0, WORD)
    first = cuda.blockIdx.x * cuda.blockDim.x
    count = min(cuda.blockDim.x, n - first) * {words}
    for k in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        {move}
{after}

"""

    inside, outside = f"staged[k // {words} * {stride} + k % {words}]", f"words.records[first * {words} + k]"
    wait = "    cuda.syncthreads()\n"
    return (
        f"STAGED_RECORD = np.dtype({{'names': {list(names)!r}, 'formats': {formats!r}, 'offsets': {offsets!r}, "
        f"'itemsize': {staging.record_stride}}})\n\n\n"
        + copy("load_records", f"{inside} = {outside}", "", wait)
        + f"@jit\ndef record_of(i, arrays):\n    return cuda.shared.array(0, STAGED_RECORD){view}[cuda.threadIdx.x]\n\n\n"
        + copy("store_records", f"{outside} = {inside}", wait, "")
    )


def _obs_source(spec: EnvSpec, staging: Staging) -> str:
    if not staging.obs_bytes:
        return (
            "@jit\ndef obs_row(i, arrays):\n    return arrays.obs[i]\n\n\n"
            "@jit\ndef store_obs(words, n):\n    pass\n\n\n"
        )
    size, offset = int(np.prod(spec.obs_shape)), staging.threads * staging.record_stride
    itemsize = spec.observation_space.dtype.itemsize
    return f"""\
@jit
def obs_row(i, arrays):
    start = {offset // itemsize} + cuda.threadIdx.x * {size}
    return cuda.shared.array(0, OBS_DTYPE)[start : start + {size}]


@jit
def store_obs(words, n):
    cuda.syncthreads()
    staged = cuda.shared.array(0, WORD)
    first = cuda.blockIdx.x * cuda.blockDim.x
    count = (min(cuda.blockDim.x, n - first) * {staging.obs_bytes} + 3) // 4
    for k in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        words.obs[first * {staging.obs_bytes} // 4 + k] = staged[{offset // 4} + k]


"""
