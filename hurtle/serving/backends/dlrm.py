"""`DLRMBackend`: the recommendation model of dlrm_model.py: 13 numbers and 26 lists of ids per row → a probability.

requests → one batch (feature_lists.py) → pinned memory, GPU → model → one part per request. Knows nothing of the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from hurtle.errors import ServingError
from hurtle.serving.backends.base import Backend, Metadata, Phases, TensorSpec
from hurtle.serving.backends.dlrm_model import DLRM, NUM_DENSE, NUM_SPARSE
from hurtle.serving.backends.feature_lists import BAD_ID, FINE, NEGATIVE_LENGTH, join
from hurtle.serving.backends.parameters import Given
from hurtle.serving.backends.torch_device import model_failed, open_device
from hurtle.serving.messages import InferRequest, Outputs
from hurtle.serving.status import invalid

DENSE, LENGTHS, VALUES, OUTPUT = "float_features", "id_list_features.lengths", "id_list_features.values", "default"
METADATA = Metadata(
    inputs=(
        TensorSpec(DENSE, "FP32", (-1, NUM_DENSE)),
        TensorSpec(LENGTHS, "INT32", (-1,)),
        TensorSpec(VALUES, "INT32", (-1,)),
    ),
    outputs=(TensorSpec(OUTPUT, "FP32", (-1,)),),
    platform="hurtle_dlrm",
    batched=False,  # the lists' first dimension is not the rows: requests are joined here
)


class DLRMBackend(Backend):
    """Runs a model written by `make_model`, or your own arrays under the same names.

    Parameters: `device` (cpu, cuda, cuda:N), `precision` (fp32, fp16), `threads` (torch's, on the CPU; 1).
    """

    def __init__(self, path: Path, parameters: dict[str, Any]):
        super().__init__(path, parameters)
        given = Given("dlrm", parameters, ("device", "precision", "threads"))
        device = open_device(given)
        precision = given.word("precision", "fp32", ("fp32", "fp16"))
        self._model = DLRM.open(path, device, torch.float16 if precision == "fp16" else torch.float32)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._phases = Phases()
        self.phases = self._phases if self._stream is None else None  # copies to a GPU overlap with the model
        self._rooms: dict[str, torch.Tensor] = {}

    def metadata(self) -> Metadata:
        """The same for every model."""
        return METADATA

    def rows(self, request: InferRequest) -> int:
        """The number of rows, as the lists have many entries per row."""
        return int(request.inputs[DENSE].shape[0])

    def warm_up_request(self, rows: int = 1) -> InferRequest:
        """A request with id 0 in every list."""
        ids = np.zeros(NUM_SPARSE * rows, np.int32)
        return InferRequest("warm-up", {DENSE: np.zeros((rows, NUM_DENSE), np.float32), LENGTHS: ids + 1, VALUES: ids})

    def infer(self, request: InferRequest) -> Outputs:
        """Run a batch of one."""
        (result,) = self.infer_batch([request])
        if isinstance(result, ServingError):
            raise result
        return result

    def infer_batch(self, requests: Sequence[InferRequest]) -> Sequence[Outputs | ServingError]:
        """Run requests in one call, without those that have bad lists, which get an error."""
        results: list[Outputs | ServingError] = [_check_sizes(request.inputs) or {} for request in requests]
        sound = [n for n, result in enumerate(results) if not isinstance(result, ServingError)]
        if not sound:
            return results
        inputs = [requests[n].inputs for n in sound]
        try:
            scores, faults = self._run(*([part[name] for part in inputs] for name in (DENSE, LENGTHS, VALUES)))
        except RuntimeError as error:
            raise model_failed(error) from None
        end = 0
        for n, part, fault in zip(sound, inputs, faults.tolist(), strict=True):
            if fault[0] != FINE:
                results[n] = self._explain(part, fault)
                continue
            start, end = end, end + len(part[DENSE])
            results[n] = {OUTPUT: scores[start:end]}
        return results

    def _run(
        self, dense: Sequence[np.ndarray], lengths: Sequence[np.ndarray], values: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The scores of all good requests, float32 [B], and the faults of all, int64 [R, 4]."""
        begun = perf_counter_ns()
        rows, counts = (np.array([len(part) for part in parts], np.int64) for parts in (dense, values))
        faults = np.empty((len(rows), 4), np.int64)
        ids = self._room("ids", torch.int32, int(counts.sum()))
        offsets = self._room("offsets", torch.int32, NUM_SPARSE * int(rows.sum()))
        joined = np.concatenate(lengths), np.concatenate(values)
        limits, starts = self._model.limits, self._model.starts
        lists, used = join(*joined, rows, counts, limits, starts, ids.numpy(), offsets.numpy(), faults)
        fine = [part for part, fault in zip(dense, faults[:, 0].tolist(), strict=True) if fault == FINE]
        numbers = self._room("numbers", torch.float32, lists // NUM_SPARSE, NUM_DENSE)
        if not lists:
            return np.empty(0, np.float32), faults
        np.concatenate(fine, out=numbers.numpy())
        with torch.inference_mode(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            batch = [tensor.to(self._model.device, non_blocking=True) for tensor in (numbers, ids[:used], offsets[:lists])]
            ready = perf_counter_ns()
            scores = self._model.forward(*batch)
            done = perf_counter_ns()
            found = scores.float().cpu().numpy()
        self._phases.add(ready - begun, perf_counter_ns() - done)
        return found, faults

    def _room(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Reused memory that grows when needed; pinned for a GPU, so that copies are asynchronous."""
        size = math.prod(shape)
        room = self._rooms.get(name)
        if room is None or room.numel() < size:
            room = self._rooms[name] = torch.empty(size + size // 2, dtype=dtype, pin_memory=self._stream is not None)
        return room[:size].view(shape)

    def _explain(self, inputs: dict[str, np.ndarray], fault: Sequence[int]) -> ServingError:
        kind, feature, at, found = fault
        if kind == NEGATIVE_LENGTH:
            return invalid(f"Tensor {LENGTHS!r}: expected lengths ≥ 0, got {found} at [{at}] (feature {feature}).")
        if kind == BAD_ID:
            limit = int(self._model.limits[feature])
            return invalid(
                f"Tensor {VALUES!r}: expected ids from 0 to {limit - 1} of feature {feature}, got {found} at [{at}]."
            )
        return invalid(f"Tensor {VALUES!r}: expected {found:,} ids, the sum of {LENGTHS!r}, got {len(inputs[VALUES]):,}.")


def _check_sizes(inputs: dict[str, np.ndarray]) -> ServingError | None:
    rows, lengths = len(inputs[DENSE]), len(inputs[LENGTHS])
    if lengths == NUM_SPARSE * rows:
        return None
    return invalid(
        f"Tensor {LENGTHS!r}: expected shape [{NUM_SPARSE * rows}], {NUM_SPARSE} for each row of {DENSE!r}, got [{lengths}]."
    )
