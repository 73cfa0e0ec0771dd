"""`Sequences`: the state of recurrent models, kept on the server by Triton's sequence id.

request with sequence_id, sequence_start, sequence_end → request with the state as inputs → answer, whose state is kept. One
request of a sequence runs at a time; the others wait in order.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from time import monotonic

import numpy as np

from hurtle.errors import ServingError
from hurtle.serving.messages import InferRequest, InferResponse, Parameter, Reply
from hurtle.serving.model import Model
from hurtle.serving.status import invalid

log = logging.getLogger("hurtle.serving")
Key = tuple[str, Parameter]


class Sequence:
    """One sequence, of one version of a model."""

    __slots__ = ("begun", "busy", "is_gone", "model", "rows", "size", "state", "used", "waiting")

    def __init__(self, model: Model):
        self.model, self.used = model, monotonic()
        self.state: dict[str, np.ndarray] | None = None
        """State by input; None: the next request starts the sequence."""
        self.rows = self.size = 0
        """The state's batch size, and its bytes, which count against the limit of all sequences."""
        self.begun = self.busy = self.is_gone = False
        self.waiting: deque[SequenceTicket] = deque()


class SequenceTicket:
    """A request of a sequence; like `Ticket`."""

    __slots__ = ("cancelled", "reply", "request")

    def __init__(self, request: InferRequest, reply: Reply):
        self.request, self.reply, self.cancelled = request, reply, False

    def cancel(self) -> None:
        """Give it up. A request that has begun still runs, as the next one needs its state."""
        self.cancelled = True


class Sequences:
    """The sequences of all models.

    Args:
        most: Sequences per model; further ones are refused.
        idle: Seconds after which an idle sequence is dropped.
        on_end: Called with the model when one of its sequences ends.
        max_bytes: Bytes for the states of all sequences.
    """

    def __init__(
        self,
        most: int,
        idle: float,
        on_end: Callable[[Model], None] = lambda model: None,
        max_bytes: float = math.inf,
    ):
        self.most, self.idle, self.max_bytes, self._on_end = most, idle, max_bytes, on_end
        self.held = 0
        """Bytes of all states."""
        self._all: OrderedDict[Key, Sequence] = OrderedDict()
        """Least recently used first."""
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._all)

    def find(self, request: InferRequest) -> Model | None:
        """The version that a sequence began with, and stays with; None if it starts anew."""
        found = self._all.get(self._key(request))
        return None if found is None or request.parameters.get("sequence_start") is True else found.model

    def uses(self, model: Model) -> bool:
        """Whether this version has a sequence."""
        return any(sequence.model is model for sequence in self._all.values())

    def infer(self, model: Model, request: InferRequest, reply: Reply) -> SequenceTicket | None:
        """Answer a request of a sequence; like `Model.infer`."""
        if not model.metadata.state:
            raise invalid(f"Model {model.name!r} has no state: leave out sequence_id.")
        self.forget_idle()
        key = self._key(request)
        for flag in ("sequence_start", "sequence_end"):
            if not isinstance(request.parameters.get(flag, False), bool):
                raise invalid(f"{flag} must be a bool, got {request.parameters[flag]!r:.60}.")
        sequence = self._all.get(key)
        if sequence is not None and sequence.model is not model and request.parameters.get("sequence_start") is True:
            self._end(key)  # it starts anew, with the newest version
            sequence = None
        if sequence is None:
            sequence = self._begin(key, model, request)
        self._all.move_to_end(key)
        sequence.used = monotonic()
        ticket = SequenceTicket(request, reply)
        if sequence.busy:
            if len(sequence.waiting) >= model.options.max_queue:
                raise ServingError(
                    "resource_exhausted", f"Sequence {key[1]!r} has {len(sequence.waiting)} waiting requests already."
                )
            sequence.waiting.append(ticket)
            return ticket
        self._run(key, sequence, ticket)
        return ticket

    def forget_idle(self) -> None:
        """Drop idle sequences."""
        limit = monotonic() - self.idle
        for key, sequence in list(self._all.items()):
            if sequence.used > limit:
                break
            if not sequence.busy:
                self._end(key)

    def forget(self, model: Model) -> None:
        """Drop the sequences of a version that is unloaded."""
        for key, sequence in list(self._all.items()):
            if sequence.model is model:
                self._end(key)

    def _key(self, request: InferRequest) -> Key:
        identity = request.parameters["sequence_id"]
        if not isinstance(identity, int | str) or isinstance(identity, bool) or len(str(identity)) > 256:
            raise invalid(f"sequence_id must be a number or a string of at most 256 characters, got {identity!r:.60}.")
        return request.model, identity

    def _begin(self, key: Key, model: Model, request: InferRequest) -> Sequence:
        if request.parameters.get("sequence_start") is not True:
            raise self._unknown(key)
        if self._counts.get(model.name, 0) >= self.most:
            raise ServingError("resource_exhausted", f"Model {model.name!r} has {self.most} sequences already; retry later.")
        self._counts[model.name] = self._counts.get(model.name, 0) + 1
        sequence = self._all[key] = Sequence(model)
        return sequence

    def _unknown(self, key: Key) -> ServingError:
        return invalid(
            f"Model {key[0]!r} has no sequence {key[1]!r}: its first request must set sequence_start, and it is dropped after "
            f"{self.idle:g} s without a request."
        )

    def _end(self, key: Key) -> None:
        sequence = self._all.pop(key)
        self._counts[sequence.model.name] -= 1
        self._set_state(sequence, None)
        sequence.is_gone = True
        self._on_end(sequence.model)

    def _run(self, key: Key, sequence: Sequence, ticket: SequenceTicket) -> None:
        """Run one request of a sequence, then the next."""
        request = ticket.request

        def reply(answer: InferResponse | ServingError) -> None:
            sequence.busy = False
            if isinstance(answer, InferResponse):
                answer = self._keep(sequence, request, wanted, answer)
            try:
                if not ticket.cancelled:
                    ticket.reply(answer)
            finally:
                self._next(key, sequence)

        def refuse(error: ServingError) -> None:
            if not error.is_counted:
                sequence.model.count_failure(error)
            reply(error)

        sequence.busy = True
        wanted = request.outputs
        try:
            self._fill(key, sequence, request)
            sequence.model.infer(request, reply)
        except ServingError as error:
            refuse(error)
        except Exception as error:
            log.exception("a request of sequence %r failed", key)
            refuse(ServingError("internal", f"The sequence failed: {type(error).__name__}."))

    def _next(self, key: Key, sequence: Sequence) -> None:
        while sequence.waiting and not sequence.busy:
            ticket = sequence.waiting.popleft()
            if not ticket.cancelled:
                self._run(key, sequence, ticket)
        if not sequence.begun and not sequence.busy and not sequence.waiting and self._all.get(key) is sequence:
            self._end(key)  # it ended or never began, and no waiting request may start it anew

    def _fill(self, key: Key, sequence: Sequence, request: InferRequest) -> None:
        """Add the state to the inputs, and the next state to the outputs."""
        model = sequence.model
        names = [name for name, _ in model.metadata.state]
        given = [name for name in names if name in request.inputs]
        if given:
            raise invalid(f"Input {given[0]!r} is the state, which the server keeps for a sequence: send one or the other.")
        model.check_inputs(request.inputs)  # before a state of their size is allocated
        if request.parameters.get("sequence_start") is True:
            self._set_state(sequence, None)
            sequence.begun = False
        elif not sequence.begun:  # an earlier request in the queue ended the sequence, or failed to start it
            raise self._unknown(key)
        rows = next((int(array.shape[0]) for array in request.inputs.values() if array.ndim), 1)
        if sequence.state is None:
            specs = {spec.name: spec for spec in model.metadata.inputs}
            for name in names:
                if specs[name].shape[:1] != (-1,) or min(specs[name].shape[1:], default=0) < 0:
                    raise ServingError(
                        "failed_precondition",
                        f"The server can keep states of shape [-1, …] only; {name!r} of model {model.name!r} has "
                        f"{list(specs[name].shape)}: send it as a tensor.",
                    )
            size = sum(rows * math.prod(specs[name].shape[1:]) * specs[name].dtype.itemsize for name in names)
            if self.held + size > self.max_bytes:
                raise ServingError(
                    "resource_exhausted",
                    f"The states of all sequences take {self.held:,} bytes of at most {self.max_bytes:,}, and this one would "
                    f"take {size:,}; retry later.",
                )
            self._set_state(sequence, {name: np.zeros((rows, *specs[name].shape[1:]), specs[name].dtype) for name in names})
            sequence.rows = rows
        elif rows != sequence.rows:
            raise invalid(f"The sequence has a batch of {sequence.rows}, got {rows}.")
        request.inputs.update(sequence.state or {})
        if request.outputs:
            request.outputs = (*request.outputs, *(name for _, name in model.metadata.state if name not in request.outputs))

    def _keep(self, sequence: Sequence, request: InferRequest, wanted: tuple[str, ...], answer: InferResponse) -> InferResponse:
        states = {output: name for name, output in sequence.model.metadata.state}
        self._set_state(sequence, {name: np.array(answer.outputs[output]) for output, name in states.items()})
        sequence.used, sequence.begun = monotonic(), True
        answer.outputs = {
            name: array for name, array in answer.outputs.items() if (name in wanted if wanted else name not in states)
        }
        answer.parameters = {name: request.parameters[name] for name in ("sequence_id",)}
        if request.parameters.get("sequence_end") is True:
            self._set_state(sequence, None)
            sequence.begun = False
        return answer

    def _set_state(self, sequence: Sequence, state: dict[str, np.ndarray] | None) -> None:
        """Replace a sequence's state and count its bytes, unless the sequence is gone."""
        size = 0 if sequence.is_gone or state is None else sum(array.nbytes for array in state.values())
        self.held += size - sequence.size
        sequence.state, sequence.size = state, size
