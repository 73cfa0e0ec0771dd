"""DQN, SAC and TD3 with compiled gradient steps on the CPU, for MLPs; everything else is as in torch.

batch → kernels/cpu/off_policy.py on packed weights → torch's parameters, before anybody reads them. Each learner subclasses its
torch version and saves the same state, so that a run can change gears.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.dqn import DQN
from hurtle.algorithms.dqn_config import DQNConfig
from hurtle.algorithms.kernel_crew import KernelCrew
from hurtle.algorithms.off_policy import OffPolicy
from hurtle.algorithms.sac import SAC
from hurtle.algorithms.sac_config import SACConfig
from hurtle.algorithms.td3 import TD3
from hurtle.algorithms.td3_config import TD3Config
from hurtle.algorithms.trained import Trained
from hurtle.buffers.replay import Transitions
from hurtle.buffers.rollout import Rollout
from hurtle.contracts import Metrics, Weights
from hurtle.errors import NonFiniteError, UnsupportedError
from hurtle.kernels.cpu import network
from hurtle.kernels.cpu import off_policy as step
from hurtle.kernels.cpu.host import TILE
from hurtle.kernels.flat_parameters import FlatParameters
from hurtle.kernels.loader import load_kernels
from hurtle.kernels.optimizers import loaded_moments, saved_moments
from hurtle.native.batch_arrays import aligned_zeros
from hurtle.native.build import COMPILING
from hurtle.native.thread_tuner import ThreadTuner
from hurtle.native.threads import thread_count
from hurtle.policies.critics import Critics
from hurtle.policies.dense_chain import DenseChain, Matrices, chain_of
from hurtle.policies.off_policy_actors import LOG_STD_RANGE
from hurtle.policies.plain_mlp import layers_of
from hurtle.policies.policy import Policy


class Packed:
    """A network's weights and moments as the kernels take them; several networks of one shape are rows.

    Args:
        chain: The layout.
        module: Torch's version: a `Critics`, or linear layers.
        trained: Its optimizer; None for a target network.
    """

    def __init__(self, chain: DenseChain, module: Critics | list[nn.Linear], trained: Trained | None = None):
        self.chain, self.module, self.trained = chain, module, trained
        lead = (module.count,) if isinstance(module, Critics) else ()
        self.weights = aligned_zeros((*lead, chain.packed_size), np.float32)
        size = chain.trained_size if trained is not None else 0
        self.first, self.second = (aligned_zeros((*lead, size), np.float32) for _ in range(2))
        self.steps = 0
        self.pack()

    def pack(self) -> None:
        """Copy torch's weights here."""
        for packed, tensors in zip(_rows(self.weights), self._tensors(None), strict=True):
            self.chain.pack(_arrays(tensors), packed)

    def unpack(self) -> None:
        """Copy the weights to torch."""
        _write(self.chain, self.weights, self._tensors(None))

    def places_of(self, parameters: list[nn.Parameter]) -> np.ndarray:
        """The place of each element of these parameters, one after the other, in the packed weights of a single network."""
        tensors, places = self._tensors(None)[0], {}
        for (weight, bias), (at, bias_at, _) in zip(tensors, self.chain.places, strict=True):
            places[weight.data_ptr()], places[bias.data_ptr()] = at, bias_at
        return np.concatenate([places[parameter.data_ptr()].ravel() for parameter in parameters])

    def save_moments(self) -> None:
        """Hand the moments to torch's optimizer, as a state to load."""
        assert self.trained is not None
        optimizer = self.trained.optimizer
        moments = [[torch.zeros_like(parameter) for parameter in optimizer.parameters] for _ in range(2)]
        for packed, found in zip((self.first, self.second), moments, strict=True):
            _write(self.chain, packed, self._tensors(found))
        self.trained.saved_optimizer = saved_moments(optimizer, self.steps, *moments)

    def load_moments(self, saved: dict[str, Any]) -> None:
        """Continue with saved moments."""
        assert self.trained is not None
        self.steps, *moments = loaded_moments(self.trained.optimizer, saved)
        for packed, found in zip((self.first, self.second), moments, strict=True):
            for row, tensors in zip(_rows(packed), self._tensors(found), strict=True):
                self.chain.pack(_arrays(tensors), row, transposed=False)

    def _tensors(self, like: list[Tensor] | None) -> list[list[tuple[Tensor, Tensor]]]:
        """For each network its layers' weights [outputs, inputs] and biases, of the module or of as many tensors."""
        if isinstance(self.module, Critics):
            flat = list(self.module.layers.parameters()) if like is None else like
            pairs = list(zip(flat[::2], flat[1::2], strict=True))
            return [[(weight[e].T, bias[e, 0]) for weight, bias in pairs] for e in range(self.module.count)]
        flat = [part for layer in self.module for part in (layer.weight, layer.bias)] if like is None else like
        return [list(zip(flat[::2], flat[1::2], strict=True))]


def _rows(packed: np.ndarray) -> list[np.ndarray]:
    return [packed] if packed.ndim == 1 else list(packed)


def _arrays(tensors: list[tuple[Tensor, Tensor]]) -> Matrices:
    return [(weight.detach().numpy(), bias.detach().numpy()) for weight, bias in tensors]


def _write(chain: DenseChain, packed: np.ndarray, networks: list[list[tuple[Tensor, Tensor]]]) -> None:
    for row, tensors in zip(_rows(packed), networks, strict=True):
        for (weight, bias), (own_weight, own_bias) in zip(tensors, chain.unpack(row), strict=True):
            weight.detach().copy_(torch.from_numpy(own_weight))
            bias.detach().copy_(torch.from_numpy(own_bias))


class Net:
    """A trained network and its target as one record, `kernels.cpu.off_policy.NET`."""

    def __init__(self, own: Packed, target: Packed | None):
        chain, self.record = own.chain, np.zeros(1, step.NET)
        self._kept: dict[str, np.ndarray] = {}
        count, blocks = own.weights.size // chain.packed_size, network.weight_blocks(chain.layers)
        self.size = count * chain.trained_size
        sizes = (count, chain.packed_size, chain.trained_size, len(chain.layers), len(blocks), chain.work_size)
        for name, size in zip(("count", *step.NET.names[-5:]), sizes, strict=True):  # type: ignore[index]
            self.record[name] = size
        self.keep("weights", own.weights)
        self.keep("first", own.first)
        self.keep("second", own.second)
        self.keep("target", (target or own).weights)
        self.keep("layers", chain.layers)
        self.keep("blocks", blocks)
        self.keep("norms", aligned_zeros((count * len(blocks),), np.float32))
        self.total = aligned_zeros((self.size + step.STATS,), np.float32)  # of several ranks, also the sums of their losses
        self.keep("total", self.total)

    def keep(self, name: str, array: np.ndarray) -> None:
        """Write an array's address into the record, and keep the array alive."""
        self._kept[name], self.record[name] = array, array.ctypes.data


class Compiled(OffPolicy):
    """What the compiled learners share: kernels, and weights that are copied back to torch when somebody reads them."""

    def _compile(self, kernel: str, packed: dict[str, Packed], targets: dict[str, str], num_results: int) -> None:
        """Find the kernels and describe the networks to them.

        Args:
            kernel: Name of the kernel, without `_step`.
            packed: All networks; those that act have the name "actor".
            targets: Names of trained networks, and of their targets.
            num_results: Metrics of a step.
        """
        kernels, config = load_kernels(), self.config
        most = thread_count(self.setup.num_threads, step.MAX_SHARDS)
        function = f"{kernel}_phase" if self.ranks.several else f"{kernel}_step"
        self._crew = KernelCrew(
            getattr(kernels.joined_off_policy if self.ranks.several else kernels.off_policy, function), most
        )
        self._most, self.tuner = most, ThreadTuner(1)
        self.packed, self._is_current = packed, True
        parameters = list(self.policy.parameters())
        self._flat, self._places = FlatParameters(self.policy, has_gradients=False), packed["actor"].places_of(parameters)
        self._buffers = tuple(self.policy.buffers())
        self.nets = {name: Net(packed[name], packed.get(target)) for name, target in targets.items()}
        self.results, self.temperature_numbers = np.zeros(num_results), np.zeros(3, np.float32)  # as torch saves them
        self.job = np.zeros(1, step.JOB)
        self._kept: dict[str, Any] = {}  # arrays that the job points to
        self._seen: tuple[Tensor | None, ...] = (None, None)  # observations of the last batch, if the job points to them
        with COMPILING:
            self.job["forward"], self.job["backward"] = (
                kernels.network.forward_address(True),
                kernels.network.backward_address(True),
            )
            self.job["input_slopes"] = kernels.network.input_slopes_address()
        self._keep("results", self.results)
        self._keep("temperature", self.temperature_numbers)
        self._keep("barrier", self._crew.barrier)
        for name, net in self.nets.items():
            self._keep(name, net.record)
        self.job["learning_rate"], self.job["eps"] = config.learning_rate, config.adam_eps
        self.job["max_grad_norm"] = config.max_grad_norm

    def _keep(self, name: str, array: np.ndarray) -> None:
        self._kept[name], self.job[name] = array, array.ctypes.data

    def _make_room(self, count: int) -> None:
        """Allocate what steps on batches of that size need."""
        self.job["count"], self.job["shard_rows"] = count, (rows := step.shard_rows(count))
        shards = -(-count // rows)
        self.tuner = ThreadTuner(min(self._most, shards))
        for net in self.nets.values():
            net.keep("gradients", aligned_zeros((shards * net.size,), np.float32))
        works = sum(2 * int(net.record["count"][0] * net.record["work_size"][0]) for net in self.nets.values())
        self.job["memory_size"] = size = 2 * works + TILE * (int(self.job["action_size"][0]) + 1)
        self._keep("memory", aligned_zeros((self.tuner.most * size,), np.float32))
        self._keep("stats", np.zeros((shards, step.STATS)))

    def _step(self, batch: Transitions, **arrays: Tensor) -> tuple[Tensor, Tensor]:
        """Run the kernel on a batch and other arrays; returns what `gradient_step` does."""
        job = self.job
        if batch.obs is not self._seen[0] or batch.next_obs is not self._seen[1]:
            encode: Any = self._acting.body.input
            obs, following = self._kept["inputs"] = tuple(
                encode(part).flatten(1).contiguous() for part in (batch.obs, batch.next_obs)
            )
            in_place = obs.data_ptr() == batch.obs.data_ptr() and following.data_ptr() == batch.next_obs.data_ptr()
            self._seen = (batch.obs, batch.next_obs) if in_place else (None, None)
            job["obs"], job["next_obs"], job["obs_size"] = obs.data_ptr(), following.data_ptr(), obs.shape[1]
        arrays |= {"rewards": batch.rewards, "discounts": batch.discounts, "importance": batch.weights}
        for name, array in arrays.items():
            assert array.is_contiguous(), name
            job[name] = array.data_ptr()
        if job["count"][0] != len(batch.rewards):
            self._make_room(len(batch.rewards))
        errors = torch.empty(len(batch.rewards))
        job["errors"] = errors.data_ptr()
        due = (self.gradient_steps + 1) % self.config.target_every == 0
        job["target_rate"] = self.config.target_rate if due else 0.0
        began = time.perf_counter()
        is_finite = self._run_together() if self.ranks.several else self._crew.run(job.ctypes.data, self.tuner.count)
        self.tuner.took(1.0, time.perf_counter() - began)
        if not is_finite:
            raise NonFiniteError(
                f"The loss or its gradient is not finite: {dict(zip(self.METRICS, self.results.tolist(), strict=False))}. "
                "Continue from a checkpoint, with a lower learning_rate."
            )
        self._is_current = False
        return errors, torch.from_numpy(self.results.copy())

    def _run_together(self) -> bool:
        """Run the phases of the kernel, between which ranks average gradients; returns whether all is finite."""
        phases, job = load_kernels().joined_off_policy, self.job
        names = ["critics", "actor"] if "critics" in self.nets else ["actor"]
        for k, name in enumerate(names if job["improves"][0] or len(names) == 1 else names[:1]):
            net, stats = self.nets[name], self._kept["stats"]
            job["phase"] = phases.GRADIENT + 2 * k
            self._crew.run(job.ctypes.data, self.tuner.count)
            net.total[net.size :] = stats.sum(0)
            self.ranks.mean_(torch.from_numpy(net.total))
            stats[0], stats[1:] = net.total[net.size :], 0.0
            job["phase"] = phases.STEP + 2 * k
            if not self._crew.run(job.ctypes.data, self.tuner.count):
                return False
        return True

    def scale_learning_rates(self, factor: float) -> None:
        """Set all learning rates to a part of what they were at first."""
        for field, name in (("learning_rate", "actor"), ("critic_rate", "critics")):
            trained = self.packed[name].trained if name in self.packed else None
            self.job[field] = factor * trained.learning_rate if trained is not None else 0.0

    def move_targets(self) -> None:
        """Kernels have moved them."""

    def threads(self) -> tuple[int, int]:
        """See `Learner.threads`."""
        return self.tuner.best, self.tuner.most

    def close(self) -> None:
        """Stop the helper threads."""
        self._crew.close()

    def prepare(self, experience: Rollout) -> None:
        """See `OffPolicy.prepare`."""
        super().prepare(experience)
        for part in self.packed.values():
            part.pack()  # torch's weights may have been loaded since (`fine_tune`)

    def update(self, experience: Rollout, progress: float = 0.0) -> Metrics:
        """See `OffPolicy.update`; torch's policy has the new weights afterwards, for evaluations and callbacks."""
        found = super().update(experience, progress)
        self.weights()
        return found

    def weights(self) -> Weights:
        """See `Learner.weights`."""
        if not self._is_current:
            np.take(self.packed["actor"].weights, self._places, out=self._flat.values.numpy(), mode="clip")
            self._is_current = True
        return Weights(self._flat.values, self.updates, self._buffers, self.policy)

    def state_dict(self) -> dict[str, Any]:
        """As of the torch version."""
        for part in self.packed.values():
            part.unpack()
            if part.trained is not None:
                part.save_moments()
        return super().state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state, of either version."""
        super().load_state_dict(saved)
        for name, part in self.packed.items():
            part.pack()
            if part.trained is not None:
                part.load_moments(saved["trained"][self.SAVED_AS.get(name, name)]["optimizer"])

    SAVED_AS: ClassVar[dict[str, str]] = {}
    """Names of networks in checkpoints, where they differ."""


class NativeDQN(DQN, Compiled):
    """DQN of plain values; see `DQN`.

    Raises:
        UnsupportedError: The kernels do not support the policy or an option.
    """

    SAVED_AS: ClassVar[dict[str, str]] = {"actor": "q"}

    def __init__(self, policy: Policy, config: DQNConfig, setup: LearnerSetup | None = None):
        options = {name: getattr(config, name) for name in ("dueling", "noisy", "rescale_values")}
        if config.distributional != "none" or any(options.values()):
            named = [f"distributional={config.distributional}", *(name for name, on in options.items() if on)]
            raise UnsupportedError(f"{named[-1]} is not compiled")
        super().__init__(policy, config, setup)
        network, target = self.network, self.target
        self.chain = chain_of(network.body, network.body.input.num_features, network.num_actions)
        other = Packed(self.chain, _linear_layers(target.body, target.advantage))
        own = Packed(self.chain, _linear_layers(network.body, network.advantage), self.online)
        self._compile("dqn", {"actor": own, "target": other}, {"actor": "target"}, len(self.METRICS))
        self.job["double"] = config.double

    def gradient_step(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """See `OffPolicy.gradient_step`."""
        own, masks = self.packed["actor"], batch.next_masks
        own.steps += 1
        self.job["actor_steps"], self.job["has_masks"] = own.steps, masks is not None
        return self._step(batch, actions=batch.actions, masks=batch.actions if masks is None else masks)


class _ActorCritic(Compiled):
    """What NativeSAC and NativeTD3 share."""

    actor: Any
    critics: Critics
    trained_actor: Trained
    trained_critics: Trained

    def _pack(self, targets: Critics, target_actor: Any, outputs: int) -> None:
        actor, size, config = self.actor, self.actor.num_actions, self.config
        inputs = actor.body.input.num_features
        self.actor_chain = chain_of(actor.body, inputs, outputs)
        self.critic_chain = chain_of(actor.body, inputs + size, 1)
        packed = {
            "actor": Packed(self.actor_chain, _linear_layers(actor.body, actor.last), self.trained_actor),
            "critics": Packed(self.critic_chain, self.critics, self.trained_critics),
            "targets": Packed(self.critic_chain, targets),
        }
        if target_actor is not None:
            packed["target_actor"] = Packed(self.actor_chain, _linear_layers(target_actor.body, target_actor.last))
        self._compile("actor_critic", packed, {"actor": "target_actor", "critics": "targets"}, 6)
        self.job["action_size"] = size
        self.job["critic_rate"] = config.critic_learning_rate or config.learning_rate  # type: ignore[attr-defined]

    def _improve(self, batch: Transitions, noise: Tensor, improves: bool) -> tuple[Tensor, Tensor]:
        """A step of the critics and, if it `improves`, of the actor."""
        own, critics = self.packed["actor"], self.packed["critics"]
        critics.steps += 1
        own.steps += improves
        self.job["critic_steps"], self.job["actor_steps"], self.job["improves"] = critics.steps, own.steps, improves
        return self._step(batch, actions=batch.actions.tanh(), noise=noise)


class NativeSAC(SAC, _ActorCritic):
    """SAC of continuous actions; see `SAC`.

    Raises:
        UnsupportedError: The kernels do not support the policy or an option.
    """

    def __init__(self, policy: Policy, config: SACConfig, setup: LearnerSetup | None = None):
        super().__init__(policy, config, setup)
        if self.is_discrete:
            raise UnsupportedError("its actions are discrete")
        self._pack(self.target, None, 2 * self.actor.num_actions)
        self.job["is_sac"], self.job["adapts"] = True, self.trained_temperature is not None
        self.job["target_entropy"] = self.target_entropy
        self.job["log_std_low"], self.job["log_std_high"] = LOG_STD_RANGE
        self.temperature_numbers[0] = float(self.temperature.log.detach())

    def gradient_step(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """See `OffPolicy.gradient_step`."""
        size = self.actor.num_actions
        noise = torch.stack([self.normals(len(batch.rewards), size) for _ in range(2)])
        return self._improve(batch, noise, True)

    def state_dict(self) -> dict[str, Any]:
        """As of the torch version."""
        with torch.no_grad():
            self.temperature.log.fill_(self.temperature_numbers[0])
        if self.trained_temperature is not None:
            optimizer, steps = self.trained_temperature.optimizer, self.packed["actor"].steps
            first, second = (torch.tensor(moment, dtype=torch.float32) for moment in self.temperature_numbers[1:])
            self.trained_temperature.saved_optimizer = saved_moments(optimizer, steps, [first], [second])
        return super().state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state, of either version."""
        super().load_state_dict(saved)
        self.temperature_numbers[0] = float(self.temperature.log.detach())
        if self.trained_temperature is not None:
            _, *moments = loaded_moments(self.trained_temperature.optimizer, saved["trained"]["temperature"]["optimizer"])
            self.temperature_numbers[1:] = [float(moment[0]) for moment in moments]


class NativeTD3(TD3, _ActorCritic):
    """TD3; see `TD3`.

    Raises:
        UnsupportedError: The kernels do not support the policy.
    """

    def __init__(self, policy: Policy, config: TD3Config, setup: LearnerSetup | None = None):
        super().__init__(policy, config, setup)
        self._pack(self.target_critics, self.target_actor, self.actor.num_actions)
        self.job["target_noise"], self.job["target_noise_clip"] = config.target_noise, config.target_noise_clip
        self.results[3] = np.nan  # the policy loss of the last step that had one

    def gradient_step(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """See `OffPolicy.gradient_step`."""
        noise = torch.zeros(2, len(batch.rewards), self.actor.num_actions)  # the actor's own actions have none
        noise[0] = self.normals(*noise.shape[1:])
        errors, found = self._improve(batch, noise, self.gradient_steps % self.config.policy_every == 0)
        return errors, found[: len(self.METRICS)]  # a deterministic actor has no entropy


def _linear_layers(body: nn.Module, last: nn.Module) -> list[nn.Linear]:
    return [layer.linear for layer in layers_of(body, last)]
