"""The example of a backend, and the fusing that it and others use."""

import numpy as np
import pytest
from backend_helpers import assert_fused_is_single, assert_only_fails, open_backend, request, run_as_server

from hurtle.errors import HurtleError
from hurtle.serving.backends.base import TensorSpec
from hurtle.serving.backends.fusing import infer_fused

RNG = np.random.default_rng(0)


@pytest.fixture
def affine(tmp_path):
    path = tmp_path / "affine.json"
    path.write_text('{"scale": 2.0, "shift": 1.0, "size": 3}')
    return open_backend(path)


def rows(count, size=3):
    return RNG.standard_normal((count, size)).astype(np.float32)


def test_it_multiplies_and_adds(affine):
    assert affine.metadata().inputs == (TensorSpec("x", "FP32", (-1, 3)),)
    x = rows(4)
    np.testing.assert_array_equal(affine.infer(request(x=x))["y"], 2 * x + 1)
    np.testing.assert_array_equal(affine.infer(affine.warm_up_request())["y"], [[1, 1, 1]])


def test_fused_calls_give_the_same_bits(affine):
    assert_fused_is_single(affine, [request(x=rows(n)) for n in (1, 3, 0, 64)])


def test_a_bad_request_fails_alone(affine):
    requests = [request(x=rows(1)), request(x=np.full((1, 3), np.nan, np.float32)), request(x=rows(2))]
    assert_only_fails(run_as_server(affine, requests), bad=1, words="'x'")


@pytest.mark.parametrize("text", ["", "[]", '{"scale": 1}', '{"scale": "a", "shift": 1, "size": 3}'])
def test_a_file_that_is_something_else_is_refused(tmp_path, text):
    path = tmp_path / "affine.json"
    path.write_text(text)
    with pytest.raises(HurtleError, match="must be like"):
        open_backend(path)


def both(inputs):
    """a + b, where both are there."""
    both.calls += 1
    return {"sum": inputs["a"] + inputs.get("b", np.float32(0))}


both.calls = 0


def test_other_inputs_and_other_sizes_are_fused_in_groups():
    requests = [
        request(a=rows(2), b=rows(2)),
        request(a=rows(1)),
        request(b=rows(3), a=rows(3)),  # in another order
        request(a=rows(2, 5), b=rows(2, 5)),
        request(a=rows(4)),
    ]
    both.calls = 0
    found = infer_fused(requests, both)
    assert both.calls == 3
    for result, each in zip(found, requests, strict=True):
        np.testing.assert_array_equal(result["sum"], both(each.inputs)["sum"])


def test_requests_that_are_uneven_in_themselves_are_never_mixed_up():
    uneven = [request(a=rows(1), b=rows(3)), request(a=rows(3), b=rows(1))]  # together: 4 and 4 rows
    found = infer_fused([*uneven, request(a=rows(2), b=rows(2))], both)
    for result, each in zip(found, uneven, strict=False):
        np.testing.assert_array_equal(result["sum"], each.inputs["a"] + each.inputs["b"])


def test_a_model_that_gives_other_rows_is_not_split():
    with pytest.raises(HurtleError, match=r"'y' of shape .* for 3 rows"):
        infer_fused([request(a=rows(1)), request(a=rows(2))], lambda inputs: {"y": inputs["a"][:2]})
