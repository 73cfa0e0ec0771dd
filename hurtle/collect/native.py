"""`NativeCollector`: native envs × MLP policies, whole rollouts inside compiled code with the GIL released.

weights → one call per thread and rollout → observations, actions, values, advantages in the rollout's own memory. A drop-in
for `GeneralCollector`, which defines what every field means. Knows nothing of losses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from hurtle.buffers.rollout import EpisodeStats, Rollout
from hurtle.collect.inference import Actor
from hurtle.collect.rewards import RewardRule
from hurtle.collect.rows import VecRows
from hurtle.errors import ActionError, HurtleError, NonFiniteError
from hurtle.native.batch import PLAY_SECONDS, CpuBatch
from hurtle.native.bounds import OutOfBounds
from hurtle.native.build import COMPILING, Program, build
from hurtle.native.kernel_loader import load_kernels
from hurtle.native.layout import JOB, address_struct, aligned_zeros
from hurtle.native.threads import SHARD_GRAIN, ShardThreads, thread_count
from hurtle.policies.build import build_policy
from hurtle.policies.config import PolicyConfig
from hurtle.policies.native_plan import NetworkPlan, UnsupportedError, plan_for
from hurtle.policies.policy import Policy
from hurtle.tracking.timing import Timer
from hurtle.vector.native import NativeVecEnv
from hurtle.vector.native_pool import NativePool

ROWS_PER_THREAD = 8
"""With fewer, threads would spend more on each other's cache lines than they gain."""
LARGE_ARRAYS = ("envs", "obs", "final_obs")
ROLLOUT_FIELDS = (
    *("obs", "actions", "masks", "log_probs", "values", "rewards", "terminated", "truncated", "starts", "valid"),
    *("final_values", "last_values", "advantages", "returns"),
)


class NativeCollector:
    """Fills rollouts from native envs, without Python between the steps.

    Same weights and same seed give the actions of `GeneralCollector` (but where rounding tips one), on any number of threads.

    Args:
        vec: A `NativeVecEnv` on the CPU with SAME_STEP autoreset, as `hurtle.make_vec` makes it for native envs.
        policy: An MLP policy on the CPU, or a `PolicyConfig` to build one from for the vector's spaces.
        rewards: What becomes of rewards before they are learned from; None leaves them as they are.
        seed: Env i gets seed + i, and row n's actions are drawn from the stream of seed + n.
        timer: Where the time goes.
        num_threads: Each has a shard of the envs; None means all free cores, but at least 8 rows for each.
        gamma: With `gae_lambda`, and rewards left as they are, advantages are computed at once: `compute_advantages` with the
            same numbers has nothing left to do.
        gae_lambda: See `gamma`.

    Attributes:
        policy: What acts.
        stop_requested: Set it, for instance in a signal handler, to end `collect` within about 0.1 s.

    Raises:
        HurtleError: The vector or the policy is not one that compiled code knows; says why.

    Example:
        >>> import hurtle
        >>> collector = NativeCollector(hurtle.make_vec("cartpole", num_envs=8), PolicyConfig(), gamma=0.99, gae_lambda=0.95)
        >>> rollout = collector.new_rollout(num_steps=32)
        >>> episodes = collector.collect(rollout)
        >>> rollout.obs.shape, rollout.advantages.shape
        (torch.Size([32, 8, 4]), torch.Size([32, 8]))
    """

    def __init__(
        self,
        vec: NativeVecEnv,
        policy: Policy | PolicyConfig,
        rewards: RewardRule | None = None,
        seed: int = 0,
        timer: Timer | None = None,
        *,
        num_threads: int | None = None,
        gamma: float | None = None,
        gae_lambda: float | None = None,
    ):
        self._batch = _batch_of(vec)
        self.vec, self.rows = vec, VecRows(vec)
        if isinstance(policy, PolicyConfig):
            policy = build_policy(policy, vec.agent_observation_space, vec.agent_action_space, seed=seed)
        _check_spaces(vec, policy)
        self.policy, self._plan = policy, _plan_of(policy)
        self.actor = Actor(policy, self.rows.num_rows, seed)
        self.rewards = rewards if rewards is not None else RewardRule()
        self.timer = timer or Timer()
        self.steps = 0  # of each env
        self.stop_requested = False
        self._seed, self._begun = seed, False
        if (gamma is None) != (gae_lambda is None):
            raise HurtleError("gamma and gae_lambda go together: give both, or neither.")
        self._advantages_for: tuple[float, float] | None = None  # None: rewards change after the rollout, or nobody asked
        if gamma is not None and gae_lambda is not None and self.rewards.mode == "raw":
            self._advantages_for = (gamma, gae_lambda)
        self._synced = False
        self._packed_weights: Callable[[], np.ndarray] | None = None
        self._weights = aligned_zeros((self._plan.packed_size,), np.float32)
        self._starts = np.ones(self.rows.num_rows, np.bool_)  # who begins an episode with the coming step
        self._raw = np.zeros(0, np.float32)  # [T, N, …]: what the policy's normalizer learns from
        self._episodes = _EpisodeLog(vec, 0)
        self._known: list[Any] = []  # addresses and shapes of the last rollout's fields
        self._job = np.zeros(max(JOB.values()) + 1, np.int64)  # what compiled code is told, see layout.JOB
        self._kept: dict[str, np.ndarray] = {}  # arrays that it is told of and nobody else keeps
        self._describe_envs()
        self._describe_policy()
        self._program = _compiled(vec, self._batch, self._job)
        self._functions = self._program.functions
        few = max(1, self.rows.num_rows // ROWS_PER_THREAD)
        self._threads = ShardThreads(self.rows.num_envs, thread_count(num_threads, self.rows.num_envs if num_threads else few))
        self._shards = [_Shard(self._batch, self._starts, lo, hi) for lo, hi in self._threads.shards]
        self._slice = 1  # steps of one call; their time sets the next

    @property
    def has_masks(self) -> bool:
        """Whether the env tells which actions are legal."""
        return self.vec.native_spec.has_mask

    @property
    def num_weights(self) -> int:
        """Elements of the buffer that `sync_weights` takes."""
        return self._plan.num_weights

    @property
    def num_threads(self) -> int:
        """Threads that collect."""
        return len(self._threads.shards)

    def new_rollout(self, num_steps: int) -> Rollout:
        """A rollout that `collect` can fill."""
        return Rollout(self.policy, num_steps, self.rows.num_rows, self.has_masks)

    def sync_weights(self, flat: np.ndarray | Tensor | None) -> None:
        """Act with these weights from now on, whatever becomes of the policy's own; without it, `collect` takes the policy's.

        Args:
            flat: All parameters in the order of `policy.parameters()`, as `torch.nn.utils.parameters_to_vector` gives them:
                one contiguous float32 buffer on the CPU, which is copied. None goes back to the policy's own.

        Raises:
            HurtleError: It has another size, dtype or layout.
        """
        if flat is None:
            self._synced, self._packed_weights = False, None
            return
        expected = f"one contiguous float32 buffer of {self.num_weights} weights (torch.nn.utils.parameters_to_vector)"
        if not isinstance(flat, Tensor | np.ndarray):
            raise HurtleError(f"sync_weights takes {expected}, got a {type(flat).__name__}.")
        if flat.dtype not in (np.float32, torch.float32) or tuple(flat.shape) != (self.num_weights,):
            given = str(flat.dtype).removeprefix("torch.")
            raise HurtleError(f"sync_weights takes {expected}, got {given} of shape {tuple(flat.shape)}.")
        if isinstance(flat, Tensor):
            if flat.device.type != "cpu":
                raise HurtleError(f"sync_weights takes {expected} on the CPU, got one on {flat.device}: call .cpu() first.")
            flat = flat.detach().numpy()
        if not flat.flags.c_contiguous:
            raise HurtleError(f"sync_weights takes {expected}, got one with gaps: np.ascontiguousarray closes them.")
        self._plan.pack(flat, self._weights, transposed=False)
        self._synced, self._packed_weights = True, None

    def follow(self, packed_weights: Callable[[], np.ndarray]) -> None:
        """Act with the weights of a learner of this policy, which has them in the kernels' layout at hand."""
        self._packed_weights = packed_weights

    def collect(self, rollout: Rollout) -> EpisodeStats | None:
        """Fill the rollout with the next `num_steps` steps of every env; the episodes that ended, or None if asked to stop.

        Raises:
            NonFiniteError: An env gave NaN or infinity; names it and its step.
            EnvIndexError: The env's code indexed an array out of bounds; names the author's line.
            HurtleError: The rollout does not fit the vector, or is not on the CPU.
        """
        if not self._fill(rollout):
            return None
        with self.timer("copy"):
            rollout.all_valid = not self.vec.native_spec.has_present or bool(rollout.valid.all())
            self.rewards.apply(rollout)
            if self.policy.normalizer is not None:
                self.policy.normalizer.update(self._raw, rollout.valid)
            rollout.advantages_for = self._advantages_for
            return self._episodes.stats()

    def _fill(self, rollout: Rollout) -> bool:
        """Play `num_steps` steps into the rollout; False if asked to stop before the end."""
        self._begin()
        with self.timer("collect"):
            rollout.advantages_for = None
            self._describe_rollout(rollout)
            if self._packed_weights is not None:
                self._tell(weights=self._packed_weights())
            else:
                self._tell(weights=self._weights)
                if not self._synced:
                    self._plan.pack(self._policy_weights(), self._weights, transposed=False)
            done = 0
            while done < rollout.num_steps and not self.stop_requested:
                done += self._collect_slice(rollout, done)
        return done == rollout.num_steps

    def _begin(self) -> None:
        self.vec._check_open()
        if not self._begun:
            obs, _ = self.vec.reset(seed=self._seed)
            self._begun = True
            self.rows.check_finite("observation", self.rows.flat(obs), self.steps)

    def _policy_weights(self) -> np.ndarray:
        """The policy's own parameters as one flat buffer; walking through its modules each time would take longer than that."""
        with torch.no_grad():
            return torch.cat([parameter.reshape(-1) for parameter in self.policy.parameters()]).numpy()

    def _collect_slice(self, rollout: Rollout, first: int) -> int:
        """As many steps as take about 0.1 s: shorter than a rollout only where that is long. Returns how many it were."""
        size = min(self._slice, rollout.num_steps - first)
        began = perf_counter()
        told = {shard.lo: (shard.pool, shard.job(self._job), shard.actions) for shard in self._shards}

        def job(lo: int, hi: int) -> int:
            return self._functions.collect_envs(*told[lo], first, first + size, lo, hi)

        try:
            trouble = min(self._threads.run(job))
        except OutOfBounds as error:
            raise self._program.out_of_bounds(error) from None
        finally:
            self.steps += size
            self.actor._steps += size
        if trouble != self._functions.FINE:
            self._refuse(rollout, trouble, self.steps - size - first)
        self._slice = max(1, int(size * min(8.0, PLAY_SECONDS / (perf_counter() - began + 1e-9))))
        return size

    def _refuse(self, rollout: Rollout, trouble: int, steps: int) -> None:
        """Say what is not finite; `steps` were those before this rollout."""
        when, row = divmod(trouble, self.rows.num_rows)
        t, kind = divmod(when, self._functions.TROUBLES)
        env, shape = row // self.rows.num_agents, self.vec.agent_observation_space.shape
        assert shape is not None
        if kind == self._functions.POLICY:
            raise NonFiniteError(
                f"The policy's log-probability in env {env} at its step {steps + t + 1} is not finite: its weights are not, or "
                "are huge. Go on from a checkpoint, with a lower learning_rate."
            )
        if kind == self._functions.ACTION:
            action, space = self._batch.actions[env], self._batch.spec.action_space
            raise ActionError(f"Env {env} got the action {action!s}, which is not in {space}.")
        if kind == self._functions.REWARD:
            what, array = "reward", rollout.rewards[t].numpy()
        elif kind == self._functions.FINAL:
            what, array = "final observation", self._batch.arrays.final_obs.reshape(-1, *shape)
        else:
            what, array = "observation", self._batch.arrays.obs.reshape(-1, *shape)
        self.rows.check_finite(what, array[row : row + 1], steps + t + 1, np.array([row]))

    def _tell(self, **arrays: np.ndarray | Tensor | None) -> None:
        """Write addresses and sizes of arrays, which somebody must keep; None stands for an empty one."""
        for name, array in arrays.items():
            place = JOB[name]
            if isinstance(array, Tensor):
                self._job[place], self._job[place + 1] = array.data_ptr(), array.numel()
            elif array is not None:
                self._job[place], self._job[place + 1] = array.ctypes.data, array.size
            else:
                self._job[place : place + 2] = 0

    def _tell_numbers(self, **numbers: int) -> None:
        self._job[[JOB[name] for name in numbers]] = list(numbers.values())

    def _describe_envs(self) -> None:
        arrays = {f"env_{name}": array for name, array in self._batch.arrays._asdict().items()}
        self._tell(**{name: array for name, array in arrays.items() if name in JOB})
        actions = "env_numbers" if isinstance(self.vec.agent_action_space, spaces.Box) else "env_choices"
        self._tell(**{actions: self._batch.actions})
        self._tell(streams=self.actor._streams, drawn=self.actor._steps, beginning=self._starts)

    def _describe_policy(self) -> None:
        plan, head, normalizer = self._plan, self.policy.head, self.policy.normalizer
        gamma, gae_lambda = self._advantages_for or (0.0, 0.0)
        clip = 0.0 if normalizer is None else normalizer.clip
        self._kept = {"constants": np.array([clip, gamma, gamma * gae_lambda]), **_action_arrays(head.action_space)}
        self._tell(weights=self._weights, layers=plan.layers, nvec=plan.nvec, low=plan.low, range=plan.range, **self._kept)
        names = ("split", "actor", "critic", "head_kind", "num_uniforms", "mask_size", "log_std_at", "work_size")
        self._tell_numbers(**{name: getattr(plan, name) for name in names})
        kernels = load_kernels()
        with COMPILING:
            self._tell_numbers(forward=kernels.network.addresses()[0], sample=kernels.head_calls.sample_address(plan.head_kind))
        self._tell_numbers(
            num_rows=self.rows.num_rows,
            scratch_size=kernels.heads.scratch_size(plan.head_kind, plan.nvec),
            is_shared=plan.shared,
            is_scaled=plan.scales,
            is_beta=head.kind == "beta",
            normalizes=normalizer is not None,
            has_advantages=self._advantages_for is not None,
        )

    def _describe_rollout(self, rollout: Rollout) -> None:
        """Tell where the rollout lies, after a look whether it is what compiled code will take it for."""
        fields = {name: getattr(rollout, name) for name in ROLLOUT_FIELDS}
        if rollout.masks is not None and not self.has_masks:
            rollout.masks.fill_(True)
        known = [rollout.num_steps, *((f.data_ptr(), f.shape, f.dtype) for f in fields.values() if f is not None)]
        if known != self._known:
            if rollout.num_rows != self.rows.num_rows:
                raise HurtleError(
                    f"The rollout has {rollout.num_rows} rows, the vector {self.rows.num_rows}: use new_rollout(num_steps)."
                )
            rollout.check_fields(self.policy, fields)
            actions = fields.pop("actions")
            is_box = isinstance(self.policy.action_space, spaces.Box)
            self._tell(**fields, choices=None if is_box else actions, numbers=actions if is_box else None)
            self._tell_numbers(num_steps=rollout.num_steps, has_masks=rollout.masks is not None)
            self._episodes = _EpisodeLog(self.vec, rollout.num_steps)
            self._tell(**self._episodes.arrays)
            self._known = known
        self._describe_normalizer(tuple(rollout.obs.shape))

    def _describe_normalizer(self, shape: tuple[int, ...]) -> None:
        normalizer = self.policy.normalizer
        if normalizer is None:
            return
        if self._raw.shape != shape:
            self._raw = np.zeros(shape, np.float32)
        self._kept["mean"] = np.ascontiguousarray(normalizer.mean.numpy(), np.float64)
        self._kept["std"] = np.ascontiguousarray((normalizer.variance + normalizer.eps).sqrt().numpy(), np.float64)
        self._tell(mean=self._kept["mean"], std=self._kept["std"], raw=self._raw)

    def state_dict(self) -> dict[str, Any]:
        """What exact resuming needs, with the envs' states; `GeneralCollector` can go on from it, too."""
        self._begin()
        return {
            "actor": self.actor.state_dict(),
            "rewards": self.rewards.state_dict(),
            "steps": self.steps,
            "envs": self.vec.state_dict(),
            "starts": self._starts.copy(),
            "resetting": np.zeros(self.rows.num_rows, np.bool_),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from there; envs whose state was not saved begin new episodes, with seeds that this run has not used."""
        self.steps = saved["steps"]
        self.rewards.load_state_dict(saved["rewards"])
        self.actor.load_state_dict(saved["actor"], with_state=False)
        if "envs" not in saved:
            self._seed, self._begun = self._seed + (self.steps + 1) * self.rows.num_envs, False
            self._starts[:] = True
            return
        self.vec.reset(seed=self._seed)
        self.vec.load_state_dict(saved["envs"])
        self._begun = True
        self._starts[:] = saved["starts"]

    def close(self) -> None:
        """Close the vector, and end the threads."""
        self.stop_threads()
        self.vec.close()

    def stop_threads(self) -> None:
        """End the threads alone: nothing more can be collected."""
        self._threads.close()


class _Shard:
    """What one thread works with: the batch; its small arrays in memory of its own, where cache lines hold envs of others, too.

    Args:
        batch: Of all envs.
        starts: Who begins an episode, [rows].
        lo: The first env.
        hi: The first env that is not its own.
    """

    def __init__(self, batch: CpuBatch, starts: np.ndarray, lo: int, hi: int):
        self.lo = lo
        self.pool, self.actions = batch.pool, batch.actions
        self._own: dict[str, np.ndarray] = {}
        if lo % SHARD_GRAIN == 0 and (hi % SHARD_GRAIN == 0 or hi == batch.num_envs):
            return  # no cache line of it holds envs of others
        small = {name: array for name, array in batch.arrays._asdict().items() if name not in LARGE_ARRAYS}
        own = {name: aligned_zeros(array.shape, array.dtype) for name, array in small.items()}
        self.pool = address_struct(batch.arrays._replace(**own))
        self.actions = aligned_zeros(batch.actions.shape, batch.actions.dtype)
        beginning = aligned_zeros(starts.shape, starts.dtype)
        pairs = [(small[name], own[name]) for name in own] + [(batch.actions, self.actions)]
        pairs.append((starts.reshape(batch.num_envs, -1), beginning.reshape(batch.num_envs, -1)))
        exchanged = [(shared[lo:hi].ctypes.data, mine[lo:hi].ctypes.data, mine[lo:hi].nbytes) for shared, mine in pairs]
        actions = "env_numbers" if isinstance(batch.spec.action_space, spaces.Box) else "env_choices"
        self._own = {f"env_{name}": array for name, array in own.items()}
        self._own |= {actions: self.actions, "beginning": beginning, "exchanged": np.array(exchanged, np.int64)}

    def job(self, job: np.ndarray) -> np.ndarray:
        """What compiled code is told of this shard."""
        if not self._own:
            return job
        told = job.copy()
        for name, array in self._own.items():
            told[JOB[name]], told[JOB[name] + 1] = array.ctypes.data, array.size
        return told


class _EpisodeLog:
    """Where compiled code notes the episodes that end: [steps, rows], so that their order does not depend on threads."""

    def __init__(self, vec: NativeVecEnv, num_steps: int):
        self.num_steps, self._names = num_steps, vec.native_spec.env.metrics
        rows, envs = (num_steps, vec.num_envs * vec.num_agents), (num_steps, vec.num_envs)
        self.arrays: dict[str, Any] = {
            "ended": np.zeros(rows, np.bool_),
            "episode_returns": np.zeros(rows, np.float32),
            "episode_lengths": np.zeros(rows, np.int32),
        }
        if self._names:
            self.arrays["over"] = np.zeros(envs, np.bool_)
            self.arrays["metrics"] = np.zeros((*envs, len(self._names)), np.float32)

    def stats(self) -> EpisodeStats:
        """The episodes of the rollout, by time, then by row."""
        ended = self.arrays["ended"]
        if not ended.any():
            return EpisodeStats(np.zeros(0), np.zeros(0, np.int64), {})
        returns, lengths = self.arrays["episode_returns"][ended], self.arrays["episode_lengths"][ended]
        metrics = {}
        if self._names:  # an env that ends with nobody left in it counts with the others of its step
            found = self.arrays["metrics"][self.arrays["over"] & ended.any(1, keepdims=True)]
            metrics = {name: found[:, m].copy() for m, name in enumerate(self._names)}
        return EpisodeStats(returns.astype(np.float64), lengths, metrics)


def vector_obstacle(vec: Any) -> str | None:
    """Why compiled code cannot step a vector; None if it can."""
    if isinstance(vec, NativePool):
        return "the envs are a NativePool, which steps some of them at a time"
    if not isinstance(vec, NativeVecEnv):
        return "the env is not a native one: those of Gymnasium and PettingZoo step in Python (`hurtle envs` lists native ones)"
    batch = vec._batch
    if not isinstance(batch, CpuBatch):
        return "the envs are on the GPU, not on the CPU"
    if not vec._same_step:
        return "the envs' autoreset_mode is NEXT_STEP, not SAME_STEP"
    return None if isinstance(batch.pool, np.ndarray) else "the envs were made with debug=True"


def _batch_of(vec: Any) -> CpuBatch:
    """The envs of a vector that compiled code can step."""
    if isinstance(vec, str):
        raise HurtleError(f"Expected a vector of envs, got the name {vec!r}; use hurtle.make_vec({vec!r}, num_envs=8).")
    if (why := vector_obstacle(vec)) is not None:
        raise HurtleError(
            f"This vector cannot be collected from natively: {why}. Use GeneralCollector, which takes any vector."
        )
    return vec._batch


def _plan_of(policy: Policy) -> NetworkPlan:
    try:
        return plan_for(policy)
    except UnsupportedError as error:
        raise HurtleError(f"This policy cannot act natively: {error}. Use GeneralCollector, which takes any policy.") from None


def _check_spaces(vec: NativeVecEnv, policy: Policy) -> None:
    """Compiled code trusts that observations and actions are as large as the policy says."""
    for what, own, given in (
        ("observations", vec.agent_observation_space, policy.observation_space),
        ("actions", vec.agent_action_space, policy.action_space),
    ):
        if own != given:
            raise HurtleError(f"The policy's {what} are {given}, those of the vector {own}: build it for the vector's spaces.")


def _compiled(vec: NativeVecEnv, batch: CpuBatch, job: np.ndarray) -> Program:
    """The functions of the env with a policy, compiled or loaded from the disk cache."""
    from numba.core.errors import NumbaError

    with COMPILING:
        program = build(vec.native_spec, "rollout")
        if program.is_new:
            print(f"hurtle: compiling {vec.native_spec.name} with its policy (first run only) …", file=sys.stderr, flush=True)
        try:
            program.functions.collect_envs(batch.pool, job, batch.actions, 0, 0, 0, 0)
        except NumbaError as error:
            raise program.explain(error) from None
        return program


def _action_arrays(space: spaces.Space) -> dict[str, np.ndarray]:
    """What turns raw actions into the env's, as `ActionHead.env_actions` does."""
    if isinstance(space, spaces.Box):
        low, high = space.low.astype(np.float64).ravel(), space.high.astype(np.float64).ravel()
        bounds = {"bound_low": space.low.ravel().copy(), "bound_high": space.high.ravel().copy()}
        return {"action_low": low, "action_range": high - low, **bounds}
    return {"action_start": np.atleast_1d(np.asarray(space.start, np.int64))}  # type: ignore[attr-defined]
