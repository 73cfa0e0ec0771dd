"""What every benchmark shares: timing in turns, the machine and versions a figure belongs to, and the result files."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hurtle.native.threads import free_cores

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Job = Callable[[], int]
"""Does some work and returns how many steps that was."""


_PACKAGES = (
    *("numpy", "numba", "numba-cuda", "torch", "gymnasium", "envpool", "rlox", "minatar"),
    *("stable-baselines3", "sb3-contrib", "ale-py", "mujoco", "ray", "pufferlib", "pettingzoo", "mpe2", "cloudpickle", "cpprb"),
)


def rates(jobs: dict[str, Job], seconds: float = 0.3, rounds: int = 9) -> dict[str, float]:
    """Steps per second of each job: the best of several rounds in which the jobs take turns.

    Taking turns lets a noisy neighbour hit all alike; the best round is the one it disturbed least.
    """
    for job in jobs.values():
        job()
    seen: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            steps, began = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - began) < seconds:
                steps += job()
            seen[name].append(steps / elapsed)
    return {name: max(values) for name, values in seen.items()}


def machine() -> dict[str, Any]:
    """The machine, the versions and the commit that a figure belongs to."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_name(),
        "cores": free_cores(),
        **_gpu(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "commit": os.environ.get("HURTLE_COMMIT") or _commit(),
    }


def save(name: str, results: dict[str, Any], text: str) -> None:
    """Write `results` as JSON and `text` as Markdown, both with the machine they were measured on."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    about = machine()
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": about, **results}, indent=1) + "\n")
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items())
    where = f"{about['cpu']}, {about['cores']} cores, {about['system']}; Python {about['python']}, {versions}; "
    (RESULTS / f"{name}.md").write_text(f"{text}\n\n{where}commit {about['commit']}.\n")
    print(f"\nsaved benchmarks/results/{name}.md and .json")


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, its columns aligned."""
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]
    lines = [
        [cell.ljust(w) if k == 0 else cell.rjust(w) for k, (cell, w) in enumerate(zip(r, widths, strict=True))] for r in rows
    ]
    rule = ["-" * w if k == 0 else "-" * (w - 1) + ":" for k, w in enumerate(widths)]
    head = [cell.ljust(w) if k == 0 else cell.rjust(w) for k, (cell, w) in enumerate(zip(header, widths, strict=True))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *lines])


def short(rate: float) -> str:
    """A rate for people: 1.23M, 45.6K, 17.8B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if rate >= size:
            return f"{rate / size:.3g}{unit}"
    return f"{rate:.3g}"


def _gpu() -> dict[str, str]:
    """The GPU, if torch was imported and sees one."""
    torch = sys.modules.get("torch")
    return {"gpu": torch.cuda.get_device_name()} if torch is not None and torch.cuda.is_available() else {}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    lscpu = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout if info.exists() else ""
    named = [line.split(":", 1)[1].strip() for line in lscpu.splitlines() if line.startswith("Model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _commit() -> str:
    """The commit, with a plus sign if the package differs from it. Copies without history set HURTLE_COMMIT."""
    return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "--", "hurtle") else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
