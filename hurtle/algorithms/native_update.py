"""`NativeUpdate`: minibatch updates of a policy in compiled code, on all cores; used by PPO, A2C and IMPALA.

rollout, order of steps → `kernels.cpu.update.learn` on every thread → weights, metrics. Torch's parameters stay authoritative:
they are views of one flat buffer, which is packed for the kernels before an update and unpacked after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numba import types
from torch import Tensor

from hurtle.algorithms.a2c_config import A2CConfig
from hurtle.algorithms.impala_config import IMPALAConfig
from hurtle.algorithms.kernel_crew import KernelCrew
from hurtle.algorithms.ppo import METRICS, explained_variance
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.buffers.rollout import Rollout
from hurtle.contracts import Metrics, Weights
from hurtle.errors import NonFiniteError, UnsupportedError
from hurtle.kernels.cpu import network
from hurtle.kernels.flat_parameters import FlatParameters
from hurtle.kernels.loader import load_kernels
from hurtle.kernels.optimizers import BETAS, Optimizers, loaded_moments, saved_moments
from hurtle.kernels.ranks import ALONE, Ranks
from hurtle.native.batch_arrays import aligned_zeros
from hurtle.native.build import COMPILING, address_of_entry
from hurtle.native.thread_tuner import ThreadTuner
from hurtle.native.threads import thread_count
from hurtle.policies.input_table import InputTable
from hurtle.policies.native_plan import plan_for
from hurtle.policies.network_plan import NESTED, PLAIN, NetworkPlan
from hurtle.policies.policy import Policy

CALL_SECONDS = 0.1
"""Longest call without the GIL, so that Ctrl-C works."""
MOST_SUMMED, MOST_COPIED = 4, 1 << 16
"""Up to this many shards and weights, each thread sums and steps all of them rather than a part."""
ROLLOUT_FIELDS = ("inputs", "actions", "masks", "log_probs", "values", "advantages", "returns", "starts", "valid")
OPTIMIZERS = {"adam": 0, "adamw": 1, "rmsprop": 2}


class Packed:
    """A flat tensor of all parameters (or of a moment of each), and a copy in the kernels' layout."""

    def __init__(self, plan: NetworkPlan, flat: Tensor):
        self._plan, self.flat = plan, flat.numpy()
        self.packed = aligned_zeros((plan.packed_size,), np.float32)

    def pack(self, transposed: bool = False) -> None:
        """Flat → packed."""
        self._plan.pack(self.flat, self.packed, transposed)

    def unpack(self) -> None:
        """Packed → flat."""
        self._plan.unpack(self.packed, self.flat)


def not_learned(result: np.ndarray) -> NonFiniteError:
    """The error for the results of a minibatch that are not finite."""
    loss = dict(zip(METRICS, result.tolist(), strict=True))
    return NonFiniteError(f"The loss or its gradient is not finite: {loss}. Try a lower learning_rate.")


class Order(NamedTuple):
    """The steps of several minibatches."""

    steps: Tensor
    """Flat indices into the rollout, one minibatch after another."""
    sizes: np.ndarray
    """Steps in each minibatch; 0 only where other ranks have some."""
    importance: Tensor | None = None
    """Importance weight of each step; of each segment, for policies with a memory."""
    segments: Tensor | None = None
    """For policies with a memory: the rows of each minibatch; `steps` are the valid steps of these …"""
    segment_sizes: np.ndarray | None = None
    """… and how many rows each minibatch has."""


class Plan(NamedTuple):
    """Several updates, each from a new rollout in the same memory, with the same number of minibatches."""

    order: Order
    """The steps of all updates' minibatches, one update after another."""
    learning_rates: list[float]
    clip_ranges: list[float]
    settings: dict[str, Any]
    """Of the loss, as for `NativeUpdate.learn`."""


class Planner(Protocol):
    """A learner whose next updates can be planned before their rollouts are there."""

    native: NativeUpdate

    def update(self, experience: Any, progress: float = 0.0) -> Metrics:
        """See `Learner.update`."""

    def plan(self, rollout: Rollout, progresses: Sequence[float]) -> Plan:
        """The updates at these points of the run, from 0 to 1, from rollouts in this memory."""

    def planned(self, plan: Plan, rollout: Rollout, results: np.ndarray, explained: np.ndarray) -> list[Metrics]:
        """The metrics of the updates of a plan that were made: all, or fewer after an error.

        Args:
            plan: The plan.
            rollout: As given to `plan`.
            results: METRICS of their minibatches. [updates, minibatches, 6]
            explained: Variance of their returns that the values explain. [updates]
        """


def joined_minibatches(ranks: Ranks, advantages: Tensor, sizes: np.ndarray, normalizes: bool) -> np.ndarray:
    """What joins the ranks' parts of minibatches: for each, mean and 1 / std of all advantages, and the number of steps.

    Args:
        ranks: Several.
        advantages: Those of this rank's steps, one minibatch after another.
        sizes: Steps in each minibatch; 0 for a rank that has none.
        normalizes: Whether advantages are normalized; if not, mean and std are 0 and 1.
    """
    parts = torch.split(advantages.double(), sizes.tolist())
    sums = torch.stack([torch.stack([part.new_tensor(float(len(part))), part.sum(), part.square().sum()]) for part in parts])
    count, total, squares = ranks.sum_(sums).numpy().T
    joined = np.zeros((len(sizes), 3))
    joined[:, 1], joined[:, 2] = 1.0, count
    if normalizes:
        mean = total / np.maximum(count, 1.0)
        std = np.sqrt(np.maximum(squares - count * mean**2, 0.0) / np.maximum(count - 1.0, 1.0))
        several = count > 1
        joined[several, 0], joined[several, 1] = mean[several], 1.0 / (std[several] + 1e-8)
    return joined


class NativeUpdate:
    """The compiled update of one policy.

    Args:
        policy: Its parameters become views of one buffer.
        config: The settings of the optimizer and the loss.
        num_threads: The most threads to use, None for all free cores; what updates take decides how many work.
        ranks: The learners that train the policy together, each with its part of every minibatch; None: this one alone.

    Raises:
        UnsupportedError: The kernels do not support this policy or optimizer.
    """

    def __init__(
        self,
        policy: Policy,
        config: PPOConfig | A2CConfig | IMPALAConfig,
        num_threads: int | None = None,
        ranks: Ranks | None = None,
    ):
        if config.optimizer not in OPTIMIZERS:
            raise UnsupportedError(f"its optimizer is {config.optimizer}")
        self.plan, self.ranks = plan_for(policy), ranks or ALONE
        self.policy, self.config = policy, config
        # Holds the optimizer's name, settings and file format; torch's optimizer is never created.
        self.optimizer = Optimizers(config.optimizer, policy, config.learning_rate, config.adam_eps, config.weight_decay)
        self._kernels: Any = load_kernels().update
        self.most_threads = thread_count(num_threads, self._kernels.MAX_SHARDS)
        self._tuners: dict[int, ThreadTuner] = {}  # by the most threads that minibatches of a size can use
        self.tuner = ThreadTuner(1)
        with COMPILING:
            self._explain = load_kernels().updates.explained_variance
            self._explain.compile((types.int64,) * 3)
        learn = load_kernels().joined_update.learn_phase if self.ranks.several else self._kernels.learn
        self._crew = KernelCrew(learn, self.most_threads)
        self.barrier, self.address = self._crew.barrier, self._crew.address
        self.steps = 0  # optimizer steps
        self.last_steps = 0  # steps in all minibatches of the last call
        self._job = np.zeros(1, self._kernels.JOB)
        self._kept: dict[str, np.ndarray] = {}  # arrays the job points to
        self._fields: dict[str, Tensor] = {}  # fields of the last rollout
        self._states: tuple[Tensor, ...] = ()  # its initial state
        self._known: list[Any] = []  # their addresses and shapes
        self._lists = False  # whether observations may be sparse, so that non-zeros are listed
        self._segment_sizes: np.ndarray | None = None  # of the minibatches of this call
        self._listed_rows, self._listing = 0, np.zeros(1, load_kernels().sparse.LISTING)
        self._list: Any = None  # lists the nonzeros of observations
        self._seen: Tensor | None = None  # observations as network inputs, if they are not already
        self._table: InputTable | None = None  # how to read them, if they are nested
        self.parameters = FlatParameters(policy, has_gradients=False)
        self._packed = Packed(self.plan, self.parameters.values)
        self._buffers = tuple(policy.buffers())
        self._written = np.full_like(self._packed.flat, np.nan)  # last packed or unpacked
        self._moments: dict[str, Packed] = {}
        self._use_moments(torch.zeros_like(self.parameters.values), torch.zeros_like(self.parameters.values))
        self._describe_network()

    def _use_moments(self, first: Tensor, second: Tensor) -> None:
        """Moments are packed here; checkpoints store them as torch's optimizers do."""
        for field, flat in (("first_moments", first), ("second_moments", second)):
            self._moments[field] = Packed(self.plan, flat)
            self._moments[field].pack()
            self._keep(field, self._moments[field].packed)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of all parameters."""
        self.optimizer.set_learning_rate(learning_rate)

    def weights(self, version: int) -> Weights:
        """See `Learner.weights`; the learner's own memory."""
        self.parameters.refresh()
        return Weights(self.parameters.values, version, self._buffers, self.policy)

    def threads(self) -> tuple[int, int]:
        """See `Learner.threads`."""
        return self.tuner.best, self.tuner.most

    def state_dict(self) -> dict[str, Any]:
        """In the format of `Optimizers.state_dict`, so that a run can change gears."""
        for moment in self._moments.values():
            moment.unpack()
        views = [self.parameters.views(torch.from_numpy(moment.flat)) for moment in self._moments.values()]
        return saved_moments(self.optimizer, self.steps, *views)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with saved moments."""
        self.steps, *moments = loaded_moments(self.optimizer, saved)
        self._use_moments(*(torch.cat([part.flatten() for part in moment]) for moment in moments))

    def learn(self, rollout: Rollout, order: Order, **settings: Any) -> np.ndarray:
        """Learn from minibatches one after another.

        Args:
            rollout: With advantages computed.
            order: Which steps make the minibatches.
            settings: Fields of `kernels.cpu.update.JOB` that are not in the config: those of the clipped loss.

        Returns:
            The results of each minibatch, `[minibatches, RESULTS]`.

        Raises:
            NonFiniteError: A loss or gradient is not finite; the weights are those before that minibatch.
        """
        results = self.begin(rollout, order, **settings)
        try:
            done = self._run_together(rollout, order) if self.ranks.several else self._run(order.sizes)
        finally:  # also after Ctrl-C: keep weights, moments and step count consistent
            self.end()
        if done < len(results):
            raise not_learned(results[done])
        return results

    def begin(self, rollout: Rollout, order: Order, *, is_filled: bool = True, **settings: Any) -> np.ndarray:
        """Describe what to learn from, see `learn`; returns where the results go.

        If the rollout is not filled yet, `listing` says what to call before learning from it.
        """
        count, job = len(order.sizes), self._job[0]
        bounds = np.zeros(count + 1, np.int64)
        np.cumsum(order.sizes, out=bounds[1:])
        results = np.full((count, self._kernels.RESULTS), np.nan, np.float32)
        self._keep("bounds", bounds)
        self._keep("results", results)
        self._keep("order", order.steps.numpy())
        if order.importance is not None:
            self._keep("importance", order.importance.numpy())
        self._segment_sizes = order.segment_sizes
        assert (order.segments is None) == (self.plan.memory < 0)
        if order.segments is not None and order.segment_sizes is not None:
            self._keep("segments", order.segments.numpy())
            self._keep("segment_bounds", np.concatenate([[0], np.cumsum(order.segment_sizes)]))
        self._describe_rollout(rollout, is_filled)
        job["learning_rate"] = self.optimizer.learning_rate
        for name, value in settings.items():
            job[name] = value
        job["minibatches"], job["steps_before"], job["has_importance"] = count, self.steps, order.importance is not None
        job["done"] = 0
        self._pack_weights()
        return results

    def end(self) -> None:
        """Count the steps, and write the weights to torch's parameters."""
        self.steps += int(self._job[0]["done"])
        self._packed.unpack()
        self._written[:] = self._packed.flat

    def explained(self, rollout: Rollout) -> float:
        """The explained variance of a rollout, computed as between updates in one call."""
        if self.ranks.several or not rollout.all_valid:
            return explained_variance(rollout, ranks=self.ranks)
        return self._explain(rollout.returns.data_ptr(), rollout.advantages.data_ptr(), rollout.returns.numel())

    @property
    def learned(self) -> int:
        """Minibatches that the last call has learned from."""
        return int(self._job[0]["done"])

    @property
    def packed_weights(self) -> np.ndarray:
        """The weights in the kernels' layout, which updates change in place."""
        return self._packed.packed

    @property
    def reads_rollouts(self) -> bool:
        """Whether compiled code alone can learn from a rollout's own fields."""
        if self.ranks.several:
            return False
        dtype = self.policy.observation_space.dtype
        if self.plan.memory >= 0 or dtype is None:
            return False
        is_plain = self.plan.input_kind == PLAIN and dtype == np.float32
        return is_plain or self.plan.listed_inputs(torch.from_numpy(np.zeros(0, dtype)).dtype) > 0

    def listing(self) -> tuple[int, int]:
        """What lists the nonzeros of observations, and its argument, as addresses; zeros: they are read as they are."""
        if not self._job[0]["list_length"]:
            return 0, 0
        return address_of_entry(self._list), self._listing.ctypes.data

    def ready(self, sizes: np.ndarray) -> tuple[int, int]:
        """Make room for minibatches of these sizes; returns the fastest number of threads, and the job's address."""
        shards = self._divide(sizes)
        self._make_room(shards, self.tuner.best)
        return self.tuner.best, self._job.ctypes.data

    def _divide(self, sizes: np.ndarray) -> int:
        """Divide minibatches into shards; returns the most that one has."""
        largest = int(sizes.max(initial=1))
        if self._segment_sizes is None:
            rows = self._kernels.shard_rows(largest, self.plan.trained_size, self._lists)
            shards = -(-largest // rows)
        else:
            most_segments = int(self._segment_sizes.max(initial=1))
            rows = self._kernels.shard_segments(most_segments)
            shards = -(-most_segments // rows)
            self._make_segment_memory(rows, max(1, min(self.most_threads, shards)))
        self._job[0]["shard_rows"], self._job[0]["num_shards"] = rows, shards
        most = max(1, min(self.most_threads, shards))
        if most not in self._tuners:
            self._tuners[most] = ThreadTuner(most)
        self.tuner = self._tuners[most]
        return shards

    def _run(self, sizes: np.ndarray) -> int:
        """Call the kernel on every thread, a slice of minibatches at a time."""
        count, largest, bounds, done = len(sizes), int(sizes.max(initial=1)), self._kept["bounds"], 0
        shards, self.last_steps = self._divide(sizes), int(bounds[-1])
        while done < count:
            last = min(count, done + max(1, self.tuner.fitting(CALL_SECONDS) // largest))
            threads, steps = self.tuner.count, max(1, int(bounds[last] - bounds[done]))
            self._make_room(shards, threads)
            began = time.perf_counter()
            finished = self._call(done, last, threads)
            self.tuner.took(steps, time.perf_counter() - began)
            done += finished
            if done < last:
                break
        return done

    def _run_together(self, rollout: Rollout, order: Order) -> int:
        """Learn from all ranks' minibatches: they exchange the sum of their gradients, losses included, for each of them."""
        phases, sizes, total = load_kernels().joined_update, order.sizes, torch.from_numpy(self._kept["total"])
        joined = joined_minibatches(
            self.ranks, rollout.advantages.flatten()[order.steps], sizes, self.config.normalize_advantages
        )
        self._keep("joined", joined)
        shards, self.last_steps = self._divide(sizes), int(self._kept["bounds"][-1])
        for m in range(len(sizes)):
            if not joined[m, 2]:  # only steps of absent agents, on all ranks
                self._kept["results"][m] = 0.0
                continue
            self._make_room(shards, self.tuner.count)
            began, threads = time.perf_counter(), self.tuner.count
            self._job[0]["phase"] = phases.GRADIENT
            self._call(m, m + 1, threads)
            spent = time.perf_counter() - began
            self.ranks.sum_(total)
            began = time.perf_counter()
            self._job[0]["phase"] = phases.STEP
            if not self._call(m, m + 1, threads):
                return m
            self.tuner.took(max(1, int(sizes[m])), spent + time.perf_counter() - began)
        return len(sizes)

    def _make_room(self, shards: int, threads: int) -> None:
        """Allocate the shards' gradients, and the threads' copies if there are any."""
        plan, kernels = self.plan, self._kernels
        has_copies = threads > 1 and shards <= MOST_SUMMED and plan.trained_size <= MOST_COPIED and not self.ranks.several
        self._job[0]["has_copies"] = has_copies
        sizes = {"gradients": (1 + has_copies) * shards * kernels.shard_size(plan.trained_size)}
        if has_copies:
            size = kernels.copy_size(plan.packed_size, plan.trained_size, int(self._job[0]["num_blocks"]))
            sizes["copies"] = (threads - 1) * size
        for name, size in sizes.items():
            if name not in self._kept or len(self._kept[name]) < size:
                self._keep(name, aligned_zeros((size,), np.float32))

    def _make_segment_memory(self, segments: int, threads: int) -> None:
        """Allocate what each thread needs to learn from shards of so many segments."""
        job = self._job[0]
        num_steps = int(job["rollout_size"]) // int(job["num_rows"])
        sizes = load_kernels().segments.memory_sizes(num_steps, segments, job)
        for name, size, dtype in zip(("segment_floats", "segment_words"), sizes, (np.float32, np.int64), strict=True):
            if name not in self._kept or job[f"{name}_size"] < size or len(self._kept[name]) < threads * size:
                self._keep(name, aligned_zeros((threads * size,), dtype))
                job[f"{name}_size"] = size

    def _call(self, first: int, last: int, threads: int) -> int:
        self._job[0]["first"], self._job[0]["last"] = first, last
        return self._crew.run(self._job.ctypes.data, threads)

    def _pack_weights(self) -> None:
        """Repack the weights if torch's parameters were changed elsewhere."""
        self.parameters.refresh()
        if not np.array_equal(self._packed.flat, self._written):
            self._packed.pack(transposed=True)
            self._written[:] = self._packed.flat

    def _keep(self, name: str, array: np.ndarray) -> None:
        """Write an array's address into the job, and keep the array alive."""
        self._kept[name] = array
        self._job[0][name] = array.ctypes.data

    def _describe_network(self) -> None:
        plan, job, update = self.plan, self._job[0], self._kernels
        blocks = network.weight_blocks(plan.layers)
        if plan.log_stds:
            blocks = np.vstack([blocks, [plan.log_std_at, plan.log_stds, -1, 0, 0, 0]])
        size = plan.trained_size + update.STATS
        self._keep("weights", self._packed.packed)
        self._keep("total", aligned_zeros((size,), np.float32))
        self._keep("norms", aligned_zeros((len(blocks),), np.float32))
        self._keep("layers", plan.layers)
        self._keep("blocks", blocks)
        self._keep("nvec", plan.nvec)
        self._keep("barrier", self._crew.barrier)
        job["num_layers"], job["num_blocks"] = len(plan.layers), len(blocks)
        for name in job.dtype.names:
            if hasattr(plan, name) and name not in self._kept:
                job[name] = getattr(plan, name)
        kernels = load_kernels()
        with COMPILING:
            job["forward"], job["backward"] = plan.compiled()
            job["score"] = kernels.head_calls.score_address(plan.head_kind)
            job["gradient"] = kernels.head_calls.gradient_address(plan.head_kind)
            if plan.memory >= 0:
                job["add_segments"] = kernels.segments.segments_address()
            if plan.input_kind == NESTED:
                self._table = InputTable.of(self.policy, plan)
                kernels.stepwise.read_rows(self._table.address, 0, 0, 0)  # compiles it
        job["num_choices"] = len(plan.nvec)
        name = self.optimizer.name
        job["optimizer"], (job["beta1"], job["beta2"]) = OPTIMIZERS[name], BETAS[name]
        job["eps"], job["weight_decay"] = self.optimizer.eps, self.optimizer.weight_decay
        job["normalizes"] = self.config.normalize_advantages
        for name in ("value_coef", "entropy_coef", "max_grad_norm"):
            job[name] = getattr(self.config, name)
        job["action_size"] = math.prod(self.policy.head.action_shape)
        job["scratch_size"] = kernels.heads.scratch_size(plan.head_kind, plan.nvec)

    def _describe_rollout(self, rollout: Rollout, is_filled: bool) -> None:
        """Write the addresses of the rollout's fields into the job, after checking their shapes and dtypes."""
        job, fields = self._job[0], {name: getattr(rollout, name) for name in ROLLOUT_FIELDS}
        every = (*fields.values(), *rollout.initial_state)
        known = [(field.data_ptr(), field.shape, field.dtype) for field in every if field is not None]
        if known != self._known:
            rollout.check_fields(self.policy, fields)
            actions = "ints" if rollout.actions.dtype == torch.int64 else "floats"
            for name, field in fields.items():
                if field is not None and name != "inputs":
                    job[actions if name == "actions" else name] = field.data_ptr()
            job["has_masks"], job["rollout_size"] = rollout.masks is not None, rollout.valid.numel()
            job["num_rows"] = rollout.num_rows
            for name, part in zip(("hidden", "cells"), rollout.initial_state, strict=False):
                job[name] = part.data_ptr()
            self._known, self._fields, self._states = known, fields, rollout.initial_state
        job["list_length"] = self._describe_lists(rollout.inputs)
        if is_filled and job["list_length"] and not self._list(self._listing.ctypes.data):
            job["list_length"] = 0
        if not job["list_length"]:
            obs = rollout.inputs
            if self.plan.input_kind == NESTED:
                obs = self._read_nested(obs)
            elif self.plan.input_kind != PLAIN or obs.dtype != torch.float32:
                body: Any = self.policy.network.actor_body
                obs = self._seen = body.input(obs.flatten(0, 1)).contiguous()
            job["inputs"] = obs.data_ptr()

    def _read_nested(self, obs: Tensor) -> Tensor:
        """Nested observations as network inputs, [steps * rows, inputs]."""
        rows = obs.shape[0] * obs.shape[1]
        if self._seen is None or len(self._seen) != rows:
            self._seen = torch.empty(rows, self.plan.num_inputs)
        assert self._table is not None
        load_kernels().stepwise.read_rows(self._table.address, obs.data_ptr(), rows, self._seen.data_ptr())
        return self._seen

    def _describe_lists(self, obs: Tensor) -> int:
        """Describe observations whose nonzeros are to be listed; returns the length of a row's list, or 0 for no lists."""
        length, rows = self.plan.listed_inputs(obs.dtype), obs.shape[0] * obs.shape[1]
        self._lists = length > 0
        if not length:
            return 0
        sparse, listing = load_kernels().sparse, self._listing[0]
        if self._listed_rows != rows:
            self._listed_rows, (values, lists) = rows, sparse.list_memory(rows, length)
            self._keep("listed_values", values)
            self._keep("lists", lists)
            listing["values"], listing["lists"] = values.ctypes.data, lists.ctypes.data
            listing["low"], listing["span"] = self.plan.low.ctypes.data, self.plan.range.ctypes.data
        listing["obs"], listing["rows"], listing["inputs"] = obs.data_ptr(), rows, self.plan.num_inputs
        listing["scales"], listing["length"] = self.plan.scales, length
        if self._list is None:
            self._list = sparse.list_observations_of(obs.numpy().dtype)
            with COMPILING:
                address_of_entry(self._list)
        return length

    def close(self) -> None:
        """Stop the helper threads."""
        self._crew.close()
