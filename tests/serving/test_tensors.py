"""Tensors on the wire: every datatype both ways, and everything that can be wrong with one."""

import ml_dtypes
import numpy as np
import pytest

from hurtle.errors import ServingError
from hurtle.serving.tensors import DTYPES, as_bytes_array, datatype_of, from_raw, from_values, to_raw, to_values

NUMBERS = [name for name in DTYPES if name != "BYTES"]


def sample(datatype):
    rng = np.random.default_rng(0)
    if datatype == "BYTES":
        return as_bytes_array([b"", b"abc", "grün".encode(), b"\0" * 5, b"x", b"yz"], (2, 3))
    if datatype == "BOOL":
        return rng.random((2, 3)) < 0.5
    dtype = DTYPES[datatype]
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, (2, 3), dtype, endpoint=True)
    return rng.normal(size=(2, 3)).astype(dtype)


@pytest.mark.parametrize("datatype", DTYPES)
def test_raw_bytes_come_back_as_they_were(datatype):
    array = sample(datatype)
    back = from_raw("x", datatype, (2, 3), to_raw(array))
    assert datatype_of(back.dtype) == datatype
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("datatype", DTYPES)
def test_lists_come_back_as_they_were(datatype):
    array = sample(datatype)
    back = from_values("x", datatype, (2, 3), to_values(array))
    np.testing.assert_array_equal(back, array)
    nested = [to_values(row) for row in array]
    np.testing.assert_array_equal(from_values("x", datatype, (2, 3), nested), array)


@pytest.mark.parametrize("datatype", NUMBERS)
def test_raw_bytes_are_little_endian_rows(datatype):
    array = sample(datatype)
    assert to_raw(array) == np.ascontiguousarray(array).tobytes()
    assert to_raw(array.T) == np.ascontiguousarray(array.T).tobytes()
    if array.dtype.kind in "iuf" and array.itemsize > 1:
        assert to_raw(array.astype(array.dtype.newbyteorder(">"))) == array.tobytes()


def test_bytes_have_their_length_before_them():
    assert to_raw(as_bytes_array([b"ab", b""], (2,))) == b"\x02\0\0\0ab\0\0\0\0"
    assert to_raw(np.array(["ü"])) == b"\x02\0\0\0\xc3\xbc"


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "said"),
    [
        ("FP32", (2, 2), b"\0" * 15, "'x'.*takes 16 bytes, got 15"),
        ("FP32", (-1,), b"", r"sizes ≥ 0, got \[-1\]"),
        ("FP32", (-2, -2), b"\0" * 16, "sizes ≥ 0"),
        ("FP32", (2**62, 2**62), b"", "sizes ≥ 0"),
        ("FP32", (0, -1), b"", "sizes ≥ 0"),
        ("FP32", (2**40, 2**40, 0), b"", "without values has sizes of at most 65,536"),
        ("FP32", (2**40, 0), b"", "without values"),
        ("FP32", (1,) * 33, b"\0" * 4, "at most 32 dimensions, got 33"),
        ("FLOAT", (1,), b"\0" * 4, "'FLOAT' is not one of"),
        ("BYTES", (1,), b"\x05\0\0\0abc", "element 0 claims 5 bytes, 3 follow"),
        ("BYTES", (1,), b"\xff\xff\xff\xffabc", "element 0 claims"),
        ("BYTES", (3,), b"\0\0\0\0\0\0\0", "takes 12 bytes or more, got 7"),
        ("BYTES", (1,), b"\0\0\0\0\0", "ends after 4 bytes, got 5"),
        ("BYTES", (2**40,), b"\0" * 8, "or more, got 8"),
    ],
)
def test_raw_bytes_that_do_not_fit_are_refused(datatype, shape, data, said):
    with pytest.raises(ServingError, match=said) as caught:
        from_raw("x", datatype, shape, data)
    assert caught.value.reason == "invalid_argument"


@pytest.mark.parametrize(
    ("datatype", "shape", "values", "said"),
    [
        ("INT32", (1,), [1.5], "expected INT32 values, got float 1.5"),
        ("INT8", (1,), [300], "out of the range of INT8"),
        ("UINT8", (1,), [-1], "out of the range of UINT8"),
        ("INT32", (1,), [True], "got bool True"),
        ("BOOL", (1,), [1], "expected BOOL values, got int 1"),
        ("FP32", (1,), ["1"], "got str '1'"),
        ("FP32", (1,), [None], "got NoneType"),
        ("FP32", (1,), [1e39], "out of the range of FP32"),
        ("FP16", (1,), [70000.0], "out of the range of FP16"),
        ("FP64", (1,), [10**400], "out of the range"),
        ("FP32", (2,), [1.0], "takes 2 values, got 1"),
        ("FP32", (2,), [[1.0, 2.0], [3.0, 4.0]], "longer"),
        ("FP32", (2, 2), [[1.0, 2.0], [3.0]], "ragged"),
        ("FP32", (2,), [[1.0], 2.0], "mixes"),
        ("FP32", (1,), "1", "expected a list of FP32 values, got str"),
        ("FP32", (1,), {"a": 1}, "got dict"),
        ("BYTES", (1,), [5], "expected BYTES values"),
    ],
)
def test_values_that_are_not_the_datatype_are_refused(datatype, shape, values, said):
    with pytest.raises(ServingError, match=said):
        from_values("x", datatype, shape, values)


def test_nesting_without_end_is_refused():
    deep = [1.0]
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ServingError, match="nested deeper"):
        from_values("x", "FP32", (1,), deep)


def test_large_integers_are_exact():
    values = [2**64 - 1, 0, 2**63 + 1]
    assert from_values("x", "UINT64", (3,), values).tolist() == values
    assert from_values("x", "INT64", (2,), [-(2**63), 2**63 - 1]).tolist() == [-(2**63), 2**63 - 1]


def test_booleans_are_zero_or_not():
    assert from_raw("x", "BOOL", (3,), b"\0\x01\xff").tolist() == [False, True, True]


def test_half_precision_values_become_plain_numbers():
    assert to_values(np.array([1.5], ml_dtypes.bfloat16)) == [1.5]
    assert to_values(np.array([0.5], np.float16)) == [0.5]
