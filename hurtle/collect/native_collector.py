"""`NativeCollector`: native envs × compiled policies, whole rollouts inside compiled code with the GIL released.

weights → one call per thread and rollout → observations, actions, values, advantages in the rollout's own memory. Fills the
same fields as `GeneralCollector`, which defines them. Knows nothing of losses.
"""

from __future__ import annotations

from itertools import chain, pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from hurtle.buffers.rollout import FIELDS, Done, Rollout
from hurtle.collect.inference import Actor, copy_states
from hurtle.collect.postprocess import Postprocess
from hurtle.collect.rows import VecRows, unused_seeds
from hurtle.contracts import Collector, Episodes, Weights
from hurtle.errors import ActionError, HurtleError, NonFiniteError, UnsupportedError
from hurtle.kernels import error_codes
from hurtle.kernels.cpu.rollout_job import JOB, SIZE
from hurtle.kernels.loader import load_kernels
from hurtle.native.batch import PLAY_SECONDS, CpuBatch
from hurtle.native.batch_arrays import address_table, aligned_zeros
from hurtle.native.bounds import OutOfBounds
from hurtle.native.build import COMPILING, address_of_entry
from hurtle.native.thread_tuner import ThreadTuner
from hurtle.native.threads import SHARD_GRAIN, Crew, shard_edges, thread_count
from hurtle.policies.action_transform import SCALINGS, ActionTransform
from hurtle.policies.build import build_policy
from hurtle.policies.native_plan import flat_plan
from hurtle.policies.network_plan import NetworkPlan
from hurtle.policies.policy import Policy
from hurtle.policies.policy_config import PolicyConfig
from hurtle.tracking.timing import Timer
from hurtle.vector.native_pool import NativePool
from hurtle.vector.native_vec import NativeVecEnv

ROWS_PER_THREAD = 8
"""With fewer, shared cache lines cost more than another thread gains."""
SHARED_ARRAYS = ("envs", "obs", "final_obs", "max_steps")
"""What threads do not copy: it is large, or nobody writes to it."""


class NativeCollector(Collector):
    """Fills rollouts from native envs, without Python between the steps.

    The same weights and seed give the actions of `GeneralCollector` (except where rounding tips one), on any number of threads.

    Args:
        vec: A `NativeVecEnv` on the CPU with SAME_STEP autoreset, as `hurtle.make_vec` returns for native envs.
        policy: A policy on the CPU, an MLP or a small CNN, with or without memory; or a `PolicyConfig` to build one for the
            vector's spaces. Its weights are copied; `load_weights` replaces them.
        seed: Env i gets seed + i, and row n's actions are drawn from the stream of seed + n.
        timer: Records where the time goes.
        postprocess: The learner's stage. Unless it scales rewards, advantages are computed here, in the same call.
        num_threads: The most threads to use, each with a shard of the envs; None means all free cores, but at least 8 rows
            for each. What rollouts take decides how many work.
        action_seed: Row n draws from the stream of action_seed + n instead.

    Raises:
        HurtleError: Compiled code cannot run this vector or policy; says why.

    Example:
        >>> import hurtle
        >>> collector = NativeCollector(hurtle.make_vec("cartpole", num_envs=8), PolicyConfig())
        >>> rollout = collector.new_rollout(num_steps=32)
        >>> episodes = collector.collect(rollout)
        >>> rollout.obs.shape, rollout.values.shape
        (torch.Size([32, 8, 4]), torch.Size([32, 8]))
    """

    def __init__(
        self,
        vec: NativeVecEnv,
        policy: Policy | PolicyConfig,
        seed: int = 0,
        timer: Timer | None = None,
        *,
        postprocess: Postprocess | None = None,
        num_threads: int | None = None,
        action_seed: int | None = None,
    ):
        self._batch = _batch_of(vec)
        self.vec, self.rows = vec, VecRows(vec)
        if isinstance(policy, PolicyConfig):
            policy = build_policy(policy, vec.agent_observation_space, vec.agent_action_space, seed=seed)
        _check_spaces(vec, policy)
        self.policy, self._plan = policy, _plan_of(policy)
        self.num_rows = self.rows.num_rows
        self.actor = Actor(policy, self.num_rows, seed if action_seed is None else action_seed)
        self._states = self._plan.new_states(self.num_rows)
        self.actor.state = tuple(self._states)
        self.timer = timer or Timer()
        self.steps = 0  # per env
        self._version, self._stopping = 0, False
        self._seed, self._begun = seed, False
        stage = postprocess if postprocess is not None and postprocess.rewards.mode == "raw" else None
        self._discounts = None if stage is None else (stage.gamma, stage.gae_lambda)
        self._done = Done.BOOTSTRAP if stage is None else Done.BOOTSTRAP | Done.ADVANTAGES
        self._weights = aligned_zeros((self._plan.packed_size,), np.float32)
        self.load_weights(Weights.of(policy))
        self._starts = np.ones(self.num_rows, np.bool_)  # rows whose next step starts an episode
        self._cuts = np.zeros(self.num_rows, np.int64)  # truncated episodes of this rollout
        self._episodes = _EpisodeLog(vec, 0)
        self._known: list[Any] = []  # addresses and shapes of the last rollout's fields
        self._job = np.zeros(SIZE, np.int64)  # the arguments of compiled code, see kernels/cpu/rollout_job.py
        self._kept: dict[str, np.ndarray] = {}  # arrays that only the job points to
        self._describe_envs()
        self._describe_policy()
        with COMPILING:
            self._collect_envs = load_kernels().rollout.collect_envs_of(self._batch.arrays.obs.dtype)
            self._address = address_of_entry(self._collect_envs)
        few = max(1, self.num_rows // ROWS_PER_THREAD)
        self.tuner = ThreadTuner(thread_count(num_threads, self.rows.num_envs if num_threads else few))
        self._crew = Crew(self.tuner.most) if self.tuner.most > 1 else None
        self._shards: dict[int, list[_Shard]] = {}  # by number of threads

    @property
    def has_masks(self) -> bool:
        """Whether the env reports legal actions."""
        return self.vec.native_spec.has_mask

    @property
    def num_weights(self) -> int:
        """Elements of the flat weights that `load_weights` takes."""
        return self._plan.num_weights

    def threads(self) -> tuple[int, int]:
        """See `Collector.threads`."""
        return self.tuner.best, self.tuner.most

    def new_rollout(self, num_steps: int) -> Rollout:
        """A rollout that `collect` can fill."""
        return Rollout(self.policy, num_steps, self.num_rows, self.has_masks)

    def load_weights(self, weights: Weights) -> None:
        """See `Collector.load_weights`; the weights are copied.

        Raises:
            HurtleError: They have the wrong size, dtype or layout.
        """
        self._plan.pack(self._plan.checked(weights.flat), self._weights, transposed=False)
        weights.copy_to(self.policy)
        self._plan.pack_exploration(self.policy.network, self._weights)
        self._version = weights.version

    @property
    def computes_all(self) -> bool:
        """Whether rollouts need no postprocessing, copying or counting once compiled code has filled them."""
        raw = self.policy.normalizer is None and Done.ADVANTAGES in self._done and self._plan.memory < 0
        return raw and not self.vec.native_spec.has_present and not self._plan.num_explorations

    def begin_rollouts(self, rollout: Rollout, count: int, weights: np.ndarray) -> Rollouts:
        """What compiled code needs to fill the rollout `count` times, all but its first and last states and observations.

        Args:
            rollout: The memory of all of them.
            count: How many.
            weights: Packed as the policy's; may change from one rollout to the next.
        """
        assert weights.size == self._weights.size
        self._begin()
        self._describe_rollout(rollout)
        log, arrays = _EpisodeLog(self.vec, count * rollout.num_steps), {"weights": weights}
        jobs = [shard.job(self._job).copy() for shard in self._shards_for(self.tuner.best)]
        for name, array in (arrays | log.arrays).items():
            for job in jobs:
                job[JOB[name]] = array.ctypes.data
        call, finals = self._call(jobs, self._shards_for(self.tuner.best), 0, rollout.num_steps), rollout.finals.steps
        numbers = {
            "collect": self._address, "collect_call": call.ctypes.data, "collectors": len(jobs),
            "cuts": self._cuts.ctypes.data, "final_steps": finals.data_ptr(), "num_finals": finals.numel(),
            "drawn": self.actor.steps.ctypes.data, "num_steps": rollout.num_steps, "num_rows": self.num_rows,
            "num_envs": self.rows.num_envs, "num_metrics": len(self.vec.native_spec.env.metrics),
        }  # fmt: skip
        return Rollouts(numbers, log, (call, jobs))

    def end_rollouts(self, rollout: Rollout, done: int, error_code: int, failure: OutOfBounds | None) -> HurtleError | None:
        """Count the steps of `done` rollouts that were played; returns the error that ended the next one, if any."""
        self.steps += done * rollout.num_steps
        self._version += done
        rollout.done, rollout.version, rollout.all_valid = self._done, self._version, True
        if failure is None and error_code == error_codes.NO_ERROR:
            return None
        self.steps += rollout.num_steps
        self.actor.steps += rollout.num_steps
        if failure is not None:
            return self._interrupted(failure)
        try:
            self._refuse(rollout, error_code, self.steps - rollout.num_steps)
        except HurtleError as error:
            return error
        return None

    def request_stop(self) -> None:
        """Make `collect` stop within about 0.1 s."""
        self._stopping = True

    def collect(self, rollout: Rollout) -> Episodes | None:
        """Fill the rollout with the next `num_steps` steps of every env; see `Collector.collect`.

        Raises:
            NonFiniteError: An env returned NaN or infinity; names the env and its step.
            EnvIndexError: The env's code indexed an array out of bounds; names the author's line.
            HurtleError: The rollout does not fit the vector, or is not on the CPU.
        """
        if not self.fill(rollout):
            return None
        with self.timer("copy"):
            rollout.last_obs.copy_(torch.from_numpy(self._batch.arrays.obs).view_as(rollout.last_obs))
            rollout.last_starts.copy_(torch.from_numpy(self._starts))
            copy_states(self._states, rollout.last_state)
            rollout.all_valid = not self.vec.native_spec.has_present or bool(rollout.valid.all())
            rollout.done = self._done
            rollout.version = self._version
            return self._episodes.episodes()

    def fill(self, rollout: Rollout) -> bool:
        """Play `num_steps` steps into the rollout; False if stopped before the end."""
        self._begin()
        with self.timer("collect"):
            self._describe_rollout(rollout)
            copy_states(self._states, rollout.initial_state)
            self._cuts[:] = 0
            rollout.finals.steps.fill_(-1)
            done = 0
            while done < rollout.num_steps and not self._stopping:
                done += self._collect_slice(rollout, done)
        self._stopping = False
        return done == rollout.num_steps

    def _begin(self) -> None:
        self.vec.check_open()
        if not self._begun:
            obs, _ = self.vec.reset(seed=self._seed)
            self._begun = True
            self.rows.check_finite("observation", self.rows.flat(obs), self.steps)

    def _collect_slice(self, rollout: Rollout, first: int) -> int:
        """Take about 0.1 s worth of steps, at most up to the end of the rollout. Returns the number of steps taken."""
        size, threads = min(self.tuner.fitting(PLAY_SECONDS), rollout.num_steps - first), self.tuner.count
        shards = self._shards_for(threads)
        began = perf_counter()
        try:
            error_code = self._collect_together(shards, first, first + size)
        except OutOfBounds as error:
            raise self._interrupted(error) from None
        finally:
            self.steps += size
            self.actor.steps += size
        if error_code != error_codes.NO_ERROR:
            self._refuse(rollout, error_code, self.steps - size - first)
        self.tuner.took(size, perf_counter() - began)
        return size

    def _interrupted(self, error: OutOfBounds) -> HurtleError:
        """The error for the user. Threads have not copied their arrays back: the next call resets the envs."""
        self._begun = False
        self._starts[:] = True
        return self._batch.out_of_bounds(error)

    def _shards_for(self, threads: int) -> list[_Shard]:
        """The envs, divided among so many threads."""
        if threads not in self._shards:
            edges = shard_edges(self.rows.num_envs, threads).tolist()
            self._shards[threads] = [_Shard(self._batch, self._starts, lo, hi) for lo, hi in pairwise(edges)]
        return self._shards[threads]

    def _collect_together(self, shards: list[_Shard], first: int, last: int) -> int:
        """Take steps [first, last), each shard on a thread of its own; returns the first error's code."""
        jobs = [shard.job(self._job) for shard in shards]
        call = self._call(jobs, shards, first, last)
        if self._crew is None or len(shards) == 1:
            return self._collect_envs(call.ctypes.data, 0, 1)
        return min(self._crew.run(self._address, call.ctypes.data, len(shards)))

    @staticmethod
    def _call(jobs: list[np.ndarray], shards: list[_Shard], first: int, last: int) -> np.ndarray:
        """The arguments of `collect_envs` for steps [first, last)."""
        parts = [(job.ctypes.data, shard.lo, shard.hi) for job, shard in zip(jobs, shards, strict=True)]
        return np.array([first, last, *chain.from_iterable(parts)], np.int64)

    def _refuse(self, rollout: Rollout, error_code: int, steps: int) -> None:
        """Raise the error behind a code; `steps` is the number of steps before this rollout."""
        when, row = divmod(error_code, self.num_rows)
        t, kind = divmod(when, error_codes.KINDS)
        env, shape = row // self.rows.num_agents, self.vec.agent_observation_space.shape
        assert shape is not None
        if kind == error_codes.POLICY:
            raise NonFiniteError(error_codes.policy_message(f"env {env} at its step {steps + t + 1}"))
        if kind == error_codes.ACTION:
            action, space = self._batch.actions[env], self._batch.spec.action_space
            raise ActionError(f"Env {env} got the action {action!s}, which is not in {space}.")
        what = error_codes.NAMES[kind]
        if kind == error_codes.REWARD:
            array = rollout.rewards[t].numpy()
        else:
            arrays = self._batch.arrays
            array = (arrays.final_obs if kind == error_codes.FINAL_OBSERVATION else arrays.obs).reshape(-1, *shape)
        self.rows.check_finite(what, array[row : row + 1], steps + t + 1, np.array([row]))

    def _tell(self, **arrays: np.ndarray | Tensor | None) -> None:
        """Write the addresses and sizes of arrays into the job; the caller keeps them alive. None means an empty array."""
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
        self._tell(streams=self.actor.streams, drawn=self.actor.steps, beginning=self._starts, cuts=self._cuts)
        self._tell(states=self._states)
        spec = self._batch.spec
        self._tell_numbers(
            num_rows=self.num_rows,
            num_agents=self.rows.num_agents,
            num_inputs=spec.obs_size // spec.num_agents,
            list_length=load_kernels().sparse.list_length(spec.obs_size // spec.num_agents),
            is_box=isinstance(spec.action_space, spaces.Box),
            has_present=spec.has_present,
            num_metrics=len(spec.env.metrics),
            max_steps=spec.max_steps,
            **self._batch.functions.addresses,
            handle=self._batch.handle.ctypes.data,
            actions=self._batch.actions.ctypes.data,
        )

    def _describe_policy(self) -> None:
        plan, head, normalizer = self._plan, self.policy.head, self.policy.normalizer
        gamma, gae_lambda = self._discounts or (0.0, 0.0)
        clip = 0.0 if normalizer is None else normalizer.clip
        self._kept = {"constants": np.array([clip, gamma, gamma * gae_lambda]), **_action_arrays(head.transform)}
        self._tell(weights=self._weights, layers=plan.layers, nvec=plan.nvec, low=plan.low, range=plan.range, **self._kept)
        self._tell_numbers(**{name: getattr(plan, name) for name in (*plan.NUMBERS, "work_size")})
        kernels = load_kernels()
        with COMPILING:
            self._tell_numbers(forward=plan.compiled()[0], sample=kernels.head_calls.sample_address(plan.head_kind))
            self._tell_numbers(remember=kernels.remembering.remember_address() if plan.memory >= 0 else 0)
        self._tell_numbers(
            scratch_size=kernels.heads.scratch_size(plan.head_kind, plan.nvec),
            is_shared=plan.shared,
            is_scaled=plan.scales,
            scaling=SCALINGS.get(head.kind, 0),
            normalizes=normalizer is not None,
            has_advantages=self._discounts is not None,
        )

    def _describe_rollout(self, rollout: Rollout) -> None:
        """Write the addresses of the rollout's fields into the job, after checking their shapes and dtypes."""
        fields = {name: getattr(rollout, name) for name in FIELDS}
        if rollout.masks is not None and not self.has_masks:
            rollout.masks.fill_(True)
        finals = (rollout.finals.steps, rollout.finals.obs)
        every = (*fields.values(), *finals, *rollout.initial_state, *rollout.last_state)
        known = [rollout.num_steps, *((field.data_ptr(), field.shape, field.dtype) for field in every if field is not None)]
        if known != self._known:
            if rollout.num_rows != self.num_rows:
                raise HurtleError(
                    f"The rollout has {rollout.num_rows} rows, the vector {self.num_rows}: use new_rollout(num_steps)."
                )
            rollout.check_fields(self.policy, fields)
            actions = fields.pop("actions")
            is_box = isinstance(self.policy.action_space, spaces.Box)
            self._tell(**fields, choices=None if is_box else actions, numbers=actions if is_box else None)
            has_masks = rollout.masks is not None
            self._tell_numbers(num_steps=rollout.num_steps, has_masks=has_masks, copies_masks=has_masks and self.has_masks)
            self._tell_finals(rollout)
            self._episodes = _EpisodeLog(self.vec, rollout.num_steps)
            self._tell(**self._episodes.arrays)
            self._known = known
        self._describe_normalizer()

    def _tell_finals(self, rollout: Rollout) -> None:
        """Make room for the last observations of as many truncated episodes as the env's time limit allows."""
        limit = self.vec.native_spec.max_steps
        slots = -(-rollout.num_steps // limit) if limit else 0
        count = slots * self.num_rows
        if rollout.finals.steps.shape != (count,) or rollout.finals.steps.dtype != torch.int64:
            rollout.finals = rollout.new_finals(count, self.policy)
        rollout.finals.rows.copy_(torch.arange(self.num_rows).repeat(slots))
        states = self._plan.new_states(count)
        rollout.finals = rollout.finals._replace(state=tuple(states) if count else ())
        self._kept["final_states"] = states.numpy()
        self._tell(final_steps=rollout.finals.steps, final_obs=rollout.finals.obs, final_states=states)

    def _describe_normalizer(self) -> None:
        normalizer = self.policy.normalizer
        if normalizer is None:
            return
        self._kept["mean"] = np.ascontiguousarray(normalizer.mean.numpy(), np.float64)
        self._kept["std"] = np.ascontiguousarray((normalizer.variance + normalizer.eps).sqrt().numpy(), np.float64)
        self._tell(mean=self._kept["mean"], std=self._kept["std"])

    def state_dict(self, with_envs: bool = True) -> dict[str, Any]:
        """See `Collector.state_dict`; any other collector can continue from it."""
        saved = {"actor": self.actor.state_dict(), "steps": self.steps}
        if with_envs:
            self._begin()
            resetting = np.zeros(self.num_rows, np.bool_)
            saved |= {"envs": self.vec.state_dict(), "starts": self._starts.copy(), "resetting": resetting}
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """See `Collector.load_state_dict`."""
        self.steps = saved["steps"]
        self.actor.load_state_dict(saved["actor"], with_state=False)
        if "envs" not in saved:
            self._seed, self._begun = self._seed + unused_seeds(saved, self.rows.num_envs), False
            self._starts[:] = True
            return
        self.vec.reset(seed=self._seed)
        self.vec.load_state_dict(saved["envs"])
        self._begun = True
        self._starts[:] = saved["starts"]
        copy_states(saved["actor"]["state"], self.actor.state)

    def close(self, envs: bool = True) -> None:
        """Stop the threads; see `Collector.close`."""
        if self._crew is not None:
            self._crew.close()
        if envs:
            self.vec.close()


class _Shard:
    """What one thread works with: the batch, with private copies of small arrays whose cache lines it would share.

    Args:
        batch: All envs.
        starts: Rows whose next step starts an episode, [rows].
        lo: The first env.
        hi: One past the last env.
    """

    def __init__(self, batch: CpuBatch, starts: np.ndarray, lo: int, hi: int):
        self.lo, self.hi = lo, hi
        self._own: dict[str, np.ndarray] = {}
        if lo % SHARD_GRAIN == 0 and (hi % SHARD_GRAIN == 0 or hi == batch.num_envs):
            return  # no cache lines to share
        small = {name: array for name, array in batch.arrays._asdict().items() if name not in SHARED_ARRAYS}
        own = {name: aligned_zeros(array.shape, array.dtype) for name, array in small.items()}
        self._handle = address_table(batch.arrays._replace(**own))
        self._actions = aligned_zeros(batch.actions.shape, batch.actions.dtype)
        beginning = aligned_zeros(starts.shape, starts.dtype)
        pairs = [(small[name], own[name]) for name in own] + [(batch.actions, self._actions)]
        pairs.append((starts.reshape(batch.num_envs, -1), beginning.reshape(batch.num_envs, -1)))
        exchanged = [(shared[lo:hi].ctypes.data, mine[lo:hi].ctypes.data, mine[lo:hi].nbytes) for shared, mine in pairs]
        actions = "env_numbers" if isinstance(batch.spec.action_space, spaces.Box) else "env_choices"
        self._own = {f"env_{name}": array for name, array in own.items()}
        self._own |= {actions: self._actions, "beginning": beginning, "exchanged": np.array(exchanged, np.int64)}
        told = {JOB["handle"]: self._handle.ctypes.data, JOB["actions"]: self._actions.ctypes.data}
        for name, array in self._own.items():
            told |= {JOB[name]: array.ctypes.data, JOB[name] + 1: array.size}
        self._places, self._values = np.array(list(told)), np.array(list(told.values()), np.int64)

    def job(self, job: np.ndarray) -> np.ndarray:
        """The arguments of compiled code for this shard."""
        if not self._own:
            return job
        own = job.copy()
        own[self._places] = self._values
        return own


class _EpisodeLog:
    """Where compiled code records ended episodes: [steps, rows], so that their order does not depend on threads."""

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

    def episodes(self, first: int = 0, last: int | None = None) -> Episodes:
        """The episodes that ended in steps [first, last), by time, then by row."""
        arrays = {name: array[first:last] for name, array in self.arrays.items()}
        ended = arrays["ended"]
        if not ended.any():
            return Episodes()
        metrics = {}
        if self._names:  # an env that ends with no agents counts only if an episode ended in that step
            found = arrays["metrics"][arrays["over"] & ended.any(1, keepdims=True)]
            metrics = {name: found[:, m].copy() for m, name in enumerate(self._names)}
        return Episodes.of(arrays["episode_returns"][ended], arrays["episode_lengths"][ended], metrics)


class Rollouts(NamedTuple):
    """What compiled code needs to fill a rollout several times."""

    numbers: dict[str, int]
    """Addresses and sizes, as named in kernels/cpu/updates.py."""
    log: _EpisodeLog
    """Where it records the ended episodes of all rollouts, one rollout after another."""
    kept: tuple[Any, ...]
    """Arrays that the addresses point to."""


def vector_obstacle(vec: Any) -> str | None:
    """The reason compiled code cannot step a vector, or None."""
    if isinstance(vec, NativePool):
        return "the envs are a NativePool, which steps only some of them at a time"
    if not isinstance(vec, NativeVecEnv):
        return "the env is not a native one: Gymnasium and PettingZoo envs step in Python (`hurtle envs` lists native ones)"
    batch = vec.batch
    if not isinstance(batch, CpuBatch):
        return "the envs are on the GPU, not on the CPU"
    if not vec.same_step:
        return "the envs' autoreset_mode is NEXT_STEP, not SAME_STEP"
    return None if isinstance(batch.handle, np.ndarray) else "the envs were made with debug=True"


def _batch_of(vec: Any) -> CpuBatch:
    """The envs of a vector that compiled code can step."""
    if isinstance(vec, str):
        raise HurtleError(f"Expected a vector of envs, got the name {vec!r}; use hurtle.make_vec({vec!r}, num_envs=8).")
    if (why := vector_obstacle(vec)) is not None:
        raise HurtleError(
            f"This vector cannot be collected from natively: {why}. Use GeneralCollector, which takes any vector."
        )
    return vec.batch


def _plan_of(policy: Policy) -> NetworkPlan:
    try:
        return flat_plan(policy)
    except UnsupportedError as error:
        raise HurtleError(f"This policy cannot act natively: {error}. Use GeneralCollector, which takes any policy.") from None


def _check_spaces(vec: NativeVecEnv, policy: Policy) -> None:
    """Check the spaces: compiled code trusts that observations and actions have the sizes the policy expects."""
    for what, own, given in (
        ("observations", vec.agent_observation_space, policy.observation_space),
        ("actions", vec.agent_action_space, policy.action_space),
    ):
        if own != given:
            raise HurtleError(f"The policy's {what} are {given}, the vector's are {own}: build it for the vector's spaces.")


def _action_arrays(transform: ActionTransform) -> dict[str, np.ndarray]:
    """The constants of the action transform, under their names in kernels/cpu/rollout_job.py."""
    if not transform.low.size:
        return {"action_start": transform.start}
    bounds = {"bound_low": transform.least, "bound_high": transform.greatest}
    return {"action_low": transform.low, "action_range": transform.range, **bounds}
