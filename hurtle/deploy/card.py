"""`Card`: the metadata of a policy file, as JSON, and the checks that it is consistent.

JSON → sizes (checked before anything is allocated) → spaces and layouts → card. Knows no file format, and imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import spaces

from hurtle.emulation.action_layout import ActionLayout
from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.emulation.leaves import key_path, tree_leaves
from hurtle.emulation.plan import STRING_LENGTH
from hurtle.errors import HurtleError, PolicyFileError
from hurtle.policies.action_transform import HEAD_OUTPUTS
from hurtle.policies.saved_spaces import layout_from_dict, space_from_dict

FORMAT = 1
MAX_CARD = 1 << 24
"""Most characters of a card."""
MAX_NUMBERS = 1 << 24
"""Most numbers in one observation or action, and in all inputs or outputs of one row."""
_DTYPES = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float16", "float32", "float64")
_WRONG = (ArithmeticError, AssertionError, AttributeError, HurtleError, LookupError, RecursionError, TypeError, ValueError)
"""What Gymnasium's spaces and plain Python raise on a malformed card."""

Feeds = dict[str, np.ndarray]
"""Tensors [B, …] by the names of their ports."""


@dataclass(frozen=True)
class Port:
    """One input or output tensor, without its first dimension, the batch."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Numbers in one row."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Card:
    """Where a policy comes from, and how to call it.

    Attributes:
        env: The id of the env it was trained on.
        env_parameters: The parameters of that env.
        algorithm: The algorithm that trained it.
        steps: Steps trained.
        mean_return: Mean return of its last evaluation, if there was one.
        observation_space: Space of one row, as `space_to_dict` has it; flat if the env was emulated.
        action_space: Likewise.
        structure: The env's own spaces, if it was emulated: "observation" and "action".
        distribution: One of `HEAD_OUTPUTS`.
        deterministic: Whether "action" is the most likely one; otherwise it is sampled.
        masked: Whether a mask of legal actions is an input.
        inputs: All inputs in order: observation, mask, state.
        outputs: All outputs in order.
        initial_state: Value of the inputs "state_in_…" at the start of an episode.
        mlp: For plain MLPs: which tensors of the file are the layers.
        seed: Seed of the run.
        hurtle: Version of Hurtle that wrote the file.
        commit: Git commit of the code that trained it, if known.
        sha256: Hash of the rest of the file.
    """

    env: str
    env_parameters: dict[str, Any]
    algorithm: str
    steps: int
    mean_return: float | None
    observation_space: dict[str, Any]
    action_space: dict[str, Any]
    structure: dict[str, Any] | None
    distribution: str
    deterministic: bool
    masked: bool
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    initial_state: str = "zeros"
    mlp: dict[str, Any] | None = None
    seed: int = 0
    hurtle: str = ""
    commit: str | None = None
    sha256: str = ""
    format: int = FORMAT

    def to_json(self) -> str:
        """The card as one line of JSON.

        Raises:
            HurtleError: JSON cannot hold the env's parameters.
        """
        try:
            return json.dumps(asdict(self), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise HurtleError(f"env_parameters {self.env_parameters!r:.200} cannot be written to a file: {error}.") from None

    @classmethod
    def from_json(cls, text: str) -> Card:
        """Read what `to_json` wrote.

        Raises:
            PolicyFileError: The text is malformed or inconsistent.
        """
        if len(text) > MAX_CARD:
            raise PolicyFileError("its metadata is too long")
        try:
            saved = json.loads(text)
            if saved.get("format") != FORMAT:
                raise PolicyFileError(f"it has format {saved.get('format')!r}, and this version of Hurtle reads {FORMAT}")
            _check_sizes(saved)
            ports: dict[str, Any] = {name: _ports(saved.pop(name)) for name in ("inputs", "outputs")}
            card = cls(**saved, **ports)
            _check_card(card)
        except PolicyFileError:
            raise
        except _WRONG as error:
            raise PolicyFileError(f"its metadata cannot be read ({type(error).__name__}: {error})") from None
        return card

    def sealed(self, found: Any) -> str:
        """The value of `sha256`, given a hash object that was fed the rest of the file."""
        found.update(replace(self, sha256="").to_json().encode())
        return found.hexdigest()

    @cached_property
    def spaces(self) -> tuple[spaces.Space, spaces.Space]:
        """The flat spaces of observations and actions."""
        return space_from_dict(self.observation_space), space_from_dict(self.action_space)

    @cached_property
    def layouts(self) -> tuple[SpaceLayout | None, ActionLayout | None]:
        """How the env's own spaces lie in the flat ones; (None, None) if it was not emulated."""
        if self.structure is None:
            return None, None
        return layout_from_dict(self.structure["observation"]), ActionLayout(space_from_dict(self.structure["action"]))

    @property
    def leaves(self) -> tuple[Port, ...]:
        """The inputs of the observation: "obs", or one for each leaf of a structured observation."""
        return tuple(port for port in self.inputs if port.name == "obs" or port.name.startswith("obs."))

    @property
    def states(self) -> tuple[Port, ...]:
        """The inputs of the recurrent state."""
        return tuple(port for port in self.inputs if port.name.startswith("state_in_"))

    @property
    def layer_tensors(self) -> set[str]:
        """The names of the tensors that `mlp` lists.

        Raises:
            PolicyFileError: `mlp` is malformed.
        """
        if self.mlp is None:
            return set()
        try:
            names = [layer[part] for layer in self.mlp["layers"] for part in ("weight", "bias")]
            return {name for name in (*names, self.mlp["mean"], self.mlp["std"]) if name is not None}
        except (KeyError, TypeError) as error:
            raise PolicyFileError(f"its list of layers cannot be read ({error})") from None


# Sizes, checked before anything is allocated.


def _check_sizes(saved: dict[str, Any]) -> None:
    """Refuse spaces that take more memory than any policy needs."""
    counted = {name: _numbers(saved[f"{name}_space"], {}, name) for name in ("observation", "action")}
    if saved["structure"] is not None:
        layout = saved["structure"]["observation"]
        counted["structured observation"] = _numbers(layout["space"], layout, layout["name"])
        counted["structured action"] = _numbers(saved["structure"]["action"], {}, "action")
    for what, numbers in counted.items():
        if numbers > MAX_NUMBERS:
            raise PolicyFileError(f"its {what} has more than {MAX_NUMBERS:,} numbers")


def _numbers(space: dict[str, Any], limits: dict[str, Any], path: str) -> int:
    """Numbers in one value of a saved space, laid out as by `SpaceLayout`."""
    kind = space["type"]
    if kind in ("Box", "Discrete", "MultiDiscrete"):
        _check_dtype(space.get("dtype", "int64"))
    if kind == "Box":
        return _product(space["shape"])
    if kind == "Discrete":
        return 1
    if kind == "MultiDiscrete":
        return _entries(space["nvec"])
    if kind == "MultiBinary":
        return _product(space["n"] if isinstance(space["n"], list) else [space["n"]])
    if kind == "Dict":
        return sum(_numbers(child, limits, key_path(path, key)) for key, child in space["spaces"])
    if kind == "Tuple":
        return sum(_numbers(child, limits, f"{path}[{k}]") for k, child in enumerate(space["spaces"]))
    if kind == "OneOf":
        return 1 + sum(_numbers(child, limits, f"{path}.options[{k}]") for k, child in enumerate(space["spaces"]))
    if kind == "Text":
        return 1 + _size(space["max_length"])
    if kind == "AnyString":
        return 1 + _limit(limits, "max_length", path, STRING_LENGTH)
    if kind == "Sequence":
        return 1 + _limit(limits, "max_length", path) * _numbers(space["space"], limits, f"{path}[*]")
    if kind == "Graph":
        edges = space["edges"]
        nodes = _limit(limits, "max_nodes", path) * _numbers(space["nodes"], limits, f"{path}.nodes[*]")
        features = 0 if edges is None else _numbers(edges, limits, f"{path}.edges[*]")
        return 2 + nodes + _limit(limits, "max_edges", path, 0 if edges is None else None) * (2 + features)
    raise PolicyFileError(f"it has a space of type {kind!r:.80}")


def _limit(limits: dict[str, Any], argument: str, path: str, default: int | None = None) -> int:
    """The maximum size of a variable-sized leaf; a layout has one for all leaves, or one for each path."""
    given = limits.get(argument)
    given = given.get(path) if isinstance(given, dict) else given
    return _size(default if given is None else given)


def _size(number: Any) -> int:
    if type(number) is not int or not 0 <= number <= MAX_NUMBERS:
        raise PolicyFileError(f"it has arrays of {number!r:.80} numbers")
    return number


def _product(sizes: Iterable[Any]) -> int:
    """The product of all sizes, capped just above the limit, so that a huge list does not take forever."""
    total = 1
    for size in sizes:
        total = min(total * _size(size), MAX_NUMBERS + 1)
    return total


def _entries(nested: Any) -> int:
    return sum(map(_entries, nested)) if isinstance(nested, list) else 1


def _check_dtype(name: Any) -> None:
    if name not in _DTYPES:
        raise PolicyFileError(f"it has arrays of {name!r:.80}")


def _ports(saved: list[dict[str, Any]]) -> tuple[Port, ...]:
    ports = []
    for port in saved:
        if not isinstance(port["name"], str) or not isinstance(port["shape"], list):
            raise PolicyFileError(f"the tensor {port['name']!r:.80} has the shape {port['shape']!r:.80}")
        _check_dtype(port["dtype"])
        ports.append((Port(port["name"], port["dtype"], tuple(port["shape"])), _product(port["shape"])))
    if sum(size for _, size in ports) > MAX_NUMBERS:
        raise PolicyFileError(f"its tensors have more than {MAX_NUMBERS:,} numbers")
    return tuple(port for port, _ in ports)


# Everything else.

_TYPES: dict[str, Any] = {
    **dict.fromkeys(("env", "algorithm", "distribution", "initial_state", "hurtle", "sha256"), str),
    **dict.fromkeys(("env_parameters", "observation_space", "action_space"), dict),
    **dict.fromkeys(("steps", "seed"), int),
    **dict.fromkeys(("deterministic", "masked"), bool),
    **dict.fromkeys(("structure", "mlp"), dict | None),
    "mean_return": int | float | None,
    "commit": str | None,
}


def _check_card(card: Card) -> None:
    """Refuse a card that is inconsistent."""
    for name, kind in _TYPES.items():
        value = getattr(card, name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise PolicyFileError(f"its {name} is {value!r:.80}")
    if card.initial_state != "zeros":
        raise PolicyFileError(f"its initial state is {card.initial_state!r:.80}")
    names = [port.name for ports in (card.inputs, card.outputs) for port in ports]
    if len(set(names)) != len(names):
        raise PolicyFileError(f"its tensors {names} share names")
    if card.distribution not in HEAD_OUTPUTS:
        raise PolicyFileError(f"its distribution is {card.distribution!r:.80}")
    flat, _ = card.spaces
    layout, _ = card.layouts
    seen = card.leaves
    shapes = [tuple(flat.shape or ())]
    if seen and seen[0].name != "obs":
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(layout.tree)] if layout is not None else []
    if not seen or [port.shape for port in seen] != shapes:
        raise PolicyFileError(f"its inputs {[port.name for port in card.inputs]} are not those of {flat}")
    after = [port for port in card.outputs if port.name.startswith("state_out_")]
    if [port.shape for port in after] != [port.shape for port in card.states]:
        raise PolicyFileError("its state outputs differ in shape from its state inputs")
    if card.masked != any(port.name == "mask" and len(port.shape) == 1 for port in card.inputs):
        raise PolicyFileError(f"masked is {card.masked}, and its inputs contradict that")
