"""`plan_for`: whether the compiled kernels can run a policy, and how; or the reason they cannot.

torch policy → its layers → `NetworkPlan`, or the shape for the fused GPU kernels. Knows nothing of envs, rollouts or losses.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces

from hurtle.errors import UnsupportedError
from hurtle.kernels.cpu import gemm, network
from hurtle.kernels.grid_shape import FILTERS, HIDDEN, MAX_CHOICES, MAX_COLUMNS, MAX_ROW, GridCNNShape
from hurtle.kernels.mlp_shape import HIDDEN_WIDTHS, MAX_INPUTS, MAX_OUTPUTS, MLPShape
from hurtle.policies.cnn import GridCNN, NatureCNN
from hurtle.policies.mlp import MLP
from hurtle.policies.nested_mlp import nested_mlp
from hurtle.policies.network_plan import NESTED, NetworkPlan
from hurtle.policies.off_policy_actors import TanhActor
from hurtle.policies.plain_cnn import plain_cnn
from hurtle.policies.plain_mlp import acting_layers, mlp_layers
from hurtle.policies.planner import GATES, Found, Planner
from hurtle.policies.policy import Policy
from hurtle.policies.q_network import QNetwork
from hurtle.policies.structured import Structured

HEADS = ("categorical", "multi_categorical", "gaussian", "beta")


def plan_for(policy: Policy) -> NetworkPlan:
    """The plan of a policy for the CPU kernels.

    Raises:
        UnsupportedError: The policy is not on the CPU, or the kernels do not have its layers, memory or head.
    """
    if any(parameter.device.type != "cpu" for parameter in policy.parameters()):
        raise UnsupportedError("its parameters are not on the CPU")
    return _plan(policy)


def flat_plan(policy: Policy) -> NetworkPlan:
    """`plan_for`, but for observations that are not nested, as those of native envs.

    Raises:
        UnsupportedError: See `plan_for`, or observations are nested.
    """
    plan = plan_for(policy)
    if plan.input_kind == NESTED:
        raise UnsupportedError("its observations are nested")
    return plan


def mlp_shape(policy: Policy) -> MLPShape:
    """The shape of a policy for the fused Triton kernels, derived from its plan; its parameters may be on any device.

    Raises:
        UnsupportedError: The kernels do not support this policy.
    """
    plan, space, actions = _plan(policy), policy.observation_space, policy.action_space
    if plan.input_kind == NESTED:
        raise UnsupportedError("its observations are nested")
    if not set(plan.layers[:, network.KIND]) <= {network.DENSE, network.FEW_OUTPUTS}:
        raise UnsupportedError("it has a convolution" if plan.memory < 0 else "it has a memory")
    if plan.shared:
        raise UnsupportedError("actor and critic share layers")
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f" or plan.num_inputs > MAX_INPUTS:
        raise UnsupportedError(f"observations are not vectors of at most {MAX_INPUTS} floats")
    activations = set(plan.layers[[0, 1, 3, 4], network.ACTIVATION].tolist()) if len(plan.layers) == 6 else set()
    if plan.split != 3 or activations not in ({gemm.TANH}, {gemm.RELU}):
        raise UnsupportedError("there are not exactly two hidden layers, both with tanh or both with relu")
    widths = set(plan.layers[[0, 1, 3, 4], network.OUTPUTS].tolist())
    if len(widths) != 1 or not widths <= set(HIDDEN_WIDTHS):
        raise UnsupportedError(f"the hidden layers do not share one width of {', '.join(map(str, HIDDEN_WIDTHS))}")
    kind, outputs = policy.head.kind, int(plan.layers[plan.actor, network.OUTPUTS])
    is_whole = isinstance(actions, spaces.Box) and actions.dtype.kind != "f"
    if kind not in ("categorical", "gaussian") or outputs > MAX_OUTPUTS or is_whole:
        raise UnsupportedError(f"actions are {kind}, more than {MAX_OUTPUTS}, or a Box of integers")
    offsets = (*plan.layers[:, [network.FLAT_WEIGHT, network.FLAT_BIAS]].ravel().tolist(), plan.log_std_flat)
    relu, gaussian = activations == {gemm.RELU}, kind == "gaussian"
    return MLPShape(plan.num_inputs, widths.pop(), outputs, relu, gaussian, offsets, plan.num_weights)


def grid_cnn_shape(policy: Policy) -> GridCNNShape:
    """The shape of a policy for the fused Triton kernels of small CNNs; its parameters may be on any device.

    Raises:
        UnsupportedError: The kernels do not support this policy.
    """
    net: Any = policy.network
    if type(net) is not GridCNN:
        raise UnsupportedError(f"its network is a {type(net).__name__}, not a GridCNN")
    plan = _plan(policy)
    if plan.memory >= 0:
        raise UnsupportedError("it has a memory")
    if not plan.shared:
        raise UnsupportedError("it has a body for the critic alone")
    if policy.normalizer is not None:
        raise UnsupportedError("observations are normalized")
    if net.actor_body.scaling != (1.0, 0.0):
        raise UnsupportedError("observations are rescaled, or the convolution is not a 3x3 one over channels stored last")
    height, columns, channels = policy.observation_space.shape or ()
    body: Any = net.actor_body
    filters, hidden = body.convolutions[0].out_channels, body.num_features
    if (filters, hidden) != (FILTERS, HIDDEN):
        raise UnsupportedError("its layers were changed after it was built")
    if columns > MAX_COLUMNS:
        raise UnsupportedError(f"its grid is wider than {MAX_COLUMNS} places")
    if columns * channels > MAX_ROW:
        raise UnsupportedError(f"its grid has more than {MAX_ROW} numbers in a row")
    if policy.head.kind != "categorical" or policy.head.num_outputs > MAX_CHOICES:
        raise UnsupportedError(f"actions are not one of at most {MAX_CHOICES} choices")
    offsets = tuple(plan.layers[:, [network.FLAT_WEIGHT, network.FLAT_BIAS]].ravel().tolist())
    return GridCNNShape(height, columns, channels, filters, hidden, policy.head.num_outputs, offsets, plan.num_weights)


def _plan(policy: Policy) -> NetworkPlan:
    found = _layers_of(policy)
    if policy.memory is not None and type(policy.memory) not in GATES:
        raise UnsupportedError(f"its memory is a {type(policy.memory).__name__}")
    if policy.memory is not None and not found.is_shared:
        raise UnsupportedError("it has a memory, and a body for the critic alone")
    if policy.head.kind not in HEADS and not isinstance(policy.network, TanhActor):
        raise UnsupportedError(f"its actions are {policy.head.kind}")
    if any(parameter.dtype != torch.float32 or not parameter.requires_grad for parameter in policy.parameters()):
        raise UnsupportedError("its parameters are not all float32 and trained")
    return Planner(policy, found).plan()


def _layers_of(policy: Policy) -> Found:
    net: Any = policy.network
    if type(net) is MLP:
        return mlp_layers(net)
    if type(net) is Structured:
        return nested_mlp(net)
    if type(net) is GridCNN:
        return plain_cnn(net, policy.observation_space.shape or ())
    if type(net) in (QNetwork, TanhActor):
        return acting_layers(net)
    if type(net) is NatureCNN:
        raise UnsupportedError("its network is a NatureCNN: large convolutions stay in torch")
    raise UnsupportedError(f"its network is a {type(net).__name__}, which is not one of Hurtle's own")
