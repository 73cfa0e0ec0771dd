"""What the compiled rollout adds to an env's module: the table of its arguments, and the names its loops refer to.

env's module + kernels + job accessors + rollout_loops.py → one generated module. `ROLLOUT` is the extension to build with;
`JOB` says where each array and number lies in the int64 array that `collect_envs` takes. It is not a record, as the update's
job in kernels/cpu/update.py is: it holds no floats, and each array comes with its size, so pairs of int64 are all it needs.
"""

from __future__ import annotations

from pathlib import Path

from gymnasium import spaces

from hurtle.kernels import error_codes
from hurtle.kernels.loader import load_kernels
from hurtle.native.build import Extension
from hurtle.native.env import EnvSpec
from hurtle.native.generate import paste

JOB_ARRAYS = (
    # the policy, see NetworkPlan
    *("weights", "layers", "nvec"),
    *("low", "range"),  # inputs that are bytes: (x - low) / range
    *("mean", "std"),  # normalized observations: (x - mean) / std, clipped
    "constants",  # clip of normalized observations, gamma, gamma * lambda
    # from raw actions to the env's
    "action_start",  # added to choices
    *("action_low", "action_range"),  # for a Beta: low + raw * range
    *("bound_low", "bound_high"),  # numbers are clipped to these
    # state carried from rollout to rollout, [rows]
    "streams",  # of the uniforms that actions are sampled with
    "drawn",  # number of actions so far
    "beginning",  # whether the row's next step begins an episode
    # the rollout, [steps, rows, …], see Rollout
    *("obs", "inputs", "masks", "log_probs", "values", "rewards", "terminated", "truncated", "starts", "valid"),
    *("final_values", "last_values", "advantages", "returns"),
    *("choices", "numbers"),  # actions, in one of two dtypes
    *("final_obs", "final_steps"),  # final observations of truncated episodes, [slots, rows, …], and their last steps
    "cuts",  # number of truncated episodes so far, [rows]
    # episodes that ended, [steps, rows], and envs, [steps, envs, …]
    *("ended", "episode_returns", "episode_lengths"),
    *("over", "metrics"),
    # the batch of envs, see array_table
    *("env_obs", "env_final_obs", "env_reward", "env_terminated", "env_truncated", "env_ended", "env_mask", "env_present"),
    *("env_episode_ended", "env_episode_return", "env_episode_length", "env_episode_metrics"),
    *("env_choices", "env_numbers"),
    "exchanged",  # arrays that a thread copies to its own memory during a call: (address, own address, bytes) each
)
"""Arrays of a job: address and size each."""
JOB_NUMBERS = (
    *("num_steps", "num_rows"),
    *("split", "actor", "critic", "head_kind", "num_uniforms", "mask_size", "log_std_at", "work_size", "scratch_size"),
    *("is_shared", "is_scaled", "is_beta", "normalizes", "has_masks"),
    "has_advantages",  # whether the rollout computes advantages
    *("forward", "sample"),  # addresses of the network and action kernels
)
JOB = {name: 2 * k for k, name in enumerate(JOB_ARRAYS)} | {n: 2 * len(JOB_ARRAYS) + k for k, n in enumerate(JOB_NUMBERS)}
"""Places in the job, one int64 array: an array's address followed by its size, or a number."""
JOB_VIEWS = {
    "floats": "np.float32",
    "doubles": "np.float64",
    "ints": "np.int64",
    "lengths": "np.int32",
    "words": "np.uint64",
    "bools": "np.bool_",
    "observations": "OBS_DTYPE",
}


def kernel_source() -> str:
    """The imports from the kernels package, whose name changes with its content."""
    package = load_kernels().__name__
    return f"""\
from collections import namedtuple

from {package}.head_calls import call_sample
from {package}.host import TILE, WIDTH
from {package}.network import COLUMNS, STRIDE, WORK, call_forward
from {package}.sparse import list_length, list_rows

allocating = njit(_nrt=True, pipeline_class=InnerCompiler, **INNER)
viewing = njit(forceinline=True, _nrt=True, pipeline_class=InnerCompiler, **INNER)
"""


def job_source(spec: EnvSpec) -> str:
    """An env's constants for rollouts, and the functions that return the arrays of a job."""
    views = [
        f"@viewing\ndef {name}(job, k):\n    return array_at(job[k], (job[k + 1],), {dtype})\n\n\n"
        for name, dtype in JOB_VIEWS.items()
    ]
    return f"""\
INPUTS = OBS_SIZE // AGENTS
LIST_LENGTH = list_length(INPUTS)
{_error_source()}
HAS_MASK = {spec.has_mask}
HAS_PRESENT = {spec.has_present}
IS_BOX = {isinstance(spec.action_space, spaces.Box)}
METRICS = {len(spec.env.metrics)}
J = namedtuple("J", "{" ".join(JOB)}")(*{list(JOB.values())})


{"".join(views)}@viewing
def bytes_at(address, size):
    return array_at(address, (size,), np.uint8)


@viewing
def tables(job, k):
    return array_at(job[k], (job[k + 1] // COLUMNS, COLUMNS), np.int64)
"""


def _error_source() -> str:
    """The error codes as literals: Numba's cache would not notice a change of an imported constant."""
    names = ("POLICY", "ACTION", "REWARD", "FINAL_OBSERVATION", "OBSERVATION", "KINDS", "NO_ERROR")
    return "\n".join(f"{name} = {getattr(error_codes, name)}" for name in names)


def rollout_source(spec: EnvSpec) -> str:
    """The source to append to that of the CPU target."""
    return f"{kernel_source()}{job_source(spec)}\n\n{paste(Path(__file__).parent / 'rollout_loops.py')}"


ROLLOUT = Extension("rollout", rollout_source)
