"""`infer_fused`: runs several requests in one call of a model whose first dimension is the batch. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np

from hurtle.errors import HurtleError, ServingError
from hurtle.serving.backends.base import Phases
from hurtle.serving.messages import InferRequest, Outputs

Run = Callable[[dict[str, np.ndarray]], Outputs]


def infer_fused(requests: Sequence[InferRequest], run: Run, phases: Phases | None = None) -> list[Outputs | ServingError]:
    """Join requests along the first dimension, run them as one batch, and split the outputs.

    Requests that do not fit together (other inputs, or other sizes after the batch) run in groups that do. A request whose own
    inputs differ in their rows runs alone: joined, rows could end up with the wrong request.

    Args:
        requests: The requests to run.
        run: Joined inputs → joined outputs with as many rows.
        phases: Counts the time of joining and splitting.

    Raises:
        HurtleError: The model returned another number of rows; requests must then run one by one.
    """
    if len(requests) == 1:
        return [run(requests[0].inputs)]
    phases = phases or Phases()
    begun = perf_counter_ns()
    inputs = [request.inputs for request in requests]
    columns = _columns(inputs)
    if columns is not None:
        try:
            joined = {name: np.concatenate(arrays) for name, arrays in columns.items()}
        except ValueError:  # sizes after the batch differ
            return _infer_groups(inputs, run, phases)
        phases.add(input_ns=perf_counter_ns() - begun)
        return _split(joined, [len(array) for array in next(iter(columns.values()))], run, phases)
    return _infer_groups(inputs, run, phases)


def _columns(inputs: Sequence[dict[str, np.ndarray]]) -> dict[str, list[np.ndarray]] | None:
    """The arrays of all requests by name, or None if their names differ or rows differ within a request."""
    names = inputs[0].keys()
    rows: list[int] = []
    columns = {}
    for name in names:
        try:
            columns[name] = [given[name] for given in inputs]
            found = [len(array) for array in columns[name]]
        except (KeyError, TypeError):  # it is missing, or has no dimensions
            return None
        if found != (rows := rows or found):
            return None
    if not columns or any(len(given) != len(names) for given in inputs):
        return None
    return columns


def _split(joined: dict[str, np.ndarray], rows: Sequence[int], run: Run, phases: Phases) -> list[Outputs | ServingError]:
    """Run a batch and split the outputs by request."""
    total = sum(rows)
    fused = list(run(joined).items())
    begun = perf_counter_ns()
    for name, array in fused:
        if not array.ndim or array.shape[0] != total:
            raise HurtleError(
                f"The model returned {name!r} of shape {list(array.shape)} for {total} rows: its rows are not a batch."
            )
    results: list[Outputs | ServingError] = []
    start = 0
    for count in rows:
        end = start + count
        results.append({name: array[start:end] for name, array in fused})
        start = end
    phases.add(output_ns=perf_counter_ns() - begun)
    return results


def _infer_groups(inputs: Sequence[dict[str, np.ndarray]], run: Run, phases: Phases) -> list[Outputs | ServingError]:
    groups: dict[Any, list[int]] = {}
    for n, given in enumerate(inputs):
        is_even = len({array.shape[:1] for array in given.values()}) == 1 and all(array.ndim for array in given.values())
        key: Any = tuple((name, given[name].shape[1:]) for name in sorted(given)) if is_even else n
        groups.setdefault(key, []).append(n)
    results: list[Outputs | ServingError] = [{}] * len(inputs)
    for members in groups.values():
        try:
            if len(members) == 1:
                found: list[Outputs | ServingError] = [run(inputs[members[0]])]
            else:
                begun = perf_counter_ns()
                parts = [inputs[n] for n in members]
                joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
                phases.add(input_ns=perf_counter_ns() - begun)
                found = _split(joined, [len(next(iter(part.values()))) for part in parts], run, phases)
        except ServingError as error:
            if len(members) > 1:  # one of them is bad, and it is unknown which
                raise
            found = [error]
        for n, result in zip(members, found, strict=True):
            results[n] = result
    return results
