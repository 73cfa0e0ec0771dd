"""Trials on the nodes of a Ray cluster: a process there for each, and its run folder brought back when it ends.

task → Ray actor → `Worker` on that node → metrics as they come, then the folder → here. A lost node fails its trials only.
"""

from __future__ import annotations

import io
import logging
import os
import platform
import shutil
import socket
import tarfile
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import hurtle
from hurtle.errors import HurtleError
from hurtle.experiments.run_processes import RunProcesses, Task, Worker

LOOK_SECONDS = 0.2


class TrialHost:
    """What runs on a node: one process that trains trial after trial, in a folder that goes with it."""

    def __init__(self, cores: int):
        self._folder = Path(tempfile.mkdtemp(prefix="hurtle-trials-"))
        self._cores = cores
        self._worker: Worker | None = None
        self._task: Task | None = None

    def about(self) -> tuple[str, str, str]:
        """The versions of Hurtle and Python there, and the node's name."""
        return hurtle.__version__, platform.python_version(), platform.node()

    def start(self, task: Task) -> None:
        """Begin a trial."""
        here = {**task.words["settings"], "runs": str(self._folder)}
        self._task = replace(task, folder=self._folder / task.folder.name, words={**task.words, "settings": here})
        if self._worker is None or self._worker.is_gone:
            if self._worker is not None:
                self._worker.kill()  # what it has started may still run
            self._worker = Worker(self._task, self._cores)
        else:
            self._worker.give(self._task)

    def look(self, offset: int) -> tuple[bytes, str | None]:
        """The metrics from a place on, and how the trial ended: what went wrong, or an empty string; None while it runs."""
        assert self._worker is not None
        assert self._task is not None
        ended = self._worker.poll()
        metrics = b""
        with suppress(OSError), (self._task.folder / "metrics.jsonl").open("rb") as file:
            file.seek(offset)
            metrics = file.read()
        return metrics, None if ended is None else ended[1]

    def take(self) -> tuple[bytes, bytes]:
        """The run folder as a tar file, and the log; both are removed here."""
        assert self._task is not None
        packed = io.BytesIO()
        if self._task.folder.is_dir():
            with tarfile.open(fileobj=packed, mode="w") as tar:
                tar.add(self._task.folder, arcname=self._task.folder.name)
        log = self._task.log.read_bytes() if self._task.log.is_file() else b""
        shutil.rmtree(self._task.folder, ignore_errors=True)
        self._task.log.unlink(missing_ok=True)
        return packed.getvalue(), log

    def stop(self) -> None:
        """Let the trial save and end."""
        if self._worker is not None:
            self._worker.ask_to_stop()

    def close(self) -> None:
        """End the process, and remove the folder."""
        if self._worker is not None:
            self._worker.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


class RayWorker:
    """Like `run_processes.Worker`, with its process on a node of the cluster.

    Args:
        ray: The module.
        host: The actor, a `TrialHost`.
        task: The first one.
    """

    def __init__(self, ray: Any, host: Any, task: Task):
        self._ray, self._host = ray, host
        self.task: Task | None = None
        self.device = ""
        self.is_gone = False
        self._closing: Any = None
        self._about = host.about.remote()
        self.give(task)

    def give(self, task: Task) -> None:
        """Give it something to do."""
        self.task, self._size, self._failure = task, 0, ""
        task.log.touch()
        self._taken: Any = None
        self._started = self._host.start.remote(task)
        self._answer = self._host.look.remote(0)
        self._look_at = 0.0

    def poll(self) -> tuple[Task, str] | None:
        """See `Worker.poll`."""
        task, failed = self.task, self._ray.exceptions.RayError
        if task is None or monotonic() < self._look_at:
            return None
        try:
            if self._about is not None and self._is_ready(self._about):
                _check_versions(self._ray.get(self._about))
                self._about = None
            if self._taken is not None:
                return self._bring_back(task) if self._is_ready(self._taken) else None
            if not self._is_ready(self._answer):
                return None
            self._ray.get(self._started)  # an error of the start, not one that follows from it
            metrics, ended = self._ray.get(self._answer)
        except failed as error:
            self.task, self.is_gone = None, True
            return task, f"its node or process was lost: {str(error).splitlines()[0]}"
        if metrics:
            task.folder.mkdir(exist_ok=True)
            with (task.folder / "metrics.jsonl").open("ab") as file:
                file.write(metrics)
            self._size += len(metrics)
        if ended is None:
            self._look_at = monotonic() + LOOK_SECONDS
            self._answer = self._host.look.remote(self._size)
        else:
            self._failure, self._taken = ended, self._host.take.remote()
        return None

    def ask_to_stop(self) -> None:
        """Let the run save and end."""
        self._host.stop.remote()

    def dismiss(self) -> None:
        """Nothing more is to come."""
        self.kill()

    def kill(self) -> None:
        """End the process and its actor."""
        self.close_soon()
        with suppress(Exception):  # the node is gone already
            self._ray.get(self._closing, timeout=10)
        with suppress(Exception):
            self._ray.kill(self._host)
        self.is_gone = True

    def close_soon(self) -> None:
        """Begin to end it, without waiting."""
        if self._closing is None:
            self._closing = self._host.close.remote()

    def memory(self) -> int:
        """None of this machine's."""
        return 0

    def _bring_back(self, task: Task) -> tuple[Task, str]:
        packed, log = self._ray.get(self._taken)
        shutil.rmtree(task.folder, ignore_errors=True)
        if packed:
            options: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on
            with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
                tar.extractall(task.folder.parent, **options)
        task.log.write_bytes(log)
        self.task = None
        return task, self._failure

    def _is_ready(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0)[0])


class RayProcesses(RunProcesses):
    """Trials on a cluster, as many at a time as it has CPUs; a process is told to connect, and leaves at the end.

    Args:
        address: Of the cluster; "auto": the one that Ray finds; "local": one on this machine alone, for as long as needed.
        at_once: Trials at a time; 0: one for each CPU, or each GPU if they use one.
        on_gpu: Whether a trial takes a GPU.
    """

    def __init__(self, address: str, at_once: int, on_gpu: bool):
        try:
            import ray
        except ModuleNotFoundError:
            raise HurtleError('Trials on a cluster need Ray: pip install "hurtle[ray]".') from None
        _check_address(address)
        self._ray = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            try:
                ray.init(
                    address=None if address == "local" else address, include_dashboard=False if address == "local" else None,
                    log_to_driver=False, logging_level=logging.ERROR, num_cpus=None if address != "local" else os.cpu_count(),
                )  # fmt: skip
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise HurtleError(f"No Ray cluster at {address!r}: {error}") from None
        has = ray.cluster_resources()
        count = at_once or max(1, int(has.get("GPU" if on_gpu else "CPU", 0)))
        host = ray.remote(num_cpus=1, num_gpus=int(on_gpu))(TrialHost)
        super().__init__([], count, start=lambda task, cores, device: RayWorker(ray, host.remote(1), task))
        self.is_local = False

    def __exit__(self, *error: object) -> None:
        """End what is left, all at once, and leave the cluster."""
        for worker in self._workers:
            if isinstance(worker, RayWorker):
                worker.close_soon()
        super().__exit__(*error)
        if self._is_ours:
            self._ray.shutdown()


def ray_processes(address: str, at_once: int, device: str) -> RayProcesses:
    """Processes on the cluster for trials on that device."""
    return RayProcesses(address, at_once, on_gpu=device.startswith("cuda"))


def _check_address(address: str) -> None:
    """Raise at once if nobody answers there; Ray would try for a minute."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise HurtleError(f"No Ray cluster answers at {address!r}: {error}.") from None


def _check_versions(found: tuple[str, str, str]) -> None:
    version, python, node = found
    ours = hurtle.__version__, platform.python_version()
    if version != ours[0] or python.rpartition(".")[0] != ours[1].rpartition(".")[0]:
        raise HurtleError(
            f"The node {node} has Hurtle {version} on Python {python}, this machine {ours[0]} on {ours[1]}: install the same."
        )
