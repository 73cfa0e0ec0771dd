"""The CUDA kernels of rows and columns in Numba's simulator, in one process: against the CPU's rows and the references."""

import json

import numpy as np
import pytest
from test_device_rows import kernel_cases, worst_differences
from test_gae import random_columns
from test_vtrace import log_ratios_of

from hurtle.kernels.gae import gae_reference
from hurtle.kernels.vtrace import vtrace_reference

f4 = np.float32
SIMULATED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import test_simulated as simulated
print(json.dumps([simulated.rows(), simulated.gae(), simulated.vtrace()]))
"""


def rows():
    from hurtle.kernels.cuda import rows as cuda_rows

    cuda_rows.BLOCK_THREADS = 32  # each is a thread of Python
    return worst_differences(lambda name, count, *given: cuda_rows.launch(getattr(cuda_rows, name), count, 0, *given), rows=45)


def gae():
    from hurtle.kernels.cuda.columns import gae_kernel

    worst = []
    for steps, columns, masked in [(1, 1, False), (7, 5, False), (35, 5, True), (16, 3, False), (4, 9, True)]:
        arrays = random_columns(steps, columns, seed=columns)
        valid = np.random.default_rng(0).random((steps, columns)) < 0.7
        out, returns = np.full((2, steps, columns), np.nan, f4)
        kernel = gae_kernel(masked, True)
        kernel[(columns + 3) // 4, 4](*arrays, f4(0.99), f4(0.99 * 0.95), valid, out, returns)
        expected = gae_reference(*arrays, 0.99, 0.95, valid if masked else None)
        worst.append(float(np.abs(out - expected).max()))
        worst.append(float(np.abs(returns - (expected + arrays[1])).max()))
    return worst


def vtrace():
    from hurtle.kernels.cuda.columns import vtrace_kernel

    worst = []
    for steps, columns, masked in [(1, 1, False), (7, 5, False), (7, 5, True), (4, 9, True)]:
        arrays = (log_ratios_of((steps, columns)), *random_columns(steps, columns, seed=columns))
        valid = np.random.default_rng(0).random((steps, columns)) < 0.7
        out = np.full((2, steps, columns), np.nan, f4)
        factors = f4(0.99), f4(0.99 * 0.95), f4(1.5), f4(0.8)
        vtrace_kernel[(columns + 3) // 4, 4](*arrays, *factors, valid, masked, *out)
        expected = vtrace_reference(*arrays, 0.99, 0.95, 1.5, 0.8, valid if masked else None)
        worst.append(float(np.abs(out - expected).max()))
    return worst


@pytest.fixture(scope="module")
def differences(run_simulated, request):
    return json.loads(run_simulated(SIMULATED, request.path.parent).stdout)


def test_rows(differences):
    found, _, _ = differences
    assert {key.split()[0] for key in found} == set(kernel_cases())
    for key, (difference, limit) in found.items():
        assert difference <= limit, key


def test_gae(differences):
    _, found, _ = differences
    assert len(found) == 10
    assert all(difference < 1e-5 for difference in found)


def test_vtrace(differences):
    _, _, found = differences
    assert len(found) == 4
    assert all(difference < 1e-5 for difference in found)
