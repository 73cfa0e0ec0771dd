"""`DeviceCollector`: native envs, policy, sampling and buffer on one device; on a GPU a rollout is one replay of a CUDA graph.

envs' tensors → policy → sampling kernel → env kernel → outcome kernel, T times; then V of what came after. A drop-in for
`GeneralCollector`, which defines what every field means. Only a handful of numbers leaves the device. Knows nothing of losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from hurtle.buffers.rollout import EpisodeTotals, Rollout
from hurtle.collect.inference import see
from hurtle.collect.rewards import RewardRule
from hurtle.collect.rows import VecRows
from hurtle.errors import ActionError, EnvIndexError, HurtleError, NonFiniteError
from hurtle.native import device_rows
from hurtle.native.device_rows import Draw, Episodes, Outcome, Step
from hurtle.native.graphs import Graphs, Readback, autocast
from hurtle.native.rng import ACTION_STREAM, seed_range, stream_states
from hurtle.native.row_kernels import RowKernels
from hurtle.policies.distributions import Categorical, Distribution, Gaussian, MultiCategorical
from hurtle.policies.normalizers import merge_moments
from hurtle.policies.policy import Policy
from hurtle.tracking.timing import Timer
from hurtle.vector.native import NativeVecEnv

NUMBERS = (
    *("episodes", "returns", "best_return", "lengths", "best_length", "overflow", "trouble", "row"),
    *("fault", "index"),  # the two halves of `CudaBatch.fault`, since a float64 does not hold all of it
)
"""What is read back of a rollout; then the sums of the env's metrics, and how many they are of."""


class DeviceCollector:
    """Fills rollouts from native envs, all on one device.

    Same weights and same seed give the actions of `GeneralCollector`, but where rounding tips one.

    Args:
        vec: A vector of native envs with SAME_STEP autoreset: a `CudaVecEnv`, or a `NativeVecEnv` for the same loop on the CPU.
        policy: On the device of the envs.
        rewards: What becomes of rewards before they are learned from; None leaves them as they are.
        seed: Env i gets seed + i, and row n's actions are drawn from the stream of seed + n.
        timer: Where the time goes.
        graphs: Captures rollouts; None makes one for the policy's device.
        precision: "float32", "tf32" or "bf16", of the policy's matrix products.
        compiled: Run the policy through `torch.compile`.
        final_slots: How many truncated episodes of a row one rollout can keep the final observation of; None: as many as the
            env's time limit allows. Truncations beyond bootstrap from V of the observation before, and are counted.

    Attributes:
        policy: What acts.
        overflow: Truncations for which there was no slot, so far.
        stop_requested: Set it to end `collect` before the next rollout.

    Raises:
        HurtleError: The vector is not one of native envs, or is on another device than the policy.

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
        rewards: RewardRule | None = None,
        seed: int = 0,
        timer: Timer | None = None,
        *,
        graphs: Graphs | None = None,
        precision: str = "float32",
        compiled: bool = False,
        final_slots: int | None = None,
    ):
        self.device = next((parameter.device for parameter in policy.parameters()), torch.device("cpu"))
        if (why := device_obstacle(vec, self.device)) is not None:
            raise HurtleError(f"This vector cannot be collected from on the policy's device: {why}. Use GeneralCollector.")
        self.vec, self.rows, self.policy = vec, VecRows(vec), policy
        self._envs = _Envs(vec)
        self.rewards = (rewards if rewards is not None else RewardRule()).to(self.device)
        self.timer = timer or Timer()
        self.graphs = graphs or Graphs(self.device)
        self.steps = 0  # of each env
        self.overflow = 0
        self.stop_requested = False
        self._seed, self._begun, self._final_slots = seed, False, final_slots
        self._forward = torch.compile(policy) if compiled else policy
        self._autocast = torch.bfloat16 if precision == "bf16" else None
        self._readback = Readback(self.device)
        self._kernels = RowKernels(self.device)
        self._rollout: Rollout | None = None
        self._fill: Callable[[], None] | None = None  # the rollout, captured
        self._raw: Tensor | None = None  # [T, N, …]: what the policy's normalizer learns from
        self.fused: Any = None  # kernels that act for the policy, see `follow`

        rows = self.rows.num_rows
        streams = stream_states(seed_range(seed, rows), ACTION_STREAM).view(np.int64)
        self._draw = Draw(torch.from_numpy(streams.copy()).to(self.device), self._zeros((1,), torch.int64))
        self._beginning = self._zeros((rows,), torch.bool) | True
        self._state = policy.initial_state(rows, self.device)
        self._uniforms = self._zeros((rows, max(1, policy.num_uniforms)))
        self._no_mask = self._zeros((1, 1), torch.bool)
        self._normalization: tuple[Tensor, Tensor, float] | None = None
        self._actions = _EnvActions(policy, self._envs.actions)

    def follow(self, fused: Any) -> None:
        """Let kernels (`native.triton.mlp.FusedMLP`) act in the policy's stead."""
        self.fused = fused

    @property
    def has_masks(self) -> bool:
        """Whether the env tells which actions are legal."""
        return self.vec.native_spec.has_mask

    def new_rollout(self, num_steps: int) -> Rollout:
        """A rollout that `collect` can fill."""
        return Rollout(self.policy, num_steps, self.rows.num_rows, self.has_masks, str(self.device))

    def collect(self, rollout: Rollout) -> EpisodeTotals | None:
        """Fill the rollout with the next `num_steps` steps of every env; None if asked to stop.

        Returns:
            The episodes of the rollouts that the device has told of since the last call: on a GPU these are earlier ones.

        Raises:
            NonFiniteError: An observation, a reward or the policy was not finite, in one of these rollouts.
            EnvIndexError: The env's code indexed an array out of bounds; names the author's line.
        """
        if self.stop_requested:
            return None
        self.vec._check_open()
        self._begin()
        if rollout is not self._rollout:
            self._bind(rollout)
        rollout.all_valid, rollout.advantages_for = not self.vec.native_spec.has_present, None
        with self.timer("collect"):
            assert self._fill is not None
            self._fill()
            self._readback.send(self._numbers)
            self.steps += rollout.num_steps
            return self.arrived()

    def arrived(self, wait: bool = False) -> EpisodeTotals:
        """The episodes that the device has told of since the last call; `wait` for all of them."""
        return EpisodeTotals.of([self._read(numbers) for numbers in self._readback.arrived(wait)])

    def _read(self, numbers: np.ndarray) -> EpisodeTotals:
        found = dict(zip(NUMBERS, numbers.tolist(), strict=False))
        self.overflow += int(found["overflow"])
        if found["fault"]:
            raise self._envs.out_of_bounds((int(found["fault"]) << 32) | int(found["index"]))
        if found["trouble"] != device_rows.NO_TROUBLE:
            self._refuse(*divmod(int(found["trouble"]), device_rows.TROUBLES), int(found["row"]))
        *sums, number = numbers[len(NUMBERS) :].tolist()
        names = self.vec.native_spec.env.metrics
        metrics = {name: total / number for name, total in zip(names, sums, strict=False)} if number else {}
        return EpisodeTotals(
            int(found["episodes"]), found["returns"], found["best_return"], found["lengths"], found["best_length"], metrics
        )

    def _refuse(self, step: int, kind: int, row: int) -> None:
        who = f"env {row // self.rows.num_agents}, at step {step + 1} of its rollout,"
        if kind == device_rows.POLICY:
            raise NonFiniteError(
                f"The policy's log-probability in {who} is not finite: its weights are not, or are huge. Go on from a "
                "checkpoint, with a lower learning_rate."
            )
        name = {device_rows.OBSERVATION: "observation", device_rows.FINAL: "final observation"}.get(kind, "reward")
        raise NonFiniteError(
            f"The {name} of {who} is not finite. Look for a division by zero, a log or an overflow in the env."
        )

    def _begin(self) -> None:
        if not self._begun:
            self.vec.reset(seed=self._seed)
            self.rows.check_finite("observation", self._envs.obs.cpu().numpy(), 0)
            self._begun = True

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _bind(self, rollout: Rollout) -> None:
        """Get ready to fill this rollout, again and again."""
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
        self._episodes = Episodes(
            zeros((rows,), torch.int32), zeros((rows,)), zeros((rows,)), zeros((rows,), torch.int32),
            zeros((rows,), torch.int32), zeros((self.vec.num_envs, metrics + 1)),
        )  # fmt: skip
        self._raw = None
        if self.policy.normalizer is not None:
            self._raw = zeros((steps, rows, *own), self._envs.obs.dtype)
        self._numbers = zeros((len(NUMBERS) + metrics + 1,), torch.float64)
        self._rollout = rollout
        self._fill = self.graphs.wrap(self._fill_rollout, "collect")

    @torch.no_grad()
    def _fill_rollout(self) -> None:
        """What a graph captures: the same launches on the same memory, whatever the envs do."""
        rollout = self._rollout
        assert rollout is not None
        out, episodes = self._outcome, self._episodes
        for counter in (out.cuts, *episodes):
            counter.zero_()
        episodes.best_return.fill_(-torch.inf)
        out.final_steps.fill_(-1)
        out.trouble.fill_(device_rows.NO_TROUBLE)
        for part, now in zip(rollout.initial_state, self._state, strict=True):
            part.copy_(now)
        rollout.starts[0].copy_(self._beginning)
        self._normalization = self._normalizer()  # does not change during a rollout
        for t in range(rollout.num_steps):
            if self.vec.native_spec.has_present:
                rollout.valid[t].copy_(self._envs.present)
            self._act(rollout, t)
            self._step(rollout, t)
            self._kernels("outcome_rows", rollout.num_rows, t, self.rows.num_agents, self._envs.outcome, out, episodes)
            for part, kept in zip(self._state, self._final_state, strict=True):
                self._kernels("keep_rows", rollout.num_rows, t, out.final_steps, part, kept)
        self._bootstrap(rollout)
        self._summarize(rollout)
        good = (out.trouble == device_rows.NO_TROUBLE).all() & (self._envs.fault[0] == 0)  # nothing is learned from bad numbers
        self.rewards.apply_on_device(rollout, self._kernels, good)
        if self.policy.normalizer is not None and self._raw is not None:
            merge_moments(self.policy.normalizer, self._raw, None if rollout.all_valid else rollout.valid, good)
        self._draw.clock.add_(rollout.num_steps)

    def _step(self, rollout: Rollout, t: int) -> None:
        try:
            self._envs.step()
        except ActionError:  # on the CPU, which looks at actions before it takes them
            bad = ~rollout.obs[t].flatten(1).isfinite().all(1)
            if bad.any():
                self._refuse(t - 1, device_rows.OBSERVATION, int(bad.byte().argmax()))
            raise

    def _act(self, rollout: Rollout, t: int) -> None:
        """Choose the actions of step t, and give them to the envs."""
        if self._raw is not None:
            self._raw[t].copy_(self._envs.obs)
        if rollout.masks is not None:
            if self._envs.mask is None:
                rollout.masks[t].fill_(True)
            else:
                rollout.masks[t].copy_(self._envs.mask)
        if self.fused is not None:
            self.fused.act(
                self._envs.obs, *self._draw, t, rollout.obs[t], rollout.actions[t], rollout.log_probs[t], self._actions.flat,
                self._actions.bounds, self._normalization,
            )  # fmt: skip
            return
        rollout.obs[t].copy_(see(self.policy, self._envs.obs, self.device))
        with autocast(self.device, self._autocast):
            distribution, value, state = self._forward(rollout.obs[t], self._state, None, rollout.starts[t])
        for part, new in zip(self._state, state, strict=True):
            part.copy_(new)
        rollout.values[t].copy_(value)
        self._sample(rollout, t, distribution)

    def _sample(self, rollout: Rollout, t: int, distribution: Distribution) -> None:
        mask = None if rollout.masks is None else rollout.masks[t]
        target = self._actions
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
        if self.fused is not None:
            values = self._zeros((len(seen),))
            self.fused.values(seen, values)
            return values
        with autocast(self.device, self._autocast):
            return self._forward(seen, state, None, starts)[1].float()

    def _bootstrap(self, rollout: Rollout) -> None:
        """V of what came after: of the next observation of each row, and of the final ones of truncated episodes."""
        if self.fused is not None:
            self.fused.values(rollout.obs, rollout.values)
        rollout.last_values.copy_(self._value(see(self.policy, self._envs.obs, self.device), self._state, self._beginning))
        cut = rollout.truncated & ~rollout.terminated
        rollout.final_values.copy_(torch.where(cut, rollout.values, 0.0))  # stays where there was no slot
        for slot, step in enumerate(self._outcome.final_steps):
            seen = see(self.policy, self._final_obs[slot], self.device)
            values = self._value(seen, tuple(part[slot] for part in self._final_state), None)
            at = step.clamp_min(0).long().unsqueeze(0)
            values = torch.where(step >= 0, values, rollout.final_values.gather(0, at)[0])
            rollout.final_values.scatter_(0, at, values.unsqueeze(0))

    def _summarize(self, rollout: Rollout) -> None:
        """The numbers that are read back."""
        episodes, out = self._episodes, self._outcome
        slots = len(out.final_steps)
        totals = [
            episodes.count.sum(),
            episodes.returns.sum(dtype=torch.float64),
            episodes.best_return.max(),
            episodes.lengths.sum(),
            episodes.best_length.max(),
            (out.cuts - slots).clamp_min(0).sum(),
            *out.trouble.min(0),
            self._envs.fault[0] >> 32,
            self._envs.fault[0] & 0xFFFFFFFF,
        ]
        self._numbers[: len(NUMBERS)].copy_(torch.stack([number.double() for number in totals]))
        self._numbers[len(NUMBERS) :].copy_(episodes.metrics.sum(0, dtype=torch.float64))

    def state_dict(self, with_envs: bool = True) -> dict[str, Any]:
        """What exact resuming needs, with the envs' states; every other collector can go on from it, too."""
        steps = self._draw.clock.cpu().expand(self.rows.num_rows).clone()
        saved = {
            "actor": {"steps": steps, "state": [part.clone() for part in self._state]},
            "rewards": self.rewards.state_dict(),
            "steps": self.steps,
        }
        if with_envs:
            self._begin()
            resetting = np.zeros(self.rows.num_rows, np.bool_)
            saved |= {"envs": self.vec.state_dict(), "starts": self._beginning.cpu().numpy().copy(), "resetting": resetting}
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from there; envs whose state was not saved begin new episodes, with seeds that this run has not used."""
        self.steps = saved["steps"]
        self.rewards.load_state_dict(saved["rewards"])
        self._draw.clock.fill_(int(saved["actor"]["steps"].max()))
        if "envs" not in saved:
            self._seed, self._begun = self._seed + (self.steps + 1) * self.rows.num_envs, False
            self._beginning.fill_(True)
            return
        for part, now in zip(self._state, saved["actor"]["state"], strict=True):
            part.copy_(now)
        self.vec.reset(seed=self._seed)
        self.vec.load_state_dict(saved["envs"])
        self._begun = True
        self._beginning.copy_(torch.from_numpy(np.asarray(saved["starts"])))

    def release(self) -> None:
        """Let go of what was made for a rollout, and of the graphs' memory; the vector stays open."""
        self.graphs.close()
        self._rollout = self._raw = self._fill = None
        self.__dict__.pop("_outcome", None)

    def close(self) -> None:
        """Close the vector, and let go of the graphs' memory."""
        self.release()
        self.vec.close()


def device_obstacle(vec: Any, device: torch.device) -> str | None:
    """Why a vector cannot be collected from on the policy's device; None if it can."""
    if not isinstance(vec, NativeVecEnv):
        return "the envs are not native ones (an env of Gymnasium or PettingZoo steps on the CPU)"
    if not vec._same_step:
        return "the envs' autoreset_mode is NEXT_STEP, not SAME_STEP"
    own = _Envs(vec).device
    if (own.type, own.index or 0) != (device.type, device.index or 0):
        return f"the envs are on {own}, the policy on {device} (hurtle.make_vec(…, device={str(device)!r}) puts them there)"
    return None


class _Envs:
    """A batch of native envs as torch tensors, [rows, …], on whatever device it is."""

    def __init__(self, vec: NativeVecEnv):
        batch: Any = vec._batch
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
        """The error for what kernels wrote to `fault`."""
        return self._batch.out_of_bounds(fault)

    def step(self) -> None:
        """Step all envs with `actions`."""
        if self._on_gpu:
            self._batch.step()
        else:
            self._batch.step(self._batch.actions)


class _EnvActions:
    """Where sampled actions go for the envs: flat `[rows, k]`, with what makes raw actions the env's."""

    def __init__(self, policy: Policy, actions: Tensor):
        space, head, device = policy.action_space, policy.head, actions.device
        self.is_discrete = not isinstance(space, spaces.Box)
        self.is_plain_box = isinstance(space, spaces.Box) and head.kind == "gaussian" and space.dtype == np.float32
        size = max(1, int(np.prod(head.action_shape)))
        self.flat = actions.view(-1, size)
        self.nvec = torch.tensor(head.nvec or (head.num_outputs,), device=device)
        if isinstance(space, spaces.Box):
            self.bounds: tuple[Tensor, ...] = tuple(
                torch.from_numpy(bound.astype(np.float32).ravel().copy()).to(device) for bound in (space.low, space.high)
            )
        else:
            start = np.broadcast_to(np.asarray(getattr(space, "start", 0), np.int64), space.shape or (1,))
            self.bounds = (torch.from_numpy(start.ravel().copy()).to(device),)


def _floats(observations: Tensor) -> Tensor:
    """Observations that are floats, to be looked at; of others, nothing."""
    return observations if observations.is_floating_point() else observations[:, :0].float()
