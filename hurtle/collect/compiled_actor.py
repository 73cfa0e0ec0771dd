"""`CompiledActor`: an `Actor` whose policy acts in one compiled call on the CPU; for envs that are not compiled.

observations `[rows, …]` → kernels/cpu/stepwise.py → actions, log-probs, values. The draws are those of `Actor`; results differ
from torch's by rounding.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from hurtle.buffers.rollout import ACTING_FIELDS, Done, Minibatch, Rollout
from hurtle.collect.inference import Actor
from hurtle.contracts import Weights
from hurtle.errors import HurtleError, NonFiniteError
from hurtle.kernels.cpu.host import TILE
from hurtle.kernels.cpu.stepwise import CHOOSE, JOB, JUDGE, VALUE
from hurtle.kernels.error_codes import policy_message
from hurtle.kernels.loader import load_kernels
from hurtle.native.batch_arrays import aligned_zeros
from hurtle.native.build import COMPILING
from hurtle.policies.action_transform import SCALINGS
from hurtle.policies.input_table import InputTable
from hurtle.policies.native_plan import plan_for
from hurtle.policies.policy import Policy


class CompiledActor(Actor):
    """Acts for `num_rows` rows in compiled code.

    Args:
        policy: A policy that `plan_for` accepts, whose weights are copied; `load_weights` replaces them.
        num_rows: Envs times agents.
        seed: Seed of the action streams.
        bootstraps: Compute the values of what follows a rollout too. Not for learners that take them from another policy.
        deterministic: Take the most likely actions instead of sampling; log-probs mean nothing then.

    Raises:
        UnsupportedError: The kernels do not support this policy.
    """

    def __init__(self, policy: Policy, num_rows: int, seed: int, *, bootstraps: bool = True, deterministic: bool = False):
        super().__init__(policy, num_rows, seed)
        self._bootstraps, self._deterministic = bootstraps, deterministic
        self._plan = plan_for(policy)
        self._states = self._plan.new_states(num_rows)
        self.state = tuple(self._states)
        self._job = np.zeros(1, JOB)
        self._address = self._job.ctypes.data
        self._kept: dict[str, np.ndarray] = {}  # arrays that the job points to
        self._fields: dict[str, np.ndarray] = {}  # of the rollout that it points to
        self._known: list[Any] = []  # addresses and shapes of the fields that were checked last
        self._described: Tensor | None = None  # its observations
        self._one_step: Rollout | None = None  # what `act` writes to
        self._all_rows = np.arange(num_rows)
        self._describe()
        self.load_weights(Weights.of(policy))
        with COMPILING:
            self._act = _entry()

    def load_weights(self, weights: Weights) -> None:
        """Act with these weights, and with the normalizer's statistics as they are now."""
        self._plan.pack(self._plan.checked(weights.flat), self._kept["weights"], transposed=False)
        weights.copy_to(self.policy)
        self._plan.pack_exploration(self.policy.network, self._kept["weights"])
        if (normalizer := self.policy.normalizer) is not None:
            std = (normalizer.variance + normalizer.eps).sqrt().numpy()
            self._keep("mean", normalizer.mean.numpy().astype(np.float64).ravel())
            self._keep("std", np.append(std.astype(np.float64).ravel(), normalizer.clip))

    def act_step(self, rollout: Rollout, t: int, obs: np.ndarray, mask: np.ndarray | None, starts: np.ndarray) -> np.ndarray:
        """See `Actor.act_step`."""
        if rollout.obs is not self._described:
            self._use(rollout, normalizes=self.policy.normalizer is not None)
            self._keep("rows", self._all_rows)
        fields = self._fields
        fields["obs"][t] = obs
        if "masks" in fields:
            fields["masks"][t] = True if mask is None else mask
        self._use_states(self._states, starts)
        self._run(t * self.num_rows, self.num_rows)
        return self._env_actions(fields["actions"][t])

    def act(
        self, seen: Tensor, mask: Tensor | None, starts: Tensor, rows: np.ndarray | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Actor.act`; the tensors are overwritten by the next call."""
        step, count = self._use_one_step(mask is not None, normalizes=False), len(seen)
        self._keep("rows", self._all_rows if rows is None else np.ascontiguousarray(rows, np.int64))
        if len(self._kept["rows"]) != count:
            raise HurtleError(f"Got {count} observations for {len(self._kept['rows'])} rows.")
        step.inputs[0, :count] = seen
        if step.masks is not None:
            step.masks[0, :count] = True if mask is None else mask
        self._use_states(self._states, starts.numpy())
        self._run(0, count)
        return step.actions[0, :count], step.log_probs[0, :count], step.values[0, :count]

    def env_actions(self) -> np.ndarray:
        """See `Actor.env_actions`."""
        assert self._one_step is not None
        return self._env_actions(self._one_step.actions[0, : len(self._kept["rows"])].numpy())

    def _env_actions(self, raw: np.ndarray) -> np.ndarray:
        """A copy, since an env may keep its action."""
        return self._for_env[: len(raw)].copy() if self._sends else self.policy.head.env_actions(raw)

    def choose(self, obs: np.ndarray, mask: np.ndarray | None, starts: np.ndarray) -> np.ndarray:
        """The env's actions for all rows, from observations as the env returned them, outside of rollouts.

        Args:
            obs: Of all rows, `[rows, …]`.
            mask: Legal actions, bool `[rows, actions]`; None: all.
            starts: Rows that begin an episode, bool `[rows]`.
        """
        step = self._use_one_step(mask is not None, normalizes=self.policy.normalizer is not None)
        self._keep("rows", self._all_rows)
        self._fields["obs"][0] = obs
        if step.masks is not None:
            self._fields["masks"][0] = True if mask is None else mask
        self._use_states(self._states, starts)
        self._run(0, self.num_rows)
        return self.env_actions()

    def bootstrap(self, rollout: Rollout) -> Done:
        """See `Actor.bootstrap`."""
        if not self._bootstraps:
            return Done.NOTHING
        rollout.last_values.copy_(self._values(rollout.last_obs, rollout.last_state, rollout.last_starts))
        rollout.final_values.zero_()
        steps, rows, obs, state = rollout.finals
        used = (steps >= 0).nonzero()[:, 0]
        if len(used):
            values = self._values(obs[used], tuple(part[used] for part in state), torch.zeros(len(used), dtype=torch.bool))
            rollout.final_values[steps[used], rows[used]] = values
        return Done.BOOTSTRAP

    def judge(self, batch: Minibatch) -> tuple[Tensor, Tensor]:
        """Log-probs of actions that were taken, perhaps by an older policy, and values of the observations, [T * B] each.

        Args:
            batch: All steps of whole rows, at most `num_rows` of them; what it says of invalid steps means nothing.
        """
        assert batch.starts is not None
        steps, rows = batch.starts.shape
        found = {name: torch.empty(steps * rows) for name in ("log_probs", "values")}
        given = {"inputs": batch.inputs, "numbers" if self._is_box else "choices": batch.actions}
        if batch.masks is not None:
            given["masks"] = batch.masks
        for name, tensor in (given | found).items():
            self._keep(name, tensor.contiguous().numpy())
        job, self._described = self._job[0], None
        with COMPILING:
            job["score"] = load_kernels().head_calls.score_address(self._plan.head_kind)
        job["has_masks"], job["normalizes"] = batch.masks is not None, False
        self._keep("rows", self._all_rows)
        if not self.state:
            self._act(self._address, 0, steps * rows, JUDGE)
            return found["log_probs"], found["values"]
        states = torch.stack(batch.state)
        for t, starts in enumerate(batch.starts.numpy()):
            self._use_states(states, starts)
            self._act(self._address, t * rows, rows, JUDGE)
        return found["log_probs"], found["values"]

    def _values(self, obs: Tensor, state: tuple[Tensor, ...], starts: Tensor) -> Tensor:
        """V of observations as the env returned them, in these states of the memory."""
        step, values = self._use_one_step(False, normalizes=self.policy.normalizer is not None), torch.empty(len(obs))
        states = torch.stack(state) if state else self._states
        for first in range(0, len(obs), self.num_rows):
            part = slice(first, first + self.num_rows)
            count = len(obs[part])
            step.obs[0, :count] = obs[part]
            self._use_states(states[:, part].contiguous(), starts[part].numpy())
            self._keep("rows", self._all_rows)
            self._act(self._address, 0, count, VALUE)
            values[part] = step.values[0, :count]
        return values

    def _use_states(self, states: Tensor, starts: np.ndarray) -> None:
        """Let the next call read, and if it acts write, these states of the memory."""
        if self.state:
            self._keep("states", states.numpy())
            self._keep("starts", np.ascontiguousarray(starts, np.bool_))
            self._job[0]["states_size"], self._job[0]["state_rows"] = states.numel(), states.shape[1]

    def _use_one_step(self, has_masks: bool, normalizes: bool) -> Rollout:
        """Point the job to a step that is in no rollout."""
        if self._one_step is None or (has_masks and self._one_step.masks is None):
            self._one_step = Rollout(self.policy, 1, self.num_rows, has_masks)
        if self._one_step.obs is not self._described or self._job[0]["normalizes"] != normalizes:
            self._use(self._one_step, normalizes)
        return self._one_step

    def _run(self, first: int, count: int) -> None:
        if self._act(self._address, first, count, CHOOSE):
            found = self._fields["log_probs"].reshape(-1)[first : first + count]
            row = int(self._kept["rows"][np.flatnonzero(~np.isfinite(found))[0]])
            raise NonFiniteError(policy_message(f"{self.name_of(row)} at its step {self.steps[row]}"))

    def _use(self, rollout: Rollout, normalizes: bool) -> None:
        """Point the job to the fields of a rollout."""
        job, actions = self._job[0], "numbers" if self._is_box else "choices"
        fields = {name: field for name in ACTING_FIELDS if (field := getattr(rollout, name)) is not None}
        known = [(field.data_ptr(), field.shape, field.dtype) for field in fields.values()]
        if rollout is not self._one_step and known != self._known:
            if rollout.num_rows != self.num_rows:
                raise HurtleError(f"The rollout has {rollout.num_rows} rows, but the policy acts for {self.num_rows}.")
            rollout.check_fields(self.policy, ACTING_FIELDS)
            self._known = known
        self._fields = {name: field.numpy() for name, field in fields.items()}
        for name, field in self._fields.items():
            job[actions if name == "actions" else name] = field.ctypes.data
        job["has_masks"], job["normalizes"] = rollout.masks is not None, normalizes
        job["is_double"] = rollout.obs.dtype == torch.float64
        self._described = rollout.obs

    def _keep(self, name: str, array: np.ndarray) -> None:
        """Write an array's address into the job, and keep the array alive."""
        self._kept[name] = array
        self._job[0][name] = array.ctypes.data

    def _describe(self) -> None:
        """Describe the policy."""
        plan, head, job, kernels = self._plan, self.policy.head, self._job[0], load_kernels()
        self._inputs = InputTable.of(self.policy, plan)
        listed = int(self._inputs.numbers[kernels.policy_table.LISTED])
        values, lists = kernels.sparse.list_memory(TILE, listed)
        floats = {
            "weights": plan.packed_size,
            "x": TILE * plan.num_inputs,
            "work": plan.work_size,
            "scratch": kernels.heads.scratch_size(plan.head_kind, plan.nvec),
            "uniforms": TILE * plan.num_uniforms,
            "entropies": TILE,
        }
        arrays = {name: aligned_zeros((size,), np.float32) for name, size in floats.items()}
        arrays |= {"table": self._inputs.numbers, "layers": plan.layers, "nvec": plan.nvec, "streams": self.streams}
        arrays |= {"listed_values": values, "lists": lists, "drawn": self.steps}
        for name, array in arrays.items():
            self._keep(name, array)
        self._describe_actions()
        job["num_layers"], job["num_choices"] = len(plan.layers), len(plan.nvec)
        job["action_size"] = math.prod(head.action_shape)
        for name in plan.NUMBERS:
            job[name] = getattr(plan, name)
        with COMPILING:
            find = kernels.modes.mode_address if self._deterministic else kernels.head_calls.sample_address
            job["forward"], job["sample"] = plan.compiled()[0], find(plan.head_kind)

    def _describe_actions(self) -> None:
        """Describe how raw actions become the env's; compiled code does it for the usual dtypes."""
        space, transform = self.policy.action_space, self.policy.head.transform
        self._is_box = isinstance(space, spaces.Box)
        usual = np.dtype(np.float32 if self._is_box else np.int64)
        self._sends = space.dtype == usual
        self._for_env = aligned_zeros((self.num_rows, *(space.shape or ())), usual)
        self._keep("sent", self._for_env)
        self._job[0]["is_box"], self._job[0]["scaling"] = self._is_box, SCALINGS.get(self.policy.head.kind, 0)
        if not self._is_box:
            self._keep("action_start", transform.start)
            return
        for name, array in (("bound_low", transform.least), ("bound_high", transform.greatest)):
            self._keep(name, np.ascontiguousarray(array, np.float32))
        self._keep("action_low", transform.low)
        self._keep("action_range", transform.range)


@cache
def _entry() -> Any:
    """The compiled function, called without Numba's dispatch on argument types, which takes longer than a small network."""
    from numba import types

    return load_kernels().stepwise.act.compile(types.int64(*[types.int64] * 4))
