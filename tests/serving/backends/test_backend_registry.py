"""Which backend runs which file, and classes of the user's own."""

import sys

import pytest

from hurtle.errors import HurtleError, UnknownNameError
from hurtle.serving.backends.base import Backend
from hurtle.serving.backends.registry import BACKENDS, backend_for, can_serve, find_model

OWN = "from hurtle.serving.backends.base import Backend\nclass Mine(Backend): pass\nclass Other: pass\n"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("policy.onnx", "OnnxBackend"),
        ("policy.pt2", "TorchExportBackend"),
        ("net.pt", "TorchScriptBackend"),
        ("net.ts", "TorchScriptBackend"),
        ("net.torchscript", "TorchScriptBackend"),
        ("affine.json", "AffineBackend"),
        ("ads.dlrm.npz", "DLRMBackend"),
    ],
)
def test_the_ending_of_a_file_says_what_runs_it(file, name):
    assert backend_for(f"somewhere/{file}", {}).__name__ == name
    assert can_serve(file)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_name_is_a_backend(name):
    assert issubclass(backend_for("model.bin", {"backend": name}), Backend)


def test_plain_policies_run_natively_when_asked():
    assert backend_for("policy.onnx", {"runtime": "native"}).__name__ == "NativeMLPBackend"


def test_unknown_names_and_endings_suggest_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean torchscript"):
        backend_for("net.pt", {"backend": "torchscrip"})
    with pytest.raises(HurtleError, match=r"No backend runs model\.onx\. Did you mean \.onnx"):
        backend_for("model.onx", {})
    assert not can_serve("model.json")


def test_a_users_own_class_is_found_by_module_and_by_file(tmp_path, monkeypatch):
    file = tmp_path / "own_backend.py"
    file.write_text(OWN)
    assert backend_for("x.bin", {"backend": f"{file}:Mine"}).__name__ == "Mine"
    monkeypatch.syspath_prepend(tmp_path)
    assert backend_for("x.bin", {"backend": "own_backend:Mine"}).__name__ == "Mine"
    with pytest.raises(HurtleError, match=r"own_backend:Other must be a subclass of .*Backend"):
        backend_for("x.bin", {"backend": "own_backend:Other"})
    with pytest.raises(UnknownNameError, match=r"has no 'Min'\. Did you mean Mine"):
        backend_for("x.bin", {"backend": "own_backend:Min"})
    with pytest.raises(HurtleError, match="Cannot import 'no_such_module'"):
        backend_for("x.bin", {"backend": "no_such_module:Mine"})
    sys.modules.pop("own_backend", None)


def test_a_folder_stands_for_the_one_model_in_it(tmp_path):
    with pytest.raises(HurtleError, match="must hold one model"):
        find_model(tmp_path)
    (tmp_path / "a.onnx").touch()
    (tmp_path / "notes.txt").touch()
    assert find_model(tmp_path) == tmp_path / "a.onnx"
    (tmp_path / "b.pt2").touch()
    with pytest.raises(HurtleError, match=r"got a\.onnx, b\.pt2"):
        backend_for(tmp_path, {})
    (tmp_path / "model.dlrm.npz").touch()
    assert find_model(tmp_path) == tmp_path / "model.dlrm.npz"
