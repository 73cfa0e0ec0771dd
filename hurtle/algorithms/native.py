"""PPO and A2C whose update runs in compiled code, on all cores: the same minibatches, losses and optimizers as the torch ones.

rollout → order of steps → `kernels.update.learn` on every thread → weights, metrics. Torch's parameters stay the truth: they
are views of one flat buffer, which is packed for the kernels before an update and written back after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hurtle.algorithms.a2c import A2C
from hurtle.algorithms.configs import A2CConfig, PPOConfig
from hurtle.algorithms.flat import BETAS, loaded_moments, saved_moments
from hurtle.algorithms.optimizers import Optimizers
from hurtle.algorithms.ppo import METRICS, PPO
from hurtle.buffers.rollout import Rollout
from hurtle.errors import HurtleError, NonFiniteError
from hurtle.native.build import COMPILING
from hurtle.native.kernel_loader import load_kernels
from hurtle.native.kernels import network
from hurtle.native.layout import aligned_zeros
from hurtle.native.threads import ShardThreads, thread_count
from hurtle.policies.native_plan import PLAIN, NetworkPlan, UnsupportedError, plan_for
from hurtle.policies.policy import Policy

CALL_SECONDS = 0.1
"""How long one call without the GIL may take, so that Ctrl-C is heard."""
MOST_SUMMED, MOST_COPIED = 4, 1 << 16
"""Of so few shards and so few weights, each thread sums and steps all, rather than a part."""
ROLLOUT_FIELDS = ("obs", "actions", "masks", "log_probs", "values", "advantages", "returns")
OPTIMIZERS = {"adam": 0, "adamw": 1, "rmsprop": 2}


class FlatTensors:
    """Tensors of a policy's shape as views of one buffer, and the same in the kernels' layout.

    Args:
        plan: Of the policy.
        tensors: One per parameter, in their order; their values are taken over.
    """

    def __init__(self, plan: NetworkPlan, tensors: Sequence[Tensor]):
        self.plan = plan
        self.packed = aligned_zeros((plan.packed_size,), np.float32)
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        self.flat = flat.numpy()
        sizes = [tensor.numel() for tensor in tensors]
        self.views = [part.view_as(tensor) for part, tensor in zip(flat.split(sizes), tensors, strict=True)]

    def pack(self, transposed: bool = False) -> None:
        """Flat → packed."""
        self.plan.pack(self.flat, self.packed, transposed)

    def unpack(self) -> None:
        """Packed → flat."""
        self.plan.unpack(self.packed, self.flat)


class Order(NamedTuple):
    """What is learned from, minibatch after minibatch."""

    steps: Tensor
    """Flat indices into the rollout, of all minibatches."""
    sizes: np.ndarray
    """How many of them each minibatch has, none of them 0."""
    importance: Tensor | None = None
    """A weight for each step."""


class NativeUpdate:
    """The compiled update of one policy.

    Args:
        policy: Its parameters become views of one buffer.
        optimizer: Its name and settings; torch's own is never made.
        num_threads: None takes all free cores.

    Raises:
        UnsupportedError: The kernels do not know this policy or optimizer.
    """

    def __init__(self, policy: Policy, optimizer: Optimizers, num_threads: int | None = None):
        if optimizer.name not in OPTIMIZERS:
            raise UnsupportedError(f"its optimizer is {optimizer.name}")
        self.plan = plan_for(policy)
        self.policy, self.optimizer = policy, optimizer
        self._threads = thread_count(num_threads, load_kernels().update.MAX_SHARDS)
        self._kernels: Any = load_kernels().update
        self._parameters = list(policy.parameters())
        self._built_of = _parts(policy)
        self._workers: ShardThreads | None = None
        self._barrier = load_kernels().sync.new_barrier()
        self._pace = 0.0  # seconds a step of a minibatch takes
        self.steps = 0  # of the optimizer
        self._job = np.zeros(1, self._kernels.JOB)
        self._kept: dict[str, np.ndarray] = {}  # what the job has addresses of
        self._fields: dict[str, Tensor] = {}  # of the last rollout
        self._known: list[Any] = []  # their addresses and shapes
        self._lists = False  # whether observations are such that their non-zeros may be listed
        self._listed_rows = 0
        self._listed_dtype: torch.dtype | None = None
        self._seen: Tensor | None = None  # observations as the network's numbers, where they are not that already
        self.weights = FlatTensors(self.plan, self._parameters)
        self._bind()
        self._written = np.full_like(self.weights.flat, np.nan)  # what was packed or unpacked last
        self._moments: dict[str, FlatTensors] = {}
        zeros = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._use_moments(zeros, zeros)
        self._describe_network()

    def _bind(self) -> None:
        """Make torch's parameters views of the flat buffer."""
        for parameter, view in zip(self._parameters, self.weights.views, strict=True):
            parameter.data = view

    # Moments are packed, and in checkpoints what torch's optimizers have there.

    def _use_moments(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
        for field, values in (("first_moments", first), ("second_moments", second)):
            self._moments[field] = FlatTensors(self.plan, values)
            self._moments[field].pack()
            self._keep(field, self._moments[field].packed)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Of all parameters."""
        self.optimizer.set_learning_rate(learning_rate)

    def state_dict(self) -> dict[str, Any]:
        """What `Optimizers.state_dict` gives, so that a run may go on in any gear."""
        for moment in self._moments.values():
            moment.unpack()
        return saved_moments(self.optimizer, self.steps, *(moment.views for moment in self._moments.values()))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with saved moments."""
        self.steps, *moments = loaded_moments(self.optimizer, saved)
        self._use_moments(*moments)

    def learn(self, rollout: Rollout, order: Order, **settings: Any) -> np.ndarray:
        """Learn from minibatches in turn.

        Args:
            rollout: Advantages computed.
            order: Which steps make the minibatches.
            settings: Of the loss and the gradients' norm, see `kernels.update.JOB`.

        Returns:
            The results of each minibatch, `[minibatches, RESULTS]`.

        Raises:
            NonFiniteError: A loss or gradient is not finite; the weights are those before that minibatch.
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
        self._describe_rollout(rollout)
        for name in ("learning_rate", "eps", "weight_decay"):
            job[name] = getattr(self.optimizer, name)
        for name, value in settings.items():
            job[name] = value
        job["minibatches"], job["steps_before"], job["has_importance"] = count, self.steps, order.importance is not None
        job["done"] = 0
        self.current_weights()
        try:
            done = self._run(count, bounds)
        finally:  # also after Ctrl-C: weights, moments and their count belong together
            self.steps += int(job["done"])
            self.weights.unpack()
            self._written[:] = self.weights.flat
        if done < count:
            loss = dict(zip(METRICS, results[done].tolist(), strict=True))
            raise NonFiniteError(f"The loss or its gradient is not finite: {loss}. Try a lower learning_rate.")
        return results

    def _run(self, count: int, bounds: np.ndarray) -> int:
        """Call the kernel on every thread, a slice of minibatches at a time."""
        largest = int(np.diff(bounds).max(initial=1))
        rows = self._kernels.shard_rows(largest, self.plan.trained_size, self._lists)
        shards = -(-largest // rows)
        self._job[0]["shard_rows"], self._job[0]["num_shards"] = rows, shards
        threads = max(1, min(self._threads, shards))
        self._make_room(shards, threads)
        if threads > 1 and (self._workers is None or len(self._workers.shards) != threads):
            self.close()
            self._workers = ShardThreads(threads, threads)
        done = 0
        while done < count:
            size = int(CALL_SECONDS / (self._pace * largest)) if self._pace else 1
            last = min(count, done + max(1, size))
            began = time.perf_counter()
            finished = self._call(done, last, threads)
            self._pace = (time.perf_counter() - began) / max(1, int(bounds[last] - bounds[done]))
            done += finished
            if done < last:
                break
        return done

    def _make_room(self, shards: int, threads: int) -> None:
        """Memory for the gradients of the shards, and for the copies of the threads, where they have some."""
        plan, kernels = self.plan, self._kernels
        self._job[0]["has_copies"] = has_copies = threads > 1 and shards <= MOST_SUMMED and plan.trained_size <= MOST_COPIED
        sizes = {"gradients": (1 + has_copies) * shards * (plan.trained_size + kernels.STATS)}
        if has_copies:
            size = kernels.copy_size(plan.packed_size, plan.trained_size, int(self._job[0]["num_blocks"]))
            sizes["copies"] = (threads - 1) * size
        for name, size in sizes.items():
            if name not in self._kept or len(self._kept[name]) < size:
                self._keep(name, aligned_zeros((size,), np.float32))

    def _call(self, first: int, last: int, threads: int) -> int:
        kernel = self._kernels.learn
        if not kernel.signatures:
            with COMPILING:
                kernel(self._job, 0, 0, 0, 1)
        if threads == 1:
            return kernel(self._job, first, last, 0, 1)
        assert self._workers is not None
        try:
            return min(self._workers.run(lambda low, _: kernel(self._job, first, last, low, threads), self._abort))
        except BaseException:
            self._barrier[:] = 0
            raise

    def _abort(self) -> None:
        self._barrier[load_kernels().sync.ABORTED] = 1

    def current_weights(self) -> np.ndarray:
        """The packed weights: those of torch's parameters, packed anew if anybody but this update has changed them."""
        if any(len(place) != size or place.get(name) is not part for place, size, name, part in self._built_of):
            self._parameters, self._built_of = list(self.policy.parameters()), _parts(self.policy)
        parameters = self._parameters
        if any(not parameter.requires_grad for parameter in parameters):
            raise HurtleError("A parameter was frozen after the learner was made: make a new one, which then trains in torch.")
        if any(p.data_ptr() != view.data_ptr() for p, view in zip(parameters, self.weights.views, strict=True)):
            self.weights = FlatTensors(self.plan, parameters)
            self._keep("weights", self.weights.packed)
            self._bind()
            self._written[:] = np.nan
        if not np.array_equal(self.weights.flat, self._written):
            self.weights.pack(transposed=True)
            self._written[:] = self.weights.flat
        return self.weights.packed

    def _keep(self, name: str, array: np.ndarray) -> None:
        """Give the job the address of an array, and keep it alive."""
        self._kept[name] = array
        self._job[0][name] = array.ctypes.data

    def _describe_network(self) -> None:
        plan, job, update = self.plan, self._job[0], self._kernels
        blocks = _blocks(plan, update.BLOCK)
        size = plan.trained_size + update.STATS
        self._keep("weights", self.weights.packed)
        self._keep("total", aligned_zeros((size,), np.float32))
        self._keep("norms", aligned_zeros((len(blocks),), np.float32))
        self._keep("layers", plan.layers)
        self._keep("blocks", blocks)
        self._keep("nvec", plan.nvec)
        self._keep("barrier", self._barrier)
        job["num_layers"], job["num_blocks"] = len(plan.layers), len(blocks)
        for name in job.dtype.names:
            if hasattr(plan, name) and name not in self._kept:
                job[name] = getattr(plan, name)
        kernels = load_kernels()
        with COMPILING:
            job["forward"], job["backward"] = kernels.network.addresses()
            job["score"] = kernels.head_calls.score_address(plan.head_kind)
            job["gradient"] = kernels.head_calls.gradient_address(plan.head_kind)
        job["num_choices"] = len(plan.nvec)
        name = self.optimizer.name
        job["optimizer"], (job["beta1"], job["beta2"]) = OPTIMIZERS[name], BETAS[name]
        job["action_size"] = math.prod(self.policy.head.action_shape)
        job["scratch_size"] = kernels.heads.scratch_size(plan.head_kind, plan.nvec)

    def _describe_rollout(self, rollout: Rollout) -> None:
        """Addresses of the rollout's fields, after a look whether they are what compiled code will take them for."""
        job, fields = self._job[0], {name: getattr(rollout, name) for name in ROLLOUT_FIELDS}
        known = [(field.data_ptr(), field.shape, field.dtype) for field in fields.values() if field is not None]
        if known != self._known:
            rollout.check_fields(self.policy, fields)
            actions = "ints" if rollout.actions.dtype == torch.int64 else "floats"
            for name, field in fields.items():
                if field is not None and name != "obs":
                    job[actions if name == "actions" else name] = field.data_ptr()
            job["has_masks"], job["rollout_size"] = rollout.masks is not None, rollout.valid.numel()
            self._known, self._fields = known, fields
        job["list_length"] = self._list_inputs(rollout.obs)
        if not job["list_length"]:
            obs = rollout.obs
            if self.plan.input_kind != PLAIN or obs.dtype != torch.float32:
                body: Any = self.policy.network.actor_body
                obs = self._seen = body.input(obs.flatten(0, 1)).contiguous()
            job["inputs"] = obs.data_ptr()

    def _list_inputs(self, obs: Tensor) -> int:
        """List what is not zero of the observations; the length of a row's list, or 0 if there are too many such numbers."""
        length, rows = self.plan.listed_inputs(obs.dtype), obs.shape[0] * obs.shape[1]
        self._lists = length > 0
        if not length:
            return 0
        sparse = load_kernels().sparse
        if self._listed_rows != rows:
            self._listed_rows, (values, lists) = rows, sparse.list_memory(rows, length)
            self._keep("listed_values", values)
            self._keep("lists", lists)
        values, lists = self._kept["listed_values"], self._kept["lists"]
        low, span = self.plan.low, self.plan.range if self.plan.scales else self.plan.range[:0]
        numbers, inputs = obs.flatten().numpy(), self.plan.num_inputs
        arguments = (inputs, low, span, values, lists[rows:], lists, length)
        if self._listed_dtype != obs.dtype:
            with COMPILING:
                sparse.list_rows(numbers, 0, *arguments)
            self._listed_dtype = obs.dtype
        found = sparse.list_rows(numbers, rows, *arguments)
        return length if found else 0

    def close(self) -> None:
        """End the helper threads."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None


class NativePPO(PPO):
    """PPO with the compiled update; see `PPO`.

    Args:
        num_threads: None takes all free cores.

    Raises:
        UnsupportedError: The kernels do not know this policy or optimizer.
    """

    config: PPOConfig
    optimizer: Any  # what saves and loads the moments: the compiled update, in place of torch's

    def __init__(self, policy: Policy, config: PPOConfig, seed: int = 0, num_threads: int | None = None):
        super().__init__(policy, config, seed)
        self.optimizer = self.native = NativeUpdate(policy, self.optimizer, num_threads)

    def _epochs(self, rollout: Rollout, remaining: float, clip_range: float) -> Tensor:
        config = self.config
        settings = {"clips": True, "clips_values": config.clip_values, "clip_range": clip_range}
        settings |= _common_settings(config)
        together = config.num_epochs if config.target_kl is None and not (config.vtrace or config.priority_alpha) else 1
        seen: list[Tensor] = []
        for _ in range(0, config.num_epochs, together):
            if config.vtrace:
                self._correct_advantages(rollout)
            if self.learns_from_segments:
                order = _steps_of_segments(rollout, self._draw(rollout, remaining))
            else:
                order = self._order_of_steps(rollout, together)
            if not len(order.steps):  # of absent agents alone
                continue
            seen.append(torch.from_numpy(self.native.learn(rollout, order, **settings)))
            if self._went_too_far(seen[-1]):
                break
        return torch.cat(seen) if seen else torch.zeros(0, len(METRICS))

    def _order_of_steps(self, rollout: Rollout, epochs: int) -> Order:
        """The steps of several epochs, as `_draw` gives those of one."""
        valid, config, size = None if rollout.all_valid else rollout.valid_steps(), self.config, rollout.num_valid
        order = torch.empty((epochs, size), dtype=torch.int64)
        for epoch in range(epochs):
            if config.shuffle:
                torch.randperm(size, generator=self._generator, out=order[epoch])
            else:
                torch.arange(size, out=order[epoch])
        steps = order.flatten() if valid is None else valid[order.flatten()]
        return Order(steps, _minibatch_sizes(size, config.minibatch_size, epochs))


class NativeA2C(A2C):
    """A2C with the compiled update; see `A2C`.

    Args:
        num_threads: None takes all free cores.

    Raises:
        UnsupportedError: The kernels do not know this policy or optimizer.
    """

    config: A2CConfig
    optimizer: Any  # what saves and loads the moments: the compiled update, in place of torch's

    def __init__(self, policy: Policy, config: A2CConfig, seed: int = 0, num_threads: int | None = None):
        super().__init__(policy, config, seed)
        self.optimizer = self.native = NativeUpdate(policy, self.optimizer, num_threads)

    def _learn(self, rollout: Rollout) -> dict[str, float]:
        settings = {"clips": False, "clips_values": False, "clip_range": 0.0, **_common_settings(self.config)}
        steps = rollout.valid_steps()
        results = self.native.learn(rollout, Order(steps, np.array([len(steps)])), **settings)[0]
        return dict(zip(("policy_loss", "value_loss", "entropy", "grad_norm"), results[[0, 1, 2, 5]].tolist(), strict=True))


def _parts(module: nn.Module) -> list[tuple[dict[str, Any], int, str, Any]]:
    """Where a module keeps parts and parameters, how many, and each of them: comparing these is fast."""
    places = [place for part in module.modules() for place in (part._modules, part._parameters)]
    return [(place, len(place), name, part) for place in places for name, part in place.items()]


def _common_settings(config: PPOConfig | A2CConfig) -> dict[str, Any]:
    return {
        "normalizes": config.normalize_advantages,
        "value_coef": config.value_coef,
        "entropy_coef": config.entropy_coef,
        "max_grad_norm": config.max_grad_norm,
    }


@lru_cache(maxsize=8)
def _minibatch_sizes(size: int, minibatch_size: int, epochs: int) -> np.ndarray:
    """How many steps each minibatch has, as `tensor_split` divides them."""
    count = max(1, -(-size // minibatch_size))
    each, larger = divmod(size, count)
    sizes = np.tile(np.repeat([each + 1, each], [larger, count - larger]), epochs)
    sizes = sizes[sizes > 0]
    sizes.setflags(write=False)
    return sizes


def _steps_of_segments(rollout: Rollout, drawn: Iterable[tuple[Tensor, Tensor | None]]) -> Order:
    """Segments as the flat indices of their valid steps, time-major, with a weight for each."""
    valid = rollout.valid.flatten()
    times = torch.arange(rollout.num_steps).unsqueeze(1) * rollout.num_rows
    steps, importance = [], []
    for rows, weights in drawn:
        every = (times + rows).flatten()
        kept = valid[every]
        steps.append(every[kept])
        assert weights is not None
        importance.append(weights.repeat(rollout.num_steps)[kept].float())
    sizes = np.array([len(part) for part in steps])
    return Order(torch.cat(steps), sizes[sizes > 0], torch.cat(importance))


def _blocks(plan: NetworkPlan, size: int) -> np.ndarray:
    """The trained weights in blocks: start, length; for weights that have a transposed copy, the layer, panel and its rows."""
    blocks: list[tuple[int, ...]] = []
    for n, layer in enumerate(plan.layers):
        inputs, stride, width = (int(layer[column]) for column in (network.INPUTS, network.STRIDE, network.PANEL_WIDTH))
        own = n if layer[network.TRANSPOSED] >= 0 else -1
        for panel in range(stride // width):
            for first in range(0, inputs, max(1, size // width)):
                last = min(inputs, first + max(1, size // width))
                start = layer[network.WEIGHT] + (panel * inputs + first) * width
                blocks.append((start, (last - first) * width, own, panel, first, last))
        blocks.append((layer[network.BIAS], stride, -1, 0, 0, 0))
    if plan.log_stds:
        blocks.append((plan.log_std_at, plan.log_stds, -1, 0, 0, 0))
    return np.array(blocks, np.int64)
