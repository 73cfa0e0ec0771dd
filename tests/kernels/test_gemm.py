"""Matrix products: every kind against NumPy in float64, odd sizes, NaN, bounds, and the vectors of other machines."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from kernel_calls import load_calls

from hurtle.kernels.loader import load_kernels

gemm = load_kernels().gemm
SHAPES = [(64, 64, 64), (64, 4, 64), (64, 64, 2), (37, 19, 50), (3, 5, 7), (1, 1, 1), (12, 64, 33), (9, 130, 100)]


CALLS = {
    name: getattr(load_calls(), f"call_{name}")
    for name in ("linear", "linear_tanh", "linear_relu", "times_tanh_slope", "times_relu_slope", "add_transposed")
}


def random(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def in_panels(columns):
    width, stride = gemm.panel_width(columns), gemm.padded(columns)
    return width, stride, stride // width


def linear(kind, a, b, bias):
    """finish(a @ b + bias) through the kernels; a poisoned margin before and after the result must stay as it is."""
    rows, depth = a.shape
    width, stride, panels = in_panels(b.shape[1])
    biases = np.zeros(stride, np.float32)
    biases[: len(bias)] = bias
    out = np.full(16 + rows * stride + 16, -7.0, np.float32)
    weights = gemm.panels_of(b)
    b = (weights, 0, width, depth * width)
    CALLS[kind]((out, 16, stride, width), (a.ravel(), 0, depth), b, (biases, 0, 0), rows, depth, panels, width)
    assert (out[:16] == -7.0).all()
    assert (out[-16:] == -7.0).all()
    return out[16:-16].reshape(rows, stride)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("finish", ["none", "tanh", "relu"])
def test_layers_equal_the_reference(finish, shape):
    rows, depth, columns = shape
    rng = np.random.default_rng(0)
    a, b, bias = random(rng, rows, depth), random(rng, depth, columns) / np.float32(np.sqrt(depth)), random(rng, columns)
    found = linear({"none": "linear", "tanh": "linear_tanh", "relu": "linear_relu"}[finish], a, b, bias)
    np.testing.assert_allclose(found[:, :columns], gemm.product_reference(bias, a, b, finish), rtol=1e-5, atol=2e-6)
    assert (found[:, columns:] == 0).all()  # padding stays padding


@pytest.mark.parametrize("columns", range(1, gemm.FEW + 1))
@pytest.mark.parametrize(("rows", "panels"), [(64, 2), (37, 1), (1, 3), (8, 8)])
def test_few_columns_equal_the_reference(rows, columns, panels):
    depth, margin = panels * gemm.PANEL, 5
    rng = np.random.default_rng(0)
    a, b, bias = random(rng, rows, depth), random(rng, depth, columns) / np.float32(np.sqrt(depth)), random(rng, columns)
    transposed = b.reshape(panels, gemm.PANEL, columns).transpose(0, 2, 1).ravel()
    out = np.full((rows + 2, columns + margin), -7.0, np.float32)
    c, left, right = (
        (out.ravel(), columns + margin, columns + margin),
        (a.ravel(), 0, depth),
        (transposed, 0, columns * gemm.PANEL),
    )
    load_calls().call_few_columns(c, left, right, (bias, 0), rows, columns, panels)
    expected = gemm.product_reference(bias, a, b, "none")
    np.testing.assert_allclose(out[1:-1, :columns], expected, rtol=1e-5, atol=2e-6)
    assert (out[[0, -1]] == -7.0).all()
    assert (out[:, columns:] == -7.0).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("finish", ["tanh_slope", "relu_slope"])
def test_gradients_of_inputs_equal_the_reference(finish, shape):
    rows, depth, columns = shape
    rng = np.random.default_rng(1)
    a, b, h = (
        random(rng, rows, depth),
        random(rng, depth, columns) / np.float32(np.sqrt(depth)),
        np.tanh(random(rng, rows, columns)),
    )
    width, stride, panels = in_panels(columns)
    activations = np.zeros((rows, stride), np.float32)
    activations[:, :columns] = h
    out = np.full((rows, stride), np.nan, np.float32)
    c, right = (out.ravel(), 0, stride, width), (gemm.panels_of(b), 0, width, depth * width)
    CALLS[f"times_{finish}"](c, (a.ravel(), 0, depth), right, (activations.ravel(), 0, stride), rows, depth, panels, width)
    np.testing.assert_allclose(out[:, :columns], gemm.product_reference(0.0, a, b, finish, h), rtol=1e-5, atol=2e-6)
    assert (out[:, columns:] == 0).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_weights_are_added(shape):
    samples, inputs, outputs = shape
    rng = np.random.default_rng(2)
    a, slopes, before = random(rng, samples, inputs), random(rng, samples, outputs), random(rng, inputs, outputs)
    width, stride, panels = in_panels(outputs)
    right = np.zeros((samples, stride), np.float32)
    right[:, :outputs] = slopes
    total = gemm.panels_of(before)
    c, b, nothing = (total, 0, width, inputs * width), (right.ravel(), 0, stride, width), (right.ravel(), 0, 0)
    CALLS["add_transposed"](c, (a.ravel(), 0, inputs), b, nothing, inputs, samples, panels, width)
    expected = gemm.panels_of(gemm.product_reference(before, a.T, slopes, "none").astype(np.float32))
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_whatever_rows_are_beside_it():
    rng = np.random.default_rng(3)
    a, b, bias = random(rng, 64, 17), random(rng, 17, 40), random(rng, 40)
    whole = linear("linear_tanh", a, b, bias)
    for first, last in ((0, 1), (3, 8), (5, 18), (63, 64)):
        part = linear("linear_tanh", a[first:last].copy(), b, bias)
        np.testing.assert_array_equal(part, whole[first:last])


def test_tanh_is_good_to_a_few_units_in_the_last_place():
    x = np.concatenate([np.linspace(-12, 12, 40_001), np.logspace(-30, 2, 1000), [0.0, np.inf, -np.inf]]).astype(np.float32)
    ones = np.ones((1, 1), np.float32)
    found = linear("linear_tanh", x[:, None].copy(), ones, np.zeros(1, np.float32))[:, 0]
    np.testing.assert_allclose(found, np.tanh(x.astype(np.float64)), rtol=6e-7, atol=1e-35)


@pytest.mark.parametrize("kind", ["linear", "linear_tanh", "linear_relu"])
def test_nan_comes_through(kind):
    a = np.ones((20, 3), np.float32)
    a[7, 1] = np.nan
    found = linear(kind, a, np.ones((3, 5), np.float32), np.zeros(5, np.float32))
    assert np.isnan(found[7, :5]).all()
    assert np.isfinite(np.delete(found, 7, 0)).all()


def test_a_slope_at_nan_keeps_the_gradient():
    h = np.full((1, gemm.WIDTH), np.nan, np.float32)
    for kind in ("times_tanh_slope", "times_relu_slope"):
        out = np.zeros((1, gemm.WIDTH), np.float32)
        one = np.ones(gemm.WIDTH, np.float32)
        w = gemm.WIDTH
        CALLS[kind]((out.ravel(), 0, w, w), (one, 0, 1), (one, 0, w, w), (h.ravel(), 0, w), 1, 1, 1, w)
        assert (out != 0).all()  # NaN, or the gradient: never silently nothing


def run_here(code, **env):
    """Run code that uses this file's helpers in another process."""
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n" + textwrap.dedent(code)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def check_width(width, more="", **env):
    """The kernels of a width, and what `more` checks of them in the same process."""
    code = f"""
        import test_gemm as t
        assert t.gemm.WIDTH == {width}
        for shape in t.SHAPES[2:5]:
            t.test_layers_equal_the_reference("tanh", shape)
            t.test_gradients_of_weights_are_added(shape)
        t.test_a_row_has_the_same_bits_whatever_rows_are_beside_it()
        import numpy as np, test_sparse as s
        for dtype in (np.float32, np.uint8):
            s.test_lists_hold_the_non_zeros(dtype, 77)
        s.test_a_full_list_is_one_and_a_longer_one_is_none()
        s.test_a_layer_has_the_bits_of_the_dense_one((33, 77, 40), True)
        s.test_gradients_of_weights_have_the_bits_of_the_dense_ones((33, 77, 40))
    """
    run_here(textwrap.dedent(code) + textwrap.dedent(more), HURTLE_VECTOR_WIDTH=width, **env)


@pytest.mark.slow
@pytest.mark.parametrize("width", ["4", "8"])
def test_the_kernels_of_narrower_machines_are_right_too(width):
    check_width(width)


@pytest.mark.parametrize("width", ["4", pytest.param("", marks=pytest.mark.slow)])
def test_the_checked_kernels_are_right_and_refuse_to_leave_an_array(width):
    """Those of a narrower machine: one process, and one more width to compile, for both."""
    code = """
        import numpy as np, pytest
        import test_gemm as t
        a, b, bias = np.ones((5, 3), np.float32), np.ones((3, 2), np.float32), np.zeros(2, np.float32)
        t.linear("linear", a, b, bias)
        w = t.gemm.WIDTH
        short = np.zeros(5 * w - 1, np.float32)
        weights = t.gemm.panels_of(b)
        x = np.zeros(w, np.float32)
        with pytest.raises(IndexError, match="out of bounds of its result"):
            t.CALLS["linear"]((short, 0, w, w), (a.ravel(), 0, 3), (weights, 0, w, 3 * w), (x, 0, 0), 5, 3, 1, w)
        with pytest.raises(IndexError, match="out of bounds of its left factor"):
            c = (np.zeros(5 * w, np.float32), 0, w, w)
            t.CALLS["linear"](c, (a.ravel(), 1, 3), (weights, 0, w, 3 * w), (x, 0, 0), 5, 3, 1, w)
    """
    if width:
        check_width(width, code, HURTLE_CHECK_KERNELS="1")
    else:
        run_here(code, HURTLE_CHECK_KERNELS="1")


@pytest.mark.slow  # it compiles everything again
def test_checked_kernels_collect_and_learn_as_the_others_do():
    code = """
        import json, tempfile, hurtle
        how = {"total_steps": 128, "num_envs": 4, "num_steps": 32, "minibatch_size": 64, "eval_episodes": 1}
        with tempfile.TemporaryDirectory() as runs:
            run = hurtle.train("cartpole", gear="native", preset=False, progress="quiet", trackers=(), runs=runs, **how)
            weights = hurtle.load(run).module.state_dict()
        print(json.dumps([number for part in weights.values() for number in part.flatten().tolist()]))
    """
    checked, usual = (json.loads(run_here(code, HURTLE_CHECK_KERNELS=check)) for check in "10")
    np.testing.assert_allclose(checked, usual, rtol=1e-4, atol=1e-5)
