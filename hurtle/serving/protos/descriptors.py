"""Compiles the .proto files here into the committed descriptors.binpb: `python -m hurtle.serving.protos.descriptors`.

.proto text → protoc (grpcio-tools, a development dependency) → FileDescriptorSet. Run it after changing a .proto file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
FILES = {
    "model_config.proto": "model_config.proto",
    "inference.proto": "inference.proto",
    "grpc/health/v1/health.proto": "health.proto",
    "grpc/reflection/v1/reflection.proto": "reflection.proto",
    "grpc/reflection/v1alpha/reflection.proto": "reflection.proto",
}
"""By the name under which reflection lists a file, the file here."""


def compile_protos() -> bytes:
    """The serialized FileDescriptorSet of the .proto files; v1alpha of reflection is v1 in another package."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for path, source in FILES.items():
            text = (FOLDER / source).read_text(encoding="utf-8")
            if "/v1alpha/" in path:
                text = text.replace("package grpc.reflection.v1;", "package grpc.reflection.v1alpha;")
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        out = root / "descriptors.binpb"
        if protoc.main(["protoc", f"-I{root}", f"--descriptor_set_out={out}", *FILES]):
            raise SystemExit("protoc failed")
        return out.read_bytes()


if __name__ == "__main__":
    (FOLDER / "descriptors.binpb").write_bytes(compile_protos())
