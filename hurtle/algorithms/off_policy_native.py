"""DQN, SAC and TD3 with compiled gradient steps on the CPU, for MLPs; everything else is as in torch.

batch → kernels/cpu/off_policy.py on packed weights → torch's parameters, before anybody reads them. Each learner subclasses its
torch version and saves the same state, so that a run can change gears.
"""

from __future__ import annotations

from operator import is_
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.dqn import DQN
from hurtle.algorithms.dqn_config import DQNConfig
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
from hurtle.kernels.cpu import off_policy as numbers
from hurtle.kernels.loader import load_kernels
from hurtle.kernels.optimizers import FlatParameters, loaded_moments, saved_moments
from hurtle.native.batch_arrays import aligned_zeros
from hurtle.native.build import COMPILING
from hurtle.policies.critics import Critics
from hurtle.policies.dense_chain import DenseChain, Matrices, chain_of
from hurtle.policies.off_policy_actors import LOG_STD_RANGE
from hurtle.policies.plain_mlp import layers_of
from hurtle.policies.policy import Policy


class Packed:
    """A network's weights, gradients and moments as the kernels take them; several networks of one shape are rows.

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
        self.gradients, self.first, self.second = (aligned_zeros((*lead, size), np.float32) for _ in range(3))
        self.steps = 0
        self.pack()

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What kernels take."""
        return self.weights, self.gradients, self.first, self.second

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


class Compiled(OffPolicy):
    """What the compiled learners share: kernels, and weights that are copied back to torch when somebody reads them."""

    def _compile(self, packed: dict[str, Packed], size: int) -> None:
        """Find the kernels.

        Args:
            packed: All networks; those that act have the name "actor".
            size: Metrics of a step.
        """
        kernels = load_kernels()
        with COMPILING:
            network = kernels.network
            addresses = network.forward_address(True), network.backward_address(True), network.input_slopes_address()
        self.kernels, self.addresses = kernels.off_policy, np.array(addresses, np.int64)
        self.packed, self._is_current = packed, True
        parameters = list(self.policy.parameters())
        self._flat, self._places = FlatParameters(self.policy, has_gradients=False), packed["actor"].places_of(parameters)
        self._buffers = tuple(self.policy.buffers())
        self._seen: tuple[Any, ...] = (None,) * 5  # tensors of the last batch, and their arrays
        self._views: list[Any] = []
        self.lists = np.zeros(0, np.int32)
        self.numbers, self.results = np.zeros(numbers.NUMBERS), np.zeros(size)
        self.numbers[numbers.LEARNING_RATE], self.numbers[numbers.EPS] = self.config.learning_rate, self.config.adam_eps
        self.numbers[numbers.MAX_GRAD_NORM] = self.config.max_grad_norm

    def arrays_of(self, batch: Transitions) -> tuple[np.ndarray, ...]:
        """Observations as vectors, and the other fields, as kernels take them; the last ones if these are the same tensors."""
        if not all(map(is_, batch[:5], self._seen)):
            encode: Any = self._acting.body.input
            obs, following = (encode(part).flatten(1).contiguous() for part in (batch.obs, batch.next_obs))
            rewards, discounts, weights = batch.rewards.numpy(), batch.discounts.numpy(), batch.weights.numpy()
            self._views = [obs.numpy(), None, rewards, following.numpy(), discounts, weights]
            in_place = obs.data_ptr() == batch.obs.data_ptr() and following.data_ptr() == batch.next_obs.data_ptr()
            self._seen = batch[:5] if in_place else (None,) * 5
        self._views[1] = self.actions_of(batch)
        return tuple(self._views)

    def actions_of(self, batch: Transitions) -> np.ndarray:
        """Actions as the kernels take them."""
        return batch.actions.tanh().numpy()

    def stepped(self, is_finite: bool, errors: np.ndarray) -> tuple[Tensor, Tensor]:
        """What `gradient_step` returns."""
        if not is_finite:
            raise NonFiniteError(
                f"The loss or its gradient is not finite: {dict(zip(self.METRICS, self.results.tolist(), strict=False))}. "
                "Continue from a checkpoint, with a lower learning_rate."
            )
        self._is_current = False
        return torch.from_numpy(errors), torch.from_numpy(self.results.copy())

    def scale_learning_rates(self, factor: float) -> None:
        """Set all learning rates to a part of what they were at first."""
        for place, name in ((numbers.LEARNING_RATE, "actor"), (numbers.CRITIC_RATE, "critics")):
            trained = self.packed[name].trained if name in self.packed else None
            self.numbers[place] = factor * trained.learning_rate if trained is not None else 0.0

    def _set_target_rate(self) -> None:
        """Move targets in this step if it is due."""
        due = (self.gradient_steps + 1) % self.config.target_every == 0
        self.numbers[numbers.TARGET_RATE] = self.config.target_rate if due else 0.0

    def move_targets(self) -> None:
        """Kernels have moved them."""

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
        self.other = Packed(self.chain, _linear_layers(target.body, target.advantage))
        own = Packed(self.chain, _linear_layers(network.body, network.advantage), self.online)
        self._compile({"actor": own, "target": self.other}, len(self.METRICS))
        self.works = [aligned_zeros((self.chain.work_size,), np.float32) for _ in range(3)]
        self.no_masks = np.zeros((0, 0), np.bool_)

    def actions_of(self, batch: Transitions) -> np.ndarray:
        """Indices of actions."""
        return batch.actions.numpy()

    def gradient_step(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """See `OffPolicy.gradient_step`."""
        own, errors = self.packed["actor"], np.empty(len(batch.rewards), np.float32)
        self._set_target_rate()
        own.steps += 1
        masks = self.no_masks if batch.next_masks is None else batch.next_masks.numpy()
        is_finite = self.kernels.dqn_step(
            self.addresses, self.lists, self.numbers, np.array([own.steps, self.config.double]), self.chain.layers, own.arrays,
            self.other.weights, *self.works, self.arrays_of(batch), masks, errors, self.results,
        )  # fmt: skip
        return self.stepped(is_finite, errors)


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
        self._compile(packed, 6)
        self.numbers[numbers.CRITIC_RATE] = config.critic_learning_rate or config.learning_rate  # type: ignore[attr-defined]
        count = self.critics.count
        self.works = (
            *(aligned_zeros((self.actor_chain.work_size,), np.float32) for _ in range(2)),
            *(aligned_zeros((count, self.critic_chain.work_size), np.float32) for _ in range(2)),
        )
        self.temperature_numbers = np.zeros(3, np.float32)  # as torch saves them

    def _step(self, batch: Transitions, noise: Tensor) -> tuple[Tensor, Tensor]:
        own, critics = self.packed["actor"], self.packed["critics"]
        errors = np.empty(len(batch.rewards), np.float32)
        self._set_target_rate()
        critics.steps += 1
        own.steps += int(self.numbers[numbers.ACTOR_STEP])
        target_actor = self.packed.get("target_actor", own).weights
        is_finite = self.kernels.actor_critic_step(
            self.addresses, self.lists, self.numbers, np.array([critics.steps, own.steps]), self.actor_chain.layers,
            self.critic_chain.layers, own.arrays, target_actor, critics.arrays, self.packed["targets"].weights,
            self.temperature_numbers, self.works, self.arrays_of(batch), noise.numpy(), errors, self.results,
        )  # fmt: skip
        return self.stepped(is_finite, errors)


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
        settings = {numbers.IS_SAC: 1.0, numbers.ACTOR_STEP: 1.0, numbers.ADAPTS: float(self.trained_temperature is not None)}
        settings |= {numbers.TARGET_ENTROPY: self.target_entropy, numbers.LOW: LOG_STD_RANGE[0], numbers.HIGH: LOG_STD_RANGE[1]}
        for place, value in settings.items():
            self.numbers[place] = value
        self.temperature_numbers[0] = float(self.temperature.log.detach())

    def gradient_step(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """See `OffPolicy.gradient_step`."""
        size = self.actor.num_actions
        noise = torch.stack([self.normals(len(batch.rewards), size) for _ in range(2)])
        return self._step(batch, noise)

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
        self.numbers[numbers.NOISE], self.numbers[numbers.NOISE_CLIP] = config.target_noise, config.target_noise_clip
        self.results[3] = np.nan  # the policy loss of the last step that had one

    def gradient_step(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """See `OffPolicy.gradient_step`."""
        self.numbers[numbers.ACTOR_STEP] = self.gradient_steps % self.config.policy_every == 0
        noise = self.normals(1, len(batch.rewards), self.actor.num_actions).expand(2, -1, -1)
        errors, found = self._step(batch, noise)
        return errors, found[: len(self.METRICS)]  # a deterministic actor has no entropy


def _linear_layers(body: nn.Module, last: nn.Module) -> list[nn.Linear]:
    return [layer.linear for layer in layers_of(body, last)]
