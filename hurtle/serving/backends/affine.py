"""`AffineBackend`: y = scale · x + shift. The smallest complete backend: read it before you write your own.

Serve it:  hurtle serve affine.json    where affine.json is {"scale": 2.0, "shift": 1.0, "size": 3}
Yours:     hurtle serve model.bin --backend my_package.my_module:MyBackend
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hurtle.errors import HurtleError, ServingError
from hurtle.serving.backends.base import Backend, Metadata, TensorSpec
from hurtle.serving.backends.fusing import infer_fused
from hurtle.serving.messages import InferRequest, Outputs


class AffineBackend(Backend):
    """Computes scale · x + shift."""

    def __init__(self, path: Path, parameters: dict[str, Any]):
        """Load the model. An error raised here is reported as the reason the model is not served."""
        super().__init__(path, parameters)
        try:
            model = json.loads(path.read_bytes())
            self._scale, self._shift = np.float32(model["scale"]), np.float32(model["shift"])
            self._size = int(model["size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HurtleError(f"{path} must be like {{'scale': 2.0, 'shift': 1.0, 'size': 3}}: {error!r}.") from None

    def metadata(self) -> Metadata:
        """The inputs and outputs. −1 is any size: here the batch, along which requests are joined."""
        x, y = (TensorSpec(name, "FP32", (-1, self._size)) for name in ("x", "y"))
        return Metadata(inputs=(x,), outputs=(y,), platform="hurtle_affine")

    def infer(self, request: InferRequest) -> Outputs:
        """Run one request. The server has checked its inputs against the metadata. They are read-only: make new arrays."""
        return self._run(request.inputs)

    def infer_batch(self, requests: Sequence[InferRequest]) -> Sequence[Outputs | ServingError]:
        """Run several requests in one call. Without this method the server would call `infer` for each."""
        return infer_fused(requests, self._run)

    def _run(self, inputs: dict[str, np.ndarray]) -> Outputs:
        x = inputs["x"]  # (B, size)
        if not np.isfinite(x).all():  # an error that only the model can detect; the client gets it
            raise ServingError("invalid_argument", "Tensor 'x': expected finite numbers, got NaN or infinity.")
        return {"y": self._scale * x + self._shift}
