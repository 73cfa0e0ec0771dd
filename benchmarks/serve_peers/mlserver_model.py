"""The benchmark's MLP for mlserver: ONNX Runtime on one thread, called by a model class of ours. Runs in mlserver's own venv.

`mlserver start FOLDER` with this file and a model-settings.json that names it and the .onnx file; see benchmarks/serve.py.
"""

from __future__ import annotations

import numpy as np
import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class OnnxModel(MLModel):
    """One call of ONNX Runtime a request."""

    async def load(self) -> bool:
        """Open the file that the settings name."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        path = self._settings.parameters.uri
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """The logits."""
        obs = NumpyCodec.decode_input(payload.inputs[0])
        (logits,) = self._session.run(None, {"obs": np.asarray(obs, np.float32)})
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("logits", logits)])
