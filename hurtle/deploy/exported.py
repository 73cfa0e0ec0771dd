"""`ExportedPolicy`: acts with a policy file, on the fastest runtime that can run it. Needs neither torch nor the run.

flat rows → compiled MLP, or one tensor per input → ONNX Runtime or torch.export → actions, next state. Makes no env.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hurtle.deploy.acting_policy import ActingPolicy, State
from hurtle.deploy.card import Card, Feeds
from hurtle.deploy.onnx_file import import_export_package
from hurtle.deploy.policy_file import PolicyFile
from hurtle.emulation.leaves import tree_leaves
from hurtle.errors import HurtleError, PolicyFileError, UnknownNameError, did_you_mean
from hurtle.policies.action_transform import HEAD_OUTPUTS

if TYPE_CHECKING:
    from hurtle.deploy.compiled import CompiledMLP

_ONNX_TYPES = {"float32": "tensor(float)", "float64": "tensor(double)"}


class ExportedPolicy(ActingPolicy):
    """A policy that `hurtle.export` wrote.

    Args:
        file: The file's contents.
        runtime: "native" (compiled; plain MLPs), "onnxruntime", "torch" (.pt2), or "auto": the first of these that can run it.

    Attributes:
        card: The file's metadata.
        runtime: The runtime that runs it.
        steps: Steps trained.
    """

    def __init__(self, file: PolicyFile, runtime: str = "auto"):
        card, possible = file.card, self.runtimes_of(file)
        if runtime not in ("auto", "native", "onnxruntime", "torch"):
            raise UnknownNameError(
                f"No runtime {runtime!r}. {did_you_mean(runtime, ('auto', 'native', 'onnxruntime', 'torch'))}"
            )
        if runtime != "auto" and runtime not in possible:
            raise HurtleError(f"runtime={runtime!r} cannot run {file.path}; {' or '.join(possible)} can.")
        mask_size = next((port.shape[0] for port in card.inputs if port.name == "mask"), None)
        super().__init__(card.spaces, card.layouts, mask_size)
        self.card, self.file, self.steps = card, file.path, card.steps
        self.runtime = possible[0] if runtime == "auto" else runtime
        self._content = file.content
        self._outputs = [port.name for port in card.outputs]
        self._leaf_ports = card.leaves
        self._compiled = _compiled(file) if self.runtime == "native" else None
        self._act_one: Callable[[Any], Any] | None = self._compiled.act_one if self._compiled and self._layout is None else None

    @staticmethod
    def runtimes_of(file: PolicyFile) -> list[str]:
        """The runtimes that can run a file, fastest first."""
        if file.path.suffix == ".pt2":
            return ["torch"]
        card = file.card
        is_plain = card.mlp is not None and card.deterministic and any(port.name == "action" for port in card.outputs)
        return ["native", "onnxruntime"] if is_plain else ["onnxruntime"]

    def act(self, obs: Any, state: State | None = None, mask: Any = None, deterministic: bool | None = None) -> Any:
        """See `ActingPolicy.act`. One plain observation takes about a microsecond on the native runtime."""
        if self._act_one is not None and state is None and mask is None and deterministic is not False:
            action = self._act_one(obs)
            if action is not None:
                return action
        return super().act(obs, state, mask, deterministic)

    def outputs(self, obs: Any, state: State | None = None, mask: Any = None) -> dict[str, np.ndarray]:
        """All outputs of the file by name, [B, …] each, for one observation or a batch; keeps no recurrent state."""
        rows, single = self._rows(obs)
        memory = self._own_memory(len(rows)) if state is None else self._given_memory(state, len(rows))
        return self._run_file(self._feeds(rows, memory, self._mask(mask, len(rows), single)))

    def run(self, feeds: Feeds) -> Feeds:
        """All inputs by name, [B, …] each → all outputs; the native runtime computes the action only."""
        if self._compiled is not None:
            return {"action": self._compiled.act_rows(self._joined(feeds), feeds.get("mask"))}
        return self._run_file(feeds)

    @property
    def native(self) -> Any:
        """The policy as a function that Numba's nogil code can call: see `CompiledMLP.native`.

        Raises:
            HurtleError: It is not a plain MLP, or takes masks, which such a function cannot.
        """
        if self.card.masked:
            raise HurtleError(f"{self.file} takes masks, which a native function cannot: export it with masked=False.")
        if self._compiled is None:
            raise HurtleError(
                f"Only plain MLPs, exported to .onnx with deterministic actions, are compiled; {self.file} runs on "
                f"{self.runtime}."
            )
        return self._compiled.native

    def initial_state(self, batch: int = 1) -> State:
        """Zeros, float32 [batch, …] each; () for a policy without recurrence."""
        return tuple(np.zeros((batch, *port.shape), port.dtype) for port in self.card.states)

    def for_rows(self) -> ExportedRows:
        """The policy as a `RowPolicy`, for `runners.playing.Player`."""
        return ExportedRows(self)

    # See `ActingPolicy`.

    def _choose(
        self, rows: np.ndarray, memory: State, mask: np.ndarray | None, deterministic: bool | None
    ) -> tuple[np.ndarray, State]:
        if deterministic is not None and deterministic != self.card.deterministic:
            does, option = ("takes the most likely action", "") if self.card.deterministic else ("samples", "out")
            raise HurtleError(f"{self.file} {does}: for the other, export it with{option} stochastic=True.")
        if "action" not in self._outputs:
            raise HurtleError(
                f"{self.file} was exported without an action; it computes {', '.join(self._outputs)} (see outputs())."
            )
        found = self.run(self._feeds(rows, memory, mask))
        return found["action"], tuple(found[f"state_out_{k}"] for k in range(len(memory)))

    def _values(self, rows: np.ndarray, memory: State) -> np.ndarray:
        if "value" not in self._outputs:
            raise HurtleError(f"{self.file} was exported without values: export it with outputs=('action', 'value').")
        return self._run_file(self._feeds(rows, memory, None))["value"]

    def _forgotten(self, part: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return np.where(rows.reshape(-1, *[1] * (part.ndim - 1)), np.float32(0.0), part)

    def _as_memory(self, part: Any) -> np.ndarray:
        return np.asarray(part, np.float32)

    def _no_mask(self) -> str:
        can = "logits" in HEAD_OUTPUTS[self.card.distribution]
        return f"{self.file} was exported without masks (masked=True)" if can else super()._no_mask()

    def _feeds(self, rows: np.ndarray, memory: State, mask: np.ndarray | None) -> Feeds:
        """All inputs of the file by name; without a mask, all actions are legal."""
        leaves = [rows]
        if self._leaf_ports[0].name != "obs":
            assert self._layout is not None
            leaves = tree_leaves(self._layout.unflatten(rows))
        feeds = {port.name: np.ascontiguousarray(leaf, port.dtype) for port, leaf in zip(self._leaf_ports, leaves, strict=True)}
        if self._mask_size is not None:
            feeds["mask"] = np.ones((len(rows), self._mask_size), np.bool_) if mask is None else mask
        return feeds | {port.name: part for port, part in zip(self.card.states, memory, strict=True)}

    def _joined(self, feeds: Feeds) -> np.ndarray:
        """Flat observations, joined from the inputs of their leaves."""
        arrays = [feeds[port.name] for port in self._leaf_ports]
        if self._leaf_ports[0].name == "obs":
            return arrays[0]
        assert self._layout is not None
        starts = [leaf.start for leaf in tree_leaves(self._layout.tree)]
        rows = len(arrays[0])
        return np.concatenate([arrays[k].reshape(rows, -1) for k in np.argsort(starts)], 1)

    @cached_property
    def _run_file(self) -> Callable[[Feeds], Feeds]:
        make = _torch_runner if self.file.suffix == ".pt2" else _onnx_runner
        return make(self._content, self.card, str(self.file))

    def __repr__(self) -> str:
        return f"ExportedPolicy({self.card.env}, {self.steps:,} steps, {self.file}, {self.runtime})"


class ExportedRows:
    """An exported policy on the rows of a vector env, with flat observations and actions; see `runners.playing.RowPolicy`."""

    num_uniforms = 0

    def __init__(self, policy: ExportedPolicy):
        self._policy = policy
        self.observation_space, self.action_space = policy.card.spaces
        self.initial_state = policy.initial_state

    def choose_rows(
        self, rows: np.ndarray, state: State, mask: np.ndarray | None, starts: np.ndarray, drawn: np.ndarray | None = None
    ) -> tuple[np.ndarray, State]:
        """See `RowPolicy`; a file that samples draws its own random numbers."""
        policy = self._policy
        if mask is not None and not policy.card.masked:
            raise HurtleError(f"The env masks actions; {policy.file} was exported without masks (masked=True).")
        state = tuple(policy._forgotten(part, starts) for part in state)
        return policy._choose(rows, state, mask, None)


def _compiled(file: PolicyFile) -> CompiledMLP:
    """The layers that a card lists, compiled."""
    from hurtle.deploy.compiled import CompiledMLP, Layer, MLPDescription

    mlp = file.card.mlp
    assert mlp is not None
    try:
        layers = []
        for layer in mlp["layers"]:
            weight = file.tensors[layer["weight"]]
            bias = np.zeros(len(weight), np.float32) if layer["bias"] is None else file.tensors[layer["bias"]]
            layers.append(Layer(weight, bias, layer["activation"]))
        mean, std = (None if mlp[name] is None else file.tensors[mlp[name]] for name in ("mean", "std"))
        observation, action = file.card.spaces
        description = MLPDescription(observation, action, tuple(layers), file.card.distribution, mean, std, float(mlp["clip"]))
        return CompiledMLP(description)
    except (KeyError, TypeError, ValueError, HurtleError) as error:
        raise PolicyFileError(f"{file.path} is damaged: its layers cannot be read ({error}).") from None


def onnx_session(content: bytes, name: str) -> Any:
    """An ONNX Runtime session with one thread, which is fastest for small networks and leaves the other cores alone.

    Raises:
        PolicyFileError: ONNX Runtime rejects the model.
    """
    runtime = import_export_package("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    try:
        return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except MemoryError:
        raise
    except Exception as error:  # its errors have no common base
        raise PolicyFileError(f"ONNX Runtime cannot run {name}: {str(error)[:300]}") from None


def _onnx_runner(content: bytes, card: Card, name: str) -> Callable[[Feeds], Feeds]:
    session = onnx_session(content, name)
    names = [port.name for port in card.outputs]
    pairs = (("takes", session.get_inputs(), card.inputs), ("gives", session.get_outputs(), card.outputs))
    for does, tensors, ports in pairs:
        real = {tensor.name: (tensor.type, list(tensor.shape[1:])) for tensor in tensors}
        if real != {port.name: (_ONNX_TYPES.get(port.dtype, f"tensor({port.dtype})"), list(port.shape)) for port in ports}:
            raise PolicyFileError(f"{name} is damaged: it {does} {real}, unlike its metadata says.")

    def run(feeds: Feeds) -> Feeds:
        try:
            return dict(zip(names, session.run(names, feeds), strict=True))
        except MemoryError:
            raise
        except Exception as error:  # its errors have no common base
            raise PolicyFileError(f"ONNX Runtime cannot run {name}: {str(error)[:300]}") from None

    return run


def _torch_runner(content: bytes, card: Card, name: str) -> Callable[[Feeds], Feeds]:
    import io

    import torch

    try:
        module = torch.export.load(io.BytesIO(content)).module()
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # torch raises many types
        raise PolicyFileError(f"torch cannot load {name}: {str(error)[:300]}") from None

    def run(feeds: Feeds) -> Feeds:
        tensors = [torch.from_numpy(np.ascontiguousarray(feeds[port.name])) for port in card.inputs]
        try:
            with torch.inference_mode():
                found = module(*tensors)
            return {port.name: part.numpy() for port, part in zip(card.outputs, found, strict=True)}
        except (ImportError, MemoryError):
            raise
        except Exception as error:  # the graph is not the one that the card describes
            raise PolicyFileError(f"torch cannot run {name}: {str(error)[:300]}") from None

    return run
