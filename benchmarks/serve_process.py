"""A server in a separate process for the fuzz and soak runs: started, watched (memory, files, log) and stopped.

Serves the backends of tests/serving/conformance_models.py, whose answers are functions of the request.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from record import ROOT

READY_SECONDS = 60.0


class ServerProcess:
    """`with ServerProcess(folder, [...], {...}) as server: server.http_port`.

    Args:
        folder: Folder for its configuration and log.
        models: The models, as on the command line.
        options: Options of the server.
        overrides: Options of single models, by name.
    """

    def __init__(self, folder: Path, models: list[str], options: dict[str, Any], overrides: dict[str, dict[str, Any]]):
        config, self._log = folder / "serve.toml", folder / "serve.log"
        lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
        for name, own in overrides.items():
            lines += [f"[model.{name}]", *(f"{key} = {_toml(value)}" for key, value in own.items())]
        config.write_text("\n".join(lines) + "\n")
        command = [
            sys.executable,
            "-m",
            "hurtle",
            "serve",
            *models,
            "--config",
            str(config),
            "--trust",
            "--http-port",
            "0",
            "--grpc-port",
            "0",
        ]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'serving'}"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def __enter__(self) -> ServerProcess:
        end = time.monotonic() + READY_SECONDS
        while "\nready" not in self.log():
            if self._process.poll() is not None or time.monotonic() > end:
                self._process.kill()
                raise RuntimeError(f"the server did not start:\n{self.log()}")
            time.sleep(0.05)
        self.http_port, self.grpc_port = map(int, re.findall(r"127\.0\.0\.1:(\d+)", self.log()))
        self._watched = psutil.Process(self._process.pid)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self, seconds: float = 40.0) -> int:
        """End it with SIGTERM; returns its exit code (-9: it did not end by itself)."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        return self._process.returncode

    def log(self) -> str:
        """Its whole log."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def complaints(self) -> list[str]:
        """Errors in its log: the line before each, and the last line of its traceback."""
        found, lines = [], self.log().splitlines()
        for at, line in enumerate(lines):
            if re.search(r"Traceback|Exception|exception was never|Fatal", line):
                error = next((text for text in lines[at + 1 :] if not text.startswith(" ")), "")
                found.append(" / ".join(filter(None, (*lines[max(at - 1, 0) : at + 1], error))))
        return found

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def rss_mib(self) -> float:
        """Memory in use."""
        return self._watched.memory_info().rss / 2**20

    @property
    def files(self) -> int:
        """Open files and sockets."""
        return self._watched.num_fds()

    @property
    def threads(self) -> int:
        """Number of threads."""
        return self._watched.num_threads()


def serving_versions() -> str:
    """Versions of the packages that the server uses."""
    names = ("uvloop", "httptools", "hpack", "orjson", "protobuf", "ml_dtypes", "grpcio")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {json.dumps(part)}" for key, part in value.items()) + "}"
    return json.dumps(value)
