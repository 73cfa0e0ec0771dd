"""`AffineBackend`: y = scale · x + shift. The smallest backend that does everything: read it before you write your own.

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
    """Multiplies and adds."""

    def __init__(self, path: Path, parameters: dict[str, Any]):
        """Load the model. Whatever is raised here becomes the reason why it is not served."""
        super().__init__(path, parameters)
        try:
            model = json.loads(path.read_bytes())
            self._scale, self._shift = np.float32(model["scale"]), np.float32(model["shift"])
            self._size = int(model["size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HurtleError(f"{path} must be like {{'scale': 2.0, 'shift': 1.0, 'size': 3}}: {error!r}.") from None

    def metadata(self) -> Metadata:
        """What goes in and comes out. −1: any size; here it is the batch, which requests are joined along."""
        x, y = (TensorSpec(name, "FP32", (-1, self._size)) for name in ("x", "y"))
        return Metadata(inputs=(x,), outputs=(y,), platform="hurtle_affine")

    def infer(self, request: InferRequest) -> Outputs:
        """One request. Its inputs are as the metadata says: the server has looked. They are read-only: make new arrays."""
        return self._run(request.inputs)

    def infer_batch(self, requests: Sequence[InferRequest]) -> Sequence[Outputs | ServingError]:
        """Several requests in one call. Without this method the server would call `infer` for each."""
        return infer_fused(requests, self._run)

    def _run(self, inputs: dict[str, np.ndarray]) -> Outputs:
        x = inputs["x"]  # (B, size)
        if not np.isfinite(x).all():  # what only the model can know to be wrong; the client is told
            raise ServingError("invalid_argument", "Tensor 'x': expected finite numbers, got NaN or infinity.")
        return {"y": self._scale * x + self._shift}
