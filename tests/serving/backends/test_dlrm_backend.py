"""The recommendation model: its arithmetic, ragged lists fused and alone, and lists that are wrong."""

import numpy as np
import pytest
from backend_helpers import assert_fused_is_single, assert_only_fails, assert_phases_are_measured, open_backend, unaligned

from hurtle.errors import DeviceError, HurtleError
from hurtle.serving.backends.dlrm import DENSE, LENGTHS, OUTPUT, VALUES
from hurtle.serving.backends.dlrm_model import NUM_SPARSE, make_model
from hurtle.serving.backends.feature_lists import BAD_ID, FINE, NEGATIVE_LENGTH, WRONG_SUM, join, join_reference
from hurtle.serving.backends.pair_products import pair_products
from hurtle.serving.messages import InferRequest

ROWS = 50
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("dlrm") / "small.dlrm.npz"
    make_model(found, table_rows=ROWS, width=8, bottom=(16,), top=(24, 8), seed=3)
    return found


def ragged(rng, rows, most=4):
    """A request whose lists have 0 to `most` ids."""
    lengths = rng.integers(0, most + 1, NUM_SPARSE * rows).astype(np.int32)
    values = rng.integers(0, ROWS, lengths.sum()).astype(np.int32)
    return InferRequest("m", {DENSE: rng.standard_normal((rows, 13)).astype(np.float32), LENGTHS: lengths, VALUES: values})


def plain(path, inputs):
    """The model row by row, as it is written down in the paper."""
    weights = np.load(path)
    grid = inputs[LENGTHS].reshape(NUM_SPARSE, -1)
    ends = np.cumsum(grid.ravel()).reshape(grid.shape)
    scores = []
    for b, x in enumerate(inputs[DENSE].astype(np.float64)):
        for n in range(2):
            x = np.maximum(weights[f"bottom_{n}_weight"] @ x + weights[f"bottom_{n}_bias"], 0)
        features = [x]
        for f in range(NUM_SPARSE):
            ids = inputs[VALUES][ends[f, b] - grid[f, b] : ends[f, b]]
            features.append(weights[f"table_{f}"][ids].sum(0, dtype=np.float64))
        pairs = [features[i] @ features[j] for i in range(27) for j in range(i + 1, 27)]
        x = np.concatenate([x, pairs])
        for n in range(2):
            x = np.maximum(weights[f"top_{n}_weight"] @ x + weights[f"top_{n}_bias"], 0)
        scores.append(1 / (1 + np.exp(-(weights["top_2_weight"] @ x + weights["top_2_bias"])[0])))
    return np.array(scores)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp16", 0.02)])
def test_scores_are_those_of_the_paper(path, device, precision, tolerance):
    backend = open_backend(path, precision=precision, device=device)
    request = ragged(np.random.default_rng(1), 7)
    found = backend.infer(request)[OUTPUT]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, plain(path, request.inputs), rtol=tolerance, atol=tolerance)
    assert found.std() > 0.01
    message = {name: unaligned(array) for name, array in request.inputs.items()}
    np.testing.assert_array_equal(backend.infer(InferRequest("m", message))[OUTPUT], found)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("fp16", 2e-3)])
def test_fused_calls_give_what_single_calls_give(path, device, precision, tolerance):
    backend, rng = open_backend(path, precision=precision, device=device), np.random.default_rng(2)
    for sizes in ((1, 5, 0, 3, 100), (2, 2), (0, 0), (1,)):
        assert_fused_is_single(backend, [ragged(rng, rows) for rows in sizes], tolerance)
    assert_fused_is_single(backend, [ragged(rng, 3, most=0), ragged(rng, 2), ragged(rng, 1, most=0)], tolerance)
    assert_fused_is_single(backend, [ragged(rng, 3, most=0), ragged(rng, 2, most=0)], tolerance)


def test_metadata_is_the_contract_and_the_warm_up_runs(path):
    backend = open_backend(path)
    found = backend.metadata()
    assert [(spec.name, spec.datatype, spec.shape) for spec in found.inputs + found.outputs] == [
        ("float_features", "FP32", (-1, 13)),
        ("id_list_features.lengths", "INT32", (-1,)),
        ("id_list_features.values", "INT32", (-1,)),
        ("default", "FP32", (-1,)),
    ]
    assert not found.batched
    assert backend.rows(ragged(np.random.default_rng(0), 9)) == 9
    assert backend.infer(backend.warm_up_request())[OUTPUT].shape == (1,)


def test_lanes_share_the_tables_until_the_file_changes(tmp_path):
    path = tmp_path / "m.dlrm.npz"
    make_model(path, table_rows=2, seed=1)
    first, second, half = open_backend(path), open_backend(path), open_backend(path, precision="fp16")
    assert first._model is second._model
    assert first._model is not half._model
    make_model(path, table_rows=2, seed=2)
    changed = open_backend(path)
    request = changed.warm_up_request()
    assert changed.infer(request)[OUTPUT] != first.infer(request)[OUTPUT]


def change(request, name, at, value):
    array = request.inputs[name].copy()
    array[at] = value
    return InferRequest("m", {**request.inputs, name: array})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda r: change(r, LENGTHS, 30, -1), f"{LENGTHS!r}: expected lengths ≥ 0, got -1 at [30] (feature 15)."),
        (lambda r: change(r, LENGTHS, 0, 2**31 - 1), f"the sum of {LENGTHS!r}"),
        (
            lambda r: change(r, VALUES, 0, ROWS),
            f"{VALUES!r}: expected ids from 0 to {ROWS - 1} of feature 0, got {ROWS} at [0].",
        ),
        (lambda r: change(r, VALUES, -1, -5), f"of feature 25, got -5 at [{26 * 2 - 1}]."),
        (lambda r: InferRequest("m", {**r.inputs, VALUES: r.inputs[VALUES][1:]}), "expected 52 ids"),
        (lambda r: InferRequest("m", {**r.inputs, LENGTHS: r.inputs[LENGTHS][1:]}), "expected shape [52], 26 for each row"),
    ],
)
def test_only_the_request_with_bad_lists_fails(path, spoil, words):
    backend, rng = open_backend(path), np.random.default_rng(4)
    sound = InferRequest(
        "m",
        {
            DENSE: rng.standard_normal((2, 13)).astype(np.float32),
            LENGTHS: np.ones(52, np.int32),
            VALUES: rng.integers(0, ROWS, 52).astype(np.int32),
        },
    )
    requests = [ragged(rng, 3), spoil(sound), ragged(rng, 2)]
    results = backend.infer_batch(requests)
    assert_only_fails(results, bad=1, words=words)
    for n in (0, 2):
        np.testing.assert_allclose(results[n][OUTPUT], backend.infer(requests[n])[OUTPUT], rtol=1e-6)
    with pytest.raises(type(results[1]), match="id_list_features"):
        backend.infer(requests[1])


@pytest.mark.parametrize(("rows", "width", "start"), [(1, 1, 0), (5, 4, 0), (5, 4, 7), (33, 16, 2), (0, 8, 12)])
def test_pair_products_are_those_of_plain_numpy(rows, width, start):
    rng = np.random.default_rng(rows)
    dense, sums = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, width), (26, start + rows + 1, width)))
    out = np.full((rows, 351), np.nan, np.float32)
    pair_products(dense, sums, start, out)
    features = np.concatenate([dense[None], sums[:, start : start + rows]]).astype(np.float64)  # (27, b, D)
    upper = np.triu_indices(27, 1)
    np.testing.assert_allclose(out, (features[upper[0]] * features[upper[1]]).sum(-1).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_joined_lists_are_those_of_plain_numpy(seed):
    rng = np.random.default_rng(seed)
    features, requests = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    rows = rng.integers(0, 4, requests)
    lengths = [rng.integers(0, 4, features * count).astype(np.int32) for count in rows]
    values = [rng.integers(0, 9, part.sum()).astype(np.int32) for part in lengths]
    starts, limits = np.arange(features) * 9, np.full(features, 9)
    ids, offsets = (np.full(sum(map(len, parts)), -1, np.int32) for parts in (values, lengths))
    faults = np.full((requests, 4), -1)
    counts = np.array([len(part) for part in values])
    found = join(np.concatenate(lengths), np.concatenate(values), rows, counts, limits, starts, ids, offsets, faults)
    expected = join_reference(lengths, values, starts)
    assert found == (len(expected[1]), len(expected[0]))
    assert not faults[:, 0].any()
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_array_equal(offsets, expected[1])


def test_each_fault_is_told_apart_and_the_rest_is_joined():
    lengths = np.array([1, 1, 1, -1, 2, 1, 0, 2, 1, 1], np.int32)  # two features, a row each
    values = np.array([1, 2, 3, 4, 5, 1, 9, 5, 6], np.int32)
    rows, counts = np.ones(5, np.int64), np.array([2, 1, 2, 2, 2])
    ids, offsets, faults = np.zeros(9, np.int32), np.zeros(10, np.int32), np.zeros((5, 4), np.int64)
    found = join(lengths, values, rows, counts, np.array([9, 9]), np.array([0, 100]), ids, offsets, faults)
    assert faults[:, 0].tolist() == [FINE, NEGATIVE_LENGTH, WRONG_SUM, BAD_ID, FINE]
    assert faults[1].tolist() == [NEGATIVE_LENGTH, 1, 1, -1]
    assert faults[3].tolist() == [BAD_ID, 1, 1, 9]
    assert found == (4, 4)
    assert ids[:4].tolist() == [1, 5, 102, 106]


def test_files_that_are_no_model_are_refused(tmp_path, path):
    bad = tmp_path / "bad.dlrm.npz"
    bad.write_bytes(b"nothing")
    with pytest.raises(HurtleError, match=r"not an \.npz file"):
        open_backend(bad)
    weights = dict(np.load(path))
    np.savez(bad, **{**weights, "table_3": np.array([{"a": 1}], object)}, allow_pickle=True)
    with pytest.raises(HurtleError, match=r"not an \.npz file"):
        open_backend(bad)
    np.savez(bad, **{**weights, "top_1_weight": np.zeros((8, 5), np.float32)})
    with pytest.raises(HurtleError, match=r"'top_1_weight' must be floats of shape \[8, 24\], got float32 \[8, 5\]"):
        open_backend(bad)
    del weights["table_7"]
    np.savez(bad, **weights)
    with pytest.raises(HurtleError, match="'table_7'"):
        open_backend(bad)
    with pytest.raises(DeviceError):
        open_backend(path, device="cuda:99")


def test_preparing_inputs_and_extracting_outputs_are_timed(path):
    rng = np.random.default_rng(0)
    assert_phases_are_measured(open_backend(path), [ragged(rng, rows) for rows in (3, 2)])
