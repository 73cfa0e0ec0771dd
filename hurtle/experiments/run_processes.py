"""`RunProcesses`: trains runs in other processes, as many at a time as the machine's cores and memory allow.

tasks → processes, within limits of time and memory → what failed, and why. A crash ends one run and no other. A child that
outlives the parent saves and ends.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from hurtle.buffers.storage import available_memory, gib
from hurtle.native.threads import free_cores

INSIDE = "HURTLE_RUN"
"""Set in a process that trains runs for another one."""
DONE = b"done"
"""What a worker prints when it has done a task."""
REFUSED = "\0"
"""Begins the message of a run that ended with an error of Hurtle's, such as settings that do not fit."""
ENDED_BADLY, INTERRUPTED = 2, 130
"""Exit codes of a worker: an error that its log explains; a signal before there was anything to save."""
COMMAND = (sys.executable, "-m", "hurtle.experiments.run_worker")
MEMORY = 700_000_000
"""Bytes that a run is expected to take until one is seen to take more: torch, and little else."""
LAST_LINES = 15
"""Of a log, in the report of a crash."""
STARTUP = 60.0
"""Seconds that a process may take, beyond the limit of its task, until there is a run folder."""
PATIENCE = 600.0
"""Seconds to save and end for a run whose parent is gone, at most: large replay buffers take a while to write."""
GRACE = 20.0
"""Seconds that a trial has to save and end when it is asked to stop."""


@dataclass(frozen=True)
class Task:
    """What one process does.

    Attributes:
        number: Tells it from the others: the seed, or the number of a trial.
        folder: Its run folder.
        words: The arguments of `run_worker.train_run`.
        seconds: It is killed after so many, counted from when it has a run folder: importing torch takes a while.
        memory: It is killed if it and the processes that it starts take more bytes.
        grace: Seconds to save and end when it is asked to stop; then it is killed.
    """

    number: int
    folder: Path
    words: dict[str, Any]
    seconds: float = math.inf
    memory: float = math.inf
    grace: float = math.inf

    @property
    def log(self) -> Path:
        """The file with what the process prints; removed if that is nothing."""
        return self.folder.with_name(f"{self.folder.name}.log")


class TrainingProcess(Protocol):
    """What trains one task after another: `Worker`, or one on another machine.

    Attributes:
        task: What it does now; None if it has nothing to do.
        device: The GPU that it sees; an empty string: all.
    """

    task: Task | None
    device: str

    @property
    def is_gone(self) -> bool:
        """Whether it has ended."""

    def give(self, task: Task) -> None:
        """Give it something to do."""

    def poll(self) -> tuple[Task, str] | None:
        """The task that has just ended, and what went wrong or an empty string. Enforces the limits."""

    def ask_to_stop(self) -> None:
        """Let the run save and end."""

    def dismiss(self) -> None:
        """Nothing more is to come: it ends by itself."""

    def kill(self) -> None:
        """End it at once."""

    def memory(self) -> int:
        """Bytes of this machine that it takes."""


class Worker:
    """A process that trains one run after another. It is new, and knows nothing, whenever one before it has failed.

    Attributes:
        task: What it does now; None if it has nothing to do.
    """

    def __init__(self, task: Task, cores: int, device: str = ""):
        visible = {"CUDA_VISIBLE_DEVICES": device} if device else {}
        with task.log.open("ab") as log:
            self.process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,  # a line for each task that is done
                stderr=log,
                # Torch's own variable is left alone: the QR that draws the first weights rounds differently with other threads.
                env={**os.environ, **visible, "HURTLE_CORES": str(cores), INSIDE: "yes"},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops its children
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self.device = device
        self.task: Task | None = None
        self._looked = 0.0
        self.give(task)

    def give(self, task: Task) -> None:
        """Give it something to do."""
        self.task, self._began, self._asked, self._too_much = task, monotonic() + STARTUP, math.inf, ""
        task.log.touch()
        with suppress(BrokenPipeError):  # it has crashed already
            told = {"log": str(task.log.absolute()), "patience": min(task.grace, PATIENCE), **task.words}
            self._stdin.write(json.dumps(told).encode() + b"\n")
            self._stdin.flush()

    def poll(self) -> tuple[Task, str] | None:
        """The task that has just ended, and what went wrong or an empty string. Enforces the limits."""
        code, told = self.process.poll(), self._stdout.read() or b""  # in this order: nothing is told after the end
        task = self.task
        if task is None:
            return None
        if code is None and DONE not in told:
            self._enforce(task)
            return None
        self.task = None
        return task, "" if DONE in told or not code else self._too_much or what_happened(code, task.log)

    def ask_to_stop(self) -> None:
        """Let the run save and end."""
        if self._asked == math.inf:
            self._asked = monotonic()
            self.process.send_signal(signal.SIGINT)

    def dismiss(self) -> None:
        """Nothing more is to come: it ends by itself."""
        with suppress(BrokenPipeError):
            self._stdin.close()

    def kill(self) -> None:
        """End it at once, and the processes that it has started."""
        self._kill()
        self.process.wait()
        self.dismiss()
        self._stdout.close()

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, as of the last poll."""
        return self.process.returncode is not None

    def memory(self) -> int:
        """Bytes that it and the processes that it has started take."""
        return session_bytes(self.process.pid)

    def _enforce(self, task: Task) -> None:
        now = monotonic()
        if now < self._began and task.folder.is_dir():
            self._began = now
        if now - self._began > task.seconds:
            self._too_much = f"it ran longer than its limit of {task.seconds:.3g} s"
        elif task.memory < math.inf and now - self._looked > 0.2:
            self._looked, size = now, self.memory()
            if size > task.memory:
                self._too_much = f"it took {gib(size)} of memory, more than its limit of {gib(int(task.memory))}"
        if self._too_much or now - self._asked > task.grace:
            self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class RunProcesses:
    """Runs tasks, at most `at_once` at a time. Use it as a context manager: no process outlives it.

    Args:
        tasks: What to do, in this order; more can be added later.
        at_once: The most processes at a time; each gets its share of the cores.
        afresh: Each task gets a new process, so that the one before has given back the GPU's memory. Else processes that have
            done a task take another: importing torch takes seconds.
        devices: GPUs, of which each process sees one; none: all see what this process sees.
        start: Starts a process, from its first task, its cores and its GPU.

    Attributes:
        failed: What went wrong, by number.
        expects_more: Processes without a task wait for one that is yet to be added.
        is_local: Whether they take memory of this machine.
        refused: The numbers of those that ended with an error of Hurtle's before they trained.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        at_once: int,
        afresh: bool = False,
        devices: Sequence[str] = (),
        start: Callable[[Task, int, str], TrainingProcess] = Worker,
    ):
        self._waiting, self._at_once, self._afresh = list(tasks), max(1, at_once), afresh
        self._devices, self._start = list(devices), start
        self._share = max(1, free_cores() // self._at_once)
        self._workers: list[TrainingProcess] = []
        self._most_memory, self._looked = MEMORY, 0.0
        self._refused, self._worked = 0, False  # settings do not fit: how often; and whether they ever did
        self._is_stopping = False
        self._ended: list[Task] = []
        self.failed: dict[int, str] = {}
        self.refused: set[int] = set()
        self.expects_more, self.is_local = False, True

    @property
    def running(self) -> dict[int, Task]:
        """The tasks under way, by number."""
        return {worker.task.number: worker.task for worker in self._workers if worker.task is not None}

    @property
    def waiting(self) -> set[int]:
        """The numbers of those that have not been started."""
        return {task.number for task in self._waiting}

    @property
    def free(self) -> int:
        """How many more could be under way."""
        return self._at_once - len(self.running) - len(self._waiting)

    def add(self, task: Task) -> None:
        """One more to do."""
        self._waiting.append(task)

    def take_ended(self) -> list[Task]:
        """Those that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def poll(self) -> bool:
        """Notice what has ended, start what may; returns whether anything is left to do."""
        for worker in list(self._workers):
            if (ended := worker.poll()) is not None:
                self._note(*ended)
            if worker.is_gone:
                self._workers.remove(worker)
                worker.kill()
        hopeless = self._refused >= self._at_once and not self._worked and not self.expects_more
        if hopeless and not any(map(has_begun, self.running.values())):
            self._waiting.clear()
        for worker in [worker for worker in self._workers if worker.task is None]:
            if self._waiting and not self._afresh:
                worker.give(self._waiting.pop(0))
            elif self._afresh or not self.expects_more or self._is_stopping:
                worker.dismiss()
        while self._waiting and len(self._workers) < self._at_once and self._fits():
            self._workers.append(self._start(self._waiting.pop(0), self._share, self._free_device()))
        return bool(self.running or self._waiting)

    def stop(self, number: int | None = None) -> None:
        """Ask all to save and end, and start no more; or ask one of them."""
        if number is None:
            self._waiting.clear()
            self._is_stopping = True
        for worker in self._workers:
            if number is None or (worker.task is not None and worker.task.number == number):
                worker.ask_to_stop()

    def __enter__(self) -> RunProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        """Kill what is left."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _note(self, task: Task, failure: str) -> None:
        self._ended.append(task)
        if failure.startswith(REFUSED) and not has_begun(task):
            self._refused += 1
            self.refused.add(task.number)
        else:
            self._worked = True
        if failure and not self._is_stopping:
            self.failed[task.number] = failure.removeprefix(REFUSED)
        elif not failure and not task.log.stat().st_size:
            task.log.unlink()

    def _free_device(self) -> str:
        """The GPU with the fewest processes."""
        used = [worker.device for worker in self._workers]
        return min(self._devices, key=used.count, default="")

    def _fits(self) -> bool:
        """Whether there is memory for one more, and for what those under way may still take."""
        if not self._workers or not self.is_local:
            return True
        if monotonic() - self._looked < 0.5:
            return False  # once is enough
        taken = [worker.memory() for worker in self._workers]
        self._most_memory = max(self._most_memory, *taken)
        to_come = sum(max(0, self._most_memory - size) for size in taken)
        if available_memory() >= to_come + self._most_memory:
            return True
        self._looked = monotonic()
        return False


def share_machine(device: str, tasks: Iterable[Task], parallel: int | None, most: int | None = None) -> RunProcesses:
    """Processes for runs on a device: one per core; one after the other on a GPU; on several GPUs one each.

    Args:
        device: Of the runs, as `hurtle.train` takes it.
        tasks: What to do.
        parallel: The most at a time; None: as many as fit.
        most: How many there will be in all; None: unknown.
    """
    on_gpu = is_on_gpu(device)
    several = gpus() if on_gpu and ":" not in device else []
    at_once = parallel or (max(1, len(several)) if on_gpu else free_cores())
    return RunProcesses(tasks, min(at_once, most or at_once), afresh=on_gpu, devices=several if len(several) > 1 else ())


def is_on_gpu(device: str) -> bool:
    """Whether runs on this device take a GPU; found without torch."""
    return device.startswith("cuda") or (device == "auto" and bool(gpus()))


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; found without torch."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        given = [name.strip() for name in named.split(",") if name.strip()]
        return list(takewhile(lambda name: not name.startswith("-"), given))  # CUDA ignores what follows -1
    return [str(n) for n in range(sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*")))]


def has_begun(task: Task) -> bool:
    """Whether its run has trained at all."""
    file = task.folder / "metrics.jsonl"
    return file.is_file() and file.stat().st_size > 0


def what_happened(code: int, log: Path) -> str:
    """The error that the process printed, or the end of its log."""
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    _, said, error = text.rpartition("hurtle: error: ")
    if said:
        return (REFUSED if code == ENDED_BADLY else "") + error
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    hint = ", perhaps because the memory was full" if code == -signal.SIGKILL else ""
    lines = text.splitlines()[-LAST_LINES:]
    return "\n".join([f"{how}{hint}", *lines])


def session_bytes(leader: int) -> int:
    """Bytes that a process and those that it has started take, without what the latter share with others."""
    try:
        folders = [path for path in Path("/proc").iterdir() if path.name.isdecimal()]
    except OSError:
        return MEMORY
    total = 0
    for path in folders:
        with suppress(OSError, IndexError, ValueError):  # it has just ended
            session = int((path / "stat").read_text().rpartition(")")[2].split()[3])
            if session == leader:
                resident, shared = map(int, (path / "statm").read_text().split()[1:3])
                total += resident if path.name == str(leader) else resident - shared
    return total * os.sysconf("SC_PAGE_SIZE")
