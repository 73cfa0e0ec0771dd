"""`Ranks`: the learners that train one policy together, on torch.distributed: sums and means over them, and messages.

A learner calls `mean_` on its flat gradient before it clips and steps; everything else that must be the same for all goes
through here too. `ALONE` is a single learner: nobody calls anything then. Knows nothing of losses.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hurtle.errors import LostRankError

PATIENCE = timedelta(hours=12)
"""How long a rank waits for another that is alive, such as for rank 0's evaluation: a hung env is step_timeout's business."""
LOOK_SECONDS = 1.0
"""How long Ctrl-C may have to wait while others are waited for."""


def _unknown_reason() -> str:
    return "torchrun's report below says which and why."


def _nothing() -> None:
    pass


class Ranks:
    """One learner's view of all.

    Args:
        rank: The number of this one; 0 leads: it reports and saves.
        size: How many there are.
        backend: What carries tensors of GPUs: "nccl" or "gloo".
        reason: Tells why another one was lost.
        local_rank: The number of this one among those of this machine.

    Attributes:
        several: Whether there are others.
        while_waiting: Called every second in which others are waited for.
        capturable: Whether CUDA graphs can hold what is called here.

    Example:
        >>> ALONE.rank, ALONE.size, ALONE.several
        (0, 1, False)
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        backend: str = "gloo",
        reason: Callable[[], str] | None = None,
        local_rank: int | None = None,
    ):
        self.rank, self.size, self.backend = rank, size, backend
        self._local_rank = rank if local_rank is None else local_rank
        self.several, self.capturable = size > 1, size == 1 or backend == "nccl"
        self._reason = reason or _unknown_reason
        self.while_waiting: Callable[[], None] = _nothing

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self

    @property
    def leads(self) -> bool:
        """Whether this one reports and saves."""
        return self.rank == 0

    def device_of(self, device: torch.device) -> torch.device:
        """This rank's device, where the user gives one for all: "cuda" is a GPU for each, as far as there are enough."""
        if device.type != "cuda" or device.index is not None:
            return device
        return torch.device("cuda", self._local_rank % torch.cuda.device_count())

    # Tensors: every rank calls these in the same order, with tensors of the same shape.

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over the ranks, which is the same to the last bit on all of them."""
        with self._lost_ranks():
            if tensor.is_cuda and self.backend == "nccl":
                torch.distributed.all_reduce(tensor)
            else:
                self._wait(torch.distributed.all_reduce(tensor, async_op=True))
        return tensor

    def mean_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its mean over the ranks."""
        return self.sum_(tensor).div_(self.size)

    def rows(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, [size, ...]."""
        every = tensor.new_zeros((self.size, *tensor.shape))
        every[self.rank] = tensor
        return self.sum_(every)

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by that of rank 0."""
        with self._lost_ranks():
            if tensor.is_cuda and self.backend == "nccl":
                torch.distributed.broadcast(tensor, 0)
            else:
                self._wait(torch.distributed.broadcast(tensor, 0, async_op=True))
        return tensor

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace the gradients by their means, in one exchange; those that a rank does not have are zeros."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = self.mean_(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    # Numbers and messages of the host.

    def sums(self, *numbers: float) -> list[float]:
        """The sum of each number over the ranks."""
        return self.sum_(torch.tensor(numbers, dtype=torch.float64)).tolist()

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return int(self.rows(torch.tensor(number)).max())

    def send(self, message: bytes) -> None:
        """Send rank 0 a message, which has asked this rank for it."""
        content = torch.from_numpy(np.frombuffer(message, np.uint8).copy())
        with self._lost_ranks():
            self._wait_for_one(torch.distributed.isend(torch.tensor(len(message)), 0))
            if message:
                self._wait_for_one(torch.distributed.isend(content, 0))

    def receive(self, rank: int) -> bytes:
        """What a rank has sent."""
        size = torch.zeros((), dtype=torch.int64)
        with self._lost_ranks():
            self._wait_for_one(torch.distributed.irecv(size, rank))
            content = torch.zeros(int(size), dtype=torch.uint8)
            if len(content):
                self._wait_for_one(torch.distributed.irecv(content, rank))
        return content.numpy().tobytes()

    @contextmanager
    def _lost_ranks(self) -> Iterator[None]:
        """Turn the errors of torch.distributed into one that says which rank was lost, and why."""
        try:
            yield
        except RuntimeError as error:
            raise LostRankError(f"Training has ended, since a learner was lost: {self._reason()}") from error

    def _wait(self, work: Any) -> None:
        """Wait for something that all ranks do, but let Python handle signals meanwhile."""
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_SECONDS))
            except RuntimeError:
                if not work.is_completed():  # it only takes longer
                    self.while_waiting()
                    continue
                work.wait()  # raises if it has failed
            return

    def _wait_for_one(self, work: Any) -> None:
        """The same for a message between two ranks: gloo closes their connection if waiting for one times out."""
        errors: list[RuntimeError] = []

        def wait() -> None:
            try:
                work.wait(PATIENCE)  # the group's own timeout, for messages, is still that of its start
            except RuntimeError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(LOOK_SECONDS)
        while waiting.is_alive():
            self.while_waiting()
            waiting.join(LOOK_SECONDS)
        if errors:
            raise errors[0]

    def abort(self) -> None:
        """Give up what is being exchanged: after a rank was lost, it may never end."""
        if torch.distributed.is_initialized():
            torch.distributed.distributed_c10d._abort_process_group()


ALONE = Ranks()
"""A single learner."""


def joined_moments(ranks: Ranks, values: Tensor) -> tuple[Tensor, Tensor, float]:
    """What joins a rank's part of a minibatch with the others'.

    Args:
        ranks: Several.
        values: Of its valid steps, [batch]; perhaps none.

    Returns:
        Mean and standard deviation of all ranks' values, as `Tensor.std` has it, float32; and the weight of this rank's mean in
        the mean over the ranks: its count relative to the others', 1 if all have the same, NaN if nobody has any.
    """
    exact = values.detach().double()
    sums = ranks.sum_(torch.stack([exact.new_tensor(float(len(exact))), exact.sum(), exact.square().sum()]))
    count = sums[0].clamp_min(1.0)
    mean = sums[1] / count
    variance = (sums[2] - count * mean.square()).clamp_min(0.0) / (count - 1.0).clamp_min(1.0)
    total = float(sums[0])
    weight = len(values) * ranks.size / total if total else math.nan
    return mean.float(), variance.sqrt().float(), weight


def normalized(values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Advantages to mean 0 and standard deviation 1 over all ranks' minibatch."""
    return (values - mean) / (std + 1e-8)


def merged_means(ranks: Ranks, seen: Tensor, weights: Tensor) -> Tensor:
    """Means over all ranks' minibatches, from those over this rank's parts and the weights of these: [M, K], [M] → [M, K]."""
    return ranks.mean_(torch.where(weights.unsqueeze(-1) > 0, seen, 0.0) * weights.unsqueeze(-1))
