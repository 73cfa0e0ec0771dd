"""`CompiledMLP`: an MLP policy that acts in less than a microsecond, from Python and inside users' compiled loops.

weights and spaces (`MLPDescription`) → packed tables → kernels/cpu/acting.py → the env's actions. Takes the most likely action;
knows nothing of files, recurrent state or sampling.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from numba import types

from hurtle.errors import HurtleError
from hurtle.kernels.cpu import acting, gemm, network, policy_table
from hurtle.kernels.cpu.host import TILE
from hurtle.kernels.cpu.policy_table import REFUSED
from hurtle.kernels.loader import load_kernels
from hurtle.native.build import COMPILING
from hurtle.policies.action_transform import HEAD_KINDS, ActionTransform
from hurtle.policies.input_table import InputTable, space_of_input

if TYPE_CHECKING:  # torch takes seconds to import, and only `MLPDescription.of` needs it
    from hurtle.policies.plain_mlp import Dense
    from hurtle.policies.policy import Policy

ACTIVATIONS = {"none": gemm.NONE, "tanh": gemm.TANH, "relu": gemm.RELU}


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer and its activation."""

    weight: np.ndarray
    """float32 [outputs, inputs]"""
    bias: np.ndarray
    """float32 [outputs]"""
    activation: str
    """tanh, relu or none."""

    @classmethod
    def of(cls, layer: Dense) -> Layer:
        """A copy of a torch layer."""
        weight, bias = (part.detach().cpu().numpy().copy() for part in (layer.linear.weight, layer.linear.bias))
        return cls(weight, bias, layer.activation)


@dataclass(frozen=True, eq=False)
class MLPDescription:
    """Spaces, weights and normalizer of a deterministic MLP policy."""

    observation_space: spaces.Space
    """Box, Discrete, MultiDiscrete or MultiBinary."""
    action_space: spaces.Space
    """Discrete, MultiDiscrete, MultiBinary or Box."""
    layers: tuple[Layer, ...]
    """From the prepared observation to the policy's outputs: logits, means, or alpha and beta before the softplus."""
    distribution: str
    """categorical, multi_categorical, gaussian, squashed_gaussian or beta; see `ActionHead.kind`."""
    mean: np.ndarray | None = None
    """Mean of observations, float64 in their shape; None: they are not normalized."""
    std: np.ndarray | None = None
    """Standard deviation of observations, likewise."""
    clip: float = 10.0
    """Largest magnitude of a normalized number."""

    @classmethod
    def of(cls, policy: Policy) -> MLPDescription:
        """The description of a torch policy; copies its weights.

        Raises:
            UnsupportedError: It is not a plain MLP; the message gives the reason.
        """
        from hurtle.policies.plain_mlp import plain_mlp

        found, normalizer, described = plain_mlp(policy), policy.normalizer, {}
        if normalizer is not None:
            std = (normalizer.variance + normalizer.eps).sqrt()
            described = {"mean": normalizer.mean.cpu().numpy().copy(), "std": std.cpu().numpy(), "clip": normalizer.clip}
        space = space_of_input(policy.observation_space, found.input)
        layers = tuple(map(Layer.of, found.actor))
        return cls(space, policy.action_space, layers, policy.head.kind, **described)  # type: ignore[arg-type]


class CompiledMLP:
    """An MLP policy in compiled code, which takes the most likely actions.

    The first one on a machine compiles for some seconds, as does the first call with many rows; later ones, whatever their
    weights and sizes, find the code in the disk cache.

    Args:
        description: The policy; its arrays are copied.

    Attributes:
        observation_space: The space of one observation.
        action_space: The space of one action.
        num_outputs: Outputs of the last layer.

    Raises:
        HurtleError: The layers do not fit each other or the spaces, or a space is of another type.

    Example:
        >>> eye = Layer(np.eye(2, dtype=np.float32), np.zeros(2, np.float32), "none")
        >>> policy = CompiledMLP(MLPDescription(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), (eye,), "categorical"))
        >>> policy.act_one(np.array([0.1, 0.7], np.float32))
        1
    """

    def __init__(self, description: MLPDescription):
        self._description = description
        self.observation_space, self.action_space = description.observation_space, description.action_space
        self._obs_shape, self._obs_dtype = _flat("observations", self.observation_space)
        self._action_shape, self._action_dtype = _flat("actions", self.action_space)
        inputs = InputTable(self.observation_space, self._obs_dtype, extra=len(self._obs_shape))
        self._table, self._kept, self._keep = inputs.numbers, inputs.kept, inputs.keep
        self._fill_input(description)
        self.num_outputs = self._fill_head(description)
        self._fill_layers(description.layers, inputs.num_inputs, self.num_outputs)
        with COMPILING:
            t = self._table
            t[policy_table.ROW_AT] = load_kernels().acting.address_for_one()
            self._takes_integers = bool(t[policy_table.INPUT_KIND] == policy_table.INTEGER)
            self._is_single = bool(t[policy_table.HEAD_KIND] == policy_table.CATEGORICAL)
            self._enter = _entry_for_one(self._takes_integers, self._is_single)
        self._enter_rows: Any = None  # made when first used, as is the next; a cached_property would slow down every attribute
        self._native: Any = None
        self._address = t.ctypes.data
        self._can_enter = arrays_are_known() or (self._takes_integers and self._is_single)

    def __reduce__(self) -> Any:
        return CompiledMLP, (self._description,)  # a copy of the addresses would point to nothing

    def act_one(self, obs: Any) -> int | np.ndarray | None:
        """The action for one observation, at the least cost.

        Args:
            obs: A contiguous array with the space's dtype and shape, or an integer for a Discrete space.

        Returns:
            An int for a Discrete action space, else an array; None if `obs` is anything else, or holds NaN.
        """
        enter, table = self._enter, self._address  # calling a local is faster than calling an attribute
        if not self._can_enter:
            return None
        if self._takes_integers:
            if type(obs) is not int and type(obs) is not self._obs_dtype.type:
                return None
            obs = min(max(int(obs), -(2**62)), 2**62)  # so far outside, all integers count alike
        if self._is_single:
            action = enter(obs, table)
            return None if action == REFUSED else action
        out = np.empty(self._action_shape, self._action_dtype)
        return None if enter(obs, out, table) == REFUSED else out

    def act_rows(self, rows: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Actions for many observations.

        Args:
            rows: [B, *obs shape] in the space's dtype, contiguous; not checked for NaN.
            mask: Legal actions, bool [B, num_outputs], or None; a row without a legal one takes the first.

        Returns:
            [B, *action shape] in the space's dtype.

        Raises:
            HurtleError: `rows` or `mask` has another shape or dtype.
        """
        legal = 0
        if mask is not None:
            if self._table[policy_table.HEAD_KIND] not in (policy_table.CATEGORICAL, policy_table.MULTI_CATEGORICAL):
                raise HurtleError(f"A mask is for discrete actions, and these are in {self.action_space}.")
            legal = _address_of("mask", mask, (len(rows), self.num_outputs), np.dtype(np.bool_))
        actions = np.empty((len(rows), *self._action_shape), self._action_dtype)
        self._run_rows(rows, actions, legal, None)
        return actions

    def outputs(self, rows: np.ndarray) -> np.ndarray:
        """Outputs of the last layer for rows as in `act_rows`: float32 [B, num_outputs]."""
        found = np.empty((len(rows), self.num_outputs), np.float32)
        self._run_rows(rows, None, 0, found)
        return found

    @property
    def native(self) -> Any:
        """The policy as a function for `numba.njit(nogil=True)` loops; it may outlive this object, and any thread may call it.

        `native(obs) -> int64` for Discrete actions, else `native(obs, out)`, which writes the action into `out`, an array of
        its dtype. An observation is a contiguous array of the space's dtype, or an integer for a Discrete space; NaN in it, or
        another size, raises a ValueError. Numba cannot cache on disk a function that calls it.
        """
        if self._native is None:
            kept = (self._table, *self._kept)
            self._native = load_kernels().acting.bound(self._table, self._obs_dtype, self._action_dtype, kept)
        return self._native

    def _run_rows(self, rows: np.ndarray, actions: np.ndarray | None, mask: int, outputs: np.ndarray | None) -> None:
        if self._enter_rows is None:
            with COMPILING:
                self._table[[policy_table.ROWS_AT, policy_table.FORWARD_AT]] = load_kernels().acting.addresses_for_many()
                self._enter_rows = _entry_for_many()
        obs = _address_of("rows", rows, (len(rows), *self._obs_shape), self._obs_dtype)
        into, found = (0 if array is None else array.ctypes.data for array in (actions, outputs))
        self._enter_rows(self._address, obs, len(rows), into, mask, found)

    def _fill_input(self, description: MLPDescription) -> None:
        """Fill in what kernels/cpu/acting.py needs of observations besides `InputTable`."""
        t = self._table
        t[policy_table.ARRAY_TYPE], t[policy_table.TYPE_NUMBER] = id(np.ndarray), self._obs_dtype.num
        t[policy_table.NUM_DIMENSIONS], t[policy_table.SHAPE :] = len(self._obs_shape), self._obs_shape
        if description.mean is not None or description.std is not None:
            self._check_normalizer(description)
            t[policy_table.INPUT_KIND] = policy_table.NORMALIZED
            self._keep(policy_table.MEAN_AT, description.mean, np.float64)
            self._keep(policy_table.STD_AT, np.append(np.ravel(description.std), description.clip), np.float64)  # type: ignore[arg-type]

    def _check_normalizer(self, description: MLPDescription) -> None:
        if self._obs_dtype.kind != "f":
            raise HurtleError(f"A normalizer is for observations that are floats, got one for {self.observation_space}.")
        for name in ("mean", "std"):
            found = None if getattr(description, name) is None else np.shape(getattr(description, name))
            if found != self._obs_shape:
                raise HurtleError(f"The normalizer's {name}: expected shape {self._obs_shape}, got {found}.")
        if not (np.isfinite(description.mean).all() and np.isfinite(description.std).all() and np.all(description.std)):  # type: ignore[arg-type]
            raise HurtleError("The normalizer's mean and std must be finite, and no std 0.")

    def _fill_head(self, description: MLPDescription) -> int:
        """Fill in what kernels/cpu/choosing.py needs of actions; returns the outputs of the last layer."""
        t, space, kind = self._table, self.action_space, description.distribution
        known = ActionTransform.of(space, kind)
        if isinstance(space, spaces.Box):
            self._keep(policy_table.BOUNDS_AT, np.stack([known.low, known.range, known.least, known.greatest]), np.float64)
        else:
            self._keep(policy_table.NVEC_AT, known.nvec, np.int64)
            self._keep(policy_table.START_AT, known.start, np.int64)
        outputs, size = known.num_outputs, known.size
        t[policy_table.HEAD_KIND], t[policy_table.NUM_OUTPUTS], t[policy_table.ACTION_SIZE] = HEAD_KINDS[kind], outputs, size
        if self._action_dtype not in policy_table.DTYPES or self._action_dtype == np.uint64:
            raise HurtleError(f"A compiled policy cannot have actions of dtype {self._action_dtype}, got {space}.")
        t[policy_table.ACTION_DTYPE] = policy_table.DTYPES.index(self._action_dtype)
        return outputs

    def _fill_layers(self, layers: tuple[Layer, ...], inputs: int, outputs: int) -> None:
        if not layers:
            raise HurtleError(f"A policy needs at least one layer, from {inputs} inputs to {outputs} outputs.")
        table, packed, at, work = np.zeros((len(layers), network.COLUMNS), np.int64), [], 0, 0
        for n, (row, layer) in enumerate(zip(table, layers, strict=True)):
            inputs = _check_layer(n, layer, inputs, outputs if n == len(layers) - 1 else None)
            weight, bias = gemm.panels_of(layer.weight.T), gemm.panels_of(layer.bias[None])
            row[network.SOURCE], row[network.TRANSPOSED] = n - 1, -1
            row[network.OUTPUTS], row[network.INPUTS] = layer.weight.shape
            row[network.STRIDE], row[network.PANEL_WIDTH] = gemm.padded(inputs), gemm.panel_width(inputs)
            row[network.PANELS] = row[network.STRIDE] // row[network.PANEL_WIDTH]
            row[network.WEIGHT], row[network.BIAS] = at, at + weight.size
            row[network.ACTIVATION], row[network.WORK] = ACTIVATIONS[layer.activation], work
            packed += [weight, bias]
            at, work = at + weight.size + bias.size, work + TILE * gemm.padded(inputs)
        self._keep(policy_table.WEIGHTS_AT, np.concatenate(packed), np.float32)
        self._keep(policy_table.LAYERS_AT, table, np.int64)
        t = self._table
        t[policy_table.NUM_LAYERS], t[policy_table.NUM_WEIGHTS], t[policy_table.WORK_SIZE] = len(layers), at, work
        t[policy_table.WIDEST] = table[:, network.STRIDE].max()


@cache
def arrays_are_known() -> bool:
    """Whether this Python and NumPy lay out an array object as kernels/cpu/acting.py reads it."""
    array = np.zeros((2, 3), np.float32)
    if array.ctypes.data == 0 or ctypes.sizeof(ctypes.c_void_p) != 8 or object.__basicsize__ != 16:
        return False
    words, halves = (ctypes.c_int64 * 9).from_address(id(array)), (ctypes.c_int32 * 18).from_address(id(array))
    about = (ctypes.c_int32 * 8).from_address(id(array.dtype))
    shape = (words[acting.ARRAY_SHAPE], halves[acting.ARRAY_DIMENSIONS])
    return (
        (words[acting.OBJECT_TYPE], words[acting.ARRAY_DATA]) == (id(np.ndarray), array.ctypes.data)
        and words[acting.ARRAY_DESCR] == id(array.dtype)
        and shape[1] == 2
        and list((ctypes.c_int64 * 2).from_address(shape[0])) == [2, 3]
        and halves[acting.ARRAY_FLAGS] & acting.C_CONTIGUOUS_AND_ALIGNED == acting.C_CONTIGUOUS_AND_ALIGNED
        and halves[acting.ARRAY_FLAGS] == array.flags.num
        and about[acting.DESCR_NUMBER] == array.dtype.num
        and bytes(about)[26:27] == array.dtype.byteorder.encode()
    )


@cache
def _entry_for_one(takes_integers: bool, is_single: bool) -> Any:
    """The compiled function for one observation.

    It is called without Numba's dispatch on argument types, which would take longer than a small network.
    """
    code = load_kernels().acting
    given = types.int64 if takes_integers else code.OBJECT
    if is_single:
        return (code.act_on_integer if takes_integers else code.act_on_array).compile(types.int64(given, types.int64))
    into = code.act_on_integer_into if takes_integers else code.act_on_array_into
    return into.compile(types.int64(given, code.OBJECT, types.int64))


@cache
def _entry_for_many() -> Any:
    return load_kernels().acting.act_on_rows.compile(types.void(*[types.int64] * 6))


def _flat(what: str, space: spaces.Space) -> tuple[tuple[int, ...], np.dtype]:
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        raise HurtleError(f"A compiled policy has {what} in a Box, Discrete, MultiDiscrete or MultiBinary, got {space}.")
    dtype = np.dtype(space.dtype)
    if dtype not in policy_table.DTYPES:
        raise HurtleError(
            f"A compiled policy has {what} of a dtype in {[d.name for d in policy_table.DTYPES]}, got {dtype.name}."
        )
    return tuple(space.shape or ()), dtype


def _check_layer(n: int, layer: Layer, inputs: int, outputs: int | None) -> int:
    """Check layer n; returns its number of outputs."""
    weight, bias = layer.weight, layer.bias
    if weight.dtype != np.float32 or bias.dtype != np.float32:
        raise HurtleError(f"Layer {n}: expected weights and biases of float32, got {weight.dtype} and {bias.dtype}.")
    if weight.ndim != 2 or weight.shape[1] != inputs or outputs not in (None, weight.shape[0]) or not weight.shape[0]:
        expected = f"[{'outputs' if outputs is None else outputs}, {inputs}]"
        raise HurtleError(f"Layer {n}: expected weights of shape {expected}, got {list(weight.shape)}.")
    if bias.shape != weight.shape[:1]:
        raise HurtleError(f"Layer {n}: expected {weight.shape[0]} biases, got shape {list(bias.shape)}.")
    if layer.activation not in ACTIVATIONS:
        raise HurtleError(f"Layer {n}: expected the activation {', '.join(ACTIVATIONS)}, got {layer.activation!r}.")
    return int(weight.shape[0])


def _address_of(what: str, array: Any, shape: tuple[int, ...], dtype: np.dtype) -> int:
    fits = isinstance(array, np.ndarray) and array.shape == shape and array.dtype == dtype and array.flags.c_contiguous
    if not fits:
        got = f"{array.dtype.name} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise HurtleError(f"{what}: expected a contiguous array of {dtype.name} {list(shape)}, got {got}.")
    return int(array.ctypes.data)
