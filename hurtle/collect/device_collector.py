"""`DeviceCollector`: native envs, policy, sampling and buffer on one device; on a GPU a rollout is one replay of a CUDA graph.

envs' tensors → policy → sampling kernel → env kernel → outcome kernel, T times; then V of the next observations. Fills the
same fields as `GeneralCollector`, which defines them. Only a handful of numbers leave the device. Knows nothing of losses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hurtle.buffers.rollout import Done, Finals, Rollout
from hurtle.collect.device_levels import Levels
from hurtle.collect.postprocess import Postprocess
from hurtle.collect.rows import VecRows, unused_seeds
from hurtle.contracts import Collector, Episodes, Weights
from hurtle.errors import ActionError, EnvIndexError, HurtleError, NonFiniteError
from hurtle.kernels import device_rows, error_codes
from hurtle.kernels.cuda_graphs import WARM_UPS, Graphs, Readback, autocast, side_by_side
from hurtle.kernels.device_rows import Draw, Outcome, Step
from hurtle.kernels.row_kernels import RowKernels
from hurtle.native.rng import ACTION_STREAM, seed_range, stream_states
from hurtle.policies.distributions import Categorical, Distribution, EpsilonGreedy, Gaussian, MultiCategorical, masked
from hurtle.policies.numpy_acting import see
from hurtle.policies.policy import Policy
from hurtle.tracking.timing import Timer
from hurtle.vector.native_vec import NativeVecEnv

NUMBERS = (
    *("episodes", "returns", "best_return", "lengths", "best_length", "overflow", "error", "row"),
    *("fault", "index"),  # the two halves of `CudaBatch.fault`, since a float64 cannot hold it exactly
)
"""What is read back after a rollout; then the sums of the env's metrics, and their counts."""
COLUMNS = 256
"""Rows that are summed together first."""


class DeviceCollector(Collector):
    """Fills rollouts from native envs, all on one device.

    The same weights and seed give the actions of `GeneralCollector`, except where rounding tips one.

    Args:
        vec: A vector of native envs with SAME_STEP autoreset: a `CudaVecEnv`, or a `NativeVecEnv` for the same loop on the CPU.
        policy: On the device of the envs.
        postprocess: The learner's stage; rewards and statistics are handled here, inside the graph. None leaves them to it.
        seed: Env i gets seed + i, and row n's actions are drawn from the stream of seed + n; several seeds share the envs
            evenly, each counting its own from 0.
        timer: Records where the time goes.
        graphs: Captures rollouts; None makes one for the policy's device.
        fused: Kernels that run inference instead of the policy (`kernels.triton.mlp.FusedMLP` or the like), or None.
        precision: "float32", "tf32" or "bf16", for the policy's matrix products.
        compiled: Run the policy through `torch.compile`.
        final_slots: How many final observations of truncated episodes are kept per row and rollout; None: as many as the env's
            time limit allows. Truncations beyond that bootstrap from V of the previous observation, and are counted.
        edges: Drawn options, and where their levels begin: returns are summed by level, see curriculum.py.
        action_seed: Row n draws its actions from the stream of action_seed + n instead.

    Attributes:
        overflow: Truncations without a slot so far.

    Raises:
        HurtleError: The envs are not native, or are not on the policy's device.

    Example:
        >>> import hurtle
        >>> from hurtle.policies.build import PolicyConfig, build_policy
        >>> vec = hurtle.make_vec("cartpole", num_envs=8)
        >>> collector = DeviceCollector(vec, build_policy(PolicyConfig(), vec.agent_observation_space, vec.agent_action_space))
        >>> rollout = collector.new_rollout(num_steps=32)
        >>> episodes = collector.collect(rollout)
        >>> rollout.obs.shape, rollout.values.shape
        (torch.Size([32, 8, 4]), torch.Size([32, 8]))
    """

    def __init__(
        self,
        vec: NativeVecEnv,
        policy: Policy,
        seed: int | Sequence[int] = 0,
        timer: Timer | None = None,
        *,
        postprocess: Postprocess | None = None,
        graphs: Graphs | None = None,
        fused: Any = None,
        precision: str = "float32",
        compiled: bool = False,
        final_slots: int | None = None,
        edges: Mapping[str, np.ndarray] | None = None,
        action_seed: int | None = None,
    ):
        self.device = next((parameter.device for parameter in policy.parameters()), torch.device("cpu"))
        if (why := device_obstacle(vec, self.device)) is not None:
            raise HurtleError(f"This vector cannot be collected from on the policy's device: {why}. Use GeneralCollector.")
        self.vec, self.rows, self.policy = vec, VecRows(vec), policy
        self._envs = _Envs(vec)
        self.num_rows = self.rows.num_rows
        self._postprocess = postprocess
        if postprocess is not None:
            postprocess.rewards.to(self.device)
        self.timer = timer or Timer()
        self.graphs = graphs or Graphs(self.device)
        self.steps = 0  # per env
        self.overflow = 0
        self._version, self._stopping = 0, False
        self._seeds = [seed] if isinstance(seed, int) else list(seed)
        self._groups, self._begun, self._final_slots = len(self._seeds), False, final_slots
        self._forward = torch.compile(policy) if compiled else policy
        self._autocast = torch.bfloat16 if precision == "bf16" else None
        self._readback = Readback(self.device)
        self._kernels = RowKernels(self.device)
        self._rollout: Rollout | None = None
        self._fill: Callable[[], None] | None = None  # the rollout, captured
        self._fused = fused

        rows = self.rows.num_rows
        action_seeds = self._seeds if action_seed is None else [action_seed]
        streams = stream_states(shared_seeds(action_seeds, rows), ACTION_STREAM).view(np.int64)
        self._draw = Draw(torch.from_numpy(streams.copy()).to(self.device), self._zeros((1,), torch.int64))
        self._beginning = self._zeros((rows,), torch.bool) | True
        self._state = policy.initial_state(rows, self.device)
        self._uniforms = self._zeros((rows, max(1, policy.num_uniforms)))
        self._no_mask = self._zeros((1, 1), torch.bool)
        self._all_rows, self._zero = torch.arange(rows, device=self.device), self._zeros(())
        self._normalization: tuple[Tensor, Tensor, float] | None = None
        self._actions = _EnvActions(policy, self._envs.actions)
        self._levels = {name: Levels(vec, self._envs.outcome, name, found) for name, found in (edges or {}).items()}

    @property
    def has_masks(self) -> bool:
        """Whether the env reports legal actions."""
        return self.vec.native_spec.has_mask

    def new_rollout(self, num_steps: int) -> Rollout:
        """A rollout that `collect` can fill."""
        return Rollout(self.policy, num_steps, self.rows.num_rows, self.has_masks, str(self.device))

    def load_weights(self, weights: Weights) -> None:
        """See `Collector.load_weights`."""
        weights.copy_to(self.policy)
        self._version = weights.version

    def request_stop(self) -> None:
        """Make `collect` stop before the next rollout."""
        self._stopping = True

    def prepare(self, rollout: Rollout) -> None:
        """Capture a rollout; see `Collector.prepare`."""
        statistics = [part for part in (self._postprocess, self.policy.normalizer) if part is not None]
        saved = [copy.deepcopy(part.state_dict()) for part in (*statistics, self)]
        for _ in range(WARM_UPS + 1):
            self.collect(rollout)
        self.pending(wait=True)
        self.overflow = 0
        for part, state in zip((*statistics, self), saved, strict=True):
            part.load_state_dict(state)

    def collect(self, rollout: Rollout) -> Episodes | None:
        """Fill the rollout with the next `num_steps` steps of every env; see `Collector.collect`.

        Raises:
            NonFiniteError: An observation, a reward or a policy output was not finite in a rollout reported now.
            EnvIndexError: The env's code indexed an array out of bounds; names the author's line.
        """
        if self._stopping:
            self._stopping = False
            return None
        self.vec.check_open()
        self._begin()
        if rollout is not self._rollout:
            self._bind(rollout)
        rollout.all_valid, rollout.version = not self.vec.native_spec.has_present, self._version
        rollout.done = Done.BOOTSTRAP if self._postprocess is None else Done.BOOTSTRAP | Done.REWARDS | Done.STATISTICS
        rollout.finals = self._finals
        with self.timer("collect"):
            assert self._fill is not None
            self._fill()
            self._readback.send(self._numbers)
            self.steps += rollout.num_steps
            return self.pending()

    def pending(self, wait: bool = False) -> Episodes:
        """See `Collector.pending`; raises what `collect` raises."""
        return Episodes.join([self._read(own, n) for numbers in self._readback.arrived(wait) for n, own in enumerate(numbers)])

    def seconds(self) -> dict[str, float]:
        """See `Collector.seconds`."""
        return self.graphs.seconds("collect")

    def metrics(self) -> dict[str, float]:
        """The number of truncations without a slot for their final observation, if any."""
        return {"final_overflow": float(self.overflow)} if self.overflow else {}

    @property
    def warning(self) -> str:
        """See `Collector.warning`."""
        return f"collecting without CUDA graphs, which is slower: {self.graphs.failure}" if self.graphs.failure else ""

    def _read(self, numbers: np.ndarray, group: int) -> Episodes:
        """The ended episodes of one seed's envs."""
        found = dict(zip(NUMBERS, numbers.tolist(), strict=False))
        self.overflow += int(found["overflow"])
        if found["fault"]:
            raise self._envs.out_of_bounds((int(found["fault"]) << 32) | int(found["index"]))
        if found["error"] != error_codes.NO_ERROR_INT32:
            self._refuse(*divmod(int(found["error"]), error_codes.KINDS), int(found["row"]))
        names, levels, at = self.vec.native_spec.env.metrics, {}, len(numbers)
        for name, own in reversed(self._levels.items()):
            at -= own.sums.numel()
            levels[name] = numbers[at : at + own.sums.numel()].reshape(own.sums.shape).copy()
        *sums, number = numbers[len(NUMBERS) : at].tolist()
        metrics = {name: total / number for name, total in zip(names, sums, strict=False)} if number else {}
        count, best_return, best_length = int(found["episodes"]), found["best_return"], found["best_length"]
        return Episodes.from_totals(count, found["returns"], best_return, found["lengths"], best_length, metrics, levels)

    def _refuse(self, step: int, kind: int, row: int) -> None:
        who = f"{self._name_of(row // self.rows.num_agents)}, at step {step + 1} of its rollout,"
        if kind == error_codes.POLICY:
            raise NonFiniteError(error_codes.policy_message(who))
        name = error_codes.NAMES[kind]
        raise NonFiniteError(
            f"The {name} of {who} is not finite. Look for a division by zero, a log or an overflow in the env."
        )

    def _reset(self) -> None:
        self.vec.reset(seed=self._seeds[0] if self._groups == 1 else shared_seeds(self._seeds, self.vec.num_envs).tolist())

    def _name_of(self, env: int) -> str:
        return f"env {env}"

    def _begin(self) -> None:
        if not self._begun:
            self._reset()
            self.rows.check_finite("observation", self._envs.obs.cpu().numpy(), 0)
            self._begun = True

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _bind(self, rollout: Rollout) -> None:
        """Prepare to fill this rollout repeatedly."""
        if rollout.num_rows != self.rows.num_rows or rollout.device.type != self.device.type:
            raise HurtleError(
                f"The rollout has {rollout.num_rows} rows on {rollout.device}, the vector {self.rows.num_rows} on "
                f"{self.device}: use new_rollout(num_steps)."
            )
        rows, steps, spec = rollout.num_rows, rollout.num_steps, self.vec.native_spec
        rollout.valid.fill_(True)
        rollout.final_values.zero_()
        slots = -(-steps // spec.max_steps) if spec.max_steps else 0
        slots = slots if self._final_slots is None else min(slots, self._final_slots)
        own = self._envs.obs.shape[1:]
        zeros, metrics = self._zeros, len(spec.env.metrics)
        self._final_obs = zeros((slots, rows, *own), self._envs.obs.dtype)
        self._outcome = Outcome(
            rollout.rewards, rollout.terminated, rollout.truncated, rollout.starts, rollout.valid, self._beginning,
            zeros((rows,), torch.int32), zeros((slots, rows), torch.int32), self._final_obs.view(slots, rows, own.numel()),
            rollout.log_probs, zeros((rows,), torch.int32),
        )  # fmt: skip
        self._final_state = tuple(zeros((slots, *part.shape), part.dtype) for part in self._state)
        self._episodes = device_rows.Episodes(
            zeros((rows,), torch.int32), zeros((rows,)), zeros((rows,)), zeros((rows,), torch.int32),
            zeros((rows,), torch.int32), zeros((self.vec.num_envs, metrics + 1)),
        )  # fmt: skip
        self._finals = Finals(
            self._outcome.final_steps.view(-1), torch.arange(rows, device=self.device).repeat(slots),
            self._final_obs.flatten(0, 1), tuple(part.flatten(0, 1) for part in self._final_state),
        )  # fmt: skip
        by_level = sum(levels.sums.numel() for levels in self._levels.values())
        self._numbers = zeros((self._groups, len(NUMBERS) + metrics + 1 + by_level), torch.float64)
        self._rollout = rollout
        self._fill = self.graphs.wrap(self._fill_rollout, "collect")

    @torch.no_grad()
    def _fill_rollout(self) -> None:
        """What a graph captures: the same launches on the same memory every time."""
        rollout = self._rollout
        assert rollout is not None
        out, episodes = self._outcome, self._episodes
        for counter in (out.cuts, *episodes, *(levels.sums for levels in self._levels.values())):
            counter.zero_()
        episodes.best_return.fill_(-torch.inf)
        out.final_steps.fill_(-1)
        out.error.fill_(error_codes.NO_ERROR_INT32)
        for part, now in zip(rollout.initial_state, self._state, strict=True):
            part.copy_(now)
        rollout.starts[0].copy_(self._beginning)
        self._normalization = self._normalizer()  # constant during a rollout
        if self._fused is not None:
            self._fused.refresh()
        torch.clear_autocast_cache()  # a caller's own autocast must not leave old weights in the graph
        with autocast(self.device, self._autocast):  # around all steps: weights of linear layers are converted once
            for t in range(rollout.num_steps):
                if self.vec.native_spec.has_present:
                    rollout.valid[t].copy_(self._envs.present)
                self._act(rollout, t)
                self._step(rollout, t)
                self._kernels("outcome_rows", rollout.num_rows, t, self.rows.num_agents, self._envs.outcome, out, episodes)
                for levels in self._levels.values():
                    levels.add()
                for part, kept in zip(self._state, self._final_state, strict=True):
                    self._kernels("keep_rows", rollout.num_rows, t, out.final_steps, part, kept)
        side_by_side(self.device, partial(self._bootstrap, rollout), self._summarize)
        good = (out.error == error_codes.NO_ERROR_INT32).view(self._groups, -1).all(1) & (self._envs.fault[0] == 0)
        if self._postprocess is not None:  # its statistics learn nothing from rollouts with errors
            self._postprocess.on_device(rollout, self._kernels, good if self._groups > 1 else good[0])
        self._draw.clock.add_(rollout.num_steps)

    def _step(self, rollout: Rollout, t: int) -> None:
        try:
            self._envs.step()
        except ActionError:  # on the CPU, which checks actions before stepping
            bad = ~rollout.inputs[t].flatten(1).isfinite().all(1)
            if bad.any():
                self._refuse(t - 1, error_codes.OBSERVATION, int(bad.byte().argmax()))
            raise

    def _act(self, rollout: Rollout, t: int) -> None:
        """Choose the actions of step t and pass them to the envs."""
        if self._fused is None or self.policy.normalizer is not None:
            rollout.obs[t].copy_(self._envs.obs)  # otherwise the fused kernel copies it
        if rollout.masks is not None:
            if self._envs.mask is None:
                rollout.masks[t].fill_(True)
            else:
                rollout.masks[t].copy_(self._envs.mask)
        if self._fused is not None:
            masks = None if rollout.masks is None else rollout.masks[t]
            self._fused.act(
                self._envs.obs, *self._draw, t, rollout.inputs[t], rollout.actions[t], rollout.log_probs[t], rollout.values[t],
                self._actions.flat, self._actions.bounds, self._normalization, masks,
            )  # fmt: skip
            return
        if self.policy.normalizer is not None:
            rollout.inputs[t].copy_(see(self.policy, self._envs.obs, self.device))
        distribution, value, state = self._forward(rollout.inputs[t], self._state, None, rollout.starts[t])
        for part, new in zip(self._state, state, strict=True):
            part.copy_(new)
        rollout.values[t].copy_(value)
        self._sample(rollout, t, distribution)

    def _sample(self, rollout: Rollout, t: int, distribution: Distribution) -> None:
        mask = None if rollout.masks is None else rollout.masks[t]
        target = self._actions
        if isinstance(distribution, EpsilonGreedy) and mask is not None:
            distribution = masked(distribution, mask)  # the best action must be a legal one
        if isinstance(distribution, Categorical | MultiCategorical) and target.is_discrete:
            logits = distribution.flat_log_probs()
            taken = rollout.actions.view(rollout.num_steps, rollout.num_rows, len(target.nvec))
            self._kernels(
                "choose_rows", rollout.num_rows, t, self._draw, logits, self._no_mask if mask is None else mask,
                mask is not None, target.nvec, target.bounds[0], taken, rollout.log_probs, target.flat,
            )  # fmt: skip
            return
        if type(distribution) is Gaussian and target.is_plain_box and distribution.log_std.ndim == 1:
            self._kernels(
                "gauss_rows", rollout.num_rows, t, self._draw, distribution.mean, distribution.log_std, *target.bounds,
                rollout.actions, rollout.log_probs, target.flat,
            )  # fmt: skip
            return
        self._kernels("uniform_rows", rollout.num_rows, t, self._draw, self._uniforms)
        actions = distribution.sample(self._uniforms)
        rollout.actions[t].copy_(actions)
        rollout.log_probs[t].copy_(distribution.log_prob(actions))
        target.flat.copy_(self.policy.head.env_tensor(actions).view_as(target.flat))

    def _normalizer(self) -> tuple[Tensor, Tensor, float] | None:
        """What kernels normalize observations with."""
        own = self.policy.normalizer
        if own is None:
            return None
        return own.mean.flatten(), (own.variance + own.eps).sqrt().flatten(), own.clip

    def _value(self, seen: Tensor, state: tuple[Tensor, ...], starts: Tensor | None) -> Tensor:
        """V of what the policy sees, [B, …] → [B]."""
        if self._fused is not None:
            values = self._zeros((len(seen),))
            self._fused.values(seen, values)
            return values
        with autocast(self.device, self._autocast):
            return self._forward(seen, state, None, starts)[1].float()

    def _bootstrap(self, rollout: Rollout) -> None:
        """V of the observation after the last step, and of the last observations of truncated episodes."""
        rollout.last_obs.copy_(self._envs.obs)
        rollout.last_starts.copy_(self._beginning)
        for part, now in zip(rollout.last_state, self._state, strict=True):
            part.copy_(now)
        if self._fused is not None and not self._fused.acts_with_values:
            self._fused.values(rollout.inputs, rollout.values)
        rollout.last_values.copy_(self._value(see(self.policy, self._envs.obs, self.device), self._state, self._beginning))
        cut = rollout.truncated > rollout.terminated  # truncated and not terminated, in one kernel
        torch.where(cut, rollout.values, self._zero, out=rollout.final_values)  # the value used where there was no slot
        for slot, step in enumerate(self._outcome.final_steps):
            seen = see(self.policy, self._final_obs[slot], self.device)
            values = self._value(seen, tuple(part[slot] for part in self._final_state), None)
            at = step.clamp_min(0).long().unsqueeze(0)
            values = torch.where(step >= 0, values, rollout.final_values.gather(0, at)[0])
            rollout.final_values.scatter_(0, at, values.unsqueeze(0))

    def _summarize(self) -> None:
        """The numbers that are read back, of each seed."""
        episodes, out, groups = self._episodes, self._outcome, self._groups
        slots = len(out.final_steps)

        def reduced(how: Callable[..., Tensor], numbers: Tensor) -> Tensor:
            return _reduced(how, numbers.view(groups, -1))

        # The first error and its row, as one number; rows of an error come in the order of the rows.
        first = reduced(torch.amin, out.error.long() * self.num_rows + self._all_rows)
        fault = self._envs.fault[:1].expand(groups)
        totals = [
            reduced(torch.sum, episodes.count),
            reduced(torch.sum, episodes.returns.double()),
            reduced(torch.amax, episodes.best_return),
            reduced(torch.sum, episodes.lengths),
            reduced(torch.amax, episodes.best_length),
            reduced(torch.sum, (out.cuts - slots).clamp_min(0)),
            first // self.num_rows,
            first % self.num_rows,
            fault >> 32,
            fault & 0xFFFFFFFF,
        ]
        self._numbers[:, : len(NUMBERS)].copy_(torch.stack([number.double() for number in totals], 1))
        sums = episodes.metrics.view(groups, -1, episodes.metrics.shape[1]).sum(1, dtype=torch.float64)
        by_level = [levels.sums.view(1, -1) for levels in self._levels.values()]
        self._numbers[:, len(NUMBERS) :].copy_(torch.cat([sums, *by_level], 1))

    def state_dict(self, with_envs: bool = True) -> dict[str, Any]:
        """See `Collector.state_dict`; any other collector can continue from it."""
        steps = self._draw.clock.cpu().expand(self.num_rows).clone()
        saved = {"actor": {"steps": steps, "state": [part.clone() for part in self._state]}, "steps": self.steps}
        if with_envs:
            self._begin()
            resetting = np.zeros(self.num_rows, np.bool_)
            saved |= {"envs": self.vec.state_dict(), "starts": self._beginning.cpu().numpy().copy(), "resetting": resetting}
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """See `Collector.load_state_dict`."""
        self.steps = saved["steps"]
        self._draw.clock.fill_(int(saved["actor"]["steps"].max()))
        if "envs" not in saved:
            unused = unused_seeds(saved, self.rows.num_envs)
            self._seeds, self._begun = [seed + unused for seed in self._seeds], False
            self._beginning.fill_(True)
            return
        for part, now in zip(self._state, saved["actor"]["state"], strict=True):
            part.copy_(now)
        self._reset()
        self.vec.load_state_dict(saved["envs"])
        self._begun = True
        self._beginning.copy_(torch.from_numpy(np.asarray(saved["starts"])))

    def close(self, envs: bool = True) -> None:
        """Release the graphs and their memory; see `Collector.close`."""
        self.graphs.close()
        self._rollout = self._fill = None
        self.__dict__.pop("_outcome", None)
        if envs:
            self.vec.close()


def shared_seeds(seeds: Sequence[int], count: int) -> np.ndarray:
    """The seeds of `count` envs or rows that several seeds share evenly.

    Example:
        >>> shared_seeds([7, 90], 4).tolist()
        [7, 8, 90, 91]
    """
    return np.concatenate([seed_range(seed, count // len(seeds)) for seed in seeds])


def device_obstacle(vec: Any, device: torch.device) -> str | None:
    """The reason this collector cannot use the vector on the policy's device, or None."""
    if not isinstance(vec, NativeVecEnv):
        return "the envs are not native ones (Gymnasium and PettingZoo envs step on the CPU)"
    if not vec.same_step:
        return "the envs' autoreset_mode is NEXT_STEP, not SAME_STEP"
    own = _Envs(vec).device
    if (own.type, own.index or 0) != (device.type, device.index or 0):
        return f"the envs are on {own}, the policy on {device} (hurtle.make_vec(…, device={str(device)!r}) puts them there)"
    return None


class _Envs:
    """A batch of native envs as torch tensors, [rows, …], on its device."""

    def __init__(self, vec: NativeVecEnv):
        batch: Any = vec.batch
        arrays = batch.arrays
        self._batch, self._on_gpu = batch, hasattr(arrays.reward, "is_cuda")
        rows, spec = vec.num_envs * vec.num_agents, vec.native_spec
        shape = vec.agent_observation_space.shape
        assert shape is not None
        self.device = arrays.reward.device if self._on_gpu else torch.device("cpu")
        self.obs = self._tensor(arrays.obs).view(rows, *shape)
        self.mask = self._tensor(arrays.mask).view(rows, -1) if spec.has_mask else None
        self.present = self._tensor(arrays.present).view(rows)
        self.actions = self._tensor(batch.actions)
        self.fault = batch.fault if self._on_gpu else torch.zeros(1, dtype=torch.int64)  # on the CPU, `step` raises
        outcome = {name: self._tensor(getattr(arrays, name)) for name in Step._fields if not name.endswith("numbers")}
        flat = self._tensor(arrays.obs)
        final = self._tensor(arrays.final_obs)
        self.outcome = Step(**outcome, numbers=_floats(flat), final_numbers=_floats(final))

    def _tensor(self, array: Any) -> Tensor:
        return array if self._on_gpu else torch.from_numpy(array)

    def out_of_bounds(self, fault: int) -> EnvIndexError:
        """The error for a code that kernels wrote to `fault`."""
        return self._batch.out_of_bounds(fault)

    def step(self) -> None:
        """Step all envs with `actions`."""
        if self._on_gpu:
            self._batch.step()
        else:
            self._batch.step(self._batch.actions)


class _EnvActions:
    """Sampled actions for the envs: flat `[rows, k]`, with the constants of the action transform on the device."""

    def __init__(self, policy: Policy, actions: Tensor):
        transform, device = policy.head.transform, actions.device
        space, is_box = transform.space, bool(transform.low.size)
        self.is_discrete = not is_box
        self.is_plain_box = is_box and transform.kind == "gaussian" and space.dtype == np.float32
        self.flat = actions.view(-1, max(1, transform.size))
        self.nvec = torch.from_numpy(transform.nvec if self.is_discrete else np.array([transform.num_outputs])).to(device)
        constants = [part.astype(np.float32) for part in (transform.least, transform.greatest)] if is_box else [transform.start]
        self.bounds = tuple(torch.from_numpy(part.copy()).to(device) for part in constants)


def _reduced(how: Callable[..., Tensor], numbers: Tensor) -> Tensor:
    """Sums, minima or maxima [G, N] → [G]; in two steps, since torch reduces long vectors to one number slowly."""
    if numbers.shape[1] % COLUMNS == 0:
        numbers = how(numbers.view(len(numbers), -1, COLUMNS), 2)
    return how(numbers, 1)


def _floats(observations: Tensor) -> Tensor:
    """Float observations, to be checked for NaN; empty otherwise."""
    return observations if observations.is_floating_point() else observations[:, :0].float()
