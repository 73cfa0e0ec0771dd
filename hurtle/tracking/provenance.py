"""The provenance of a run: code, versions, machine, command. Best effort: nothing here ends a run."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import hurtle

PACKAGES = ("torch", "numpy", "numba", "gymnasium", "numba-cuda", "ray")


def provenance() -> dict[str, Any]:
    """Start time, command, code and machine of this process, as JSON-serializable values."""
    return {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": _command(),
        "folder": str(Path.cwd()),
        "git": git_state(),
        "versions": {"hurtle": hurtle.__version__, "python": platform.python_version(), **_versions()},
        "machine": _machine(),
    }


def _command() -> str:
    program = Path(sys.argv[0]).name
    started = ["python", "-m", "hurtle"] if program == "__main__.py" else [program]
    return shlex.join([*started, *sys.argv[1:]])


def git_state() -> dict[str, Any] | None:
    """The commit and branch of the current folder, and whether it has uncommitted changes; None outside a repository."""
    status = _git("status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if status is None:
        return None
    lines = status.splitlines()
    about = dict(line.removeprefix("# branch.").split(" ", 1) for line in lines if line.startswith("# branch."))
    if about["oid"] == "(initial)":
        return None  # no commit yet
    return {"commit": about["oid"], "branch": about["head"], "dirty": any(not line.startswith("#") for line in lines)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError, UnicodeError):  # no git, or it hangs
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def _versions() -> dict[str, str]:
    """Read once: it takes longer than a short run, of which a process may have many."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _machine() -> dict[str, Any]:
    machine: dict[str, Any] = {
        "system": platform.platform(),
        "architecture": platform.machine(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
    }
    torch = sys.modules.get("torch")  # already imported if this process trains
    if torch is not None and torch.cuda.is_available():
        machine["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return machine


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
