"""`NetworkPlan`: an MLP policy as the compiled kernels see it: tables of layers and offsets instead of modules.

torch policy → plan, or the reason why there is none → packed weights. Knows nothing of envs, rollouts or losses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from hurtle.errors import HurtleError
from hurtle.native.kernel_loader import load_kernels
from hurtle.native.kernels import gemm, network, sparse
from hurtle.native.kernels.host import TILE
from hurtle.policies.layers import Numbers, OneHot
from hurtle.policies.mlp import MLP
from hurtle.policies.policy import Policy

HEADS = ("categorical", "multi_categorical", "gaussian", "beta")
PLAIN, SCALED, ONE_HOT = 0, 1, 2
ACTIVATIONS = {nn.Tanh: gemm.TANH, nn.ReLU: gemm.RELU, nn.Identity: gemm.NONE}


class UnsupportedError(HurtleError):
    """The kernels do not know this policy; the message says what it is about it."""


@dataclass(frozen=True, eq=False)
class NetworkPlan:
    """Where everything of a policy lies.

    Attributes:
        layers: What each layer is, columns as in kernels/network.py. int64 [L, COLUMNS]
        split: Layers [0, split) give the policy's outputs; the rest, if any, the values.
        actor: The layer of the policy's outputs.
        critic: The layer of the values.
        num_weights: Elements of the flat buffer: all parameters in the order of `policy.parameters()`.
        trained_size: Elements of the packed buffer that are trained; the transposed copies follow.
        packed_size: Elements of the packed buffer.
        work_size: Floats of workspace for one tile.
        head_kind: 0 categorical, 1 multi-categorical, 2 Gaussian, 3 Beta.
        nvec: Options of each choice; of a Box, its one size. int64
        log_std_flat: Where log_std begins in the flat buffer.
        log_std_at: Where it begins in the packed one.
        log_stds: Its size; 0 where there is none.
        input_kind: 0 numbers, 1 bytes scaled to [0, 1], 2 one-hot.
        num_inputs: Numbers that the network takes per row.
    """

    layers: np.ndarray
    split: int
    actor: int
    critic: int
    num_weights: int
    trained_size: int
    packed_size: int
    work_size: int
    head_kind: int
    nvec: np.ndarray
    num_uniforms: int
    mask_size: int
    log_std_flat: int
    log_std_at: int
    log_stds: int
    input_kind: int
    num_inputs: int
    low: np.ndarray = field(default_factory=lambda: np.zeros(1, np.float32))
    range: np.ndarray = field(default_factory=lambda: np.ones(1, np.float32))

    @property
    def shared(self) -> bool:
        """Whether policy and value are computed by one body."""
        return self.split == len(self.layers)

    @property
    def scales(self) -> bool:
        """Whether inputs are scaled to other numbers than they are."""
        return self.input_kind == SCALED and bool(self.low.any() or (self.range != 1).any())

    def listed_inputs(self, dtype: torch.dtype) -> int:
        """The most non-zeros of an observation of this dtype that the kernels list; 0: none, as zeros are nothing special."""
        if self.input_kind == SCALED:
            special = dtype == torch.uint8 and not self.low.any()
        else:
            special = self.input_kind == PLAIN and dtype in (torch.uint8, torch.float32)
        return sparse.list_length(self.num_inputs) if special else 0

    def new_weights(self) -> np.ndarray:
        """An empty packed buffer."""
        return np.zeros(self.packed_size, np.float32)

    def pack(self, flat: np.ndarray, weights: np.ndarray, transposed: bool = True) -> None:
        """Copy a flat buffer into a packed one; optimizer moments need no transposed copies."""
        self._check(flat, weights)
        kernel = load_kernels().network.pack
        kernel(flat, weights, self.layers, self.log_std_flat, self.log_std_at, self.log_stds, transposed)

    def unpack(self, weights: np.ndarray, flat: np.ndarray) -> None:
        """The reverse."""
        self._check(flat, weights)
        load_kernels().network.unpack(weights, flat, self.layers, self.log_std_flat, self.log_std_at, self.log_stds)

    def _check(self, flat: np.ndarray, weights: np.ndarray) -> None:
        if flat.dtype != np.float32 or flat.shape != (self.num_weights,) or len(weights) < self.trained_size:
            raise HurtleError(
                f"Expected a float32 buffer of {self.num_weights} weights, got {flat.dtype} of shape {flat.shape}."
            )


def plan_for(policy: Policy) -> NetworkPlan:
    """The plan of a policy.

    Raises:
        UnsupportedError: It is not a plain MLP actor–critic with a head that the kernels know.
    """
    net = policy.network
    if policy.is_recurrent:
        raise UnsupportedError("it has a memory")
    if type(net) is not MLP:
        raise UnsupportedError(f"its network is a {type(net).__name__}, not an MLP (policy='mlp' asks for one)")
    if policy.head.kind not in HEADS:
        raise UnsupportedError(f"its actions are {policy.head.kind}")
    if any(p.dtype != torch.float32 or p.device.type != "cpu" or not p.requires_grad for p in policy.parameters()):
        raise UnsupportedError("its parameters are not all float32, on the CPU and trained")
    return _Planner(policy, net).plan()


class _Planner:
    def __init__(self, policy: Policy, net: MLP):
        self.policy, self.net = policy, net
        self.flat: dict[int, int] = {}
        self.num_weights = 0
        for parameter in policy.parameters():
            self.flat[id(parameter)] = self.num_weights
            self.num_weights += parameter.numel()
        self.rows: list[list[int]] = []
        self.trained = self.transposed = self.work = self.most_work = 0

    def plan(self) -> NetworkPlan:
        net, head = self.net, self.policy.head
        body = self._body(net.actor_body)
        actor = self._layer(net.actor, body, nn.Identity())
        split = len(self.rows)
        if net.critic_body is not None:
            self.work = 0  # never alive at the same time as the actor's
            body = self._body(net.critic_body)
        critic = self._layer(net.critic, body, nn.Identity())
        layers = np.array(self.rows, np.int64)
        log_std_at = self.trained
        trained = self.trained + head.log_std_size
        layers[:, network.TRANSPOSED] += np.where(layers[:, network.TRANSPOSED] >= 0, trained, 0)
        return NetworkPlan(
            layers=layers,
            split=split if net.critic_body is not None else len(layers),
            actor=actor,
            critic=critic,
            num_weights=self.num_weights,
            trained_size=trained,
            packed_size=trained + self.transposed,
            work_size=self.most_work,
            head_kind=HEADS.index(head.kind),
            nvec=np.array(head.nvec or ([head.num_outputs] if head.kind == "categorical" else head.action_shape), np.int64),
            num_uniforms=head.num_uniforms,
            mask_size=head.mask_size or 0,
            log_std_flat=self.flat[id(net.log_std)] if net.log_std is not None else 0,
            log_std_at=log_std_at,
            log_stds=head.log_std_size,
            **self._input(net.actor_body.input),  # type: ignore[arg-type]
        )

    def _body(self, body: nn.Module) -> int:
        source = -1
        hidden = list(body.hidden.children())  # type: ignore[union-attr]
        if len(hidden) % 2:
            raise UnsupportedError("its layers are not those that it was made with")
        for linear, activation in zip(hidden[::2], hidden[1::2], strict=True):
            source = self._layer(linear, source, activation)
        return source

    def _layer(self, layer: nn.Module, source: int, activation: nn.Module) -> int:
        if type(layer) is not nn.Linear or id(layer.weight) not in self.flat or id(layer.bias) not in self.flat:
            raise UnsupportedError(f"it has a {type(layer).__name__} where a Linear with a bias is known")
        if type(activation) not in ACTIVATIONS:
            raise UnsupportedError(f"its activation is {type(activation).__name__}")
        inputs, outputs = layer.in_features, layer.out_features
        row = [0] * network.COLUMNS
        row[network.SOURCE], row[network.INPUTS], row[network.OUTPUTS] = source, inputs, outputs
        row[network.STRIDE], row[network.PANEL_WIDTH] = gemm.padded(outputs), gemm.panel_width(outputs)
        row[network.WEIGHT], row[network.BIAS] = self.trained, self.trained + inputs * gemm.padded(outputs)
        self.trained += (inputs + 1) * gemm.padded(outputs)
        row[network.TRANSPOSED] = -1 if source < 0 else self.transposed
        self.transposed += 0 if source < 0 else outputs * gemm.padded(inputs)
        row[network.ACTIVATION] = ACTIVATIONS[type(activation)]
        row[network.WORK] = self.work
        self.work += TILE * gemm.padded(outputs)
        self.most_work = max(self.most_work, self.work)
        row[network.FLAT_WEIGHT], row[network.FLAT_BIAS] = self.flat[id(layer.weight)], self.flat[id(layer.bias)]
        self.rows.append(row)
        return len(self.rows) - 1

    def _input(self, layer: nn.Module) -> dict[str, object]:
        if isinstance(layer, OneHot):
            return {"input_kind": ONE_HOT, "num_inputs": layer.num_features}
        assert isinstance(layer, Numbers)
        size = layer.num_features
        if not layer.scaled:
            return {"input_kind": PLAIN, "num_inputs": size}
        shape = self.policy.observation_space.shape or ()
        low, span = (np.broadcast_to(part.numpy(), shape).flatten() for part in (layer.low, layer.range))
        return {"input_kind": SCALED, "num_inputs": size, "low": low, "range": span}
