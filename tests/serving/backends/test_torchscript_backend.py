"""TorchScript archives: what is served of them, what must be written beside them, and pickles, which are refused."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import torch
from backend_helpers import (
    assert_fused_is_single,
    assert_only_fails,
    assert_phases_are_measured,
    open_backend,
    request,
    run_as_server,
    unaligned,
)

from hurtle.errors import HurtleError, ServingError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
RNG = np.random.default_rng(0)
X = {"name": "x", "datatype": "FP32", "shape": [-1, 3]}


def rows(count, size=3):
    return RNG.standard_normal((count, size)).astype(np.float32)


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x)


class ByName(torch.nn.Module):
    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": features["a"] + features["b"], "long": features["a"].long()}


class ByList(torch.nn.Module):
    def forward(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [parts[0] - parts[1], parts[1]]


class Choice(NamedTuple):
    action: torch.Tensor
    value: torch.Tensor


class Acting(torch.nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, times: int = 2) -> Choice:
        if mask is not None:
            x = x * mask
        x *= times  # in place: what the client sent must not change
        return Choice(x, x.sum(1))


class Picky(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x < 0).any()):
            raise ValueError("negative")
        return x.mean(0, keepdim=True)


def save(path, module, **lists):
    torch.jit.script(module).save(path)
    if lists:
        path.with_suffix(".json").write_text(json.dumps(lists))
    return path


def test_a_traced_module_knows_its_inputs_and_a_run_shows_its_outputs(tmp_path):
    module = Linear()
    torch.jit.trace(module, torch.zeros(2, 3)).save(tmp_path / "net.pt")
    backend = open_backend(tmp_path / "net.pt")
    found = backend.metadata()
    assert [(spec.name, spec.datatype, spec.shape) for spec in found.inputs] == [("x", "FP32", (-1, 3))]
    assert [(spec.name, spec.datatype, spec.shape) for spec in found.outputs] == [("output", "FP32", (-1, 2))]
    assert found.batched
    x = rows(5)
    expected = module(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(backend.infer(request(x=unaligned(x)))["output"], expected, rtol=1e-6, atol=1e-6)
    assert_fused_is_single(backend, [request(x=rows(n)) for n in (1, 4, 0, 2)], tolerance=1e-6)
    assert backend.infer(backend.warm_up_request())["output"].shape == (1, 2)
    assert_phases_are_measured(backend, [request(x=rows(n)) for n in (3, 2)])


def test_a_scripted_module_needs_its_inputs_written_down_and_the_error_shows_how(tmp_path):
    path = save(tmp_path / "net.ts", Acting())
    with pytest.raises(HurtleError, match=r'write net\.json beside it, such as \{"inputs": \[\{"name": "x"'):
        open_backend(path)
    (tmp_path / "model.json").write_text(json.dumps({"inputs": [X]}))
    assert [spec.name for spec in open_backend(path).metadata().outputs] == ["action", "value"]
    assert open_backend(path, inputs=json.dumps([{**X, "name": "INPUT__0"}])).metadata().inputs[0].name == "INPUT__0"


def test_arguments_that_are_optional_may_be_left_out_and_inputs_are_not_written_to(tmp_path):
    path = save(
        tmp_path / "net.pt",
        Acting(),
        inputs=[X, {**X, "name": "mask"}],
        outputs=[{**X, "name": "a"}, {"name": "v", "datatype": "FP32", "shape": [-1]}],
    )
    backend = open_backend(path)
    assert backend.metadata().optional == {"mask"}
    x, mask = rows(2), np.float32([[0, 1, 1], [1, 0, 1]])
    x.setflags(write=False)
    before = x.copy()
    np.testing.assert_array_equal(backend.infer(request(x=x))["a"], x * 2)
    np.testing.assert_allclose(backend.infer(request(x=x, mask=mask))["v"], (2 * x * mask).sum(1), rtol=1e-6)
    np.testing.assert_array_equal(x, before)
    found = backend.infer_batch([request(x=x), request(x=x, mask=mask), request(x=x)])
    np.testing.assert_array_equal(found[1]["a"], x * mask * 2)
    np.testing.assert_array_equal(found[2]["a"], x * 2)


def test_dicts_and_lists_go_in_and_come_out(tmp_path):
    inputs = [{**X, "name": "a"}, {**X, "name": "b"}]
    backend = open_backend(save(tmp_path / "dict.pt", ByName(), inputs=inputs))
    assert [(spec.name, spec.datatype) for spec in backend.metadata().outputs] == [("sum", "FP32"), ("long", "INT64")]
    a, b = rows(2), rows(2)
    np.testing.assert_array_equal(backend.infer(request(b=b, a=a))["sum"], a + b)
    assert_fused_is_single(backend, [request(a=rows(n), b=rows(n)) for n in (1, 3)])
    listed = open_backend(save(tmp_path / "list.pt", ByList(), inputs=inputs))
    np.testing.assert_array_equal(listed.infer(request(b=b, a=a))["output_0"], a - b)


def test_a_model_that_is_no_batch_is_run_one_by_one_and_fails_with_its_last_words(tmp_path):
    backend = open_backend(save(tmp_path / "net.pt", Picky(), inputs=[X]))
    assert backend.metadata().outputs[0].shape == (1, 3)
    assert not backend.metadata().batched
    requests = [request(x=np.abs(rows(2))), request(x=-np.abs(rows(1))), request(x=np.abs(rows(3)))]
    results = run_as_server(backend, requests)
    assert_only_fails(results, bad=1, reason="internal", words="negative")
    assert "Traceback" not in str(results[1])
    np.testing.assert_allclose(results[2]["output"], requests[2].inputs["x"].mean(0, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ({"inputs": [{**X, "datatype": "FLOAT"}]}, "inputs must be like"),
        ({"inputs": [{**X, "shape": [-2]}]}, "inputs must be like"),
        ({"inputs": []}, "inputs must be like"),
        ({"inputs": [X, X]}, "distinct names"),
        ({"input": [X]}, "Did you mean inputs"),
        ({"inputs": [X], "batched": 3}, "batched must be true or false"),
        ({"inputs": [X], "optional": "x"}, "optional must be a list"),
        ({"inputs": [X], "state": [["a"]]}, "state must be like"),
        ({"inputs": [{**X, "datatype": "BYTES"}]}, "no string tensors"),
        ({"inputs": [X, {**X, "name": "y"}, {**X, "name": "z"}]}, "forward takes x"),
        ({"inputs": [{**X, "shape": [-1, 7]}]}, "specify them too"),
    ],
)
def test_what_is_written_down_wrong_is_explained(tmp_path, lists, words):
    with pytest.raises(HurtleError, match=words):
        open_backend(save(tmp_path / "net.pt", Linear(), **lists))


class Bomb:
    def __reduce__(self):
        return (exit, ("it was unpickled",))


def test_pickles_are_refused_and_never_loaded(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise AssertionError("it was unpickled")

    monkeypatch.setattr(pickle, "Unpickler", fail)
    monkeypatch.setattr(torch, "load", fail)
    path = tmp_path / "net.pt"
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        torch.save({"bomb": Bomb()}, path, **options)
        with pytest.raises(HurtleError, match="not a TorchScript archive"):
            open_backend(path)
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(HurtleError, match="not a TorchScript archive"):
        open_backend(path)
    with pytest.raises(HurtleError, match="Cannot read"):
        open_backend(tmp_path / "gone.pt")


def test_lanes_may_load_and_run_at_the_same_time(tmp_path):
    path = save(tmp_path / "net.pt", Linear(), inputs=[X])
    x = rows(3)
    expected = open_backend(path).infer(request(x=x))["output"]

    def lane(_):
        backend = open_backend(path)
        return [backend.infer(request(x=x))["output"] for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lane, range(4), timeout=60):
            np.testing.assert_array_equal(found, [expected] * 20)


def test_a_sizes_error_of_torch_comes_back_as_one_line(tmp_path):
    backend = open_backend(save(tmp_path / "net.pt", Linear(), inputs=[X]))
    with pytest.raises(ServingError, match=r"The model failed: .*shapes cannot be multiplied") as caught:
        backend.infer(request(x=rows(2, 5)))
    assert "\n" not in str(caught.value)


def test_libraries_of_operators_are_loaded_first(tmp_path, monkeypatch):
    library = tmp_path / "ops.so"
    with pytest.raises(HurtleError, match=r"no file .*ops\.so"):
        open_backend(save(tmp_path / "net.pt", Linear(), inputs=[X]), load_library=[str(library)])
    library.touch()
    with pytest.raises(HurtleError, match="cannot be loaded"):
        open_backend(tmp_path / "net.pt", load_library=str(library))
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    open_backend(tmp_path / "net.pt", load_library=f"{library}, {library}")
    assert loaded == [str(library)] * 2
