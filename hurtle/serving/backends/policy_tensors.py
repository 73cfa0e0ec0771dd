"""Tensor names of Hurtle's exported policies, shared by their backends: optional masks, and memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hurtle.deploy.card import Port
from hurtle.serving.backends.base import TensorSpec
from hurtle.serving.tensors import datatype_of


def spec_of(port: Port) -> TensorSpec:
    """The spec of a card's tensor, with the batch dimension in front."""
    return TensorSpec(port.name, datatype_of(port.dtype), (-1, *port.shape))


def is_mask(spec: TensorSpec) -> bool:
    """Whether an input is the mask of legal actions."""
    return spec.name == "mask" and spec.datatype == "BOOL" and len(spec.shape) == 2 and spec.shape[1] > 0


def with_masks(inputs: dict[str, np.ndarray], masks: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """The inputs, with all-legal masks for those that the client left out."""
    missing = [spec for spec in masks if spec.name not in inputs]
    if not missing or not inputs:
        return inputs
    rows = next(iter(inputs.values())).shape[0]
    return {**inputs, **{spec.name: np.ones((rows, *spec.shape[1:]), np.bool_) for spec in missing}}


def state_pairs(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> tuple[tuple[str, str], ...]:
    """The pairs of memory tensors: state_in_0 and state_out_0, and so on, if their specs agree."""
    known = {spec.name: spec for spec in outputs}
    pairs = []
    for spec in inputs:
        after = known.get(spec.name.replace("state_in_", "state_out_", 1))
        if spec.name.startswith("state_in_") and after and (after.datatype, after.shape) == (spec.datatype, spec.shape):
            pairs.append((spec.name, after.name))
    return tuple(pairs)
