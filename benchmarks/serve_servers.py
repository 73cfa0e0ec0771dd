"""The servers of `serve.py`: Hurtle's, grpcio's, mlserver and mosec, each started on one core, paused while another runs.

mlserver and mosec have virtual environments of their own under build/serve-peers, created on first use: mlserver pins
protobuf below what Hurtle needs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from record import ROOT

PEERS = ROOT / "build" / "serve-peers"
SCRIPTS = Path(__file__).resolve().parent / "serve_peers"
PACKAGES = {"mlserver": ("mlserver==1.7.1", "onnxruntime"), "mosec": ("mosec==0.9.8", "onnxruntime", "numpy")}
MOSEC_BATCH = 32
START_TIMEOUT = 90.0


@dataclass
class Running:
    """A running server, in a session of its own."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    http_port: int
    grpc_port: int | None = None
    paused: bool = field(default=False)

    def pause(self) -> None:
        """Stop it while others are measured; except mosec, which exits when it wakes up, and costs little when idle."""
        if not self.paused and not self.name.startswith("mosec"):
            os.killpg(self.process.pid, signal.SIGSTOP)
            self.paused = True

    def resume(self) -> None:
        """Let it run."""
        if self.paused:
            os.killpg(self.process.pid, signal.SIGCONT)
            self.paused = False

    def stop(self) -> None:
        """End it, and all that it has started."""
        self.resume()
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait_until(self, answers: Callable[[], object]) -> None:
        """Wait until `answers` raises nothing."""
        end = time.monotonic() + START_TIMEOUT
        while True:
            try:
                answers()
                return
            except Exception as error:
                if self.process.poll() is not None or time.monotonic() > end:
                    tail = self.log.read_text(errors="replace")[-2000:]
                    raise SystemExit(f"{self.name} does not serve: {type(error).__name__}: {error}\n{tail}") from None
            time.sleep(0.3)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def peer_python(name: str) -> Path:
    """The Python of a peer's own environment, which is created if missing."""
    home, python = PEERS / name, PEERS / name / "bin" / "python"
    ready = home / ".ready"
    wanted = " ".join(PACKAGES[name])
    if not ready.exists() or ready.read_text() != wanted:
        print(f"installing {wanted} into {home.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *PACKAGES[name]], check=True)
        ready.write_text(wanted)
    return python


def peer_versions(name: str) -> dict[str, str]:
    """The versions of the packages that matter."""
    code = (
        "import importlib.metadata as m, json, sys\nfound = {}\n"
        "for name in sys.argv[1:]:\n    found[name] = m.version(name)\nprint(json.dumps(found))"
    )
    names = [package.split("==")[0] for package in PACKAGES[name]]
    done = subprocess.run([str(peer_python(name)), "-c", code, *names], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def start_hurtle(name: str, model: Path, executor: str, core: int, folder: Path, *flags: str) -> Running:
    """`hurtle serve`; the model is named after the file."""
    http, grpc = free_port(), free_port()
    command = [sys.executable, "-m", "hurtle", "serve", str(model), "--executor", executor]
    command += ["--http-port", str(http), "--grpc-port", str(grpc), *flags]
    return _start(name, command, core, folder, {}, http, grpc)


def start_grpcio(name: str, kind: str, model: Path, core: int, folder: Path, *flags: str) -> Running:
    """Hurtle's serving core in batch mode behind one of grpcio's servers; see serve_peers/grpcio_servers.py."""
    port = free_port()
    command = [sys.executable, str(SCRIPTS / "grpcio_servers.py"), kind, str(model), "--port", str(port), *flags]
    return _start(name, command, core, folder, {"PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}, 0, port)


def start_mlserver(model: Path, core: int, folder: Path) -> Running:
    """One process of mlserver (parallel_workers 0), without metrics and request logs."""
    http, grpc = free_port(), free_port()
    home = folder / "mlserver"
    home.mkdir()
    (home / "mlserver_model.py").write_text((SCRIPTS / "mlserver_model.py").read_text())
    about = {"name": model.stem, "implementation": "mlserver_model.OnnxModel", "parameters": {"uri": str(model)}}
    (home / "model-settings.json").write_text(json.dumps(about))
    settings = {"debug": False, "host": "127.0.0.1", "http_port": http, "grpc_port": grpc}
    settings |= {"metrics_endpoint": None, "parallel_workers": 0}
    (home / "settings.json").write_text(json.dumps(settings))
    command = [str(peer_python("mlserver").parent / "mlserver"), "start", str(home)]
    return _start("mlserver", command, core, folder, {"PYTHONPATH": str(home)}, http, grpc)


def start_mosec(model: Path, batch: int, core: int, folder: Path) -> Running:
    """One worker of mosec; its Rust front end and the worker share the core."""
    http = free_port()
    command = [str(peer_python("mosec")), str(SCRIPTS / "mosec_server.py"), "--address", "127.0.0.1", "--port", str(http)]
    name = "mosec" if batch == 1 else "mosec, batched"
    return _start(name, command, core, folder, {"MODEL": str(model), "BATCH": str(batch)}, http)


def _start(
    name: str, command: list[str], core: int, folder: Path, variables: dict[str, str], http: int, grpc: int | None = None
) -> Running:
    log = folder / f"{name.replace(' ', '-').replace(',', '')}.log"
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            env={**os.environ, **threads, **variables},
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Running(name, process, log, http, grpc)
