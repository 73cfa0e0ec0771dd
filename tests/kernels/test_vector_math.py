"""Vector math: against NumPy and torch in float64, over all the range, and compiled to vector code."""

import re

import numpy as np
import pytest
import torch
from numba import njit

from hurtle.kernels.loader import load_kernels

kernels = load_kernels()
math, TILE = kernels.vector_math, kernels.host.TILE
SAMPLES = 256 * TILE


def looped(function, dtype=np.float32):
    """The function as one of arrays of a multiple of TILE numbers, and the loop that was compiled."""

    @njit(nogil=True, error_model="numpy", fastmath={"contract"})
    def loop(x, y):
        for q in range(TILE):
            y[q] = function(x[q])

    def of_array(x):
        x = np.ascontiguousarray(x, np.float32)
        padded = np.ones(-(-len(x) // TILE) * TILE, np.float32)
        padded[: len(x)] = x
        y = np.empty(len(padded), dtype)
        for i in range(0, len(padded), TILE):
            loop(padded[i : i + TILE], y[i : i + TILE])
        return y[: len(x)]

    return of_array, loop


def uniform(low, high):
    return np.random.default_rng(0).uniform(low, high, SAMPLES).astype(np.float32)


@pytest.fixture(scope="module")
def exp():
    return looped(math.exp)


@pytest.fixture(scope="module")
def log():
    return looped(math.log)


def test_exp(exp):
    x = uniform(-87, 88)
    np.testing.assert_allclose(exp[0](x), np.exp(x.astype(np.float64)), rtol=2e-7)
    x = uniform(-1, 1)
    np.testing.assert_allclose(exp[0](x), np.exp(x.astype(np.float64)), rtol=2e-7)


def test_exp_at_the_ends_of_its_range(exp):
    x = np.array([0.0, -0.0, 88.72, 88.73, 1e4, np.inf, -87.4, -103.0, -104.5, -1e4, -np.inf, np.nan], np.float32)
    with np.errstate(over="ignore"):
        expected = np.exp(x.astype(np.float64))
    expected = np.where(expected > np.finfo(np.float32).max, np.inf, expected)
    np.testing.assert_allclose(exp[0](x), expected, rtol=2e-7, atol=1.5e-45)


@pytest.mark.parametrize("numbers", [np.exp(uniform(-87, 88)), uniform(0.5, 2.0), 1.0 + uniform(-1e-3, 1e-3), uniform(0, 1)])
def test_log(log, numbers):
    numbers = numbers.astype(np.float32)
    np.testing.assert_allclose(log[0](numbers), np.log(numbers.astype(np.float64)), rtol=3e-7)


def test_log_at_the_ends_of_its_range(log):
    x = np.array([1.0, 0.0, -0.0, 1e-45, 1e-40, 2.0**-126, 3.4e38, np.inf, -1e-45, -1.0, -np.inf, np.nan], np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        np.testing.assert_allclose(log[0](x), np.log(x.astype(np.float64)), rtol=3e-7)


def test_log1p():
    log1p, _ = looped(math.log1p)
    for x in (uniform(-1, 0), uniform(-1e-4, 1e-4), uniform(0, 100), -np.exp(uniform(-80, 0))):
        x = np.maximum(x, np.float32(-1.0 + 2.0**-24))
        np.testing.assert_allclose(log1p(x), np.log1p(x.astype(np.float64)), rtol=3e-7)
    assert log1p(np.array([-1.0, 0.0, -2.0, np.nan]))[:2].tolist() == [-np.inf, 0.0]
    assert np.isnan(log1p(np.array([-2.0, np.nan]))).all()


@pytest.mark.parametrize("name", ["softplus", "sigmoid"])
def test_as_torch_has_them(name):
    function, _ = looped(getattr(math, name))
    x = np.concatenate([uniform(-30, 30), uniform(-1, 1), np.array([0, 1e4, -1e4, 3e38, -3e38, np.nan], np.float32)])
    of_torch = torch.nn.functional.softplus if name == "softplus" else torch.sigmoid
    np.testing.assert_allclose(function(x), of_torch(torch.from_numpy(x).double()).numpy(), rtol=1e-6, atol=1e-8)


def test_cos_turn():
    function, _ = looped(math.cos_turn)
    turns = np.random.default_rng(0).integers(0, 2**24, SAMPLES) / 2**24
    np.testing.assert_allclose(function(turns), np.cos(2.0 * np.pi * turns), rtol=1e-6, atol=3e-7)
    assert function(np.array([0.0, 0.25, 0.5, 0.75])) == pytest.approx([1, 0, -1, 0], abs=2e-7)


@pytest.mark.parametrize("name", ["lgamma", "digamma", "trigamma"])
def test_of_gammas(name):
    function, _ = looped(getattr(math, name), np.float64)
    x = 1.0 + np.exp(uniform(-12, 12)).astype(np.float32)
    x = np.concatenate([x, np.array([1.0, 2.0, 1.4616321, 10.0, 3e4], np.float32)])
    of_torch = {"lgamma": torch.lgamma, "digamma": torch.digamma, "trigamma": lambda x: torch.polygamma(1, x)}[name]
    np.testing.assert_allclose(function(x), of_torch(torch.from_numpy(x).double()).numpy(), rtol=1e-6, atol=1e-13)
    assert np.isnan(function(np.array([np.nan]))).all()


def test_trigamma_by_known_sums():
    trigamma, _ = looped(math.trigamma, np.float64)
    assert trigamma(np.array([1.0, 2.0])) == pytest.approx([np.pi**2 / 6, np.pi**2 / 6 - 1.0], rel=1e-12)


@pytest.mark.parametrize("name", ["exp", "log"])
def test_loops_become_vector_code(name, request):
    function, loop = request.getfixturevalue(name)
    function(np.ones(TILE))
    (code,) = loop.inspect_llvm().values()
    assert re.search(r"= f(mul|add)[a-z ]* <\d+ x float>", code)
