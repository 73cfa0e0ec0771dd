"""Encoders for the leaves of a structured space: one small module per kind of space, nested like the space.

the tree that `SpaceLayout.unflatten` gives, [R, ...] at each leaf → features [R, num_features]. R is the batch size times
the entries of the enclosing Sequences. Knows nothing of policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from hurtle.emulation.leaves import map_tree
from hurtle.errors import HurtleError
from hurtle.policies.cnn import NATURE_SIDE, grid_body, image_shape, nature_body
from hurtle.policies.layers import Numbers, OneHot, hidden_layers

EMBEDDING_SIZE = 16
"""Width of the embedding of a discrete value."""
LEAF_SIZE = 64
"""Features of a vector, and of an entry of a variable-size leaf."""
IMAGE_SIDE = 5
"""Smallest side of a Box that is treated as an image rather than a vector."""
SMALL = 10.0
"""Values that may exceed this are compressed: sign(x) log(1 + |x|)."""


class Encoder(nn.Module):
    """Maps a part of the tree to features."""

    num_features: int


class Branch(Encoder):
    """A Dict or Tuple: the concatenated features of its entries."""

    def __init__(self, space: spaces.Dict | spaces.Tuple, activation: str, orthogonal_init: bool):
        super().__init__()
        self.keys: list[Any] = list(space.spaces) if isinstance(space, spaces.Dict) else list(range(len(space.spaces)))
        self.entries = nn.ModuleList(encoder_of(space.spaces[key], activation, orthogonal_init) for key in self.keys)
        self.num_features = sum(entry.num_features for entry in self.entries)  # type: ignore[misc]

    def forward(self, tree: Any) -> Tensor:
        """The tree of the entries → [R, num_features]."""
        return torch.cat([entry(tree[key]) for key, entry in zip(self.keys, self.entries, strict=True)], -1)


class Choices(Encoder):
    """A Discrete or MultiDiscrete: an embedding for each value of each entry."""

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete):
        super().__init__()
        self.one_hot = OneHot(space)
        self.embedding = nn.Embedding(self.one_hot.num_features, EMBEDDING_SIZE)
        self.num_features = len(self.one_hot.offsets) * EMBEDDING_SIZE

    def forward(self, values: Tensor) -> Tensor:
        """Integers [R, ...] → [R, num_features]."""
        return self.embedding(self.one_hot.places(values)).flatten(1)


class Vector(Encoder):
    """A Box or MultiBinary: one hidden layer; values that may be large are compressed, as there is no normalizer here."""

    def __init__(self, space: spaces.Box | spaces.MultiBinary, activation: str, orthogonal_init: bool):
        super().__init__()
        self.input = Numbers(space)
        self.compressed = isinstance(space, spaces.Box) and not self.input.scaled and _largest(space) > SMALL
        self.hidden = hidden_layers(self.input.num_features, (LEAF_SIZE,), activation, orthogonal_init)
        self.num_features = LEAF_SIZE

    def forward(self, values: Tensor) -> Tensor:
        """Numbers [R, ...] → [R, num_features]."""
        numbers = self.input(values).reshape(values.shape[0], self.input.num_features)
        if self.compressed:
            numbers = numbers.sign() * numbers.abs().log1p()
        return self.hidden(numbers)


class String(Encoder):
    """A Text, or a custom space of strings: embeds each character and its position, then averages over the real ones."""

    def __init__(self, space: spaces.Space, activation: str, orthogonal_init: bool):
        super().__init__()
        # a Text's codes start at 1, and 0 is padding; other strings are UTF-8 bytes
        self.num_codes = len(space.character_set) + 1 if isinstance(space, spaces.Text) else 256
        self.embedding = nn.Embedding(self.num_codes, EMBEDDING_SIZE)
        self.hidden = hidden_layers(EMBEDDING_SIZE, (LEAF_SIZE,), activation, orthogonal_init)
        self.num_features = LEAF_SIZE + 1

    def forward(self, tree: Mapping[str, Tensor]) -> Tensor:
        """Codes [R, L] and lengths [R] → [R, num_features]."""
        codes = tree["codes"]
        characters = self.embedding(codes.long().clamp(0, self.num_codes - 1))
        return _pooled(self.hidden(characters + _places(codes.shape[1], codes.device)), tree["length"])


class Entries(Encoder):
    """A Sequence: a layer over the features of each entry, then the mean over the real ones."""

    def __init__(self, space: spaces.Sequence, activation: str, orthogonal_init: bool):
        super().__init__()
        self.entry = encoder_of(space.feature_space, activation, orthogonal_init)
        self.hidden = hidden_layers(self.entry.num_features, (LEAF_SIZE,), activation, orthogonal_init)
        self.num_features = LEAF_SIZE + 1

    def forward(self, tree: Mapping[str, Any]) -> Tensor:
        """Values [R, L, ...] and lengths [R] → [R, num_features]."""
        return _pooled(self.hidden(_each_entry(self.entry, tree["values"])), tree["length"])


class GraphEncoder(Encoder):
    """A Graph: the mean over its nodes, and over its edges, each with the two nodes it joins."""

    def __init__(self, space: spaces.Graph, activation: str, orthogonal_init: bool):
        super().__init__()
        self.node = encoder_of(space.node_space, activation, orthogonal_init)
        self.edge = None if space.edge_space is None else encoder_of(space.edge_space, activation, orthogonal_init)
        self.node_hidden = hidden_layers(self.node.num_features, (LEAF_SIZE,), activation, orthogonal_init)
        inputs = 2 * LEAF_SIZE + (0 if self.edge is None else self.edge.num_features)
        self.edge_hidden = hidden_layers(inputs, (LEAF_SIZE,), activation, orthogonal_init)
        self.num_features = 2 * (LEAF_SIZE + 1)

    def forward(self, tree: Mapping[str, Any]) -> Tensor:
        """Nodes [R, N, ...], edges [R, E, ...], links [R, E, 2] and the number of real ones → [R, num_features]."""
        nodes = self.node_hidden(_each_entry(self.node, tree["nodes"]))  # [R, N, LEAF_SIZE]
        links = tree["edge_links"].long().clamp(0, max(nodes.shape[1] - 1, 0))  # padding may contain anything
        ends = links.flatten(1).unsqueeze(-1).expand(-1, -1, LEAF_SIZE)
        parts = [nodes.gather(1, ends).unflatten(1, (links.shape[1], 2)).flatten(2)]  # [R, E, 2 * LEAF_SIZE]
        if self.edge is not None:
            parts.append(_each_entry(self.edge, tree["edges"]))
        edges = self.edge_hidden(torch.cat(parts, -1))
        return torch.cat([_pooled(nodes, tree["num_nodes"]), _pooled(edges, tree["num_edges"])], -1)


class Options(Encoder):
    """A OneOf: which option it is, and the features of that option; zeros for the others."""

    def __init__(self, space: spaces.OneOf, activation: str, orthogonal_init: bool):
        super().__init__()
        self.options = nn.ModuleList(encoder_of(option, activation, orthogonal_init) for option in space.spaces)
        self.choice = Choices(spaces.Discrete(len(space.spaces)))
        self.num_features = self.choice.num_features + sum(option.num_features for option in self.options)  # type: ignore[misc]

    def forward(self, tree: Mapping[str, Any]) -> Tensor:
        """The choice [R] and all options → [R, num_features]."""
        choice = tree["choice"]
        features = [self.choice(choice)]
        for i, (option, values) in enumerate(zip(self.options, tree["options"], strict=True)):
            features.append(option(values).masked_fill((choice != i).unsqueeze(-1), 0.0))
        return torch.cat(features, -1)


def encoder_of(space: spaces.Space, activation: str, orthogonal_init: bool) -> Encoder:
    """The encoder of any space that `SpaceLayout` takes."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return Branch(space, activation, orthogonal_init)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return Choices(space)
    if isinstance(space, spaces.Box) and _is_image(space.shape):
        small = min(image_shape(space.shape)[1:]) < NATURE_SIDE
        return (grid_body if small else nature_body)(space, orthogonal_init)  # type: ignore[return-value]
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return Vector(space, activation, orthogonal_init)
    if isinstance(space, spaces.Sequence):
        return Entries(space, activation, orthogonal_init)
    if isinstance(space, spaces.Graph):
        return GraphEncoder(space, activation, orthogonal_init)
    if isinstance(space, spaces.OneOf):
        return Options(space, activation, orthogonal_init)
    if isinstance(space, spaces.Text) or (space.dtype is not None and space.dtype.kind == "U"):
        return String(space, activation, orthogonal_init)
    raise HurtleError(f"policy='structured' has no encoder for {space}; turn it into arrays with emulate's featurize.")


def _each_entry(encoder: Encoder, tree: Any) -> Tensor:
    """Encode each entry of a tree of [R, L, ...]: [R, L, features]."""
    lead: list[tuple[int, int]] = []

    def merged(leaf: Tensor) -> Tensor:
        lead.append((leaf.shape[0], leaf.shape[1]))
        return leaf.flatten(0, 1)

    entries = map_tree(merged, tree)
    return encoder(entries).unflatten(0, lead[0])


def _places(length: int, device: torch.device) -> Tensor:
    """Sinusoidal position encodings, [length, EMBEDDING_SIZE]."""
    speeds = 1000.0 ** -torch.linspace(0.0, 1.0, EMBEDDING_SIZE // 2, device=device)
    angles = torch.arange(length, device=device).unsqueeze(-1) * speeds
    return torch.cat([angles.sin(), angles.cos()], -1)


def _pooled(entries: Tensor, length: Tensor) -> Tensor:
    """The mean over the first `length` [R] of entries [R, L, F], and their share of L: [R, F + 1]."""
    most = max(entries.shape[1], 1)
    real = torch.arange(entries.shape[1], device=entries.device) < length.unsqueeze(-1)  # [R, L]
    total = entries.masked_fill(~real.unsqueeze(-1), 0.0).sum(1)
    count = length.float().unsqueeze(-1)
    return torch.cat([total / count.clamp_min(1.0), count / most], -1)


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) in (2, 3) and min(image_shape(shape)[1:]) >= IMAGE_SIDE


def _largest(space: spaces.Box) -> float:
    return float(np.maximum(np.abs(space.low.astype(np.float64)), np.abs(space.high.astype(np.float64))).max(initial=0.0))
