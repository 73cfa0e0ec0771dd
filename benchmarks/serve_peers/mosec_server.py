"""The benchmark's MLP behind mosec: float32 bytes in, float32 bytes out. Runs in mosec's own venv.

MODEL=mlp.onnx BATCH=32 python mosec_server.py --port 8000    # BATCH=1: no batching
"""

from __future__ import annotations

import os

import numpy as np
import onnxruntime
from mosec import Server, Worker

WIDTH = 4
BATCH = int(os.environ.get("BATCH", "1"))
WAIT_MS = 1


class Mlp(Worker):
    """Rows of four numbers → rows of two logits; requests of a batch are one call."""

    def __init__(self) -> None:
        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(os.environ["MODEL"], options, providers=["CPUExecutionProvider"])

    def deserialize(self, data: bytes) -> np.ndarray:
        """No copy."""
        return np.frombuffer(data, np.float32).reshape(-1, WIDTH)

    def serialize(self, data: np.ndarray) -> bytes:
        """Row-major."""
        return data.tobytes()

    def forward(self, data):  # type: ignore[no-untyped-def]
        """One array, or a list of them when batching."""
        if BATCH == 1:
            return self._session.run(None, {"obs": data})[0]
        logits = self._session.run(None, {"obs": np.concatenate(data)})[0]
        return np.split(logits, np.cumsum([len(part) for part in data])[:-1])


if __name__ == "__main__":
    server = Server()
    if BATCH == 1:
        server.append_worker(Mlp)
    else:
        server.append_worker(Mlp, max_batch_size=BATCH, max_wait_time=WAIT_MS)
    server.run()
