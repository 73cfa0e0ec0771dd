"""`train_ranks`: a run with one learner in this process, or with several that train together, here and in other processes.

task → processes of our own (`--num-learners`) or torchrun's → a torch.distributed group → `Trainer` on rank 0, `Follower` on
the others. A learner that fails or is killed ends the run on all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from hurtle.errors import HurtleError, LostRankError
from hurtle.kernels.ranks import ALONE, PATIENCE, Ranks
from hurtle.native.threads import free_cores
from hurtle.runners.assembly import check_several
from hurtle.runners.follower import Follower
from hurtle.runners.run import Run
from hurtle.runners.settings import Settings
from hurtle.runners.torchrun import World, launched
from hurtle.runners.trainer import Callback, Trainer
from hurtle.tracking.dashboard import Display
from hurtle.tracking.run_folder import RunFolder

MEETING = timedelta(minutes=5)
"""How long ranks that are ready wait for each other to join the group."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Task:
    """What is to be trained.

    Attributes:
        settings: The settings of the run.
        env: What to train on: a name, a class, or a callable.
        module: The user's own policy module or class, or None.
        algorithm: The name of the algorithm that the user has given, and so allowed to run.
        folder: The folder of the run that is continued, if one is.
        file: Its checkpoint.
        saved: What that holds.
    """

    settings: Settings
    env: Any
    module: Any = None
    algorithm: str | None = None
    folder: Path | None = None
    file: Path | None = None
    saved: dict[str, Any] | None = None


def train_ranks(task: Task, callbacks: Sequence[Callback], display: Display, until: int | None) -> Run:
    """Train until the end, with as many learners as the settings say, or as torchrun has started."""
    world, wanted = launched(), task.settings.train.num_learners
    if world.size > 1 and wanted not in (1, world.size) and task.saved is None:
        raise HurtleError(f"torchrun has started {world.size} learners: leave out num_learners={wanted}.")
    size = world.size if world.size > 1 else wanted
    if size == 1:
        return _trainer(task, callbacks, display, ALONE).run(until)
    task = replace(task, settings=replace(task.settings, train=replace(task.settings.train, num_learners=size)))
    check_several(task.settings.train, task.env)  # before processes are started
    here, cores = world.local_size if world.size > 1 else size, free_cores()
    if here > cores and not world.rank:
        display.message(f"warning: {here} learners share {cores} core{'s' if cores > 1 else ''}")
    if world.size > 1:
        with sharing_cores(world.local_size), joined(task.settings, world.rank, size) as ranks:
            if ranks.leads:
                return _trainer(task, callbacks, display, ranks).run(until)
            return follow(task, ranks)
    from hurtle.runners.rank_processes import RankProcesses

    with sharing_cores(size), RankProcesses(task, size) as processes:
        display.status(f"starting {size} learners")
        processes.wait_until_ready()
        with joined(task.settings, 0, size, processes.store, processes.reason, processes.kill) as ranks:
            trainer = _trainer(task, callbacks, display, ranks)
            processes.watch(trainer.lose)
            return trainer.run(until)


def _trainer(task: Task, callbacks: Sequence[Callback], display: Display, ranks: Ranks) -> Trainer:
    folder = None if task.folder is None else RunFolder(task.folder)
    return Trainer(task.settings, task.env, task.module, callbacks, folder, task.saved, display=display, ranks=ranks)


def follow(task: Task, ranks: Ranks) -> Run:
    """Take part as a rank that is not the first."""
    source = task.file or Path()
    return Follower(task.settings, task.env, task.module, task.saved, source, ranks).run()


@contextmanager
def joined(
    settings: Settings,
    rank: int,
    size: int,
    store: Path | None = None,
    reason: Callable[[], str] | None = None,
    kill: Callable[[], None] | None = None,
) -> Iterator[Ranks]:
    """A group of torch.distributed, which is left again at the end.

    Args:
        settings: Whose device decides what carries tensors.
        rank: The number of this process.
        size: How many there are.
        store: The file in which processes of this machine find each other, and listen on the loopback device alone; None: as
            the variables of torchrun say.
        reason: Tells why another rank was lost.
        kill: Ends the other ranks after an error; leaving the group would wait for one that hangs.

    Raises:
        LostRankError: The others did not join.
    """
    world = launched() if store is None else World(rank, size, rank, size)
    if torch.distributed.is_initialized():
        raise HurtleError(
            "This process has already joined a group of torch.distributed, and learners need one of their own: leave it with "
            "torch.distributed.destroy_process_group() first."
        )
    backend = _backend(settings.train.device, world.local_size)
    ranks = Ranks(rank, size, backend, reason, world.local_rank)
    hook = sys.excepthook  # which torch replaces
    try:
        try:
            _join("cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo", rank, size, store)
        except RuntimeError as error:
            why = str(error) if reason is None else reason()
            raise LostRankError(f"Training could not start, since the learners did not all meet: {why}") from error
        yield ranks
    except BaseException:
        if kill is not None:
            kill()
        else:
            ranks.abort()
        raise
    finally:
        sys.excepthook = hook
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _join(backend: str, rank: int, size: int, store: Path | None) -> None:
    """Join the group: that of this file, or of torchrun's variables."""
    given = {name: os.environ.get(name) for name in INTERFACES}
    if store is not None:
        os.environ.update(dict.fromkeys(INTERFACES, LOOPBACK))
    try:
        shared = None if store is None else _file_store(store, size)
        torch.distributed.init_process_group(backend, store=shared, rank=rank, world_size=size, timeout=MEETING)
    finally:
        for name, value in given.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    torch.distributed.distributed_c10d._set_pg_timeout(PATIENCE)
    torch.distributed.distributed_c10d._get_default_store().set_timeout(PATIENCE)  # GPUs meet there later


def _file_store(path: Path, size: int) -> Any:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    return FileStore(str(path), size)


def _backend(device: str, size: int) -> str:
    """NCCL where each rank of this machine has a GPU of its own, which it needs; else gloo, through the host's memory."""
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    has_enough = on_gpu and torch.distributed.is_nccl_available() and torch.cuda.device_count() >= size
    return "nccl" if has_enough else "gloo"


@contextmanager
def sharing_cores(size: int) -> Iterator[None]:
    """Give each of so many processes its share of the cores."""
    before = os.environ.get("HURTLE_CORES")
    os.environ["HURTLE_CORES"] = str(max(1, free_cores() // size))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("HURTLE_CORES", None)
        else:
            os.environ["HURTLE_CORES"] = before
