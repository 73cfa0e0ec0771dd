"""`DLRM`: Meta's deep learning recommendation model (2019) in torch, and its file: an .npz of arrays without pickles.

numbers → bottom MLP ┐
lists → EmbeddingBag ┴→ products of all pairs → top MLP → sigmoid. Knows nothing of requests and training.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.nn.functional import embedding_bag, linear

from hurtle.errors import HurtleError
from hurtle.serving.backends.pair_products import pair_products

NUM_DENSE, NUM_SPARSE = 13, 26
NUM_PAIRS = (NUM_SPARSE + 1) * NUM_SPARSE // 2
CHUNK = 256
"""Rows whose products fit into a CPU's cache; with more, each row takes longer."""
_OPEN: WeakValueDictionary[Any, DLRM] = WeakValueDictionary()
_OPENING = threading.Lock()


class DLRM:
    """The model's weights and arithmetic; thread-safe.

    All tables are joined into one, so that one EmbeddingBag handles the lists of all features.

    Args:
        weights: Arrays by name; see `make_model`.
        device: Where it runs.
        dtype: Type of weights and arithmetic: float32 or float16.

    Attributes:
        limits: Number of ids of each feature, int64 [26].
        starts: First row of each feature in the joined table, int64 [26].
        device: Where it runs.
    """

    def __init__(self, weights: dict[str, np.ndarray], device: torch.device, dtype: torch.dtype):
        tables = [weights[f"table_{f}"] for f in range(NUM_SPARSE)]
        self.limits = np.array([len(table) for table in tables])
        self.starts = np.cumsum(self.limits) - self.limits
        self.device, self._dtype = device, dtype
        self._table = self._placed(np.concatenate(tables))
        self._bottom, self._top = (
            [
                (self._placed(weights[f"{part}_{n}_weight"]), self._placed(weights[f"{part}_{n}_bias"]))
                for n in range(_depth(weights, part))
            ]
            for part in ("bottom", "top")
        )
        self._in_pairs = device.type == "cpu" and dtype == torch.float32
        self._from_dense, self._from_products = self._first_top_layer()
        self._chunk = CHUNK if device.type == "cpu" else 2**31
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # its users have their own streams

    @classmethod
    def open(cls, path: Path, device: torch.device, dtype: torch.dtype) -> DLRM:
        """Load a model; lanes that load the same file share its tables, which may be large.

        Raises:
            HurtleError: The file is no such model.
        """
        try:
            about = path.stat()
        except OSError as error:
            raise HurtleError(f"Cannot read {path}: {error.strerror or error}.") from None
        key = (path.resolve(), about.st_ino, about.st_mtime_ns, about.st_size, device, dtype)
        with _OPENING:
            found = _OPEN.get(key)
            if found is None:
                found = _OPEN[key] = cls(read_model(path), device, dtype)
            return found

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Probabilities [B].

        Args:
            numbers: float32 [B, 13].
            ids: Ids of all features and rows, with `starts` added.
            offsets: Start of each list in `ids`, [26·B], all rows of feature 0 first.
        """
        rows = len(numbers)
        sums = embedding_bag(ids, self._table, offsets, mode="sum").view(NUM_SPARSE, rows, -1)  # (26, B, D)
        parts = [self._combine(numbers[start : start + self._chunk], sums, start) for start in range(0, rows, self._chunk)]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else numbers.new_empty(0)

    def _combine(self, numbers: torch.Tensor, sums: torch.Tensor, start: int) -> torch.Tensor:
        """Run b rows: float32 [b, 13] and, from `start` on, [26, B, D] → probabilities [b]."""
        dense = numbers.to(self._dtype)
        for weight, bias in self._bottom:
            dense = torch.relu(linear(dense, weight, bias))  # (b, D) at last
        products = (self._pairs if self._in_pairs else self._squares)(dense, sums, start)
        x = torch.addmm(linear(dense, self._from_dense, self._top[0][1]), products, self._from_products)
        for weight, bias in self._top[1:]:
            x = linear(torch.relu(x), weight, bias)
        return torch.sigmoid(x).view(-1)

    def _pairs(self, dense: torch.Tensor, sums: torch.Tensor, start: int) -> torch.Tensor:
        """The products of each pair of features, [b, 351]."""
        found = torch.empty(len(dense), NUM_PAIRS)
        pair_products(dense.numpy(), sums.numpy(), start, found.numpy())
        return found

    def _squares(self, dense: torch.Tensor, sums: torch.Tensor, start: int) -> torch.Tensor:
        """All products of features, each pair twice, [b, 27·27]."""
        features = torch.cat([dense[None], sums[:, start : start + len(dense)]]).transpose(0, 1)  # (b, 27, D)
        return torch.bmm(features, features.transpose(1, 2)).view(len(dense), -1)

    def _first_top_layer(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first top layer's weights for the dense numbers, [outputs, D], and the products, [351 or 27·27, outputs].

        The model takes each pair of features once. On a GPU, zeros for the other half cost less than picking the pairs out.
        """
        weight = self._top[0][0]  # (outputs, D + pairs)
        width = weight.shape[1] - NUM_PAIRS
        of_pairs = weight[:, width:].T
        if self._in_pairs:
            return weight[:, :width].contiguous(), of_pairs.contiguous()
        upper = torch.triu_indices(NUM_SPARSE + 1, NUM_SPARSE + 1, 1)
        whole = weight.new_zeros((NUM_SPARSE + 1) ** 2, len(weight))
        whole[(upper[0] * (NUM_SPARSE + 1) + upper[1]).to(weight.device)] = of_pairs
        return weight[:, :width].contiguous(), whole

    def _placed(self, weight: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(weight).to(self.device, self._dtype)


def _depth(weights: dict[str, np.ndarray], part: str) -> int:
    return sum(name.startswith(f"{part}_") and name.endswith("_weight") for name in weights)


def read_model(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a model's file, an .npz without pickled objects.

    Raises:
        HurtleError: It is not such a file, or an array has the wrong shape.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            weights = {name: archive[name] for name in archive.files}
    except Exception as error:  # from zipfile, zlib or NumPy
        raise HurtleError(f"{path} is not an .npz file of arrays: {error}.") from None
    tables = [weights.get(f"table_{f}", np.empty(0)) for f in range(NUM_SPARSE)]
    width = tables[0].shape[-1]
    shapes: dict[str, tuple[int, ...]] = {f"table_{f}": (len(table), width) for f, table in enumerate(tables)}
    for part, first, last in (("bottom", NUM_DENSE, width), ("top", width + NUM_PAIRS, 1)):
        depth = max(_depth(weights, part), 1)
        sizes = [first, *(len(weights.get(f"{part}_{n}_bias", ())) for n in range(depth - 1)), last]
        for n, (takes, gives) in enumerate(pairwise(sizes)):
            shapes |= {f"{part}_{n}_weight": (gives, takes), f"{part}_{n}_bias": (gives,)}
    for name, shape in shapes.items():
        found = weights.get(name)
        if found is None or found.shape != shape or found.dtype.kind != "f" or not len(found):
            got = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise HurtleError(f"{path}: {name!r} must be floats of shape {list(shape)}, got {got}.")
    if sum(len(table) for table in tables) >= 2**31:
        raise HurtleError(f"{path}: its tables have more than 2³¹ rows together.")
    return weights


def make_model(
    path: Path,
    table_rows: int = 10_000,
    width: int = 16,
    bottom: Sequence[int] = (64, 32),
    top: Sequence[int] = (64, 32),
    seed: int = 0,
) -> None:
    """Write a model with random weights.

    Its arrays are table_0 … table_25 [rows, width], bottom_N_weight [outputs, inputs], bottom_N_bias, top_N_weight, top_N_bias.

    Args:
        path: The .npz file.
        table_rows: Number of ids of each feature.
        width: Size of an embedding.
        bottom: Sizes of the hidden layers after the 13 numbers.
        top: Sizes of the hidden layers after the products.
        seed: Seed of the weights.
    """
    rng = np.random.default_rng(seed)
    weights = {f"table_{f}": _random(rng, table_rows, width) for f in range(NUM_SPARSE)}
    for part, sizes in (("bottom", [NUM_DENSE, *bottom, width]), ("top", [width + NUM_PAIRS, *top, 1])):
        for n, (takes, gives) in enumerate(pairwise(sizes)):
            weights[f"{part}_{n}_weight"] = _random(rng, gives, takes)
            weights[f"{part}_{n}_bias"] = _random(rng, 1, gives)[0]
    np.savez(path, **weights)  # type: ignore[arg-type]


def _random(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return (rng.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)).astype(np.float32)
