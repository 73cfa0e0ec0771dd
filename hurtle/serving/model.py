"""`Model`: one loaded version of a model: a backend behind an executor, input validation, and statistics.

InferRequest → check → Job → executor → InferResponse. Knows nothing of files, other versions and transports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np

from hurtle.errors import HurtleError, ServingError, did_you_mean
from hurtle.serving.backends.base import Backend, Metadata, TensorSpec
from hurtle.serving.config import ModelOptions
from hurtle.serving.executors import Executor, Inline, Queued
from hurtle.serving.lanes import DONE, Job, MakeBackend
from hurtle.serving.messages import InferRequest, InferResponse, Reply
from hurtle.serving.statistics import ModelStatistics
from hurtle.serving.status import invalid
from hurtle.serving.tensors import datatype_of

QUICK = 2e-3
"""Seconds: a model that answers a full batch sooner runs on the event loop, where other requests wait for it."""


class Ticket:
    """A running request; `cancel` it when nobody waits for the answer any more."""

    __slots__ = ("_job", "_model")

    def __init__(self, model: Model, job: Job):
        self._model, self._job = model, job

    def cancel(self) -> None:
        """Give it up: its reply is not called, and if it has not begun it does not run."""
        if self._job.state != DONE:
            self._model.forget(self._job)


class Model:
    """One version of a model, ready to serve.

    Args:
        name: Name of the model.
        version: A number, as text.
        make: Makes its backend; called once per lane.
        options: How to run it.

    Attributes:
        statistics: Its counts and times.
        active: Requests that are not answered yet.
        on_idle: Called whenever `active` drops to zero.
    """

    def __init__(self, name: str, version: str, make: MakeBackend, options: ModelOptions):
        self.name, self.version, self.options = name, version, options
        self.statistics = ModelStatistics()
        self.active = 0
        self.on_idle: Callable[[Model], None] = lambda model: None
        self.executor: Executor = _executor(make, options)
        self.metadata: Metadata = self.executor.backend.metadata()
        self.statistics.measures_phases = self.executor.backend.phases is not None
        self._inputs = {spec.name: spec for spec in self.metadata.inputs}
        self._outputs = {spec.name for spec in self.metadata.outputs}
        self._required = [spec.name for spec in self.metadata.inputs if spec.name not in self.metadata.optional]

    def infer(self, request: InferRequest, reply: Reply) -> Ticket | None:
        """Answer a request.

        Raises:
            ServingError: The request is bad, or the queue is full. Then `reply` is not called.
        """
        try:
            job = Job(request, self._done, self._check(request))
        except ServingError as error:
            self.count_failure(error)
            raise
        job.reply = reply
        self.active += 1
        try:
            self.executor.submit(job)
        except ServingError as error:
            self.count_failure(error)
            self._leave()
            raise
        return None if job.state == DONE else Ticket(self, job)

    def forget(self, job: Job) -> None:
        """Give up a request whose client is gone."""
        self.executor.cancel(job)
        self.statistics.cancelled += 1
        self._leave()

    def count_failure(self, error: ServingError, spent_ns: int = 0) -> None:
        """Count a request that fails with this error, and mark the error as counted."""
        self.statistics.fail(error.reason, spent_ns)
        error.is_counted = True

    def close(self) -> None:
        """Stop the lanes; the model must be idle."""
        self.executor.close()

    def _leave(self) -> None:
        self.active -= 1
        if not self.active:
            self.on_idle(self)

    def _done(self, job: Job) -> None:
        result, request = job.result, job.request
        now = perf_counter_ns()
        if job.leads:
            self.statistics.execute(job)
        answer: InferResponse | ServingError
        if type(result) is dict and all(name in result for name in request.outputs or self._outputs):
            self.statistics.succeed(job, now)
            if request.outputs:
                result = {name: result[name] for name in request.outputs}
            answer = InferResponse(self.name, self.version, request.id, result)
        else:
            answer = result if isinstance(result, ServingError) else self._lacking(result, request)
            self.count_failure(answer, now - job.arrived)
        try:
            job.reply(answer)
        finally:
            self._leave()

    def _lacking(self, result: Any, request: InferRequest) -> ServingError:
        given = list(result) if isinstance(result, dict) else [type(result).__name__]
        missing = sorted(set(request.outputs or self._outputs) - set(given))
        return ServingError("internal", f"Model {self.name!r} returned {given} without {missing}, which its metadata lists.")

    # Validation.

    def check_inputs(self, inputs: dict[str, np.ndarray]) -> int:
        """Refuse inputs that do not fit the model; returns the batch size, or −1 if it has none.

        Raises:
            ServingError: An input is unknown, or has the wrong datatype, shape or batch size.
        """
        batch = -1
        for name, array in inputs.items():
            spec = self._inputs.get(name)
            if spec is None:
                raise invalid(f"Model {self.name!r} has no input {name!r:.80}. {did_you_mean(name[:80], self._inputs)}")
            if array.dtype != spec.dtype:
                raise invalid(
                    f"Input {name!r} of model {self.name!r}: expected {spec.datatype}, got {datatype_of(array.dtype)}."
                )
            if array.shape != spec.shape:
                self._check_shape(spec, array.shape)
            if self.metadata.batched:
                if batch >= 0 and array.shape[0] != batch:
                    raise invalid(
                        f"Input {name!r} of model {self.name!r}: expected a batch of {batch} like the inputs before it, got "
                        f"{array.shape[0]}."
                    )
                batch = array.shape[0]
        return batch

    def _check(self, request: InferRequest) -> int:
        """Refuse inputs and outputs that do not fit the model; returns the number of rows."""
        inputs = request.inputs
        batch = self.check_inputs(inputs)
        for name in self._required:
            if name not in inputs:
                raise invalid(self._missing(name, inputs))
        for name in request.outputs:
            if name not in self._outputs:
                raise invalid(f"Model {self.name!r} has no output {name!r:.80}. {did_you_mean(name[:80], self._outputs)}")
        rows = batch if batch >= 0 else self.executor.backend.rows(request)
        if self.options.max_rows is not None and rows > self.options.max_rows:
            raise invalid(f"Model {self.name!r} takes at most {self.options.max_rows} rows in a request, got {rows}.")
        return rows

    def _missing(self, name: str, inputs: dict[str, np.ndarray]) -> str:
        text = f"Model {self.name!r} needs the input {name!r}; got {', '.join(map(repr, inputs)) or 'none'}."
        states = dict(self.metadata.state)
        if name not in states:
            return text
        return (
            f"{text} It is the model's state: send zeros first, then the last {states[name]!r}; or set a sequence_id, with "
            "sequence_start in the first request, and the server keeps it."
        )

    def _check_shape(self, spec: TensorSpec, shape: tuple[int, ...]) -> None:
        if len(shape) != len(spec.shape) or any(want not in (-1, got) for want, got in zip(spec.shape, shape, strict=True)):
            raise invalid(
                f"Input {spec.name!r} of model {self.name!r}: expected shape {list(spec.shape)} (-1 is any size), got "
                f"{list(shape)}."
            )


def _executor(make: MakeBackend, options: ModelOptions) -> Executor:
    """An executor whose lanes are warmed up."""

    def make_warm() -> Backend:
        backend = make()
        _warm_up(backend)
        return backend

    if options.executor == "inline":
        return Inline(make_warm)
    lanes = options.lanes
    if options.executor == "worker":
        return Queued(make_warm, lanes or len(os.sched_getaffinity(0)), max_queue=options.max_queue)
    large = sys.maxsize
    if not lanes:
        backend = make_warm()
        large = _large(backend, options)
        if lanes is None:
            lanes = 0 if _time_of_a_batch(backend, options.batch_size) < QUICK else 1
        make_warm = _handing_out(backend, make_warm)
    return Queued(make_warm, lanes, options.batch_size, options.batch_timeout_ms / 1000, options.max_queue, large)


def _handing_out(backend: Backend, make: MakeBackend) -> MakeBackend:
    """Return an existing backend first, then new ones."""
    first = [backend]
    return lambda: first.pop() if first else make()


def _large(backend: Backend, options: ModelOptions) -> int:
    """Rows above which a request does not run on the event loop: a full batch, or the model's fixed size."""
    return max(options.batch_size, backend.rows(backend.warm_up_request()))


def _time_of_a_batch(backend: Backend, rows: int) -> float:
    """Seconds that a full batch takes, extrapolated from 1 and 64 rows."""

    def spent(count: int) -> float:
        request = backend.warm_up_request(count)
        times = []
        for _ in range(3):
            begun = perf_counter()
            backend.infer(request)
            times.append(perf_counter() - begun)
        return min(times)

    one = spent(1)
    if rows == 1:
        return one
    try:
        return one + (spent(64) - one) / 63 * (rows - 1)
    except Exception:  # it takes fewer rows; extrapolate from one
        return one * rows


def _warm_up(backend: Backend) -> None:
    """Run a request of zeros.

    Raises:
        HurtleError: The model cannot be run.
    """
    try:
        found = backend.infer(backend.warm_up_request())
    except Exception as error:
        raise HurtleError(f"It cannot be run: {type(error).__name__}: {str(error)[:500]}") from error
    missing = {spec.name for spec in backend.metadata().outputs} - found.keys()
    if missing:
        raise HurtleError(f"It returned {sorted(found)} without {sorted(missing)}, which its metadata lists.")
